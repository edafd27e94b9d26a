"Large reads into a ring: every byte once, in any file system; errors end all threads."
import errno,os,threading,time,pytest
import numpy as np
from hypothesis import given,settings,strategies as st
from atlas.ground import reading
from atlas.ground.core import CheckpointError,ConfigError
from atlas.ground.files import File
from atlas.ground.reading import BLOCK,Extent,Ring,read_pieces,windows

RANDOM = np.random.default_rng(0).integers(0, 256, 1<<18, np.uint8)

@pytest.fixture(scope='module')
def random_file(tmp_path_factory):
    "A file whose end is no multiple of anything"
    p = tmp_path_factory.mktemp('read')/'random.bin'
    p.write_bytes(RANDOM[:-5].tobytes())
    f = File(p)
    yield f
    f.close()

def collect(pieces, *args, **kw):
    "What `read_pieces` gives, by key, each byte once"
    got = {p.key: np.zeros(p.nbytes, np.uint8) for p in pieces}
    times = {p.key: np.zeros(p.nbytes, np.uint8) for p in pieces}
    def take(key, at, data):
        got[key][at:at+len(data)] = data
        times[key][at:at+len(data)] += 1
    r = read_pieces(pieces, take, *args, **kw)
    assert all((t==1).all() for t in times.values())
    return got,r

ranges = st.lists(
    st.tuples(st.integers(0, 40_000), st.integers(0, 30_000)),
    min_size=1, max_size=12)

