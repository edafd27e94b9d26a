"""Short texts by rule: stories, descriptions, answers, lists, dialogues of a small world; seeded

`stories.txt` is the grammar, `facts.txt` what is true. Records are those of `write.py`: {"kind",
"prompt", "text"}, and "more": questions about a story, each with its answer.
"""
import random,re
from functools import lru_cache
from pathlib import Path
from words import BOYS,COLOURS,DAYS,GIRLS,OBJECTS,UNCOUNTED,an,many,phrases

HERE = Path(__file__).parent
INDOORS = 'school kitchen library house barn castle shop bakery station'.split()
HEROES = '''dog cat fox bear rabbit mouse pig goat duck hen owl frog turtle monkey squirrel hedgehog
crow lion elephant donkey'''.split()
PETS = 'dog cat rabbit mouse duck hen owl frog turtle squirrel hedgehog crow goat'.split()
SNACKS = 'apple pear carrot berry plum nut cookie tomato banana'.split()
MOODS = 'kind brave shy curious happy calm clever funny quiet friendly careful cheerful'.split()
HIDING = dict(
    indoors='a chair|a box|a table|a curtain|a shelf|a bag|a basket|a door'.split('|'),
    outdoors='a tree|a big stone|a bush|some leaves|a bench|a fence|a wall|a branch'.split('|'))
DREAMS = phrases('''a flying boat|a castle in the clouds|a talking bear|a mountain of cake
a golden fish|a friendly lion|a trip to the moon|a garden full of stars|a big blue whale
a warm summer day''')
FRUITS = 'an apple|a pear|a plum|a banana|a cherry|a peach|a lemon|an orange|a grape'.split('|')
TOYS = 'a ball|a kite|a drum|a doll|a wooden train|a teddy bear|a little boat|a swing'.split('|')
KIND = phrases('''please|thank you|you are welcome|I like you|well done|good morning|I am sorry
you are my friend|sleep well|can I help you?''')
HOWS = ['', ' in simple words', ' for small children', ' with short sentences', ' with a happy end']
TELL = ['Write a very short story', 'Write a short story', 'Tell me a story', 'Tell a story']
DESCRIBE = [
    'Describe {} in three short and simple sentences.',
    'Describe {}.',
    'Describe {} in simple words.']
LIKE = dict( # What is said of heroes
    child=['little', 'small', 'young'],
    animal=['small', 'little', 'young', 'clever', 'big'],
    worker=['', 'old', 'young', 'good'])
STARTS = re.compile(r'(?:^|[.!?] "?|\." |\n|: "|(?:^|\n)\w+: )[a-z]')
CHOICES = dict( # Slots of which any will do
    weather=['sunny', 'warm', 'fine', 'bright', 'mild'],
    next_cap=['the next day', 'one day later', 'after a week'],
    bad=['tired', 'sleepy', 'hungry'],
    a_cake=['a cake', 'an apple pie', 'a nut cake', 'some cookies'],
    clock=['two', 'three', 'four', 'five'])
SHE,HE = ('she','her','her'),('he','him','his')
WOMEN = ['mother', 'grandmother', 'aunt', 'big sister']
MEN = ['father', 'grandfather', 'uncle', 'big brother']
PIECES = re.compile(r'\{\w+\}|<\w+>|[\[\]]|\||[^\[\]{}<|]+')
BRACKETS = {'{':'slot', '<':'rule'}
BARE = re.compile('^(a|an|many|two|some) ')


def blocks(path:Path)->list[tuple[list[str],list[str]]]:
    "Heads (as words) and lines of a file of `= head` blocks; lines that begin with blanks go on"
    out = []
    for line in path.read_text().split('\n'):
        if line.startswith('='):
            out.append((line[1:].split(), []))
        elif line.startswith(' '):
            out[-1][1][-1] += ' '+line.strip()
        elif line and not line.startswith('#'):
            out[-1][1].append(line)
    return out


@lru_cache(1)
def facts()->dict[str,list[dict]]:
    "Tables of `facts.txt` by name: rows as dicts"
    tables = {}
    for head,lines in blocks(HERE/'facts.txt'):
        columns = [c.strip() for c in ' '.join(head).split('|')]
        rows = [[c.strip() for c in line.split('|')] for line in lines]
        tables[columns[0]] = [dict(zip(columns[1:], r, strict=True)) for r in rows]
    return tables


@lru_cache(1)
def grammar()->tuple[dict,list]:
    """Rules by name, each a list of parsed alternatives; and plots

    A plot is what fits, the parsed text, and questions with answers."""
    rules,plots = {},[]
    for head,lines in blocks(HERE/'stories.txt'):
        if head[0]!='plot':
            rules[' '.join(head)] = [parse(line) for line in lines]
            continue
        asks = [parse(line[1:].strip()) for line in lines if line[0]=='?']
        body = ' '.join(line for line in lines if line[0]!='?')
        often = next((int(h[1:]) for h in head if re.fullmatch(r'x\d+', h)), 1)
        plots += [(head[1:], parse(body), asks)]*often
    return rules,plots


