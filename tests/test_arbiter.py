"""The arbiter under any stream of steps: it stays within its bounds, keeps nothing of who left,
spends little on probes, and ends at the K that pays."""
from functools import partial
from math import inf,nan
import pytest
from hypothesis import given,settings,strategies as st
from atlas.engine.arbiter import Arbiter,Tuning

T = Tuning()
BUCKETS = 11*8

# -- any stream ----------------------------------------------------------------------------------

ids = st.sets(st.integers(0, 9), max_size=8)
odd = st.sampled_from([0., -1., nan, inf])
times = st.one_of(st.none(), odd, st.floats(1e-4, 10.))
contexts = st.integers(0, 300_000)
dice = st.randoms(use_true_random=False)
steps = st.tuples(ids, contexts, times, dice)
several = st.tuples(steps, st.integers(1, 20))
streams = st.lists(several, max_size=25)

def step(arb, running, context, seconds, rnd, late=()):
    "One step of `running`, whose drafts are accepted at random; K, and all limits"
    k = arb.drafts(len(running), context)
    limits = [arb.limit(i) for i in sorted(running)]
    accepted = {}
    for i,limit in zip(sorted(running), limits):
        checked = rnd.randint(0, min(k, limit))
        accepted[i] = checked,rnd.randint(0, checked)
    for i in late:
        accepted[i] = (k,0)
    arb.note(k, accepted, seconds, context)
    return k,limits

def play(arb, stream, check=lambda *seen: None):
    "All steps of a stream; requests that are in one step and not in the next have left in between"
    seen,running = [],set()
    for (now,context,seconds,rnd),n in stream:
        gone = running-now
        for i in gone:
            arb.leave(i)
        running = now
        state = rnd.getstate()
        for j in range(n):
            # the step in the air still has rows of those that left
            late = gone if j==0 else ()
            seen.append(step(arb, running, context, seconds, rnd, late))
            check(arb, running, *seen[-1])
        rnd.setstate(state)
    return seen

def bounds(most, arb, running, k, limits):
    "What holds after every step"
    assert 0<=k<=most and 0<=arb.k<=most
    assert all(0<=n<=most for n in limits)
    assert set(arb.limits)<=set(running)
    assert len(arb.buckets)<=BUCKETS
    assert all(len(c)==most+1 for c in arb.buckets.values())
    counts(arb, arb.stats())

class Counting(Arbiter):
    "It also counts what else K changes if a peek goes on: back to 0 and up again, or further up"
    further = 0
    def looked(self, b, times, p):
        super().looked(b, times, p)
        if self.probe:
            self.further += 2 if p.hand<0 else self.probe.k!=p.k

def counts(arb, m):
    "What holds of the metrics"
    def total(name): return m[f'spec_decode_{name}_total']
    assert total('probe_steps')<=T.share*arb.steps+3*T.probe # Ahead; a peek; what it leads to
    moves = total('changes')-2*total('probes')-arb.further
    assert moves<=1+arb.steps/T.dwell
    assert total('num_accepted_tokens')<=total('num_draft_tokens')
    assert sum(total('num_accepted_tokens_per_pos').values())==total('num_accepted_tokens')
    assert all(0<=a<=1 for a in m['spec_decode_acceptance'].values())

@settings(deadline=None, max_examples=60)
@given(st.integers(0, 7), streams)
def test_whatever_happens(most, stream):
    "K and limits in bounds, memory and probes bounded, changes rare, nothing left of who left"
    play(Counting(most), stream, partial(bounds, most))

@settings(deadline=None, max_examples=30)
@given(st.integers(1, 7), streams)
def test_the_same_steps_lead_to_the_same_decisions(most, stream):
    first,again = Arbiter(most),Arbiter(most)
    assert play(first, stream)==play(again, stream)
    assert first.stats()==again.stats()

def test_nothing_is_left():
    arb = Arbiter(3)
    for n in range(1000):
        arb.drafts(1)
        arb.limit(f'r{n}')
        arb.note(3, {f'r{n}': (3,1)}, .01)
        arb.leave(f'r{n}')
        arb.note(3, {f'r{n}': (3,1)}, .01)
    arb.leave('never came')
    assert not arb.limits
    assert len(arb.buckets)==1

def test_times_that_are_none_teach_nothing():
    arb = Arbiter(1)
    for seconds in (None,0.,-1.,nan,inf):
        arb.note(1, dict(r=(1,1)), seconds)
    assert arb.known((0,0))=={}
    arb.note(1, dict(r=(1,1)), 2.)
    assert arb.known((0,0))=={1: 2.}

def test_the_first_step_after_a_change_is_not_timed():
    "It waited for the one before"
    arb = Arbiter(1)
    for k,seconds in zip((1,0,0,1), (2.,.1,1.,.1)):
        arb.note(k, dict(r=(k,0)), seconds)
    assert arb.known((0,0))=={0: 1., 1: 2.}

