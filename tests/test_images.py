"""Images: as transformers reads and cuts them, to the last bit;
and nothing that strangers send gets further than a RequestError"""
import base64,io,math,sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy as np
import pytest
from PIL import Image
from hypothesis import given,settings,strategies as st
from starlette.testclient import TestClient
from atlas.text import images
from atlas.text.chat import ChatTemplate
from atlas.ground.core import RequestError
from atlas.model.families.vision import mrope_positions
from atlas.text.images import ImageSpec,ImageLimits,expand_images,fit,load_image
from atlas.text.images import place_images,prepare_images,preprocess,resize,taps
from atlas.use.llm import LLM
from atlas.ops.sample import SamplingParams
from atlas.ground.patches import tokens_of
from atlas.service.server import create_app
sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from inprocess import loaded  # noqa: E402
from seeing import seeing_model  # noqa: E402

data = Path(__file__).parent/'data'
ref = dict(np.load(data/'images'/'images.npz'))  # by make_images.py beside it
few = settings(max_examples=80, deadline=None)
def each(name):
    return pytest.mark.parametrize('i', [int(k[len(name):]) for k in ref if k.startswith(name)])
def url(b, media='image/png'): return f'data:{media};base64,{base64.b64encode(b).decode()}'

# ---- the same numbers as the library that models are trained with

@each('from')
def test_resize_is_torchvisions(i):
    y = ref[f'to{i}']
    assert (resize(ref[f'from{i}'], *y.shape[:2])==y).all()

@each('image')
def test_preprocess_is_transformers(i):
    clip = images._CLIP
    norm = {} if i==0 else dict(mean=clip['image_mean'], std=clip['image_std'])
    spec = ImageSpec(None, *ref[f'spec{i}'].tolist(), **norm) # patch, merge, frames, least, most
    pixels,grid = preprocess(ref[f'image{i}'], spec)
    assert list(grid)==ref[f'grid{i}'].tolist()
    assert pixels.dtype==np.float32
    assert (pixels==ref[f'pixels{i}']).all()

@each('file')
def test_load_is_transformers(i):
    got = load_image(ref[f'file{i}'].tobytes()).astype(int)
    want = ref[f'rgb{i}']
    assert got.shape==want.shape
    # decoders of JPEG may differ in the last bit
    assert (
        abs(got-want).max()
        <=(2 if ref[f'file{i}'][0]==0xff else 0))

@few
@given(n=st.integers(1, 3000), m=st.integers(1, 3000))
def test_taps_are_weights(n, m):
    at,w,bits = taps(n, m)
    assert at.shape==w.shape==(m,w.shape[1])
    assert at.min()>=0
    assert at.max()<n
    assert abs(w).max()<1<<15
    assert abs(w.sum(1)-(1<<bits)).max()<=w.shape[1]//2+1

@few
@given(
    h=st.integers(1, 20000), w=st.integers(1, 20000),
    step=st.sampled_from([28,32]),
    low=st.integers(1, 10**6),
    more=st.integers(0, 10**7))
def test_sizes_fit(h, w, step, low, more):
    if max(h, w)>200*min(h, w):
        return
    H,W = fit(h, w, step, low, low+more)
    assert H%step==W%step==0
    assert min(H, W)>=step
    assert (
        H*W<=max(low+more, step*max(H, W))
        or H*W<=(math.sqrt(low)+step)**2*201)
    if (
        low<=H*W<=low+more
        and low<=h*w<=low+more
        and min(h, w)>=8*step):
        assert .8<(H/W)/(h/w)<1.25

# ---- what strangers send

def file_of(im, kind, **kw):
    "A picture as the bytes of a file"
    b = io.BytesIO()
    im.save(b, kind, **kw)
    return b.getvalue()

