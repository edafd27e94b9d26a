"""What images put into a prompt: the same bits whatever other images are there, computed
when a step needs them, and once; a tower that finds no memory ends its own request alone"""
import gc,math
from weakref import ref
import numpy as np
import pytest
from hypothesis import given,settings,strategies as st
from atlas.card.emulator import find_cxx
from atlas.engine.cache import KVCache
from atlas.engine.engine import Engine
from atlas.engine.scheduler import Scheduler
from atlas.engine.stepper import HostStepper
from atlas.ground.core import RequestError
from atlas.ground.patches import tokens_of
from atlas.ground.requests import Request,SamplingParams
from atlas.model.families.vision import image_rows
from atlas.model.media import LazyImage,image_digests
from atlas.service.link import Frames,frame,pack_images,pack_request,unpack_images,unpack_request
from helpers.reference import Run,having,host,model
from helpers.small_engine import interrupted,note,said
from test_card import TOYS,_GDN,engine as card_engine,models

NAMES = having('pixels')
each = pytest.mark.parametrize('name', NAMES)
either_way = pytest.mark.parametrize('late', [False,True])
SIZES = '1x1 1x2 2x1 2x3 3x5 4x4 5x7 8x9 11x13' # Height and width in tokens
COMPANY = '2x3','7x5','4x4 1x1','3x6 9x8'
few = settings(max_examples=60, deadline=None)

def image(m, h, w, seed=0, frames=1):
    "A picture of `h` × `w` tokens, as a request has it"
    merge = m.c.vision.merge_size
    weight = m.vision.patch_embed.proj.weight
    grid = frames,h*merge,w*merge
    rng = np.random.default_rng([h, w, seed])
    pixels = rng.standard_normal((math.prod(grid), weight.shape[1]))
    return pixels.astype('f4'),grid

def pictures(m, sizes):
    "One of each of `sizes`, no two alike"
    out = []
    for size in sizes.split():
        h,w = map(int, size.split('x'))
        out.append(image(m, h, w, seed=len(out)))
    return out

def grids_of(images): return [g for _,g in images]
def pixels_of(images): return np.concatenate([p for p,_ in images])

def prompt_of(m, images, words=5):
    "`words` in front of each picture and behind the last"
    rng,v = np.random.default_rng(words),m.c.vision
    def text(): return rng.integers(0, 90, words).tolist()
    ids = text()
    for g in grids_of(images):
        ids += [v.image_token_id]*tokens_of(g, v.merge_size)
        ids += text()
    return ids

def same(a, b):
    "Are features the same to the bit, those of each level too?"
    a,b = ([rows,*deep] for rows,deep in (a,b))
    return all(map(np.array_equal, a, b)) and len(a)==len(b)

def cut(features, lo, n):
    rows,deep = features
    part = slice(lo, lo+n)
    return rows[part],[d[part] for d in deep]

def noting(m, monkeypatch, fault=lambda grid: None):
    "The grids that the tower of `m` looks at from now on; `fault(grid)` may raise"
    seen,real = [],m.vision.forward
    def forward(pixels, grids):
        seen.extend(grids)
        for g in grids:
            fault(g)
        return real(pixels, grids)
    monkeypatch.setattr(m.vision, 'forward', forward)
    return seen

# ---- bits

def among(m, others, i, mine):
    "What the tower makes of `mine` as image `i` among `others`"
    images,merge = list(others),m.c.vision.merge_size
    images.insert(i, mine)
    seen = m.vision.forward(pixels_of(images), grids_of(images))
    sizes = [tokens_of(g, merge) for g in grids_of(images)]
    return cut(seen, sum(sizes[:i]), sizes[i])

def depends(m, others):
    "Which pictures of all sizes are not the same among `others` as alone, and where"
    bad = []
    for mine in pictures(m, SIZES):
        alone = m.vision.forward(mine[0], [mine[1]])
        for i in range(len(others)+1):
            seen = among(m, others, i, mine)
            if not same(seen, alone):
                bad.append((mine[1],i))
    return bad

@each
@pytest.mark.parametrize('company', COMPANY)
def test_other_images_change_no_bit(name, company):
    m = model(name)
    assert depends(m, pictures(m, company))==[]

