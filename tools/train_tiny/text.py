"""From shards and rules to token ids: filters, chat template, tokenizer, windows of documents"""
import hashlib,json,lzma,random,re
from multiprocessing import get_context
from pathlib import Path
import jinja2
import numpy as np
from tokenizers import AddedToken,Regex,Tokenizer
from tokenizers import decoders,models,normalizers,pre_tokenizers,trainers
import stories
from rules import conversation,said,thought_about,user
from words import BOYS,GIRLS,NAMES

HERE = Path(__file__).parent
SPECIAL = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
MARKS = [
    '<tool_call>', '</tool_call>',
    '<tool_response>', '</tool_response>',
    '<think>', '</think>']
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r' ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+')  # as Qwen3.5 cuts
NAME = re.compile(r'(?<=[a-z,;"] )([A-Z][a-z]+)')  # a capital within a sentence
NO_NAMES = {'Mr', 'Mrs', 'Then', 'The', 'But', 'It', 'He', 'She', 'So', 'And', 'They'}
WOMEN = re.compile(r'\b(girl|mother|mom|woman|lady|queen|sister|grandmother|daughter|aunt)\b')
MEN = re.compile(r'\b(boy|father|dad|man|king|brother|grandfather|son|uncle)\b')
SHE = re.compile(r'\b(she|her)\b', re.I)
HE = re.compile(r'\b(he|him|his)\b', re.I)


def template():
    "The chat template, compiled as libraries do it"
    env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    env.filters['tojson'] = lambda x: json.dumps(x, ensure_ascii=False)
    return env.from_string((HERE/'chat_template.jinja').read_text())


def read_texts(folder:Path)->list[dict]:
    "Records of all shards, each text once; a shard that was cut off counts up to there"
    seen,out = set(),[]
    for f in sorted(Path(folder).glob('*.jsonl.xz')):
        try:
            for line in lzma.open(f, 'rt'):
                r = json.loads(line)
                key = hashlib.sha1(r['text'][:160].lower().encode()).digest()
                if key not in seen:
                    out.append(r)
                seen.add(key)
        except (EOFError,lzma.LZMAError,json.JSONDecodeError) as e:
            print(f'{f.name}: {e!r}, {len(out)} texts so far')
    return out

# ------------------------------------------------------------------------------------------

def sensible(r:dict)->bool:
    "Does a written text keep to what was asked? Lists and facts are left to the rules"
    kind,ask,text = r['kind'],r['prompt'],r['text']
    asked = set(re.findall('[A-Z][a-z]+', ask))&set(NAMES)
    if kind=='question':
        return 'take care' in ask
    if kind=='dialogue':
        return takes_turns(text, asked)
    if kind=='describe':
        what = ask.removeprefix('Describe ').split(' in three ')[0].split()[-1]
        return what in text and len(text)<400
    return kind=='story' and keeps_names(text, asked)


def takes_turns(text:str, asked:set[str])->bool:
    "Do those who were asked for speak in turn, and nobody else?"
    speakers = [line.split(':')[0] for line in text.split('\n')]
    turns = all(x!=y for x,y in zip(speakers, speakers[1:]))
    return len(speakers)>3 and set(speakers)==asked and turns


def keeps_names(text:str, asked:set[str])->bool:
    "Is the story of those who were asked for, with one more name at most, and does she stay she?"
    if not asked or not all(name in text for name in asked):
        return False
    named = set(NAME.findall(text))-NO_NAMES
    if len(named-asked)>1:
        return False
    women = named&set(GIRLS) or WOMEN.search(text)
    men = named&set(BOYS) or MEN.search(text)
    if asked<=set(GIRLS) and HE.search(text) and not men:
        return False
    return not (asked<=set(BOYS) and SHE.search(text) and not women)


def written_documents(records:list[dict], seed:int)->list[str]:
    "Texts of `write.py` that make sense, as they are or in a chat"
    rng,chat = random.Random(seed),template()
    return [document(r, .8, rng, chat) for r in records if sensible(r)]


def ruled_documents(n:int, seed:int)->list[str]:
    "Texts by rule, as they are or in a chat"
    rng,chat = random.Random(seed),template()
    return [document(r, .4, rng, chat) for r in stories.records(n, seed)]


def conversations(n:int, seed:int)->list[str]:
    "Conversations by rule"
    rng,chat = random.Random(seed),template()
    made = [conversation(rng) for _ in range(n)]
    return [chat.render(messages=messages, tools=tools) for messages,tools in made]


def shares(f, n:int, seed:int, most:int=2000)->list[tuple]:
    "Calls of `f` for `n` documents in all, each with a seed of its own"
    sizes = [min(most, n-i) for i in range(0, n, most)]
    return [(f, size, seed*100_003+i) for i,size in enumerate(sizes)]


