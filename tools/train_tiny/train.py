"""Train the tiny model: one command, one seed.

    python tools/train_tiny/train.py OUT --data SHARDS

OUT/model gets a checkpoint in bfloat16 under the real names, the tokenizer and template;
OUT/training.json the curve, the acceptance of drafts on held-out text, samples. They are written
every minute, so that a run that is cut off leaves something.
"""
import argparse,json,signal,time
from pathlib import Path
import numpy as np
import torch
from safetensors.torch import save_file
import text
from judge import EAGER,acceptance,samples,validate
from model import Block,Config,Model,load
from muon import optimizers,schedule

LINE = '{:>7} {:>7} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8}'
HEAD = LINE.format('step', 'seconds', 'Mtokens', 'loss', 'held out', 'draft 1', 'balance', 'tok/s')


def weights(m:Model)->dict:
    "Tensors by the names of the real checkpoints, in bfloat16"
    def saved(v):
        on_host = v.detach().to('cpu', torch.bfloat16)
        return on_host.contiguous().clone()
    return {k:saved(v) for k,v in m.state_dict().items()}


def save(m:Model, tok, folder:Path):
    "A folder that engines load"
    folder.mkdir(parents=True, exist_ok=True)
    part = folder/'.model.part'
    save_file(weights(m), part, metadata=dict(format='pt'))
    part.chmod(0o644)
    part.replace(folder/'model.safetensors')
    (folder/'config.json').write_text(json.dumps(m.c.to_json(), indent=1)+'\n')
    save_generation(tok, folder)
    text.save_tokenizer(tok, folder)


def save_generation(tok, folder:Path):
    "Where answers end, and how they are sampled"
    ends = [tok.token_to_id(s) for s in ('<|im_end|>','<|endoftext|>')]
    sampling = dict(do_sample=True, temperature=.7, top_p=.9)
    generation = dict(eos_token_id=ends, pad_token_id=ends[1], **sampling)
    (folder/'generation_config.json').write_text(json.dumps(generation, indent=1)+'\n')


# ------------------------------------------------------------------------------------------

