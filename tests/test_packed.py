"""Packed files: what goes in comes out, whatever is done to the file, to the disk or to who writes
it."""
import fcntl,json,os,signal,subprocess,sys,textwrap,threading,time
import numpy as np, pytest
from hypothesis import given,settings,strategies as st
from hypothesis.extra import numpy as hnp
from atlas.card.emulator import Emulator,find_cxx
from atlas.cuda.checksum import CardArrays,checksums
from atlas.ground import packed
from atlas.ground.core import AtlasError,CheckpointError,RequestError,UnsupportedError
from atlas.ground.formats import QStack,QTensor
from atlas.ground.packed import (
    BLOCK,HOST,PART,SUMMED,TYPES,WHOLE,BusyError,Entry,Layout,PackedFile,StoppedError,WriteError,
    checksum,layout_of,load_dict,part_of,reload,save_dict)
from helpers.waiting import WAIT

needs_cxx = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')

def numbers(n, seed=0):
    "Bytes that are nobody's"
    return np.random.default_rng(seed).integers(0, 256, n, np.uint8)

def same(got, want):
    assert got.keys()==want.keys()
    for n,a in want.items():
        a,b = np.asarray(a),got[n]
        assert (b.dtype.name,b.shape)==(a.dtype.name,a.shape), n
        assert b.tobytes()==a.astype(b.dtype, order='C').tobytes(), n

# -- what goes in comes out ----------------------------------------------------------------------

shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9)
types = st.sampled_from(list(TYPES))
bytewise = st.sampled_from('<>')

@st.composite
def some_array(draw):
    "An array of any type, order of bytes and order of axes"
    shape,dtype = draw(shapes),TYPES[draw(types)]
    raw = np.frombuffer(
        numbers(
            int(np.prod(shape))*dtype.itemsize,
            draw(st.integers(0, 99))),
        np.uint8)
    a = (raw%2).astype(bool) if dtype==bool else raw.view(dtype)
    a = a.reshape(shape).astype(dtype.newbyteorder(draw(bytewise)))
    if a.ndim and draw(st.booleans()):
        a = a[::-1]
    return a.T if draw(st.booleans()) else a

@settings(max_examples=60, deadline=None)
@given(st.dictionaries(
    st.text(max_size=12).filter(lambda n: '#' not in n),
    some_array(), max_size=6))
def test_any_mapping_comes_back(tmp_path_factory, arrays):
    p = tmp_path_factory.mktemp('p')/'f'
    meta = dict(a=[1,None,'é'], b={})
    save_dict(p, arrays, meta)
    with np.errstate(invalid='ignore'):
        same(load_dict(p), arrays)
    assert not part_of(p).exists()
    with PackedFile(p) as f:
        assert f.meta==meta and f.names==list(arrays)
        assert all((f.layout.start+e.offset)%BLOCK==0
            for e in f.entries.values())
        assert f.file.size%BLOCK==0

def test_objects_come_back(tmp_path):
    rng = np.random.default_rng(0)
    q = [QTensor.encode(rng.standard_normal((8,64)), f)
        for f in ('NVFP4','FP8_BLOCK','BF16','MXFP4')]
    some = dict(
        a=q[0],
        b=QStack(q, np.arange(32)[::-1]),
        none=None, x=np.ones(3))
    save_dict(tmp_path/'f', some)
    got = load_dict(tmp_path/'f')
    assert list(got)==['x','a','b','none'] and got['none'] is None
    assert (
        got['a'].fmt=='NVFP4'
        and np.array_equal(got['b'].decode(), some['b'].decode()))
    assert list(load_dict(tmp_path/'f', ['a']))==['a']

TWO = np.ones(2)
REFUSED = [ # arrays, meta and the error
    (dict(a=np.array(['x'])), None, UnsupportedError),
    (dict(a=np.ones(2, np.longdouble)), None, UnsupportedError),
    (dict(a=np.array([None])), None, UnsupportedError),
    ({1:TWO}, None, RequestError),
    (dict(a=TWO), dict(x=float('nan')), RequestError),
    (dict(a=TWO), dict(x=object()), RequestError)]

