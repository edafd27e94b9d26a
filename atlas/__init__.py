"An LLM inference engine in Python and CUDA C++, written as a book."
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec,PathFinder,SourceFileLoader

__version__ = "0.1.0"

_doors = dict(  # public name -> the module that defines it
    LLM='use.llm', Output='use.llm', SamplingParams='ground.requests', AtlasError='ground.core',
    save_dict='ground.packed', load_dict='ground.packed')
__all__ = ['__version__', *_doors]

def __getattr__(name):
    "Import a public name when it is first asked for: `import atlas` itself takes milliseconds"
    if name not in _doors:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(import_module(f'{__name__}.{_doors[name]}'), name)

def __dir__(): return sorted(globals()|_doors.keys())

_moved = dict(  # names of the package when it was flat, by the chapter that has them
    ground='core keys presets config config_json config_gguf formats files llamacpp weights hub '
        'quantize requests patches options opening',
    card='device arena launch emulator card graph variants',
    model='layers families model',
    engine='cache draft scheduler engine loading runner score',
    text='tokenizer chat sandbox deltas calls reasoning parsers guide images fetch generation '
        'processor',
    service='protocol http metrics log turn service server link worker remote gateway',
    use='llm clients inspect bench bench_decode check timeline bench_server cli')

class _Namesake(SourceFileLoader):
    """Loads a chapter that is called after one of its modules, and lends it that module's names:
    `from atlas.engine import Engine`"""
    def exec_module(self, module):
        super().exec_module(module)
        own = module.__name__
        def find(name):
            if name.startswith('__'):
                raise AttributeError(f'module {own!r} has no attribute {name!r}')
            if PathFinder.find_spec(f'{own}.{name}', module.__path__):
                return import_module(f'{own}.{name}')
            return getattr(import_module(f'{own}.{own.rpartition(".")[2]}'), name)
        module.__getattr__ = find

class _Spec(ModuleSpec):
    """That of a door: what is run by its name (`python -m atlas.worker`) imports its neighbours
    from where it is now"""
    @property
    def parent(self): return self.loader.now(self.name).rpartition('.')[0]

class _Doors:
    """Finds modules by the names that they had when the package was flat: `atlas.parsers` is
    `atlas.text.parsers`, the same module"""
    def now(self, name):
        "The name of today, None where it is the same"
        if not name.startswith('atlas.'):
            return None
        old = name.removeprefix('atlas.')
        top = old.partition('.')[0]
        if top in _moved:
            return None
        chapters = [c for c,names in _moved.items() if top in names.split()]
        return f'atlas.{chapters[0]}.{old}' if chapters else None

    def find_spec(self, name, path=None, target=None):
        "Asked by every `import`, before it looks at files"
        if self.now(name):
            return _Spec(name, self)
        chapter = name.removeprefix('atlas.')
        if chapter==name or chapter not in _moved.get(chapter, '').split():
            return None
        spec = PathFinder.find_spec(name, path)
        if spec:
            spec.loader = _Namesake(spec.loader.name, spec.loader.path)
        return spec

    def get_code(self, name):
        "For `python -m atlas.worker`"
        from importlib.util import find_spec
        return find_spec(self.now(name)).loader.get_code(self.now(name))

    def create_module(self, spec): return None
    def exec_module(self, module):
        sys.modules[module.__name__] = import_module(self.now(module.__name__))

sys.meta_path.insert(0, _Doors())