def parse(template:str)->list:
    "A template as a list of text, ('slot', name), ('rule', name) and lists of alternatives"
    pieces = PIECES.findall(template)
    stack = [[[]]]
    for p in pieces:
        now = stack[-1]
        if p=='[':
            stack.append([[]])
        elif p==']':
            options = stack.pop()
            stack[-1][-1].append(options if len(options)>1 else options+[[]])
        elif p=='|' and len(stack)>1:
            now.append([])
        else:
            now[-1].append((BRACKETS[p[0]], p[1:-1]) if p[0] in BRACKETS else p)
    if len(stack)>1:
        raise ValueError(f'[ without ] in {template[:60]!r}')
    return stack[0][0]


def capital(text:str)->str:
    return text[:1].upper()+text[1:]


def one_of(rule:str, rng:random.Random)->list:
    "An alternative of a rule"
    return rng.choice(grammar()[0][rule])


def fill(parts:list, world:dict, rng:random.Random)->str:
    "The text of a parsed template"
    out = []
    for p in parts:
        if isinstance(p, str):
            out.append(p)
        elif isinstance(p, list):
            out.append(fill(rng.choice(p), world, rng))
        elif p[0]=='rule':
            out.append(fill(one_of(p[1], rng), world, rng))
        else:
            out.append(value(p[1], world, rng))
    return ''.join(out)


def value(name:str, world:dict, rng:random.Random)->str:
    "A slot; a list means one of it, a capital letter the value's capital"
    low = name[0].lower()+name[1:]
    v = world[low]
    v = rng.choice(v) if isinstance(v, list) else str(v)
    return v if name==low else capital(v)


def clean(text:str)->str:
    "Spaces once, and capitals where sentences begin"
    text = re.sub(r' +([.,!?])', r'\1', re.sub(r'\s+', ' ', text)).strip()
    text = re.sub(r' ?/ ?', '\n', text)
    return re.sub(STARTS, last_capital, text)


def last_capital(m:re.Match)->str:
    return m[0][:-1]+m[0][-1].upper()


def say(template:list, world:dict, rng:random.Random)->str:
    return clean(fill(template, world, rng))

# ------------------------------------------------------------------------------------------

def person(kind:str, prefix:str, rng:random.Random)->dict:
    "Name and pronouns of a child, an animal or a worker"
    girl = rng.random()<.5
    job = rng.choice(facts()['people'])['name']
    if kind=='worker' and job in ('king','queen'):
        girl = job=='queen'
    name = rng.choice(GIRLS if girl else BOYS)
    what = dict(child='girl' if girl else 'boy', animal=rng.choice(HEROES), worker=job)[kind]
    slots = dict(name=name, kind=what, a_kind=an(f'{rng.choice(LIKE[kind])} {what}'.strip()))
    slots['he'],slots['him'],slots['his'] = SHE if girl else HE
    return {prefix+k:v for k,v in slots.items()}


def elder_of(his:str, rng:random.Random)->dict:
    "Somebody older of the hero's family"
    woman = rng.random()<.5
    elder = f'{his} {rng.choice(WOMEN if woman else MEN)}'
    return dict(elder=elder, elder_s=elder+"'s", ehe='she' if woman else 'he')


def people(kind:str, rng:random.Random)->dict:
    "A hero, a friend and somebody older"
    like = 'animal' if kind=='animal' else 'child'
    hero,other = person(kind, '', rng),person(like, 'f', rng)
    while other['fname']==hero['name'] or other['fkind']==hero['kind'] and rng.random()<.7:
        other = person(like, 'f', rng)
    w = hero|other|elder_of(hero['his'], rng)
    name,friend = hero['name'],other['fname']
    near = f'{hero["his"]} friend {friend}'
    w |= dict(hero=name, hero_s=name+"'s", friend=friend, friend_s=friend+"'s")
    w |= dict(a_hero=f'{hero["a_kind"]} named {name}', a_kind_bare=an(hero['kind']))
    w['a_friend'] = rng.choice([near, near, f'{other["fa_kind"]} named {friend}'])
    return w


def things(fit:list[str], rng:random.Random)->dict:
    "A thing and its colour, food, an animal, numbers"
    thing = rng.choice(fit or [o for o in OBJECTS if o not in ('ladder','swing','chair')])
    colour = rng.choice(COLOURS)
    w = dict(thing=thing, colour=colour, a_thing=an(f'{colour} {thing}'))
    w['the_thing'] = [f'the {thing}', f'the {thing}', f'the {colour} {thing}']
    return w|foods(rng)|pet_of(rng)|counts(rng)


