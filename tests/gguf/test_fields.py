"""Each metadata field is read with its type and range, or is a one-line error that names it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from pyspec.errors import BadGGUF, BadTokenizer, ModelError
from pyspec.gguf.fields import GENERAL, HPARAMS, TITLE_CHARS, Fields, encodable
from pyspec.ranges import OneOf, Real, Whole

HUGE = 2**64 - 1


def h(**values: object) -> Fields:
    """Fields of a llama file; `__` stands for a dot."""
    return Fields({f"llama.{k.replace('__', '.')}": v for k, v in values.items()}, "f.gguf: ", "llama.")


Read = Callable[[Fields], object]
LIES: dict[str, tuple[Fields, Read, str]] = {
    "integer: zero": (h(block_count=0), lambda f: f.integer("block_count"), r"block_count is 0; want a whole number from 1"),
    "integer: negative": (h(context_length=-5), lambda f: f.integer("context_length"), "context_length is -5"),
    "integer: huge": (h(block_size=2**32), lambda f: f.integer("block_size"), "block_size is 4294967296; .* to 256"),
    "integer: a float": (h(block_count=2.0), lambda f: f.integer("block_count"), "block_count is 2.0; want a whole"),
    "integer: NaN": (h(block_count=math.nan), lambda f: f.integer("block_count", 3), "block_count is nan"),
    "integer: a bool": (h(block_count=True), lambda f: f.integer("block_count"), "block_count is True"),
    "integer: text": (h(block_count="2"), lambda f: f.integer("block_count"), "block_count is '2'"),
    "integer: an array": (h(block_count=np.array([3, 3, 4], "<i4")), lambda f: f.integer("block_count"), "is an array of 3 int32"),
    "integer: an empty array": (h(block_count=np.ones(0, "<i4")), lambda f: f.integer("block_count", 1), "is an array of 0 int32"),
    "integer: equal bools": (h(block_count=np.ones(3, bool)), lambda f: f.integer("block_count"), "block_count is True"),
    "number: an array of NaN": (h(rope__freq_base=np.full(3, math.nan, "<f4")), lambda f: f.number("rope.freq_base"), "is an array of 3 float32"),
    "integer: absent": (h(), lambda f: f.integer("block_count"), "the metadata has no llama.block_count"),
    "number: NaN": (h(rope__freq_base=math.nan), lambda f: f.number("rope.freq_base"), "freq_base is nan; want a number"),
    "number: infinite": (h(rope__freq_base=math.inf), lambda f: f.number("rope.freq_base"), "freq_base is inf"),
    "number: negative": (h(attention__scale=-1.0), lambda f: f.number("attention.scale", 0.0), "scale is -1.0"),
    "number: too large": (h(attention__layer_norm_epsilon=2), lambda f: f.number("attention.layer_norm_epsilon"), "is 2"),
    "number: texts": (h(rope__freq_base=["x"]), lambda f: f.number("rope.freq_base"), "is an array of 1 texts"),
    "flag: 2": (h(attention__causal=2), lambda f: f.flag("attention.causal", True), "causal is 2"),
    "flag: text": (h(attention__causal="false"), lambda f: f.flag("attention.causal", True), "causal is 'false'"),
    "text: a number": (h(rope__scaling__type=1), lambda f: f.text("rope.scaling.type"), "type is 1; want text"),
    "text: long": (h(rope__scaling__type="x" * 99), lambda f: f.text("rope.scaling.type"), "has 99 characters; want at most 64"),
    "integers: NaN": (h(target_layers=np.array([1, math.nan], "<f4")), lambda f: f.integers("target_layers"), "2 float32"),
    "integers: one out of range": (
        h(target_layers=np.array([1, -7], "<i8")),
        lambda f: f.integers("target_layers"),
        r"entry 1 of llama\.target_layers is -7; want a whole number from 0",
    ),
    "integers: unsigned": (h(target_layers=np.array([1, HUGE], "<u8")), lambda f: f.integers("target_layers"), f"is {HUGE}"),
    "integers: a scalar": (h(target_layers=3), lambda f: f.integers("target_layers"), "target_layers is 3; want an array"),
    "each: too few": (h(expert_count=np.ones(3, "<i4")), lambda f: f.each("expert_count", 4), "has 3 entries; .* 4 blocks"),
    "flags: too many": (
        h(attention__sliding_window_pattern=np.ones(3, bool)),
        lambda f: f.flags("attention.sliding_window_pattern", 2),
        "has 3 entries; want 2",
    ),
    "flags: 2": (
        h(attention__recurrent_layers=np.array([1, 2], "<i4")),
        lambda f: f.flags("attention.recurrent_layers", 2),
        r"entry 1 of llama\.attention\.recurrent_layers is 2; want true or false",
    ),
    "own integer: outside its range": (
        h(own__depth=9),
        lambda f: f.integer("own.depth", legal=Whole(1, 8)),
        "own.depth is 9; want a whole number from 1 to 8",
    ),
    "own integer: a float": (h(own__depth=2.0), lambda f: f.integer("own.depth", 1, legal=Whole(1, 8)), "is 2.0; want"),
    "own integer: absent": (h(), lambda f: f.integer("own.depth", legal=Whole(1, 8)), "has no llama.own.depth"),
    "own number: NaN": (h(own__decay=math.nan), lambda f: f.number("own.decay", legal=Real(0, 1)), "own.decay is nan"),
    "own text: long": (h(own__kind="x" * 9), lambda f: f.text("own.kind", max_chars=8), "has 9 characters; want at most 8"),
    "own label: a number": (h(own__kind=1), lambda f: f.label("own.kind", "", max_chars=8), "own.kind is 1; want text"),
    "own integers: another count": (
        h(own__orders=np.ones(3, "<i4")),
        lambda f: f.integers("own.orders", 2, legal=Whole(1, 8)),
        "own.orders has 3 entries; want 2",
    ),
    "own each: one outside": (
        h(own__orders=np.array([1, 9], "<i4")),
        lambda f: f.each("own.orders", 2, legal=Whole(1, 8)),
        "entry 1 of llama.own.orders is 9",
    ),
    "own numbers: NaN": (
        h(own__gains=np.array([0, math.nan], "<f4")),
        lambda f: f.numbers("own.gains", 2, legal=Real(0, 1)),
        "entry 1 of llama.own.gains is nan",
    ),
    "own flags: 2": (h(own__on=np.array([2], "<i4")), lambda f: f.flags("own.on", 1), "entry 0 of llama.own.on is 2"),
    "flags: floats": (
        h(attention__recurrent_layers=np.array([1, math.nan], "<f4")),
        lambda f: f.flags("attention.recurrent_layers", 2),
        "an array of 2 float32; want an array of bools",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_field_of_the_wrong_type_or_outside_its_range_is_one_line_that_names_it(name: str) -> None:
    fields, read, says = LIES[name]
    with pytest.raises(BadGGUF, match=says) as e:
        read(fields)
    line = str(e.value)
    assert line.startswith("f.gguf: ") and "llama." in line and line.isprintable() and len(line) < 200


def test_legal_fields_are_returned_and_absent_ones_get_the_readers_default() -> None:
    some = np.array([0, 2, 2], "<u4")
    f = h(
        block_count=3,
        rope__freq_base=10_000,
        attention__causal=1,
        expert_count=some,
        attention__recurrent_layers=some > 0,
    )
    assert (f.integer("block_count"), f.integer("nextn_predict_layers", 0)) == (3, 0)
    base = f.number("rope.freq_base")
    assert (base, type(base), f.number("attention.scale", None)) == (10_000.0, float, None)
    assert f.flag("attention.causal", False) is True and f.flag("expert_weights_norm", False) is False
    assert f.each("block_count", 2) == [3, 3] and f.each("expert_count", 2) == [0, 2]
    assert f.one_or_more("expert_count") == [0, 2, 2] and f.integers("expert_count", 3) == [0, 2, 2]
    assert f.flags("attention.recurrent_layers", 2, or_more=True) == [False, True]
    assert "expert_count" in f and "rope.scaling.type" not in f


def test_an_array_of_equal_entries_is_one_value_of_an_architecture_and_of_nothing_else() -> None:
    """Some writers repeat a number for each block, as llama.cpp reads head counts, widths and numbers of experts."""
    f = h(
        attention__head_count_kv=np.full(9, 4, "<u4"),
        rope__freq_base=np.full(9, 1e4, "<f4"),
        attention__causal=np.zeros(9, bool),
    )
    assert (f.integer("attention.head_count_kv"), f.number("rope.freq_base")) == (4, 1e4)
    assert f.flag("attention.causal", True) is False and f.integers(
        "attention.causal", 9, legal=Whole(0, 1)
    )
    with pytest.raises(BadGGUF, match=r"general\.alignment is an array of 2 uint32"):
        Fields({"general.alignment": np.full(2, 32, "<u4")}).integer("general.alignment")


def test_entries_beyond_those_that_are_wanted_may_be_left_out() -> None:
    f = h(target_layers=np.array([1, 2, 3]), own__gains=np.array([0.5, 2.0]))
    assert f.integers("target_layers", 2, or_more=True) == [1, 2]
    assert f.numbers("own.gains", 1, or_more=True, legal=Real(0, 1)) == [0.5]
    with pytest.raises(BadGGUF, match="target_layers has 3 entries; want 4"):
        f.integers("target_layers", 4, or_more=True)


def test_a_title_never_refuses_a_file() -> None:
    titles = {"a": "x" * 100_000, "b": ["x", "y"], "c": 7, "d": "\udcff", "e": " Gemma \n"}
    f = Fields({f"general.{k}": v for k, v in titles.items()})
    told = [f.title(f"general.{k}") for k in "abcdef"]
    assert told == ["x" * (TITLE_CHARS - 3) + "...", "", "", "\ufffd", "Gemma \ufffd", ""]


def test_fields_that_pyspec_does_not_know_are_read_with_a_range_of_the_readers() -> None:
    f = h(
        own__depth=3, own__decay=1, own__kind="a\udcff", own__orders=np.array([1, 2], "<u2"), own__on=1
    )
    assert f.integer("own.depth", legal=Whole(1, 8)) == 3
    assert f.integer("own.width", None, legal=Whole(1, 8)) is None
    assert f.number("own.decay", legal=Real(0, 1)) == 1.0
    assert f.flag("own.on", False)
    assert not f.flag("own.off", False)
    assert f.text("own.kind", max_chars=8) == f.label("own.kind", max_chars=8) == "a\ufffd"
    assert (
        f.integers("own.orders", 2, legal=Whole(1, 8))
        == f.each("own.orders", 2, legal=Whole(1, 8))
        == [1, 2]
    )
    assert f.one_or_more("own.depth", legal=Whole(1, 8)) == [3]
    whole = Fields({"own.depth": 3})
    assert whole.integer("own.depth", legal=Whole(1, 8)) == 3


def test_a_range_that_is_passed_goes_before_the_tables() -> None:
    with pytest.raises(BadGGUF, match="block_count is 9; want a whole number from 1 to 8"):
        h(block_count=9).integer("block_count", legal=Whole(1, 8))


def test_a_reader_without_a_range_gets_an_error_that_names_the_field() -> None:
    with pytest.raises(LookupError, match=r"no range for llama\.own\.depth; pass one of type Whole"):
        h(own__depth=3).integer("own.depth")
    with pytest.raises(LookupError, match=r"llama\.own\.kind; pass one of type int"):
        h().text("own.kind", "")
    with pytest.raises(TypeError, match=r"range of llama\.rope\.freq_base is of type Real, not Whole"):
        h().integer("rope.freq_base", 1)


def test_text_that_is_no_utf8_can_be_encoded_and_a_label_can_not_act_on_a_terminal() -> None:
    f = Fields({"tokenizer.ggml.pre": "a\udcff\x1b[2J\nü\u202e", "general.architecture": 7})
    assert f.text("tokenizer.ggml.pre").encode() == "a\ufffd\x1b[2J\nü\u202e".encode()
    assert f.label("tokenizer.ggml.pre") == "a\ufffd\ufffd[2J\ufffdü\ufffd"
    assert f.title("tokenizer.ggml.pre") == f.label("tokenizer.ggml.pre")
    assert encodable("\ud800x") == "\ufffdx"
    with pytest.raises(ModelError, match=r"^general\.architecture is 7; want text$"):
        f.label("general.architecture")


def test_the_reader_chooses_the_error() -> None:
    with pytest.raises(BadTokenizer, match="tokens is an array of 2 values; want an array of texts"):
        Fields({"tokenizer.ggml.tokens": [1, 2]}, error=BadTokenizer).strings("tokenizer.ggml.tokens")
    with pytest.raises(BadTokenizer, match="scores has 2 entries; want 3"):
        Fields({"tokenizer.ggml.scores": [0.0, 1.0]}, error=BadTokenizer).numbers(
            "tokenizer.ggml.scores", 3, legal=Real(-1, 1)
        )
    with pytest.raises(BadTokenizer, match=r"entry 1 of tokenizer\.ggml\.scores is nan"):
        Fields({"tokenizer.ggml.scores": [0.0, math.nan]}, error=BadTokenizer).numbers(
            "tokenizer.ggml.scores", 2, legal=Real(-1, 1)
        )


@pytest.mark.parametrize("table", [GENERAL, HPARAMS], ids=["general", "hparams"])
def test_every_range_has_both_ends_and_refuses_infinity_and_nan(table: dict[str, object]) -> None:
    for name, legal in table.items():
        if isinstance(legal, Whole | Real):
            assert legal.low < legal.high, name
            assert all(legal.flaw(x) for x in (math.nan, math.inf, -math.inf)), name
        else:
            assert isinstance(legal, OneOf | int), name
