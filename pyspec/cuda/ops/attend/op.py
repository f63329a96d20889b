"""`attend`: paged attention for decode, verify and drafter blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from pyspec.cuda.op import Ask, Op, declared
from pyspec.cuda.ops.attend import cpu, cuda, ref, triton
from pyspec.cuda.ops.attend.cases import Case, make, worst
from pyspec.cuda.ops.attend.prompt import attend_blocks, attend_prompt, takes_prompts, with_prompts
from pyspec.cuda.ops.attend.ref import Attend
from pyspec.slots.kv import KvFormat
from pyspec.slots.kv_types import F8, Q4_0, Q8_0


def check(launch: Attend, reference: Attend, spec: ref.AttendSpec) -> str | None:
    """Ragged batches of the model's own heads, with padding and NaN wherever the op must not read."""
    own = (spec.n_head, spec.n_kv_head, spec.head_dim, spec.kv.k)
    cases = [
        Case(*own, [(0, 1), (299, 5), (1023, 2)], 32, pad=(3, 1)),
        Case(*own, [(70, 16), (1500, 1)], 16, 64, True),
    ]
    if (many := getattr(launch, "many", 0)) and many <= cuda.MAX_SEQ:  # has a build for these
        cases.append(Case(*own, [(300, 1), *((i, 1) for i in range(many - 1))], 16))
    for case in cases:
        case = replace(case, scale=spec.scale, sinks=spec.has_sinks, n_value=spec.n_value, cap=spec.cap)
        case = replace(case, v_dtype=spec.kv.v)
        made = make(case, spec.device)
        n = made.plain.n_row
        got = launch(made.q, made.pool, made.batch, case.window, made.sinks)[:n]
        want = reference(made.q[:n], made.pool, made.plain, case.window, made.sinks)
        if (off := worst(got, want)) > case.tolerance:
            return f"a row differs from the reference by {off:.2g} of its norm"
    return None


def shapes(device: torch.device) -> list[ref.AttendSpec]:
    """Heads of 27B, of 8B, of a small drafter; 27B with keys and values of 8 and 4 bits; DeepSeek-V3, and what each of 8 ranks has."""
    heads = ((24, 4, 256), (32, 8, 128), (16, 2, 64))
    whole = [ref.AttendSpec(device, *of, of[2] ** -0.5) for of in heads]
    few_bits = [KvFormat.both(Q8_0), KvFormat.both(F8), KvFormat(Q8_0, Q4_0)]
    latent = [ref.AttendSpec(device, n, 1, 576, 192**-0.5, n_value=512) for n in (128, 16)]
    return whole + [replace(whole[0], kv=kv) for kv in few_bits] + latent


def also(spec: ref.AttendSpec) -> Iterator[Ask]:
    """The library, which takes prompts (`prompt.py`)."""
    if spec.device.type == "cuda" and not (spec.has_sinks or spec.n_value or spec.cap):
        yield attend_prompt, spec
        yield attend_blocks, spec


def beside(launch: Attend, spec: ref.AttendSpec) -> Attend:
    """With the library for prompts; keys that are values are no keys of it."""
    return launch if spec.n_value else with_prompts(launch, spec)


attend: Op[ref.AttendSpec, Attend] = declared(
    ref,
    cuda,
    triton,
    cpu,
    check=check,
    shapes=shapes,
    beside=beside,
    also=also,
    holds_prompts=takes_prompts,
)

OPS = (attend, attend_prompt, attend_blocks)
