"""DeepSeek-V4's compressors and new keys give the same results beside a product as after it.

The emulator runs launches one after the other. So it shows bits, not waits: those take a card.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from emulated.gpu import CPU
from emulated.machine import needs_compiler
from emulated.ways import machine_of
from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.jit import compile_cubin
from pyspec.cuda.ops.compress import cases as compress_cases
from pyspec.cuda.ops.compress import cuda as compress_cuda
from pyspec.cuda.ops.compress.ref import CompressSpec
from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear.ref import Epilogue
from pyspec.cuda.ops.ragged import Ragged
from pyspec.cuda.ops.sparse_attend import cases as sparse_cases
from pyspec.cuda.ops.sparse_attend import cuda as sparse_cuda
from pyspec.cuda.ops.sparse_attend.ref import ROWS, SparseSpec
from pyspec.cuda.streamed import Streamed
from pyspec.gguf import GGMLType

pytestmark = needs_compiler


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


COMPRESSED = CompressSpec(CPU, 4, 64, True, 16, 1e-6, torch.float16)
CASE = Ragged([(0, 1), (2, 5), (70, 2)], 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [COMPRESSED, CompressSpec(CPU, 128, 32, False, 32, 1e-6, torch.bfloat16)]
)
def test_a_compressor_leaves_the_same_beside_a_product(spec: CompressSpec) -> None:
    """With padding, whose CTAs have nothing to do."""
    made = compress_cases.make(replace(CASE, pad=(3, 2)), spec, 1)
    with machine_of("linear_sm90", seed=1):
        launch = compress_cuda.bind(spec)
        found = [
            made.run(run, (slice(None), made.placed.batch))
            for run in (launch, partial(launch, beside=True))
        ]
    (ring, pool), (other, same) = found
    assert torch.equal(pool.k.view(torch.int16), same.k.view(torch.int16))
    assert all(
        torch.equal(ring.rows[x].view(torch.int32), other.rows[x].view(torch.int32)) for x in ring.rows
    )


def test_two_compressors_leave_the_same_beside_a_product() -> None:
    specs = COMPRESSED, replace(COMPRESSED, dim=32)
    made, found = [compress_cases.make(CASE, spec, i) for i, spec in enumerate(specs)], []
    wide = drawn(made[0].placed.plain.n_row, 4 * 64 + 4 * 32)  # as products lie: side by side
    parts = wide[:, :256].chunk(2, -1), wide[:, 256:].chunk(2, -1)
    for beside in (False, True):
        with machine_of("linear_sm90", seed=2):
            first, second = (compress_cuda.bind(spec) for spec in specs)
            both = first.with_beside(second)
            given = [
                (*part, of.places, of.norm, *of.copies()) for of, part in zip(made, parts, strict=True)
            ]
            assert both is not None
            both(given[0], given[1], made[0].freq, made[0].placed.batch, beside=beside)
        found.append(
            [x for *_, ring, pool in given for x in (*ring.rows.values(), pool.k.view(torch.int16))]
        )
    assert all(torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(*found, strict=True))


def test_two_compressors_of_flash_have_room_beside_a_product_of_up_to_eight_rows() -> None:
    """Registers and shared memory of a multiprocessor of 9.0: each CTA has 1 KB more, which is the driver's."""
    main = CompressSpec(CPU, 4, 512, True, 64, 1e-6, torch.float16)
    beside, shape, q8 = replace(main, dim=128), linear_cuda.SHAPES[0], GGMLType.Q8_0
    macros = compress_cuda.defines(main) | {
        "BESIDE_DIM": beside.dim,
        "BESIDE_GROUPS": compress_cuda.n_group(beside),
    }
    both = compile_cubin("compress", "sm_90a", macros, use_cache=False).resources["compress_both"]
    stages = linear_cuda.n_stages(q8, shape, (9, 0))
    build = linear_cuda.defines(q8, shape, stages, Epilogue.PLAIN)
    product = compile_cubin("linear_sm90", "sm_90a", build, use_cache=False).resources["linear"]
    assert shape.rows == linear_cuda.LATE_ROWS and both.spill_bytes == product.spill_bytes == 0
    threads = 32 * (shape.n_warp + 1), compress_cuda.n_group(main) * main.dim // 4
    assert (
        sum(-(-r.registers // 8) * 8 * n for r, n in zip((product, both), threads, strict=True)) <= 65536
    )
    shared = stages * linear_cuda.stage_bytes(q8, shape) + product.shared_bytes + both.shared_bytes
    assert shared + 2 * 1024 <= 228 * 1024


@pytest.mark.parametrize(("ratio", "top_k"), [(4, 6), (0, 0)])
def test_keys_that_were_made_ahead_are_those_of_the_call(ratio: int, top_k: int) -> None:
    spec = SparseSpec(CPU, 12, 32, 12, ratio, torch.float16, 16, 1e-6)
    made = sparse_cases.make(CASE, spec, top_k)
    batch, n_row = made.placed.batch, len(made.kv)
    with machine_of("linear_sm90", seed=3):
        attend = sparse_cuda.bind(spec)
        want, kept = made.run(attend, batch)
        own = attend.take_keys(n_row)
        assert own is not None and attend.take_keys(9) is attend.take_keys(0) is None
        launched: list[str] = []
        for build, kernels in attend.kernels.items():
            attend.kernels[build] = {
                name: Heard(kernel, name, launched) for name, kernel in kernels.items()
            }
        attend.keys_beside(made.kv, made.tail, batch, own)
        for _ in "ab":  # rows made ahead serve one call
            ring = sparse_cases.copied(made.ring)
            got = attend(made.q, made.kv, made.tail, ring, made.pool, made.chosen, made.sinks, batch)
            assert torch.equal(got, want) and torch.equal(
                ring.rows[ROWS].nan_to_num(9.0), kept.rows[ROWS].nan_to_num(9.0)
            )
        assert [name for name in launched if name == "sparse_keys"] == ["sparse_keys"] * 2 and launched[
            0
        ] == "sparse_keys"
        attend.keys_beside(made.kv, made.tail, batch, own)
        other = made.kv + 1
        assert torch.equal(
            attend(made.q, other, *made_rest(made), batch),
            attend(made.q, other, *made_rest(made), batch),
        )


def made_rest(made: sparse_cases.Windowed) -> tuple[Any, ...]:
    return made.tail, sparse_cases.copied(made.ring), made.pool, made.chosen, made.sinks


class Heard:
    """A kernel whose launches are written down."""

    def __init__(self, kernel: Any, name: str, launched: list[str]) -> None:
        self.kernel, self.name, self.launched = kernel, name, launched

    def launch(self, *given: Any, **more: Any) -> None:
        self.launched.append(self.name)
        self.kernel.launch(*given, **more)


class Attends:
    def take_keys(self, n_row: int) -> Tensor:
        return torch.empty(n_row)

    def keys_beside(self, *_: Any) -> None: ...


def test_who_has_no_launch_for_it_is_asked_for_nothing() -> None:
    """Attention, compressors and products of other tiers, more rows, and inputs that would have to be copied first."""
    product, rows = object.__new__(Streamed), torch.empty(2, 96)
    product.has_late = lambda n_row: n_row <= 8  # type: ignore[method-assign]
    compressor = object.__new__(compress_cuda.CompressLaunch)
    assert fuse.makes_keys_beside(Attends(), (compressor,), product)
    for attend in (lambda *_: None, object()):
        assert not fuse.makes_keys_beside(attend, (), product)
    assert not fuse.makes_keys_beside(Attends(), (object(),), product)
    assert not fuse.makes_keys_beside(Attends(), (), lambda x: x)
    own, late = fuse.keys_room(Attends(), product, (rows, rows[:, 32:]))
    assert own is not None and late
    for other in (torch.empty(9, 96), rows[:, 1:], torch.empty(2, 97)[:, :96]):
        assert fuse.keys_room(Attends(), product, (other,)) == (None, False)
