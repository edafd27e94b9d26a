"""The tools that made the tiny model, as far as they need no PyTorch:
what they write by rule is what they wrote for the model that ships."""
import json,subprocess,sys
from pathlib import Path
import pytest

TOOLS = Path(__file__).parents[1]/'tools'/'train_tiny'
FILES = sorted(TOOLS.glob('*.py'))

@pytest.mark.parametrize('path', FILES, ids=[p.name for p in FILES])
def test_it_compiles(path):
    compile(path.read_text(), str(path), 'exec')

SCRIPT = '''
import json,random
import rules,stories
rng = random.Random(5)
talks = [rules.conversation(rng) for _ in range(60)]
print(json.dumps([talks,stories.records(60, 5)]))
'''

@pytest.fixture(scope='module')
def by_rule():
    "Conversations and texts by rule, made by the tools themselves"
    done = subprocess.run([sys.executable,'-c',SCRIPT], cwd=TOOLS, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)

def test_text_by_rule_is_plain(by_rule):
    "ASCII, and no slot of a grammar left open"
    talks,texts = by_rule
    said = json.dumps(by_rule, ensure_ascii=False)
    assert said.isascii()
    assert '<<' not in said
    assert all(r['text'].strip() and '{' not in r['text'] for r in texts)
    assert len({r['text'] for r in texts})>50

def test_conversations_by_rule_have_turns(by_rule):
    "Somebody asks, and the model has the last word; calls name tools that were offered"
    for messages,tools in by_rule[0]:
        assert messages[0]['role'] in ('system','user')
        assert messages[-1]['role']=='assistant'
        offered = {t['function']['name'] for t in tools or ()}
        for m in messages:
            for c in m.get('tool_calls') or ():
                assert c['function']['name'] in offered
