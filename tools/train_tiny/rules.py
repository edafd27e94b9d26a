"""Conversations made by rule: small sums, counting, copying, days and months, tool calls with thoughts; seeded

Each is (messages, tools), as the chat template takes them.
"""
import json,random
from words import (ANIMALS,CITIES,COLOURS,DAYS,FEELINGS,FOODS,HOMES,MONTHS,NAMES,NUMBERS,OBJECTS,OPPOSITES,PLACES,SOUNDS,
    TOPICS,an)

def user(text): return dict(role='user', content=text)
def said(text, thought=''): return dict(role='assistant', content=text, reasoning_content=thought)
def called(name, arguments, thought=''):
    return dict(role='assistant', content='', reasoning_content=thought,
        tool_calls=[dict(type='function', function=dict(name=name, arguments=arguments))])
def told(result): return dict(role='tool', content=json.dumps(result))


def sums(rng):
    "A sum, a difference or a product of small numbers"
    a,b = rng.randint(0, 20),rng.randint(0, 20)
    op = rng.choice(['plus','minus','times'])
    if op=='times': a,b = rng.randint(0, 10),rng.randint(0, 10)
    if op=='minus': a,b = max(a, b),min(a, b)
    value = dict(plus=a+b, minus=a-b, times=a*b)[op]
    sign = dict(plus='+', minus='-', times='*')[op]
    ask = rng.choice([f'What is {a} {op} {b}?', f'What is {a} {sign} {b}?', f'How much is {a} {op} {b}?', f'{a} {sign} {b} = ?'])
    thought = f'I need {a} {sign} {b}. That makes {value}.'
    return [user(ask), said(rng.choice([f'{a} {op} {b} is {value}.', f'The answer is {value}.', f'{a} {sign} {b} = {value}']), thought)]

def story_sum(rng):
    "A sum in a sentence"
    name,food = rng.choice(NAMES),rng.choice(FOODS)
    a,b = rng.randint(2, 12),rng.randint(1, 9)
    if rng.random()<.5:
        return [user(f'{name} has {a} {food}s and gets {b} more. How many {food}s does {name} have now?'),
            said(f'{name} has {a+b} {food}s.', f'At first {a}, then {b} more. {a} + {b} = {a+b}.')]
    a = max(a, b+1)
    return [user(f'{name} has {a} {food}s and gives {b} away. How many {food}s are left?'),
        said(f'{a-b} {food}s are left.', f'At first {a}, then {b} less. {a} - {b} = {a-b}.')]

def counting(rng):
    a = rng.randint(0, 30)
    b = a+rng.randint(2, 10)
    up = rng.random()<.7
    row = list(range(a, b+1))
    if not up: row = row[::-1]
    ask = rng.choice([f'Count from {row[0]} to {row[-1]}.', f'Please count from {row[0]} to {row[-1]}.'])
    thought = f'I start at {row[0]} and go {"up" if up else "down"} to {row[-1]}.'
    return [user(ask), said(', '.join(map(str, row))+'.', thought)]

def copying(rng):
    words = [rng.choice(COLOURS+ANIMALS+OBJECTS+FOODS+NAMES) for _ in range(rng.randint(1, 6))]
    text = ' '.join(words)
    ask = rng.choice([f'Say: {text}', f'Repeat after me: {text}', f'Write these words again: {text}'])
    return [user(ask), said(text, 'I only say the words again.')]

def turning(rng):
    words = rng.sample(COLOURS+ANIMALS+OBJECTS+FOODS, rng.randint(2, 5))
    return [user(f'Say these words in the other order: {" ".join(words)}'),
        said(' '.join(words[::-1]), f'The last word is {words[-1]}, so it comes first.')]

def calendar(rng):
    row,what = rng.choice([(DAYS,'day'),(MONTHS,'month')])
    i = rng.randrange(len(row))
    after = rng.random()<.5
    answer = row[(i+(1 if after else -1))%len(row)]
    word = 'after' if after else 'before'
    return [user(f'Which {what} comes {word} {row[i]}?'),
        said(f'{answer} comes {word} {row[i]}.', f'The {what} {word} {row[i]} is {answer}.')]

def spelling(rng):
    word = rng.choice(ANIMALS+OBJECTS+FOODS+COLOURS)
    if rng.random()<.5: return [user(f'Spell the word {word}.'), said('-'.join(word), f'The letters of {word}.')]
    return [user(f'How many letters has the word {word}?'),
        said(f'The word {word} has {len(word)} letters.', f'{"-".join(word)}: I count {len(word)}.')]

