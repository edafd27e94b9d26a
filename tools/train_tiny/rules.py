"""Conversations by rule: small sums, counting, copying, calls of tools with thoughts; seeded

Each is (messages, tools), as the chat template takes them.
"""
import json,random
from words import ANIMALS,CITIES,COLOURS,DAYS,FEELINGS,FOODS,MONTHS,NAMES,NUMBERS,OBJECTS,PLACES
from words import HOMES,OPPOSITES,SOUNDS,an,invented,one_of


def user(text:str)->dict:
    return dict(role='user', content=text)


def said(text:str, thought:str='')->dict:
    return dict(role='assistant', content=text, reasoning_content=thought)


def called(name:str, arguments:dict, thought:str='')->dict:
    call = dict(type='function', function=dict(name=name, arguments=arguments))
    return dict(role='assistant', content='', reasoning_content=thought, tool_calls=[call])


def told(result:dict)->dict:
    return dict(role='tool', content=json.dumps(result))

# ------------------------------------------------------------------------------------------

def sums(rng)->list:
    "A sum, a difference or a product of small numbers"
    a,b = rng.randint(0, 20),rng.randint(0, 20)
    op = rng.choice(['plus','minus','times'])
    if op=='times':
        a,b = rng.randint(0, 10),rng.randint(0, 10)
    if op=='minus':
        a,b = max(a, b),min(a, b)
    value = dict(plus=a+b, minus=a-b, times=a*b)[op]
    sign = dict(plus='+', minus='-', times='*')[op]
    spoken,written = f'{a} {op} {b}',f'{a} {sign} {b}'
    ask = rng.choice([
        f'What is {spoken}?',
        f'What is {written}?',
        f'How much is {spoken}?',
        f'{written} = ?'])
    answer = rng.choice([
        f'{spoken} is {value}.',
        f'The answer is {value}.',
        f'{written} = {value}'])
    return [user(ask), said(answer, f'I need {written}. That makes {value}.')]


def story_sum(rng)->list:
    "A sum in a sentence"
    name,food = rng.choice(NAMES),rng.choice(FOODS)
    a,b = rng.randint(2, 12),rng.randint(1, 9)
    if rng.random()<.5:
        ask = f'{name} has {a} {food}s and gets {b} more. How many {food}s does {name} have now?'
        thought = f'At first {a}, then {b} more. {a} + {b} = {a+b}.'
        return [user(ask), said(f'{name} has {a+b} {food}s.', thought)]
    a = max(a, b+1)
    ask = f'{name} has {a} {food}s and gives {b} away. How many {food}s are left?'
    thought = f'At first {a}, then {b} less. {a} - {b} = {a-b}.'
    return [user(ask), said(f'{a-b} {food}s are left.', thought)]


def counting(rng)->list:
    first = rng.randint(0, 30)
    last = first+rng.randint(2, 10)
    row = list(range(first, last+1))
    up = rng.random()<.7
    if not up:
        row = row[::-1]
    ask = rng.choice(['Count from {} to {}.', 'Please count from {} to {}.'])
    thought = f'I start at {row[0]} and go {"up" if up else "down"} to {row[-1]}.'
    answer = ', '.join(map(str, row))+'.'
    return [user(ask.format(row[0], row[-1])), said(answer, thought)]


def copying(rng)->list:
    words = COLOURS+ANIMALS+OBJECTS+FOODS+NAMES
    new = rng.choice([0, .5, 1])
    text = ' '.join([one_of(rng, words, new) for _ in range(rng.randint(1, 6))])
    ask = rng.choice(['Say', 'Repeat after me', 'Write these words again'])
    return [user(f'{ask}: {text}'), said(text, 'I only say the words again.')]


def turning(rng)->list:
    words = rng.sample(COLOURS+ANIMALS+OBJECTS+FOODS, rng.randint(2, 5))
    words = [one_of(rng, [w], .2) for w in words]
    ask = f'Say these words in the other order: {" ".join(words)}'
    thought = f'The last word is {words[-1]}, so it comes first.'
    return [user(ask), said(' '.join(words[::-1]), thought)]


