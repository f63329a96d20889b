"""Hostile calls of the CPU's kernels around products, each against its reference; run by tests here, and by forced.py elsewhere.

A rig is a function that returns a sentence for a fault, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from attend_cases import CASES, PACKED
from eight_rig import eight_rigs
from product_rig import product_rigs
from route_cases import GROUPED
from token_rigs import token_rigs
from torch import Tensor

from pyspec.cuda.op import Op
from pyspec.cuda.ops.angles.op import angles
from pyspec.cuda.ops.attend.cases import Case, Made, make, only, spec_of, worst
from pyspec.cuda.ops.attend.op import attend
from pyspec.cuda.ops.attend.ref import Attend
from pyspec.cuda.ops.best.op import best
from pyspec.cuda.ops.embed.op import embed
from pyspec.cuda.ops.embed.ref import EmbedSpec
from pyspec.cuda.ops.hadamard.op import hadamard
from pyspec.cuda.ops.hadamard.ref import HadamardSpec
from pyspec.cuda.ops.heads.op import heads
from pyspec.cuda.ops.heads.ref import HeadsSpec
from pyspec.cuda.ops.linear.cpu import TYPES
from pyspec.cuda.ops.moe import cpu as moe_cpu
from pyspec.cuda.ops.moe.op import moe
from pyspec.cuda.ops.moe.ref import Added, MoeSpec
from pyspec.cuda.ops.moe_route.op import moe_route
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.cuda.ops.ring_places.op import ring_places
from pyspec.cuda.ops.rope_kv.op import rope_kv
from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec
from pyspec.cuda.ops.rope_latent.op import rope_latent
from pyspec.cuda.ops.rope_latent.ref import RopeLatentSpec
from pyspec.gguf import GGMLType as G
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_types import TYPES as KV_TYPES
from pyspec.slots.kv_types import KvType

CPU = torch.device("cpu")
OFF = 1e-5  # of a row's norm: f32, whatever the pool's type
Rig = Callable[[], str | None]

F16, BF16, F32, Q8, F8 = torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn
ATTEND = (
    CASES
    | PACKED
    | {
        "width 20, pages of 8": Case(6, 2, 20, F16, [(0, 1), (7, 9), (300, 2)], 8, pad=(2, 1)),
        "width 9, pages of 3": Case(3, 1, 9, F32, [(100, 17), (1, 1)], 3),
        "width 80": Case(8, 2, 80, BF16, [(255, 3), (256, 2), (511, 1), (512, 1)], 16),
        "width 80 of f8": Case(8, 2, 80, F8, [(255, 3), (256, 2), (513, 12)], 16, 300),
        "group 16, a prompt": Case(32, 2, 64, F16, [(0, 130)], 32),
        "one head a group, a prompt": Case(2, 2, 128, F32, [(600, 117), (0, 5)], 64, pad=(3, 1)),
        "more heads than a pass": Case(72, 1, 64, F16, [(270, 3), (5, 1)], 16, sinks=True),
        "f16 and q8_0": Case(8, 2, 64, F16, [(300, 3), (20, 40)], pad=(1, 1), v_dtype=Q8),
        "bf16 and f16": Case(4, 2, 64, BF16, [(300, 1)], v_dtype=F16),
        "q4_0 and q5_1, a prompt": Case(
            8, 2, 96, KV_TYPES["q4_0"], [(300, 3), (20, 40)], v_dtype=KV_TYPES["q5_1"]
        ),
        "keys are values": Case(6, 1, 72, F16, [(300, 3), (0, 5)], 16, pad=(2, 1), n_value=40),
        "keys of 4 bits are values": Case(
            40, 1, 96, KV_TYPES["q4_0"], [(270, 4), (9, 17)], 16, pad=(1, 1), n_value=64
        ),
        "q8_0, a prompt behind a window": Case(4, 2, 64, Q8, [(1000, 100)], 16, 128),
        **{
            f"{n} rows": Case(4, 2, 64, F16, [(n, n), (2 * n + 250, n)], 16, pad=(1, 0))
            for n in range(1, 18)
        },
    }
)


def cpu_of(op: Op[Any, Any], spec: Any) -> Any:
    """The launch of a CPU's own implementation, which must be within its limits."""
    impl = next(impl for impl in op.impls if impl.name == "cpu")
    assert impl.limits(spec) is None, impl.limits(spec)
    return impl.bind(spec)


