"The command: exit codes, pipes and terminals, and that every flag reaches something."
import ast,dataclasses,inspect,json,os,pty,re
import select,signal,socket,subprocess,sys,urllib.request
import pytest
from pathlib import Path
from types import SimpleNamespace
from typer.testing import CliRunner
from unittest import mock
import atlas.use.cli as cli
from atlas.use.commands import base,talk
from atlas.use.commands import bench as measuring
from atlas.ground import hub
from atlas.ground.core import AtlasError,ContextLengthError
from atlas.ground.hub import LocalModel
from atlas.ground.options import EngineConfig,differs
from atlas.ground.requests import SamplingParams
from atlas.text.deltas import Delta
from atlas.text.generation import Output
from helpers.waiting import WAIT

root = Path(__file__).parents[1]

def run(*args, input=None):
    "Run a command; a fault of ours is raised, not hidden in the result"
    r = CliRunner().invoke(cli.app, list(args), input=input, prog_name='atlas')
    if r.exception and not isinstance(r.exception, SystemExit):
        raise r.exception
    return r

def said(text, reasoning=''):
    "A piece of an answer, of one token"
    return Delta(reasoning, text, tokens=(1,))

class Fake:
    "Stands for `LLM`: remembers what it was given, and says `answer`"
    answer,error,cached = ['Hel','lo ','you'],None,0
    sampling = {}
    def __init__(self, options):
        model,Fake.made = options.model,options
        self.name = model
        self.max_seq_len = 512
        self.load_seconds = 1.5
        self.device = SimpleNamespace(name='cpu')
        self.config = SimpleNamespace(vocab_size=99)
        self.engine = 'engine'
        self.tokenizer = 'tokenizer'
        self.template = 'template'
    def close(self):
        Fake.closed = self
    def params(self, **given): return SamplingParams(**self.sampling|given)
    def stream(self, prompt, params):
        Fake.asked = dict(prompt=prompt, params=params)
        for w in self.answer:
            yield said(w)
        if self.error:
            raise self.error
        if self.cached:
            yield Delta(finish='stop', cached=self.cached)
    def generate(self, prompt, params):
        ds = list(self.stream(prompt, params))
        text,thought = (
            ''.join(getattr(d, of) for d in ds)
            for of in ('text','reasoning'))
        return Output(text, [], 'stop', dict(total_tokens=5), reasoning=thought)
    def chat(self, messages, params, stream=False, **template):
        Fake.told = template
        return (self.stream if stream else self.generate)(list(messages), params)

@pytest.fixture
def fake(monkeypatch):
    class F(Fake):
        pass
    monkeypatch.setitem(sys.modules, 'atlas.use.llm', SimpleNamespace(LLM=F))
    return F

# Flags

def commands():
    return {c.name or c.callback.__name__: c.callback for c in cli.app.registered_commands}

def test_the_commands():
    assert {'serve','run','chat','pull','list','rm','inspect','version'} <= set(commands())

def names_read(tree):
    return {
        n.id for n in ast.walk(tree)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}

def of_tables(f, read):
    """Flags that are fields of a dataclass which `f` takes out of its options:
    those that its module reads of one, or all where it hands the whole on"""
    module = ast.parse(inspect.getsource(inspect.getmodule(f)))
    fields = {n.attr for n in ast.walk(module) if isinstance(n, ast.Attribute)}
    tables = [t for n,t in vars(inspect.getmodule(f)).items()
        if n in read and dataclasses.is_dataclass(t)]
    names = {c.name for t in tables for c in dataclasses.fields(t)}
    return names if 'asdict' in names_read(module) else names&fields

def test_every_flag_is_read():
    benches = [c.callback for c in measuring.benches.registered_commands]
    for f in [*commands().values(), *benches]:
        read = names_read(ast.Module(ast.parse(inspect.getsource(f)).body[0].body, []))
        handed = set(base.FLAGS)|of_tables(f, read) if 'options' in read else set()
        unread = set(inspect.signature(f).parameters)-read-handed
        assert not unread, f'{f.__name__} has a parameter that nothing reads'

@pytest.mark.parametrize('name', sorted(commands()))
def test_help(name):
    r = run(name, '--help')
    assert r.exit_code==0 and 'Examples:' in r.output
    for l in r.output.split('Examples:')[0].splitlines():
        assert len(l)<=100
    for p in inspect.signature(commands()[name]).parameters.values():
        o = p.annotation.__metadata__[0]
        assert o.help and o.help.endswith((']','.')), f'{name}: {p.name} has no help'

def test_usage_errors():
    for args in (
        ['fly'], ['run'],
        ['run','m','p','--temperature','hot'],
        ['run','m','p','-t','-1'],
        ['run','m','p','-t','nan'],
        ['serve','m','--port','70000'],
        ['serve','m','--kv-cache-memory','lots'],
        ['run','m','--raw','--system','x','p'],
        ['run','m','-n','0','p'],
        ['list','extra']
    ):
        r = run(*args)
        assert (r.exit_code,r.stdout)==(2,''), args
        assert 'Usage' in r.stderr or 'Error' in r.stderr

def test_help_is_light():
    "`atlas --help` in a fresh process brings in nothing heavy, `import atlas` even less"
    names = 'numpy fastapi pydantic tokenizers huggingface_hub jinja2 cupy rich asyncio'
    heavy = f'set({names!r}.split()) & set(sys.modules)'
    help_said_to_nobody = '''import sys,io
from atlas.use.cli import app
out,sys.stdout = sys.stdout,io.StringIO()
app(['--help'], standalone_mode=False)
sys.stdout = out
'''
    for code in (f'import sys,atlas; print({heavy})', help_said_to_nobody+f'print({heavy})'):
        assert subprocess.run(
            [sys.executable, '-c', code], capture_output=True,
            text=True, check=True).stdout=='set()\n'

def test_completion():
    def complete(words):
        env = os.environ|dict(
            _ATLAS_COMPLETE='complete_bash', COMP_WORDS='atlas '+words,
            COMP_CWORD=str(len(words.split())))
        command = [sys.executable, '-c', 'from atlas.use.cli import main; main()']
        done = subprocess.run(command, text=True, capture_output=True, env=env)
        return done.stdout.split()
    assert complete('insp')==['inspect']
    assert 'demo' in complete('run dem')
    assert '--temperature' in complete('run --te')

# Errors and exit codes

def test_refusals_are_two_lines(monkeypatch):
    def no(name, show=None):
        raise AtlasError('It is gone', hint='Look elsewhere')
    monkeypatch.setattr(hub, 'pull', no)
    r = run('pull', 'x')
    assert (r.exit_code,r.stdout,r.stderr)==(1, '', 'atlas: It is gone\n       Look elsewhere\n')

