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
    "no model": ({}, "model 'None' is unknown"),
    "no tokens": ({k: v for k, v in GOOD.items() if k != KEY + "tokens"}, "no list of strings 'tokenizer.ggml.tokens'"),
    "tokens of numbers": (GOOD | {KEY + "tokens": [1, 2]}, "no list of strings 'tokenizer.ggml.tokens'"),
    "duplicates": (GOOD | {KEY + "tokens": [*TOKENS[:-1], "a"]}, "tokens 97 and 256 of 257 are both 'a'"),
    "few types": (GOOD | {KEY + "token_type": [1] * 9}, "9 token types for 257 tokens"),
    "types of text": (GOOD | {KEY + "token_type": ["x"] * 257}, "'tokenizer.ggml.token_type' is no list of numbers"),
    "type 7": (GOOD | {KEY + "token_type": [1] * 256 + [7]}, "token type 7 of token 256 is unknown; known: 0..6"),
    "no merges": (GOOD | {KEY + "merges": None}, "no list of strings 'tokenizer.ggml.merges'"),
    "half a merge": (GOOD | {KEY + "merges": ["ab"]}, "merge 'ab' has no two parts"),
    "byte token": (GOOD | {KEY + "token_type": [1] * 256 + [6]}, "byte token '<B>' is not of the form <0xNN>"),
    "few scores": (spm() | {KEY + "scores": [0.0] * 3}, "3 scores for 299 tokens"),
    "no scores": (spm() | {KEY + "scores": None}, "needs a score for each of its 299 tokens"),
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
