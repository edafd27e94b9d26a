"""A card's weight format is a row of `CARD_FORMATS` and a struct of lib/formats.cuh: both must say
the same, and nobody else may keep a table."""
import re,subprocess
from pathlib import Path
import pytest
from atlas.card.card import limits
from atlas.cuda import gemm,gemv  # noqa: F401  each works out what its kernels need of a row
from atlas.cuda.pack import CARD_FORMATS
from atlas.card.emulator import find_cxx
from atlas.card.launch import kernel_dir
from atlas.card.variants import Dry

root = Path(__file__).parents[1]
STRUCT = '''#include "lib/fragment.cuh"
#include "lib/unpack.cuh"
#include "lib/decode.cuh"
template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;
'''

def claims(f):
    "What the row `f` says of its structs, in C++"
    def members(struct, **values):
        each = [f'{struct}::{k}=={v}' for k,v in values.items()]
        return ' && '.join(each)
    F = f'formats::{f.name}'
    by_row = int(f.rows=='s')
    tile = int(f.tile>0)
    yield members(F, CHUNK=f.chunk, SCALE=f.scale, BY_ROW=by_row, TILE=tile)
    skew = max(1, 64//f.chunk)
    two = int(f.planes>1)
    yield members(
        f'fragment_{f.name}<64>', BYTES=f.unit, UNITS=f.blocks, SKEW=skew, TWO=two)
    W = f'weights::{f.many}'
    yield f'{W}::BYTES*4=={f.chunk} && {W}::SCALE=={-1 if f.tile else f.scale}'
    yield f'same<decode_{f.name}, Decode<{F}>>'

def agrees(lines)->str:
    "What g++ says of these assertions; nothing if all hold"
    text = STRUCT+'\n'.join(f'static_assert({l}, "");' for l in lines)
    flags = '-fsyntax-only -x c++ -std=c++17 -w -fpermissive -DATLAS_EMULATE'.split()
    places = [f'-I{kernel_dir()}',f'-I{kernel_dir()}/emulator']
    cmd = [find_cxx(), *flags, *places, '-include', 'emulate.h', '-']
    r = subprocess.run(cmd, input=text, capture_output=True, text=True)
    return r.stderr

@pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
def test_rows_and_structs_agree():
    lines = [l for f in CARD_FORMATS.values() for l in claims(f)]
    assert len(lines)>30 and not agrees(lines)
    wrong = lines[0].replace('CHUNK==16', 'CHUNK==32')
    assert 'static assertion failed' in agrees([wrong]), 'a test must be able to fail'

def test_rows_and_structs_are_as_many():
    text = (kernel_dir()/'lib'/'formats.cuh').read_text()
    macro = r'#define EACH_FORMAT\(X\)((?:.*\\\n)*.*)'
    named = re.search(macro, text)[1]
    assert re.findall(r'X\((\w+)\)', named)==list(CARD_FORMATS)

def test_no_other_table():
    "No table elsewhere has a card's formats for keys but attend's, check's and gemm_scaled's own"
    names = '|'.join(CARD_FORMATS.keys()-{'f16','bf16','f32'})
    table = re.compile(rf'\b(?:{names})\s*=\s*[\d(]')
    found = {
        p.stem for p in (root/'atlas').rglob('*.py')
        if table.search(p.read_text())}
    assert found<={'pack','attend','check','gemm_scaled','_modidx'}, found

@pytest.mark.parametrize('arch', ['sm_90a','sm_121a'])
def test_shared_memory_is_said_once(arch):
    l = limits(Dry(arch, 1<<30))
    assert l.block==(227 if arch=='sm_90a' else 99)<<10
    sizes = re.compile(r'\b(?:227|226|99|98|116|111|110)<<10')
    for p in (root/'atlas').rglob('*.py'):
        if p.stem not in ('card','timeline'):
            assert not sizes.findall(p.read_text()), p
