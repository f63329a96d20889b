"""gdn.cu for every architecture, and its launcher's refusals. Needs a compiler, no GPU."""

from dataclasses import replace

import pytest
import torch
from machines import compiled

from pyspec.cuda import jit
from pyspec.cuda.ops.gdn import chunk as gdn_chunk
from pyspec.cuda.ops.gdn import cuda as gdn_cuda
from pyspec.cuda.ops.gdn.ref import GdnSpec
from pyspec.cuda.ops.gdn.shape import GdnShape

pytest.importorskip("cuda.core")

SHAPE = GdnShape(16, 48, 128, 4, 10240)
BY_KEY = GdnShape(32, 32, 128, 4, 96 * 128, by_key=True, floor=-5.0)


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("arch", jit.ARCHS)
@pytest.mark.parametrize("shape", [SHAPE, BY_KEY], ids=["one decay", "by key"])
def test_kernels_compile_without_spills_and_leave_room_for_the_blocks_they_count_on(
    shape: GdnShape, arch: str
) -> None:
    for columns in gdn_cuda.COLUMNS:
        defines = gdn_cuda.defines(shape, arch, columns)
        found = compiled("gdn", arch, defines)
        clusters = not arch.startswith("sm_8") and not shape.by_key
        assert set(found) == {"gdn_conv", "gdn_conv_many", "gdn_rows"} | (
            {"gdn_rows_into"} if clusters else set()
        )
        assert all(r.shared_bytes <= 48 * 1024 for r in found.values()), found
        rows = [r.registers for name, r in found.items() if name.startswith("gdn_rows")]
        assert max(rows) * gdn_cuda.THREADS * int(defines["BLOCKS"]) <= 65536, found


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", jit.ARCHS)
def test_kernels_of_prompts_compile_without_spills_and_leave_room_for_two_blocks(arch: str) -> None:
    found = compiled("gdn_chunk", arch, gdn_chunk.defines(SHAPE, arch))
    assert set(found) == {"gdn_chunk_conv", "gdn_chunk_solve", "gdn_chunk_state"}
    assert found["gdn_chunk_state"].registers * gdn_chunk.THREADS * 2 <= 65536, found


@pytest.mark.slow
def test_head_counts_are_free_as_long_as_values_are_a_multiple_of_keys() -> None:
    for n_k, n_v, grouped in ((1, 1, False), (3, 6, False), (16, 32, True), (16, 64, False)):
        shape = GdnShape(n_k, n_v, 128, 4, 128 * (2 * n_k + n_v), grouped)
        for stem, arch, defines in (  # some of these spill
            ("gdn", "sm_90a", gdn_cuda.defines(shape, "sm_90a", 2)),
            ("gdn_chunk", "sm_80", gdn_chunk.defines(shape, "sm_80")),
        ):
            assert jit.compile_cubin(stem, arch, defines, use_cache=False).resources


def test_a_cpu_is_refused_with_the_reason() -> None:
    assert gdn_cuda.limits(GdnSpec(torch.device("cpu"), SHAPE, 1e-6)) == "runs on NVIDIA GPUs only"


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (GdnShape(2, 4, 64, 4, 512), "states are 64 wide"),
        (GdnShape(2, 4, 128, 3, 1024), "3 taps"),
        (GdnShape(2, 3, 128, 4, 896), "3 value heads are no multiple of 2 key heads"),
    ],
)
def test_shapes_it_is_not_built_for_are_refused_with_their_numbers(
    shape: GdnShape, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert says in (gdn_cuda.limits(GdnSpec(torch.device("cuda"), shape, 1e-6)) or "")
    assert gdn_cuda.limits(GdnSpec(torch.device("cuda"), SHAPE, 1e-6)) is None


def test_a_lane_takes_four_columns_where_that_saves_a_wave() -> None:
    assert [gdn_cuda.columns_for(SHAPE, n, "sm_90a", 132) for n in (1, 2, 4, 5, 8)] == [2, 2, 4, 4, 2]
    wider = replace(
        SHAPE, n_v_head=64
    )  # eight sequences are 3.1 waves of blocks of two columns a lane, or 1.9 of four
    assert [gdn_cuda.columns_for(wider, 8, "sm_90a", 132, prepares=p) for p in (False, True)] == [2, 4]
    assert [gdn_cuda.columns_for(SHAPE, n, "sm_90a", 132, prepares=True) for n in (8, 12, 16, 32)] == [
        2,
        2,
        4,
        4,
    ]