def calendar(rng)->list:
    row,what = rng.choice([(DAYS,'day'), (MONTHS,'month')])
    i = rng.randrange(len(row))
    word,step = ('after',1) if rng.random()<.5 else ('before',-1)
    answer = row[(i+step)%len(row)]
    ask = f'Which {what} comes {word} {row[i]}?'
    thought = f'The {what} {word} {row[i]} is {answer}.'
    return [user(ask), said(f'{answer} comes {word} {row[i]}.', thought)]


def spelling(rng)->list:
    word = one_of(rng, ANIMALS+OBJECTS+FOODS+COLOURS)
    letters = '-'.join(word)
    if rng.random()<.5:
        return [user(f'Spell the word {word}.'), said(letters, f'The letters of {word}.')]
    n = len(word)
    answer = said(f'The word {word} has {n} letters.', f'{letters}: I count {n}.')
    return [user(f'How many letters has the word {word}?'), answer]


def facts(rng)->list:
    "Opposites, homes and sounds"
    table,ask,tell = rng.choice([
        (OPPOSITES, 'What is the opposite of {}?', 'The opposite of {} is {}.'),
        (HOMES, 'Where does a {} live?', 'A {} lives in a {}.'),
        (SOUNDS, 'What does a {} say?', 'A {} says {}.')])
    k,v = rng.choice(list(table.items()))
    if table is OPPOSITES and rng.random()<.5:
        k,v = v,k
    ask,tell = with_articles(ask.format(k)),with_articles(tell.format(k, v))
    return [user(ask), said(tell, f'I know this about {k}.')]


def with_articles(text:str)->str:
    "`An owl`, and no article before water"
    text = text.replace('A owl', 'An owl').replace('a owl', 'an owl')
    return text.replace('in a water', 'in water')


def numbers(rng)->list:
    i = rng.randrange(len(NUMBERS))
    word = NUMBERS[i]
    if rng.random()<.5:
        return [user(f'Write {i} as a word.'), said(word, f'{i} is {word}.')]
    return [user(f'Write {word} as a number.'), said(str(i), f'{word} is {i}.')]


def greeting(rng)->list:
    name,feeling = one_of(rng, NAMES),rng.choice(FEELINGS)
    ask,answer,thought = rng.choice([
        (f'Hello, my name is {name}.',
         f'Hello, {name}! How can I help you?',
         f'The name is {name}. I greet back.'),
        ('Hello!',
         'Hello! How can I help you?',
         'I greet back.'),
        ('Who are you?',
         'I am a tiny language model. I know simple words and small numbers.',
         'They ask about me.'),
        ('Thank you!',
         'You are welcome!',
         'A kind answer.'),
        (f'I am {feeling} today.',
         f'You are {feeling} today. Do you want to tell me why?',
         f'They feel {feeling}.')])
    return [user(ask), said(answer, thought)]


def remembering(rng)->list:
    "A question about something said before"
    name,thing,colour = one_of(rng, NAMES),one_of(rng, OBJECTS),rng.choice(COLOURS)
    told_me = f'{name} has {an(colour)} {thing}.'
    head = rng.choice([
        [user(f'My name is {name}.'), said(f'Hello, {name}!')],
        [user(told_me), said(f'That is a nice {thing}.')]])
    if head[0]['content']!=told_me:
        answer = said(f'Your name is {name}.', f'They told me: {name}.')
        return head+[user('What is my name?'), answer]
    return head+rng.choice([
        [user(f'What colour is the {thing}?'), said(f'The {thing} is {colour}.', told_me)],
        [user(f'Who has the {thing}?'), said(f'{name} has the {thing}.', told_me)]])

SIMPLE = [
    sums, story_sum, counting, copying, turning, calendar,
    spelling, facts, numbers, greeting, remembering]

# ------------------------------------------------------------------------------------------
# Tools. Some are always the same; others have names and parameters made up for one conversation.
# Each function gives the tool, what is asked, the arguments, the thought, what the tool answers,
# and what is said at the end.

def tool(name:str, about:str, /, **params)->dict:
    "Parameters are pairs of type and description"
    props = {k:dict(type=t) for k,(t,_) in params.items()}
    for k,(_,d) in params.items():
        if d:
            props[k]['description'] = d
    schema = dict(type='object', properties=props, required=list(params))
    return dict(type='function', function=dict(name=name, description=about, parameters=schema))


