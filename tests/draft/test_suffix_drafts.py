"""Drafts from the text itself and from finished answers."""

from __future__ import annotations

import random

import pytest

from pyspec.draft import suffix_drafts
from pyspec.draft.suffix_drafts import MOST_SHELVES, PER_ROUND, Answers, SuffixDrafts
from pyspec.draft.suffix_native import NativeTexts, compiled
from pyspec.draft.suffix_text import LATE, PlainTexts
from pyspec.slots.table import Slot

TEXT = random.Random(7).choices(range(1000), k=80)


@pytest.fixture(autouse=True, params=["Python", "C++"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PlainTexts:
    """Each test with both."""
    lib = compiled()
    if request.param == "C++" and isinstance(lib, str):
        pytest.skip(lib)
    kind = PlainTexts() if request.param == "Python" or isinstance(lib, str) else NativeTexts(lib)
    monkeypatch.setattr(suffix_drafts, "fastest", lambda: kind)
    return kind


def begin(
    drafts: SuffixDrafts, prompt: list[int], client: str = "", index: int = 0, *, keeps: bool = True
) -> Slot:
    """A request whose prompt is read: all of it but the last token, which is the anchor."""
    slot = Slot(index, tokens=list(prompt))
    drafts.begin(slot, prompt, client, keeps=keeps)
    while any(drafts._rest(text) > 0 for text in drafts.texts.values() if text.slot is not None):
        drafts.advance(256)
    return slot


def answer(drafts: SuffixDrafts, slot: Slot, tokens: list[int]) -> None:
    """The request gives this answer, ends, and the answer is entered."""
    for token in tokens:
        drafts.draft(slot, token, 8)
        slot.tokens.append(token)
    drafts.end(slot)
    while drafts.answers.queue:
        drafts.advance(256)


def test_it_continues_a_text_that_stands_in_the_prompt() -> None:
    drafts = SuffixDrafts(8)
    slot = begin(drafts, [*TEXT, 5000])
    slot.tokens += TEXT[:20]
    found = drafts.draft(slot, TEXT[20], 8)
    assert found.tokens == TEXT[21 : 21 + len(found.tokens)] and len(found.tokens) >= 4
    assert drafts.draft(slot, TEXT[20], 3).tokens == found.tokens[:3]
    assert drafts.draft(slot, TEXT[20], 0).tokens == []


def test_a_longer_match_promises_more() -> None:
    def promised(n: int) -> float:
        drafts = SuffixDrafts(8)
        slot = begin(drafts, [*TEXT, 5000, *TEXT[30 - n : 30]])
        return sum(drafts.draft(slot, TEXT[30], 8).survival)

    assert promised(1) < promised(4) < promised(12)
    assert 0 < promised(1) < 3


def test_a_text_by_chance_teaches_that_its_repeats_mean_nothing(kind: PlainTexts) -> None:
    """Of twelve tokens by chance every pair stands before: the promise of drafts falls to the share that comes, though none is verified."""
    rng, drafts = random.Random(3), SuffixDrafts(8)
    slot, promised = begin(drafts, [1, 2]), []
    for _ in range(1200):
        token = rng.randrange(12)
        promised.append(sum(drafts.draft(slot, token, 8).survival))
        slot.tokens.append(token)
    drafted = [each for each in promised if each]
    most = 0.22 if kind.name == "C++" else 0.4  # plain lookups know no chances of shares
    assert sum(drafted[:3]) / 3 > 0.3 and most > sum(drafted[-100:]) / 100


@pytest.mark.parametrize("n", [1, LATE, LATE + 1, 3 * PER_ROUND])
def test_a_prompt_is_entered_within_a_budget(n: int) -> None:
    drafts, prompt = SuffixDrafts(8), list(range(n))
    slot = Slot(0, tokens=prompt)
    drafts.begin(slot, prompt)
    for k in range(1, 20):
        drafts.advance(PER_ROUND)
        assert drafts.texts[0].n_entered == min(n, k * PER_ROUND)
    assert not drafts.advance(PER_ROUND)


def test_the_shortest_rest_is_entered_first() -> None:
    drafts = SuffixDrafts(8)
    drafts.begin(Slot(0), list(range(300)))
    drafts.begin(Slot(1), list(range(200)))
    assert drafts.advance(250)
    assert [drafts.texts[i].n_entered for i in (0, 1)] == [50, 200]


def test_nothing_is_drafted_from_a_prompt_that_is_not_entered() -> None:
    drafts, prompt = SuffixDrafts(8), TEXT * 40
    slot = Slot(0, tokens=prompt)
    drafts.begin(slot, prompt)
    assert drafts.draft(slot, TEXT[0], 8).tokens == []
    while drafts._rest(drafts.texts[0]) > 0:
        drafts.advance(256)
    assert drafts.draft(slot, TEXT[0], 8).tokens == TEXT[1:9]


def test_the_next_turn_of_a_chat_continues_its_text() -> None:
    drafts = SuffixDrafts(8)
    slot = begin(drafts, TEXT)
    answer(drafts, slot, [7, 8, 9])
    text = drafts.texts[0]
    begin(drafts, [*TEXT, 7, 8, 9, 10])
    assert drafts.texts[0] is text and text.n_entered == len(TEXT) + 4
    drafts.end(slot)
    begin(drafts, [*TEXT, 7, 8, 11])
    assert drafts.texts[0] is not text


# -- finished answers ------------------------------------------------------------------------------------------------


def test_a_finished_answer_serves_the_clients_next_request() -> None:
    drafts = SuffixDrafts(8, answer_bytes=1 << 20)
    answer(drafts, begin(drafts, [1, 2, 3], "ann"), TEXT)
    slot = begin(drafts, [4, 5, 6, *TEXT[:10]], "ann", index=1)
    found = drafts.draft(slot, TEXT[10], 8)
    assert found.tokens and found.tokens == TEXT[11 : 11 + len(found.tokens)]


@pytest.mark.parametrize("index", [0, 1])
def test_no_client_sees_anothers_answers_or_prompts(index: int) -> None:
    """In another slot, and in the same one behind it."""
    drafts = SuffixDrafts(8, answer_bytes=1 << 20)
    answer(drafts, begin(drafts, [1, 2, 3, *TEXT], "ann"), TEXT)
    slot = begin(drafts, [4, 5, 6, *TEXT[:10]], "bob", index=index)
    assert drafts.draft(slot, TEXT[10], 8).tokens == []


def test_clients_share_answers_only_if_they_are_allowed_to() -> None:
    drafts = SuffixDrafts(8, answer_bytes=1 << 20, shared=True)
    answer(drafts, begin(drafts, [1, 2, 3], "ann"), TEXT)
    slot = begin(drafts, [4, 5, 6, *TEXT[:10]], "bob", index=1)
    assert drafts.draft(slot, TEXT[10], 8).tokens


@pytest.mark.parametrize(("keeps", "n_bytes"), [(False, 1 << 20), (True, 0)])
def test_an_answer_that_may_not_be_kept_is_not(keeps: bool, n_bytes: int) -> None:
    drafts = SuffixDrafts(8, answer_bytes=n_bytes)
    answer(drafts, begin(drafts, [1, 2, 3], "ann", keeps=keeps), TEXT)
    assert not drafts.answers.shelves and not drafts.answers.queue


def test_old_answers_and_silent_clients_go(kind: PlainTexts) -> None:
    most, rng = 100_000, random.Random(5)
    answers = Answers(most, kind=kind)
    for i in range(300 if kind.name == "Python" else 1500):
        answers.add(f"client {i % 4}" if i < 200 else "last", rng.choices(range(500), k=100))
        while answers.queue:
            answers.read(64)
        assert answers.n_bytes <= 1.1 * most
    assert "last" in answers.shelves and answers.shelves["last"].old.n_token
    for i in range(2 * MOST_SHELVES):
        answers.add(str(i), [1, 2, 3, 4])
        answers.read(64)
    assert len(answers.shelves) <= MOST_SHELVES and str(2 * MOST_SHELVES - 1) in answers.shelves


def test_a_text_is_followed_across_an_eviction() -> None:
    """Automata that are gone are looked up no more."""
    drafts = SuffixDrafts(8, answer_bytes=40_000)
    answer(drafts, begin(drafts, [1, 2, 3], "ann"), TEXT)
    slot = begin(drafts, [4, 5, 6, *TEXT[:10]], "ann", index=1)
    assert drafts.draft(slot, TEXT[10], 8).tokens
    slot.tokens.append(TEXT[10])
    drafts.answers.add("ann", list(range(10_000, 10_600)))
    while drafts.answers.queue:
        drafts.advance(256)
    assert drafts.draft(slot, TEXT[11], 8).tokens == []
    slot.tokens += [TEXT[11], *range(10_580, 10_590)]
    assert drafts.draft(slot, 10_590, 8).tokens[:3] == [10_591, 10_592, 10_593]


def test_bytes_are_counted() -> None:
    drafts = SuffixDrafts(8, answer_bytes=1 << 20)
    answer(drafts, begin(drafts, TEXT, "ann"), TEXT)
    own = drafts.texts[0].n_bytes
    assert drafts.n_bytes == own + drafts.answers.n_bytes and own > 0 < drafts.answers.n_bytes
    drafts.forget_learned()
    assert drafts.n_bytes == 0