def test_faults_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(hub, 'pull', lambda name: 1/0)
    with pytest.raises(ZeroDivisionError):
        run('pull', 'x')

def test_ctrl_c(fake, monkeypatch):
    fake.error = KeyboardInterrupt()
    r = run('run', 'm', 'hi')
    assert r.exit_code==130 and r.stdout.startswith('Hello you') and 'Traceback' not in r.stderr

# Models on this machine

@pytest.fixture
def two(monkeypatch):
    es = [
        LocalModel('demo', Path('/c/demo.gguf'), 98_362_432, 'gguf'),
        LocalModel('org/m', Path('/h/m'), 5_000, 'safetensors')]
    gone = []
    monkeypatch.setattr(hub, 'cached', lambda: [e for e in es if e.name not in gone])
    monkeypatch.setattr(hub, 'remove', lambda n: gone.append(n) or 5_000)
    return gone

def test_list(two):
    out = run('list').stdout.splitlines()
    assert out[0].split()==['NAME','SIZE','KIND','PATH']
    assert out[1].split()==['demo','98.4','MB','gguf','/c/demo.gguf']
    assert json.loads(run('list', '--json').stdout)[1]==dict(
        name='org/m', bytes=5000, kind='safetensors', path='/h/m')
    two += ['demo','org/m']
    assert 'atlas pull demo' in run('list').stdout and json.loads(run('list', '--json').stdout)==[]

def test_rm_asks(two):
    assert run('rm', 'org/m', input='n\n').exit_code==1 and two==[]
    assert run('rm', 'org/m', input='').exit_code==1 and two==[]      # nobody there to ask
    r = run('rm', 'org/m', input='y\n')
    assert r.exit_code==0 and two==['org/m'] and '5 kB' in r.output
    r = run('rm', 'demo', '--yes', '--json')
    assert json.loads(r.stdout)==dict(removed='demo', bytes=5000)
    assert two==['org/m','demo']

def test_pull(monkeypatch, tmp_path):
    (tmp_path/'a').write_bytes(b'123')
    (tmp_path/'b').write_bytes(b'4567')
    assert run('pull', str(tmp_path)).stdout.strip()==str(tmp_path)
    assert json.loads(run('pull', '--json', str(tmp_path)).stdout)==dict(
        name=str(tmp_path), path=str(tmp_path),
        bytes=7)

def test_version():
    import atlas
    assert run('version').stdout.startswith(f'atlas {atlas.__version__}\n')
    assert json.loads(run('version', '--json').stdout)['packages']['numpy']

def bytes_add_up(x, files):
    "What is told of bytes and weights agrees with itself, and with the bytes of the files"
    assert x['bytes']<=files<x['bytes']+200_000 # the rest is the header
    parts,formats = x['parts'],x['formats']
    assert sum(p['bytes'] for p in parts.values())==x['bytes']
    assert sum(f['bytes'] for f in formats.values())==x['bytes']
    # not used: scales of activations, other towers
    used = sum(p['weights'] for k,p in parts.items() if k!='unused')
    # an ordered drafter's table is no weight
    table = x['vocab_size'] if parts.get('drafter') else 0
    assert used-x['total_parameters'] in (0,table)
    assert 0<x['bytes_per_token']<=x['bytes']

@pytest.mark.parametrize(
    'd',
    sorted(
        p for p in (root/'tests'/'data').glob('*/')
        if (p/'config.json').exists()),
    ids=lambda p: p.name)
def test_inspect_folder(d):
    "What is said of a folder agrees with its config and its files"
    x = json.loads(run('inspect', '--json', str(d)).stdout)
    c = json.loads((d/'config.json').read_text())
    c = c.get('text_config', c)
    assert x['name']==str(d) and x['kind']=='safetensors'
    assert x['layers']==c['num_hidden_layers'] and x['vocab_size']==c['vocab_size']
    bytes_add_up(x, sum(f.stat().st_size for f in d.glob('*.safetensors')))
    assert x['kv_bytes_per_token']%4==0
    assert len(x['mixers'])==len(x['ffns'])==x['layers']
    assert (x['tokenizer'],x['chat_template'])==((d/'tokenizer.json').exists(), False)
    text = run('inspect', str(d)).stdout
    assert f'{x["parameters"]:,}' in text and 'tokenizer' in text and 'a token reads' in text

def test_inspect_demo(demo):
    x = json.loads(run('inspect', '--json', 'demo').stdout)
    assert (
        x['family'],x['parameters'],x['tokenizer'],
        x['chat_template'],x['kv_bytes_per_token']
    )==('llama', 134_515_008, True, True, 30*2*3*64*4)
    assert set(x['formats'])=={'Q4_1','Q8_0','F32'}
    assert x['bytes']<demo.stat().st_size

def test_inspect_shape():
    x = json.loads(run('inspect', '--json', 'qwen3.6-27b', '--weights', 'nvfp4').stdout)
    assert (x['kind'],x['path'],x['mixers'][:4])==(
        'dummy', None, ['delta']*3+['attention'])
    assert set(x['parts']['mlp']['formats'])=={'NVFP4'}
    assert 'D gated delta net' in run('inspect', 'qwen3.6-27b').stdout
    r = run('inspect', 'qwen3.6-27b', '--weights', 'int3')
    assert r.exit_code==1 and 'int3' in r.stderr
    assert run('inspect', 'qwen3.6-28b').exit_code==1

def test_inspect_damaged(tmp_path):
    (tmp_path/'x.gguf').write_bytes(b'GGUF'+b'\xff'*40)
    r = run('inspect', str(tmp_path/'x.gguf'))
    assert r.exit_code==1
    assert r.stderr.startswith('atlas: ')
    assert 'x.gguf' in r.stderr
    assert r.stdout==''

def test_a_folder_of_no_name(fake, tmp_path, monkeypatch):
    "'.' is called as the folder is, in errors and in a chat"
    from atlas.ground.core import SourceError
    from atlas.ground.weights import open_checkpoint
    (at := tmp_path/'mine'/'sub').mkdir(parents=True)
    monkeypatch.chdir(at)
    names = {'.':'sub', './':'sub', '..':'mine'}
    for path,name in names.items():
        with pytest.raises(SourceError, match=f'^{name} has no model'):
            open_checkpoint(path)
    monkeypatch.setattr(talk, '_line', lambda mark: None)
    echo = mock.patch.object(talk.typer, 'echo')
    with mock.patch('sys.stdin') as stdin, echo as said:
        stdin.isatty.return_value = True
        talk.chat('.', None, 0., None, None)
    assert said.call_args_list[0].args[0].startswith('sub, context')