@pytest.mark.parametrize('arrays,meta,error', REFUSED)
def test_what_cannot_go_in(tmp_path, arrays, meta, error):
    with pytest.raises(error):
        save_dict(tmp_path/'f', arrays, meta)
    assert list(tmp_path.iterdir())==[]

def test_a_name_twice_cannot_go_in(tmp_path):
    p = tmp_path/'f'
    q = QTensor.encode(np.ones((2,32)), 'F32')
    with pytest.raises(RequestError, match='Two arrays'):
        save_dict(p, {'q':q, 'q#data':np.ones(1)})

# -- the checksum --------------------------------------------------------------------------------

@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 40_000),
    st.lists(st.integers(1, 5000), max_size=6),
    st.randoms())
def test_sums_of_parts_in_any_order(n, cuts, random):
    "And one that begins in the middle of a run of words"
    a,base = numbers(n),8*(SUMMED-300)
    edges = sorted({0, n, *(8*c for c in cuts if 8*c<n)})
    parts = list(zip(edges, edges[1:]))
    random.shuffle(parts)
    total = sum(checksum(a[i:j], base+i) for i,j in parts)
    assert total%2**64==checksum(a, base)

def test_a_word_that_changes_changes_the_sum():
    a = numbers(8*SUMMED*2+40)
    was = checksum(a)
    for at in (0, 7, 8, 8*SUMMED-1, 8*SUMMED, len(a)-1):
        for bit in range(8):
            b = a.copy()
            b[at] ^= np.uint8(1<<bit)
            assert checksum(b)!=was
    assert checksum(np.zeros(16, np.uint8))!=checksum(np.zeros(24, np.uint8))
    with pytest.raises(RequestError):
        checksum(a, 4)

@needs_cxx
def test_a_card_sums_as_the_host_does():
    card = Emulator()
    rng = np.random.default_rng(1)
    any_sizes = rng.integers(1, 400_000, 12).tolist()
    sizes = [*range(34), *any_sizes, 8*SUMMED, 16*SUMMED, 16*SUMMED+8]
    some = [numbers(n, n) for n in sizes]
    assert checksums(
        card,
        [card.upload(a) for a in some])==[checksum(a) for a in some]
    many = Emulator()
    many.multiprocessors = 1 # blocks that take several runs each
    a = numbers(8*SUMMED*20+5)
    assert checksums(many, [card.upload(a)])==[checksum(a)]

# -- files that are not what they were -----------------------------------------------------------

@pytest.fixture
def file(tmp_path):
    "A packed file of three arrays, and what is in it"
    arrays = dict(
        a=numbers(10_000),
        b=np.arange(5, dtype=np.float32),
        c=numbers(70_000, 2).view(np.uint16))
    return save_dict(tmp_path/'f', arrays, dict(note='x')),arrays

def test_every_byte_of_the_header_counts(file):
    p,arrays = file
    raw = p.read_bytes()
    with PackedFile(p) as f:
        end = f.layout.table+len(f.layout.text)
    for at in range(end):
        for bit in (1,128):
            p.write_bytes(
                raw[:at]+bytes([raw[at]^bit])
                +raw[at+1:])
            with pytest.raises(CheckpointError):
                load_dict(p)

