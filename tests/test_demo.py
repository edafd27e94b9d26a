"""The main job, whole: the demo model in the engine under pressure, and behind HTTP in a process
of its own, spoken to by OpenAI's client."""
import re,signal,socket,subprocess,sys,threading
import httpx,pytest
from openai import BadRequestError,OpenAI
from pathlib import Path
from atlas import LLM,SamplingParams
from helpers.waiting import WAIT,until

prompts = [
    'The capital of France is', 'Once upon a time, in a village by the sea, there lived',
    'def fibonacci(n):\n', 'Water boils at', 'List: one, two,',
    'In 1969, for the first time in history, a human being set foot on the Moon. '*6]
chat = [dict(role='user', content='What is the capital of Norway?')]
def greedy(n, **kw): return SamplingParams(temperature=0, max_tokens=n, **kw)

@pytest.fixture(scope='module')
def llm(demo): return LLM('demo', device='cpu', max_seq_len=512)

@pytest.fixture(scope='module')
def alone(llm): return [llm.generate(p, greedy(24)).token_ids for p in prompts]

def test_it_knows_something(llm):
    assert 'Paris' in llm.generate(prompts[0], greedy(8)).text
    assert 'Oslo' in llm.chat(chat, greedy(16)).text

def test_company_changes_nothing(llm, alone):
    assert [o.token_ids for o in llm.generate(prompts, greedy(24))] == alone

def test_chunks_and_preemption_change_nothing(demo, alone):
    """A cache so small and so overpromised that sequences keep pushing each other out, prompts
    cut into the smallest chunks"""
    small = LLM(
        'demo', device='cpu', max_seq_len=256, chunk=64,
        overcommit=8., kv_cache_memory=16*46080*16)
    assert [o.token_ids for o in small.generate(prompts, greedy(24))] == alone
    stats = small.engine.stats()
    assert stats['num_preemptions_total']>0
    assert stats['replay_tokens_total']>0
    assert stats['blocks_used']==0

def test_seed(llm):
    hot = SamplingParams(temperature=1., top_p=.95, seed=11, max_tokens=12)
    one = llm.generate(prompts[1], hot).token_ids
    company = llm.generate(
        [prompts[0], prompts[1], prompts[3]], [greedy(20), hot, greedy(3)])
    assert company[1].token_ids==one
    assert llm.generate(
        prompts[1],
        SamplingParams(temperature=1., top_p=.95, seed=12, max_tokens=12)).token_ids!=one

def test_leaving_a_stream_frees_its_blocks(llm):
    s = llm.stream(prompts[1], greedy(100))
    for _ in range(3):
        next(s)
    s.close()
    assert not llm.engine.has_work
    assert llm.engine.stats()['blocks_used']==0

def test_context_is_a_bound_for_max_tokens_and_an_error_for_prompts(llm):
    o = llm.generate([5]*505, greedy(400, ignore_eos=True))
    assert (len(o.token_ids), o.finish_reason)==(7, 'length')
    with pytest.raises(Exception, match='512 tokens and the context holds 512'):
        llm.generate([5]*512, greedy(1))

def healthy(url):
    try:
        return httpx.get(url+'/health', timeout=WAIT).status_code==200
    except httpx.TransportError:
        return False

@pytest.fixture(scope='module')
def served(demo):
    "`atlas serve demo` as a user starts it; its address"
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    atlas = Path(sys.executable).with_name('atlas')
    command = [atlas, 'serve', 'demo', '--port', str(port), '--max-seq-len', '512']
    p = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    url = f'http://127.0.0.1:{port}'
    threading.Thread(target=lambda: lines.extend(p.stdout), daemon=True).start()
    until(lambda: p.poll() is not None or healthy(url), again=.2)
    assert p.poll() is None, ''.join(lines)
    yield url
    p.send_signal(signal.SIGINT)
    try:
        assert p.wait(WAIT) in (0,130)
    finally:
        p.kill()

@pytest.fixture(scope='module')
def client(served):
    return OpenAI(base_url=f'{served}/v1', api_key='none', max_retries=0, timeout=WAIT)

def test_chat_over_http(client, llm):
    want = llm.chat(chat, greedy(16))
    r = client.chat.completions.create(model='demo', messages=chat, temperature=0, max_tokens=16)
    choice = r.choices[0]
    assert (choice.message.content,choice.finish_reason)==(want.text,want.finish_reason)
    assert r.usage.completion_tokens==want.usage['completion_tokens']

def test_stream_over_http(client, llm):
    s = list(
        client.chat.completions.create(
            model='demo', messages=chat, temperature=0, max_tokens=16,
            stream=True, stream_options=dict(include_usage=True)))
    told = [c.choices[0].delta.content or '' for c in s if c.choices]
    assert ''.join(told)==llm.chat(chat, greedy(16)).text
    usage = s[-1].usage
    assert usage.total_tokens==usage.prompt_tokens+usage.completion_tokens

def test_completion_over_http(client, llm):
    r = client.completions.create(
        model='demo', prompt=prompts[0], temperature=0,
        max_tokens=8, logprobs=2)
    assert r.choices[0].text==llm.generate(prompts[0], greedy(8)).text
    assert len(r.choices[0].logprobs.tokens)==8

def test_prompt_too_long_over_http(client):
    with pytest.raises(BadRequestError, match=r'context holds 512') as e:
        client.completions.create(model='demo', prompt='word '*900, max_tokens=4)
    assert e.value.code=='context_length_exceeded'
    assert '90' in str(e.value)

def test_still_answers_after_bad_bodies(served, client):
    at,as_json = f'{served}/v1/completions',{'content-type': 'application/json'}
    no_number = b'{"model": "demo", "prompt": "x", "temperature": NaN}'
    r = httpx.post(at, content=no_number, headers=as_json, timeout=WAIT)
    assert r.status_code in (400,422)
    r = httpx.post(at, json=dict(model='demo', prompt=3.5), timeout=WAIT)
    assert r.status_code in (400,422)
    r = client.completions.create(model='demo', prompt='Hi', max_tokens=1, temperature=0)
    assert r.choices[0].finish_reason=='length'

def metric(served, what):
    "The sum of the metrics whose lines begin so"
    lines = httpx.get(f'{served}/metrics', timeout=WAIT).text.splitlines()
    values = [l.split()[-1] for l in lines if re.match(f'atlas:{what}', l)]
    return sum(map(float, values))

def test_a_client_that_leaves_stops_its_generation(served, client):
    def running(): return metric(served, 'num_requests_running')
    def steps(): return metric(served, 'steps_total')
    def left(): return metric(served, 'aborted_requests_total.*client_gone')
    before,done = left(),steps()
    s = client.completions.create(
        model='demo', prompt='Once', max_tokens=450, stream=True,
        extra_body=dict(ignore_eos=True))
    for _,c in zip(range(3), s):
        pass
    s.close()
    # it was counted as one that left, and not as one that ended
    until(lambda: left()==before+1 and running()==0)
    assert steps()-done<400  # where 450 tokens take a step each
