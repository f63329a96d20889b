"""Texts of NVIDIA's assembler that decode codes of tiles, run by a few lines of Python: what they give is what the codes stand for."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from pyspec.cuda.ops.linear import tile_codes
from pyspec.cuda.ops.linear.dequant import E2M1
from pyspec.cuda.ops.linear.tiles import BIAS, FORMATS, TiledFormat

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
    return torch.stack((words & 0xFFFF, words >> 16), -1).to(torch.int32).to(torch.int16).view(torch.float16)


def subtracted(a: Tensor, b: Tensor) -> Tensor:
    bits = (halves(a) - halves(b)).view(torch.int16).long() & 0xFFFF
    return bits[:, 0] | bits[:, 1] << 16


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
            "sub.f16x2": lambda a: subtracted(*a),
        }[op](a)
        registers[to] = made & WORD
    return torch.cat([halves(registers[f"${i}"]) for i in range(n_out)], -1)


def meaning(form: TiledFormat, code: Tensor) -> Tensor:
    if form.table:
        by = 2.0**-15 if form.table == E2M1 else 1.0
        return torch.tensor(form.table, dtype=torch.float32)[code] * by
    return (code - (BIAS if form.bits == 8 else form.offset)).float()


@pytest.mark.parametrize("type", FORMATS, ids=lambda t: t.name)
def test_codes_become_what_they_stand_for(type: object) -> None:
    form, gen = FORMATS[type], torch.Generator().manual_seed(0)  # type: ignore[index]
    codes = torch.cat((torch.arange(256)[:, None].expand(-1, 4), torch.randint(0, 256, (4000, 4), generator=gen)))
    word = (codes << torch.arange(0, 32, 8)).sum(-1)
    text = tile_codes.text(form)
    if form.bits == 8:
        assert torch.equal(run(text, 2, word).float(), meaning(form, codes))
        return
    low, up = codes & 15, codes >> 4
    if not form.high:
        want = torch.cat((meaning(form, low), meaning(form, up)), -1)
        assert torch.equal(run(text, 4, word).float(), want)
        return
    more = torch.randint(0, 256, codes.shape, generator=gen)
    other = (more << torch.arange(0, 32, 8)).sum(-1)
    for shift in (0, 2):
        want = torch.cat((low | (more >> shift & 3) << 4, up | (more >> shift + 4 & 3) << 4), -1)
        got = run(text, 4, word, other, torch.full_like(word, shift * 0x01010101))
        assert torch.equal(got.float(), meaning(form, want))
