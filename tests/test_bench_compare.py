"""Measurements beside each other: files of others and what is refused of them, what is told of
loads that differ, names that are meant to do harm, and the page in a browser."""
import csv,io,json,re
from unittest import mock
import pytest
from typer.testing import CliRunner
from atlas.ground.core import WriteError
from atlas.use import bench_measured,cli
from atlas.use.bench_compare import compare
from atlas.use.bench_files import read_measurements
from atlas.use.bench_measured import KIND,ReportError,made_up,plain,write_made_up
from atlas.use.bench_page import save_html
from atlas.use.bench_plots import DARK,LIGHT,PlotError,draw,picture,plots_of,save_plots
from helpers.browser import browser

def ours(): return made_up(8)

@pytest.fixture(scope='module')
def paths(tmp_path_factory):
    "Files of two servers that nobody measured"
    return write_made_up(tmp_path_factory.mktemp('measured'), 8, 2)

@pytest.fixture
def saved(tmp_path):
    "Writes an object, or text, to a file of a name"
    def write(d, name='saved'):
        path = tmp_path/f'{name}.json'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(d if isinstance(d, str) else json.dumps(d))
        return path
    return write

# Files of others

ENDPOINT = dict(model_names=['m'], urls=['http://x'], streaming=True)

def aiperf(n, first=20., unit='ms', **more):
    "A file as aiperf writes it of `n` requests at a time"
    def metric(v, unit): return dict(unit=unit, avg=v, p50=v, p90=v, p95=2*v, p99=3*v)
    def plain(v, unit): return dict(unit=unit, avg=v)
    return dict(
        aiperf_version='0.13.0', was_cancelled=False,
        request_latency=metric(900., 'ms'), time_to_first_token=metric(first, unit),
        inter_token_latency=metric(7., 'ms'), request_count=plain(32., 'requests'),
        output_token_throughput=plain(140.*n, 'tokens/sec'),
        output_sequence_length=metric(128., 'tokens'), error_summary=[],
        input_config=dict(endpoint=ENDPOINT, loadgen=dict(concurrency=n)))|more

def test_aiperf(saved):
    m, = read_measurements([saved(aiperf(8, .02, 'sec'))])
    r, = m.runs
    assert (r.concurrency,m.server.model,m.server.url,r.output_tokens)==(8,'m','http://x',4096.)
    assert r.time_to_first_token_ms.p99==pytest.approx(60.)
    assert (m.complete,r.output_token_throughput,m.tool)==(True,1120.,'aiperf')

def test_aiperf_that_failed_and_was_cancelled(saved):
    failed = [dict(error_details=dict(code=500, message='no'), count=3)]
    m, = read_measurements([saved(aiperf(8, error_summary=failed, was_cancelled=True))])
    assert (m.complete,m.runs[0].failed,m.runs[0].requests)==(False,3,35)
    assert 'most with: no' in '\n'.join(compare([saved(aiperf(8, error_summary=failed))]).notes)

def test_aiperf_says_its_load_in_several_places(saved):
    swept = dict(variation_values={'phases.profiling.concurrency': 40})
    m, = read_measurements([saved(aiperf(8, run_info=swept))])
    assert m.runs[0].concurrency==40

def test_a_folder_of_aiperf_is_one_measurement(saved, tmp_path):
    for n in (8,1):
        saved(aiperf(n), f'c{n}/profile_export_aiperf')
    m, = read_measurements([tmp_path])
    assert [r.concurrency for r in m.runs]==[1,8] and m.name==tmp_path.name
    saved(aiperf(2, input_config=dict(seed=3)), 'c2/profile_export_aiperf')
    with pytest.raises(ReportError, match='seed'):
        read_measurements([tmp_path])
    files = sorted(tmp_path.rglob('*.json'))
    assert [m.name for m in read_measurements(files)]==['c1','c2','c8']

