"""What did a change do to the machine code of kernels? Nothing, if it only laid them out anew.

    python tests/kernel_diff.py [--against REVISION] [--all] [-D...] KERNEL ...

The kernel as it stands, with the options given, and as models ask for it (`kernels/variants.json`:
five variants of a card, with `--all` every one), for both cards, from the tree and from a revision
of git (HEAD). Prints what differs: bytes of code, registers, and bytes spilled and shared, before
and after."""
import argparse,json,os,re,struct,subprocess,tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from atlas.card.launch import OPTIONS
from helpers.nvcc import cubin

ROOT = Path(__file__).parents[1]
ARCHS = 'sm_90a','sm_121a'

def variants(kernel, arch, given, most):
    "Options that it is compiled with: none, those `given`, and at most so many that models ask for"
    listed = json.loads((ROOT/'kernels/variants.json').read_text()).values()
    asked = {tuple(o) for by_arch in listed for name,*o in by_arch.get(arch, []) if name==kernel}
    return [(),*([given] if given else ()),*spread(sorted(asked-{()}), most)]

def spread(items, most):
    "At most so many of them, evenly from first to last"
    return items if len(items)<=most else [items[i*(len(items)-1)//(most-1)] for i in range(most)]

def compiled(folder, kernel, arch, options):
    "Machine code of a variant from the sources in `folder`, and what nvcc says it takes"
    with tempfile.TemporaryDirectory() as d:
        out = Path(d)/'out.cubin'
        r = cubin(folder, kernel, arch, (*OPTIONS, *options), out)
        return (code(out.read_bytes()), taken(r.stderr)) if r.returncode==0 else (None, r.stderr)

def code(cubin):
    "Instructions and constants of a cubin, an ELF file; what has a name there may have another"
    start, = struct.unpack_from('<Q', cubin, 40)
    size,count,names = struct.unpack_from('<HHH', cubin, 58)
    headers = [struct.unpack_from('<IIQQQQ', cubin, start+size*i) for i in range(count)]
    named = headers[names][4]
    return b''.join(
        cubin[at:at+length]
        for name,_,_,_,at,length in headers
        if cubin.startswith((b'.text.',b'.nv.constant'), named+name))

def taken(said):
    "Registers, and bytes spilled and shared, in short, of what ptxas says"
    registers = '+'.join(re.findall(r'Used (\d+) reg', said))
    spilled = '+'.join(re.findall(r'(\d+) bytes spill stores', said))
    shared = '+'.join(re.findall(r'(\d+) bytes smem', said)) or '0'
    return f'{registers} registers, {spilled} spilled, {shared} shared'

def compare(old, new, kernel, arch, options):
    "Whether a variant is what it was, and a line that says how it differs"
    (before,had),(now,has) = (compiled(o, kernel, arch, options) for o in (old,new))
    if before and (before,had)==(now,has):
        return True,''
    name = f'{kernel} {arch} {" ".join(options)}'
    if not (before and now):
        return False,f'{name}: {has if before else had}'
    return False,f'{name}: {len(before)} bytes, {had} -> {len(now)} bytes, {has}'

def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--against', default='HEAD')
    p.add_argument('--all', action='store_true')
    p.add_argument('kernels', nargs='+')
    args,given = p.parse_known_args(argv)
    most = 10**6 if args.all else 5
    work = [
        (kernel,arch,options)
        for kernel in args.kernels
        for arch in ARCHS
        for options in variants(kernel, arch, tuple(given), most)]
    with tempfile.TemporaryDirectory() as d:
        archive = subprocess.check_output(
            ['git','-C',ROOT,'archive',args.against,'kernels'])
        subprocess.run(['tar','-x','-C',d], input=archive, check=True)
        with ThreadPoolExecutor(os.cpu_count()) as ex:
            pair = Path(d)/'kernels',ROOT/'kernels'
            results = list(ex.map(lambda w: compare(*pair, *w), work))
    same = sum(ok for ok,_ in results)
    print(*(line for ok,line in results if not ok), f'{same} of {len(work)} the same', sep='\n')
    return int(same<len(work))

if __name__=='__main__':
    raise SystemExit(main())
