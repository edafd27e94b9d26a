"""The second tier of the prefix cache (page 5_engine/spill): whatever the disk does, a record is
what was put or it is a miss; nobody waits, nothing leaks, nobody's files are wiped."""
import errno,fcntl,os,shutil,signal,subprocess,sys,threading
import numpy as np,pytest
from collections import OrderedDict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from hypothesis import HealthCheck,example,given,settings,strategies as st
from hypothesis.extra.numpy import arrays
from atlas.card.device import Host
from atlas.card.emulator import Emulator
from atlas.card.graph import Mark
from atlas.engine.cache import KVCache
from atlas.engine.prefix import PrefixTree,tile_keys
from atlas.engine.records import HEAD,PAGE,Record,Records,is_sealed,seal
from atlas.engine.spill import SpillTier
from atlas.engine.spill_file import HostMemory,_digest,_kept_name
from atlas.engine.spill_file import pack_index,spill_file,unit_of,unpack_index
from atlas.engine.spill_store import SpillStore,open_spill
from atlas.ground.core import OutOfMemoryError,RequestError
from atlas.use.llm import LLM
from atlas.ops.linear import TILE
from helpers.small_engine import CONFIG,small_cache
from helpers.waiting import WAIT,until

some = settings(max_examples=50, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture])
SIZES = dict(tile=5000, state=14000)  # one unit of two pages, and two of them
UNIT = 2*PAGE
FP = bytes(range(32))
stream = Host().own_stream()

def ident(i): return bytes([i])*16

def content(kind, i):
    "The bytes of record `i` of a kind"
    rng = np.random.default_rng([i, len(kind)])
    return rng.integers(0, 256, SIZES[kind], np.uint8)

def fill(kind, i, out):
    "Copies record `i` to `out`"
    out[:] = content(kind, i)
    return Mark()

def put(store, kind, i, **kw):
    return store.put(kind, ident(i),
        partial(fill, kind, i), **kw)

def get(store, kind, i):
    "Record `i` as it is now, or False; released"
    store.want(kind, ident(i))
    data = store.ready(kind, ident(i), wait=True)
    found = data if data is False else data.copy()
    store.release(kind, ident(i))
    return found

def is_right(store, kind, i):
    "Is it what was put? False where it is not to be had; anything else is no answer"
    found = get(store, kind, i)
    if found is False:
        return False
    assert np.array_equal(found, content(kind, i)), 'the bytes of something else'
    return True

def store_in(place, units=6, printed=FP, **kw):
    "A store with room for some units"
    return SpillStore(place, stream, SIZES, units*UNIT, printed, **kw)

def left_clean(store):
    "All buffers are idle, all units are somebody's or free; then it is closed, and its threads end"
    store.settle()
    for name in list(store._reads):
        store.release(*name)
    until(lambda: all_idle(store), 'every buffer is back')
    u = store.units
    held = [i for r in store.records.values() for i in r.units]
    free = [*u.back,*range(u.end, u.count)]
    assert sorted(held+free)==list(range(u.count))
    threads = store._threads
    store.close()
    store.close()
    assert not any(t.is_alive() for t in threads)

def all_idle(store):
    "Are all buffers there, as many to read as to write, and is no record in use?"
    def count(use):
        return [len(store._idle[kind,use]) for kind in SIZES]
    return count('read')==count('write') and not any(r.busy
        for r in store.records.values())

# -- faults --------------------------------------------------------------------------------------

