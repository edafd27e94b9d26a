"""What fewer bits cost, across pages: checkpoints of all families stored anew, marks before a
text, and what the command refuses"""
import json
import numpy as np
import pytest
from pathlib import Path
from atlas import LLM
from atlas.engine.divergence import JudgedText,compare,open_reference,record,said_of
from atlas.ground.core import NumericError,UnsupportedError
from atlas.ground.options import EngineConfig
from atlas.ground.recoded import Recoded
from atlas.ground.weights import open_checkpoint
from atlas.ops import attention
from atlas.use.bench_quality import Form,FormedLLM,QualityPlan,bench_quality,forms
from atlas.use.cli import app # noqa: F401 (all commands)
from atlas.use.commands.base import run_command

DATA = Path(__file__).parent/'data'
SHORT = '--tokens 96 --context 64 --stride 32 --prompts 2 --answer 4'.split()
IDS = [1,5,9,2,7,3,8,4,6,10,12,11]

def quality(*args, model='tiny'):
    "The command on a short text"
    return run_command('bench', 'quality', str(model), '--device', 'cpu', *SHORT, *args)

def refused(r, *said):
    "Was a command refused, with these words?"
    assert r.exit_code in (1,2), r.output
    text = ' '.join(r.output.split())
    assert all(s in text for s in said), text

@pytest.mark.parametrize('name', ('gpt-oss','qwen3-vl-moe','qwen35-moe-stacked','granite-moe'))
def test_bf16_anew_is_the_same_model(name):
    "Stacks, turned ones too, come back as they were where nothing is rounded"
    config = EngineConfig(str(DATA/name), 'cpu', 32, 2)
    as_it_is,anew = LLM(config),FormedLLM(config, Form('bf16'))
    with open_checkpoint(DATA/name) as ck:
        source = {t.fmt for t in ck.tensors.values()}
    assert source<={'BF16','F32'}
    close = np.testing.assert_allclose if 'F32' in source else np.testing.assert_array_equal
    more = dict(atol=.05) if 'F32' in source else {}
    close(as_it_is.logits(IDS), anew.logits(IDS), **more)

@pytest.mark.parametrize('name', ('gpt-oss','qwen3-vl-moe','minimax-m2','nemotron-h','qwen3-next'))
def test_fewer_bits_are_further_off(name):
    "Of families with experts and states: eight bits are near, four farther, and neither is equal"
    config = EngineConfig(str(DATA/name), 'cpu', 32, 2)
    with open_checkpoint(DATA/name) as ck:
        four = 'nvfp4'
        assert Recoded(ck, four).how.taken
    first = LLM(config)
    ref = record(first, JudgedText(tuple(IDS), 8, 4))
    kl = {}
    for form in ('fp8',four):
        kl[form] = compare(FormedLLM(config, Form(form)), ref).kl.mean()
    assert 0<kl['fp8']<kl[four], kl

def test_marks_stand_before_each_window():
    "A prefix is read before every window, and not scored"
    llm = LLM('tiny', 'cpu', max_seq_len=32, max_num_seqs=2)
    text = JudgedText(tuple(IDS), 8, 4, (40,41))
    found = np.concatenate([x for _,x in said_of(llm, text)])
    first = llm.logits([40,41,*IDS[:8]])[2:9]
    second = llm.logits([40,41,*IDS[4:12]])[5:9]
    np.testing.assert_allclose(found, [*first,*second], atol=1e-4)
    assert compare(llm, record(llm, text)).kl.max()==0

@pytest.mark.slow
def test_report_and_reference(tmp_path):
    "What is printed, written and kept is the same, and a kept reference judges as the model does"
    kept,out = tmp_path/'kept',tmp_path/'out.json'
    r = quality('--weights', 'int4', '--save-reference', str(kept), '--output', str(out))
    assert r.exit_code==0, r.output
    d = json.loads(out.read_text())
    assert d['kind']=='atlas.bench.quality' and d['version']==1
    assert [row['weights'] for row in d['rows']]==['stored','int4']
    assert f'{d["rows"][1]["perplexity"]:.4f}' in r.output
    again = quality('--weights', 'stored,int4', '--reference', str(kept), '--json')
    rows = json.loads(again.output)['rows']
    assert rows[0]==rows[1]==d['rows'][0] and rows[2]==d['rows'][1]

def test_refused_before_anything_is_loaded(tmp_path):
    "Formats, files and weights that cannot be, each with its sentence"
    refused(quality('--weights', 'nvfp3'), "'nvfp3'", 'Did you mean nvfp4')
    refused(quality('--weights', ''), 'no format')
    refused(quality('--kv-cache-dtype', 'fp9'), 'keys and values', 'fp8')
    refused(quality('--load-format', 'dummy'), 'made-up weights have no quality')
    refused(quality('--text', str(tmp_path/'none')), 'cannot be read')
    short = tmp_path/'short'
    short.write_text('A cow.')
    refused(quality('--reference', str(short)), 'damaged or was not made by Atlas')
    refused(quality('--reference', str(tmp_path/'none')), 'none')

@pytest.mark.slow
def test_refused_by_the_model(tmp_path):
    "What only the model can tell"
    refused(quality('--prefill-activations', 'fp8'), 'prefill_activations is for models on a card')
    refused(quality(model=DATA/'gpt-oss'), 'tokenizer')
    short = tmp_path/'short.txt'
    short.write_text('A cow.')
    refused(quality('--text', str(short)), 'fewer than a window of 64')
    refused(quality('--stride', '64'), 'expected 1 to 63')
    refused(quality('--context', '5000'), '4,096')
    refused(quality('--reference-size', '1KiB'), 'Take at most')

def test_references_of_others(tmp_path):
    "One of another model is no reference for this one"
    names = 'qwen3-next','qwen3-moe-ct-nvfp4'
    mine,other = (LLM(str(DATA/n), 'cpu', max_seq_len=32) for n in names)
    text = JudgedText(tuple(IDS), 8, 4)
    kept = tmp_path/'kept'
    record(mine, text).save(kept)
    ref = open_reference(kept)
    with pytest.raises(ValueError, match='another model|vocabulary'):
        ref.check(other, text)

def test_numbers_that_are_none(tmp_path):
    "NaN ends a measurement with an error, and no report"
    llm = LLM('tiny', 'cpu', max_seq_len=32, max_num_seqs=2, exact=True)
    llm.model.lm_head.weight[3] = np.nan
    with pytest.raises(NumericError, match='for token 1 are not finite'):
        record(llm, JudgedText(tuple(IDS), 8, 4))

@pytest.mark.slow
def test_the_host_imitates_caches():
    "Fewer bits are further off, in the bytes that a card takes, and nothing is left behind"
    store = attention.write_kv
    plan = QualityPlan(96, 64, 32, 1, 4)
    asked = forms(caches=['f16','fp8','nvfp4'])
    first,*rows = bench_quality(EngineConfig('tiny', 'cpu'), asked, plan, tell=len).rows
    assert [r.cache for r in rows]==['as f16','as fp8','as nvfp4']
    assert [r.cache_bytes for r in (first,*rows)]==[2048,1024,544,320]
    assert 0<100*rows[0].kl<rows[1].kl<rows[2].kl
    assert attention.write_kv is store

def test_nothing_to_store_anew():
    "A model without matrices that fit a format is refused, and says why"
    with open_checkpoint(DATA/'linear-rope') as ck:
        with pytest.raises(UnsupportedError, match='not whole blocks of 32'):
            Recoded(ck, 'mxfp4')
