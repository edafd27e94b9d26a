"""Make images.npz: what torchvision and transformers make of a few small images. Run by hand, never
in CI.

    pip install torch==2.13.0 torchvision==0.28.0 transformers==5.23.0 pillow==13.0.0
    python tests/data/images/make_images.py

    from{i}, to{i}      an image and what torchvision's antialiased bicubic resize makes of it, as
                        bytes
    image{i}, pixels{i}, grid{i}, spec{i}   an image, what Qwen2VLImageProcessor (the default one,
                        on torchvision) makes of it, and with which patch, merge, frames, smallest
                        and largest area
    file{i}, rgb{i}     an image file, and what transformers' load_image makes of it
"""
import base64,io
from pathlib import Path
import numpy as np, torch
from PIL import Image
from torchvision.transforms.v2 import InterpolationMode,functional as tvf
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

rng = np.random.default_rng(0)
def noise(h, w, hard):
    "Random pixels, black and white if `hard`"
    a = rng.integers(0, 256, (h,w,3), dtype=np.uint8)
    return (a>128).astype(np.uint8)*255 if hard else a

def resized(x, size):
    "As torchvision resizes"
    a = torch.from_numpy(x).permute(2,0,1).contiguous()
    y = tvf.resize(a, size, interpolation=InterpolationMode.BICUBIC, antialias=True)
    return y.permute(1,2,0).numpy()

out = {}
SIZES = [ # h, w, and what they become
    (17,23,10,40), (30,12,8,8), (5,7,20,12), (1,60,4,20), (24,28,24,9), (15,15,22,15), (130,5,9,3)]
for i,(h,w,*size) in enumerate(SIZES):
    x = noise(h, w, i%2)
    out |= {f'from{i}':x, f'to{i}':resized(x, size)}

half = dict(image_mean=[.5]*3, image_std=[.5]*3)
clip = dict(
    image_mean=[.48145466,.4578275,.40821073], image_std=[.26862954,.26130258,.27577711])
SPECS = [ # size; patch, merge, frames, smallest and largest area; normalisation
    ((12,19), (4,2,2,64,1<<20), half), ((5,13), (8,2,1,512,4096), clip),
    ((40,31), (4,2,2,64,300), clip)]
for i,(size,spec,kw) in enumerate(SPECS):
    cuts,areas = spec[:3],spec[3:]
    patch,merge,frames = cuts
    p = Qwen2VLImageProcessor(
        size=dict(zip(('shortest_edge','longest_edge'), areas)),
        patch_size=patch,
        merge_size=merge,
        temporal_patch_size=frames,
        **kw)
    x = noise(*size, i==2)
    o = p(images=Image.fromarray(x), return_tensors='np')
    out |= {f'image{i}':x, f'pixels{i}':o['pixel_values']}
    out |= {f'grid{i}':o['image_grid_thw'][0], f'spec{i}':np.array(spec)}

def stored(im, kind, turn=1, **kw):
    "An image file, turned as its EXIF says where it has some"
    e = Image.Exif()
    e[0x112] = turn
    b = io.BytesIO()
    im.save(b, kind, **kw,
        **({} if kind in ('GIF','BMP') else dict(exif=e)))
    return b.getvalue()

a = Image.fromarray(noise(9, 12, False))
rgba = Image.fromarray(rng.integers(0, 256, (9,12,4), dtype=np.uint8))
deep = Image.fromarray(rng.integers(0, 600, (9,12), dtype=np.uint16))
black = Image.new('RGB', (12,9))
files = [
    stored(rgba, 'PNG', 6), stored(a.convert('P'), 'PNG', 3, transparency=5),
    stored(a.convert('LA'), 'PNG'), stored(deep, 'PNG'),
    stored(a.convert('CMYK'), 'JPEG', quality=95),
    stored(a, 'JPEG', 8, quality=95, progressive=True),
    stored(a, 'GIF', save_all=True, append_images=[black]),
    stored(a, 'WEBP', 5, lossless=True),
    stored(rgba, 'WEBP', lossless=True, save_all=True, append_images=[rgba]),
    stored(a.convert('1'), 'BMP')]
for i,b in enumerate(files):
    url = 'data:image/png;base64,'+base64.b64encode(b).decode()
    out |= {f'file{i}':np.frombuffer(b, np.uint8), f'rgb{i}':np.array(load_image(url))}

np.savez_compressed(Path(__file__).parent/'images.npz', **out)