def foods(rng:random.Random)->dict:
    "Something to eat, as often as plots ask for it, and another"
    food,food2 = rng.sample(SNACKS, 2)
    w = dict(food_one=food, a_food=an(food), an_apple=an(food))
    w |= dict.fromkeys(('foods','foods_the','foods_n'), many(food))
    w['foods2'] = many(food2)
    w['taste'] = next(f['taste'] for f in facts()['foods'] if f['name']==food)
    return w


def pet_of(rng:random.Random)->dict:
    "An animal, how it looks, what it eats and said"
    pet = rng.choice([a for a in facts()['animals'] if a['name'] in PETS])
    name,sound = pet['name'],pet['sound']
    stem = sound[:-2] if sound.endswith(('sses','zzes')) else sound[:-1]
    w = dict(pet=name, a_pet=an(name), pet_look=pet['look'], pet_eats=pet['eats'])
    return w|dict(pet_sound=stem+'ed')


def counts(rng:random.Random)->dict:
    "Numbers, a sum and a double"
    n = rng.randint(3, 12)
    a,b = rng.randint(1, 10),rng.randint(1, 10)
    return dict(n=n, a=a, b=b, sum=a+b, double=2*b)


def is_inside(place:dict)->bool:
    return place['name'].split()[-1] in INDOORS


def jobs(rng:random.Random)->dict:
    "Two jobs and somebody who helps"
    job,job2,helper = rng.sample(facts()['people'], 3)
    w = dict(a_job=an(job['name']), job_does=job['does'], a_job2=an(job2['name']))
    w |= dict(person=an(helper['name']), person_the=f'the {helper["name"]}')
    return w|dict(person2=an(job['name']))


def place_slots(place:dict)->dict:
    "What is known of a place"
    name = place['name']
    w = dict(place=name, to_place=f'to {name}')
    return w|dict(in_place=place['in'], place_is=place['is'], place_do=place['do'])


def sights(place:dict, rng:random.Random)->dict:
    "What there is to see, and where to hide"
    first,second = rng.sample(place['sees'].split(', '), 2)
    hiding = rng.sample(HIDING['indoors' if is_inside(place) else 'outdoors'], 2)
    w = dict(sees1=first, sees2=second, sees_bare=BARE.sub('', first))
    return w|dict(sees_there=hiding[0], sees_there2=hiding[1])


def somewhere(outside:bool, rng:random.Random)->dict:
    "A place and what is there, another place, jobs, and the rest"
    places = facts()['places']
    place = rng.choice([p for p in places if not (outside and is_inside(p))])
    w = place_slots(place)|sights(place, rng)|jobs(rng)|CHOICES
    w['place2'] = rng.choice([p['name'] for p in places if p is not place])
    w['day'] = rng.choice(DAYS)
    w['dream'] = rng.choice(DREAMS)
    w['mood'],w['mood2'] = rng.sample(MOODS, 2)
    return w


def world_of(fit:list[str], rng:random.Random)->dict:
    "Everything that a plot may speak of"
    kinds = [k for k in fit if k in ('child','animal','worker')]
    if not kinds:
        kinds = rng.choices(['child','animal','worker'], [6,3,1])
    kind = kinds[0]
    w = people(kind, rng)
    w |= things([f for f in fit if f in OBJECTS], rng)
    w |= somewhere('out' in fit, rng)
    homes = {a['name']:a['lives'] for a in facts()['animals']}
    w['home'] = homes.get(w['kind'], 'in a small house')
    return w

# ------------------------------------------------------------------------------------------

def introduced(text:str, w:dict, rng:random.Random)->str:
    "A story in which the friend is said to be one where the name comes first, mostly"
    friend,before = w['friend'],'friend '+w['friend']
    at = text.find(friend)
    spoken = text[:at].count('"')%2
    if at<0 or before in text or f'named {friend}' in text or spoken or rng.random()<.2:
        return text
    name = f'{w["his"]} friend {friend}'
    before = text[max(0, at-3):at]
    starts = not at or before[-2:] in ('. ','! ','? ','" ') and before[0]!=','
    return text[:at]+(capital(name) if starts else name)+text[at+len(friend):]


def subjects(text:str, w:dict)->list[str]:
    "What may be asked for, of what is in the story"
    about = [w['a_hero']]
    if w['friend'] in text:
        about.append(f'{w["hero"]} and {w["friend"]}')
    if text.count(w['thing'])>1:
        about.append(f'{w["a_hero"]} and {an(w["thing"])}')
    if w['place'] in text:
        about.append(f'{w["a_hero"]} {w["in_place"]}')
    return about