@given(
    ranges, st.integers(1, 9), st.integers(1, 4),
    st.integers(1, 5), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_ranges(random_file, gaps, blocks, buffers, threads, direct):
    pieces,at = [],0
    for i,(gap,n) in enumerate(gaps):
        at = min(at+gap, random_file.size)
        n = min(n, random_file.size-at)
        pieces.append(Extent(random_file, at, n, i))
        at += n
    got,r = collect(pieces, Ring(buffers, blocks*BLOCK), threads, direct)
    for p in pieces:
        assert np.array_equal(
            got[p.key], RANDOM[p.offset:p.offset+p.nbytes])
    assert r.nbytes>=sum(p.nbytes for p in pieces)
    assert r.threads<=min(threads, buffers)

@given(ranges, st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_windows_read_nothing_twice(gaps, blocks):
    class f:
        pass
    pieces,at = [],0
    for i,(gap,n) in enumerate(gaps):
        pieces.append(Extent(f, at+gap, n, i))
        at += gap+n
    w,end = windows(pieces, blocks*BLOCK),0
    for start,nbytes in zip(w.start, w.nbytes):
        assert start%BLOCK==0 and start>=end and 0<nbytes<=blocks*BLOCK
        end = start+-(-nbytes//BLOCK)*BLOCK

def test_one_range_for_two(random_file):
    "Ranges may overlap: a tensor that is wanted twice"
    pieces = [
        Extent(random_file, 10, 50_000, 'a'),
        Extent(random_file, 10, 50_000, 'b'),
        Extent(random_file, 40_000, 1000, 'c')]
    got,r = collect(pieces, Ring(2, 3*BLOCK))
    for p in pieces:
        assert np.array_equal(
            got[p.key], RANDOM[p.offset:p.offset+p.nbytes])
    assert r.nbytes<60_000

def aligned(n, more=0):
    "Memory of `n` bytes that begins at a multiple of a block, plus `more`"
    whole = np.zeros(n+2*BLOCK, np.uint8)
    at = -whole.ctypes.data%BLOCK+more
    return whole[at:at+n]

def with_homes(file, some)->tuple:
    "Pieces of a file, and homes of some: of each the blocks before it, its bytes, and has it one?"
    pieces,homes,at = [],{},0
    for i,(gap,n,home) in enumerate(some):
        at = -(-at//BLOCK)*BLOCK+gap*BLOCK
        n = max(0, min(n, file.size-at))
        pieces.append(Extent(file, at, n, i))
        if home and n:
            homes[i] = aligned(n)
        at += n
    return pieces,homes

_piece = st.tuples(st.integers(0, 3), st.integers(1, 40_000), st.booleans())
@given(st.lists(_piece, min_size=1, max_size=9), st.integers(1, 3), st.booleans())
@settings(max_examples=100, deadline=None)
def test_read_where_they_stay(random_file, some, blocks, direct):
    """Pieces with homes need no buffer, whatever lies beside them;
    not a byte beside a home is written"""
    pieces,homes = with_homes(random_file, some)
    got = {}
    def take(key, at, data):
        if key in homes:
            assert data.ctypes.data==homes[key][at:].ctypes.data
        else:
            got.setdefault(key, np.zeros(pieces[key].nbytes, np.uint8))[at:at+len(data)] = data
    read_pieces(pieces, take, Ring(2, blocks*BLOCK), 2, direct, homes)
    found = got|homes
    for p in pieces:
        if p.nbytes:
            assert np.array_equal(found[p.key], RANDOM[p.offset:p.offset+p.nbytes])
    for a in homes.values():
        end = a.ctypes.data-a.base.ctypes.data+len(a)
        assert not a.base[end:].any()

def test_a_home_that_begins_elsewhere(small):
    pieces = [Extent(small, 0, 9000, 0)]
    fails(
        pieces, nothing, Ring(2, BLOCK), ConfigError, 'multiple of',
        homes={0: aligned(9000, 8)})

def test_without_direct_reads(random_file, monkeypatch):
    "No such flag; a file system that refuses to open; one that refuses to read"
    pieces = [Extent(random_file, 3, 100_000, 0)]
    def plain():
        got,r = collect(pieces, Ring(2, 5*BLOCK))
        assert np.array_equal(got[0], RANDOM[3:100_003])
        return r.direct
    with monkeypatch.context() as m:
        m.setattr(reading, '_DIRECT', 0)
        assert plain()==0
    def refuse(*args):
        raise OSError(errno.EINVAL, 'refused')
    with monkeypatch.context() as m:
        m.setattr(reading.os, 'open', refuse)
        assert plain()==0
    real,own = os.preadv,random_file.f.fileno()
    def only_plain(fd, *args): return real(fd, *args) if fd==own else refuse()
    with monkeypatch.context() as m:
        m.setattr(reading.os, 'preadv', only_plain)
        assert plain()==0

def test_short_reads(random_file, monkeypatch):
    "A read may bring less than was asked for, and end between blocks"
    real = os.preadv
    def less(fd, to, offset):
        n = len(to[0])
        few = n if n<=BLOCK else BLOCK+n//3//BLOCK*BLOCK
        if fd==random_file.f.fileno():
            few = max(1, n//3)
        return real(fd, [to[0][:few]], offset)
    monkeypatch.setattr(reading.os, 'preadv', less)
    for direct in (True, False):
        got,_ = collect(
            [Extent(random_file, 5, 200_000, 0)], Ring(3, 16*BLOCK),
            3, direct)
        assert np.array_equal(got[0], RANDOM[5:200_005])

@pytest.fixture
def small(tmp_path):
    p = tmp_path/'small.bin'
    p.write_bytes(RANDOM.tobytes())
    f = File(p)
    yield f
    f.close()

def threads(): return [t for t in threading.enumerate() if t.name.startswith('read')]
def descriptors(): return len(os.listdir('/proc/self/fd'))

def fails(pieces, take, ring, error, match, **kw):
    before = descriptors()
    with pytest.raises(error, match=match):
        read_pieces(pieces, take, ring, **kw)
    assert not threads() and descriptors()==before

def nothing(key, at, data):
    pass

@pytest.mark.parametrize('direct', (True,False))
def test_truncated(small, direct):
    pieces = [Extent(small, 0, small.size, 0)]
    def shorten(key, at, data):
        os.truncate(small.path, 100_001)
    fails(pieces, shorten, Ring(2, 4*BLOCK), CheckpointError, 'ends at byte', direct=direct)
    assert small.size==len(RANDOM)

def test_truncated_after_the_last_read(small):
    def shorten(key, at, data):
        os.truncate(small.path, 7)
    fails(
        [Extent(small, 0, 100, 0)], shorten, Ring(1, BLOCK),
        CheckpointError, 'was changed')

def test_changed_before(small):
    os.utime(small.path, ns=(1, 1))
    fails(
        [Extent(small, 0, 100, 0)], nothing, Ring(1, BLOCK),
        CheckpointError, 'was changed')

def test_replaced_is_not_changed(small):
    "Another file of the same name is another file"
    other = small.path.with_name('other.bin')
    other.write_bytes(b'something else')
    os.replace(other, small.path)
    got,_ = collect(
        [Extent(small, 0, small.size, 0)],
        Ring(2, 4*BLOCK))
    assert np.array_equal(got[0], RANDOM)

def test_disk_error(small, monkeypatch):
    def broken(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    monkeypatch.setattr(reading.os, 'preadv', broken)
    fails(
        [Extent(small, 0, 100, 0)], nothing, Ring(1, BLOCK),
        CheckpointError, 'Input/output')

def test_an_error_of_the_taker_stops_all(small):
    seen = []
    def take(key, at, data):
        seen.append(at)
        if len(seen)==3:
            raise KeyError('three')
    fails(
        [Extent(small, 0, small.size, 0)], take,
        Ring(4, BLOCK), KeyError, 'three')
    assert len(seen)<12

def test_an_error_of_the_pieces(small):
    def pieces():
        yield Extent(small, 0, 100_000, 0)
        raise ValueError('no more')
    fails(pieces(), nothing, Ring(2, BLOCK), ValueError, 'no more')

def test_buffers_are_waited_for(small):
    "What `take` returns is called once, before its buffer is filled again or the call ends"
    open_,order,lock = set(),[],threading.Lock()
    def take(key, at, data):
        place = data.ctypes.data//BLOCK
        with lock:
            assert place not in open_
            open_.add(place)
        def done():
            with lock:
                open_.remove(place)
            order.append(at)
        return done
    ring = Ring(3, BLOCK)
    r = read_pieces([Extent(small, 0, small.size, 0)], take, ring)
    assert not open_ and sorted(order)==list(range(0, small.size, BLOCK))
    assert len(ring._made)<=3 and r.nbytes==small.size

def test_a_wait_that_fails(small):
    def late():
        raise RuntimeError('the card is gone')
    def take(key, at, data): return late
    for n in (100, small.size):
        fails(
            [Extent(small, 0, n, 0)], take, Ring(2, BLOCK),
            RuntimeError, 'is gone')

def test_memory_of_ones_own(small):
    "`allocate` is asked for few and aligned buffers; others are refused"
    import mmap
    made = []
    def allocate(n):
        made.append(n)
        return mmap.mmap(-1, n)
    ring = Ring(2, 10_000, allocate)
    got,_ = collect([Extent(small, 1, 70_000, 0)], ring)
    assert np.array_equal(got[0], RANDOM[1:70_001])
    assert made and set(made)=={3*BLOCK} and len(made)<=2
    odd = Ring(
        1, BLOCK,
        lambda n: memoryview(mmap.mmap(-1, n+BLOCK))[8:])
    fails([Extent(small, 0, 10, 0)], nothing, odd, ConfigError, 'multiple of')
    with pytest.raises(ConfigError):
        Ring(0, 1)

def test_nothing_to_read():
    assert read_pieces([], nothing).nbytes==0

def test_nothing_is_left_in_the_cache(small):
    "Where the file system can tell (`fincore`), no page of a file stays behind"
    import ctypes,mmap
    if os.statvfs(small.path).f_bsize!=BLOCK:
        pytest.skip('other pages')
    os.sync()
    for direct in (True, False):
        read_pieces(
            [Extent(small, 0, small.size, 0)], nothing,
            Ring(2, 4*BLOCK), direct=direct)
        with (
            open(small.path, 'rb') as f,
            mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY) as m
        ):
            n = small.size//BLOCK
            seen = (ctypes.c_ubyte*n)()
            at = ctypes.addressof(ctypes.c_char.from_buffer(m))
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.mincore(
                ctypes.c_void_p(at), ctypes.c_size_t(small.size), seen)==0
            assert sum(b&1 for b in seen)==0

# -- how many read at a time ---------------------------------------------------------------------

def fed(readers, rate, seconds, size=8<<20):
    "Seconds that each number of readers had, of a made-up disk that gives `rate(allowed)`"
    now,spent = 0.,{}
    while now<seconds:
        allowed = readers.allowed
        took = size/rate(allowed)
        now += took
        spent[allowed] = spent.get(allowed, 0)+took
        readers.note(size, allowed, now)
    return spent

speeds = st.floats(1e8, 5.9e9)

@given(speeds, speeds)
@settings(deadline=None, max_examples=60)
def test_the_faster_number_reads(alone, together):
    "Nine tenths of a minute go to whichever is faster by more than a tenth"
    spent = fed(reading.Readers(8), lambda n: alone if n==1 else together, 60)
    best = 1 if alone>together else 8
    if max(alone, together)>1.15*min(alone, together):
        assert spent[best]>.9*60

def test_all_read_memory():
    "And nothing else is tried, whatever it would give"
    assert set(fed(reading.Readers(12), lambda n: 25e9 if n==12 else 40e9, 5))=={12}

def test_a_disk_gets_eight_of_twelve():
    "All but the first two measurements, of which the first counts for nothing"
    spent = fed(reading.Readers(12), lambda n: {1: 1e9, 8: 2e9, 12: 3e9}[n], 60)
    assert spent.keys()=={1,8,12}
    assert .4<=spent[12]<.5 and spent[8]>.9*60

def test_threads_by_processors(monkeypatch):
    for own,threads in {1: 8, 2: 8, 12: 9, 16: 12, 20: 12, 256: 12}.items():
        monkeypatch.setattr(reading, 'processors', lambda n=own: n)
        assert reading.num_threads()==threads
        assert reading.Ring().count==2*threads

def test_reads_of_before_do_not_count():
    r = reading.Readers(8)
    for now in (0.,.3,.6,.9,1.2):
        assert r.allowed==8
        r.note(1<<20, 8, now)
    assert r.allowed==1
    for i in range(9):
        r.note(1<<30, 8, 1.21+i/100)  # these began when all might read
    assert r.rates.keys()=={8} and r.began is None

@given(st.floats(1e9, 2e9), st.floats(-.3, .9))
def test_a_disk_that_gets_faster(rate, slope):
    "A number of readers is not the better one for having been tried in a better second"
    r = reading.Readers(8, gain=.01)
    ways = {8: rate, 1: .98*rate}
    now = 0.
    while now<2.5:
        now += (8<<20)/(ways[r.allowed]*(1+slope*now))
        r.note(8<<20, r.allowed, now)
    assert r.allowed==8

@pytest.mark.parametrize('allowed', [1,3,8])
def test_the_gate(random_file, monkeypatch, allowed):
    "No more than may read at once do"
    inside,most,lock = [0],[0],threading.Lock()
    plain = reading._OpenFile.fill
    def fill(source, memory, start, need):
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        try:
            return plain(source, memory, start, need)
        finally:
            with lock:
                inside[0] -= 1
    monkeypatch.setattr(reading._OpenFile, 'fill', fill)
    begun = reading.Readers
    monkeypatch.setattr(reading, 'Readers', lambda n: begun(n, allowed=allowed))
    whole = [Extent(random_file, 0, random_file.size, 'all')]
    got,_ = collect(whole, Ring(16, BLOCK), threads=8)
    assert np.array_equal(got['all'], RANDOM[:-5])
    assert most[0]<=allowed

def threads_of(monkeypatch, **how):
    "Windows and threads of all reads from now on; `how` many may read"
    seen,begun,plain = [],reading.Readers,reading._Work.read
    def read(work, w, r):
        seen.append((w.i, threading.get_ident()))
        return plain(work, w, r)
    monkeypatch.setattr(reading._Work, 'read', read)
    monkeypatch.setattr(reading, 'Readers', lambda n: begun(n, period=np.inf, **how))
    return seen

def test_one_thread_goes_on_reading(random_file, monkeypatch):
    "From window to window, in their order; what it has read is taken by others"
    seen,takers = threads_of(monkeypatch, allowed=1),set()
    whole = Extent(random_file, 0, random_file.size, 'all')
    def take(key, at, data):
        takers.add(threading.get_ident())
    reading.read_pieces([whole], take, Ring(4, BLOCK), 3)
    windows,readers = zip(*seen)
    assert list(windows)==list(range(len(seen)))
    assert len(set(readers))==1 and takers-set(readers)

class Fickle(reading.Readers):
    "Has another number read after each window"
    def note(self, nbytes, allowed, now):
        self.allowed = 1 if allowed==self.most else self.most

@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 300), st.booleans())
@settings(deadline=None, max_examples=60)
def test_all_is_taken_once_however_many_read(random_file, threads, buffers, fails, whole):
    "And where one fails, all end, and every buffer is back"
    ring,taken = Ring(buffers, BLOCK),[]
    def take(i, b):
        if i==fails and not whole:
            raise ValueError(f'no room for {i}')
        taken.append(i)
    cut = reading.windows([Extent(random_file, 0, random_file.size, 'all')], BLOCK)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(reading, 'Readers', Fickle)
        if whole or fails>=len(cut):
            reading.read_windows(cut, take, ring, threads)
            assert sorted(taken)==list(range(len(cut)))
        else:
            with pytest.raises(ValueError, match=f'no room for {fails}'):
                reading.read_windows(cut, take, ring, threads)
            assert len(set(taken))==len(taken)
    assert ring._free.qsize()==len(ring._made)

def test_what_is_left_to_take_is_given_back(random_file, monkeypatch):
    "Where taking fails while another thread has read on into all other buffers"
    threads_of(monkeypatch, allowed=1)
    gates,begun = [],reading._Gate
    def made(*how):
        gates.append(begun(*how))
        return gates[-1]
    monkeypatch.setattr(reading, '_Gate', made)
    ring = Ring(4, BLOCK)
    def take(i, b):
        while i==0 and len(gates[0].filled)<3:
            time.sleep(.001)
        raise ValueError('no room')
    cut = windows([Extent(random_file, 0, random_file.size, 'all')], BLOCK)
    with pytest.raises(ValueError, match='no room'):
        reading.read_windows(cut, take, ring, 2)
    assert ring._free.qsize()==len(ring._made)==4

def test_a_failed_read_leaves_the_gate(random_file, monkeypatch):
    "Whoever waits for the one that may read is not left waiting"
    def fill(source, memory, start, need):
        raise CheckpointError('no')
    monkeypatch.setattr(reading._OpenFile, 'fill', fill)
    begun = reading.Readers
    monkeypatch.setattr(reading, 'Readers', lambda n: begun(n, allowed=1))
    with pytest.raises(CheckpointError, match='no'):
        collect([Extent(random_file, 0, random_file.size, 'all')], Ring(16, BLOCK), threads=8)