@pytest.mark.parametrize('other', [dict(model_names=['n']), dict(urls=['http://y'])])
def test_a_folder_of_two_servers_is_refused(saved, tmp_path, other):
    saved(aiperf(1), 'one/profile_export_aiperf')
    config = dict(endpoint=ENDPOINT|other, loadgen=dict(concurrency=2))
    saved(aiperf(2, input_config=config), 'two/profile_export_aiperf')
    with pytest.raises(ReportError, match='different servers'):
        read_measurements([tmp_path])

def test_phases_of_aiperf_are_no_runs(saved, tmp_path):
    "It writes the same file for its warm-up, and once more for what counts"
    for name in ('','phases/warmup/','phases/profiling/'):
        saved(aiperf(8), f'{name}profile_export_aiperf')
    m, = read_measurements([tmp_path])
    assert len(m.runs)==1

def test_a_folder_of_ours_is_its_report(saved, tmp_path):
    saved(made_up(8), 'mine/report')
    saved(aiperf(8), 'mine/run_0000/profile_export_aiperf')
    for asked in (tmp_path/'mine', tmp_path/'mine'/'report.json'):
        m, = read_measurements([asked])
        assert (m.name,m.tool,len(m.runs))==('mine','atlas bench serve',5)

ROUND = dict(
    way='http', prompts='same', concurrency=2, requests=4, seconds=2., tokens=24, cached=0,
    first_ms=[5.,9.,9.], between_ms=[1.,2.,None], errors=1, error='gone', rate=12.)
PLAN = dict(requests=4, concurrency=[2], prompt=10, tokens=8, kinds=['same'], seed=0)
ROUNDS = dict(model='tiny', machine='a machine', versions=dict(atlas='0.1'), plan=PLAN,
    loads=[ROUND, ROUND|dict(way='engine')])

def test_throughput(saved):
    found = read_measurements([saved(ROUNDS, 't')])
    assert [m.name for m in found]==['t: http, same','t: engine, same']
    r = found[0].runs[0]
    assert (r.failed,r.output_token_throughput,r.input_tokens)==(1,12.,30.)
    assert r.inter_token_latency_ms.p99 is None

# What is refused

def having(**kw):
    "A file whose first run has other fields; None: without it"
    d = ours()
    d['runs'][0] |= kw
    for k in [k for k,v in kw.items() if v is None]:
        del d['runs'][0][k]
    return d

REFUSED = {
    'nothing': ('', 'is empty'), 'list': ('[1]', 'a list of 1'), 'cut': ('{"kind": "at', 'JSON'),
    'deep': ('['*100000, 'JSON'), 'bare': ({}, 'does not say what it is'),
    'later': (dict(kind=KIND, version=2), 'version 2'),
    'kind': (dict(kind='atlas.bench.quality'), 'atlas.bench.quality'),
    'no runs': (lambda: ours()|dict(runs=[]), 'runs'),
    'no end': (lambda: {k: v for k,v in ours().items() if k!='complete'}, 'complete is missing'),
    'text': (lambda: having(requests='many'), r"runs\[0\].requests is the string 'many'"),
    'truth': (lambda: having(requests=True), r'runs\[0\].requests is true'),
    'negative': (lambda: having(output_token_throughput=-1.), 'greater than or equal to 0'),
    'lacking': (lambda: having(requests=None), r'runs\[0\].requests is missing'),
    'nan': (lambda: json.dumps(having(seconds=float('nan'))), 'JSON'),
    'infinite': (lambda: json.dumps(ours()).replace('"requests": ', '"requests": 1e999, "x": '),
        'requests'),
    'rounds': (ROUNDS|dict(loads=[]), 'loads'), 'plan': (ROUNDS|dict(plan=3), 'plan'),
    'metric': (aiperf(1, request_count=[]), 'request_count'),
    'unit': (aiperf(1, unit='weeks'), "in 'weeks'"),
}

@pytest.mark.parametrize('name', REFUSED)
def test_refused(saved, name, paths):
    d,says = REFUSED[name]
    path = saved(d() if callable(d) else d, 'a_file')
    with pytest.raises(ReportError, match=says) as e:
        compare([paths[0], path])
    assert 'a_file.json: ' in e.value.msg and len(str(e.value))<600