def test_company_would_be_seen(monkeypatch):
    "Patches of all images in one product: rows at the edges of its strips have other bits"
    m = model('qwen3-vl')
    tower = type(m.vision)
    def of_all(self, pixels, grids):
        proj = self.patch_embed.proj
        x = np.matmul(pixels, proj.weight.T)
        deep = [x[::4]]*len(self._v.deepstack)
        return x[::4],deep
    monkeypatch.setattr(tower, 'forward', of_all)
    assert depends(m, pictures(m, '7x5'))

@each
def test_where_pixels_lie_changes_no_bit(name):
    "Arrays from a link begin anywhere in memory, and may be views"
    m = model(name)
    for pixels,grid in pictures(m, SIZES):
        want = m.vision.forward(pixels, [grid])
        room = np.zeros(pixels.nbytes+64, np.uint8)
        for at in (1,2,4,8,12,32):
            raw = room[at:at+pixels.nbytes]
            moved = raw.view('f4').reshape(pixels.shape)
            moved[:] = pixels
            assert same(m.vision.forward(moved, [grid]), want), at
        turned = np.asfortranarray(pixels)
        assert same(m.vision.forward(turned, [grid]), want)

@each
def test_a_film_is_its_frames(name):
    m = model(name)
    pixels,grid = image(m, 3, 5, frames=2)
    both = m.vision.forward(pixels, [grid])
    single = 1,*grid[1:]
    for i,frame in enumerate(np.split(pixels, 2)):
        one = m.vision.forward(frame, [single])
        assert same(cut(both, i*15, 15), one)

# ---- looked at when it is needed, and once

def going_on(m, ids, images, media):
    "What computes the logits behind the first tile, which is in the cache already"
    run,before = Run(m),m.media(ids, images)
    run(ids[:64], 0, True, before)
    return lambda: run(ids[64:], 64, True, media)

@each
@pytest.mark.parametrize('cut', [False,True])
def test_known_images_are_not_looked_at(name, cut, monkeypatch):
    "The logits are those of the whole prompt; an image that the tile's end cuts is looked at"
    m = model(name)
    images = pictures(m, '4x5 1x7 6x7' if cut else '4x5 1x3 6x7')
    left = 1+cut
    ids = prompt_of(m, images, 20)
    whole = Run(m).prefill(ids, m.media(ids, images))
    media = m.media(ids, images)
    rest = going_on(m, ids, images, media)
    seen = noting(m, monkeypatch)
    assert np.array_equal(rest(), whole[64:])
    assert seen==grids_of(images)[-left:]
    assert sum(i.seen for i in media.images)==left

@each
def test_chunks_look_once(name, monkeypatch):
    "An image that three chunks have rows of, and two whole ones in one chunk"
    m = model(name)
    images = pictures(m, '2x2 3x3 11x13')
    ids = prompt_of(m, images)
    whole = Run(m).prefill(ids, m.media(ids, images))
    seen = noting(m, monkeypatch)
    media = m.media(ids, images)
    chunks = Run(m).chunks(ids, 64, media)
    assert np.array_equal(chunks, whole)
    assert seen==grids_of(images)

def test_pixels_go_when_they_were_looked_at():
    m = model('qwen35-dense')
    pixels,grid = image(m, 3, 4)
    gone = ref(pixels)
    lazy = LazyImage(m.vision, pixels, grid)
    del pixels
    gc.collect()
    assert gone() is not None
    first = lazy.features()
    gc.collect()
    assert gone() is None
    assert lazy.features() is first

def test_an_image_is_as_it_was_after_a_failure(monkeypatch):
    m = model('qwen35-dense')
    pixels,grid = image(m, 3, 4)
    want = m.vision.forward(pixels, [grid])
    lazy,faults = LazyImage(m.vision, pixels, grid),[MemoryError,KeyboardInterrupt]
    def fault(grid):
        if faults:
            raise faults.pop(0)
    noting(m, monkeypatch, fault)
    for e in tuple(faults):
        with pytest.raises(e):
            lazy.features()
        assert not lazy.seen
    assert same(lazy.features(), want)

FAULTS = {
    'fewer patches': lambda p,t,h,w: (p[1:],(t,h,w)),
    'an odd height': lambda p,t,h,w: (p,(t,h+1,w)),
    'four numbers': lambda p,t,h,w: (p,(t,t,h,w)),
    'another type': lambda p,t,h,w: (p.astype('f8'),(t,h,w)),
    'no frames': lambda p,t,h,w: (p[:0],(0,h,w))}

def refusing(m, ids, *images):
    with pytest.raises(RequestError):
        m.media(ids, images)

