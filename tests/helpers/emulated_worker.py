"A worker whose model runs on the emulator, as it would on a card."
from atlas.card.emulator import Emulator
from atlas.service.worker import load_model,main

def load(options, meter): return load_model(options|dict(device=Emulator()), meter)

if __name__=='__main__': main(load)
