"""A gateway in front of scripted workers, in a process of its own:
`fake_gateway.py '{"models": [...], ...}'`, with the fields of the tables of
`atlas.service.gateway.serve`."""
import json,sys
from pathlib import Path
from atlas.ground.core import SourceError
from atlas.text.chat import ChatTemplate
from atlas.service.process import ProcessTimes
from atlas.service.gateway import serve,tables_of
from atlas.service.reload import FleetFile
from atlas.text.tokenizer import byte_tokenizer
from script_config import ScriptConfig

def text(options):
    "Bytes are tokens, and a conversation is its last message"
    return dict(tokenizer=byte_tokenizer(), template=ChatTemplate('{{ messages[-1].content }}'))

def missing(options):
    raise SourceError('There is no tokenizer')

COMMAND = (sys.executable, Path(__file__).parent/'fake_worker.py')

def main(models=(), policy=None, no_text=False, port=0, file=None, **kw):
    """Serve; with `no_text` the tokenizers of all models are missing; with `file` the models of a
    fleet"""
    if file:
        models = FleetFile(file)
    side = missing if no_text else text
    serve(models, **tables_of(
        **kw, policy=ProcessTimes(**policy or {}), port=port,
        config=ScriptConfig, text=side, command=COMMAND))

if __name__=='__main__':
    main(**json.loads(sys.argv[1]))
