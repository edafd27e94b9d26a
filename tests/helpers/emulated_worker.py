"""A worker whose model runs on the emulator, as it would on a card. Where `MADE_UP_ROOT` names a
folder, files there say how much memory there is; chunks are small then, and patience is short."""
import os
import atlas.engine.loading as loading
from atlas.card.emulator import Emulator
from atlas.service.worker import load_model,main

ROOT = os.environ.get('MADE_UP_ROOT')

def load(options, meter):
    if ROOT:
        loading._CHUNK = dict(cache=64<<10)
    w = load_model(options|dict(device=Emulator()), meter)
    if ROOT:
        w.ease.pressure.root,w.ease.pressure.patience = ROOT,3
    return w

if __name__=='__main__':
    main(load)
