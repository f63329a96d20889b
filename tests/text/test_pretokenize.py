"""Splits of text before merges. The expected splits were derived by hand from each model's own pattern."""

import json
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

import pyspec
from pyspec.gguf import open_gguf
from pyspec.text.pretokenize import PRE
from pyspec.text.tokenizer import Tokenizer

QWEN = (
    "qwen2",
    "deepseek-r1-qwen",
    "megrez",
    "kormo",
    "stablelm2",
    "hunyuan",
    "solar-open",
    "grok-2",
    "qwen35",
)
LLAMA3 = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "falcon-h1",
    "lfm2",
    "pixtral",
    "midm-2.0",
    "jina-v5-nano",
)
SMAUG = ("smaug-bpe", "dbrx", "glm4", "chatglm-bpe")
LLAMA3 += SMAUG
DEEPSEEK = ("deepseek-v3", "joyai-llm", "hunyuan-dense", "hy_v4")
GPT2 = ("gpt-2", "mpt", "olmo", "phi-2", "exaone4", "jais", "trillion", "gigachat", "mellum")
DIGITS_GPT2 = (
    "starcoder",
    "command-r",
    "smollm",
    "refact",
    "codeshell",
    "exaone",
    "minerva-7b",
    "mellum2",
)
AYA = ("tiny_aya", "cohere2moe")
ALL = (*QWEN, *LLAMA3, *DEEPSEEK, *GPT2, *DIGITS_GPT2, "tekken")

CASES = [
    # digits: singly, in threes from the left, or all at once
    (QWEN, "a 12345", "a| |1|2|3|4|5"),
    (LLAMA3, "a 12345", "a| |123|45"),
    (DEEPSEEK, "a 12345", "a| |123|45"),
    (GPT2, "a 12345", "a| 12345"),
    (DIGITS_GPT2, "a 12345", "a| |1|2|3|4|5"),
    (("tekken",), "a 12345", "a| |1|2|3|4|5"),
    (AYA, "a 12345 1234567,12", "a| |12|345| |1|234|567|,|12"),
    (AYA, "x12345abc _1234_", "x|123|45|abc| _|123|4|_"),
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
]  # fmt: skip


@pytest.mark.parametrize(("names", "text", "pieces"), CASES)
def test_text_is_cut_as_the_pattern_says(names, text, pieces):
    for name in names:
        cut = pre_tokenizers.Sequence(PRE[name].cuts()).pre_tokenize_str(text)
        assert [piece for piece, _ in cut] == pieces.split("|"), name


VALUES = json.loads((Path(__file__).parent / "llama_cpp_pre.json").read_text(encoding="utf-8"))
BY_LLAMA_CPP = {name: group["ids"] for group in VALUES["groups"] for name in group["names"]}


@pytest.mark.parametrize("name", PRE)
def test_every_known_name_gives_llama_cpp_s_ids(name):
    with open_gguf(Path(pyspec.__file__).parent / "demo" / "pyspec-demo.gguf") as file:
        tokenizer = Tokenizer.from_metadata(dict(file.metadata) | {"tokenizer.ggml.pre": name})
    for text, ids in zip(VALUES["texts"], BY_LLAMA_CPP[name], strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, text


def test_the_texts_tell_the_patterns_apart():
    assert len(VALUES["groups"]) >= 4 and set(BY_LLAMA_CPP) == set(PRE)


def test_only_llama_and_mistral_take_whole_tokens_and_begin_with_bos():
    """llama.cpp takes whole tokens for glm4, too, and not for chatglm-bpe: tried with a token that no merges give."""
    whole = {name for name, pre in PRE.items() if pre.ignore_merges}
    begins = {name for name, pre in PRE.items() if pre.add_bos}
    assert begins == {*LLAMA3, "tekken"} - set(SMAUG) and whole == begins | {"minicpm5", "glm4", "glm5"}


@pytest.mark.parametrize("said", [None, ""])
def test_a_file_that_names_none_is_cut_as_the_default(said):
    with open_gguf(Path(pyspec.__file__).parent / "demo" / "pyspec-demo.gguf") as file:
        metadata = dict(file.metadata) | {"tokenizer.ggml.pre": said}
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.pre == "default" and not tokenizer.add_bos
    for text, ids in zip(VALUES["texts"], BY_LLAMA_CPP["default"], strict=True):
        assert tokenizer.encode(text, add_special=False) == ids