def test_a_bit_in_each_array(file):
    p,arrays = file
    raw = p.read_bytes()
    with PackedFile(p) as f:
        places = {n: (f.layout.start+e.offset,e.nbytes)
            for n,e in f.entries.items()}
    for n,(at,size) in places.items():
        for i in (0,size//2,size-1):
            p.write_bytes(
                raw[:at+i]+bytes([raw[at+i]^1])
                +raw[at+i+1:])
            with pytest.raises(CheckpointError, match=f"array '{n}' is not what was written"):
                load_dict(p)
            others = [k for k in arrays if k!=n]
            same(load_dict(p, others), {k: arrays[k] for k in others})
            assert load_dict(p, check=False).keys()==arrays.keys()

def test_cut_and_lengthened(file):
    p,_ = file
    raw = p.read_bytes()
    with PackedFile(p) as f:
        table,start = f.layout.table,f.layout.start
    in_head = 0,1,8,39,40,50,table,table+5
    beyond = start-1,start,start+1,start+9000,len(raw)-BLOCK,len(raw)-1
    for n in in_head+beyond:
        refused(p, raw[:n])
    for more in (b'\0',bytes(BLOCK)):
        refused(p, raw+more)
    for other in (b'GGUF'+raw[4:], b'\x08'+bytes(99), PART+raw[8:]):
        refused(p, other)
    p.unlink()
    with pytest.raises(CheckpointError):
        load_dict(p)

def refused(p, content):
    "What is no packed file"
    p.write_bytes(content)
    with pytest.raises(CheckpointError):
        load_dict(p)

def stranger(path, text, count, size=None):
    "A file whose header has the text `text` and a right checksum"
    l = Layout(
        {
            str(i): Entry(str(i), 'uint8', (0,), 0, 0)
            for i in range(count)},
        {},
        {},
        text)
    head = l.head(WHOLE, dict.fromkeys(l.entries, 0))
    n = max(size or 0, len(head))
    class Sized(Layout):
        nbytes = property(lambda self: n)
    l = Sized(l.entries, {}, {}, text)
    path.write_bytes(l.head(
        WHOLE, dict.fromkeys(l.entries, 0)).ljust(n, b'\0'))

junk = st.recursive(
    st.none()|st.booleans()
    |st.integers(-2**70, 2**70)|st.floats()
    |st.text(max_size=3),
    lambda c: st.lists(c, max_size=3)
    |st.dictionaries(st.text(max_size=3), c, max_size=3),
    max_leaves=6)

HEADER = ( # Where something else may stand
    'arrays', 'objects', 'meta', 'arrays a', 'arrays a shape', 'arrays a dtype',
    'arrays b offset', 'arrays b nbytes', 'objects q', 'objects q kind', 'objects q parts',
    'objects q said', 'more', 'arrays q#data', 'objects a')

def put(d, where, value):
    "Change a member of a header, named by the keys that lead to it"
    *path,last = where.split()
    for k in path:
        d = d[k]
    d[last] = value

@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_stranger_is_not_believed(tmp_path_factory, data):
    "Any part of a header as something else: a typed error, or a file that is in order"
    p = tmp_path_factory.mktemp('p')/'f'
    q = dict(kind='QTensor', parts=['data'], said=dict(fmt='F32', shape=[2]))
    l = layout_of(dict(a=np.zeros((3,4)), b=np.zeros(9, np.int16)), dict(q=q))
    d = json.loads(l.text)
    put(d, data.draw(st.sampled_from(HEADER)), data.draw(junk))
    count = data.draw(st.integers(1, 3))
    size = data.draw(st.sampled_from([l.nbytes, l.nbytes+BLOCK, None]))
    stranger(p, json.dumps(d).encode(), count, size)
    try:
        load_dict(p, check=False)
    except AtlasError:
        pass

def test_a_part_twice_is_refused(tmp_path):
    "Each level would have twice as many as the one above it, and a file of 2 kB never an end"
    names = ['q'+'#a'*i for i in range(40)]
    objects = {n: dict(kind='QTensor', parts=['a','a'], said={}) for n in names}
    objects[names[-1]]['parts'] = []
    l = layout_of(dict(a=np.zeros(3)), objects)
    p = tmp_path/'f'
    stranger(p, l.text, 1, l.nbytes)
    with pytest.raises(CheckpointError, match="object 'q' is described by"):
        load_dict(p, check=False)

@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 2**31))
def test_noise_is_refused(tmp_path_factory, raw, count):
    p = tmp_path_factory.mktemp('p')/'f'
    for begins in (b'',WHOLE,WHOLE+b'\x01\0\0\0'):
        p.write_bytes(begins+raw)
        with pytest.raises(AtlasError):
            load_dict(p)
    stranger(p, raw, count%5)
    with pytest.raises(AtlasError):
        load_dict(p)