def story(rng:random.Random)->dict:
    fit,body,asks = rng.choice(grammar()[1])
    w = world_of(fit, rng)
    text = introduced(say(body, w, rng), w, rng)
    asks = rng.sample(asks, min(2, len(asks)))
    pairs = [fill(a, w, rng).split('|') for a in asks]
    how = rng.choice(HOWS)
    ask = rng.choice(TELL)
    prompt = f'{ask}{how} about {rng.choice(subjects(text, w))}.'
    more = [[capital(x.strip()) for x in pair] for pair in pairs]
    return dict(kind='story', prompt=prompt, text=text, more=more)


def row_of(rng:random.Random)->tuple[str,dict]: # Table, and a row's slots
    "One row of the facts"
    table = rng.choices(list(facts()), [30, 29, 20, 25, 21, 15, 21])[0]
    row = rng.choice(facts()[table])
    listed = (row.get('sees') or row.get('needs') or '').split(', ')
    owner = rng.choice(GIRLS+BOYS)
    colour = row.get('colour') or rng.choice(COLOURS)
    *some,last = rng.sample(listed, min(3, len(listed)))
    w = row|dict(colour=colour, name_s=f"{owner}'s {row['name']}")
    return table,w|numbers_of(table, row['name'])|dict(some=', '.join(some)+' and '+last)


def numbers_of(table:str, name:str)->dict:
    "A row's name with an article, and in the plural"
    bare = table in ('places','feelings','topics') or name in UNCOUNTED
    counted = table in ('animals','objects','people')
    return dict(
        a_name=name if bare else an(name),
        names=many(name) if counted else name,
        foods_own=name if name in UNCOUNTED else many(name))


def describe(rng:random.Random)->dict:
    table,w = row_of(rng)
    lines = grammar()[0][f'describe {table}']
    chosen = lines if table=='topics' else rng.sample(lines, min(3, len(lines)))
    first,*rest = (say(line, w, rng) for line in chosen)
    if table in ('animals','objects','foods'):
        start = f'^{re.escape(capital(w["a_name"]))} '
        rest = [re.sub(start, 'It ', s) for s in rest]
    ask = rng.choice(DESCRIBE).format(w['a_name'])
    return dict(kind='describe', prompt=ask, text=' '.join([first, *rest]))


def question(rng:random.Random)->dict:
    table,w = row_of(rng)
    both = fill(one_of(f'ask {table}', rng), w, rng)
    ask,answer = both.split('|')
    ask = clean(ask)+rng.choice(['', '', ' Answer in one or two short sentences.'])
    return dict(kind='question', prompt=ask.replace('.?', '.'), text=clean(answer))


def lists()->list[tuple[str,list]]:
    "What there are lists of, wherever one is"
    tables = facts()
    return [
        ('animals', [an(a['name']) for a in tables['animals']]),
        ('fruits', FRUITS),
        ('toys', TOYS),
        ('kind words', KIND),
        ('colours', COLOURS),
        ('things to eat', [an(f['name']) for f in tables['foods']]),
        ('names', GIRLS+BOYS),
        ('days', DAYS)]


def listing(rng:random.Random)->dict:
    place,worker = rng.choice(facts()['places']),rng.choice(facts()['people'])
    seen = (f'things you see {place["in"]}', place['sees'].split(', '))
    needed = (f'things that {an(worker["name"])} needs', worker['needs'].split(', '))
    what,items = rng.choice([seen, seen, needed, *lists()])
    n = rng.randint(3, 5)
    word = ['three','four','five'][n-3]
    lines = [f'{i+1}. {capital(x)}' for i,x in enumerate(rng.sample(items, n))]
    short = rng.choice(['', ' One short line each.'])
    return dict(kind='list', prompt=f'Write a list of {word} {what}.{short}', text='\n'.join(lines))


def dialogue(rng:random.Random)->dict:
    w = world_of(['child'], rng)
    both = fill(one_of('dialogue', rng), w, rng)
    topic,text = both.split(' % ')
    text = clean(text)
    how = rng.choice(['short and simple', 'short', 'simple'])
    ask = f'Write a {how} dialogue between {w["hero"]} and {w["friend"]}'
    return dict(kind='dialogue', prompt=f'{ask} about {topic}.', text=text)


def records(n:int, seed:int)->list[dict]:
    "`n` different texts"
    rng = random.Random(seed)
    makers,share = [story,describe,question,listing,dialogue],[60,10,14,2,14]
    out,seen = [],set()
    for make in rng.choices(makers, share, k=n):
        r = make(rng)
        if (r['prompt'],r['text']) in seen:
            continue
        seen.add((r['prompt'], r['text']))
        out.append(r)
    return out