class Faulty(HostMemory):
    "Memory whose `nth` write or read goes wrong in a way"
    def __init__(self, way=None, nth=0, at=0):
        super().__init__(PAGE+64*UNIT)
        self.way,self.nth,self.at = way,nth,at
        self.calls,self.happened = 0,None
    def _now(self, *ways):
        "Is it this call's turn to go wrong in one of these ways?"
        if self.way not in ways:
            return False
        self.calls += 1
        if self.calls!=self.nth:
            return False
        self.happened = self.way
        return True
    def write(self, data, at):
        if self._now('full'):
            raise OSError(errno.ENOSPC, 'No space left on device')
        if self._now('write fails'):
            raise OSError(errno.EIO, 'Input/output error')
        if self._now('half written'):
            super().write(data[:len(data)//2], at)
            raise OSError(errno.ENOSPC, 'A write ended early')
        super().write(data, at)
        spot = at+self.at%(HEAD+5000)
        if self._now('damaged'):
            self.a[spot] ^= 4
    def read(self, data, at):
        if self._now('read fails'):
            raise OSError(errno.EIO, 'Input/output error')
        n = super().read(data, at)
        return n//2 if self._now('cut short') else n

SWITCH_OFF = 'full','write fails','half written','read fails'
WAYS = [None,*SWITCH_OFF,'damaged','cut short']
THERE_AND_BACK = [('put',('tile',1)),('get',('tile',1))]
nths = st.integers(1, 12)

class Model:
    "What a store without faults would have: records by name, the least recently used first"
    def __init__(self, units):
        self.units,self.records = units,OrderedDict()
    def size(self, kind): return dict(tile=1, state=2)[kind]
    def used(self):
        return sum(self.size(k) for k,_ in self.records)
    def touch(self, name):
        if name in self.records:
            self.records.move_to_end(name)
    def put(self, name):
        self.touch(name)
        if name in self.records:
            return
        most = self.units-self.size(name[0])
        while self.used()>most:
            self.records.popitem(last=False)
        self.records[name] = True

names = st.tuples(st.sampled_from(['tile','tile','state']),
    st.integers(0, 9))
def some_of(words):
    "Lists of words, each with the name of a record"
    return st.lists(st.tuples(st.sampled_from(words.split()), names),
        max_size=40)
ops = some_of('put put get get touch forget')

def same_records(store, model):
    "The same records in the same order, and their room"
    assert [(k, i[0]) for k,i in store.records]==list(model.records)
    if not store.off:
        assert store.units.count-store.units.left==model.used()

def do_put(store, model, name):
    "Put a record, and see that it is refused only by a store that is off"
    was_off = bool(store.off)
    assert put(store, *name, wait=True)!=was_off
    model.put(name)
    store.settle()

def do_get(store, model, name, harmed):
    "Read a record that is in the model, unless a fault took it"
    there = name in model.records
    model.touch(name)
    if is_right(store, *name)==there:
        return
    assert there and harmed(), 'a record is lost for no reason'
    model.records.pop(name)

def run_ops(store, ops, harmed=lambda: None):
    "A store and its model do the same; what a fault took is taken from the model"
    model = Model(store.units.count)
    for op,name in ops:
        kind,i = name
        if op=='put':
            do_put(store, model, name)
        if op=='get':
            do_get(store, model, name, harmed)
        if op=='touch':
            store.touch(kind, ident(i))
            model.touch(name)
        if op=='forget':
            store.forget(kind, ident(i))
            model.records.pop(name, None)
        if store.off:
            model.records.clear()
        same_records(store, model)

@some
@given(ops)
def test_a_store_is_a_dict_with_so_much_room(ops):
    store = store_in(HostMemory(PAGE+6*UNIT))
    run_ops(store, ops)
    assert store.errors==store.dropped==0 and not store.off
    left_clean(store)

@settings(some, max_examples=15)
@given(ops)
@pytest.mark.parametrize('keep', [False,True])
def test_so_is_one_in_a_file(tmp_path_factory, keep, ops):
    store = store_in(spill_file(tmp_path_factory.mktemp('s'), FP, keep))
    run_ops(store, ops)
    assert store.errors==0
    left_clean(store)

@settings(some, max_examples=150)
@given(ops, st.sampled_from(WAYS), nths, st.integers(0, 20000))
@example(THERE_AND_BACK, 'damaged', 1, 0)
@example(THERE_AND_BACK, 'damaged', 1, HEAD+4999)
def test_faults_are_misses(ops, way, nth, at):
    "A read is right or a miss, whatever goes wrong; what switches the tier off is told once"
    place = Faulty(way, nth, at)
    store = store_in(place)
    run_ops(store, ops, harmed=lambda: place.happened)
    assert bool(store.off)==(place.happened in SWITCH_OFF)
    if place.happened is None:
        assert store.errors==0
    if place.happened=='cut short':
        assert store.errors==1
    if store.off:
        assert store.errors==1 and not store.records
        assert not put(store, 'tile', 99) and not store.want('tile', ident(1))
    left_clean(store)

@some
@given(some_of('put put want want ready release forget'), st.sampled_from(WAYS), nths)
def test_in_any_order_and_at_any_speed(ops, way, nth):
    "Nobody waits for anything here: a read is right, a miss, or not there yet; nothing leaks"
    store = store_in(Faulty(way, nth, 4000), held=4*UNIT)
    for op,(kind,i) in ops:
        if op=='put':
            put(store, kind, i)
        if op=='want':
            store.want(kind, ident(i))
        if op=='release':
            store.release(kind, ident(i))
        if op=='forget':
            store.forget(kind, ident(i))
        if op=='ready':
            data = store.ready(kind, ident(i))
            if data is None or data is False:
                continue
            assert np.array_equal(data, content(kind, i))
    left_clean(store)

@pytest.mark.parametrize('fault', ['full','read fails','damaged'])
def test_the_log_tells_it_once(caplog, fault):
    store = store_in(Faulty(fault, 1, 500))
    for i in range(4):
        put(store, 'tile', i)
        store.settle()
    for i in range(4):
        get(store, 'tile', i)
    store.close()
    said = [r.message for r in caplog.records]
    assert len(said)==1 and 'second tier' in said[0]
    assert store.stats()['kv_spill_errors_total']==1

# -- nobody waits --------------------------------------------------------------------------------

class Slow(HostMemory):
    "Memory that writes, or reads, when it is told to"
    def __init__(self, reads=False, fails=False):
        super().__init__(PAGE+64*UNIT)
        self.reads,self.fails = reads,fails
        self.go,self.begun = threading.Event(),threading.Semaphore(0)
    def waits(self):
        self.begun.release()
        assert self.go.wait(WAIT)
        if self.fails:
            raise OSError(errno.EIO, 'Input/output error')
    def write(self, data, at):
        if not self.reads:
            self.waits()
        super().write(data, at)
    def read(self, data, at):
        if self.reads:
            self.waits()
        return super().read(data, at)

def full_of_tiles(place, **kw):
    "A store of six units, each with a tile"
    store = store_in(place, **kw)
    for i in range(6):
        put(store, 'tile', i, wait=True)
    store.settle()
    return store

def test_a_slow_disk_drops_and_never_waits():
    place = Slow()
    store = store_in(place, 60, held=0)
    taken = [put(store, 'tile', i) for i in range(9)]
    assert taken==[True]*4+[False]*5  # as many as there are buffers
    assert store.stats()['kv_spill_dropped_total']==5
    assert store.want('tile', ident(0)) and store.ready('tile', ident(0)) is None
    assert place.begun.acquire(timeout=WAIT)
    place.go.set()
    store.settle()
    assert [is_right(store, 'tile', i) for i in range(9)]==taken
    assert put(store, 'tile', 5)
    left_clean(store)

def test_who_closes_waits_for_buffers():
    place = Slow()
    store = store_in(place, 60, held=0)
    threading.Timer(.01, place.go.set).start()
    assert all(put(store, 'tile', i, wait=True) for i in range(9))
    store.settle()
    assert all(is_right(store, 'tile', i) for i in range(9))
    left_clean(store)

def test_what_never_has_room_is_not_waited_for():
    "Though something is being written"
    place = Slow()
    store = store_in(place, 1)
    assert put(store, 'tile', 0)
    assert not put(store, 'state', 0, wait=True)
    place.go.set()
    left_clean(store)

def test_what_is_being_written_is_not_dropped():
    place = Slow()
    store = store_in(place, 6, held=0)
    assert all(put(store, 'tile', i) for i in range(4)) and put(
        store, 'state', 1)
    assert not put(store, 'state', 2) and store.units.end==6
    place.go.set()
    store.settle()
    assert put(store, 'state', 2) and len(store.records)==4
    left_clean(store)

def test_what_is_wanted_is_not_dropped():
    place = Slow(reads=True)
    store = full_of_tiles(place)
    for i in range(6):
        assert store.want('tile', ident(i))
    assert not put(store, 'tile', 6) and store.dropped==1
    place.go.set()
    assert all(is_right(store, 'tile', i) for i in range(6))
    assert put(store, 'tile', 6)
    left_clean(store)

@pytest.mark.parametrize('forgotten', [False,True])
def test_nobody_wants_it_any_more(forgotten):
    "While it is read: its buffer comes back"
    place = Slow(reads=True)
    store = full_of_tiles(place)
    store.want('tile', ident(2))
    assert place.begun.acquire(timeout=WAIT)
    if forgotten:
        store.forget('tile', ident(2))
    store.release('tile', ident(2))
    place.go.set()
    left_clean(store)

def test_who_goes_on_in_order_gets_a_buffer():
    "Also where somebody else gave up what both had wanted, and all buffers have what comes later"
    store = store_in(HostMemory(PAGE+60*UNIT), 60, held=0)
    names = [('tile',ident(i)) for i in range(9)]
    def there(some):
        return all(store._reads[n].state=='there' for n in some)
    for i in range(9):
        put(store, 'tile', i, wait=True)
    store.settle()  # what is not written yet lets later ones go first
    for n in names:
        store.want(*n)
    until(lambda: there(names[:4]))
    for n in names[:4]:
        store.release(*n)
    until(lambda: there(names[4:8]))
    for i,n in enumerate(names):
        assert store.want(*n)
        until(lambda: store.ready(*n) is not None)
        assert is_right(store, 'tile', i)
    left_clean(store)

def test_two_readers_meet_the_same_trouble(caplog):
    place = Slow(reads=True, fails=True)
    store = full_of_tiles(place, readers=2)
    for i in range(4):
        store.want('tile', ident(i))
    for _ in range(2):
        assert place.begun.acquire(timeout=WAIT)
    place.go.set()
    assert not any(store.ready('tile', ident(i), wait=True)
        for i in range(4))
    until(lambda: store.errors==2)
    assert len(caplog.records)==1 and not store.records
    left_clean(store)

class Late(Mark):
    "Passed when it is waited for: `f` happens then"
    def __init__(self, f):
        self.f,self.passed = f,False
    def wait(self, doing=''):
        self.f()
        self.passed = True

def test_copies_out_are_waited_for():
    "Bytes that come late are there when they are sealed"
    store = store_in(HostMemory(PAGE+64*UNIT))
    def fill_late(out): return Late(partial(fill, 'tile', 3, out))
    store.put('tile', ident(3), fill_late)
    store.settle()
    assert is_right(store, 'tile', 3)
    left_clean(store)

def test_copies_in_are_waited_for():
    "A buffer that is still being read is not used for another record"
    store = store_in(HostMemory(PAGE+64*UNIT), held=0, readers=1)
    for i in range(6):
        put(store, 'tile', i, wait=True)
    late = [Late(int) for _ in range(4)]
    for i in range(4):
        store.want('tile', ident(i))
        store.ready('tile', ident(i), wait=True)
        store.release('tile', ident(i), late[i])
    assert not any(o.passed for o in late)
    assert is_right(store, 'tile', 4) and late[0].passed
    assert is_right(store, 'tile', 5) and late[1].passed
    assert not late[2].passed
    left_clean(store)

def test_a_card_that_fails_is_a_miss():
    def breaks():
        raise OutOfMemoryError('the card is gone')
    store = store_in(HostMemory(PAGE+64*UNIT))
    store.put('tile', ident(1), lambda out: Late(breaks))
    store.settle()
    assert store.off=='the card is gone' and not is_right(store, 'tile', 1)
    left_clean(store)

# -- records of a cache --------------------------------------------------------------------------

def rows(r, kind, numbers):
    "Bytes of some rows of all arrays"
    arrays = [np.array(a).view(np.ndarray)
        for a in r.arrays[kind]]
    return [a[numbers].tobytes() for a in arrays]

def shaken(r, seed):
    "Every byte of all arrays is some number"
    rng = np.random.default_rng(seed)
    for a in sum(r.arrays.values(), []):
        b = a.view(np.uint8)
        b[...] = rng.integers(0, 256, b.shape, np.uint8)

def moves(r, kind, here, there):
    "Do the rows `here` become those `there`, and nothing else?"
    n = len(r.arrays[kind][0])
    others = [i for i in range(n) if i not in there]
    want = rows(r, kind, here)
    rest = rows(r, kind, others)
    out = r.stream.buffer(r.sizes[kind])
    r.read(kind, here, out).wait()
    r.write(kind, there, out).wait()
    return rows(r, kind, there)==want and rows(r, kind, others)==rest

EMU = Emulator()
DEVICES = {'host':(Host(),None)}|{fmt:(EMU,fmt)
    for fmt in ('f16','fp8','nvfp4')}
twelve = st.permutations(range(12))

@pytest.mark.parametrize('where', DEVICES)
@settings(some, max_examples=20)
@given(twelve, twelve, st.integers(0, 5))
def test_records_move_whole_and_alone(where, one, two, slot):
    "A tile and a state arrive where they are put, in all caches, and nothing else is touched"
    device,fmt = DEVICES[where]
    caches = [KVCache(CONFIG, device, 12, 16, fmt, num_states=6)
        for _ in range(2)]
    r = Records(caches, device.own_stream())
    shaken(r, slot)
    assert moves(r, 'tile', one[:4], two[:4])
    assert moves(r, 'state', [slot], [(slot+1)%6])

def brought(r, store, kind, numbers):
    "Bring the record of that kind into `numbers`"
    store.want(kind, ident(1))
    data = store.ready(kind, ident(1), wait=True)
    store.release(kind, ident(1), r.write(kind, numbers, data))

@pytest.mark.parametrize('device', [Host(),EMU], ids=['host','emulator'])
@pytest.mark.parametrize('folder', [False,True])
def test_through_a_store(tmp_path, device, folder):
    "What was in some blocks is in others, after a memory or a file had it"
    cache = KVCache(CONFIG, device, 12, 16, num_states=4)
    r = Records([cache], device.own_stream(), 'm')
    store = open_spill(r, .01, tmp_path if folder else None)
    shaken(r, 1)
    was = {}
    for kind,numbers in dict(tile=[3,1,8,2], state=[2]).items():
        was[kind] = rows(r, kind, numbers)
        store.put(kind, ident(1), partial(r.read, kind, numbers))
    store.settle()
    shaken(r, 2)
    for kind,numbers in dict(tile=[0,5,6,11], state=[3]).items():
        brought(r, store, kind, numbers)
        assert rows(r, kind, numbers)==was[kind]
    left_clean(store)
    assert not list(tmp_path.iterdir())

def test_who_else_reads_it():
    "All that a record's bits depend on is in the fingerprint"
    def printed(device=Host(), dtype=None, size=16, model='m', **kw):
        caches = [KVCache(CONFIG, device, 4, size, dtype, **kw)]
        return Records(caches, device.own_stream(), model).fingerprint()
    ways = {}, dict(dtype=np.float16), dict(size=32), dict(model='n')
    seen = [printed(**kw) for kw in ways]
    seen += [printed(EMU, fmt) for fmt in (None,'fp8','bf16')]
    assert len(set(seen))==len(seen)
    assert printed()==printed(num_states=7)  # how many there are does not matter
    def another(): return 'another processor'
    other = Host()
    other.identity = another
    assert printed(other)!=printed()

# -- kept ----------------------------------------------------------------------------------------

def kept_store(folder, printed=FP, units=20):
    "A store in a file that stays"
    store = store_in(spill_file(folder, printed, True), units, printed)
    store.take_up()
    return store

def put_chain(store, n, first=1):
    "Tiles `first`..`n`, each after the one before, and a state after the last"
    for i in range(first, n+1):
        after = dict(parent=ident(i-1), depth=i-first,
            key=b'%d'%i)
        put(store, 'tile', i, wait=True, **after)
    put(store, 'state', n)

eight = st.integers(1, 8)

def is_known(r):
    "Is all that a tree needs to know of a record there?"
    i = r.ident[0]
    return r.kind=='state' or (r.parent,r.depth,r.key)==(
        ident(i-1),i-1,b'%d'%i)

@some
@given(eight, st.permutations(range(1, 9)),
    st.sets(eight))
def test_what_was_there_is_there(tmp_path_factory, n, order, forgotten):
    "In the order of its use, with all that a tree needs; what it cannot be reached by is gone"
    folder = tmp_path_factory.mktemp('k')
    store = kept_store(folder)
    put_chain(store, n)
    store.settle()
    for i in order:
        store.touch('tile', ident(i))
    for i in forgotten:
        store.forget('tile', ident(i))
    reach = min(forgotten|{n+1})
    want = [(k, i)
        for k,i in store.records if i[0]<reach]
    store.close()
    store = kept_store(folder)
    assert [r.name for r in store.kept]==list(store.records)==want
    for r in store.kept:
        assert is_known(r) and is_right(store, r.kind, r.ident[0])
    put_chain(store, n)
    left_clean(store)

def test_an_index_is_read_once(tmp_path):
    "Who has read it may change the file, and die: the next one begins anew"
    store = kept_store(tmp_path)
    put_chain(store, 3)
    store.close()
    store = kept_store(tmp_path)
    assert len(store.kept)==4
    store.place.path = None  # so it closes as a process that is killed would
    store.close()
    store = kept_store(tmp_path)
    assert not store.kept and not store.records
    left_clean(store)

def kept_by(path, folder, **kw):
    "What the second tier of a model writes on its records"
    kw |= dict(kv_spill_gb=.01, kv_spill_dir=folder, kv_spill_keep=True)
    llm = LLM(str(path), device='cpu', **kw)
    try:
        return llm.tier.store.fingerprint
    finally:
        llm.close()

def test_a_folder_knows_weights_by_their_files(tmp_path):
    "Others at the same place are another model, and so are made-up ones"
    here = tmp_path/'model'
    shutil.copytree(LLM('tiny', device='cpu').path, here)
    file = next(here.glob('*.safetensors'))
    times = file.stat().st_atime_ns,file.stat().st_mtime_ns
    def kept(**kw): return kept_by(here, tmp_path/'kept', **kw)
    first = kept()
    assert kept()==first and kept(load_format='dummy')!=first
    os.utime(file, ns=(times[0],times[1]+1))
    assert kept()!=first
    os.utime(file, ns=times)
    assert kept()==first

def tree_of(n):
    "A tree with a prompt of `n` tiles, and what copies its records"
    cache = small_cache(CONFIG, 40, 2)
    tree,table = PrefixTree(cache.pool),cache.table()
    table.ensure(n*TILE)
    trail = tree.trail(SimpleNamespace(salt=''), tile_keys(range(n*TILE)))
    tree.commit(trail, table, n*TILE)
    return tree,Records([cache], stream)

@pytest.mark.parametrize('room', [1,3,5])
@pytest.mark.parametrize('slow', [False,True])
def test_little_room_keeps_beginnings(tmp_path, room, slow):
    "Without its first tiles the others of a prompt are of no use"
    tree,records = tree_of(6)
    size = (room+.5)*unit_of(records.sizes)/1e9
    tier = SpillTier(tree, records, open_spill(records, size, tmp_path, True))
    real = tier.store.put
    def put(*args):
        real(*args)
        if not slow:
            tier.store.settle()
    tier.store.put = put
    tier.close(keep=True)
    store = open_spill(records, size, tmp_path, True)
    assert {r.depth for r in store.kept}==set(range(room))
    store.close()

class Later(HostMemory):
    "Memory, or what stands for a disk, that writes when `go` is set"
    def __init__(self, nbytes, quick):
        super().__init__(nbytes)
        self.quick,self.go = quick,threading.Event()
    def write(self, data, at):
        assert self.go.wait(WAIT)
        super().write(data, at)

@pytest.mark.parametrize('quick', [False,True])
def test_memory_is_waited_for(quick):
    "If more leaves at once than there are buffers, a disk drops it, and memory does not"
    tree,records = tree_of(9)
    nbytes = 60*unit_of(records.sizes)
    place = Later(PAGE+nbytes, quick)
    store = SpillStore(place, stream, records.sizes, nbytes, FP, held=0)
    tier = SpillTier(tree, records, store)
    def leave():
        for node in list(tree.all()):
            tier.put('tile', node, node.blocks)
    leaving = threading.Thread(target=leave)
    leaving.start()
    until(lambda: not store._idle['tile','write'], 'all buffers are full')
    if not quick:
        leaving.join(WAIT)
    place.go.set()
    leaving.join(WAIT)
    store.settle()
    assert store.dropped==(0 if quick else 5) and len(store.records)==9-store.dropped
    store.close()

class Held(HostMemory):
    "The first unit is written when `go` is set"
    def __init__(self):
        super().__init__(PAGE+2*UNIT)
        self.go = threading.Event()
    def write(self, data, at):
        if at==PAGE:
            assert self.go.wait(WAIT)
        super().write(data, at)

def test_who_waits_for_room_waits_for_the_oldest():
    "Though another is written before it"
    place = Held()
    store = store_in(place, 2)
    for i in range(2):
        put(store, 'tile', i)
    until(lambda: store.records['tile',ident(1)].written)
    last = threading.Thread(target=put, args=(store,'tile',2),
        kwargs=dict(wait=True))
    last.start()
    last.join(.1)
    place.go.set()
    last.join()
    store.settle()
    assert [i for _,i in store.records]==[ident(1),
        ident(2)]
    left_clean(store)

def test_a_card_that_fails_at_the_end(tmp_path):
    "Nothing is kept, and the store is closed all the same"
    tree,records = tree_of(1)
    tier = SpillTier(tree, records, open_spill(records, .001, tmp_path, True))
    def broken(*args):
        raise RuntimeError('it is gone')
    records.read = broken
    tier.close(keep=True)
    assert tier.store.closed and not any(t.is_alive()
        for t in tier.store._threads)
    store = open_spill(records, .001, tmp_path, True)
    assert not store.kept
    store.close()

def test_less_room_than_before(tmp_path):
    store = kept_store(tmp_path)
    put_chain(store, 8)
    store.close()
    store = kept_store(tmp_path, units=5)
    assert [r.ident[0] for r in store.kept]==[1,2,3,4,5]
    assert all(is_right(store, 'tile', i) for i in range(1, 6))
    assert os.path.getsize(store.place.path)<=PAGE+5*UNIT
    left_clean(store)

OTHERS = bytes(32) # The fingerprint of another model

def called(place, printed):
    "Give the files of `place` the names that they would have with a fingerprint"
    for p in (place.index,place.path):
        if p.exists():
            p.rename(p.with_name(p.name.replace(
                FP.hex()[:24],
                printed.hex()[:24])))

def commit(crime, place):
    "Do something to an index"
    data = place.index.read_bytes()
    records = unpack_index(data, FP, UNIT)
    if crime in ('none','a folder'):
        place.index.unlink()
    if crime=='a folder':
        place.index.mkdir()
    made = {
        'of another model': pack_index(records, OTHERS, UNIT),
        'other units': pack_index(records, FP, PAGE),
        'empty': b'',
        'cut': data[:-9]}
    if crime in made:
        place.index.write_bytes(made[crime])

@pytest.mark.parametrize('crime', ['of another model','other units','none','empty','cut',
    'a folder','called as another'])
def test_a_file_that_is_not_ours_is_thrown_away(tmp_path, caplog, crime):
    store = kept_store(tmp_path)
    put_chain(store, 4)
    store.close()
    commit(crime, store.place)
    printed = OTHERS if crime=='called as another' else FP
    called(store.place, printed)
    store = kept_store(tmp_path, printed)
    assert not store.kept and not store.records and store.errors==0
    told = crime not in ('none','empty')
    assert len(caplog.records)==told, 'it is told, where there was something'
    put_chain(store, 3)
    store.settle()
    assert is_right(store, 'tile', 2)
    left_clean(store)

def test_a_record_of_another_model_is_a_miss(tmp_path):
    "Even where the index is right: each record says whose it is"
    store = kept_store(tmp_path)
    put_chain(store, 3)
    store.close()
    index = store.place.index
    records = unpack_index(index.read_bytes(), FP, UNIT)
    index.write_bytes(pack_index(records, OTHERS, UNIT))
    called(store.place, OTHERS)
    store = kept_store(tmp_path, OTHERS)
    assert len(store.kept)==4
    assert not any(is_right(store, r.kind, r.ident[0])
        for r in store.kept)
    assert store.errors==4 and not store.off and not store.records
    left_clean(store)

# -- any bytes -----------------------------------------------------------------------------------

def signed(body): return body+_digest(body)

@settings(some, max_examples=300)
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_as_an_index(data, sealed):
    "A list or a `ValueError`, also where the digest fits"
    try:
        unpack_index(signed(data) if sealed else data, FP, UNIT)
    except ValueError:
        pass

four = st.integers(0, 3)
fields = st.tuples(
    st.sampled_from(['tile','state','other']),
    four,  # ident
    st.sampled_from([5000,14000,0,1<<60]),
    st.lists(st.integers(0, 9), max_size=3),  # units
    four,  # ident of the parent
    four,  # depth
    st.binary(max_size=9))

def record_of(kind, i, nbytes, units, parent, depth, key):
    return Record(kind, ident(i), nbytes, units, ident(parent), depth, key)

@settings(some, max_examples=200)
@given(st.lists(fields, max_size=5), st.binary(max_size=3))
def test_any_records_in_an_index(tmp_path_factory, rows, more):
    "What contradicts itself is thrown away; the store works all the same, and never raises"
    folder = tmp_path_factory.mktemp('f')
    index = pack_index([record_of(*row) for row in rows], FP, UNIT)
    path = folder/f'{_kept_name(FP)}-0.index'
    path.write_bytes(signed(index[:-16]+more))
    store = kept_store(folder, units=6)
    units = [u for r in store.kept for u in r.units]
    assert len(set(units))==len(units) and all(u<6
        for u in units)
    for r in list(store.kept):
        assert not is_right(store, r.kind, r.ident[0])
    put_chain(store, 3)
    store.settle()
    assert is_right(store, 'tile', 3) and store.off is None
    left_clean(store)

@settings(some, max_examples=200)
@given(arrays(np.uint8, HEAD+50),
    st.integers(0, HEAD+49), st.integers(1, 255))
def test_any_bytes_as_a_record(data, at, change):
    "No bytes pass for a record but its own, and none of those may differ"
    r = Record('tile', ident(1), 50, [])
    assert not is_sealed(data, r, FP)
    seal(data, r, FP)
    assert is_sealed(data, r, FP)
    data[at] ^= change
    assert is_sealed(data, r, FP)==(at in UNUSED)

UNUSED = range(80, HEAD)  # after the header and its checksum

# -- files and processes -------------------------------------------------------------------------

@pytest.mark.parametrize('folder', ['file','below a file','a\0b'])
def test_a_folder_that_is_none(tmp_path, folder):
    (tmp_path/'file').write_text('mine')
    where = str(tmp_path/folder) if folder!='below a file' else str(tmp_path/'file'/'x')
    cache = KVCache(CONFIG, Host(), 4, 16)
    r = Records([cache], stream)
    for keep in (False,True):
        with pytest.raises(RequestError) as e:
            open_spill(r, 1, where, keep)
        assert e.value.param=='kv_spill_dir'
    assert (tmp_path/'file').read_text()=='mine'

def test_too_little_or_too_much(caplog):
    r = Records([KVCache(CONFIG, Host(), 4, 16)], stream)
    for gb in (1e-6,1e9):
        with pytest.raises(RequestError) as e:
            open_spill(r, gb)
        assert e.value.param=='kv_spill_gb'
    r.sizes['state'] = 2*unit_of(r.sizes)
    store = open_spill(r, r.sizes['state']/1e9)
    assert 'states are not spilled' in caplog.text
    assert not store.put('state', ident(1),
        partial(r.read, 'state', [0]))
    assert store.put('tile', ident(1),
        partial(r.read, 'tile', range(4)))
    left_clean(store)

def test_a_folder_that_vanishes(tmp_path, caplog):
    for keep in (False,True):
        folder = tmp_path/f'{keep}'
        store = store_in(spill_file(folder, FP, keep))
        put(store, 'tile', 1)
        store.settle()
        shutil.rmtree(folder)
        put(store, 'tile', 2)
        store.settle()
        assert is_right(store, 'tile', 1) and is_right(store, 'tile', 2)
        store.close()
        assert store.errors==keep
    assert len(caplog.records)==1 and 'cannot be kept' in caplog.text

def test_where_the_page_cache_cannot_be_passed(tmp_path, monkeypatch):
    "A file system that refuses direct reads is read as others are"
    real = fcntl.fcntl
    def refuses(fd, op, flags=0):
        if op==fcntl.F_SETFL and flags&os.O_DIRECT:
            raise OSError(errno.EINVAL, 'Invalid argument')
        return real(fd, op, flags)
    monkeypatch.setattr(fcntl, 'fcntl', refuses)
    store = store_in(spill_file(tmp_path, FP))
    assert not store.place.direct and 'past' not in repr(store)
    put(store, 'state', 1)
    store.settle()
    assert is_right(store, 'state', 1)
    left_clean(store)

def test_engines_share_a_folder(tmp_path):
    "Two of the same model, one of another, one that keeps nothing: each has a file of its own"
    stores = [kept_store(tmp_path), kept_store(tmp_path), kept_store(tmp_path, bytes(32)),
        store_in(spill_file(tmp_path, FP))]
    for i,s in enumerate(stores):
        put_chain(s, i+1)
        s.settle()
    for i,s in enumerate(stores):
        found = [is_right(s, 'tile', j) for j in range(1, 5)]
        assert found==[True]*(i+1)+[False]*(3-i)
    for s in reversed(stores):
        left_clean(s)
    again = [kept_store(tmp_path) for _ in range(2)]
    assert [len(s.kept) for s in again]==[2,3]
    for s in again:
        s.close()

def test_what_another_version_has_kept_is_deleted(tmp_path):
    "And what somebody has locked is not, nor what is no file of ours"
    old = 'f'*8+'-'+'0'*24
    names = [f'{old}-{i}.{kind}' for i in (0,1) for kind in ('spill','index')]
    for name in (*names,'mine.spill',f'{old}-x.spill'):
        (tmp_path/name).write_text('kept')
    with (tmp_path/names[2]).open('r+') as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        left_clean(store_in(spill_file(tmp_path, FP)))
        assert all((tmp_path/name).exists() for name in names)
        left_clean(kept_store(tmp_path))
        assert [(tmp_path/name).exists() for name in names]==[False,
            False,True,True]
    assert (tmp_path/'mine.spill').exists() and (tmp_path/f'{old}-x.spill').exists()

SCRIPT = '''
import sys,signal,os,resource
sys.path.insert(0, {tests!r})
import test_spill as t
from atlas.engine.spill_file import spill_file
store = t.kept_store({folder!r}) if {keep} else t.store_in(spill_file({folder!r}, t.FP))
{then}
'''

def process(folder, keep, then):
    "Another process that does `then` with a store in the folder"
    tests = str(Path(__file__).parent)
    code = SCRIPT.format(tests=tests, folder=str(folder),
        keep=keep, then=then)
    return subprocess.Popen([sys.executable, '-c', code], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

DIES = 't.put_chain(store, 3); store.settle(); print("there", flush=True); sys.stdin.read()'

@pytest.mark.parametrize('keep', [False,True])
def test_a_process_that_is_killed(tmp_path, keep):
    "While it lives nobody touches its file; when it is dead its place is free, and empty"
    p = process(tmp_path, keep, DIES)
    try:
        assert p.stdout.readline()=='there\n'
        mine = kept_store(tmp_path)
        put_chain(mine, 2)
        mine.close()
    finally:
        p.send_signal(signal.SIGKILL)
        p.communicate(timeout=WAIT)
    first,second = kept_store(tmp_path),kept_store(tmp_path)
    found = [len(s.kept) for s in (first,second)]
    assert found==([0,3] if keep else [3,0])
    for s in (first,second):
        left_clean(s)
    assert len(list(tmp_path.iterdir()))==4  # two files, two lists

FULL = '''
resource.setrlimit(resource.RLIMIT_FSIZE, (3*t.UNIT, resource.RLIM_INFINITY))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for i in range(5):
    t.put(store, 'tile', i)
    store.settle()
print(bool(store.off), store.errors, t.is_right(store, 'tile', 0), len(store.records))
store.close()
'''

@pytest.mark.parametrize('keep', [False,True])
def test_a_file_that_may_not_grow(tmp_path, keep):
    "A real write that ends early, and the next that is refused"
    out,_ = process(tmp_path, keep, FULL).communicate(timeout=WAIT)
    assert out.split()==['True','1','False','0']
    store = kept_store(tmp_path)
    assert not store.kept
    left_clean(store)
