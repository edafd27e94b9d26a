"An LLM inference engine in Python and CUDA C++, written as a book."
__version__ = "0.1.0"

_doors = dict(LLM='llm', Output='llm', SamplingParams='requests', AtlasError='core')  # public name -> the module that defines it
__all__ = ['__version__', *_doors]

def __getattr__(name):
    "Import a public name when it is first asked for: `import atlas` itself stays within milliseconds"
    from importlib import import_module
    if name not in _doors: raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(import_module(f'{__name__}.{_doors[name]}'), name)

def __dir__(): return sorted(globals()|_doors.keys())
