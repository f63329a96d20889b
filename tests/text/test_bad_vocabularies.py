"""Each flaw of a vocabulary is a one-line error with numbers, raised at load."""

import math
import random
import re
import time
import tracemalloc

import pytest
from text_vocab import bpe, spm

from pyspec.constrain.grammar import compile_text
from pyspec.constrain.trie import TokenTrie
from pyspec.errors import BadTokenizer, RequestError
from pyspec.request import Grammar
from pyspec.text.rust import border
from pyspec.text.tokenizer import Tokenizer
from pyspec.text.vocab import CONTROL, NORMAL, UNKNOWN, USER_DEFINED

KEY = "tokenizer.ggml."
GOOD = bpe(control=["<B>"])
TOKENS = GOOD[KEY + "tokens"]
assert isinstance(TOKENS, list)

BAD = {
    "pre": (GOOD | {KEY + "pre": "deepseek-v9"}, "pre-tokenizer 'deepseek-v9' is unknown; known: qwen2"),
    "pre in capitals": (GOOD | {KEY + "pre": "QWEN2"}, "pre-tokenizer 'QWEN2' is unknown"),
    "model": (GOOD | {KEY + "model": "bert"}, "model 'bert' is unknown; known: gpt2, llama"),
    "no model": ({}, "the metadata has no tokenizer.ggml.model"),
    "no tokens": ({k: v for k, v in GOOD.items() if k != KEY + "tokens"}, "the metadata has no tokenizer.ggml.tokens"),
    "empty": (GOOD | {KEY + "tokens": []}, "tokenizer.ggml.tokens is empty"),
    "tokens of numbers": (GOOD | {KEY + "tokens": [1, 2]}, "tokens is an array of 2 values; want an array of texts"),
    "duplicates": (GOOD | {KEY + "tokens": [*TOKENS[:-1], "a"]}, "tokens 97 and 256 of 257 are both 'a'"),
    "few types": (GOOD | {KEY + "token_type": [1] * 9}, "token_type has 9 entries; want 257"),
    "types of text": (GOOD | {KEY + "token_type": ["x"] * 257}, "token_type is an array of 257 texts; want an array of integers"),
    "no merges": (GOOD | {KEY + "merges": None}, "the metadata has no tokenizer.ggml.merges"),
    "byte token": (GOOD | {KEY + "token_type": [1] * 256 + [6]}, "byte token '<B>' is not of the form <0xNN>"),
    "few scores": (spm() | {KEY + "scores": [0.0] * 3}, "scores has 3 entries; want 299"),
    "a score of NaN": (spm() | {KEY + "scores": [math.nan] * 299}, "entry 0 of tokenizer.ggml.scores is nan"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_vocabulary_is_refused_with_its_numbers(name):
    meta, message = BAD[name]
    with pytest.raises(BadTokenizer, match=re.escape(message)) as e:
        Tokenizer.from_metadata(meta)
    assert "\n" not in str(e.value) and len(str(e.value)) < 500


def test_a_merge_of_pieces_that_are_no_tokens_is_left_out():
    merges = ["zz y", "a b", "a c", "ab", "", "\udcff"]
    tokenizer = Tokenizer.from_metadata(GOOD | {KEY + "merges": merges})
    assert tokenizer.encode("abac") == [97, 98, 97, 99]


@pytest.mark.parametrize("kind", [7, 99, -1, 0])
def test_a_token_of_an_unknown_type_has_no_text(kind):
    """As in llama.cpp. It was written as a normal one, or the file was refused."""
    tokenizer = Tokenizer.from_metadata(GOOD | {KEY + "token_type": [1] * 256 + [kind]})
    assert tokenizer.token_bytes(256) == b"" and tokenizer.decode([97, 256, 98]) == "ab"


def test_a_list_of_types_or_scores_may_be_longer_than_the_vocabulary_and_scores_may_be_missing():
    meta = spm()
    types, scores = (list(meta[KEY + k]) for k in ("token_type", "scores"))  # type: ignore[call-overload]
    plain = Tokenizer.from_metadata(meta)
    more = Tokenizer.from_metadata(
        meta | {KEY + "token_type": [*types, 1], KEY + "scores": [-math.inf, *scores[1:], 0.0]}
    )
    assert more.encode("a word") == plain.encode("a word")
    assert Tokenizer.from_metadata(meta | {KEY + "scores": None}).encode("a word")


def test_a_pre_tokenizer_counts_for_vocabularies_that_have_one():
    assert Tokenizer.from_metadata(spm() | {KEY + "pre": "x" * 100_000}).encode("a")


def test_a_token_as_long_as_a_book_is_refused_at_once():
    """A search for its joins would take time quadratic in its length."""
    meta = spm()
    tokens, types, scores = (list(meta[KEY + k]) for k in ("tokens", "token_type", "scores"))  # type: ignore[call-overload]
    meta |= {
        KEY + "tokens": [*tokens, "a" * 1_000_000],
        KEY + "token_type": [*types, 1],
        KEY + "scores": [*scores, 0.0],
    }
    began = time.process_time()
    with pytest.raises(BadTokenizer, match="SPM token 299 has 1000000 characters; at most 4096"):
        Tokenizer.from_metadata(meta)
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("a" * 1023, NORMAL),
        ("a" * 1024, NORMAL),
        ("a" * 3000, NORMAL),
        ("\u20ac" * 1024, CONTROL),
        ("<" * 1024, USER_DEFINED),
    ],
)
@pytest.mark.parametrize("ends", [False, True])
def test_a_token_that_is_too_long_for_grammars_is_never_their_choice(text, kind, ends):
    """llguidance limits tokens to 1,024 bytes, and panics beyond."""
    long = len(TOKENS)
    meta = GOOD | {
        KEY + "tokens": [*TOKENS, text],
        KEY + "token_type": [*GOOD[KEY + "token_type"], kind],
        KEY + "eos_token_id": long if ends else 256,
    }
    tokenizer = Tokenizer.from_metadata(meta)
    trie = TokenTrie(tokenizer, tokenizer.n_vocab)
    matcher = trie.matcher(compile_text(Grammar(kind="regex", source="a{2000,4000}")))
    ids = tokenizer.encode_inside("a" * 50)
    assert matcher.validate_tokens(ids) == 50
    assert matcher.validate_tokens([long]) == (len(text.encode()) < 1024 and kind == NORMAL and not ends)
    assert (
        trie.matcher(compile_text(Grammar(kind="regex", source="b?"))).validate_tokens(
            [long if ends else 256]
        )
        == 1
    )