class Slow(packed.HostArrays):
    "Arrays of the host that somebody is told of"
    def __init__(self, told):
        self.told = told
    def ring(self): return packed.Ring(1, BLOCK)
    def put(self, a, at, data):
        HOST.put(a, at, data)
        self.told(at)

def test_changed_while_it_is_read(file):
    p,arrays = file
    raw = p.read_bytes()
    def cut(at):
        os.truncate(p, len(raw)-3*BLOCK)
    with pytest.raises(CheckpointError):
        load_dict(p, place=Slow(cut))
    p.write_bytes(raw)
    def change(at):
        with open(p, 'r+b') as f:
            f.write(b'x')
        os.utime(p, ns=(1,1))
    with pytest.raises(CheckpointError):
        load_dict(p, place=Slow(change))
    p.write_bytes(raw)
    def replaced(at):
        save_dict(p, dict(other=np.ones(3))) # under the same name: what is open stays
    same(load_dict(p, place=Slow(replaced)), arrays)
    assert list(load_dict(p))==['other']

def test_filled_in_place(file):
    p,arrays = file
    into = {n: np.zeros_like(a) for n,a in arrays.items()}
    assert reload(p, into)>=sum(a.nbytes for a in arrays.values())
    same(into, arrays)
    for bad in (
        dict(a=np.zeros(9, np.uint8)),
        dict(a=np.zeros(10_000, np.int8)),
        dict(none=np.zeros(3))):
        with pytest.raises(CheckpointError):
            reload(p, bad)

def test_what_else_there_is_to_say_is_a_dict(tmp_path):
    "A list was written to a file that nobody could open again"
    for meta in ([1], 'of 2026', 3):
        with pytest.raises(RequestError, match='expected a dict'):
            save_dict(tmp_path/'f', dict(a=np.zeros(4)), meta)
    assert not list(tmp_path.iterdir())

@pytest.mark.parametrize('room', [
    np.zeros((2,3)).T, np.zeros((3,5))[:,:2], np.broadcast_to(np.zeros(2), (3,2))])
def test_what_cannot_be_filled(tmp_path, room):
    "An array whose bytes do not lie in a row, or are not to be written, is refused"
    p = save_dict(tmp_path/'f', dict(a=np.ones((3,2))))
    with pytest.raises(RequestError, match='contiguous'):
        reload(p, dict(a=room))

# -- writing, and what keeps it from it ----------------------------------------------------------

def grown(n=12, size=300_000, seed=0):
    return {f'a{i}': numbers(size+i, seed*100+i) for i in range(n)}

class Counted:
    "How many bytes were written to arrays' places"
    def __init__(self, monkeypatch):
        self.n,write = 0,packed._Writer.write
        def counted(w, b, offset):
            self.n += len(b)
            write(w, b, offset)
        monkeypatch.setattr(packed._Writer, 'write', counted)

def stopped_after(k):
    "Says after `k` questions that it is time to stop"
    asked = iter(range(k))
    return lambda: next(asked, None) is None

@pytest.fixture
def small(monkeypatch):
    "The disk is waited for after each array"
    monkeypatch.setattr(packed._batches, '__defaults__', (1,))

def test_an_interrupted_save_goes_on(tmp_path, monkeypatch, small):
    p,arrays = tmp_path/'f',grown()
    save_dict(p, dict(old=np.ones(3)))
    with pytest.raises(StoppedError):
        save_dict(p, arrays, stop=stopped_after(7))
    same(load_dict(p), dict(old=np.ones(3)))
    counted = Counted(monkeypatch)
    arrays['a2'] = numbers(300_002, 99) # has changed meanwhile
    save_dict(p, arrays)
    same(load_dict(p), arrays)
    assert 6*300_000<=counted.n<=7*310_000 # five of seven were whole, and one of these had changed
    assert not part_of(p).exists()