# One prompt

def test_run(fake):
    r = run(
        'run', 'm', 'hi', '-t', '0', '-n', '7', '--seed',
        '3', '--system', 'Be brief', '--device', 'cpu', '--max-seq-len', '99')
    assert (r.exit_code,r.stdout,r.stderr)==(0, 'Hello you\n', '')
    p = Fake.asked['params']
    assert (p.temperature,p.max_tokens,p.seed)==(0,7,3)
    assert Fake.asked['prompt']==[
        dict(role='system', content='Be brief'),
        dict(role='user', content='hi')]
    assert Fake.made==EngineConfig('m', 'cpu', 99, max_num_seqs=1)

def test_run_with_pictures(fake):
    assert run('run', 'm', '--image', 'a.png', '--image', 'b.jpg', 'what?').exit_code==0
    a = dict(type='image', path='a.png', where='--image a.png')
    b = dict(type='image', path='b.jpg', where='--image b.jpg')
    content = [a, b, dict(type='text', text='what?')]
    assert Fake.asked['prompt']==[dict(role='user', content=content)]
    assert run('run', 'm', '--raw', '--image', 'a.png', 'what?').exit_code==2

def test_one_place_for_defaults(fake):
    "Who says nothing of how to choose tokens gets what the API gives, and the help says so"
    from atlas.ground.requests import SamplingParams
    for args in ('run m hi', 'run m hi --raw', 'run m hi --json', 'chat m'):
        Fake.asked = {}
        assert run(*args.split(), input='hi\n').exit_code==0
        assert Fake.asked['params']==SamplingParams()
    fake.sampling = dict(temperature=.6, top_k=20)
    assert run('run', 'm', 'hi', '-t', '0.2').exit_code==0
    assert Fake.asked['params']==SamplingParams(temperature=.2, top_k=20)
    said = f'[default: {SamplingParams().temperature:g}, as in the API]'
    for command in ('run','chat'):
        told = run(command, '--help').output
        assert said in ' '.join(told.split())

def test_the_protocols_have_the_same_defaults():
    from atlas.ground.requests import SamplingParams
    from atlas.service.protocol import anthropic,openai,responses
    hello = [dict(role='user', content='hi')]
    bodies = [
        (openai.parse, dict(messages=hello)),
        (openai.parse_text, dict(prompt='hi')),
        (responses.parse, dict(input='hi')),
        (anthropic.parse, dict(messages=hello, max_tokens=9))]
    for parse,body in bodies:
        p = parse(json.dumps(body).encode()).params
        assert p==SamplingParams(max_tokens=p.max_tokens)

def test_the_page_says_nothing_of_temperature_until_somebody_does():
    "So it has what the API gives: the model's own"
    page = (root/'atlas'/'service'/'static'/'chat.html').read_text()
    assert re.search(r"const DEFAULTS = {[^}]*temperature: ''", page)
    assert "if (s.temperature !== '') body.temperature" in page

def test_a_picture_that_cannot_be_read_is_named(tmp_path):
    "By the path that was given, however long it is"
    from atlas.ground.core import RequestError
    from atlas.text.images import prepare_images
    no_image = tmp_path/('a'*100+'.png')
    no_image.write_text('no image')
    nowhere = '/'+'a'*100+'/none.jpg'
    for path in ('/none.jpg', nowhere, str(tmp_path), str(no_image)):
        messages = talk._messages('what?', images=[path])
        with pytest.raises(RequestError) as e:
            prepare_images(messages, paths=True)
        assert e.value.msg.startswith(f'--image {path} is no ')
        assert e.value.msg.count(path)==1

def test_run_raw_and_stdin(fake):
    run('run', 'm', '--raw', 'once')
    assert Fake.asked['prompt']=='once'
    run('run', 'm', '--raw', '-', input='from\na pipe\n')
    assert Fake.asked['prompt']=='from\na pipe'
    run('run', 'm', input='piped')
    assert Fake.asked['prompt']==[dict(role='user', content='piped')]
    assert run('run', 'm', input='').exit_code==2
    assert run('run', 'm', '-', input='\n').exit_code==2

def test_run_json(fake):
    for args in ['--raw'],[]:
        assert json.loads(run('run', 'm', 'hi', '--json', *args).stdout)==dict(
            text='Hello you', finish_reason='stop', usage=dict(total_tokens=5))

def test_run_prints_as_it_comes(fake, monkeypatch):
    "Each piece is written before the next one is asked for"
    seen,out = [],[]
    monkeypatch.setattr(
        talk.typer, 'echo',
        lambda s='', nl=True, **kw: out.append(s))
    class Watch(fake):
        def stream(self, *a):
            for d in super().stream(*a):
                yield d
                seen.append(''.join(out))
    monkeypatch.setattr(sys.modules['atlas.use.llm'], 'LLM', Watch)
    talk.run('m', 'hi')
    assert seen==['Hel', 'Hello ', 'Hello you']

def test_run_refused_midway(fake):
    fake.error = ContextLengthError('Too long', hint='Shorten it')
    r = run('run', 'm', 'hi')
    assert (r.exit_code,r.stderr)==(1, 'atlas: Too long\n       Shorten it\n')

# Thoughts

@pytest.fixture
def thinker(fake):
    "A model that thinks before it answers, as its template has it"
    thought,answer = ['Hm.',' So\n'],['\n\nHello ','you']
    fake.pieces = [
        *(said('', t) for t in thought),
        *map(said, answer)]
    def stream(self, prompt, params):
        Fake.asked = dict(prompt=prompt, params=params)
        yield from self.pieces
        yield Delta(finish='stop')
    fake.stream = stream
    return fake

SHOWN = 'thinking…\nHm. So\n\n'

@pytest.mark.parametrize('flags,err', [([],''), (['--hide-thinking'],''),
                                       (['--show-thinking'],SHOWN)])
def test_a_pipe_gets_the_answer_alone(thinker, flags, err):
    r = run('run', 'm', 'hi', *flags)
    assert (r.exit_code,r.stdout,r.stderr)==(0, 'Hello you\n', err)
    r = run('chat', 'm', *flags, input='hi\n')
    assert (r.stdout,r.stderr)==('Hello you\n', err)

def test_json_has_the_thought_by_itself(thinker):
    d = json.loads(run('run', 'm', 'hi', '--json').stdout)
    assert (d['reasoning'],d['text'])==('Hm. So\n', '\n\nHello you')

