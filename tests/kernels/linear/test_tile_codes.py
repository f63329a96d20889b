"""Texts of NVIDIA's assembler that decode codes of tiles, run by a few lines of Python: they give the values of the codes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from pyspec.cuda.ops.linear import tile_codes
from pyspec.cuda.ops.linear.dequant import E2M1
from pyspec.cuda.ops.linear.tiles import FORMATS, TiledFormat, single_places

WORD = 0xFFFFFFFF


def permuted(a: Tensor, b: Tensor, chosen: Tensor) -> Tensor:
    """prmt.b32: each of four bytes is one of eight. None of our selectors asks for a sign."""
    eight, out = a | b << 32, torch.zeros_like(a)
    for i in range(4):
        nibble = chosen >> (4 * i) & 15
        assert not (nibble & 8).any()
        out |= (eight >> (8 * nibble) & 255) << (8 * i)
    return out


def halves(words: Tensor) -> Tensor:
    """[n] words -> [n, 2] f16."""
    return (
        torch.stack((words & 0xFFFF, words >> 16), -1)
        .to(torch.int32)
        .to(torch.int16)
        .view(torch.float16)
    )


def run(text: str, n_out: int, *given: Tensor) -> Tensor:
    """[n, n_out * 2] f16 of n words each."""
    registers = {f"${n_out + i}": word for i, word in enumerate(given)}

    def value(name: str) -> Tensor:
        return registers[name] if name in registers else torch.tensor(int(name, 0)).expand_as(given[0])

    for line in re.sub(r"^{ \.reg [^;]*;|}$", "", text).split(";"):
        if not line.strip():
            continue
        op, rest = line.strip().split(" ", 1)
        to, *args = (x.strip() for x in rest.split(","))
        a = [value(x) for x in args]
        if op == "lop3.b32":
            assert args[3] == "0xEA"
            registers[to] = (a[0] & a[1]) | a[2]
            continue
        made = {
            "mov.b32": lambda a: a[0],
            "and.b32": lambda a: a[0] & a[1],
            "or.b32": lambda a: a[0] | a[1],
            "shl.b32": lambda a: a[0] << a[1],
            "shr.u32": lambda a: a[0] >> a[1],
            "prmt.b32": lambda a: permuted(*a),
        }[op](a)
        registers[to] = made & WORD
    return torch.cat([halves(registers[f"${i}"]) for i in range(n_out)], -1)


def meaning(form: TiledFormat, code: Tensor) -> Tensor:
    """The decoded number of a code."""
    if form.table == E2M1:
        return torch.tensor(form.table, dtype=torch.float32)[code] * 2.0**-15
    whole = torch.tensor(form.table)[code] + form.bias if form.table else code
    return whole.float() * 2.0**-24


def fields(form: TiledFormat, words: list[Tensor], parity: int) -> list[Tensor]:
    """[n, 4] codes of each output, of bytes [n, 4] as they lie in tiles."""
    if form.bits == 8:
        return words[:1]
    if form.bits == 4 and not form.high:
        return [words[0] & 15, words[0] >> 4]
    if form.bits == 4:
        low = [words[i % 2] >> (i // 2 * 4) & 15 for i in range(4)]
    else:
        low = [words[0] >> (2 * i) & 3 for i in range(4)]
    if not form.high:
        return low
    more, mask = words[-1], (1 << form.high) - 1
    places = (0, 2, 4, 6) if form.high == 2 else single_places(parity)
    return [q | (more >> i & mask) << form.bits for q, i in zip(low, places, strict=True)]


@pytest.mark.parametrize("type", FORMATS, ids=lambda t: t.name)
def test_codes_become_what_they_stand_for(type: object) -> None:
    form, gen = FORMATS[type], torch.Generator().manual_seed(0)  # type: ignore[index]
    n_word = (2 if form.bits == 4 and form.high else 1) + (form.high > 0)
    given = [
        torch.cat(
            (torch.arange(256)[:, None].expand(-1, 4), torch.randint(0, 256, (4000, 4), generator=gen))
        )
        for _ in range(n_word)
    ]
    given[1:] = [torch.randint(0, 256, given[0].shape, generator=gen) for _ in given[1:]]
    words = [(x << torch.arange(0, 32, 8)).sum(-1) for x in given]
    for parity in (0, 1) if form.high == 1 else (0,):
        codes = fields(form, given, parity)
        shift = [torch.full_like(words[0], 2 * parity * 0x01010101)] if form.high == 1 else []
        got = run(tile_codes.text(form), 2 * len(codes), *words, *shift)
        assert torch.equal(got.float(), torch.cat([meaning(form, c) for c in codes], -1))
