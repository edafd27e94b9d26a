"""A worker with a real model, in which a prompt that begins with token 7 has logits that are no
numbers, and for one that begins with 8 there is no memory."""
import numpy as np
from atlas.ground.core import OutOfMemoryError
from atlas.service.worker import load_model,main

def load(options, meter):
    work = load_model(options, meter)
    model = work.engine.model
    trunk = model.trunk
    def faulty(batch, cache, *a, **kw):
        first = [
            int(np.asarray(batch.ids).reshape(-1)[0])] if batch.tiled else []
        if 8 in first:
            raise OutOfMemoryError('There was to be an array of 3 GiB')
        out = trunk(batch, cache, *a, **kw)
        if 7 in first:
            out[:] = np.nan
        return out
    model.trunk = faulty
    return work

if __name__=='__main__':
    main(load)