def test_a_part_of_something_else_is_no_use(tmp_path, small):
    p = tmp_path/'f'
    for other in (
        grown(11), grown(12, 300_001),
        {n+'x': a for n,a in grown().items()}):
        with pytest.raises(StoppedError):
            save_dict(p, other, stop=stopped_after(7))
        save_dict(p, grown())
        same(load_dict(p), grown())
    for damage in (b'',b'junk',bytes(10**6)):
        part_of(p).write_bytes(damage)
        save_dict(p, grown())
        same(load_dict(p), grown())

def test_a_record_of_another_array_is_none(tmp_path, monkeypatch, small):
    """A save of other numbers that is killed between bytes and record leaves no record of those
    that were there before, which the next save may be of"""
    p,arrays = tmp_path/'f',grown()
    with pytest.raises(StoppedError):
        save_dict(p, arrays, stop=stopped_after(7))
    def killed(w, e):
        raise StoppedError('here')
    with monkeypatch.context() as m:
        m.setattr(packed._Writer, 'whole', killed)
        with pytest.raises(StoppedError):
            save_dict(p, arrays|dict(a2=numbers(300_002, 99)))
    counted = Counted(monkeypatch)
    save_dict(p, arrays)
    same(load_dict(p), arrays)
    assert counted.n<=6*310_000 # the others were whole, and stayed

def test_half_a_record_is_none(tmp_path, small):
    p,arrays = tmp_path/'f',grown()
    with pytest.raises(StoppedError):
        save_dict(p, arrays, stop=stopped_after(7))
    with open(part_of(p), 'r+b') as f:
        f.seek(packed._HEAD.size+packed._SUM.size*3+8)
        f.write(b'\0')
    fd = os.open(part_of(p), os.O_RDWR)
    known = packed._Writer(fd, layout_of(arrays), arrays, HOST, None).begin()
    os.close(fd)
    assert 'a2' in known and 'a3' not in known
    save_dict(p, arrays)
    same(load_dict(p), arrays)

def test_without_direct_writes(tmp_path, monkeypatch):
    save_dict(tmp_path/'a', grown())
    plain = os.open
    def refused(path, flags, *args, **kw):
        if flags & os.O_DIRECT:
            raise OSError(22, 'Invalid argument')
        return plain(path, flags, *args, **kw)
    monkeypatch.setattr(os, 'open', refused)
    save_dict(tmp_path/'b', grown())
    assert (tmp_path/'a').read_bytes()==(tmp_path/'b').read_bytes()

def test_direct_writes_that_fail_late(tmp_path, monkeypatch):
    "A file system that says only at the first write that it has none: nothing stays open"
    plain,direct = os.pwrite,[]
    def refused(fd, data, at):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            direct.append(fd)
            raise OSError(22, 'Invalid argument')
        return plain(fd, data, at)
    monkeypatch.setattr(os, 'pwrite', refused)
    save_dict(tmp_path/'f', grown())
    monkeypatch.undo()
    if not direct:
        pytest.skip('no direct writes here')
    same(load_dict(tmp_path/'f'), grown())
    here = '/proc/self/fd'
    links = [os.readlink(f'{here}/{fd}') for fd in os.listdir(here) if int(fd) in direct]
    assert not [l for l in links if l.startswith(str(tmp_path))]