@pytest.mark.parametrize('why,hint', [('length',True), ('stop',False)])
def test_a_thought_that_never_ends(thinker, why, hint):
    "Nothing goes to the pipe, and it is said why"
    def stream(self, *_):
        yield from (said('', 'Hm.'), Delta(finish=why))
    thinker.stream = stream
    r = run('run', 'm', 'hi')
    assert (r.exit_code,r.stdout)==(0,'') and 'Hm' not in r.stderr
    assert 'only thoughts, and no answer' in r.stderr
    assert ('--max-tokens' in r.stderr)==hint

def test_thoughts_are_no_part_of_a_conversation(thinker):
    assert run('chat', 'm', input='one\ntwo\n').stdout=='Hello you\n'*2
    before = [('user','one'), ('assistant','Hello you'), ('user','two')]
    assert Fake.asked['prompt']==[dict(role=r, content=c) for r,c in before]
    thinker.pieces = thinker.pieces[:2]  # no answer: the question is taken back
    run('chat', 'm', input='one\ntwo\n')
    assert Fake.asked['prompt']==[dict(role='user', content='two')]

@pytest.mark.parametrize(
    'flags,told',
    [([],{}),
     (['--think'],dict(enable_thinking=True)),
     (['--no-think'],dict(enable_thinking=False))])
def test_whether_to_think_is_told_to_the_template(fake, flags, told):
    for args in (
        ['run','m','hi'],
        ['run','m','hi','--json'], ['chat','m']
    ):
        assert run(*args, *flags, input='hi\n').exit_code==0
        assert Fake.told==told
    if flags:
        assert run('run', 'm', '--raw', 'hi', *flags).exit_code==2

# Chat

def test_chat(fake, monkeypatch):
    r = run(
        'chat', 'm', '--system', 'S',
        input='one\n\ntwo\n/reset\n/system\nthree\n/nope\n/quit\nfour\n')
    assert (r.exit_code,r.stdout)==(
        0, 'Hello you\nHello you\nThe conversation starts anew.\nNo system message.\nHello you\n')
    assert '/nope' in r.stderr and '/help' in r.stderr
    assert Fake.asked['prompt']==[dict(role='user', content='three')]
    run('chat', 'm', '--system', 'S', input='one\n/unix/path?\n')     # a path is no command
    assert Fake.asked['prompt']==[
        dict(role=r, content=c)
        for r,c in (
            ('system','S'),('user','one'),
            ('assistant','Hello you'),('user','/unix/path?'))]

def test_chat_goes_on_after_a_refusal(fake):
    fake.answer,fake.error = [],ContextLengthError('Too long', hint='Use /reset')
    r = run('chat', 'm', input='one\ntwo\n')
    assert r.exit_code==0 and r.stderr.count('atlas: Too long. Use /reset')==2
    # the refused question is not in the history
    assert Fake.asked['prompt']==[dict(role='user', content='two')]

def test_first_ctrl_c_is_a_flag(capfd):
    with talk._ctrl_c() as stop:
        assert not stop()
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pytest.fail('the first Ctrl-C struck')
        told = capfd.readouterr().err     # at once, however long the step takes
        assert stop() and 'Ctrl-C again leaves' in told
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

class Terminal:
    "A process in a terminal of its own"
    def __init__(self, code):
        self.pid,self.fd = pty.fork()
        if not self.pid:
            os.execve(
                sys.executable, [sys.executable, '-c', code],
                os.environ|dict(TERM='dumb', INPUTRC='/dev/null'))
        self.seen = ''
    def type(self, s):
        os.write(self.fd, s.encode())
    def expect(self, what, again=''):
        """Read until `what` comes. `again` is typed now, and again after each second of silence:
        CPython's readline may sleep through a Ctrl-C that comes between two keys"""
        patience = 1 if again else WAIT
        def more():
            return select.select([self.fd], [], [], patience)[0]
        for _ in range(int(WAIT)):
            self.type(again)
            while what not in self.seen and more():
                self.seen += os.read(self.fd, 4096).decode()
                assert len(
                    self.seen)<20_000, f'{what!r} did not come; the last was {self.seen[-80:]!r}'
            if what in self.seen or not again:
                break
        assert what in self.seen, f'{what!r} did not come after {self.seen!r}'
        before,_,self.seen = self.seen.partition(what)
        return before
    def status(self):
        pid,self.pid = self.pid,0
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    def end(self):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)

@pytest.fixture
def terminal():
    made = []
    def new(code):
        made.append(Terminal(code))
        return made[-1]
    yield new
    for t in made:
        t.end()

def test_chat_in_a_terminal(terminal):
    """Ctrl-C ends an answer that would never end, then a half-typed line, and the program goes
    on; Ctrl-D leaves it"""
    t = terminal(f'''import sys,time
sys.path.insert(0, {str(root/'tests')!r})
from test_cli import Fake,SimpleNamespace,said
class Endless(Fake):
    def stream(self, prompt, params):
        yield said(f'<<{{len(prompt)}}>>')
        while prompt[-1]['content']=='endless':
            time.sleep(.001)
            yield said('.')
sys.modules['atlas.use.llm'] = SimpleNamespace(LLM=Endless)
sys.argv = ['atlas','chat','m']
from atlas.use.cli import main
main()''')
    t.expect('/help lists the commands')
    t.expect('> ')
    t.type('endless\r')
    t.expect('<<1>>')
    t.expect('...')
    t.type('\x03')
    for what in ('Ctrl-C again leaves','tokens/s','> '):
        t.expect(what)
    t.type('half a li')
    t.expect('half a li')
    t.expect('Ctrl-D', again='\x03')
    t.expect('> ')
    t.type('again\r')
    t.expect('<<3>>')
    t.expect('> ')      # the cut answer is in the history
    t.type('\x04')
    assert t.status()==0

def test_run_in_a_terminal(terminal):
    "The rate is told, a prompt is asked for when there is none, and Ctrl-C leaves with 130"
    start = f'''import sys,time
sys.path.insert(0, {str(root/'tests')!r})
from test_cli import Fake,SimpleNamespace,said
sys.modules['atlas.use.llm'] = SimpleNamespace(LLM=Fake)
from atlas.use.cli import main
'''
    t = terminal(start+"sys.argv = ['atlas','run','m','hi']; main()")
    t.expect('Hello you')
    t.expect('(3 tokens, ')
    assert t.status()==0
    t = terminal(start+"Fake.cached = 1920; sys.argv = ['atlas','run','m','hi']; main()")
    t.expect('Hello you')
    t.expect(' s, 1,920 of the prompt cached)')
    assert t.status()==0
    t = terminal(start+"sys.argv = ['atlas','run','m']; main()")
    t.expect('give a prompt, or pipe one in')
    assert t.status()==2
    endless = "Fake.stream = lambda *a: iter(lambda: time.sleep(.001) or said('.'), 0)\n"
    t = terminal(start+endless+"sys.argv = ['atlas','run','m','hi']; main()")
    t.expect('...')
    t.type('\x03')
    try:
        assert 'Traceback' not in t.expect('\0')
    except OSError:
        assert 'Traceback' not in t.seen      # the terminal is closed: the process has gone
    assert t.status()==130

