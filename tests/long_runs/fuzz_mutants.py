"""Mutants of GGUF files for tests/long_runs/fuzz.py: a file as fields, and everything that can be wrong with each of them.

`field_mutants` lists, for one file, every metadata field with every kind of wrong value, `tensor_mutants` every tensor of the
directory with every kind of wrong entry, and tensors that files may have but this one does not. All random values come from the
given generator, so a seed names a mutant for good.
"""

from __future__ import annotations

import copy
import math
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

STRING, ARRAY, BOOL, F32, U32 = 8, 9, 7, 6, 4
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-38, 3e38)
INTS = (
    0,
    1,
    2,
    3,
    7,
    255,
    65_535,
    1_000_000,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
TEXTS = (
    b"",
    b"\xff\xfe",
    b"a\0b",
    b"\x1b[2J\x1b]0;owned\x07",
    "\u202egnp.exe".encode(),
    b"x" * 3_000_000,
    b"%s{0}{{ x",
    b"\n" * 40,
)
TEMPLATES = (
    b"{{ raise_exception('no') }}",
    b"{% for",
    b"{{ 'a' * 10**9 }}",
    b"{% for i in range(10**12) %}{% endfor %}",
    b"{{ x.y.z }}",
    b"{{ '\xff\xed\xa0\x80' }}{{ messages }}",
    b"{% if messages|length < 2 %}{{ raise_exception('more') }}{% endif %}ok",
)
MILLION = [1] * 1_000_000
TYPES = (*range(43), 255, 2**32 - 1)
OTHER_NAMES = (
    "output.weight",
    "token_embd.weight",
    "rope_freqs.weight",
    "d2t",
    "output.scale",
    "token_embd.scale",
    "fc.scale",
    *(
        f"blk.{i}.{x}"
        for i in (0, 1)
        for x in (
            "attn_q.scale",
            "attn_output.scale",
            "ffn_down.scale",
            "ffn_up_exps.scale",
            "attn_q.bias",
            "attn_k.bias",
            "attn_qkv.bias",
            "attn_output.bias",
            "attn_sinks.weight",
            "attn_q_norm.weight",
            "attn_qkv.weight",
            "ffn_up.bias",
            "ffn_norm.weight",
            "exp_probs_b.bias",
            "ffn_gate_up_exps.weight",
            "nextn.eh_proj.weight",
            "nextn.embed_tokens.weight",
            "nextn.shared_head_head.weight",
            "nextn.shared_head_norm.weight",
            "layer_output_scale.weight",
        )
    ),
)
OTHER_KEYS = (
    "general.name", "general.file_type", "general.alignment", "split.count", "split.no", "split.tensors.count",
    "tokenizer.chat_template", "tokenizer.chat_template.tool_use", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.scores",
    "tokenizer.ggml.mask_token_id", "tokenizer.ggml.token_type",
    *("{arch}." + x for x in (
        "attention.key_length", "attention.value_length", "attention.scale", "attention.causal", "attention.recurrent_layers",
        "attention.sliding_window", "attention.sliding_window_pattern", "rope.dimension_count", "rope.dimension_sections",
        "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "full_attention_interval", "nextn_predict_layers",
        "expert_count", "expert_group_count", "expert_weights_scale", "expert_weights_norm", "moe_latent_size", "block_size",
        "target_layers", "expert_feed_forward_length", "expert_shared_feed_forward_length",
    )),
)  # fmt: skip


@dataclass
class Field:
    """A metadata field: type, value, and the type of elements if it is an array."""

    key: bytes
    kind: int
    value: object
    elements: int = 0


@dataclass
class Entry:
    """A tensor of the directory; dimensions and offset as they are written. planted: its bytes, which go behind the others."""

    name: bytes
    ne: list[int]
    kind: int
    offset: int
    planted: bytes = b""


@dataclass
class Parsed:
    """A whole file."""

    fields: list[Field]
    entries: list[Entry]
    data: bytes
    cut: float = 1.0  # how much of it is written
    alignment: int = field(default=32)

    @property
    def arch(self) -> str:
        return next(f.value.decode() for f in self.fields if f.key == b"general.architecture")  # type: ignore[attr-defined]

    def encode(self) -> bytes:
        end, tail = len(self.data), b""
        for e in self.entries:
            if e.planted:
                e.offset = -(-(end + len(tail)) // self.alignment) * self.alignment
                tail += bytes(e.offset - end - len(tail)) + e.planted
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.entries), len(self.fields))
        head += b"".join(map(_encoded, self.fields))
        for e in self.entries:
            head += _string(e.name) + struct.pack(
                f"<I{len(e.ne)}QIQ", len(e.ne), *e.ne, e.kind, e.offset
            )
        out = head + bytes(-len(head) % self.alignment) + self.data + tail
        return out[: int(len(out) * self.cut)]


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _scalar(value: object, kind: int) -> bytes:
    if kind == STRING:
        return _string(value if isinstance(value, bytes) else str(value).encode())
    form = FORMATS.get(kind, "I")
    if form in "fd":
        return struct.pack("<" + form, float(value) if isinstance(value, int | float) else 0.0)
    whole = (
        int(value)
        if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
        else 0
    )
    return (whole % 2 ** (8 * struct.calcsize(form))).to_bytes(struct.calcsize(form), "little")


