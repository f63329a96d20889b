"""Text from committed tokens: the same for any grouping into rounds, nothing of a stop string, whole characters only."""

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_vocab import bpe, spm

from pyspec.text.stream import TextStream
from pyspec.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_metadata(
    bpe(words=["aab", "ba", "the", "\n\n"], control=["<|im_end|>", "<|mask|>"])
)
ALPHABET = [*b"ab\n \xf0\x9f\x99\x82\xc3\xa9\xff", *range(256, TOKENIZER.n_vocab)]
STOPS = st.lists(st.text("ab \n\u00e9\U0001f642te", min_size=1, max_size=4), max_size=4)


def run(pushes, stops, special=False):
    """(text, tokens used, stop string) of a stream fed with `pushes`."""
    stream, text, used = TextStream(TOKENIZER, stops, special=special), "", 0
    for ids in pushes:
        got = stream.push(ids)
        text, used = text + got.text, used + got.n_tokens_used
        if got.stopped:
            assert stream.push([97, 98]) == type(got)("", 0, "") and stream.flush() == ""
            return text, used, got.stopped
    return text + stream.flush(), used, ""


def expected(ids, stops, special):
    """By definition: the first prefix of the tokens whose text holds a stop string, and the earliest place in it."""
    decoder, text = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for n, token in enumerate(ids, 1):
        if special or token not in TOKENIZER.special:
            text += decoder.decode(TOKENIZER.token_bytes(token))
        if hits := [(text.find(s), -len(s), s) for s in stops if s in text]:
            return text[: min(hits)[0]], n, min(hits)[2]
    return TOKENIZER.decode(ids, special=special), len(ids), ""


@settings(max_examples=400, deadline=None)
@given(st.lists(st.lists(st.sampled_from(ALPHABET), max_size=7), max_size=7), STOPS, st.booleans())
def test_any_grouping_gives_the_text_the_stop_and_the_count_of_plain_decoding(pushes, stops, special):
    ids = [token for push in pushes for token in push]
    assert run(pushes, stops, special) == expected(ids, stops, special)
    assert run([[token] for token in ids], stops, special) == expected(ids, stops, special)


def test_a_character_split_over_tokens_comes_when_it_is_whole():
    stream = TextStream(TOKENIZER)
    assert [stream.push([b]).text for b in "\U0001f642".encode()] == ["", "", "", "\U0001f642"]


def test_a_stop_string_over_several_tokens_never_shows():
    stream = TextStream(TOKENIZER, ["aba"])
    shown = [stream.push([token]).text for token in b"xabx"]
    assert shown == ["x", "", "", "abx"]
    assert stream.push(list(b"yab")).text == "y" and stream.push(list(b"a")).stopped == "aba"


def test_a_stop_inside_a_run_of_accepted_tokens_drops_the_rest():
    got = TextStream(TOKENIZER, ["b"]).push(list(b"aabaa"))
    assert (got.text, got.n_tokens_used, got.stopped) == ("aa", 3, "b")


def test_of_several_stops_the_first_in_the_text_counts_and_of_those_the_longest():
    token = TOKENIZER.encode("the")
    assert len(token) == 1 and TextStream(TOKENIZER, ["e", "he"]).push(token).stopped == "he"
    assert TextStream(TOKENIZER, ["end", "en"]).push(TOKENIZER.encode("end")).stopped == "en"


@pytest.mark.parametrize(
    ("ids", "rest"), [(b"\xf0\x9f", "\ufffd"), (b"ab\xc3", "ab\ufffd"), (b"a", "a"), (b"x", "")]
)
def test_the_end_releases_the_held_text(ids, rest):
    stream = TextStream(TOKENIZER, ["abcd"])
    stream.push(list(ids))
    assert stream.flush() == rest and stream.flush() == ""


def test_sentencepiece_output_keeps_the_space_it_goes_on_with():
    tokenizer = Tokenizer.from_metadata(spm())
    ids = tokenizer.encode("hello", add_special=False)
    assert TextStream(tokenizer).push(ids).text == " hello" and tokenizer.decode(ids) == "hello"


def test_empty_stop_strings_stop_nothing():
    assert run([list(b"ab")], [""]) == ("ab", 2, "")


def test_control_tokens_that_are_to_be_shown_show() -> None:
    tokenizer = Tokenizer.from_metadata(bpe(control=["<|a|>", "<|b|>"], keys={"add_bos_token": False}))
    a, b = (tokenizer.encode(text)[0] for text in ("<|a|>", "<|b|>"))
    ids = [a, *tokenizer.encode("x", add_special=False), b]
    assert TextStream(tokenizer, shown=(a,)).push(ids).text == "<|a|>x"
    assert TextStream(tokenizer).push(ids).text == "x"
