"""Threads of one process: what they share is made once, what one builds is no place for another's
arrays, and one that hangs is alone"""
import asyncio,threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
import numpy as np,pytest
from atlas.card import card
from atlas.card.arena import Arena
from atlas.card.device import Budget
from atlas.card.emulator import Emulator,find_cxx
from atlas.card.sensors import OneAtATime
from atlas.cuda.checksum import arrays_of
from atlas.engine import sleep
import atlas.service.management # noqa: F401 (what a service can be asked)
from atlas.service.service import Service
from atlas.service.watch import Damper,Watcher
from atlas.use.llm import LLM
from helpers.waiting import WAIT,happens

needs_cxx = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')

@needs_cxx
def test_there_is_one_emulator(monkeypatch):
    "Also where two ask before there is any: kernels and their locks are a device's"
    both = threading.Barrier(2)
    class Slow(Emulator):
        def __init__(self):
            super().__init__()
            both.wait(WAIT)
    monkeypatch.setattr(card, '_devices', {})
    monkeypatch.setattr(card, 'Emulator', Slow)
    with ThreadPoolExecutor(2) as ex:
        first,second = [j.result() for j in [ex.submit(card._emulator) for _ in range(2)]]
    assert first is second is card._emulator()

@needs_cxx
def test_sums_are_not_where_weights_are_loaded():
    "A model is loaded by one thread, and another takes sums of one that is there"
    device = Emulator()
    there = device.upload(np.arange(4096, dtype='f4'))
    region = Arena(device, Budget(1<<26)).region('weights', 1<<24)
    with region.allocating(True), ThreadPoolExecutor(1) as ex:
        device.empty(64)
        before = region.used
        made_in = []
        zeros = device.zeros
        def seen(shape, dtype):
            a = zeros(shape, dtype)
            made_in.append(region.used-before)
            return a
        device.zeros = seen
        ex.submit(arrays_of(device).sums, [there]).result()
    assert before and made_in==[0]

def test_what_is_lent_while_it_falls_asleep(monkeypatch):
    "The thread that watches memory asks at any moment"
    m,resident,asked = LLM('tiny', 'cpu', 256, 1),sleep.resident,[]
    def meanwhile():
        asked.append(m.lent)
        return resident()
    monkeypatch.setattr(sleep, 'resident', meanwhile)
    m.sleep()
    m.wake()
    assert len(asked)>1 and not any(asked) and not m.lent
    m.close()

class Driver:
    "Answers nobody until it is let go"
    def __init__(self):
        self.asked,self.gone = 0,threading.Event()
    def __call__(self):
        self.asked += 1
        self.gone.wait(WAIT)
        return [],None

async def when_it_answers(look:OneAtATime, driver)->int:
    "How often it was asked until then"
    await happens(lambda: driver.asked)
    asked = driver.asked
    driver.gone.set()
    look.patience = WAIT
    await look()
    return asked

def test_a_driver_that_hangs_has_one_thread_of_a_server():
    async def scrapes():
        driver,s = Driver(),Service.__new__(Service)
        s.metrics = SimpleNamespace(machine='what it said last')
        s._sensors = OneAtATime(driver, .01)
        said = [await s.machine(fresh=0.) for _ in range(5)]
        assert said==['what it said last']*5
        assert await when_it_answers(s._sensors, driver)==1
        assert await s.machine(fresh=0.)==([],None) and driver.asked>1
    asyncio.run(scrapes())

def test_people_are_told_of_a_driver_that_hangs():
    told = []
    def tell(title, body):
        told.append(body)
        return True
    async def rounds():
        driver = Driver()
        w = Watcher({}, tell, damper=Damper(confirm=2), machine=driver, clock=lambda: 0.)
        w.machine.patience = .01
        for _ in range(3):
            await w.round()
        assert await when_it_answers(w.machine, driver)==1
        for _ in range(2):
            await w.round()
        await w.client.aclose()
    asyncio.run(rounds())
    who = "the cards' driver"
    assert told==[f'{who} does not answer', f'{who} is well again, after 0 s']