def attended(case: Case) -> tuple[Attend, Made, Tensor]:
    """The launch, its inputs and its result with padding."""
    made, run = make(case, CPU), cpu_of(attend, spec_of(case, CPU))
    return run, made, run(made.q, made.pool, made.batch, case.window, made.sinks)


def attends(case: Case) -> str | None:
    _, made, got = attended(case)
    n = made.plain.n_row
    want = attend.reference.bind(spec_of(case, CPU))(
        made.q[:n], made.pool, made.plain, case.window, made.sinks
    )
    if not (off := worst(got[:n], want)) < OFF:
        return f"a row differs from the reference by {off:.2g} of its norm"
    return None if not got[n:].any() else "rows of padding are not zero"


def has_own_bits(case: Case) -> str | None:
    """Every row alone, and on other numbers of threads."""
    run, made, got = attended(case)
    for s, seq in enumerate(made.plain.seqs):
        for r in range(seq.width):
            q, batch = only(made, s, r, 1)
            row = made.plain.starts[s] + r
            if not torch.equal(run(q, made.pool, batch, case.window, made.sinks)[0], got[row]):
                return f"row {r} of sequence {s} has other bits alone"
    before = torch.get_num_threads()
    for n_thread in (1, 2, 5):
        torch.set_num_threads(n_thread)
        same = torch.equal(run(made.q, made.pool, made.batch, case.window, made.sinks), got)
        torch.set_num_threads(before)
        if not same:
            return f"{n_thread} threads give other bits"
    return None


def sees_no_later_nan(case: Case) -> str | None:
    """Keys and values of a sequence's last row are NaN: no row before it changes."""
    run, made, got = attended(case)
    for s, end in enumerate(made.plain.max_hi):
        size = made.plain.page_size
        row = int(made.plain.page_table[s, (end - 1) // size]) * size + (end - 1) % size
        for plane in (made.pool.k, made.pool.v):
            plane[row] = torch.nan
    now = run(made.q, made.pool, made.batch, case.window, made.sinks)
    for s, seq in enumerate(made.plain.seqs):
        first, last = made.plain.starts[s], made.plain.starts[s + 1] - 1
        if not torch.equal(now[first:last], got[first:last]):
            return f"rows before the last of {seq.width} read it"
        if not now[last].isnan().all():
            return "the row itself is not NaN"
    return None


def survives_what_is_not_there() -> str | None:
    """A row without keys, pages that do not exist, and a sequence that does not."""
    case = Case(8, 2, 64, F16, [(300, 3), (20, 2)])
    run, made, got = attended(case)
    b = made.plain
    lo, table, row_seq = b.lo.clone(), b.page_table.clone(), b.row_seq.clone()
    lo[0], row_seq[3] = int(b.hi[0]), 7
    table[0, 3] = 1 << 40
    now = run(made.q, made.pool, replace(b, lo=lo, page_table=table, row_seq=row_seq), 0, None)
    if now[0].any() or not now[1:4].isnan().all() or not torch.equal(now[4], got[4]):
        return "a row without keys is not zero, or one without a page not NaN"
    return None


def values_of_all_kinds(n_row: int, n: int, gen: torch.Generator) -> Tensor:
    """[n_row, n] f32: all sizes, ties of rounding, infinite ones and NaN."""
    x = torch.randn(n_row, n, generator=gen) * torch.logspace(-12, 6, n_row)[:, None]
    some = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 448.0, 464.0, 65519.0, 65520.0, 2.0**-10, 2.0**-25]
    )
    x[-1, : len(some)] = some
    ties = torch.randint(-(1 << 13), 1 << 13, (n,), generator=gen)
    x[-2], x[-3] = ties / 512.0, ties * 2.0**-19
    return x


