"""attend.cu for every architecture, and its launcher's refusals. Needs a compiler, no GPU."""

import random

import pytest
import torch
from machines import compiled

from pyspec.cuda import jit
from pyspec.cuda.ops.attend import cuda as attend_cuda
from pyspec.cuda.ops.attend import prompt as attend_prompt
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.slots.arena import bucket_of
from pyspec.slots.batch import Seq, SeqMode
from pyspec.slots.kv_types import PLAIN, TYPES, KvFormat, KvType

pytest.importorskip("cuda.core")


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", jit.ARCHS)
def test_kernels_compile_without_spills_in_the_registers_their_blocks_leave(arch: str) -> None:
    dim, n_tile, kv = (256, 1, "f16") if arch in ("sm_80", "sm_100a") else (256, 6, "bf16")
    for cap in (0.0, 50.0):
        assert_fits(attend_cuda.shape_for(dim, n_tile, KvFormat.named(kv), arch, cap=cap))


@pytest.mark.slow
@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize(
    "kv", [("q8_0",), ("f8_e4m3",), ("q4_0",), ("q5_1",), ("q8_0", "q4_0"), ("bf16", "q4_1")]
)
@pytest.mark.parametrize("arch", jit.ARCHS)
def test_kernels_that_read_bytes_compile_without_spills_in_the_registers_their_blocks_leave(
    arch: str, kv: tuple[str, ...]
) -> None:
    """With a sink, and in the builds that have least registers to spare."""
    for dim, n_tile in ((64, 3), (128, 3), (256, 1)):
        assert_fits(attend_cuda.shape_for(dim, n_tile, KvFormat.named(*kv), arch, has_sinks=True))


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["f16", "bf16"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_four_blocks_of_few_columns_compile_without_spills(arch: str, kv: str) -> None:
    spec = AttendSpec(torch.device("cpu"), 32, 16, 256, 1.0, KvFormat.named(kv), has_sinks=True)
    shape = attend_cuda.narrow_for(spec, arch)
    assert shape is not None and shape.resident == 4
    assert_fits(shape)


def test_blocks_of_few_columns_are_for_heads_that_fill_them_on_large_multiprocessors() -> None:
    def of(*heads: int, kv: str = "f16", arch: str = "sm_90a") -> attend_cuda.AttendBuild | None:
        spec = AttendSpec(torch.device("cpu"), *heads, 1.0, KvFormat.named(kv))
        return attend_cuda.narrow_for(spec, arch)

    assert of(32, 16, 256) is not None and of(16, 4, 256, kv="bf16") is not None
    refused = [
        of(24, 4, 256),
        of(32, 16, 128),
        of(32, 16, 256, kv="q8_0"),
        of(32, 16, 256, arch="sm_86"),
    ]
    assert refused == [None] * 4


def assert_fits(shape: attend_cuda.AttendBuild) -> None:
    found = compiled("attend", shape.arch, shape.defines())
    assert set(found) == {"attend_split", "attend_merge_thin", "attend_merge_long", "attend_merge_wide"}
    assert found["attend_split"].registers * 32 * shape.warps * shape.blocks <= 65536, (shape, found)


@pytest.mark.slow
@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("kv", ["bf16", "q8_0", "f8_e4m3"])
@pytest.mark.parametrize("n_tile", attend_cuda.ITS_TILES)
def test_kernels_of_the_widest_heads_compile_without_spills(n_tile: int, kv: str) -> None:
    shape = attend_cuda.shape_for(attend_cuda.WIDEST, n_tile, KvFormat.named(kv), "sm_90a")
    assert_fits(shape)
    assert shape.shared_bytes <= attend_cuda.room_of("sm_90a") - 1024


def test_small_gpus_run_the_widest_heads_in_the_plain_kernel() -> None:
    wide = AttendSpec(torch.device("cpu"), 8, 1, attend_cuda.WIDEST, 1.0)
    assert attend_cuda.tiles_of(wide, "sm_90a") == attend_cuda.ITS_TILES
    assert attend_cuda.tiles_of(wide, "sm_86") == () == attend_cuda.tiles_of(wide, "sm_80")


@pytest.mark.parametrize("arch", jit.ARCHS)
def test_shared_memory_of_every_build_fits_the_multiprocessor(arch: str) -> None:
    room = attend_cuda.room_of(arch)
    for dim in attend_cuda.DIMS:
        for n_tile in attend_cuda.N_TILES:
            for kv in map(KvFormat.both, TYPES.values()):
                shape = attend_cuda.shape_for(dim, n_tile, kv, arch)
                assert shape.shared_bytes <= room - 1024, shape
                assert room > 100 * 1024 or shape.shared_bytes <= 99 * 1024, shape


@pytest.mark.parametrize("of", TYPES.values(), ids=str)
def test_the_plain_kernel_compiles_for_every_type(of: KvType) -> None:
    for cap in (0.0, 50.0):
        spec = AttendSpec(torch.device("cpu"), 6, 2, 96, 1.0, KvFormat(of, TYPES["q5_1"]), cap=cap)
        compiled("attend_plain", "sm_80", attend_cuda.plain_defines(spec))


@pytest.mark.parametrize(
    ("columns", "n_tile"),
    [(1, 1), (6, 1), (16, 2), (24, 3), (48, 6), (64, 4), (96, 6), (256, 6), (40, 6)],
)
def test_columns_are_packed_into_the_fewest_and_then_narrowest_tiles(columns: int, n_tile: int) -> None:
    assert attend_cuda.n_tile_for(columns) == n_tile


def test_unsupported_shapes_are_refused_with_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        attend_cuda.limits(AttendSpec(torch.device("cpu"), 8, 2, 64, 1.0)) == "runs on NVIDIA GPUs only"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = torch.device("cuda")
    assert attend_cuda.limits(AttendSpec(gpu, 24, 4, 256, 1.0)) is None
    assert "heads are 80 wide" in (attend_cuda.limits(AttendSpec(gpu, 8, 2, 80, 1.0)) or "")
    mixed = AttendSpec(gpu, 8, 2, 64, 1.0, KvFormat.named("q8_0", "q4_0"))
    assert attend_cuda.limits(mixed) is None
    assert "7 heads are no multiple of 2" in (attend_cuda.limits(AttendSpec(gpu, 7, 2, 64, 1.0)) or "")


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("heads", [(24, 4, 256), (32, 2, 128), (4, 4, 64), (6, 2, 64), (64, 1, 256)])
def test_what_is_planned_for_partial_sums_is_enough_for_every_batch(heads: tuple[int, int, int]) -> None:
    """Of slots that decode, verify and read prompts at once, and of graphs; and it is not far more than that."""
    rng, n_sm, arch = random.Random(1), 132, "sm_90a"
    spec = AttendSpec(torch.device("cpu"), *heads, 1.0)
    group, found = heads[0] // heads[1], []
    for n_seq, n_key, width in ((1, 2048, 4), (8, 24_600, 7), (8, 2600, 17), (3, 262_144, 1)):
        graph_row = bucket_of(n_seq * width) or 128
        planned = attend_cuda.most_floats(
            spec, n_seq, n_key, max(width, -(-graph_row // n_seq)), arch, n_sm
        )
        most = 0
        for i in range(3000):
            kept = [rng.random() < rng.choice((0.1, 0.9)) for _ in range(n_seq)]
            seqs = [
                Seq(
                    s,
                    0,
                    [0] * (rng.randint(1, 400) if keep else width),
                    mode=SeqMode.KEEP if keep else SeqMode.VERIFY,
                )
                for s, keep in enumerate(kept)
            ]
            ends = [rng.choice((n_key, rng.randint(q.width, n_key))) for q in seqs]
            own = [
                (q.width, end)
                for q, end in zip(seqs, ends, strict=True)
                if not attend_prompt.is_long(q, end)
            ]
            shape = attend_cuda.shape_for(
                heads[2],
                attend_cuda.n_tile_for(max((w for w, _ in own), default=1) * group),
                PLAIN,
                arch,
            )
            tiles = [(-(-w * group // shape.columns), end) for w, end in own]
            if i == 0:  # a graph
                shape = attend_cuda.shape_for(heads[2], 6, PLAIN, arch)
                tiles = [(graph_row * group // shape.columns + n_seq, n_key)]
            n_item = attend_cuda.n_items(spec, shape.columns, n_sm * shape.resident, tiles)
            most = max(most, n_item * attend_cuda.n_float(spec, shape.columns))
        found.append(most / planned)
    assert all(0.2 < part <= 1 for part in found), found


def test_nothing_is_planned_for_what_needs_no_partial_sums() -> None:
    assert attend_cuda.workspace_bytes(AttendSpec(torch.device("cpu"), 8, 2, 64, 1.0), 8, 4096, 4) == 0