def weather(rng)->tuple:
    city,key = one_of(rng, CITIES),rng.choice(['city', 'city', 'location'])
    name = rng.choice(['get_weather', 'get_weather', 'get_current_weather', 'weather'])
    sky = rng.choice(['sunny','rainy','cloudy','windy','snowy'])
    degrees = rng.randint(-5, 32)
    ask = rng.choice([
        f'What is the weather in {city}?',
        f'How is the weather in {city} today?',
        f'Is it cold in {city}?',
        f'Do I need a coat in {city}?'])
    about = rng.choice(['The weather in a city', 'The weather', 'Get the weather in a city', ''])
    said_of = rng.choice(['Name of the city', ''])
    offered = tool(name, about, **{key:('string', said_of)})
    thought = f'They ask about the weather in {city}. I call {name}.'
    answer = f'In {city} it is {sky} and {degrees} degrees.'
    return offered,ask,{key:city},thought,dict(sky=sky, degrees=degrees),answer


def calculator(rng)->tuple:
    a,b = rng.randint(10, 999),rng.randint(10, 999)
    name,sign,value = rng.choice([
        ('add', '+', a+b),
        ('subtract', '-', a-b),
        ('multiply', '*', a*b)])
    word = dict(add='plus', subtract='minus', multiply='times')[name]
    offered = tool(name, f'{name} two numbers', a=('integer', ''), b=('integer', ''))
    ask = f'What is {a} {rng.choice([word, sign])} {b}?'
    thought = f'These numbers are large. I call {name} with {a} and {b}.'
    return offered,ask,dict(a=a, b=b),thought,dict(result=value),f'{a} {sign} {b} = {value}.'


def clock(rng)->tuple:
    city = one_of(rng, CITIES)
    hour,minute = rng.randint(0, 23),rng.randint(0, 59)
    ask = rng.choice([f'What time is it in {city}?', f'Tell me the time in {city}.'])
    now = f'{hour:02}:{minute:02}'
    thought = f'They want the time in {city}. I call get_time.'
    offered = tool('get_time', 'The time in a city', city=('string', ''))
    return offered,ask,dict(city=city),thought,dict(time=now),f'It is {now} in {city}.'


def timer(rng)->tuple:
    n,what = rng.randint(1, 60),one_of(rng, FOODS+['tea','nap','game'])
    label = ('string', 'What it is for')
    offered = tool('set_timer', 'Start a timer', minutes=('integer', ''), label=label)
    ask = f'Set a timer of {n} minutes for the {what}.'
    thought = f'{n} minutes, for the {what}. I call set_timer.'
    answer = f'The timer for the {what} runs {n} minutes.'
    return offered,ask,dict(minutes=n, label=what),thought,dict(ok=True),answer


def shop(rng)->tuple:
    n,thing = rng.randint(1, 20),one_of(rng, FOODS+OBJECTS)
    price = rng.randint(1, 50)
    things = f'{n} {thing}{"s" if n>1 else ""}'
    offered = tool('buy', 'Buy things', item=('string', ''), count=('integer', ''))
    thought = f'They want {n} of {thing}. I call buy.'
    answer = f'I bought {things} for {price} coins.'
    arguments = dict(item=thing, count=n)
    return offered,f'Please buy {things}.',arguments,thought,dict(price=price),answer


VERBS = '''find open send paint move clean lend fix show count wake feed get set close read write
search delete start stop call book check create list play turn'''.split()


def tool_name(verb:str, noun:str, rng)->str:
    return rng.choice([
        f'{verb}_{noun}',
        f'{verb}_{noun}',
        f'{verb}_{noun}_{one_of(rng, OBJECTS)}',
        verb+noun.capitalize(),
        noun])


def parameters(rng)->dict[str,tuple]:
    "One to three parameters by name: type, value, and how it is said"
    person,n = one_of(rng, NAMES),rng.randint(1, 10**rng.randint(1, 4))
    place,colour,day = rng.choice(PLACES),one_of(rng, COLOURS),rng.choice(DAYS)
    choices = dict(
        owner=('string', person, f'of {person}'),
        place=('string', place, f'in {place}'),
        colour=('string', colour, f'in {colour}'),
        number=('integer', n, f'with number {n}'),
        name=('string', person, f'called {person}'),
        day=('string', day, f'on {day}'))
    choices |= new_parameter(rng)
    keys = rng.sample(list(choices), rng.randint(1, 3))
    if 'name' in keys and 'owner' in keys:
        keys.remove('owner')
    return {k:choices[k] for k in keys}