def rounds_as_the_pool(of: KvType, dim: int) -> str | None:
    """Keys and values that no norm and no rope touches, to the bit."""
    gen, n_row, n_kv = torch.Generator().manual_seed(0), 40, 3
    y, none = values_of_all_kinds(n_row, 2 * n_kv * dim, gen), torch.zeros(n_row, 1, 0)
    if of.name == "q8_0":  # a block that is not finite has no codes
        y[-1] = y[-1].clamp(-1e5, 1e5).nan_to_num()
    kv = KvFormat.both(of)
    pools = [KVPool(64, n_kv, dim, kv, CPU) for _ in range(2)]
    rows = torch.randperm(64, generator=gen)[:n_row]
    spec = RopeKvSpec(CPU, 0, n_kv, dim, 0, neox=True, gated=False, has_norm=False, eps=1e-6, kv=kv)
    for run, pool in zip((cpu_of(rope_kv, spec), rope_kv.reference.bind(spec)), pools, strict=True):
        run(y, None, None, (none, none), pool, rows)
    for a, b in zip(pools[0].planes, pools[1].planes, strict=True):
        x, want = (t.float() for t in (a, b))
        if not torch.equal(x.nan_to_num(nan=7e30), want.nan_to_num(nan=7e30)):
            return f"{int((x != want).sum())} values are rounded in another way"
    return None


def checks(op: Op[Any, Any], spec: Any) -> str | None:
    """The op's own check."""
    assert op.check is not None
    return op.check(cpu_of(op, spec), op.reference.bind(spec), spec)


EXPERTS = {
    "odd and plain": MoeSpec(CPU, 3, 37, 19, "swiglu", G.F32, G.F16),
    "narrower than a panel": MoeSpec(CPU, 2, 5, 3, "relu2", G.BF16, G.BF16),
    "plain downs": MoeSpec(CPU, 2, 96, 13, "swiglu", G.Q8_0, G.F32),
    "gates of kimi-k3": MoeSpec(CPU, 3, 96, 96, "situ", G.Q8_0, G.Q8_0, betas=(1.5, 2.0)),
    "a row of blocks and a rest": MoeSpec(CPU, 3, 288, 96, "swiglu", G.Q5_1, G.Q4_1, limit=2.0),
    "gates of another type": MoeSpec(CPU, 2, 256, 256, "swiglu", G.Q3_K, G.IQ4_XS, gate=G.Q2_K),
    "scaled": MoeSpec(CPU, 4, 64, 64, "relu2", G.NVFP4, G.NVFP4, scaled=True),
}