@each
@pytest.mark.parametrize('fault', FAULTS)
def test_what_is_wrong_is_refused_at_once(name, fault):
    m = model(name)
    pixels,grid = good = image(m, 2, 3)
    ids = prompt_of(m, [good])
    refusing(m, ids, FAULTS[fault](pixels, *grid))

def test_tokens_of_other_images_are_refused():
    m = model('qwen3-vl')
    good = image(m, 2, 3)
    ids = prompt_of(m, [good])
    refusing(m, [*ids, *ids], good)
    refusing(m, ids, good, good)
    assert m.media(ids, []) is None

# ---- in an engine

def engine(m, late=False, seqs=3, chunk=128, **kw):
    cache = KVCache(m.c, host, 48, num_states=2*seqs)
    scheduler = Scheduler(cache.pool, seqs, 256, chunk=chunk, **kw)
    return Engine(scheduler, HostStepper(m, cache, late))

def ask(m, i, images=(), most=8, words=5):
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, logprobs=1)
    ids = prompt_of(m, images, words)
    return Request(f'r{i}', tuple(ids), params, images=tuple(images))

def begun(e, r, steps):
    "Events of `r` in its first steps"
    e.add(r)
    out = {}
    for _ in range(steps):
        note(e.step(), out)
    return out

def serve(e, requests, out=None):
    "Events of each request, after those in `out`; all are added before the next step"
    out = {} if out is None else out
    for r in requests:
        e.add(r)
    while e.has_work:
        note(e.step(), out)
    assert e.scheduler.pool.used==0
    assert not e._samplers
    gc.collect()
    assert not e._images
    return out

def alone(m, r):
    "What is said when nothing else exists"
    return said(serve(engine(m), [r])[r.id])

@each
@either_way
def test_choices_look_once(name, late, monkeypatch):
    "Answers share what is seen of the same arrays, also one that comes later"
    m = model(name)
    images = pictures(m, '2x3 4x5')
    asked = [ask(m, i, images, words=5+i) for i in range(2)]
    want = [alone(m, r) for r in asked]
    seen = noting(m, monkeypatch)
    e = engine(m, late)
    out = begun(e, asked[0], 3)
    serve(e, asked[1:], out)
    assert seen==grids_of(images)
    assert [said(out[r.id]) for r in asked]==want

@either_way
def test_images_of_one_size_are_not_one_image(late):
    "Requests with the same tokens and other pixels, at once"
    m = model('qwen3-vl')
    two = pictures(m, '4x5 4x5')
    asked = [ask(m, i, two[i:i+1]) for i in range(2)]
    assert asked[0].prompt==asked[1].prompt
    want = [alone(m, r) for r in asked]
    assert want[0]!=want[1]
    out = serve(engine(m, late), asked)
    assert [said(out[r.id]) for r in asked]==want

@either_way
def test_a_request_in_the_engine_has_no_pixels(late):
    "They go as images are looked at, though the request goes on"
    m = model('qwen35-dense')
    images = pictures(m, '2x3 11x13')
    held = [ref(p) for p,_ in images]
    grids = grids_of(images)
    e,left = engine(m, late, chunk=64),[]
    e.add(ask(m, 0, images, words=30))
    del images
    kept = e.scheduler.seqs['r0'].request.images
    assert kept==tuple((None,g) for g in grids)
    while e.has_work:
        e.step()
        gc.collect()
        left.append(sum(r() is not None for r in held))
    assert left[0]==1
    assert not any(left[1:])

def test_a_request_that_leaves_takes_its_pixels_along():
    m = model('qwen35-dense')
    images = [image(m, 2, 3)]
    held = ref(images[0][0])
    e = engine(m)
    e.add(ask(m, 0, images))
    del images
    e.abort('r0')
    gc.collect()
    assert held() is None
    assert not e._images

def refused(e, ids, *images):
    "Why"
    params = SamplingParams(temperature=0)
    r = Request('bad', tuple(ids), params, images=images)
    with pytest.raises(RequestError) as found:
        e.add(r)
    assert not e.has_work
    assert not e._samplers
    assert not e._images
    return str(found.value)

def test_wrong_images_are_refused_when_they_come(monkeypatch):
    "And nobody has looked"
    m = model('qwen35-dense')
    e,seen = engine(m),noting(m, monkeypatch)
    p,g = image(m, 2, 3)
    ids = prompt_of(m, [(p,g)])
    assert 'image tokens' in refused(e, [1,2], (p,g))
    assert 'shape' in refused(e, ids, (p[1:],g))
    blind = engine(model('smollm2-tied'))
    assert 'cannot see' in refused(blind, [1,2], (p,g))
    assert seen==[]

