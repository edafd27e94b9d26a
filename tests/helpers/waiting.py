"""Waiting for what happens, and never for a time:
a machine that is busy makes tests slow, and fails none.

`WAIT` is the only limit there is. No working test comes near it: it ends one that hangs.
What has limits of its own is given those of helpers/patience.py."""
import asyncio,time

WAIT = 300.  # seconds

def _late(end, what):
    if time.monotonic()>end:
        raise AssertionError(f'{what or "it"} did not happen in {WAIT:g} s')

def until(condition, what='', again=.01):
    "Wait for a condition, and return what it gave"
    end = time.monotonic()+WAIT
    while not (got := condition()):
        _late(end, what)
        time.sleep(again)
    return got

async def happens(condition, what='', again=.005):
    "The same in an event loop"
    end = time.monotonic()+WAIT
    while not (got := condition()):
        _late(end, what)
        await asyncio.sleep(again)
    return got

def linear(seconds, n, loose):
    """Does `seconds(n)`, of processor, grow no faster than `n`?

    What takes less than `loose` is not looked at again. Of what takes longer,
    and that may be the machine, a quarter is measured, too:
    it has a sixteenth of the work where work grows with the square"""
    if seconds(n)<loose:
        return True
    whole = min(seconds(n), seconds(n))
    quarter = max(seconds(n//4), seconds(n//4))
    return whole<8*quarter
