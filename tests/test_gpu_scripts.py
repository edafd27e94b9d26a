"""The scripts for a card, without one: each has something tiny to do on the emulator, so that none
of them arrives at a card and does not start."""
import os,shutil,subprocess,sys
from pathlib import Path
import pytest
from atlas.card.emulator import find_cxx
from helpers.waiting import WAIT

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')

def python(*command, **kw):
    "Run what may take long, with the package of this checkout"
    env = os.environ|dict(PYTHONPATH=str(ROOT))
    return subprocess.run([sys.executable, *command],
        env=env, capture_output=True, text=True, timeout=3*WAIT, **kw)

SCRIPTS = [
    ('unhappy', []),
    ('eager', ['--models','qwen3.6-moe']),
    ('guided', []),
    ('demo', []),
    ('endurance', ['--steps','12']),
    ('company', ['--models','llama','--tokens','6']),
    ('sanitize', ['--part','engine']),
    ('speculation', ['--models','llama','--tokens','6']),
    ('prefixes', ['--models','llama','--tokens','6']),
    ('turns', []),
    ('next_turns', ['--turns','3']),
    ('wide', ['--rows','16','--sweep','1']),
    ('table', []),
    ('starts', []),
    ('starts', ['--beside-dd','2']),
    ('startups', []),
    ('sleeping', []),
    ('many', ['--part','chunks']),
    ('aloft', []),
    ('parts', []),
    ('footprints', ['--only','llama','--kv','f16','--pieces','32']),
    ('choices', ['--rounds','1','--choices','router:ROWS=2:ROWS=1'])]

@pytest.mark.parametrize('name,more', SCRIPTS)
def test_on_the_emulator(name, more):
    r = python(ROOT/'tests'/'gpu'/f'{name}.py', '--emulator', *more)
    assert r.returncode==0 and r.stdout.splitlines()[-1].startswith('ok'), r.stdout+r.stderr

def test_a_fault_is_seen():
    "A row that depends on its company, and logits that depend on how a step is launched"
    code = '''
import sys; sys.path.insert(0, 'tests/gpu')
import company,eager,toys
from atlas.engine.card_stepper import CardStepper
land = CardStepper.land
def odd(self, flight):
    out = land(self, flight)
    if len(out.ids)>1: out.ids[0] = 7
    return out
CardStepper.land = odd
assert company.one('llama', True, 6)
CardStepper.land = land
replay = CardStepper.replay
def late(self, shape):
    replay(self, shape)
    w = self.model.layers[0].mixer.o_proj.weight
    w.s *= 1.01
CardStepper.replay = late
assert eager.one('llama', True)
'''
    r = python('-c', code, cwd=ROOT)
    assert r.returncode==0, r.stdout+r.stderr

def test_a_choice_that_says_something_else(tmp_path):
    "Sources with a mistake are told from those that are there"
    shutil.copytree(ROOT/'kernels', tmp_path, dirs_exist_ok=True)
    router = tmp_path/'router.cu'
    right = 'logits[(size_t)t * ld + r] = s + more;'
    text = router.read_text()
    assert text.count(right)==1
    router.write_text(text.replace(right, right.replace('s + more', 'more - s')))
    script = ROOT/'tests'/'gpu'/'choices.py'
    choice = f'router::@{tmp_path}'
    r = python(script, '--emulator', '--rounds', '1', '--choices', choice)
    assert r.returncode==1 and 'other tokens' in r.stdout, r.stdout+r.stderr
