"""Models of the gateway whose engines live in this very process:
behind a runner that is given, or in a worker's thread.

Everything but the process is what `atlas serve` has:
`Models` of the gateway, a link, and a worker's loop at its end."""
from contextlib import suppress
import atlas.engine.score  # noqa: F401
import uvicorn
from atlas.service.process import Model,ProcessTimes,Served
from atlas.service.models import Models
from atlas.service.http import server_config
from atlas.ground.options import EngineConfig
from atlas.service.server import create_app
from atlas.service.service import ReadyModel
from atlas.service.worker import ThreadWorker,Workload,workload

QUICK = ProcessTimes(
    beat=.1, stalled=30., start=60., grace=2., pause=.05,
    longest=.2)

def always(runner, tokenizer, template=None, kind=Models, names=(), **side):
    "`Models` with one that is always there: nothing is started for it, and its runner is `runner`"
    names = list(names) or [runner.info['name']]
    ready = ReadyModel(names[0], names, runner.info, tokenizer, template, runner=runner, **side)
    return kind([Served(names, ready)])

def app_of(runner, tokenizer, template=None, **kw):
    "The application in front of a runner"
    side = {k:kw.pop(k) for k in ('names','spec','parsers','guides','sampling') if k in kw}
    return create_app(always(runner, tokenizer, template, **side), **kw)

def run(app, sock, drain):
    "Serve until SIGINT or SIGTERM"
    server = uvicorn.Server(server_config(app, drain=drain))
    with suppress(KeyboardInterrupt):
        server.run(sockets=[sock])

def threaded(engine, info, tokenizer, template=None, ops=None, **side):
    "`Models` with one, whose engine steps in a worker's thread"
    names = side.pop('names', [info['name']])
    def load(options, meter): return Workload(engine, info, ops or {})
    def worker(name): return ThreadWorker(load)
    def text(config): return dict(tokenizer=tokenizer, template=template, **side)
    config = EngineConfig(info['name'])
    return Models([Model(config, names, policy=QUICK, command=worker, text=text)])

def loaded(llm, names, template=None):
    "`Models` with an `LLM` that is loaded already"
    side = dict(
        names=names, spec=llm.image_spec, guides=llm.guides,
        parsers=llm.text.parsers)
    w = workload(llm, names[0])
    return threaded(w.engine, w.info, llm.tokenizer, llm.template, w.ops, **side)