def test_thoughts_in_a_terminal(terminal):
    "Dimmed behind a line that says so, then the answer; where they are hidden the line alone"
    start = f'''import sys
sys.path.insert(0, {str(root/'tests')!r})
from test_cli import Fake,SimpleNamespace,said
def stream(*_): yield from (said('', 'Hm.'), said('', ' So\\n'), said('\\n\\nHello'))
Fake.stream = stream
sys.modules['atlas.use.llm'] = SimpleNamespace(LLM=Fake)
from atlas.use.cli import main
'''
    DIM,END = '\x1b[2m','\x1b[0m'
    line = f'{DIM}thinking…\r\n{END}'
    t = terminal(start+"sys.argv = ['atlas','run','m','hi']; main()")
    shown = f'{line}{DIM}Hm.{END}{DIM} So\r\n{END}{DIM}\r\n{END}'
    assert t.expect('Hello')==shown
    t.expect('(3 tokens, ')
    assert t.status()==0
    t = terminal(start+"sys.argv = ['atlas','run','m','hi','--hide-thinking']; main()")
    assert t.expect('Hello')==line

# Serving

# What each flag of an engine is given as, and what its field is then
ENGINE = {
    '--device cpu': dict(device='cpu'),
    '--max-seq-len 300': dict(max_seq_len=300),
    '--max-num-seqs 3': dict(max_num_seqs=3),
    '--kv-cache-memory 1.5GiB': dict(kv_cache_memory=3<<29),
    '--memory-budget 24GiB': dict(memory_budget=24<<30),
    '--gpu-memory-utilization 0.9': dict(gpu_memory_utilization=.9),
    '--max-queue 17': dict(max_queue=17),
    '--max-queue-tokens 5000': dict(max_queue_tokens=5000),
    '--scheduling-policy slai': dict(scheduling_policy='slai'),
    '--tbt-deadline-ms 0': dict(tbt_deadline_ms=0),
    '--max-wait-ms 3000': dict(max_wait_ms=3000),
    '--load-format dummy': dict(load_format='dummy'),
    '--weights fp8': dict(weights='fp8'),
    '--quantization nvfp4': dict(quantization='nvfp4'),
    '--tokenizer tiny': dict(tokenizer='tiny'),
    '--generation-config vllm': dict(generation_config='vllm'),
    '--override-generation-config {"top_k":20}':
        dict(override_generation_config='{"top_k": 20}'),
    '--lm-head-dtype fp8': dict(lm_head_dtype='fp8'),
    '--prefill-activations nvfp4': dict(prefill_activations='nvfp4'),
    '--kv-cache-dtype fp8': dict(kv_cache_dtype='fp8'),
    '--kv-high-precision-layers 2': dict(kv_high_precision_layers=2),
    '--chunk 128': dict(chunk=128),
    '--no-enable-prefix-caching': dict(enable_prefix_caching=False),
    '--state-checkpoint-interval 128': dict(state_checkpoint_interval=128),
    '--state-snapshots 3': dict(state_snapshots=3),
    '--kv-spill-dir spilled': dict(kv_spill_dir='spilled'),
    '--kv-spill-gb 2.5': dict(kv_spill_gb=2.5),
    '--kv-spill-keep': dict(kv_spill_keep=True),
    '--cache-packed=folder': dict(cache_packed='folder'),
    '--overcommit 2': dict(overcommit=2.),
    '--packed': dict(packed=True),
    '--exact': dict(exact=True),
    '--threads 2': dict(threads=2),
    '--speculative draft': dict(speculative='draft'),
    '--num-speculative-tokens 3': dict(num_speculative_tokens=3),
    '--draft-model small': dict(draft_model='small'),
    '--draft-vocab 8192': dict(draft_vocab=8192),
    '--draft-quantization fp8': dict(draft_quantization='fp8'),
    '--speculative-config {"model":"small"}':
        dict(speculative_config=dict(model='small')),
    '--no-speculative-adaptive': dict(speculative_adaptive=False)}
# The same of the gateway's
GATEWAY = {
    '--host 127.0.0.2': dict(host='127.0.0.2'),
    '--port 9000': dict(port=9000),
    '--served-model-name a': dict(served_model_name='a'),
    '--alias b --alias *': dict(alias=['b','*']),
    '--lazy': dict(first=()),
    '--no-autoload': dict(autoload=False),
    '--memory 2GiB': dict(memory=2<<30),
    '--api-key one --api-key two': dict(api_key=['one','two']),
    '--api-key-file keys': dict(api_key_file='keys'),
    '--insecure': dict(insecure=True),
    '--allowed-host box': dict(allowed_hosts=['box']),
    '--cors-origin https://x.example': dict(cors_origins=['https://x.example']),
    '--rate-limit 60': dict(rate_limit=60),
    '--tls-cert c': dict(tls_cert='c'),
    '--tls-key k': dict(tls_key='k'),
    '--tls-ca r': dict(tls_ca='r'),
    '--fetch-images': dict(fetch_images=True),
    '--cache-salt-per-key': dict(cache_salt_per_key=True),
    '--no-prefill-next-turn': dict(prefill_next_turn=False),
    '--tool-call-parser hermes': dict(tool_parser='hermes'),
    '--reasoning-parser qwen3': dict(reasoning_parser='qwen3'),
    '--drain 3': dict(drain=3.),
    '--log-format json': dict(log_format='json'),
    '--log-level error': dict(log_level='error')}

def merged(of):
    "The fields of all flags in `of` as one dict"
    return {k:v for fields in of.values() for k,v in fields.items()}

def fields_of(tables):
    "The rows of all tables of the gateway's `serve`, by name"
    return {f.name: getattr(t, f.name) for t in tables.values() for f in dataclasses.fields(t)}

def told_to(serve):
    "What `serve` was given beside the models"
    return fields_of(serve.call_args.kwargs)

def usual():
    "What `serve` goes by where nothing is said"
    from atlas.service.gateway import tables_of
    return fields_of(tables_of())

@pytest.fixture
def serve(monkeypatch):
    "Stands for the gateway's `serve`"
    import atlas.service.gateway
    spy = mock.create_autospec(atlas.service.gateway.serve)
    monkeypatch.setattr(atlas.service.gateway, 'serve', spy)
    return spy

