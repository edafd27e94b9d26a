"""How long a gateway waits for its workers in tests: longer than any machine is busy.

A test about such a limit shortens it when all that could be late is there,
and nothing but the fault is left to come."""
from dataclasses import replace
from atlas.service.process import ProcessTimes
from helpers.waiting import WAIT

NEVER = 10*WAIT
PATIENT = ProcessTimes(
    beat=.05, stalled=NEVER, dead=NEVER, hung=NEVER, start=NEVER,
    grace=WAIT, pause=.02, longest=.1, well=NEVER, ends=4,
    drain=WAIT)

def impatient(model, **limits):
    "From now on the process of `model` is judged by these"
    model.policy = replace(model.policy, **limits)
