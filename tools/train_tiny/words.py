"""The small world that the model knows: lists that prompts and rules draw from"""
import random


def phrases(text:str)->list[str]:
    "Words and phrases between bars and ends of lines"
    return text.replace('\n', '|').split('|')


def pairs(text:str)->dict[str,str]:
    "`key:value` between blanks"
    return dict(p.split(':') for p in text.split())


GIRLS = '''Anna Lily Mia Ella Rosa Nora Emma Zoe Lucy Clara Ruby Maya Ida Eva Sara Grace Molly
Amy Hana Lena'''.split()
BOYS = '''Ben Tom Max Leo Sam Jack Finn Noah Adam Oscar Paul Luke Theo Hugo Ravi Omar Eli Karl
Dan Milo'''.split()
NAMES = GIRLS+BOYS
PEOPLE = phrases('''a farmer|a baker|a teacher|a sailor|a doctor|a gardener|a painter|a king
a queen|a little girl|a little boy|a grandmother|a grandfather|a singer|a shepherd
a fisherman|a cook|a librarian|a pilot|a postman|a builder|a nurse|a tailor|a clown
a bus driver''')
ANIMALS = '''dog cat fox bear rabbit mouse horse cow sheep pig goat duck hen owl frog turtle
bee ant whale fish lion tiger monkey elephant wolf squirrel hedgehog crow snail donkey'''.split()
PLACES = phrases('''the forest|the garden|the beach|the farm|the school|the kitchen|the park
the village|the river|the mountain|the library|the market|the house|the lake|the city
the train station|the old barn|the island|the castle|the meadow|the toy shop
the playground|the cave|the harbour|the bakery''')
OBJECTS = '''ball kite boat hat book key lamp cup bell drum box basket chair blanket shoe coat
clock map ring rope spoon bucket ladder mirror candle pencil umbrella bicycle swing
stone'''.split()
FOODS = '''apple pear bread cheese soup cake carrot egg honey rice milk berry potato plum nut
cookie tomato banana onion pie'''.split()
FEELINGS = '''happy sad angry afraid proud tired brave shy curious lonely kind surprised hungry
calm excited'''.split()
TOPICS = phrases('''the rain|the snow|the sun|the moon|the stars|the wind|a birthday|a lost toy
a new friend|a long walk|a warm meal|sharing|helping a friend|telling the truth
learning to swim|planting a tree|a rainy day|a picnic|going to bed
the first day of school|a broken window|a surprise|music|the colours|spring|summer
autumn|winter|the sea|a trip by train|washing hands|cooking soup|a big storm
a small mistake|being patient|a race|a secret|a picture|a letter|a garden party''')
COLOURS = 'red blue green yellow white black brown orange purple pink grey'.split()
CITIES = '''Paris London Rome Berlin Madrid Oslo Tokyo Cairo Lima Delhi Vienna Athens Dublin
Prague Warsaw Boston Lisbon Geneva Sydney Toronto'''.split()
DAYS = 'Monday Tuesday Wednesday Thursday Friday Saturday Sunday'.split()
MONTHS = '''January February March April May June July August September October November
December'''.split()
NUMBERS = '''zero one two three four five six seven eight nine ten eleven twelve thirteen
fourteen fifteen sixteen seventeen eighteen nineteen twenty'''.split()
OPPOSITES = pairs('''big:small hot:cold up:down day:night old:young wet:dry full:empty
fast:slow open:closed happy:sad long:short light:dark left:right early:late loud:quiet
soft:hard clean:dirty rich:poor strong:weak high:low near:far good:bad''')
HOMES = pairs('''fish:water bird:nest bee:hive dog:kennel cow:barn horse:stable rabbit:burrow
lion:savanna whale:sea fox:den owl:tree frog:pond''')
SOUNDS = pairs('''dog:woof cat:meow cow:moo sheep:baa duck:quack hen:cluck owl:hoot frog:croak
lion:roar bee:buzz pig:oink horse:neigh mouse:squeak''')


PLURALS = pairs('''mouse:mice goose:geese tomato:tomatoes potato:potatoes fish:fish sheep:sheep
wolf:wolves''')
UNCOUNTED = 'bread cheese soup honey rice milk'.split()