def test_no_file(tmp_path, paths):
    with pytest.raises(ReportError, match='No such file'):
        compare([tmp_path/'nowhere.json'])
    with pytest.raises(ReportError, match='without report.json or profile_export_aiperf.json'):
        compare([tmp_path])
    with mock.patch.object(bench_measured, '_MOST', 100):
        with pytest.raises(ReportError, match='at most'):
            compare(paths)

# What is told of loads that differ

def test_the_same_load_is_comparable(paths):
    c = compare(paths)
    assert c.comparable and not c.notes
    rows = c.rows()
    a,b = rows[:2]
    assert (a['name'],b['name'],a['load'])==('seats_8','seats_2',b['load'])
    assert b['ratio']==b['output_token_throughput']/a['output_token_throughput']

def test_flags_that_differ_are_named(saved, paths):
    d = ours()
    d['load'] |= dict(seed=d['load'].get('seed', 0)+1, url='http://elsewhere', extra=dict(deep=1))
    c = compare([paths[0], saved(d, 'b')])
    said = '\n'.join(c.notes)
    assert not c.comparable and {r['ratio'] for r in c.rows()}=={None}
    assert re.search(r'Not comparable: seed is \d+ in seats_8, \d+ in b', said)
    assert 'extra.deep is not said in seats_8, 1 in b' in said and 'elsewhere' not in said

def test_what_came_of_flags_counts(saved, paths):
    "A server that ends answers early is not compared, whatever it was asked"
    d = ours()
    for r in d['runs']:
        r['output_tokens'] *= .9
    c = compare([paths[0], saved(d, 'b')])
    assert not c.comparable and 'tokens of answer differ' in c.notes[0]
    for r in d['runs']:
        r['output_tokens'] *= .97/.9
    assert compare([paths[0], saved(d, 'b')]).comparable

def test_other_notes(saved, paths):
    d = ours()|dict(complete=False)
    d['server'] |= dict(machine='another')
    odd = dict(
        concurrency=3, errors=[dict(error='refused', count=2)], cached_tokens=64*128,
        doubts=[dict(error='usage lies', count=5)])
    d['runs'] = [d['runs'][0]|odd]
    c = compare([paths[0], saved(d, 'b')])
    said = '\n'.join(c.notes)
    for part in ('b was interrupted: it has 1 run', '3 at a time: 2 of', 'most with: refused',
            '5 of 64 requests are in doubt, most with: usage lies', 'had 25% of its prompts',
            'another in b', 'No concurrency and no rate is in all of them'):
        assert part in said, part
    assert 'b (incomplete)' in str(c)

def test_tools_that_differ(saved, paths):
    c = compare([paths[0], saved(aiperf(8), 'b')])
    assert any('only tokens are compared' in n for n in c.notes)

def test_two_of_one_name(paths):
    assert [m.name for m in read_measurements([paths[0]]*2)]==['seats_8 [1]','seats_8 [2]']

# Names that are meant to do harm

def hostile():
    d = ours()|dict(complete=False)
    d['server'] |= dict(
        engine='<script>alert(1)</script>', machine='"><img src=x onerror=alert(1)>',
        model='{{ 7*7 }}', version='\x1b[2J\u202e=1+1')
    d['runs'][0]['errors'] = [dict(error='</title><svg onload=alert(1)>', count=1)]
    d['runs'][0]['stages_ms'] = {'</svg><script>$x_{': dict(mean=1.)}
    d['runs'][1] |= dict(concurrency=None, request_rate=2., arrivals='poisson',
        output_token_throughput=0., time_to_first_token_ms=None)
    return d

def test_text_is_plain(saved):
    assert plain('a\x1b[2Jb\u202ec\n d')=='a [2Jb c d'
    assert len(plain('x'*99))==60
    c = compare([saved(hostile(), '=cmd')])
    for text in (str(c), c.to_csv(), json.dumps(c.to_dict(), ensure_ascii=False)):
        assert '\x1b' not in text and '\u202e' not in text
    row = next(csv.DictReader(io.StringIO(c.to_csv())))
    assert row['name']=="'=cmd" and row['version']=='[2J =1+1'

