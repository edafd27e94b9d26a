"""llama.cpp's own server, from the wheel of xllamacpp, with a model of a few hundred tokens made
here: `python llamacpp_server.py FOLDER` prints where it listens, and serves until its standard
input ends. Instead of a folder it takes a GGUF file, to serve that; `--help` has the rest.

It imports nothing of Atlas. The model says the alphabet: after a colon an a, after each letter the
next, and after a z it ends."""
import argparse,sys
from pathlib import Path
import gguf
import numpy as np

WIDTH,HEADS = 256,4
SPECIAL = ['<unk>','<s>','</s>']
BYTES = len(SPECIAL) # The token of byte 0
NAME = 'alphabet'
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"

END = SPECIAL.index('</s>')
LETTERS = range(ord('a'), ord('z'))
FOLLOWS = {ord(':'):BYTES+ord('a'), ord('z'):END} | {b:BYTES+b+1 for b in LETTERS} # byte -> token

def tensors():
    """Two layers that add nothing, so that what comes out of a token is its own embedding.
    The rows of the output are embeddings, too: each is that of the token before it"""
    n = BYTES+256
    rng = np.random.default_rng(0)
    embed = rng.choice(
        np.array([-1,1], np.float32),
        (n, WIDTH))
    out = np.zeros_like(embed)
    for byte,token in FOLLOWS.items():
        out[token] += embed[BYTES+byte]
    yield 'token_embd.weight',embed
    yield 'output.weight',out
    yield 'output_norm.weight',np.ones(WIDTH, np.float32)
    for i in range(2):
        for norm in 'attn_norm','ffn_norm':
            yield f'blk.{i}.{norm}.weight',np.ones(WIDTH, np.float32)
        for part in 'attn_q','attn_k','attn_v','attn_output','ffn_gate','ffn_up','ffn_down':
            yield f'blk.{i}.{part}.weight',np.zeros((WIDTH, WIDTH), np.float32)

def write(path):
    "The model's file"
    w = gguf.GGUFWriter(path, 'llama')
    w.add_block_count(2)
    w.add_context_length(512)
    w.add_embedding_length(WIDTH)
    w.add_feed_forward_length(WIDTH)
    w.add_head_count(HEADS)
    w.add_layer_norm_rms_eps(1e-5)
    kinds = gguf.TokenType
    w.add_tokenizer_model('llama')
    w.add_token_list([*SPECIAL, *(f'<0x{b:02X}>' for b in range(256))])
    w.add_token_scores([0.]*(BYTES+256))
    w.add_token_types(
        [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE]*256])
    w.add_unk_token_id(0)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_add_space_prefix(False)
    w.add_chat_template(TEMPLATE)
    for name,array in tensors():
        w.add_tensor(name, array)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()

def options():
    "What the command line says"
    a = argparse.ArgumentParser()
    a.add_argument('where', type=Path, help='a GGUF file, or a folder to make one in')
    a.add_argument('--threads', type=int, default=1)
    a.add_argument('--parallel', type=int, default=2, help='answers under way at a time')
    a.add_argument('--context', type=int, default=512, help='tokens, of all answers together')
    a.add_argument('--port', type=int, default=0)
    a.add_argument('--alias', help='what the model is called')
    a.add_argument('--forget', action='store_true', help='keep nothing of prompts')
    return a.parse_args()

def params(path, o):
    "What the server is started with"
    from xllamacpp import CommonParams
    p = CommonParams()
    p.model.path = str(path)
    p.model_alias = {o.alias or path.stem}
    p.n_ctx,p.n_parallel,p.n_gpu_layers = o.context,o.parallel,0
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = o.threads
    p.warmup = False
    p.cache_prompt = not o.forget
    p.port = o.port
    return p

def made_here(folder):
    "The model's file, in a folder"
    path = folder/f'{NAME}.gguf'
    write(path)
    return path

def main():
    from xllamacpp import Server,llama_pooling_type
    o = options()
    own = o.where.is_dir()
    p = params(made_here(o.where) if own else o.where, o)
    if own:
        p.embedding = True
        p.pooling_type = llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    server = Server(p)
    print(server.listening_address, flush=True)
    sys.stdin.read()

if __name__=='__main__':
    main()