class failing:
    "No memory for one grid"
    def __init__(self, grid):
        self.grid = grid
    def __call__(self, grid):
        if grid==self.grid:
            raise MemoryError

@each
@either_way
def test_images_without_memory(name, late, monkeypatch):
    "That request ends, by name; others go on, decoding or in the same step"
    m = model(name)
    images = pictures(m, '2x3 1x2 7x9')
    first = ask(m, 0, most=20)
    second = ask(m, 1, images[:1])
    want = alone(m, first),alone(m, second)
    noting(m, monkeypatch, failing(images[2][1]))
    e = engine(m, late)
    out = begun(e, first, 3)
    serve(e, [second, ask(m, 2, images[1:])], out)
    ended, = out['r2']
    assert ended.code=='out_of_memory'
    assert 'look at the images' in ended.error
    assert (said(out['r0']),said(out['r1']))==want
    assert e.scheduler.finished=={'length':2, 'error':1}

@either_way
def test_a_later_image_without_memory(late, monkeypatch):
    "The first chunk is computed by then; what it took comes back, and another try may find memory"
    m = model('qwen35-dense')
    images = pictures(m, '5x6 9x11')
    first,again = (ask(m, i, images, words=30) for i in range(2))
    want = alone(m, again)
    fault = failing(images[1][1])
    seen = noting(m, monkeypatch, fault)
    e = engine(m, late, chunk=64)
    out = serve(e, [first])
    assert [v.code for v in out['r0']]==['out_of_memory']
    assert e.scheduler.totals['prefill_tokens']==64
    assert seen==grids_of(images)
    fault.grid = None
    assert said(serve(e, [again])['r1'])==want

@either_way
def test_choices_without_memory(late, monkeypatch):
    "All answers to the prompt end, and nobody else"
    m = model('qwen35-dense')
    images = pictures(m, '2x3')
    other = ask(m, 5, most=12)
    want = alone(m, other)
    noting(m, monkeypatch, failing(images[0][1]))
    choices = [ask(m, i, images) for i in range(2)]
    out = serve(engine(m, late), [*choices, other])
    for i in range(2):
        assert [v.code for v in out[f'r{i}']]==['out_of_memory']
    assert said(out['r5'])==want

@either_way
def test_interrupted_while_it_looks(late, monkeypatch):
    "The next step looks again, and the answer is the same"
    m = model('qwen35-dense')
    r = ask(m, 0, pictures(m, '2x3 4x5'))
    want = alone(m, r)
    e = engine(m, late)
    calls = interrupted(m.vision, 'frame', 2)
    try:
        e.add(r)
        with pytest.raises(KeyboardInterrupt):
            e.step()
        out = {}
        while e.has_work:
            note(e.step(), out)
    finally:
        del m.vision.frame
    assert calls()==3
    assert said(out['r0'])==want

@either_way
def test_a_preempted_prompt_looks_once(late, monkeypatch):
    "What was seen stays with the request, through preemption and back"
    m = model('qwen35-dense')
    images = pictures(m, '6x9')
    low = ask(m, 0, images, most=30)
    want = alone(m, low)
    seen = noting(m, monkeypatch)
    e = engine(m, late, seqs=1)
    out = begun(e, low, 5)
    params = SamplingParams(temperature=0, max_tokens=3)
    first = Request('first', (1,2,3), params, priority=-1)
    serve(e, [first], out)
    assert e.scheduler.totals['preemptions']==1
    assert seen==grids_of(images)
    assert said(out['r0'])==want

# ---- on a card, whose tower is on the host

_TOWER = dict(depth=2, hidden_size=32, num_heads=2, intermediate_size=48,
    out_hidden_size=128, patch_size=4, num_position_embeddings=16,
    deepstack_visual_indexes=[])
_SEES = dict(vision_config=_TOWER, image_token_id=250, mtp_num_hidden_layers=0)

@pytest.fixture
def on_card(monkeypatch):
    "A model that sees, on the emulator"
    monkeypatch.setitem(TOYS, 'sees', ('qwen3.6-27b', _GDN|_SEES))
    return models('sees', 'bf16')[1]

need_cxx = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')

def card_says(m, r, **kw):
    return said(serve(card_engine(m, **kw), [r])[r.id])