def files():
    rng = np.random.default_rng(0)
    y,x = np.mgrid[:24,:40]
    a = np.stack([x*6, y*10, rng.integers(0, 256, (24,40))], -1).astype(np.uint8)
    rgb = Image.fromarray(a)
    e = Image.Exif()
    e[0x112] = 5
    return {
        'png':file_of(rgb, 'PNG', exif=e),
        'palette':file_of(rgb.convert('P'), 'PNG'),
        'jpeg':file_of(rgb, 'JPEG', exif=e),
        'progressive':file_of(rgb, 'JPEG', progressive=True),
        'cmyk':file_of(rgb.convert('CMYK'), 'JPEG'),
        'webp':file_of(rgb, 'WEBP'),
        'gif':file_of(rgb, 'GIF', save_all=True, append_images=[rgb.rotate(90)]),
        'bmp':file_of(rgb, 'BMP'),
        'bmp8':file_of(rgb.convert('P'), 'BMP')}
FILES = files()
kinds = pytest.mark.parametrize('kind', FILES)
SMALL = ImageLimits(nbytes=1<<20, pixels=1<<18)

def survives(b):
    "An image within bounds, or a RequestError that names it"
    try:
        a = load_image(b, 'x', SMALL)
    except RequestError as e:
        assert e.status==400
        assert e.param=='x'
        assert len(str(e))<600
        return False
    assert a.dtype==np.uint8
    assert a.ndim==3
    assert a.shape[2]==3
    assert 0<a.shape[0]*a.shape[1]<=SMALL.pixels
    return True

@kinds
def test_sound_files_load(kind):
    assert survives(FILES[kind])

@kinds
@few
@given(d=st.data())
def test_damaged_files(kind, d):
    "Bytes changed, cut off, repeated or put in"
    b = bytearray(FILES[kind])
    for _ in range(d.draw(st.integers(1, 4))):
        damage(b, d.draw)
    survives(bytes(b))

def damage(b, draw):
    places = st.integers(0, len(b))
    i,j = sorted((draw(places), draw(places)))
    how = draw(st.sampled_from(['set','cut','drop','repeat','insert']))
    if how=='set' and i<len(b):
        b[i] = draw(st.sampled_from([0, 1, 127, 128, 255]))
    elif how=='cut':
        del b[j:]
    elif how=='drop':
        del b[i:min(j, i+9)]
    elif how=='repeat':
        b[i:i] = b[i:min(j, i+200)]
    else:
        b[i:i] = draw(st.binary(max_size=12))

@kinds
def test_cut_files_are_refused(kind):
    "A file that ends inside its pixels is no image"
    for share in (0, .05, .3, .4):
        assert not survives(FILES[kind][:int(len(FILES[kind])*share)])

@few
@given(b=st.binary(max_size=300))
def test_noise_is_refused(b):
    assert not survives(b)

@few
@given(s=st.one_of(
    st.text(max_size=60),
    st.text(max_size=40).map(lambda s: 'data:'+s),
    st.text(max_size=40).map(lambda s: 'data:image/png;base64,'+s),
    st.binary(max_size=60).map(url)))
def test_urls_are_refused(s):
    with pytest.raises(RequestError):
        load_image(s)

def test_bombs():
    def png(w, h):
        b = io.BytesIO()
        Image.new('1', (w,h)).save(b, 'PNG')
        return b.getvalue()
    for b,why in (
        (png(9000,9000),'9,000 × 9,000'),
        (png(201,1),'201 × 1'),
        (b'\0'*((32<<20)+1),'33,554,432 bytes'),
        (FILES['progressive'][:-2]+b'\xff\xda'*65,'scans')):
        with pytest.raises(RequestError, match=why):
            load_image(b)
    assert load_image(png(200,1)).shape==(1,200,3)
    with pytest.raises(RequestError, match='33,554,432 bytes'):
        load_image('data:image/png;base64,'+'A'*(50<<20))

