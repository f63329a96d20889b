"""Drafts without a drafter: from earlier texts under the grammar, and from text that the grammar forces."""

from __future__ import annotations

import pytest
from grammar_rig import PERSON, constraint, ids, trie

from pyspec.constrain import phrases
from pyspec.constrain.phrases import Estimate, Offer, Phrasebook, Phrasebooks

TEXT = '{"name": "Ann", "age": 7}'


def read(book: Phrasebook, text: str = TEXT) -> None:
    """Another request's text, from start to end."""
    other = constraint("json_schema", PERSON)
    other.book = book
    other.commit(ids(text))


def test_a_second_text_gets_drafts_from_the_first() -> None:
    book, c = Phrasebook(), constraint("json_schema", PERSON)
    c.book = book
    assert not c.offer(8).tokens, "white space may come first: nothing is forced, and nothing is known"
    read(book)
    read(book)
    offer = c.offer(8)
    assert offer.tokens == ids(TEXT)[:8] and c.usable(offer.tokens) == offer.tokens
    assert offer.survival == sorted(offer.survival, reverse=True) and 0.1 < offer.survival[-1] < 1
    assert c.offer(3).tokens == ids(TEXT)[:3] and not c.offer(0).tokens
    assert c.read == [], "an offer is looked at, not read"


def test_earlier_text_is_no_draft_if_the_grammar_refuses_it() -> None:
    book, c = Phrasebook(), constraint("regex", "[ab]{9}")
    c.book = book
    for _ in range(3):
        for i, token in enumerate(ids("a")):
            book.learn(ids("a")[:i], token)
        book.learn(ids("a"), ids("}")[0])
    assert c.offer(4).tokens == ids("a")


def test_forced_text_is_offered_behind_drafts_that_were_cut() -> None:
    c = constraint("lark", 'start: ("yes" | "no") ", and that is all there is"')
    first = ids("no")
    offer = c.offer(5, first)
    assert offer.tokens and ", and that is all there is".startswith(
        trie().tokenizer.decode(offer.tokens)
    )
    assert c.usable([*first, *offer.tokens]) == [*first, *offer.tokens] and c.read == []
    assert not c.offer(5, [trie().table.eog[0]]).tokens
    assert c.commit([*first, *offer.tokens]) == len(first) + len(offer.tokens)


def test_offers_that_are_wrong_lose_their_weight_and_win_it_back() -> None:
    book = Phrasebook()
    before = Estimate().factor
    for n_right, less in ((0, True), (1, False)):
        for _ in range(200):
            offer = Offer()
            offer.add(5, 0.8, book.likely)
            offer.judge(1, n_right)
        offer = Offer()
        offer.add(5, 0.8, book.likely)
        assert (book.likely.factor < 0.1 * before) == less and 0 <= offer.chances[0] < 1
    assert offer.chances[0] > 0.9


def test_only_drafted_tokens_that_were_reached_are_judged() -> None:
    a, b, c = Estimate(), Estimate(), Estimate()
    offer = Offer()
    for each in (a, b, c):
        offer.add(1, 0.5, each)
    offer.judge(2, 0)
    assert a.factor < 1 and b.factor == c.factor == 1
    offer.judge(0, 0)
    assert b.factor == 1


def test_the_longest_past_that_was_seen_counts() -> None:
    book = Phrasebook()
    for text in ([1, 2, 3], [1, 2, 3], [9, 2, 4]):
        for i, token in enumerate(text):
            book.learn(text[:i], token)
    assert book.next([1, 2])[0] == 3 and book.next([9, 2])[0] == 4  # type: ignore[index]
    assert book.next([8, 2])[0] in (3, 4) and book.next([]) is not None and book.next([77]) is None  # type: ignore[index]


def test_a_book_forgets_unused_contexts_and_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phrases, "MOST_PLACES", 50)
    book = Phrasebook()
    for i in range(2000):
        book.learn([i], i + 1)
        book.learn([5000], i % 20)
        assert book.next([5000]) is not None
    assert len(book._young) + len(book._old) <= 100
    assert book.next([3]) is None
    assert book.next([1999]) is not None
    assert len(book._find((5000,)) or ()) <= phrases.MOST_NEXT


def test_clients_and_grammars_have_books_of_their_own() -> None:
    books = Phrasebooks()
    assert books.of("a", "g") is books.of("a", "g")
    assert books.of("a", "g") is not books.of("b", "g") and books.of("a", "g") is not books.of("a", "h")
    first = books.of("a", "g")
    for i in range(phrases.MOST_BOOKS):
        books.of("a", str(i))
    assert books.of("a", "g") is not first


def test_books_of_all_clients_together_are_not_larger_than_they_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(phrases, "MOST_ALL", 900)
    books, own = Phrasebooks(), 0
    for i in range(20):
        book = books.of(f"client {i}", "g")
        for token in range(90):
            book.learn((3 * i, token, token + 1), token)
        own = book.n_place
        assert books.of(f"client {i}", "g") is book, "the one that is asked for stays"
        assert books.n_place <= 900 + own
    assert 1 < len(books.books) < 20 and own > 90
