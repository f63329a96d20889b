"""Where texts are cut. The expected cuts follow from reading each model's own pattern, by hand."""

import pytest
from tokenizers import pre_tokenizers

from pyspec.text.pretokenize import PRE

QWEN = ("qwen2", "deepseek-r1-qwen", "megrez", "qwen35")
LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral")
DEEPSEEK = ("deepseek-v3", "joyai-llm", "hunyuan-dense", "hy_v4")
GPT2 = ("gpt-2", "mpt", "olmo")
DIGITS_GPT2 = ("starcoder", "command-r", "smollm", "refact")
ALL = (*QWEN, *LLAMA3, *DEEPSEEK, *GPT2, *DIGITS_GPT2, "tekken")

CASES = [
    # digits: singly, in threes from the left, or all at once
    (QWEN, "a 12345", "a| |1|2|3|4|5"),
    (LLAMA3, "a 12345", "a| |123|45"),
    (DEEPSEEK, "a 12345", "a| |123|45"),
    (GPT2, "a 12345", "a| 12345"),
    (DIGITS_GPT2, "a 12345", "a| |1|2|3|4|5"),
    (("tekken",), "a 12345", "a| |1|2|3|4|5"),
    # contractions: in any case, in lower case, or not at all
    (QWEN + LLAMA3, "I'LL it's", "I|'LL| it|'s"),
    (GPT2 + DIGITS_GPT2, "I'LL it's", "I|'|LL| it|'s"),
    (QWEN + LLAMA3, "'llama", "'ll|ama"),
    (("tekken", *DEEPSEEK), "'llama", "'llama"),
    # a letter run takes one sign before it
    (QWEN + LLAMA3 + DEEPSEEK, "(foo)_bar", "(foo|)_|bar"),
    (GPT2, "(foo)_bar", "(|foo|)_|bar"),
    (("tekken",), "fooBar HTTPServer", "foo|Bar| HTTPServer"),
    (QWEN, "fooBar HTTPServer", "fooBar| HTTPServer"),
    # combining marks belong to letters only in the newer patterns
    (("qwen2", *LLAMA3), "\u0939\u093f\u0928\u094d\u0926\u0940", "\u0939|\u093f\u0928|\u094d\u0926|\u0940"),
    (("qwen35", "tekken", *DEEPSEEK), "\u0939\u093f\u0928\u094d\u0926\u0940", "\u0939\u093f\u0928\u094d\u0926\u0940"),
    (("qwen2", *LLAMA3), "e\u0301a", "e|\u0301a"),
    (("qwen35", "tekken", *DEEPSEEK), "e\u0301a", "e\u0301a"),
    # Han and kana apart from other letters
    (DEEPSEEK, "\ud55c\uad6d\u6f22\u5b57\u304b\u30ab x", "\ud55c\uad6d|\u6f22\u5b57\u304b\u30ab| x"),
    (QWEN + LLAMA3 + GPT2, "\ud55c\uad6d\u6f22\u5b57\u304b\u30ab x", "\ud55c\uad6d\u6f22\u5b57\u304b\u30ab| x"),
    # line ends after signs, and white space before the last line end or the next word
    (QWEN + LLAMA3 + DEEPSEEK, "end!\n\nx", "end|!\n\n|x"),
    (GPT2, "end!\n\nx", "end|!|\n|\n|x"),
    (("tekken",), "a!\n/b", "a|!\n/|b"),
    (QWEN, "a!\n/b", "a|!\n|/b"),
    (ALL, "a \n\n b", "a| \n\n| b"),
    (ALL, "a   b", "a|  | b"),
    (ALL, "a   ", "a|   "),
    (QWEN + LLAMA3, "a\r\n  b", "a|\r\n| | b"),
]


@pytest.mark.parametrize(("names", "text", "pieces"), CASES)
def test_text_is_cut_as_the_pattern_says(names, text, pieces):
    for name in names:
        cut = pre_tokenizers.Sequence(PRE[name].cuts()).pre_tokenize_str(text)
        assert [piece for piece, _ in cut] == pieces.split("|"), name


def test_every_known_name_is_cut_somewhere_above():
    assert set(ALL) == set(PRE)


def test_only_llama_and_mistral_take_whole_tokens_and_begin_with_bos():
    whole = {name for name, pre in PRE.items() if pre.ignore_merges}
    assert whole == {*LLAMA3, "tekken"} == {name for name, pre in PRE.items() if pre.add_bos}