@pytest.mark.parametrize('without', ['no-enable-prefix-caching','kv-spill'])
def test_serve_hands_everything_over(serve, without):
    "Every option arrives: an engine's in its config, the others under names that the gateway knows"
    own = {k:v for k,v in ENGINE.items() if without not in k}
    flags = ' '.join([*GATEWAY, *own]).split()
    assert run('serve', 'm', 'other', *flags).exit_code==0
    engine,gateway = merged(own),merged(GATEWAY)
    configs = [EngineConfig(m, **engine) for m in ('m','other')]
    assert serve.call_args.args==(configs,)
    assert told_to(serve)==usual()|gateway
    flagless = {'max_body','max_connections','policy','command','text','config','options'}
    assert set(usual())==set(gateway)|flagless

def test_every_flag_is_handed_over_by_the_test():
    told = merged(ENGINE)
    untold = [n for n,f in base.FLAGS.items() if told[n]==f.default]
    assert not untold, 'these would arrive though nobody handed them over'

def test_serve_knows_the_chunk_by_another_name(serve):
    "What others call --chunk"
    run('serve', 'm', '--max-num-batched-tokens', '8192')
    assert serve.call_args.args==([EngineConfig('m', chunk=8192)],)

# What people run on a Spark, and what is to come of it; `serve` and the model stand before it
SPARK = {
    'Qwen/Qwen3.6-35B-A3B-FP8 --port 8100 --max-seq-len 262144 --speculative '
    '--num-speculative-tokens 2':
        dict(max_seq_len=262144, speculative=True, num_speculative_tokens=2),
    'Qwen/Qwen3.6-35B-A3B-FP8 --port 8200 --max-seq-len 262144 --tool-call-parser qwen3_coder '
    '--num-speculative-tokens 1':
        dict(max_seq_len=262144, speculative=True, num_speculative_tokens=1),
    'Qwen/Qwen3.6-35B-A3B-FP8 --port 8888 --max-seq-len 65536 --kv-cache-dtype fp8 '
    '--kv-high-precision-layers auto --gpu-memory-utilization 0.90 --scheduling-policy slai '
    '--quantization fp8 --tool-call-parser qwen3_coder --enable-prefix-caching --speculative':
        dict(max_seq_len=65536, kv_cache_dtype='fp8', kv_high_precision_layers=2,
            gpu_memory_utilization=.9, scheduling_policy='slai', quantization='fp8',
            speculative=True),
    'RedHatAI/Qwen3.6-35B-A3B-NVFP4 --tokenizer Qwen/Qwen3.6-35B-A3B '
    '--quantization compressed-tensors --kv-cache-dtype fp8 --trust-remote-code '
    '--max-model-len 131072 --gpu-memory-utilization 0.55 --enable-auto-tool-choice '
    '--tool-call-parser qwen3_coder --reasoning-parser qwen3 --speculative-config '
    '{"method":"mtp","num_speculative_tokens":2} --enable-prefix-caching '
    '--max-num-batched-tokens 8192 --host 0.0.0.0 --port 8000':
        dict(tokenizer='Qwen/Qwen3.6-35B-A3B', kv_cache_dtype='fp8', max_seq_len=131072,
            gpu_memory_utilization=.55, speculative='mtp', num_speculative_tokens=2, chunk=8192),
    'google/gemma-4-26B-A4B-it --quantization fp8 --kv-cache-dtype fp8 --trust-remote-code '
    '--max-model-len 65536 --gpu-memory-utilization 0.80 --enable-auto-tool-choice '
    '--tool-call-parser hermes --speculative-config {"method":"mtp",'
    '"model":"google/gemma-4-26B-A4B-it-assistant","num_speculative_tokens":4} '
    '--enable-prefix-caching --host 0.0.0.0 --max-num-batched-tokens 8192 --port 8000':
        dict(quantization='fp8', kv_cache_dtype='fp8', max_seq_len=65536,
            gpu_memory_utilization=.8, speculative='draft', num_speculative_tokens=4,
            draft_model='google/gemma-4-26B-A4B-it-assistant', chunk=8192)}

@pytest.mark.parametrize('line', SPARK)
def test_commands_of_spark_owners_mean_the_same(serve, line):
    "Each flag arrives; what is not needed here is told, and does nothing"
    r = run('serve', *line.split())
    assert r.exit_code==0, r.stderr
    (config,),told = serve.call_args.args[0],told_to(serve)
    model,*flags = line.split()
    assert differs(config)==dict(model=model)|SPARK[line]
    assert told['port']==int(flags[flags.index('--port')+1])
    if '--tool-call-parser' in flags:
        assert told['tool_parser']==flags[flags.index('--tool-call-parser')+1]
    assert ('trust-remote-code is not needed' in r.stderr)==('--trust-remote-code' in flags)
    assert told['host']==('0.0.0.0' if '0.0.0.0' in flags else '127.0.0.1')

def test_the_command_by_its_module():
    r = subprocess.run([sys.executable,'-m','atlas','--version'], capture_output=True, text=True)
    assert (r.returncode,r.stdout)==(0,run('--version').stdout)
    assert r.stdout.startswith('atlas ')

def test_serve_without_flags(serve):
    run('serve', 'm')
    assert serve.call_args.args==([EngineConfig('m')],)
    assert told_to(serve)==usual()
    asked = usual()
    assert (asked['host'],asked['port'],asked['first'])==('127.0.0.1',8888,None)

def test_packed_files_in_the_usual_folder(serve):
    for said,meant in {'': False, '--cache-packed': True, '--cache-packed=off': False}.items():
        run('serve', *said.split(), 'm')
        assert serve.call_args.args==([EngineConfig('m', cache_packed=meant)],)

def test_packed_files_are_listed_and_removed(monkeypatch, tmp_path):
    "A part that somebody left behind, too"
    monkeypatch.setenv('ATLAS_HOME', str(tmp_path))
    folder = tmp_path/'packed'
    folder.mkdir()
    for n in ('m-1.packed','.m-2.packed.part'):
        (folder/n).write_bytes(bytes(1000))
    found = json.loads(run('list', '--json').stdout)
    kept = [(e['name'],e['bytes']) for e in found if e['kind']=='packed']
    assert kept==[('.m-2.packed.part',1000),('m-1.packed',1000)]
    assert '1 kB free' in run('rm', '--yes', 'm-1.packed').stdout
    assert [p.name for p in folder.iterdir()]==['.m-2.packed.part']
    assert run('rm', '--yes', 'm-1.packed').exit_code==1

SPECULATION = {
    '': {},
    '--speculative': dict(speculative=True),
    '--speculative auto': dict(speculative=True),
    '--speculative ngram': dict(speculative='ngram'),
    '--speculative=mtp': dict(speculative='mtp'),
    '--num-speculative-tokens 3': dict(speculative=True, num_speculative_tokens=3),
    '--draft-model d': dict(speculative='draft', draft_model='d'),
    '--speculative --draft-model d --no-speculative': {},
    '--speculative-config {"method":"mtp","num_speculative_tokens":2}':
        dict(speculative='mtp', num_speculative_tokens=2)}

