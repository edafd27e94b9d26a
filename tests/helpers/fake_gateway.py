"A gateway in front of scripted workers, in a process of its own: `fake_gateway.py '{\"models\": [...], ...}'`; the keywords are those of `atlas.service.gateway.serve`."
import json,sys
from pathlib import Path
from atlas.ground.core import SourceError
from atlas.text.chat import ChatTemplate
from atlas.service.gateway import Policy,serve
from atlas.text.tokenizer import byte_tokenizer
from script_config import ScriptConfig

def text(options):
    "Bytes are tokens, and a conversation is its last message"
    return dict(tokenizer=byte_tokenizer(), template=ChatTemplate('{{ messages[-1].content }}'))

def no_text(options): raise SourceError('There is no tokenizer')

if __name__=='__main__':
    kw = json.loads(sys.argv[1])
    text = no_text if kw.pop('no_text', False) else text
    serve(**kw|dict(policy=Policy(**kw.get('policy', {})), config=ScriptConfig, text=text, command=(sys.executable, Path(__file__).parent/'fake_worker.py'), port=kw.get('port', 0)))