def documents(
    written:list[dict], # Records of `write.py`
    ruled:int, # Texts by rule
    made:int, # Conversations by rule
    seed:int,
)->list[str]:
    "What is learnt, shuffled; made by as many processes as there are cores"
    own = [(written_documents, written[i::16], seed+i) for i in range(16)]
    jobs = own+shares(ruled_documents, ruled, seed)+shares(conversations, made, seed)
    with get_context('fork').Pool() as pool:
        waiting = [pool.apply_async(f, rest) for f,*rest in jobs]
        parts = [w.get() for w in waiting]
    out = [d for part in parts for d in part]
    random.Random(seed).shuffle(out)
    return out


def document(
    r:dict,
    plainly:float, # How often prose stands alone
    rng:random.Random,
    chat, # `template()`
)->str:
    "One text as it is, or as an answer, or with a question about it"
    ask = r['prompt']
    plain = rng.random()<plainly and r['kind'] in ('story','describe','dialogue')
    thought = thought_about(r['kind'], ask) if rng.random()<.6 else ''
    if rng.random()<.5:
        ask = ask.replace(' Answer in one or two short sentences.', '')
    messages = [user(ask), said(r['text'], thought)]
    if r.get('more') and rng.random()<.5:
        messages = asked_about(r, rng)
    return r['text'] if plain else chat.render(messages=messages)


def asked_about(r:dict, rng:random.Random)->list[dict]:
    "A conversation about a story: it is read or written, then comes a question"
    question,answer = rng.choice(r['more'])
    thought = 'I look into the story.' if rng.random()<.6 else ''
    last = said(answer, thought)
    if rng.random()<.5:
        return [user(r['text']+'\n\n'+question), last]
    return [user(r['prompt']), said(r['text']), user(question), last]

# ------------------------------------------------------------------------------------------

def train_tokenizer(docs:list[str], vocab:int)->Tokenizer:
    "Byte-level BPE with Qwen's words and marks, which come last"
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(WORDS), 'isolated')
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    t.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    t.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = vocab-len(SPECIAL)-len(MARKS)
    bpe = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    t.train_from_iterator(docs, bpe)
    t.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    t.add_tokens([AddedToken(s, special=False, normalized=False) for s in MARKS])
    return t


def without_marks(doc:str)->str:
    "A document as the tokenizer's training sees it"
    for s in SPECIAL+MARKS:
        doc = doc.replace(s, '\n')
    return doc


def added(content:str)->dict:
    "A mark as `tokenizer_config.json` has it"
    no = dict(lstrip=False, normalized=False, rstrip=False, single_word=False)
    return dict(content=content, **no, special=content in SPECIAL)


def save_tokenizer(t:Tokenizer, folder:Path):
    "All files that text needs"
    t.save(str(folder/'tokenizer.json'), pretty=False)
    config = dict(
        tokenizer_class='PreTrainedTokenizerFast',
        added_tokens_decoder={str(t.token_to_id(s)):added(s) for s in SPECIAL+MARKS},
        bos_token=None,
        eos_token='<|im_end|>',
        pad_token='<|endoftext|>',
        unk_token=None,
        add_bos_token=False,
        clean_up_tokenization_spaces=False,
        model_max_length=4096)
    (folder/'tokenizer_config.json').write_text(json.dumps(config, indent=1)+'\n')
    (folder/'chat_template.jinja').write_text((HERE/'chat_template.jinja').read_text())


class Stream:
    "Documents as token ids, packed anew in each epoch into windows that begin where documents do"
    def __init__(self, docs:list[str], t:Tokenizer, seed:int=0):
        end = t.token_to_id('<|endoftext|>')
        encoded = t.encode_batch(docs, add_special_tokens=False)
        self.docs = [np.array([*e.ids, end], np.int32) for e in encoded]
        self.tokens = sum(map(len, self.docs))
        self.rng = np.random.default_rng(seed)
        self.epochs = 0

    def windows(self, length:int):
        "Yields arrays of `length` ids for ever"
        if self.tokens<2*length:
            raise ValueError(f'{self.tokens} tokens are too few for windows of {length}')
        while True:
            order = self.rng.permutation(len(self.docs))
            ids = np.concatenate([self.docs[i] for i in order])
            begins = np.cumsum([0]+[len(self.docs[i]) for i in order])
            at = 0
            while at+length<=len(ids):
                yield ids[at:at+length]
                at = int(begins[np.searchsorted(begins, at+length-1)])  # the next document's begin
            self.epochs += 1

    def batches(self, rows:int, length:int):
        "Yields (rows, length) for ever"
        w = self.windows(length)
        while True:
            yield np.stack([next(w) for _ in range(rows)])