@pytest.mark.parametrize('said', SPECULATION)
def test_serve_reads_speculation(serve, said):
    "A bare --speculative takes no model for its word, wherever it stands"
    wanted = [EngineConfig('m', **SPECULATION[said])]
    for args in (
        ['m',*said.split()],
        [*said.split(),'m']
    ):
        r = run('serve', *args)
        assert r.exit_code==0, r.stderr
        assert serve.call_args.args==(wanted,)

@pytest.mark.parametrize('name', ['run','chat'])
def test_what_is_kept_of_prompts(fake, name):
    "Options of the prefix cache arrive; and the model is closed, which writes down what is kept"
    flags = '--no-enable-prefix-caching','--kv-spill-dir d --kv-spill-gb 1 --kv-spill-keep'
    kept = dict(kv_spill_dir='d', kv_spill_gb=1., kv_spill_keep=True)
    wanted = dict(enable_prefix_caching=False),kept
    prompt = ['hi']*(name=='run')
    for said,fields in zip(flags, wanted):
        Fake.closed = None
        r = run(name, 'm', *said.split(), *prompt, input='hi\n')
        assert r.exit_code==0, r.stderr
        assert fake.made==EngineConfig('m', max_num_seqs=1, **fields)
        assert isinstance(Fake.closed, fake)

@pytest.mark.parametrize('name', ['run','chat'])
def test_a_model_is_closed_after_an_error(fake, name):
    Fake.closed,fake.error = None,AtlasError('It broke')
    r = run(name, 'm', *['hi']*(name=='run'), input='hi\n')
    assert 'It broke' in r.stderr
    assert isinstance(Fake.closed, fake)

@pytest.mark.parametrize('name', ['run','chat','all','decode','throughput'])
def test_other_commands_that_load_read_speculation(fake, monkeypatch, name):
    monkeypatch.setattr(measuring, '_card', lambda *_: 'card')
    monkeypatch.setattr(measuring, '_longest', lambda *_: 99)
    for module in ('bench','bench_decode'):
        monkeypatch.setattr(f'atlas.use.{module}.{module}', lambda *_, **how: Report())
    def measured(config, *_): return fake(config) and Report()
    monkeypatch.setattr('atlas.use.bench_throughput.bench_throughput', measured)
    monkeypatch.setattr('atlas.use.bench_throughput.fitting', lambda config, *_: config)
    where = ['bench',name] if name in ('all','decode','throughput') else [name]
    prompt = ['hi']*(name=='run')
    r = run(*where, 'm', '--speculative', *prompt, '--num-speculative-tokens', '2', input='')
    assert r.exit_code==0, r.stderr
    assert (fake.made.speculative,fake.made.num_speculative_tokens)==(True,2)

@pytest.mark.parametrize('said,why', [
    ('--num-speculative-tokens 8', (2,"'--num-speculative-tokens'")),
    ('--speculative draft', (1,'needs a model that drafts')),
    ('--speculative=eagle', (1,'speculative is \'eagle\'')),
    ('--speculative-config {', (1,'speculative_config is no JSON')),
    ('--speculative-config {"method":"mtp","gamma":3}', (1,'speculative_config has gamma')),
    ('--speculative mtp --speculative-config {"prompt_lookup_max":6}', (1,"is 'mtp' beside it"))])
def test_wrong_speculation_is_refused(serve, said, why):
    code,text = why
    r = run('serve', 'm', *said.split())
    assert r.exit_code==code and text in r.stderr and not serve.called

def test_acceptance_is_handed_over(fake, monkeypatch):
    asked = {}
    monkeypatch.setattr('atlas.use.bench_decode.bench_decode',
        lambda *_, **kw: asked.update(kw) or Report())
    monkeypatch.setattr(measuring, '_card', lambda *_: 'card')
    monkeypatch.setattr(measuring, '_longest', lambda *_: 99)
    r = run('bench', 'decode', 'm', '--speculative', '--simulate-acceptance', '0.9,0.8')
    assert r.exit_code==0, r.stderr
    assert asked==dict(simulate=[.9,.8]) and fake.made.speculative is True
    r = run('bench', 'decode', 'm', '--simulate-acceptance', '0.9,80')
    assert r.exit_code==2 and 'shares from 0 to 1' in r.stderr

def test_flags_are_fields():
    "What an engine can be loaded with is said once: `serve` has a flag for each of its fields"
    ps = inspect.signature(commands()['serve']).parameters
    here = {f.name:f for f in dataclasses.fields(EngineConfig)}
    wanted = {n for n in here if here[n].metadata.get('flag')}
    unflagged = {n for n in here if n.startswith('ngram_')}
    assert wanted==set(here)-{'model','drafting'}-unflagged
    assert wanted==set(base.FLAGS)<=set(ps)
    for n in wanted:
        p,field = ps[n],here[n]
        assert p.default==field.default
        written = field.metadata['cli'].get('text')  # a word that the field itself reads
        assert p.annotation.__origin__==(str|None if written else field.type)
        assert p.annotation.__metadata__[0].help==field.metadata['help']

def test_commands_repeat_no_field():
    "Commands take an engine's fields as `**options`: none of them lists those anew"
    wanted = {f.name for f in dataclasses.fields(EngineConfig) if f.metadata.get('flag')}
    shown = {n for f in commands().values() for n in inspect.signature(f).parameters}
    modules = Path(base.__file__).parent.glob('*.py')
    listed = set()
    for f in (n for m in modules for n in ast.walk(ast.parse(m.read_text()))):
        if not isinstance(f, ast.FunctionDef):
            continue
        names = f.args.args+f.args.kwonlyargs
        listed |= {a.arg for a in names}
    assert 'max_seq_len' in shown&wanted
    own = {'device','weights','exact'} # of `check` and `inspect`
    assert not listed&(wanted-own)

def test_what_the_log_told_is_not_told_again(monkeypatch):
    e = AtlasError('It is gone')
    monkeypatch.setattr('atlas.service.gateway.serve', mock.Mock(side_effect=e))
    assert run('serve', 'm').stderr=='atlas: It is gone\n'
    e.logged = True
    r = run('serve', 'm')
    assert (r.exit_code,r.stderr)==(1,'')