def routes_experts(spec: MoeSpec, n_row: int) -> str | None:
    """Half of the rows take the same experts, the last expert gets none, ids lie outside, and a row is NaN. Rows and addends are strided."""
    gen, n_expert = torch.Generator().manual_seed(n_row), 7
    made = moe_cpu.stacks_for(spec, n_expert, spec.n_in, spec.n_ff, gen)
    wide = torch.randn(n_row, 3 * spec.n_in + 1, generator=gen)
    x, shared, residual = (wide[:, i * spec.n_in : (i + 1) * spec.n_in] for i in range(3))
    x[n_row // 2] = torch.nan
    ids = torch.rand(n_row, n_expert - 1, generator=gen).argsort(-1)[:, : spec.n_used].int().contiguous()
    ids[n_row // 2 :] = ids[-1].clone()
    hostile = ids.clone()
    hostile[ids == 0] = -(1 << 31)
    weights, gate = torch.rand(n_row, spec.n_used, generator=gen), torch.rand(n_row, 1, generator=gen)
    added = Added(residual, shared, gate)
    got = cpu_of(moe, spec)(made)(x, hostile, weights, None, added)
    want = moe.reference.bind(spec)(made)(x, ids, weights, None, added)
    good = torch.arange(n_row) != n_row // 2
    if not got[~good].isnan().all():
        return "the row of NaN is a number"
    off = float((got[good] - want[good]).norm() / want[good].norm()) if n_row > 1 else 0.0
    return None if off < 1e-3 else f"outputs differ from the reference by {off:.2g}"


def small_rigs() -> Iterator[tuple[str, Rig]]:
    """All but attention."""
    sizes_of_heads = [(24, 4, 256, 64), (3, 3, 20, 6), (0, 2, 80, 80), (8, 2, 128, 0), (1, 1, 9, 4)]
    for i, (n_q, n_kv, dim, n_rot) in enumerate(sizes_of_heads):
        for neox in (True, False):
            spec = RopeKvSpec(
                CPU, n_q, n_kv, dim, n_rot, neox, gated=i % 2 == 0, has_norm=i != 3, eps=1e-6
            )
            spec = replace(spec, norm_behind=i in (1, 3))
            yield f"rope_kv {n_q} {n_kv} {dim} {n_rot} {neox}", partial(checks, rope_kv, spec)
    mixed = RopeKvSpec(
        CPU,
        4,
        2,
        64,
        64,
        neox=True,
        gated=False,
        has_norm=True,
        eps=1e-6,
        kv=KvFormat.named("f16", "q8_0"),
    )
    yield "rope_kv f16/q8_0", partial(checks, rope_kv, mixed)
    for name, of in KV_TYPES.items():
        for dim in (64, 96) if of.n_factor else (64, 11):
            yield f"rope_kv rounds {name} {dim}", partial(rounds_as_the_pool, of, dim)
        if of.is_packed:
            turned = replace(mixed, n_rot=32, kv=KvFormat(of, KV_TYPES["q4_0"]))
            yield (
                f"rope_kv rounds {name} unturned",
                partial(rounds_as_the_pool, replace(of, turns=False), 64),
            )
            yield f"rope_kv turns {name}", partial(checks, rope_kv, turned)
    for dim, n in ((64, 64), (96, 32), (256, 256), (256, 128), (40, 8)):
        yield f"hadamard {n} of {dim}", partial(checks, hadamard, HadamardSpec(CPU, dim, n))
    for type in sorted(TYPES):
        for n_in in {type.block_size * 5, 1280}:
            yield f"embed {type.name} {n_in}", partial(checks, embed, EmbedSpec(CPU, type, n_in))
    for n in (1, 7, 36, 1024, 5120):
        for layer in (False, True):
            if n > 1 or not layer:
                yield f"norms {n} {layer}", partial(checks, norms, NormsSpec(CPU, n, 1e-6, layer))
    for name, experts in EXPERTS.items():
        for n_row in (1, 2, 9, 70):
            yield f"moe {name}, {n_row} rows", partial(routes_experts, experts, n_row)
    for type in sorted(TYPES):
        wide = 4 * type.block_size if type.block_size < 256 else 256
        for n_out in (1, 7, 19, 72):
            matrices = HeadsSpec(CPU, type, 3, n_out, wide)
            yield f"heads {type.name} {n_out}", partial(checks, heads, matrices)
    for sizes in ((5, 8, 24, 8), (3, 128, 40, 24), (1, 6, 11, 2)):
        latent = RopeLatentSpec(CPU, *sizes, False, 1e-6)
        yield f"rope_latent {sizes}", partial(checks, rope_latent, latent)
    for name, router in GROUPED.items():
        yield f"moe_route, {name}", partial(checks, moe_route, router)
    yield "angles", partial(checks, angles, angles.shapes(CPU)[0])
    yield "ring_places", partial(checks, ring_places, ring_places.shapes(CPU)[0])
    yield "best", partial(checks, best, best.shapes(CPU)[0])


def rigs() -> Iterator[tuple[str, Rig]]:
    yield from small_rigs()
    yield from token_rigs()
    yield from eight_rigs()
    yield from product_rigs()
    yield "what is not there", survives_what_is_not_there
    for name, case in ATTEND.items():
        yield f"attend {name}", partial(attends, case)
