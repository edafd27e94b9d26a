"Packaging: the metadata is settings.ini, and the top-level kernels/ folder travels in the wheel as atlas/kernels."
import os,shlex,shutil,subprocess
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_namespace_packages,find_packages,setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

here = Path(__file__).parent
ini = ConfigParser(delimiters=['='])
ini.read(here/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']
archs = os.environ.get('ATLAS_CUDA_ARCHS', '').split()  # "80 90": ship fatbins too; empty: ship sources only
kpkgs = ['atlas.kernels'] + [f'atlas.kernels.{o}' for o in find_namespace_packages('kernels')]

class BuildPy(build_py):
    "Copy the package, then compile each kernel to a fatbin beside its source when `ATLAS_CUDA_ARCHS` names architectures"
    def run(self):
        out = Path(self.build_lib)/'atlas'
        if not self.editable_mode: shutil.rmtree(out, ignore_errors=True)  # else a deleted kernel lives on in build/ and in the next wheel
        super().run()
        if not archs or self.editable_mode: return
        if not shutil.which('nvcc'): raise SystemExit('ATLAS_CUDA_ARCHS is set but nvcc is not on PATH')
        inc,gen = out/'kernels',[f'-gencode=arch=compute_{a},code=sm_{a}' for a in archs]
        for cu in sorted(inc.rglob('*.cu')):
            subprocess.run(['nvcc', '-fatbin', '-O3', '-std=c++17', f'-I{inc}', *gen, cu, '-o', cu.with_suffix('.fatbin')], check=True)

class Sdist(sdist):
    "Add settings.ini, without which the source archive could not be built"
    def make_release_tree(self, base_dir, files): super().make_release_tree(base_dir, [*files, 'settings.ini'])

def readme():
    p = here/'README.md'
    return p.read_text(encoding='utf-8') if p.exists() else cfg['description']

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], license='Apache-2.0',
    long_description=readme(), long_description_content_type='text/markdown',
    author=cfg['author'], author_email=cfg['author_email'], keywords=cfg['keywords'],
    python_requires=f'>={cfg["min_python"]}',
    install_requires=shlex.split(cfg.get('requirements', '')),
    extras_require=dict(dev=shlex.split(cfg.get('dev_requirements', '')), cuda=shlex.split(cfg.get('cuda_requirements', ''))),
    packages=find_packages(include=['atlas', 'atlas.*']) + kpkgs,
    package_dir={'atlas.kernels': 'kernels'},
    package_data={**{o: ['*.cu', '*.cuh'] for o in kpkgs}, 'atlas': ['static/*']},
    entry_points=dict(console_scripts=shlex.split(cfg.get('console_scripts', '')), nbdev=['atlas=atlas._modidx:d']),
    cmdclass=dict(build_py=BuildPy, sdist=Sdist), zip_safe=False)