def test_the_first_step_after_a_raise_counts_for_no_acceptance():
    "It has the drafts that the step before made, of which there are fewer, or none"
    arb = Arbiter(2)
    arb.note(0, dict(r=(0,0)), 1.)
    rates = arb.acceptance.rates
    arb.note(2, dict(r=(0,0)), 3.)
    assert arb.acceptance.rates==rates
    arb.note(2, dict(r=(2,0)), 2.)
    assert arb.acceptance.rates!=rates

def test_what_a_change_takes_is_measured():
    arb = Arbiter(1)
    for k,seconds in ((1,2.),(0,9.),(0,1.),(1,2.5),(0,1.5),(1,2.5)):
        arb.note(k, dict(r=(k,0)), seconds)
    assert arb.toll.mean==.5

def test_contexts_of_all_lengths_are_few_buckets():
    arb = Arbiter(1)
    for seqs in (1,2,1000,10**9):
        for context in range(0, 2_000_000, 5_000):
            arb.drafts(seqs, context)
    assert len(arb.buckets)<=4*8

# -- where it ends -------------------------------------------------------------------------------

class Card:
    "Steps whose time is a line in K, one of them in the air"
    def __init__(
        self, most, seqs, price, ahead=0, timed=True, toll=1.,
        **tuning
    ):
        self.arb = Arbiter(most, **tuning)
        self.seqs,self.price = seqs,price
        self.ahead,self.timed = ahead,timed
        self.toll = toll # What a change of K takes
        self.air,self.last = [],most # `last` is how many drafts the step before has made
        self.seconds,self.tokens = 0.,0

    def run(self, n, right, wrong=None):
        "`n` steps of text with so many right drafts in a row, `wrong` has none; all of K then"
        seen = []
        for _ in range(n):
            seen.append(self.arb.drafts(self.seqs))
            self.air.append(seen[-1])
            if len(self.air)<=self.ahead:
                continue
            k = self.air.pop(0)
            self.land(k, right, wrong)
        return seen

    def limits(self):
        return [s.limit for s in self.arb.limits.values()]

    def land(self, k, right, wrong):
        accepted = {}
        for i in range(self.seqs):
            checked = min(k, self.last, self.arb.limit(f'r{i}'))
            accepted[f'r{i}'] = checked,min(checked, 0 if i==wrong else right)
        seconds = 1+self.price*k+self.toll*(k!=self.last)
        self.arb.note(k, accepted, seconds if self.timed else None)
        self.last = k
        self.seconds += seconds
        self.tokens += sum(1+n for _,n in accepted.values())

sizes = st.sampled_from([1,2,5,16])
most = st.integers(1, 7)
ahead = st.integers(0, 1)
cards = dict(most=most, seqs=sizes, ahead=ahead)
before = st.integers(0, 400)

@settings(deadline=None, max_examples=25)
@given(price=st.floats(0, .03), before=before, **cards)
def test_cheap_and_always_right_is_most(most, seqs, price, ahead, before):
    "Whatever the text was before"
    card = Card(most, seqs, price, ahead)
    card.run(before, 0)
    card.run(1500, most)
    assert card.arb.k==most
    assert min(card.limits())==most

@settings(deadline=None, max_examples=25)
@given(price=st.floats(.08, 1.5), before=before, **cards)
def test_never_right_is_none(most, seqs, price, ahead, before):
    card = Card(most, seqs, price, ahead)
    card.run(before, most)
    card.run(200, 0)
    seen = card.run(1200, 0)
    assert card.arb.k==0
    assert sum(k>0 for k in seen)<=len(seen)/16+8  # probes may take a sixteenth of all steps

@settings(deadline=None, max_examples=25)
@given(price=st.floats(0, 1.5), **cards)
def test_never_right_costs_little(most, seqs, price, ahead):
    "In the long run 93 % of plain decoding, where a draft costs up to half as much as a step"
    card = Card(most, seqs, price/most, ahead)
    card.run(3000, 0)
    assert card.tokens/seqs>=.93*card.seconds

changes = st.floats(0, 3)

@settings(deadline=None, max_examples=40)
@given(price=st.floats(.08, .8), toll=changes, **cards)
def test_peeks_cost_less_than_two_percent(most, seqs, price, toll, ahead):
    "Of the time, once it is known that no draft is ever right"
    card = Card(most, seqs, price, ahead, toll=toll)
    card.run(1000, 0)
    before = card.seconds
    peeks = card.arb.totals['probes']
    seen = card.run(4000, 0)
    assert set(seen)<={0,1}, 'nothing deeper than a peek'
    if price<.5:
        assert card.arb.totals['probes']>peeks+5, 'it goes on to look'
    assert card.seconds-before<1.02*4000

def noticed(toll, ahead, seqs, hard, price=.4):
    "Steps from where the text turns easy to the first with more drafts than a peek has"
    card = Card(3, seqs, price, ahead, toll=toll)
    card.run(hard, 0)
    assert card.arb.k==0
    for n in range(1000):
        if card.run(1, 3)[0]>1:
            return n

@pytest.mark.parametrize('ahead', [0,1])
@pytest.mark.parametrize('seqs', [1,4])
@pytest.mark.parametrize('toll,wait', [(0,64),(.3,96),(1,192)])
def test_easy_text_is_noticed(toll, wait, seqs, ahead):
    "On average within 64 steps where a change costs up to a third of a step, else within 96"
    waits = [noticed(toll, ahead, seqs, n)
        for n in range(800, 1000, 5)]
    assert max(waits)<=wait
    assert sum(waits)/len(waits)<=(64 if toll<1 else 96)