def _encoded(f: Field) -> bytes:
    head = _string(f.key) + struct.pack("<I", f.kind)
    if f.kind != ARRAY:
        return head + _scalar(f.value, f.kind)
    items: list[object] = list(f.value)  # type: ignore[call-overload]
    return (
        head
        + struct.pack("<IQ", f.elements, len(items))
        + b"".join(_scalar(x, f.elements) for x in items)
    )


def parse(path: Path) -> Parsed:
    """A file that is right."""
    raw, at = path.read_bytes(), 24
    n_entry, n_field = struct.unpack_from("<QQ", raw, 8)

    def take(form: str) -> tuple[int, ...]:
        nonlocal at
        at += struct.calcsize("<" + form)
        return struct.unpack_from("<" + form, raw, at - struct.calcsize("<" + form))

    def scalar(kind: int) -> object:
        nonlocal at
        if kind != STRING:
            return take(FORMATS[kind])[0]
        (n,) = take("Q")
        at += n
        return raw[at - n : at]

    fields, entries = [], []
    for _ in range(n_field):
        key, (kind,) = scalar(STRING), take("I")
        elements, n = take("IQ") if kind == ARRAY else (0, 0)
        value = [scalar(elements) for _ in range(n)] if kind == ARRAY else scalar(kind)
        fields.append(Field(key, kind, value, elements))  # type: ignore[arg-type]
    for _ in range(n_entry):
        name, (n,) = scalar(STRING), take("I")
        ne = list(take(f"{n}Q"))
        entries.append(Entry(name, ne, *take("IQ")))  # type: ignore[arg-type]
    return Parsed(fields, entries, raw[-(-at // 32) * 32 :])


Change = Callable[[Parsed, random.Random], None]
Named = tuple[str, Change]


def field_mutants(file: Parsed) -> Iterator[Named]:
    """(fault, how to make it) for every metadata field, absent ones included."""
    for i, f in enumerate(file.fields):
        for name, change in _field_changes(f):
            yield f"{f.key.decode()}: {name}", _on_field(i, change)
    for key in OTHER_KEYS:
        key = key.format(arch=file.arch)
        if not any(f.key == key.encode() for f in file.fields):
            for kind in (U32, F32, BOOL, STRING, ARRAY):
                yield f"{key}: added as {kind}", _adding(key, kind)


def tensor_mutants(file: Parsed) -> Iterator[Named]:
    """The same for every entry of the directory, for tensors that are absent, and for the file's length."""
    for i, e in enumerate(file.entries):
        for name, entry_change in _entry_changes(e):
            yield f"{e.name.decode()}: {name}", _on_entry(i, entry_change)
    for name in OTHER_NAMES:
        for shape in ("one", "row", "matrix", "huge"):
            yield f"{name}: planted as {shape}", _planting(name, shape)
    for n in range(12):
        yield f"cut at {n} of 12", lambda p, rng, n=n: setattr(p, "cut", (n + rng.random()) / 12)


def _on_field(i: int, change: Callable[[Field, random.Random], None]) -> Change:
    return lambda p, rng: change(p.fields[i], rng)


def _on_entry(i: int, change: Callable[[Entry, random.Random], None]) -> Change:
    return lambda p, rng: change(p.entries[i], rng)


def _set(**values: object) -> Callable[[Field | Entry, random.Random], None]:
    def change(f: Field | Entry, rng: random.Random) -> None:
        for name, value in values.items():
            setattr(f, name, value)

    return change


def _field_changes(f: Field) -> Iterator[tuple[str, Callable[[Field, random.Random], None]]]:
    yield "gone", _set(key=f.key + b"x")
    yield "value type unknown", _set(kind=13)
    for n in (0, 1, 3):
        yield f"array of {n} numbers", _set(kind=ARRAY, elements=U32, value=[1] * n)
        yield f"array of {n} texts", _set(kind=ARRAY, elements=STRING, value=[b"x"] * n)
    yield "array of NaN", _set(kind=ARRAY, elements=F32, value=[math.nan] * 4)
    yield "million of ones", _set(kind=ARRAY, elements=0, value=MILLION)
    yield "true", _set(kind=BOOL, value=1)
    for text in TEXTS:
        yield f"text of {len(text)}: {text[:12]!r}", _set(kind=STRING, value=text)
    for number in FLOATS:
        yield f"float {number}", _set(kind=F32, value=number)
    for whole in INTS:
        yield f"integer {whole}", _set(kind=10 if whole >= 2**32 else U32, value=whole)
        if whole:
            yield f"integer {-whole}", _set(kind=11, value=-whole)
    if f.kind == ARRAY:
        yield from _array_changes(f)
    elif f.kind != STRING and isinstance(f.value, int):
        for name, whole in (
            ("one less", f.value - 1),
            ("one more", f.value + 1),
            ("half", f.value // 2),
            ("double", 2 * f.value),
        ):
            yield name, _set(value=whole)
        yield "as float", _set(kind=F32, value=float(f.value))
        yield "as text", _set(kind=STRING, value=str(f.value).encode())
        yield "as list", _set(kind=ARRAY, elements=f.kind, value=[f.value])
    if b"chat_template" in f.key:
        for text in TEMPLATES:
            yield f"template {text[:40]!r}", _set(kind=STRING, value=text)


def _array_changes(f: Field) -> Iterator[tuple[str, Callable[[Field, random.Random], None]]]:
    items: list[object] = list(f.value)  # type: ignore[call-overload]
    yield "one short", _set(value=items[:-1])
    yield "one more", _set(value=[*items, *items[:1]])
    yield "halved", _set(value=items[: len(items) // 2])
    yield "twice", _set(value=items * 2)
    yield "the first alone", _set(kind=f.elements, value=items[0])
    yield (
        "as texts",
        _set(elements=STRING, value=[x if isinstance(x, bytes) else str(x).encode() for x in items]),
    )
    wrong = TEXTS if f.elements == STRING else (*FLOATS, *INTS, *(-x for x in INTS))
    for x in wrong:

        def one(f: Field, rng: random.Random, x: object = x) -> None:
            values: list[object] = list(f.value)  # type: ignore[call-overload]
            values[rng.randrange(len(values))] = x
            if f.elements != STRING:
                f.elements = F32 if isinstance(x, float) else 11
            f.value = values

        yield f"one is {str(x)[:20]}", one
        if f.elements != STRING:
            yield (
                f"all are {x}",
                _set(elements=F32 if isinstance(x, float) else 11, value=[x] * len(items)),
            )


def _entry_changes(e: Entry) -> Iterator[tuple[str, Callable[[Entry, random.Random], None]]]:
    yield "gone", _set(name=e.name + b"x")
    yield "not UTF-8", _set(name=b"\xff" + e.name)
    yield "renamed", lambda e, rng: setattr(e, "name", rng.choice(OTHER_NAMES).encode())
    yield "swapped", _set(ne=e.ne[::-1])
    yield "flat", _set(ne=[math.prod(e.ne)])
    yield "with a dimension more", _set(ne=[*e.ne, 1])
    yield "of no dimensions", _set(ne=[])
    yield "of five dimensions", _set(ne=[*e.ne, 1, 1, 1, 1][:5])
    for i in range(len(e.ne)):
        for name, n in (
            ("0", 0),
            ("1", 1),
            ("half", e.ne[i] // 2),
            ("less", e.ne[i] - 32),
            ("more", e.ne[i] + 32),
            ("huge", 2**62),
        ):
            yield f"dimension {i} {name}", _set(ne=[*e.ne[:i], max(n, 0), *e.ne[i + 1 :]])
    yield "of another type", lambda e, rng: setattr(e, "kind", rng.choice(TYPES))
    yield "of a type as large", _set(kind=26 if e.kind == 0 else 24)
    yield "of halves", _set(kind=1)
    for offset in (1, 32, 2**40, 2**64 - 32):
        yield f"at offset {offset}", _set(offset=offset)


def _adding(key: str, kind: int) -> Change:
    def change(p: Parsed, rng: random.Random) -> None:
        value: object = rng.choice(
            INTS if kind in (U32, BOOL) else FLOATS if kind == F32 else TEXTS + TEMPLATES
        )
        elements = 0
        if kind == ARRAY:
            elements = rng.choice((U32, 5, F32, STRING, BOOL))
            value = [
                rng.choice(FLOATS if elements == F32 else INTS)
                for _ in range(rng.choice((0, 1, 4, 300)))
            ]
        p.fields.append(Field(key.encode(), kind, value, elements))

    return change


def _planting(name: str, shape: str) -> Change:
    """A tensor more, of f32: numbers that are no fit ids or scales among them."""

    def change(p: Parsed, rng: random.Random) -> None:
        sizes = sorted({n for e in p.entries for n in e.ne if n <= 4096})
        ne = {"one": [1], "row": [rng.choice(sizes)], "huge": [32, 100_000]}.get(
            shape, [rng.choice(sizes), rng.choice(sizes)]
        )
        value = rng.choice((0.0, 1.0, -1.0, 1e9, math.nan, math.inf))
        p.entries = [e for e in p.entries if e.name != name.encode()]
        p.entries.append(Entry(name.encode(), ne, 0, 0, struct.pack("<f", value) * math.prod(ne)))

    return change


def made(file: Parsed, change: Change, rng: random.Random) -> bytes:
    """The mutant's bytes."""
    mutant = Parsed(copy.deepcopy(file.fields), copy.deepcopy(file.entries), file.data)
    change(mutant, rng)
    return mutant.encode()