@need_cxx
def test_chunks_on_a_card(on_card):
    "In company they say what the whole prompt says alone"
    m = on_card
    asked = ask(m, 0, pictures(m, '2x3 5x6 3x2'), words=20),ask(m, 1)
    want = [card_says(m, r, chunk=128) for r in asked]
    out = serve(card_engine(m, chunk=64), asked)
    assert [said(out[r.id]) for r in asked]==want

@need_cxx
def test_no_memory_on_a_card(on_card, monkeypatch):
    "The request whose images find none ends while another decodes"
    m = on_card
    images = pictures(m, '2x3 5x6')
    other = ask(m, 1, words=9)
    want = card_says(m, other)
    noting(m, monkeypatch, failing(images[1][1]))
    e = card_engine(m)
    out = begun(e, other, 3)
    serve(e, [ask(m, 0, images)], out)
    assert [v.code for v in out['r0']]==['out_of_memory']
    assert said(out['r1'])==want

# ---- names of images, and rows

shapes = st.sampled_from('4x6 6x4 2x12 24x1'.split())
grids = st.sampled_from('1x2x2 1x4x1 2x2x1 1x1x4'.split())
kinds = st.sampled_from('<f4 >f4 <i4 <u4'.split())
drawn = st.tuples(st.integers(0, 3), shapes, kinds, grids)

def picture(what):
    "The image that a drawn description is of"
    seed,*rest = what
    shape,kind,grid = rest
    raw = np.random.default_rng(seed).bytes(96)
    shape,grid = ([int(n) for n in x.split('x')]
        for x in (shape,grid))
    return np.frombuffer(raw, kind).reshape(shape),grid

@few
@given(st.lists(drawn, min_size=2, max_size=6))
def test_digests_tell_images_apart(all_):
    "Equal exactly where bytes, type, shape and grid are"
    names = image_digests([picture(w) for w in all_])
    assert {len(n) for n in names}=={16}
    named = [*zip(all_, names)]
    for a,x in named:
        for b,y in named:
            assert (a==b)==(x==y)

@few
@given(st.data())
def test_one_byte_is_another_image(data):
    pixels,grid = picture(data.draw(drawn))
    changed = pixels.copy()
    at = data.draw(st.integers(0, changed.nbytes-1))
    raw = changed.reshape(-1).view(np.uint8)
    raw[at] ^= data.draw(st.integers(1, 255))
    one,two = image_digests([(pixels,grid), (changed,grid)])
    assert one!=two

def test_digests_are_known():
    "A cache on disk is found again by a later version; zeros that differ in sign differ"
    zeros = np.zeros((4,6), '<f4')
    name, = image_digests([(zeros,(1,2,2))])
    assert name.hex()=='527316f6f064cdee1b68006c32e23c24'
    assert image_digests([(-zeros,(1,2,2))])!=[name]
    grid = np.array([1,2,2])
    others = [zeros[::-1], np.asfortranarray(zeros)]
    assert image_digests([(a,grid) for a in others])==[name]*2

def sent(r):
    "The request as a worker has it"
    message = frame('add', 3, pack_request(r), pack_images(r.images))
    (_,_,plain,images), = Frames().feed(message)
    return unpack_request(plain, unpack_images(images))

@each
def test_digests_survive_the_link(name):
    "A worker's copy of the images is the same to the name and to the bit"
    m = model(name)
    r = ask(m, 0, pictures(m, '2x3 4x4'))
    got = sent(r)
    assert image_digests(got.images)==image_digests(r.images)
    mine,theirs = (m.media(x.prompt, x.images) for x in (r,got))
    assert mine.rows==theirs.rows
    for a,b in zip(mine.images, theirs.images):
        assert a.digest==b.digest
        assert same(a.features(), b.features())

small = st.integers(1, 5)
tokens = st.tuples(st.integers(1, 2), small, small)

gaps = st.lists(st.integers(0, 4), min_size=6, max_size=6)

@few
@given(st.lists(tokens, max_size=5), gaps)
def test_rows_of_images(sizes, gaps):
    "In order and of the right length; and a stray token is noticed"
    ids,want = [1]*gaps[-1],[]
    for size,n in zip(sizes, gaps):
        k = math.prod(size)
        want.append(range(len(ids), len(ids)+k))
        ids += [90]*k+[1]*n
    grids = [(t,2*h,2*w) for t,h,w in sizes]
    assert image_rows(ids, grids, 90, 2)==want
    for stray in ([90], [1,90]):
        with pytest.raises(RequestError):
            image_rows(ids+stray, grids, 90, 2)
