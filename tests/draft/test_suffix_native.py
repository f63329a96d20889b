"""Suffix drafts in C++ on random and hostile texts: every draft stood before, and chances are chances."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from sampling import slow

from pyspec.cpu import build
from pyspec.draft import suffix_native
from pyspec.draft.suffix_drafts import SuffixDrafts
from pyspec.draft.suffix_native import NativeTexts, compiled, fastest
from pyspec.draft.suffix_text import LATE, MOST_TEXT, PlainTexts
from pyspec.slots.table import Slot

N_VOCAB = 262_144

lib = compiled()
pytestmark = pytest.mark.skipif(isinstance(lib, str), reason=str(lib))


def native() -> NativeTexts:
    assert not isinstance(lib, str)
    return NativeTexts(lib)


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


# -- drafts ----------------------------------------------------------------------------------------------------------


def follows(texts: list[list[int]], last: list[int], token: int) -> bool:
    """The last tokens, and this one behind them, stand in one of the texts."""
    n = len(last)
    return any(
        text[i : i + n] == last and text[i + n] == token for text in texts for i in range(len(text) - n)
    )


def play(kind: str, n_slot: int, n_request: int, seed: int, **options: int) -> int:
    """Requests that join, pause, are cancelled, go on in the same slot and are judged at random. Every draft stood before in the text or in
    an answer that its client may see, behind the last two tokens at least. Returns the drafted tokens."""
    rng, drafts = random.Random(seed), SuffixDrafts(11, kind=native(), **options)
    source, slots, turns = TEXTS[kind](rng), {}, {}
    answers: dict[str, list[list[int]]] = {}
    n_drafted, cut, rolled = 0, set[int](), set[int]()
    while turns or n_request:
        while n_request and len(turns) < n_slot:
            n_request -= 1
            i = next(i for i in range(n_slot) if i not in turns)
            before = slots[i].tokens if i in slots and rng.random() < 0.4 else []
            prompt = [*before, *take(source, rng.choice((1, 5, 63, 65, 200)))]
            slots[i] = Slot(i, tokens=list(prompt))
            client = rng.choice(("ann", "bob", ""))
            drafts.begin(slots[i], tuple(prompt), client, keeps=True)
            turns[i] = rng.randint(5, 60)
            rolled.discard(i)
        asked = [i for i in turns if i in cut or rng.random() < 0.95]
        cut.clear()
        most = {i: rng.choice((1, 4, 11, 11, 30)) for i in asked}
        anchors = {i: next(source) for i in turns}
        wishes = [(slots[i], anchors[i], most[i]) for i in asked]
        for _ in range(rng.choice((1, 1, 2))):  # a round asks twice at times
            made = drafts.draft_all(wishes)
        found = dict(zip(asked, made, strict=True))
        for i, draft in found.items():
            n_drafted += len(draft.tokens)
            assert len(draft.tokens) == len(draft.chances) <= min(most[i], 11)
            assert all(0.0 < chance <= 0.99 for chance in draft.chances)
            assert list(draft.survival) == sorted(draft.survival, reverse=True)
            assert draft.expected == pytest.approx(sum(draft.survival))
            if draft.tokens and i not in rolled:
                text = [*slots[i].tokens, anchors[i]]
                seen = answers.get("" if options.get("shared") else drafts.texts[i].client, [])
                assert follows([text, *seen], text[-2:], draft.tokens[0])
        for i in list(turns):
            tokens = found[i].tokens if i in found else []
            came = [anchors[i]]
            if tokens and rng.random() < 0.5:  # it is verified
                n = rng.randint(1, len(tokens))
                n_right = rng.randint(0, n)
                drafts.judge(i, n, n_right)
                came += tokens[:n_right]
            slots[i].tokens = [*slots[i].tokens, *came]
            if rng.random() < 0.02:  # a pause: more comes than a draft enters
                slots[i].tokens += take(source, rng.choice((3, LATE, 3 * LATE)))
            elif rng.random() < 0.01:  # rolled back
                cut.add(i)
                rolled.add(i)  # tokens that were entered stay until the request is over
                del slots[i].tokens[max(drafts.texts[i].n_begin, len(slots[i].tokens) - 9) :]
            turns[i] -= 1
            if turns[i] <= 0 or rng.random() < 0.01:
                del turns[i]
                text = drafts.texts[i]
                if options.get("answer_bytes"):
                    whose = "" if options.get("shared") else text.client
                    answers.setdefault(whose, []).append(slots[i].tokens[text.n_begin :])
                drafts.end(slots[i])
        drafts.advance(rng.choice((0, 32, 256)))
    return n_drafted


@pytest.mark.parametrize("n_slot", [3, slow(1), slow(10)])
@pytest.mark.parametrize("kind", TEXTS)
def test_drafts_stood_before(kind: str, n_slot: int) -> None:
    n = play(kind, n_slot, 7 * n_slot, seed=n_slot, answer_bytes=1 << 26)
    assert n > 4 or kind == "all", "nothing was drafted, so nothing was compared"


@pytest.mark.slow
@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("seed", range(5))
def test_drafts_stood_before_without_answers_and_among_all_clients(kind: str, seed: int) -> None:
    play(kind, 5, 40, seed=100 + seed)
    play(kind, 5, 40, seed=200 + seed, answer_bytes=1 << 26, shared=True)


def test_a_round_of_many_texts_gives_each_what_it_gets_alone() -> None:
    """Before the first verdict, texts have learned nothing from one another."""
    rng = random.Random(4)
    texts = [take(words(rng), 300) for _ in range(8)]
    texts = [[*text, *text[:40]] for text in texts]

    def drafts_of(numbers: list[int]) -> list[list[int]]:
        drafts = SuffixDrafts(11, kind=native())
        slots = [Slot(i, tokens=texts[n][:-1]) for i, n in enumerate(numbers)]
        for slot in slots:
            drafts.begin(slot, slot.tokens)
        while drafts.advance(256):
            pass
        wishes = [(slot, texts[n][-1], 11) for slot, n in zip(slots, numbers, strict=True)]
        return [draft.tokens for draft in drafts.draft_all(wishes)]

    together = drafts_of([*range(8)])
    assert together == [drafts_of([n])[0] for n in range(8)]
    assert all(
        draft == texts[n][40 : 40 + len(draft)] and len(draft) > 3 for n, draft in enumerate(together)
    )


@pytest.mark.parametrize("kind", [native, PlainTexts])
def test_a_text_that_is_too_long_is_entered_no_further(kind: Callable[[], PlainTexts]) -> None:
    drafts, slot = SuffixDrafts(11, kind=kind()), Slot(0, tokens=[5] * (MOST_TEXT + 9))
    drafts.begin(slot, slot.tokens)
    while drafts.advance(1 << 16):
        pass
    assert drafts.draft(slot, 5, 4).tokens == []
    assert drafts.texts[0].n_entered == MOST_TEXT


def test_a_text_left_behind_is_entered_in_pieces_by_the_next_drafts() -> None:
    """As after a rest: no draft of the text until its end is entered."""
    drafts, slot = SuffixDrafts(11, kind=native()), Slot(0, tokens=[1, 2, 3])
    drafts.begin(slot, slot.tokens)
    drafts.draft(slot, 4, 5)
    slot.tokens = [1, 2, 3, 4, *range(10, 10 + 2 * LATE), 3, 4]
    n = []
    while not (found := drafts.draft(slot, 10, 5)).tokens:
        n.append(drafts.texts[0].n_entered)
    assert n == [4 + LATE, 4 + 2 * LATE] and found.tokens == [11, 12, 13, 14, 15][: len(found.tokens)]


def test_without_a_compiler_drafts_are_plain_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(source: str) -> None:
        raise build.CannotBuild("there is no C++ compiler (c++, g++ or clang++)")

    monkeypatch.setattr(suffix_native, "built_alone", none)
    suffix_native.compiled.cache_clear()
    try:
        assert isinstance(fastest(), PlainTexts) and isinstance(compiled(), str)
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