SYLLABLES = dict(
    begin='b d f g h j k l m n p r s t v w z br ch cl dr fl gr pl qu sh sk sl st th tr'.split(),
    middle='a e i o u a e i o u ai ea ee oa oo ou y'.split(),
    end='n r l s t m d k x p ck nd st ng'.split()+['']*14)


def invented(rng:random.Random)->str:
    "A word that nobody has seen before, of one to three syllables"
    n = rng.choice([1, 2, 2, 3])
    return ''.join(rng.choice(SYLLABLES[part]) for _ in range(n) for part in SYLLABLES)


def one_of(rng:random.Random, known:list[str], new:float=.35)->str:
    "A known word, or an invented one, with a capital if the known ones have it"
    word = rng.choice(known)
    if rng.random()>=new:
        return word
    return invented(rng).capitalize() if word[0].isupper() else invented(rng)


def an(word:str)->str:
    "`word` with its article, or with `some` if it has none"
    if word in UNCOUNTED:
        return 'some '+word
    return ('an ' if word[0] in 'aeiou' else 'a ')+word


def many(word:str)->str:
    "`word` in the plural"
    if word in PLURALS:
        return PLURALS[word]
    if word.endswith(('x','s','sh','ch')):
        return word+'es'
    return word[:-1]+'ies' if word.endswith('y') and word[-2] not in 'aeiou' else word+'s'


EXAMPLES = dict( # A question and its answer, which show the model how simple an answer is to be
    story=[
        ('Write a very short story in simple words about Nina and a red hat.',
         'Nina had a red hat. She loved her hat very much. One day the wind took the hat away. '
         'Nina ran after it, but the wind was too fast. The hat fell on a tree. Her brother Tim '
         'was tall. He got the hat and gave it to Nina. "Thank you, Tim," said Nina. She was '
         'happy again.'),
        ('Write a very short story with short sentences about a bear who is hungry.',
         'A little bear woke up in his cave. He was very hungry. He went to the river to look '
         'for fish, but there was no fish. Then he saw a bush with red berries. He ate and ate '
         'until his belly was round. "What a good day," said the bear, and he went back to '
         'sleep.'),
        ('Write a very short story for small children about Tim and the rain.',
         'Tim looked out of the window. It was raining. He wanted to play outside, so he was '
         'sad. His mother gave him his boots and an umbrella. Tim jumped into every puddle. '
         'Splash! Splash! He laughed and laughed. Now Tim likes the rain.'),
        ('Write a very short story with a happy end about an old man and a lost dog.',
         'An old man lived alone near the sea. One evening he found a small dog on the beach. '
         'The dog was cold and afraid. The old man took it home and gave it warm milk. The next '
         'day they walked along the water together. From that day on, the old man was never '
         'lonely.')],
    question=[
        ('What is a bridge? Answer in one or two short sentences.',
         'A bridge is a road over water. People walk or drive over it.'),
        ('What does a parrot eat? Answer in one or two short sentences.',
         'A parrot eats seeds, nuts and fruit.'),
        ('What should I do when I am bored? Answer in one or two short sentences.',
         'You can read a book or play outside with a friend.'),
        ('Why do we like holidays? Answer in one or two short sentences.',
         'On holidays we have time to rest and play. We see our family, too.')],
    describe=[
        ('Describe a tree in three short and simple sentences.',
         'A tree is tall and green. Birds build their nests in it. In autumn its leaves fall '
         'down.'),
        ('Describe a policeman in three short and simple sentences.',
         'A policeman wears a blue coat. He helps people on the street. He is strong and kind.')],
    list=[
        ('Write a list of five things in a room. One short line each.',
         '1. A soft bed\n'
         '2. A wooden table\n'
         '3. A small window\n'
         '4. A warm carpet\n'
         '5. A white door')],
    dialogue=[
        ('Write a short and simple dialogue between Nina and Tim about a ladybird.',
         'Nina: Look, Tim! A ladybird!\n'
         'Tim: Where is it?\n'
         'Nina: It sits on my hand. It is red.\n'
         'Tim: How many dots does it have?\n'
         'Nina: It has seven dots.\n'
         'Tim: Oh, now it flies away. Goodbye!'),
        ('Write a short and simple dialogue between Pia and Jon about lunch.',
         'Pia: I am hungry, Jon.\n'
         'Jon: Me too. What do we have for lunch?\n'
         'Pia: We have bread and soup.\n'
         'Jon: I like soup. Can I help you?\n'
         'Pia: Yes, please. Get two bowls.\n'
         'Jon: Here they are!')])