def test_launch_hands_everything_over(monkeypatch):
    import atlas.use.clients
    launch = mock.create_autospec(atlas.use.clients.launch)
    monkeypatch.setattr(atlas.use.clients, 'launch', launch)
    assert run(
        'launch', 'codex', '--url', 'http://h:1', '--model', 'm', '--key', 'k',
        '--print', '--no-start', 'exec', '--json', 'do it').exit_code==0
    assert launch.call_args.args==('codex',['exec','--json','do it'])
    assert launch.call_args.kwargs==dict(
        url='http://h:1', model='m', key='k', show=True,
        start=False)

def test_launch_without_a_server():
    with socket.create_server(('127.0.0.1', 0)) as s:
        port = s.getsockname()[1]
    r = run('launch', 'codex', '--url', f'http://127.0.0.1:{port}', '--print')
    assert r.exit_code==1 and 'atlas serve' in r.stderr and 'Traceback' not in r.stderr

def test_port_in_use_is_told_before_loading(monkeypatch):
    import atlas.service.process
    monkeypatch.setattr(atlas.service.process, 'WorkerProcess', None)
    with socket.create_server(('127.0.0.1', 0)) as s:
        port = str(s.getsockname()[1])
        r = run('serve', 'm', '--port', port)
    assert r.exit_code==1 and port in r.stderr and '--port' in r.stderr

def test_serve_wants_a_key_for_strangers(monkeypatch):
    monkeypatch.delenv('ATLAS_API_KEY', raising=False)
    monkeypatch.delenv('ATLAS_ADMIN_KEY', raising=False)
    r = run('serve', 'demo', '--host', '0.0.0.0', '--port', '0')
    assert r.exit_code==1 and 'ATLAS_API_KEY' in r.stderr and '--insecure' in r.stderr

def test_serve_refuses_an_unknown_model():
    r = run('serve', 'no-such-model', '--port', '0')
    assert r.exit_code==1 and 'no-such-model' in r.stderr and 'demo' in r.stderr

def fetch(url, body=None):
    "What a server answers, as JSON"
    raw = body and json.dumps(body).encode()
    asked = urllib.request.Request(url, raw, {'Content-Type': 'application/json'})
    return json.load(urllib.request.urlopen(asked, timeout=WAIT))

def started(*args):
    "The process of a command, as a user runs it"
    command = [sys.executable, '-c', 'from atlas.use.cli import main; main()', *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

def test_serve_answers_and_stops(demo):
    "It says where it is, answers, and leaves on Ctrl-C"
    flags = ['--port', '0', '--max-seq-len', '256', '--served-model-name', 'mine']
    p = started('serve', 'demo', *flags)
    question = dict(model='mine', prompt='The capital of France is', max_tokens=2, temperature=0)
    try:
        url = re.search(r'http://[\d.:]+', p.stdout.readline())[0]
        models = fetch(f'{url}/v1/models')
        answer = fetch(f'{url}/v1/completions', question)
        p.send_signal(signal.SIGINT)
        out,err = p.communicate(timeout=WAIT)
    finally:
        p.kill()
    assert models['data'][0]['id']=='mine' and 'Paris' in answer['choices'][0]['text']
    assert p.returncode==0 and 'Traceback' not in err

# A card's commands

def test_check_runs_kernels_and_counts_what_is_wrong(monkeypatch):
    from atlas.card.emulator import find_cxx
    if not find_cxx():
        pytest.skip('no C++ compiler')
    r = run('check', '--device', 'emulator', '--only', 'greedy')
    assert r.exit_code==0 and 'greedy' in r.stdout and '0 failed' in r.stdout
    r = run('check', '--device', 'emulator', '--only', 'gready')
    assert r.exit_code==1 and "No kernel has 'gready'" in r.stderr
    for kernel in ('gemv','sample_bins','rmsnorm','attend'):      # what can be asked for
        assert f' {kernel}, ' in r.stderr
    r = run('check', '--device', 'emulator', '--only', 'rmsnorm')
    assert r.exit_code==0 and 'norm_rows' in r.stdout and 'gemv' not in r.stdout

class Report(SimpleNamespace):
    "Stands for what a bench measured"
    def __str__(self): return '5 tokens/s'
    def to_dict(self): return dict(rate=5)

BENCHES = [('all','bench'), ('decode','bench_decode'), ('kernels','bench_decode'),
    ('prefill','bench_prefill'), ('startup','bench_startup'), ('throughput','bench_throughput')]

@pytest.mark.parametrize('to_file', [False,True])
@pytest.mark.parametrize('as_json', [False,True])
@pytest.mark.parametrize('bench,module', BENCHES)
def test_every_bench_writes_the_same_way(fake, bench, module, as_json, to_file, tmp_path,
                                         monkeypatch):
    "--json is for stdout, --output for a file, and both may be given"
    monkeypatch.setattr(f'atlas.use.{module}.{module}', lambda *_, **how: Report())
    monkeypatch.setattr(measuring, '_card', lambda *_: 'card')
    monkeypatch.setattr(measuring, '_longest', lambda *_: 99)
    monkeypatch.setattr('atlas.use.bench_throughput.fitting', lambda *_: None)
    file = tmp_path/'numbers.json'
    flags = ['--json']*as_json+['--output', str(file)]*to_file
    r = run('bench', bench, 'm', *flags)
    assert r.exit_code==0
    if as_json:
        assert json.loads(r.stdout)==dict(rate=5)
    else:
        assert r.stdout=='5 tokens/s\n'
    if to_file:
        assert json.loads(file.read_text())==dict(rate=5)
        file.unlink()
    assert [*tmp_path.iterdir()]==[]

def test_commands_for_cards_say_so_on_the_host():
    r = run('bench', 'decode', str(root/'tests'/'data'/'smollm2-tied'), '--device', 'cpu')
    assert r.exit_code==1 and 'card' in r.stderr and 'atlas bench MODEL' in r.stderr
    r = run('check', '--device', 'cpu')
    assert r.exit_code==1
    assert 'no graphics card' in r.stderr
    assert '--device emulator' in r.stderr
    assert not r.stdout

@pytest.mark.parametrize('hint', ["pip install x, or use --device cpu", 'Use --device cpu'])
def test_commands_for_cards_do_not_advise_the_processor(monkeypatch, hint):
    from atlas.ground.core import DeviceError
    def none(name):
        raise DeviceError('There is no card', hint=hint)
    monkeypatch.setattr('atlas.card.device.get_device', none)
    for args in (('check',), ('bench','decode','demo'), ('bench','kernels','demo'),
            ('bench','prefill','demo')):
        r = run(*args)
        assert r.exit_code==1
        assert 'There is no card' in r.stderr
        assert '--device cpu' not in r.stderr
        assert 'emulator' in r.stderr or 'atlas bench MODEL' in r.stderr
        assert ('pip install x;' in r.stderr)==('pip' in hint)