def test_kinds_are_checked():
    for b,media in (
        (FILES['jpeg'],'image/png'),
        (FILES['png'],'image/jpeg'),
        (FILES['png'],'text/html'),
        (b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n','image/png')):
        with pytest.raises(RequestError):
            load_image(url(b, media))
    assert (load_image(url(FILES['png']))==load_image(FILES['png'])).all()
    b = io.BytesIO()
    Image.new('RGB', (9,9)).save(b, 'TIFF')
    with pytest.raises(RequestError, match='no image that Atlas reads'):
        load_image(b.getvalue())

# ---- messages

json_like = st.recursive(
    st.none()|st.booleans()|st.integers(0, 9)
    |st.text(max_size=6),
    lambda s: st.lists(s, max_size=3)
    |st.dictionaries(
        st.sampled_from(['type','image_url','url','image','path','text','role','content']),
        s,
        max_size=3),
    max_leaves=12)
part = st.dictionaries(
    st.sampled_from(['image_url','url','image','path','base64','text']),
    json_like,
    max_size=3).flatmap(
    lambda d: st.sampled_from([
        'image', 'image_url', 'input_image', 'text',
        'x']).map(lambda t: d|dict(type=t)))

@few
@given(messages=st.one_of(
    json_like,
    st.lists(
        st.fixed_dictionaries(dict(
            role=st.just('user'),
            content=st.lists(part|json_like, max_size=3))),
        max_size=3)))
def test_no_message_opens_a_file(messages):
    real,images._file = images._file,None  # opening a file would be a TypeError
    try:
        got,found = prepare_images(messages)
    except RequestError as e:
        assert e.param.startswith('messages')
    else:
        assert found==[]
    finally:
        images._file = real

def test_a_template_may_show_fewer():
    "An image that gets lost on the way to the prompt is noticed"
    spec = ImageSpec(token=7, min_pixels=1024)
    msgs,imgs = prepare_images([
        dict(
            role='user',
            content=[
                dict(type='text', text='a'),
                dict(type='image_url', image_url=url(FILES['png']))])])
    blind = ChatTemplate(
        "{% for m in messages %}{% for p in m.content %}{% if p.type=='text' %}{{ p.text "
        "}}{% endif %}{% endfor %}{% endfor %}")
    assert blind.render(msgs)=='a'
    with pytest.raises(RequestError, match='0 image tokens for 1 images'):
        place_images([1], imgs, spec)
    ids,pics = place_images([1,7,2], imgs, spec)
    assert ids.count(7)==tokens_of(pics[0][1])
    assert len(pics[0][0])==math.prod(pics[0][1])

grids = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 6)).map(lambda g: (1,2*g[0],2*g[1])),
    max_size=4)

def laid_out(grids, gaps):
    "Ids of a prompt with images of these grids, so many words between them, and their positions"
    ids = [1]*gaps[-1]
    for g,n in zip(grids, gaps):
        ids += [90]+[1]*n
    full = expand_images(ids, 90, [tokens_of(g) for g in grids])
    return full,*mrope_positions(full, 90, grids)

prompts = given(grids=grids, gaps=st.lists(st.integers(0, 5), min_size=5, max_size=5))