KINDS = dict(story=31, question=4, describe=8, list=1, dialogue=6)  # and how often
BEGINS = [
    'One day', 'Once upon a time', '{} was', '{} had',
    'There was once', 'It was', 'A little', 'In']
STYLES = ['in simple words', 'for small children', 'with short sentences', 'with a happy end']


def writing_prompt(kind:str, rng:random.Random)->tuple[str,str,int]:
    """One cell of the grid: a text of a kind, about things drawn at random

    Gives the prompt, how the answer begins, and the most tokens of it."""
    w = drawn(rng)
    return dict(
        story=ask_story,
        question=ask_question,
        describe=ask_description,
        list=ask_list,
        dialogue=ask_dialogue)[kind](w, rng.choice)


def drawn(rng:random.Random)->dict:
    "Somebody, something, somewhere"
    pick = rng.choice
    child = pick(NAMES)
    person = f'{pick(PEOPLE)} named {pick(NAMES)}'
    beast = f'{an(pick(ANIMALS))} named {pick(NAMES)}'
    w = dict(who=pick([child, person, beast]), thing=an(pick(OBJECTS+FOODS)))
    w |= dict(place=pick(PLACES), topic=pick(TOPICS))
    return w|dict(animal=pick(ANIMALS), feeling=pick(FEELINGS), name=pick(NAMES))


def ask_story(w:dict, pick)->tuple[str,str,int]:
    "For a story: prompt, how it begins, most tokens; so do all below"
    begin = pick(['', '', *BEGINS]).format(w['name'])
    who = w['who']
    about = pick([
        f'{who} and {w["thing"]}',
        f'{who} in {w["place"]}',
        f'{who} and {w["topic"]}',
        f'{who} who is {w["feeling"]}',
        f'{who} and {an(w["animal"])} who become friends'])
    return f'Write a very short story {pick(STYLES)} about {about}.',begin,160


def ask_question(w:dict, pick)->tuple[str,str,int]:
    "For a short answer"
    thing,animal,feeling = w['thing'],an(w['animal']),w['feeling']
    ask = pick([
        f'What is {thing}?',
        f'What does {animal} eat?',
        f'Where does {animal} live?',
        f'What can you do with {thing}?',
        f'What do people do in {w["place"]}?',
        f'Why do people feel {feeling}?',
        f'What should I do when I am {feeling}?',
        f'Why do we like {w["topic"]}?',
        f'What does {pick(PEOPLE)} do?',
        f'What colour is {an(pick(FOODS))}?',
        f'How do you take care of {animal}?',
        f'Tell me one fact about {many(w["animal"])}.'])
    return f'{ask} Answer in one or two short sentences.','',60


def ask_description(w:dict, pick)->tuple[str,str,int]:
    "For three sentences"
    what = pick([w['thing'], w['place'], an(w['animal']), pick(PEOPLE), w['topic']])
    return f'Describe {what} in three short and simple sentences.','',80


def ask_list(w:dict, pick)->tuple[str,str,int]:
    "For five lines"
    what = pick([
        f'things you see in {w["place"]}',
        'animals',
        'fruits',
        'toys',
        'colours',
        f'things to do when you are {w["feeling"]}',
        f'things that {pick(PEOPLE)} needs',
        'kind words'])
    return f'Write a list of five {what}. One short line each.','1.',60


def ask_dialogue(w:dict, pick)->tuple[str,str,int]:
    "For two who talk"
    name = w['name']
    other = pick([n for n in NAMES if n!=name])
    about = pick([w['topic'], w['thing']])
    ask = f'Write a short and simple dialogue between {name} and {other} about {about}.'
    return ask,f'{name}:',120