def program(code, *args, **kw):
    "A fresh interpreter at work on `code`"
    return subprocess.Popen(
        [sys.executable, '-c', textwrap.dedent(code), *map(str, args)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kw)

FULL = '''
    import resource,sys
    import numpy as np
    from atlas.ground.packed import save_dict,WriteError
    resource.setrlimit(resource.RLIMIT_FSIZE, (1<<20,1<<20))
    try: save_dict(sys.argv[1], dict(a=np.ones(1<<20)))
    except WriteError as e: print(e)'''

def test_a_full_disk(tmp_path, monkeypatch):
    "The system refuses more than a megabyte; and one that is full in the middle"
    p = save_dict(tmp_path/'f', dict(old=np.ones(3)))
    out,err = program(FULL, p).communicate(timeout=WAIT)
    assert 'cannot be written' in out and 'Free some space' in out, err
    write,calls = os.pwrite,iter(range(99))
    def full(fd, data, at):
        if next(calls)>4:
            raise OSError(28, 'No space left on device')
        return write(fd, data, at)
    monkeypatch.setattr(os, 'pwrite', full)
    with pytest.raises(WriteError, match='No space left'):
        save_dict(p, grown())
    monkeypatch.undo()
    same(load_dict(p), dict(old=np.ones(3)))
    assert [q.name for q in tmp_path.iterdir()]==['f']

def test_no_folder(tmp_path):
    with pytest.raises(WriteError, match='No such file'):
        save_dict(tmp_path/'none'/'f', grown(1))

KILLED = '''
    import sys
    import numpy as np
    from atlas.ground import packed
    packed._batches.__defaults__ = (1,)
    path,version = sys.argv[1],int(sys.argv[2])
    print('here', flush=True)
    while True:
        arrays = {f'a{i}': np.full(200_000, version%251, np.uint8) for i in range(6)}
        packed.save_dict(path, arrays, dict(version=version))
        version += 1'''

def test_killed_at_any_moment(tmp_path):
    "What is there afterwards is whole, and no older than it was; the next writer is not in the way"
    p,rng,version = tmp_path/'f',np.random.default_rng(0),0
    for _ in range(8):
        child = program(KILLED, p, version+1)
        assert child.stdout.readline()=='here\n'
        time.sleep(rng.uniform(0, .25))
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=WAIT)
        if not p.exists():
            continue
        with PackedFile(p) as f:
            now,arrays = f.meta['version'],f.load()
        assert now>=version
        assert (
            len(arrays)==6
            and all((a==now%251).all() for a in arrays.values()))
        version = now
    assert {q.name for q in tmp_path.iterdir()}<={'f','.f.part'}
    save_dict(p, grown())
    same(load_dict(p), grown())

HOLDS = '''
    import sys
    from pathlib import Path
    from atlas.ground import packed
    import numpy as np
    def stop():
        if sys.stdin.isatty() or not stop.said:
            stop.said = True
            print('writing', flush=True)
            sys.stdin.readline()
        return False
    stop.said = False
    packed.save_dict(sys.argv[1], dict(theirs=np.ones(1000)), stop=stop, threads=1)'''

def test_two_do_not_write_one_file(tmp_path):
    p = save_dict(tmp_path/'f', dict(old=np.ones(3)))
    child = program(HOLDS, p, stdin=subprocess.PIPE)
    assert child.stdout.readline()=='writing\n'
    with pytest.raises(BusyError):
        save_dict(p, dict(ours=np.ones(4)))
    same(load_dict(p), dict(old=np.ones(3)))
    done = []
    waiting = threading.Thread(
        target=lambda: done.append(save_dict(
            p, dict(ours=np.ones(4)), wait=True)))
    waiting.start()
    time.sleep(.1)
    assert not done
    child.communicate('\n', timeout=WAIT)
    waiting.join(WAIT)
    assert done and child.returncode==0
    same(load_dict(p), dict(ours=np.ones(4)))

# -- arrays of a card ----------------------------------------------------------------------------

@needs_cxx
def test_a_card_and_back(tmp_path):
    card = Emulator()
    place = CardArrays(card)
    arrays = grown(4)|dict(e=np.zeros((0,3)))
    there = {n: card.upload(a) for n,a in arrays.items()}
    here = dict(h=np.arange(7, dtype=np.int64)) # stays on the host
    file,other = tmp_path/'card',tmp_path/'host'
    save_dict(file, there|here, place=place)
    save_dict(other, arrays|here)
    assert file.read_bytes()==other.read_bytes()
    same(load_dict(file, place=place), arrays|here)
    raw = bytearray(file.read_bytes())
    with PackedFile(file) as f:
        raw[f.layout.start+f.entries['a2'].offset] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="'a2'"):
        reload(file, there|here, place)
