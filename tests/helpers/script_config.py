"Options of the scripted worker, beside those that every engine has."
from dataclasses import dataclass
from atlas.ground.options import EngineConfig

@dataclass(frozen=True)
class ScriptConfig(EngineConfig):
    "What `fake_worker.py` reads"
    say:str='Hello there, reader.' # The answer
    at_load:str|None=None # What goes wrong at loading
    asleep:str='' # What goes wrong when it sleeps or wakes
    lives:str|None=None # A file that counts how often it was started
    closes:str|None=None # A file that it writes as it ends, which takes it a while
    clock:bool=False # Does the wall clock jump?