class PanicException(BaseException):
    """Raised as by a Rust library."""


def test_a_panic_of_a_library_is_an_error_of_ours(monkeypatch):
    def panics(*args, **more):
        raise PanicException("assertion failed:\n  left == right")

    tokenizer = Tokenizer.from_metadata(GOOD | {KEY + "eos_token_id": 256})
    monkeypatch.setattr("pyspec.constrain.trie.LLTokenizer", panics)
    with pytest.raises(
        RequestError, match="the model's vocabulary can not be walked: assertion failed: left == right"
    ):
        TokenTrie(tokenizer, tokenizer.n_vocab).matcher("{}")
    monkeypatch.setattr("pyspec.text.tokenizer.models.BPE", panics)
    with pytest.raises(
        BadTokenizer, match="the vocabulary can not be used: assertion failed: left == right"
    ):
        Tokenizer.from_metadata(GOOD)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_exceptions_that_stop_the_program_pass_the_border(error):
    with pytest.raises(error), border(BadTokenizer, "x"):
        raise error


def with_tokens(meta, texts, kind):
    """An SPM vocabulary with more tokens, all of one type."""
    tokens, types, scores = (list(meta[KEY + k]) for k in ("tokens", "token_type", "scores"))
    return meta | {
        KEY + "tokens": [*tokens, *texts],
        KEY + "token_type": [*types, *(kind for _ in texts)],
        KEY + "scores": [*scores, *(0.0 for _ in texts)],
    }


@pytest.mark.slow
def test_a_vocabulary_of_nested_repeats_is_refused_before_it_fills_the_memory():
    """2,000 tokens "x", "xx", "xxx" and so on are 2 MB, and have 2 million joins of 2.7 GB."""
    meta = with_tokens(spm(), ["x" * n for n in range(2, 2000)], NORMAL)
    tracemalloc.start()
    try:
        with pytest.raises(
            BadTokenizer,
            match=r"too many long tokens that are joins of others: more than .* up to token",
        ):
            Tokenizer.from_metadata(meta)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


def test_a_few_hundred_nested_repeats_are_merged_as_ever():
    tokenizer = Tokenizer.from_metadata(with_tokens(spm(), ["q" * n for n in range(1, 200)], NORMAL))
    assert tokenizer.decode(tokenizer.encode("q" * 150)).strip() == "q" * 150


@pytest.mark.parametrize("kind", [UNKNOWN, CONTROL, USER_DEFINED])
def test_a_token_of_more_than_1024_characters_is_matched_in_no_text(kind):
    """Every chat searches for parts of those that are: with 100,000 characters they took 10 GB."""
    good = GOOD | {KEY + "tokens": [*TOKENS, "c" * 1024], KEY + "token_type": [1] * 257 + [kind]}
    assert Tokenizer.from_metadata(good).encode("c" * 1024) == [257]
    tracemalloc.start()
    try:
        long = Tokenizer.from_metadata(good | {KEY + "tokens": [*TOKENS, "c" * 100_000]})
        assert long.encode("ccc") == [99] * 3 and long.decode([257], special=True) == "c" * 100_000
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
    assert long.encode("c" * 1025) == [99] * 1025


def test_halves_of_control_tokens_are_found_without_a_list_of_them():
    """2,000 control tokens of 1,000 characters have parts of 2 GB."""
    many = [f"<|{i:05}{'x' * 990}|>" for i in range(2000)]
    tokenizer = Tokenizer.from_metadata(bpe(control=many))
    tracemalloc.start()
    try:
        assert tokenizer.borders_special("user text <|00017xx") and tokenizer.borders_special(
            "xxx|> and more"
        )
        assert not tokenizer.borders_special("user text <|99999xx") and not tokenizer.borders_special(
            "y x|>"
        )
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_halves_are_those_of_the_definition():
    control = ["<|a|>", "<|ab|>", "<|a", "ab", "<s>", "xyz"]
    tokenizer = Tokenizer.from_metadata(bpe(control=control))
    halves = {(t[:n], t[-n:]) for t in control for n in range(2, len(t))}
    heads, tails = {head for head, _ in halves}, {tail for _, tail in halves}
    alphabet = "<|a>sxyz b"
    for i in range(4000):
        rng = random.Random(i)
        text = "".join(rng.choice(alphabet) for _ in range(rng.randrange(7)))
        cut = text.strip()
        want = any(cut.endswith(head) for head in heads) or any(cut.startswith(tail) for tail in tails)
        assert tokenizer.borders_special(text) == want, text