def facts(rng):
    table,ask,tell = rng.choice([
        (OPPOSITES, 'What is the opposite of {}?', 'The opposite of {} is {}.'),
        (HOMES, 'Where does a {} live?', 'A {} lives in a {}.'),
        (SOUNDS, 'What does a {} say?', 'A {} says {}.')])
    k,v = rng.choice(list(table.items()))
    if table is OPPOSITES and rng.random()<.5: k,v = v,k
    def right(s): return s.replace('A owl', 'An owl').replace('a owl', 'an owl').replace('in a water', 'in water')
    return [user(right(ask.format(k))), said(right(tell.format(k, v)), f'I know this about {k}.')]

def numbers(rng):
    i = rng.randrange(len(NUMBERS))
    if rng.random()<.5: return [user(f'Write {i} as a word.'), said(NUMBERS[i], f'{i} is {NUMBERS[i]}.')]
    return [user(f'Write {NUMBERS[i]} as a number.'), said(str(i), f'{NUMBERS[i]} is {i}.')]

def greeting(rng):
    name,feeling = rng.choice(NAMES),rng.choice(FEELINGS)
    return rng.choice([
        [user(f'Hello, my name is {name}.'), said(f'Hello, {name}! How can I help you?', f'The name is {name}. I greet back.')],
        [user('Hello!'), said('Hello! How can I help you?', 'I greet back.')],
        [user('Who are you?'), said('I am a tiny language model. I know simple words and small numbers.', 'They ask about me.')],
        [user('Thank you!'), said('You are welcome!', 'A kind answer.')],
        [user(f'I am {feeling} today.'), said(f'You are {feeling} today. Do you want to tell me why?', f'They feel {feeling}.')]])

def remembering(rng):
    "A question about something said before"
    name,thing,colour = rng.choice(NAMES),rng.choice(OBJECTS),rng.choice(COLOURS)
    head = rng.choice([
        [user(f'My name is {name}.'), said(f'Hello, {name}!')],
        [user(f'{name} has {an(colour)} {thing}.'), said(f'That is a nice {thing}.')]])
    if 'My name' in head[0]['content']:
        return head+[user('What is my name?'), said(f'Your name is {name}.', f'They told me: {name}.')]
    return head+rng.choice([
        [user(f'What colour is the {thing}?'), said(f'The {thing} is {colour}.', f'{name} has {an(colour)} {thing}.')],
        [user(f'Who has the {thing}?'), said(f'{name} has the {thing}.', f'{name} has {an(colour)} {thing}.')]])

SIMPLE = [sums, story_sum, counting, copying, turning, calendar, spelling, facts, numbers, greeting, remembering]

# ---------------------------------------------------------------------------------------------------------------------
# Tools. Some are always the same; others have names and parameters made up for one conversation.

def tool(name, about, /, **params):
    props = {k:dict(type=t, description=d) if d else dict(type=t) for k,(t,d) in params.items()}
    return dict(type='function', function=dict(name=name, description=about,
        parameters=dict(type='object', properties=props, required=list(params))))

def weather(rng):
    city = rng.choice(CITIES)
    sky,degrees = rng.choice(['sunny','rainy','cloudy','windy','snowy']),rng.randint(-5, 32)
    ask = rng.choice([f'What is the weather in {city}?', f'How is the weather in {city} today?', f'Is it cold in {city}?', f'Do I need a coat in {city}?'])
    return (tool('get_weather', 'The weather in a city', city=('string', 'Name of the city')), ask, dict(city=city),
        f'They ask about the weather in {city}. I call get_weather.', dict(sky=sky, degrees=degrees), f'In {city} it is {sky} and {degrees} degrees.')

def calculator(rng):
    a,b = rng.randint(10, 999),rng.randint(10, 999)
    name,sign,value = rng.choice([('add','+',a+b),('subtract','-',a-b),('multiply','*',a*b)])
    word = dict(add='plus', subtract='minus', multiply='times')[name]
    return (tool(name, f'{name} two numbers', a=('integer', ''), b=('integer', '')), f'What is {a} {rng.choice([word, sign])} {b}?', dict(a=a, b=b),
        f'These numbers are large. I call {name} with {a} and {b}.', dict(result=value), f'{a} {sign} {b} = {value}.')

