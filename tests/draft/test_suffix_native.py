"""Suffix drafts in C++ beside those in Python: the same tokens and the same chances to the last bit, on real, random and hostile texts."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from sampling import slow

from pyspec.cpu import build
from pyspec.draft import suffix_native
from pyspec.draft.suffix_automaton import SuffixAutomaton
from pyspec.draft.suffix_drafts import SuffixDrafts
from pyspec.draft.suffix_native import NativeAutomaton, NativeTexts, compiled, fastest
from pyspec.draft.suffix_text import LATE, MOST_TEXT, PythonTexts
from pyspec.slots.table import Slot

N_VOCAB = 262_144

lib = compiled()
pytestmark = pytest.mark.skipif(isinstance(lib, str), reason=str(lib))


def native() -> NativeTexts:
    assert not isinstance(lib, str)
    return NativeTexts(lib)


def both(**options: int) -> tuple[SuffixDrafts, SuffixDrafts]:
    return SuffixDrafts(11, kind=PythonTexts(), **options), SuffixDrafts(11, kind=native(), **options)


# -- texts -----------------------------------------------------------------------------------------------------------


def by_chance(rng: random.Random, n_vocab: int) -> Iterator[int]:
    while True:
        yield rng.randrange(n_vocab)


def words(rng: random.Random) -> Iterator[int]:
    """Phrases that come back, of ids over the whole vocabulary, and tokens by chance between."""
    phrases = [rng.choices(range(N_VOCAB), k=rng.randint(2, 40)) for _ in range(12)]
    while True:
        yield from rng.choice(phrases)
        if rng.random() < 0.3:
            yield rng.randrange(N_VOCAB)


def loops(rng: random.Random) -> Iterator[int]:
    """One token again and again, then another, and pairs."""
    while True:
        token, other = rng.choices((0, 7, N_VOCAB - 1), k=2)
        yield from [token] * rng.randint(1, 90)
        yield from [token, other] * rng.randint(1, 30)


def copies(rng: random.Random) -> Iterator[int]:
    """One long text again, with a token changed here and there."""
    text = rng.choices(range(N_VOCAB), k=150)
    while True:
        for token in text:
            yield rng.randrange(N_VOCAB) if rng.random() < 0.01 else token


def forks(rng: random.Random) -> Iterator[int]:
    """Two tokens that hundreds of others follow, and sometimes the same ones: states with many followers are split."""
    while True:
        yield from (3, 1, 2)[rng.randint(0, 2) :]
        yield rng.randrange(600)


TEXTS = {
    "few": lambda rng: by_chance(rng, 3),
    "some": lambda rng: by_chance(rng, 15),
    "all": lambda rng: by_chance(rng, N_VOCAB),
    "words": words,
    "loops": loops,
    "copies": copies,
    "forks": forks,
}


def take(source: Iterator[int], n: int) -> list[int]:
    return [next(source) for _ in range(n)]


# -- the automaton ---------------------------------------------------------------------------------------------------


def numbers(automaton: NativeAutomaton, state: int) -> tuple[int, ...]:
    found = suffix_native.array("i", [0] * 4)
    automaton._lib.pyspec_suffix_state(automaton.handle, state, found.buffer_info()[0])
    return tuple(found)


def likeliest(automaton: NativeAutomaton, state: int) -> tuple[int, ...] | None:
    found = suffix_native.array("i", [0] * 4)
    there = automaton._lib.pyspec_suffix_likeliest(automaton.handle, state, found.buffer_info()[0])
    return tuple(found) if there else None


@pytest.mark.parametrize("kind", TEXTS)
def test_automata_have_the_same_states(kind: str) -> None:
    rng = random.Random(5)
    python, other = SuffixAutomaton(), native().automaton()
    assert isinstance(other, NativeAutomaton)
    for n in (1, 300, 1501):
        text = take(TEXTS[kind](rng), n)
        for automaton in (python, other):
            automaton.begin()
            automaton.extend(text)
    assert other._lib.pyspec_suffix_n_state(other.handle) == len(python.length)
    assert other.n_token == python.n_token == 1802
    states = [
        (python.length[i], python.link[i], python.places[i], python.at[i])
        for i in range(len(python.link))
    ]
    assert [numbers(other, i) for i in range(len(states))] == states
    assert [likeliest(other, i) for i in range(len(states))] == [
        python.likeliest(i) for i in range(len(states))
    ]
    place, at = suffix_native.array("i", [0, 0]), (0, 0)
    for token in take(TEXTS[kind](rng), 600):
        at = python.step(*at, token)
        other._lib.pyspec_suffix_step(other.handle, token, place.buffer_info()[0])
        assert tuple(place) == at
        assert other._lib.pyspec_suffix_next(other.handle, at[0], token) == python.next(at[0], token)


@pytest.mark.parametrize(
    "text", [[7] * 9000, list(range(9000)), [1, 2] * 4500, [i % 71 for i in range(9000)]]
)
def test_its_memory_is_linear_and_below_that_of_python(text: list[int]) -> None:
    python, other = SuffixAutomaton(), native().automaton()
    python.extend(text)
    other.extend(text)
    assert 32 * len(text) <= other.n_bytes <= min(1.5 * python.n_bytes, 120 * len(text))


# -- drafts ----------------------------------------------------------------------------------------------------------


def play(kind: str, n_slot: int, n_request: int, seed: int, **options: int) -> int:
    """Requests that join, pause, are cancelled, go on in the same slot and are judged at random. Returns the drafted tokens."""
    rng, drafts = random.Random(seed), both(**options)
    source, slots, turns = TEXTS[kind](rng), {}, {}
    n_drafted, cut = 0, set[int]()
    while turns or n_request:
        while n_request and len(turns) < n_slot:
            n_request -= 1
            i = next(i for i in range(n_slot) if i not in turns)
            before = slots[i].tokens if i in slots and rng.random() < 0.4 else []
            prompt = [*before, *take(source, rng.choice((1, 5, 63, 65, 200)))]
            slots[i] = Slot(i, tokens=list(prompt))
            client = rng.choice(("ann", "bob", ""))
            for each in drafts:
                each.begin(slots[i], tuple(prompt), client, keeps=rng.random() < 2)
            turns[i] = rng.randint(5, 60)
        asked = [i for i in turns if i in cut or rng.random() < 0.95]
        cut.clear()
        most = {i: rng.choice((1, 4, 11, 11, 30)) for i in asked}
        anchors = {i: next(source) for i in turns}
        wishes = [(slots[i], anchors[i], most[i]) for i in asked]
        for _ in range(rng.choice((1, 1, 2))):  # a round asks twice at times
            python, other = (each.draft_all(wishes) for each in drafts)
        for a, b in zip(python, other, strict=True):
            assert (a.tokens, a.chances, a.survival, a.expected) == (
                b.tokens,
                b.chances,
                b.survival,
                b.expected,
            )
            assert a.first(3).survival == b.first(3).survival
            n_drafted += len(a.tokens)
        found = dict(zip(asked, python, strict=True))
        for i in list(turns):
            tokens = found[i].tokens if i in found else []
            came = [anchors[i]]
            if tokens and rng.random() < 0.5:  # it is verified
                n = rng.randint(1, len(tokens))
                n_right = rng.randint(0, n)
                for each in drafts:
                    each.judge(i, n, n_right)
                came += tokens[:n_right]
            slots[i].tokens = [*slots[i].tokens, *came]
            if rng.random() < 0.02:  # a pause: more comes than a draft enters
                slots[i].tokens += take(source, rng.choice((3, LATE, 3 * LATE)))
            elif rng.random() < 0.01:  # rolled back
                cut.add(i)
                del slots[i].tokens[max(drafts[0].texts[i].n_begin, len(slots[i].tokens) - 9) :]
            turns[i] -= 1
            if turns[i] <= 0 or rng.random() < 0.01:
                del turns[i]
                for each in drafts:
                    each.end(slots[i])
        n = rng.choice((0, 32, 256))
        assert drafts[0].advance(n) == drafts[1].advance(n)
    for a, b in zip(drafts[0].learned[:2], drafts[1].learned[:2], strict=True):
        assert (a.came, a.seen) == (b.came, b.seen)
    promises = [each.learned.promise for each in drafts]
    assert promises[0].kept == promises[1].kept and promises[0].promised == promises[1].promised
    for i, text in drafts[0].texts.items():
        assert text.n_entered == drafts[1].texts[i].n_entered
    return n_drafted


@pytest.mark.parametrize("n_slot", [3, slow(1), slow(10)])
@pytest.mark.parametrize("kind", TEXTS)
def test_drafts_have_the_same_tokens_and_chances(kind: str, n_slot: int) -> None:
    n = play(kind, n_slot, 7 * n_slot, seed=n_slot, answer_bytes=1 << 26)
    assert n > 4 or kind == "all", "nothing was drafted, so nothing was compared"


@pytest.mark.slow
@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("seed", range(5))
def test_drafts_are_the_same_without_answers_and_among_all_clients(kind: str, seed: int) -> None:
    play(kind, 5, 40, seed=100 + seed)
    play(kind, 5, 40, seed=200 + seed, answer_bytes=1 << 26, shared=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TEXTS)
def test_drafts_of_a_hundred_thousand_tokens_are_the_same(kind: str) -> None:
    drafts, source = both(), TEXTS[kind](random.Random(9))
    prompt, answer = take(source, 100_000), take(source, 300)
    slots = [Slot(0, tokens=list(prompt)) for _ in drafts]
    for each, slot in zip(drafts, slots, strict=True):
        each.begin(slot, prompt)
        while each.advance(4096):
            pass
        assert each.texts[0].n_entered == 100_000
        assert each.n_bytes < 100_000 * 700
    for token in answer:
        a, b = (each.draft(slot, token, 11) for each, slot in zip(drafts, slots, strict=True))
        assert (a.tokens, a.survival) == (b.tokens, b.survival)
        for slot in slots:
            slot.tokens.append(token)


def test_a_text_that_is_too_long_is_entered_no_further() -> None:
    for each in both():
        slot = Slot(0, tokens=[5] * (MOST_TEXT + 9))
        each.begin(slot, slot.tokens)
        while each.advance(1 << 16):
            pass
        assert each.draft(slot, 5, 4).tokens == []
        assert each.texts[0].n_entered == MOST_TEXT


def test_a_text_left_behind_is_entered_in_pieces_by_the_next_drafts() -> None:
    """As after a rest: no draft of the text until its end is entered."""
    for each in both():
        slot = Slot(0, tokens=[1, 2, 3])
        each.begin(slot, slot.tokens)
        each.draft(slot, 4, 5)
        slot.tokens = [1, 2, 3, 4, *range(10, 10 + 2 * LATE), 3, 4]
        n = []
        while not (found := each.draft(slot, 10, 5)).tokens:
            n.append(each.texts[0].n_entered)
        assert (
            n == [4 + LATE, 4 + 2 * LATE] and found.tokens == [11, 12, 13, 14, 15][: len(found.tokens)]
        )


def test_without_a_compiler_drafts_are_made_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(source: str) -> None:
        raise build.CannotBuild("there is no C++ compiler (c++, g++ or clang++)")

    monkeypatch.setattr(suffix_native, "built_alone", none)
    suffix_native.compiled.cache_clear()
    try:
        assert isinstance(fastest(), PythonTexts) and isinstance(compiled(), str)
    finally:
        suffix_native.compiled.cache_clear()


def test_a_library_of_its_own_is_compiled_if_that_of_the_kernels_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    if build.compiler() is None:
        pytest.skip("no compiler")
    monkeypatch.setattr(build, "find", lambda isa: None)
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    path = build.built_alone("suffix")
    assert path.is_file() and "-suffix-" in path.name and path == build.built_alone("suffix")
    suffix_native.compiled.cache_clear()
    try:
        kind = fastest()
        assert isinstance(kind, NativeTexts)
        drafts = SuffixDrafts(5, kind=kind)
        slot = Slot(0, tokens=[1, 2, 3, 4, 1])
        drafts.begin(slot, slot.tokens)
        assert drafts.draft(slot, 2, 5).tokens[:1] == [3]
    finally:
        suffix_native.compiled.cache_clear()


def test_no_memory_ends_suffix_drafts_and_nothing_else() -> None:
    with pytest.raises(MemoryError):
        suffix_native._had(-1, -1)
    with pytest.raises(MemoryError):
        suffix_native._had(None)