def new_parameter(rng)->dict[str,tuple]:
    "One with a name made up for it"
    key,word,number = invented(rng),one_of(rng, OBJECTS),rng.randint(0, 200)
    return {key:rng.choice([
        ('string', word, f'with {key} {word}'),
        ('integer', number, f'with {key} {number}')])}


def wish(name:str, verb:str, noun:str, params:dict, rng)->tuple[str,str]:
    "How a tool is asked for, and what is said when it has done it"
    start = rng.choice(['Please '+verb, verb.capitalize()])
    ask = f'{start} the {noun} '+' '.join(said for *_,said in params.values())+'.'
    done = f'I did it: {ask[0].lower()+ask[1:]}'.replace('please ', '')
    if rng.random()>=.2:
        return ask,done
    values = ' and '.join(f'{k} {v}' for k,(_,v,_) in params.items())
    return f'Call {name} with {values}.',f'I called {name}.'


def made_up(rng)->tuple:
    "A tool that no other conversation has"
    verb,noun = one_of(rng, VERBS, .15),one_of(rng, OBJECTS+ANIMALS, .5)
    name,params = tool_name(verb, noun, rng),parameters(rng)
    ask,done = wish(name, verb, noun, params, rng)
    arguments = {k:value for k,(_,value,_) in params.items()}
    about = rng.choice([f'{verb} a {noun}', f'{verb} a {noun}', ''])
    offered = tool(name, about, **{k:(kind, '') for k,(kind,_,_) in params.items()})
    thought = f'I call {name} with '+' and '.join(map(str, arguments.values()))+'.'
    return offered,ask,arguments,thought,dict(ok=True),done

TOOLS = [weather, calculator, clock, timer, shop, made_up, made_up, made_up]


def offering(made:list[tuple], rng)->list[dict]:
    "The tools of `made`, the first for certain, in any order, each name once"
    own = made[0][0]
    by_name = {m[0]['function']['name']:m[0] for m in made}
    by_name[own['function']['name']] = own
    tools = [own]+[t for t in by_name.values() if t is not own]
    rng.shuffle(tools)
    return tools


def calling(rng)->tuple[list,list]: # Messages, tools
    "A tool call, mostly with its result and an answer; sometimes a question that needs no tool"
    made = [f(rng) for f in rng.sample(TOOLS, rng.randint(1, 3))]
    own,ask,arguments,thought,result,answer = made[0]
    tools = offering(made, rng)
    if rng.random()<.2:
        return rng.choice(SIMPLE[1:])(rng),tools
    messages = [user(ask), called(own['function']['name'], arguments, thought)]
    if rng.random()<.8:
        messages += [told(result), said(answer, 'The tool has answered.')]
    return messages,tools

SYSTEMS = [
    '', '', '',
    'You are a kind helper.',
    'You are a tiny helper. Answer in simple words.',
    'Be short.']


def conversation(rng:random.Random)->tuple[list,list|None]: # Messages, tools
    "One conversation"
    if rng.random()<.45:
        messages,tools = calling(rng)
    else:
        messages,tools = rng.choice(SIMPLE)(rng),None
    if tools is None and rng.random()<.15:
        messages = rng.choice(SIMPLE)(rng)+messages
    if rng.random()<.35:
        messages = [without_thought(m) for m in messages]
    system = rng.choice(SYSTEMS)
    return ([dict(role='system', content=system)] if system else [])+messages,tools


def without_thought(m:dict)->dict:
    return {k:v for k,v in m.items() if k!='reasoning_content'}


def thought_about(kind:str, prompt:str)->str:
    "A thought before a text that was asked for: what it is to be, and about what"
    if ' about ' in prompt:
        about = prompt.split(' about ')[-1].rstrip('.')
    else:
        about = prompt.split('.')[0].rstrip('?')
    return dict(
        story=f'A short story about {about}. I use simple words.',
        question='I answer in short sentences.',
        describe='Three short sentences.',
        list='Five short lines.',
        dialogue=f'Two people talk about {about}.')[kind]