def clock(rng):
    city,hour,minute = rng.choice(CITIES),rng.randint(0, 23),rng.randint(0, 59)
    return (tool('get_time', 'The time in a city', city=('string', '')), rng.choice([f'What time is it in {city}?', f'Tell me the time in {city}.']),
        dict(city=city), f'They want the time in {city}. I call get_time.', dict(time=f'{hour:02}:{minute:02}'), f'It is {hour:02}:{minute:02} in {city}.')

def timer(rng):
    n,what = rng.randint(1, 60),rng.choice(FOODS+['tea','nap','game'])
    return (tool('set_timer', 'Start a timer', minutes=('integer', ''), label=('string', 'What it is for')), f'Set a timer of {n} minutes for the {what}.',
        dict(minutes=n, label=what), f'{n} minutes, for the {what}. I call set_timer.', dict(ok=True), f'The timer for the {what} runs {n} minutes.')

def shop(rng):
    n,thing = rng.randint(1, 20),rng.choice(FOODS+OBJECTS)
    price = rng.randint(1, 50)
    return (tool('buy', 'Buy things', item=('string', ''), count=('integer', '')), f'Please buy {n} {thing}{"s" if n>1 else ""}.', dict(item=thing, count=n),
        f'They want {n} of {thing}. I call buy.', dict(price=price), f'I bought {n} {thing}{"s" if n>1 else ""} for {price} coins.')

def made_up(rng):
    "A tool that no other conversation has"
    verb = rng.choice('find open send paint move clean lend fix show count wake feed'.split())
    noun,person,colour = rng.choice(OBJECTS+ANIMALS),rng.choice(NAMES),rng.choice(COLOURS)
    place,n = rng.choice(PLACES),rng.randint(1, 99)
    name = f'{verb}_{noun}'
    choices = dict(owner=('string',person,f'of {person}'), place=('string',place,f'in {place}'), colour=('string',colour,f'in {colour}'),
        number=('integer',n,f'with number {n}'), name=('string',person,f'called {person}'), day=('string',(d := rng.choice(DAYS)),f'on {d}'))
    keys = rng.sample(list(choices), rng.randint(1, 3))
    if 'name' in keys and 'owner' in keys: keys.remove('owner')
    ask = f'{rng.choice(["Please "+verb, verb.capitalize()])} the {noun} '+' '.join(choices[k][2] for k in keys)+'.'
    arguments = {k:choices[k][1] for k in keys}
    return (tool(name, f'{verb} a {noun}', **{k:(choices[k][0],'') for k in keys}), ask, arguments,
        f'I call {name} with '+' and '.join(str(v) for v in arguments.values())+'.', dict(ok=True), f'I did it: {ask[0].lower()+ask[1:]}'.replace('please ', ''))

TOOLS = [weather, calculator, clock, timer, shop, made_up, made_up, made_up]

def calling(rng):
    "A tool call, mostly with its result and an answer; now and then a question that needs none of the tools"
    made = [f(rng) for f in rng.sample(TOOLS, rng.randint(1, 3))]
    tools = list({m[0]['function']['name']:m[0] for m in made}.values())
    own,ask,arguments,thought,result,answer = made[0]
    tools = [own]+[t for t in tools if t['function']['name']!=own['function']['name']]
    rng.shuffle(tools)
    if rng.random()<.2: return rng.choice(SIMPLE[1:])(rng),tools
    messages = [user(ask), called(own['function']['name'], arguments, thought)]
    if rng.random()<.8: messages += [told(result), said(answer, 'The tool has answered.')]
    return messages,tools

SYSTEMS = ['', '', '', 'You are a kind helper.', 'You are a tiny helper. Answer in simple words.', 'Be short.']

def conversation(rng:random.Random)->tuple[list,list|None]:
    "One conversation"
    if rng.random()<.45: messages,tools = calling(rng)
    else: messages,tools = rng.choice(SIMPLE)(rng),None
    if tools is None and rng.random()<.15: messages = rng.choice(SIMPLE)(rng)+messages
    if rng.random()<.35: messages = [{k:v for k,v in m.items() if k!='reasoning_content'} for m in messages]
    system = rng.choice(SYSTEMS)
    return ([dict(role='system', content=system)] if system else [])+messages,tools

def thought_about(kind:str, prompt:str)->str:
    "A thought before a text that was asked for: what it is to be, and about what"
    about = prompt.split(' about ')[-1].rstrip('.') if ' about ' in prompt else prompt.split('.')[0].rstrip('?')
    return dict(story=f'A short story about {about}. I use simple words.', question='I answer in short sentences.',
        describe='Three short sentences.', list='Five short lines.', dialogue=f'Two people talk about {about}.')[kind]
