"""mamba2.cu for every architecture, and its launcher's refusals. Needs a compiler, no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from machines import compiled
from sampling import few

from pyspec.cuda import jit
from pyspec.cuda.ops.mamba2 import chunk as mamba2_chunk
from pyspec.cuda.ops.mamba2 import cuda as mamba2_cuda
from pyspec.cuda.ops.mamba2.ref import Mamba2Spec
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.rope_kv import cuda as rope_kv_cuda
from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec
from pyspec.slots.kv import KvFormat
from pyspec.slots.kv_types import type_of

pytest.importorskip("cuda.core")

SUPER, NANO, PUZZLE = (Mamba2Shape(h, 64, 8, n, 4) for h, n in ((128, 128), (64, 128), (128, 96)))


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", jit.ARCHS)
def test_kernels_compile_without_spills_and_leave_room_for_the_blocks_they_count_on(arch: str) -> None:
    for columns in mamba2_cuda.COLUMNS:
        found = compiled("mamba2", arch, mamba2_cuda.defines(SUPER, arch, columns))
        assert set(found) == {"mamba2_conv", "mamba2_rows"}
        assert all(r.shared_bytes <= 48 * 1024 for r in found.values()), found
        assert (
            found["mamba2_rows"].registers * mamba2_cuda.THREADS * mamba2_cuda.blocks_for(arch, columns)
            <= 65536
        ), found


@pytest.mark.slow
@pytest.mark.parametrize("arch", few(jit.ARCHS, "sm_90a"))
def test_kernels_of_prompts_compile_without_spills_and_fit_their_multiprocessors(arch: str) -> None:
    for shape, narrowed in ((SUPER, False), (NANO, False), (NANO, True), (PUZZLE, False)):
        chunk, most = mamba2_chunk.cut(shape, arch)
        rows = 32 if narrowed else most
        made = mamba2_chunk.defines(shape, chunk, rows)
        found = compiled("mamba2_chunk", arch, made)
        assert set(found) == {"mamba2_chunk_group", "mamba2_chunk_state"}
        group = mamba2_chunk.group_shared(shape, chunk) + found["mamba2_chunk_group"].shared_bytes
        assert mamba2_chunk.shared_for(shape, chunk, rows) <= mamba2_chunk.shared_limit(arch)
        # Two blocks, and the driver's share of each
        assert 2 * (group + 1024) <= mamba2_chunk.shared_limit(arch) + 1024
        assert found["mamba2_chunk_state"].registers * 4 * rows <= 65536
        assert found["mamba2_chunk_group"].registers * mamba2_chunk.GROUP_THREADS * 2 <= 65536


def test_blocks_of_prompts_are_as_large_as_they_may_be_and_narrow_for_few_heads() -> None:
    cuts = [
        mamba2_chunk.cut(s, arch) for s in (SUPER, PUZZLE) for arch in ("sm_90a", "sm_80", "sm_120f")
    ]
    assert cuts == [(64, 64), (32, 64), (32, 32), (64, 64), (64, 64), (32, 64)]
    assert [mamba2_chunk.narrow(s, n, 132) for s, n in ((SUPER, 1), (NANO, 1), (NANO, 2))] == [
        False,
        True,
        False,
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", few([NANO, PUZZLE, Mamba2Shape(8, 32, 4, 32, 4), Mamba2Shape(4, 128, 2, 64, 4)], PUZZLE)
)
def test_kernels_of_other_shapes_compile_without_spills(shape: Mamba2Shape) -> None:
    for columns in mamba2_cuda.columns_of(shape):
        compiled("mamba2", "sm_90a", mamba2_cuda.defines(shape, "sm_90a", columns))
    made = mamba2_chunk.defines(shape, *mamba2_chunk.cut(shape, "sm_90a"))
    compiled("mamba2_chunk", "sm_90a", made)


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (Mamba2Shape(128, 64, 8, 128, 3), "3 taps"),
        (Mamba2Shape(128, 48, 8, 128, 4), "heads are 48 wide"),
        (Mamba2Shape(128, 64, 8, 256, 4), "states are 256 wide"),
        (Mamba2Shape(128, 64, 8, 80, 4), "states are 80 wide"),
        (Mamba2Shape(6, 64, 3, 128, 4), "6 heads of 64"),
        (Mamba2Shape(8, 64, 1, 32, 4), "1 groups of 32"),
    ],
)
def test_shapes_it_is_not_built_for_are_refused_with_their_numbers(
    shape: Mamba2Shape, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert says in (mamba2_cuda.limits(Mamba2Spec(torch.device("cuda"), shape)) or "")
    for known in (SUPER, NANO, PUZZLE):
        assert mamba2_cuda.limits(Mamba2Spec(torch.device("cuda"), known)) is None


def test_a_lane_takes_four_columns_where_that_saves_a_wave() -> None:
    assert [mamba2_cuda.columns_for(SUPER, n, "sm_90a", 132) for n in (1, 2, 3, 4, 5, 8)] == [
        2,
        2,
        4,
        4,
        2,
        2,
    ]


@pytest.mark.parametrize("arch", jit.ARCHS)
def test_heads_that_do_not_turn_compile(arch: str) -> None:
    spec = RopeKvSpec(
        torch.device("cuda"), 32, 2, 128, 0, neox=False, gated=False, has_norm=False, eps=1e-5
    )
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        macros = rope_kv_cuda.defines(replace(spec, kv=KvFormat.both(type_of(dtype))))
        compiled("rope_kv", arch, macros)