@few
@prompts
def test_positions_of_prompts(grids, gaps):
    """Every token of an image has its own place, nothing before it has passed it, and words go on
    behind it"""
    full,pos,delta = laid_out(grids, gaps)
    assert pos.shape==(3,len(full))
    assert len({*map(tuple, pos.T)})==len(full)
    words = np.array(full)==1
    assert (pos[:,words]==pos[0,words]).all()
    assert (np.diff(pos[0])>=0).all()
    assert all(pos[:,i].min()>pos[:,:i].max(initial=-1) for i in np.flatnonzero(words))
    if full:
        end = pos.max()+1
        assert end==len(full)+delta==words.sum()+sum(max(g)//2 for g in grids)

@few
@prompts
def test_positions_of_the_first_image(grids, gaps):
    "It begins behind the words before it, and has its rows and columns"
    if not grids:
        return
    full,pos,_ = laid_out(grids, gaps)
    grid = grids[0]
    i = full.index(90)
    h,w = grid[1]//2,grid[2]//2
    p = pos[:,i:i+tokens_of(grid)]-pos[:,i:i+1]
    assert [int(r.max()) for r in p]==[grid[0]-1, h-1, w-1]
    assert pos[0,i]==gaps[-1]

# ---- in a model

@pytest.fixture(scope='module')
def folder(tmp_path_factory): return seeing_model(tmp_path_factory.mktemp('sees')/'vl')

@pytest.fixture(scope='module')
def llm(folder): return LLM(str(folder), device='cpu', max_seq_len=64)

def test_llm_sees(llm, tmp_path):
    "The way an image comes does not matter, what it shows does"
    tok = llm.config.vision.image_token_id
    ids = [3,tok,4,5]
    png = FILES['png']
    (tmp_path/'a.png').write_bytes(png)
    a = llm.logits(ids, images=[png])
    for src in (
        tmp_path/'a.png', str(tmp_path/'a.png'), url(png), Image.open(tmp_path/'a.png'),
        load_image(png)):
        assert (llm.logits(ids, images=[src])==a).all()
    n = len(a)-3
    assert 1<=n<=6
    assert (llm.logits([3]+[tok]*n+[4,5], images=[png])==a).all()
    other = llm.logits(ids, images=[255-load_image(png)])
    assert abs(other-a)[-1].max()>1e-3

@pytest.mark.parametrize(
    'images', [[], [FILES['png']]*2, ['http://x/y.png'], [b'x']], ids=['none','two','far','bad'])
def test_llm_refuses(llm, images):
    with pytest.raises(RequestError):
        llm.logits([3,llm.config.vision.image_token_id,4,5], images=images)

def test_a_blind_model():
    blind = LLM(str(data/'smollm2-tied'), device='cpu')
    with pytest.raises(RequestError, match='only text'):
        blind.logits([3,4], images=[FILES['png']])

def talks():
    "Conversations with a picture, with its negative, with none and with two"
    negative = file_of(Image.fromarray(255-load_image(FILES['jpeg'])), 'PNG')
    def seen(f, kind):
        return [
            dict(type='text', text='w3 w4'),
            dict(type='image_url', image_url=dict(url=url(f, kind)))]
    asked = seen(FILES['jpeg'], 'image/jpeg'),seen(negative, 'image/png'),'w3 w4',asks_two()
    return [[dict(role='user', content=c)] for c in asked]

def rounded(logprobs, digits):
    return tuple(round(x, digits) for x in logprobs)

def ask(c, messages):
    asked = dict(messages=messages, temperature=0, max_tokens=6, logprobs=True)
    return c.post('/v1/chat/completions', json=asked)

@pytest.fixture
def served(folder):
    "A client of the model, in a service of its own"
    other = LLM(str(folder), device='cpu', max_seq_len=64)
    with TestClient(create_app(loaded(other, ['vl']))) as c:
        yield c

def test_served_images(served, llm):
    """Through HTTP as in the notebook; requests with other images, and with none, do not disturb
    each other"""
    turns = talks()
    plain = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
    want = [llm.chat(t, plain) for t in turns]
    said = [[t.logprob for t in o.logprobs] for o in want]
    assert len({rounded(x, 4) for x in said})==len(want)
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda t: ask(served, t), turns*2))
    for r,o,x in zip(got, want*2, said*2):
        assert r.status_code==200
        assert r.json()['usage']['prompt_tokens']==o.usage['prompt_tokens']
        told = r.json()['choices'][0]['logprobs']['content']
        assert rounded([t['logprob'] for t in told], 6)==rounded(x, 6)

def test_too_many_images(served):
    content = talks()[0][0]['content']*30
    long = ask(served, [dict(role='user', content=content)])
    assert long.status_code==400
    assert long.json()['error']['code']=='context_length_exceeded'

def asks_two():
    return [
        dict(type='image_url', image_url=url(FILES['png'])),
        dict(type='text', text=' w5 '),
        dict(type='input_image', image_url=url(FILES['gif'], 'image/gif'))]
