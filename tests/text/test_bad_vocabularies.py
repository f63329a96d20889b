"""What a file can have wrong is one line with the numbers, at load."""

import re
import time

import pytest
from text_vocab import bpe, spm

from pyspec.errors import BadTokenizer
from pyspec.text.tokenizer import Tokenizer

KEY = "tokenizer.ggml."
GOOD = bpe(control=["<B>"])
TOKENS = GOOD[KEY + "tokens"]
assert isinstance(TOKENS, list)

BAD = {
    "pre": (GOOD | {KEY + "pre": "deepseek-v9"}, "pre-tokenizer 'deepseek-v9' is unknown; known: qwen2"),
    "no pre": (GOOD | {KEY + "pre": ""}, "pre-tokenizer '' is unknown"),
    "model": (GOOD | {KEY + "model": "bert"}, "model 'bert' is unknown; known: gpt2, llama"),
    "no model": ({}, "the metadata has no tokenizer.ggml.model"),
    "no tokens": ({k: v for k, v in GOOD.items() if k != KEY + "tokens"}, "the metadata has no tokenizer.ggml.tokens"),
    "empty": (GOOD | {KEY + "tokens": []}, "tokenizer.ggml.tokens is empty"),
    "tokens of numbers": (GOOD | {KEY + "tokens": [1, 2]}, "tokens is an array of 2 values; want an array of texts"),
    "duplicates": (GOOD | {KEY + "tokens": [*TOKENS[:-1], "a"]}, "tokens 97 and 256 of 257 are both 'a'"),
    "few types": (GOOD | {KEY + "token_type": [1] * 9}, "token_type has 9 entries; want 257"),
    "types of text": (
        GOOD | {KEY + "token_type": ["x"] * 257},
        "token_type is an array of 257 texts; want an array of integers",
    ),
    "type 7": (
        GOOD | {KEY + "token_type": [1] * 256 + [7]},
        "entry 256 of tokenizer.ggml.token_type is 7; want a whole number from 0 to 6",
    ),
    "no merges": (GOOD | {KEY + "merges": None}, "the metadata has no tokenizer.ggml.merges"),
    "half a merge": (GOOD | {KEY + "merges": ["ab"]}, "merge 'ab' has no two parts"),
    "byte token": (GOOD | {KEY + "token_type": [1] * 256 + [6]}, "byte token '<B>' is not of the form <0xNN>"),
    "few scores": (spm() | {KEY + "scores": [0.0] * 3}, "scores has 3 entries; want 299"),
    "no scores": (spm() | {KEY + "scores": None}, "the metadata has no tokenizer.ggml.scores"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_vocabulary_is_refused_with_its_numbers(name):
    meta, message = BAD[name]
    with pytest.raises(BadTokenizer, match=re.escape(message)) as e:
        Tokenizer.from_metadata(meta)
    assert "\n" not in str(e.value) and len(str(e.value)) < 500


def test_a_merge_of_pieces_that_are_no_tokens_is_left_out():
    tokenizer = Tokenizer.from_metadata(GOOD | {KEY + "merges": ["zz y", "a b", "a c"]})
    assert tokenizer.encode("abac") == [97, 98, 97, 99]


def test_a_token_as_long_as_a_book_is_refused_at_once():
    """Looking for its joins would take time quadratic in its length."""
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