def corpus(a):
    "Tokenizer, and streams to learn from and to judge by"
    begin = time.time()
    records = text.read_texts(a.data) if a.data else []
    if a.data and not records:
        raise SystemExit(f'There are no texts in {a.data}')
    learnt = [r for i,r in enumerate(records) if i%100]
    docs = text.documents(learnt, a.ruled, a.rules, a.seed)
    held = text.documents(records[::100], max(40, a.ruled//100), max(40, a.rules//100), a.seed+1)
    letters = sum(map(len, docs))
    print(f'{len(records):,} texts, {len(docs):,} documents, {letters:,} characters', flush=True)
    if a.init:
        tok = text.Tokenizer.from_file(str(a.init/'tokenizer.json'))
    else:
        tok = text.train_tokenizer([text.without_marks(d) for d in docs[:60_000]], a.vocab)
    train = text.Stream(docs, tok, a.seed)
    val = text.Stream(held, tok, a.seed)
    print(f'{tok.get_vocab_size()} tokens in the vocabulary; {train.tokens:,} to learn from, '
        f'{val.tokens:,} held out, {time.time()-begin:.0f} s', flush=True)
    return tok,train,val


def step_seconds(m:Model, batch, a, amp)->float:
    "Mean time of three steps without an update"
    begin = time.time()
    for _ in range(3):
        with amp:
            loss,*_ = m.loss(batch, a.drafts)
        loss.backward()
        m.zero_grad(set_to_none=True)
    if batch.is_cuda:
        torch.cuda.synchronize()
    return (time.time()-begin)/3


def late(*_):
    raise TimeoutError('compiling takes too long')


def compiled(m:Model, batch, a, amp):
    "Layers compiled, if that works within its time and pays"
    step_seconds(m, batch, a, amp)
    plain = step_seconds(m, batch, a, amp)
    print(f'{plain*1000:.0f} ms a step, not compiled', flush=True)
    if not a.compile:
        return
    begin = time.time()
    signal.signal(signal.SIGALRM, late)
    signal.alarm(a.compile_seconds)
    try:
        Block.forward = torch.compile(EAGER, dynamic=False)
        step_seconds(m, batch, a, amp)
        took = time.time()-begin
        fast = step_seconds(m, batch, a, amp)
        print(f'{fast*1000:.0f} ms compiled, which took {took:.0f} s', flush=True)
        if fast<plain:
            return
    except Exception as e:
        print(f'Not compiled: {str(e)[:300]!r}', flush=True)
    finally:
        signal.alarm(0)
    Block.forward = EAGER
    m.zero_grad(set_to_none=True)

# ------------------------------------------------------------------------------------------

class Run:
    "One training: steps until the time is over, a curve, and files"
    def __init__(self, a):
        self.a,self.begin = a,time.time()
        self.device = 'cuda' if torch.cuda.is_available() and a.device!='cpu' else 'cpu'
        torch.manual_seed(a.seed)
        torch.set_float32_matmul_precision('high')
        self.amp = torch.autocast(self.device, torch.bfloat16, enabled=self.device=='cuda')
        self.read()
        self.curve,self.seen = [],[]
        self.step,self.more = 0,{}

    def read(self):
        "Texts and a model"
        a = self.a
        self.tok,self.stream,held = corpus(a)
        eos = tuple(self.tok.token_to_id(s) for s in ('<|endoftext|>','<|im_end|>'))
        config = Config(vocab=a.vocab, eos=eos)
        self.m = load(a.init) if a.init else Model(config)
        self.m.to(self.device)
        length = a.length+1+max(a.drafts, 3)
        self.source = self.stream.batches(a.rows, length)
        heldout = held.batches(a.rows, length)
        self.tests = [self.batch(heldout) for _ in range(a.tests)]

    def batch(self, source):
        return torch.from_numpy(next(source)).to(self.device, torch.int64, non_blocking=True)

    def cut(self, batch, drafts:int):
        "As many columns as a loss with so many drafts needs"
        return batch[:,:self.a.length+1+drafts]

    def done(self)->float:
        "The part of the run that is over"
        a = self.a
        if a.steps:
            return self.step/a.steps
        end = self.begin+60*a.minutes-a.rest
        return (time.time()-self.start)/max(1e-3, end-self.start)

    def learn(self):
        "All steps"
        a,m = self.a,self.m
        muon,adam = optimizers(m, a)
        compiled(m, self.cut(self.batch(self.source), a.drafts), a, self.amp)
        print(HEAD, flush=True)
        self.start = saved = time.time()
        while (done := self.done())<1:
            factor = schedule(done)
            self.update(muon, adam, factor)
            if self.step%a.every and self.step not in (1,25,100):
                continue
            self.note(factor)
            if time.time()-saved>a.save_every:
                self.report()
                saved = time.time()

    def update(self, muon, adam, factor:float):
        "One step, with `factor` of the learning rates"
        a,m = self.a,self.m
        for g in adam.param_groups:
            g['lr'] = a.adam_lr*factor
        ids = self.cut(self.batch(self.source), a.drafts)
        with self.amp:
            loss,parts,balance = m.loss(ids, a.drafts)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.)
        muon.step(factor)
        adam.step()
        m.zero_grad(set_to_none=True)
        self.seen.append((parts[0], balance.detach()))
        self.step += 1

    def note(self, factor:float):
        "One more point of the curve"
        a = self.a
        loss,balance = (float(torch.stack(x).mean()) for x in zip(*self.seen))
        self.seen = []
        if not np.isfinite(loss):
            raise SystemExit(f'The loss is {loss} at step {self.step}')
        tests = [self.cut(t, a.drafts) for t in self.tests]
        val,*drafts = validate(self.m, tests, self.amp, a.drafts)
        seconds,tokens = time.time()-self.start,self.step*a.rows*a.length
        point = dict(step=self.step, seconds=seconds, tokens=tokens, lr=factor)
        self.curve.append(dict(point, train=loss, val=val, drafts=drafts))
        if len(self.curve)<7 or not len(self.curve)%3:
            self.tell(self.curve[-1], balance)

    def tell(self, c:dict, balance:float):
        "A line of the table"
        first = f'{c["drafts"][0]:.3f}' if c['drafts'] else ''
        losses = f'{c["train"]:.3f}',f'{c["val"]:.3f}',first
        speed = f'{c["tokens"]/c["seconds"]:,.0f}'
        seen = self.step,f'{c["seconds"]:.0f}',f'{c["tokens"]/1e6:.1f}'
        print(LINE.format(*seen, *losses, f'{balance:.2f}', speed), flush=True)

    def report(self):
        "Everything that is known so far, in files"
        save(self.m, self.tok, self.a.out/'model')
        known = dict(self.more, curve=self.curve)
        (self.a.out/'training.json').write_text(json.dumps(known, indent=1)+'\n')

    def facts(self)->dict:
        "What was done, with what"
        a,m = self.a,self.m
        return dict(
            steps=self.step,
            tokens=self.step*a.rows*a.length,
            epochs=self.stream.epochs,
            corpus_tokens=self.stream.tokens,
            seconds=time.time()-self.start,
            seed=a.seed,
            rows=a.rows,
            length=a.length,
            device=torch.cuda.get_device_name() if self.device=='cuda' else 'cpu',
            torch=torch.__version__,
            parameters=sum(p.numel() for p in m.parameters()))

    def judge(self):
        "The last word, by the weights as they were saved"
        a,m,amp = self.a,self.m,self.amp
        self.more = self.facts()
        self.report()
        m.load_state_dict({k:v.float() for k,v in weights(m).items()})
        short = torch.cat([t[:,:48] for t in self.tests])[:64]
        tests = [self.cut(t, 3) for t in self.tests]
        self.more['val'] = validate(m, tests, amp, 3)
        self.more['perplexity'] = float(np.exp(self.more['val'][0]))
        self.more['acceptance'] = acceptance(m, short, a.places, amp)
        self.more['samples'] = samples(m, self.tok, amp)
        self.report()

    def show(self):
        "What came of it"
        k = self.more
        loss,*drafts = (f'{x:.3f}' for x in k['val'])
        print(f'{k["steps"]:,} steps, {k["tokens"]/1e6:.0f} M tokens, {k["epochs"]} epochs')
        print(f'held out: loss {loss}, perplexity {k["perplexity"]:.2f}; drafts', *drafts)
        accepted = [f'{x:.3f}' for x in k['acceptance']['each']]
        print('accepted drafts:', *accepted)
        print(f'{k["acceptance"]["tokens_per_step"]:.2f} tokens a step')
        for s in k['samples']:
            print('---\n'+s)
        size = (self.a.out/'model/model.safetensors').stat().st_size
        print(f'{size:,} bytes of weights, {time.time()-self.begin:.0f} s in all', flush=True)


def add_times(add):
    "Where from, where to, and how long"
    add('out', type=Path)
    add('--data', type=Path, help='folder of *.jsonl.xz; none: rules alone')
    add('--minutes', type=float, default=8.7, help='all in all')
    add('--rest', type=float, default=50, help='seconds of them for what comes after the last step')
    add('--steps', type=int, help='so many steps instead of so many minutes')
    add('--save-every', type=float, default=60)
    add('--init', type=Path, help='a folder to begin with instead of random weights')
    add('--compile-seconds', type=int, default=150, help='most to spend on compiling layers')
    add('--device', default='cuda')
    add('--no-compile', dest='compile', action='store_false')


def add_sizes(add):
    "What is learnt, and how fast"
    add('--ruled', type=int, default=200_000, help='texts by rule')
    add('--rules', type=int, default=60_000, help='conversations by rule')
    add('--rows', type=int, default=32)
    add('--length', type=int, default=1024)
    add('--drafts', type=int, default=3)
    add('--vocab', type=int, default=2048)
    add('--lr', type=float, default=.02, help="Muon's")
    add('--adam-lr', type=float, default=.004)
    add('--seed', type=int, default=1)
    add('--every', type=int, default=200, help='steps between points of the curve')
    add('--tests', type=int, default=4, help='held-out batches')
    add('--places', type=int, default=64, help='of each prompt, for acceptance')


def main():
    as_it_is = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_is)
    add_times(p.add_argument)
    add_sizes(p.add_argument)
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    run = Run(a)
    run.learn()
    run.judge()
    run.show()


if __name__=='__main__':
    main()