@pytest.mark.slow
def test_text_is_escaped(saved):
    c = compare([saved(hostile(), '_$\\frac{<i>x')])
    for name in plots_of(c):
        svg = picture(draw(c, name), LIGHT).decode()
        assert '<script' not in svg and '<i>' not in svg, name
        assert '_$\\frac{&lt;i&gt;x' in svg, name
    html = c.to_html()
    for bad in ('<script','<img','<i>','<svg onload','\u202e'):
        assert bad not in html, bad
    assert '{{ 7*7 }}' in html and '&lt;script&gt;' in html

# Plots and the page

def test_without_matplotlib(paths):
    c = compare(paths)
    with mock.patch.dict('sys.modules', {'matplotlib.figure': None}):
        with pytest.raises(PlotError, match=re.escape('[bench]')):
            c.to_html()
    assert str(c)

@pytest.mark.slow
def test_plots_are_written(tmp_path, saved, paths):
    c = compare(paths)
    written = save_plots(c, tmp_path/'plots')
    assert len(written)==4*len(plots_of(c))
    assert all(p.read_bytes()[:4]==b'\x89PNG' for p in written if p.suffix=='.png')
    assert picture(draw(c, 'stages'), LIGHT)==picture(draw(c, 'stages'), LIGHT)
    dark = (tmp_path/'plots'/'stages_dark.svg').read_text()
    assert DARK.paper in dark and LIGHT.paper not in dark
    with pytest.raises(WriteError, match='cannot be written'):
        save_plots(c, written[0])

def test_command(saved, paths):
    def run(*args): return CliRunner().invoke(cli.app, ['bench', 'compare', *map(str, args)])
    told = json.loads(run(*paths, '--json').stdout)
    assert told['comparable'] and len(told['measurements'])==2
    r = run(paths[0], saved(ours()|dict(complete=False), 'b'), '--format', 'csv')
    assert r.stdout.startswith('name,') and '* b was interrupted' in r.stderr
    r = run(paths[0], saved(dict(points=[]), 'prefill'))
    assert r.exit_code==1 and 'prefill.json: it does not say what it is' in r.stderr
    assert 'Traceback' not in r.output

SIDEWAYS = 'document.documentElement.scrollWidth-document.documentElement.clientWidth'
SHOWN = '[...document.querySelectorAll("svg")].filter(s => s.getBoundingClientRect().width>0)'
SMALL = f'''Math.min(...{SHOWN}.flatMap(s => [...s.querySelectorAll("text")]
    .map(t => t.getBoundingClientRect().height)))'''
INSIDE = '''[...document.querySelectorAll("td")].every(
    t => t.getBoundingClientRect().right<=document.documentElement.clientWidth)'''

def looks_well(p, wide, dark):
    "Does a tab show the page so wide, light or dark, with nothing cut off or too small?"
    p.size(wide, 900, touch=wide<600)
    p.dark(dark)
    assert p.js(SIDEWAYS)<=0 and p.js(INSIDE)
    classes = set(p.js(f'{SHOWN}.map(s => s.getAttribute("class"))'))
    assert classes=={'dark' if dark else 'light'}
    assert p.js(SMALL)>=8

@pytest.mark.slow
def test_in_a_browser(tmp_path, saved, paths):
    "Wide and narrow, light and dark: nothing loaded, nothing cut off, text that can be read"
    c = compare([*paths, saved(hostile(), 'a_name_that_is_longer_than_most_names_of_files')])
    save_html(c, tmp_path/'page.html')
    with browser() as b:
        p = b.open(f'file://{tmp_path}/page.html')
        assert p.js('performance.getEntriesByType("resource").length')==0
        assert p.js('document.querySelectorAll("script, img, link").length')==0
        for wide in (1280,390):
            for dark in (False,True):
                looks_well(p, wide, dark)
        assert not p.logged
    with pytest.raises(WriteError, match='cannot be written'):
        save_html(c, tmp_path)