def test_a_fall_is_soon_looked_at_again():
    "After 16 steps, then 32, then 64"
    card = Card(3, 1, .4)
    seen = card.run(200, 0)
    peeks = [i
        for i in range(1, 200) if seen[i]==1 and seen[i-1]==0]
    assert [b-a for a,b in zip(peeks, peeks[1:])]==[34,66]
    assert peeks[0]-seen.index(0)<=26

def test_what_was_worth_it_for_a_moment_is_looked_at_later():
    "Falls that follow each other soon wait longer and longer: hysteresis"
    card,waits = Card(3, 1, .4),[]
    for _ in range(5):
        while card.arb.k:
            card.run(1, 0)
        waits.append(card.arb.peeks.wait)
        while not card.arb.k:
            card.run(1, 3)
    assert waits==[16,32,64,128,256]

def test_a_peek_that_is_lost_ends():
    "Its steps never land with drafts, as where everybody left: it is over after five others"
    card = Card(3, 1, .4)
    card.run(500, 0)
    arb = card.arb
    while not arb.probe:
        card.run(1, 0)
    for _ in range(6):
        arb.drafts(1)
        arb.note(0, dict(r0=(0,0)), 1.)
    assert arb.probe is None and arb.k==0

@pytest.mark.parametrize('most', [1,3,7])
def test_dear_drafts_are_not_even_probed(most):
    "Where a draft costs more than a step of its own, none can win, and it stops asking"
    card = Card(most, 64, 1.6)
    card.run(1000, most)
    assert card.arb.k==0
    probes = card.arb.totals['probes']
    card.run(1000, most)
    assert card.arb.totals['probes']==probes

@pytest.mark.parametrize('timed', [True,False])
def test_text_that_turns_is_noticed(timed):
    "Even if no step could be timed: then the guess about what a draft costs has to do"
    card,ks = Card(3, 1, .3, timed=timed),[]
    for right in (3,0,3,0):
        card.run(700, right)
        ks.append(card.arb.k)
    assert ks==[3,0,3,0]

LOADS = (1,.2),(64,1.2) # Sequences, and what a draft costs

def loaded(arb, seqs, price):
    "A step of `seqs`, of which each has two right drafts"
    k = arb.drafts(seqs)
    right = min(k, 2)
    accepted = {f'r{i}': (k,right) for i in range(seqs)}
    arb.note(k, accepted, seqs*(1+price*k))

def test_K_follows_the_load():
    "Drafts pay for one sequence, and not for 64: it remembers both"
    arb,ks = Arbiter(3),[]
    for load in LOADS*3:
        for _ in range(300):
            loaded(arb, *load)
        ks.append(arb.k)
    assert ks==[2,0]*3

def test_a_load_that_flickers_changes_little():
    "In two buckets by turns, one of which wants drafts and the other none"
    arb = Arbiter(3)
    for i in range(2000):
        load = LOADS[i//4%2]
        loaded(arb, *load)
    assert arb.totals['changes']<=40

def test_one_who_guesses_wrong_is_masked_alone():
    "Its limit falls, those of the others stay, and K as well; when it turns, the limit is lifted"
    card = Card(3, 4, .2)
    card.run(200, 3, wrong=0)
    assert card.arb.k==3
    assert card.limits()==[0,3,3,3]
    assert card.arb.stats()['spec_decode_limited_seqs']==1
    card.run(600, 3)
    assert card.limits()==[3,3,3,3]

def test_one_step_that_hangs_moves_nothing():
    "One step in twenty takes a hundred times as long"
    arb = Arbiter(2)
    for i in range(1000):
        k = arb.drafts(1)
        seconds = 1+.3*k
        if i%20==7:
            seconds *= 100
        arb.note(k, dict(r=(k,k)), seconds)
    assert arb.k==2
    base = arb.times((0,0))
    assert base[2]<1.7

def test_text_that_flickers_moves_no_sooner_than_it_may():
    "Acceptance forgotten at once, in text that turns every 25 steps"
    card = Card(3, 1, .3, memory=2)
    arb,moves = card.arb,[]
    for i in range(2000):
        before,probing = arb.k,arb.probe
        card.run(1, 3 if i//25%2 else 0)
        if arb.k!=before:
            moves.append((i,probing is not None))
    pairs = zip(moves, moves[1:])
    free = [b-a
        for (a,_),(b,probed) in pairs if not probed]
    assert free, 'it moved'
    assert min(free)>=T.dwell

def test_what_a_probe_found_is_not_masked():
    "The limits that fell in hard text are lifted with the probe"
    card = Card(3, 4, .2)
    card.run(200, 3, wrong=0)
    card.run(200, 0)
    assert card.arb.k==0
    assert card.arb.limits['r0'].limit==0
    while not card.arb.k:
        card.run(1, 3)
    assert card.arb.limits['r0'].limit==3
