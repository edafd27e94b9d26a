"""A small model that sees, with words, a template and an image processor."""
import json,shutil
from pathlib import Path
from tokenizers import Tokenizer,decoders,models,pre_tokenizers

EYES = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in "
    "m.content %}{{ ' <|image_pad|> ' if p.type=='image' else p.text }}{% endfor %}{% endif %}{% "
    "endfor %} w9")
SOURCE = Path(__file__).parents[1]/'data'/'qwen3-vl'

def seeing_model(folder:Path)->Path:
    "Make in `folder` a model whose words are w0, w1, … and whose images become at most six tokens"
    shutil.copytree(SOURCE, folder)
    cfg = json.loads((folder/'config.json').read_text())
    v = cfg['vision_config']
    side = (v['patch_size']*v.get('spatial_merge_size', 2))**2
    size = dict(shortest_edge=side, longest_edge=6*side)
    half = dict(image_mean=[.5]*3, image_std=[.5]*3)
    (folder/'preprocessor_config.json').write_text(json.dumps(dict(size=size, **half)))
    words = words_of(cfg['text_config']['vocab_size'], cfg['image_token_id'])
    words.save(str(folder/'tokenizer.json'))
    (folder/'tokenizer_config.json').write_text(json.dumps(dict(chat_template=EYES)))
    return folder

def words_of(n, mark):
    "A tokenizer of `n` words, one of which stands for an image"
    ids = {'<|image_pad|>' if i==mark else f'w{i}':i for i in range(n)}
    t = Tokenizer(models.WordLevel(ids, unk_token='w0'))
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(['<|image_pad|>'])
    return t
