"""Limits of a kernel are known before it is used, and not found in a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch

from pyspec.cuda import jit
from pyspec.cuda.op import Impl, Op, limits_of
from pyspec.cuda.ops.angles.ref import AnglesSpec
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.cuda.ops.best.ref import BestSpec
from pyspec.cuda.ops.compress.ref import CompressSpec
from pyspec.cuda.ops.convolve.ref import ConvolveSpec
from pyspec.cuda.ops.embed import cuda as embed_cuda
from pyspec.cuda.ops.embed.ref import EmbedSpec
from pyspec.cuda.ops.gated_streams.ref import GatedStreamsSpec
from pyspec.cuda.ops.gdn.ref import GdnSpec
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.hadamard.ref import HadamardSpec
from pyspec.cuda.ops.index_rows.ref import IndexSpec
from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear import wgmma as linear_wgmma
from pyspec.cuda.ops.linear.ref import LinearSpec
from pyspec.cuda.ops.mamba2.ref import Mamba2Spec
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.moe import cuda as moe_cuda
from pyspec.cuda.ops.moe.ref import MoeSpec
from pyspec.cuda.ops.ngrams.ref import NgramsSpec
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec
from pyspec.cuda.ops.rope_tail.ref import RopeTailSpec
from pyspec.cuda.ops.rows.ref import RowsSpec
from pyspec.cuda.ops.short_conv.ref import ShortConvSpec
from pyspec.cuda.ops.short_conv.shape import ShortConvShape
from pyspec.cuda.ops.sparse_attend.ref import SparseSpec
from pyspec.cuda.ops.streams.ref import StreamsSpec
from pyspec.gguf import GGMLType
from pyspec.slots.kv_types import F16, F32, Q8_0, KvFormat

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def _an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    missing = jit.missing
    monkeypatch.setattr(jit, "missing", lambda device: None if device == GPU else missing(device))


@dataclass(frozen=True)
class Sized:
    device: torch.device
    n: int


def test_a_small_check_speaks_for_a_large_spec_within_the_limits() -> None:
    def limits(spec: Sized) -> str | None:
        return None if spec.n <= 100 else f"{spec.n} rows; the kernel takes up to 100"

    asked: list[int] = []

    def check(launch: object, reference: object, spec: Sized) -> None:
        asked.append(spec.n)

    own = Impl("own", lambda spec: None, limits)
    op: Op[Sized, None] = Op("sized", Impl("torch", lambda spec: None), [own], check)
    small = Sized(CPU, 3)
    assert op.has_own(Sized(CPU, 100), checked_as=small) and asked == [3]
    assert not op.has_own(Sized(CPU, 101), checked_as=small) and asked == [3]
    refusing = replace(op, check=lambda *_: "it is wrong", verdicts={}, _decided={})
    assert not refusing.has_own(Sized(CPU, 100), checked_as=small)


def test_products_say_how_many_rows_of_weights_they_take() -> None:
    spec = LinearSpec(GPU, GGMLType.Q8_0, 248_320, 5120)
    for limits, most in ((linear_cuda.limits, 1 << 21), (linear_wgmma.limits, 1 << 22)):
        assert limits(spec) is None
        assert limits(replace(spec, n_out=most)) is None
        assert f"takes up to {most} rows" in (limits(replace(spec, n_out=most + 1)) or "")
    assert "kernel takes up to" in (
        linear_wgmma.limits(replace(spec, n_out=1 << 22, n_in=1 << 16)) or ""
    )


def test_experts_say_how_many_they_may_be() -> None:
    spec = MoeSpec(GPU, 8, 2048, 512, "swiglu", GGMLType.Q8_0, GGMLType.Q8_0, n_expert=1024)
    assert moe_cuda.limits(spec) is None
    assert "8 of 1025 experts" in (moe_cuda.limits(replace(spec, n_expert=1025)) or "")
    assert repr(spec) == repr(replace(spec, n_expert=1025)), "verdicts are of shapes"


H, CODE = torch.float16, torch.int8
V3 = AttendSpec(GPU, 128, 1, 576, 192**-0.5, n_value=512)
GRAMS = NgramsSpec(GPU, 3, (7, 9, 11), (101, 103, 107, 109), (0, 101, 204, 311), 7, 4, 24, 4, 1e-6)
MAMBA2 = [Mamba2Spec(GPU, Mamba2Shape(h, 64, 8, n, 4)) for h, n in ((128, 128), (64, 128), (128, 96))]
CSA = CompressSpec(GPU, 4, 64, True, 16, 1e-6, H)
TAKEN: dict[str, list[Any]] = {
    "angles": [AnglesSpec(GPU)],
    "attend": [AttendSpec(GPU, 24, 4, 256, 1.0), AttendSpec(GPU, 8, 2, 64, 1.0, KvFormat.named("q8_0", "q4_0")), V3],
    "best": [BestSpec(GPU)],
    "compress": [
        CSA, replace(CSA, dim=32, kv=torch.float32), replace(CSA, dim=96, n_rot=96, kv=torch.float8_e4m3fn),
        *(replace(spec, dim=512, n_rot=64) for spec in (CSA, CompressSpec(GPU, 128, 32, False, 32, 1e-6, torch.bfloat16))),
        CompressSpec(GPU, 128, 32, False, 32, 1e-6, torch.bfloat16), replace(CSA, ratio=6, overlaps=False), replace(CSA, overlaps=False, weighed=False),
        replace(CSA, overlaps=False, n_rot=2, normed=False),
    ],
    "convolve": [ConvolveSpec(GPU, 5120, 4, 64)],
    "embed": [EmbedSpec(GPU, type, 512) for type in embed_cuda.TYPES],
    "gated_streams": [GatedStreamsSpec(GPU, 4, 64, 1e-6)],
    "gdn": [GdnSpec(GPU, GdnShape(16, 48, 128, 4, 10240), 1e-6), GdnSpec(GPU, GdnShape(1, 4, 128, 4, 128 * 6), 1e-6)],
    "hadamard": [HadamardSpec(GPU, 256, 256)],
    "index_rows": [IndexSpec(GPU, 64, 128, 512, 4, H, 64)],
    "linear": [LinearSpec(GPU, GGMLType.Q8_0, 64, 64)],
    "mamba2": MAMBA2,
    "moe": [MoeSpec(GPU, 8, 2048, 512, "swiglu", GGMLType.Q8_0, GGMLType.Q8_0)],
    "ngrams": [GRAMS],
    "norms": [NormsSpec(GPU, 5120, 1e-6)],
    "rope_kv": [RopeKvSpec(GPU, 1, 1, 64, 64, True, False, False, 1e-6)],
    "rope_tail": [RopeTailSpec(GPU, 64, 16, True, 1e-6)],
    "rows": [RowsSpec(GPU, 256)],
    "short_conv": [ShortConvSpec(GPU, ShortConvShape(2048, 3))],
    "sparse_attend": [SparseSpec(GPU, 64, 512, 128, 4, H, 64, 1e-6)],
    "streams": [StreamsSpec(GPU, 4, 64, 20, 1e-6, 1e-6)],
}  # fmt: skip
"""What the CUDA implementation of an op takes on an H200."""
NO_SINKS, WIDE = "one head, no sinks and no cap", "keys are 580 wide; the kernel takes multiples of 8"
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "attend": [({"head_dim": 80}, "heads are 80 wide"), ({"n_head": 7, "n_kv_head": 2}, "7 heads are no multiple of 2")],
    "compress": [
        ({"overlaps": False} | change, says)
        for change, says in (({"kv": CODE}, "q8_0"), ({"dim": 48}, "48 dim"), ({"dim": 544}, "544 dim"), ({"n_rot": 0}, "0 of"), ({"ratio": 7, "dim": 32}, "7 tokens"))
    ],
    "convolve": [({"n": 60, "n_tap": 2, "group": 6}, "groups of 6 of 60"), ({"n": 64, "n_tap": 17, "group": 8}, "17 taps")],
    "embed": [({"type": GGMLType.IQ4_XS}, "IQ4_XS"), ({"type": GGMLType.F16, "n_in": 6}, "6 columns")],
    "gated_streams": [({"n": 66}, "66 columns"), ({"n_stream": 9}, "9 streams")],
    "gdn": [
        ({"shape": GdnShape(2, 4, 64, 4, 512)}, "states are 64 wide"), ({"shape": GdnShape(2, 4, 128, 3, 1024)}, "3 taps"),
        ({"shape": GdnShape(2, 3, 128, 4, 896)}, "3 value heads are no multiple of 2 key heads"),
        ({"shape": GdnShape(1, 3, 128, 4, 128 * 5)}, "3 value heads"),  # gates lie behind them in a row, which would not begin at 16 bytes
    ],
    "hadamard": [({"dim": 80, "n": 16}, "heads are 80 wide")],
    "index_rows": [({"kv": CODE}, "torch.int8"), ({"dim": 48}, "48 dim"), ({"dim": 160}, "160 dim"), ({"n_head": 1024}, "1024 heads")],
    "mamba2": [
        ({"shape": Mamba2Shape(*of, n_conv)}, says)
        for *of, n_conv, says in (
            (128, 64, 8, 128, 3, "3 taps"), (128, 48, 8, 128, 4, "heads are 48 wide"), (128, 64, 8, 256, 4, "states are 256 wide"),
            (128, 64, 8, 80, 4, "states are 80 wide"), (6, 64, 3, 128, 4, "6 heads of 64"), (8, 64, 1, 32, 4, "1 groups of 32"),
        )
    ],
    "ngrams": [({"n": 26}, "26 columns"), ({"sizes": (1,) * 600}, "600 heads")],
    "norms": [({"n": 66}, "66 columns"), ({"n": 16388}, "16388 columns")],
    "rope_tail": [({"dim": 66}, "66 wide"), ({"n_rot": 0}, "0 of 64"), ({"n_rot": 7}, "7 of 64")],
    "short_conv": [
        ({"shape": ShortConvShape(2050, 3)}, "2050 channels; the kernel takes multiples of 4"),
        ({"shape": ShortConvShape(2048, 6)}, "6 taps; the kernel takes 2 to 5"), ({"shape": ShortConvShape(2048, 1)}, "1 taps"),
    ],
    "sparse_attend": [
        ({"kv": CODE}, "torch.int8"), ({"dim": 48}, "48 wide"), ({"dim": 640}, "640 wide"), ({"window": 0}, "0 tokens"), ({"dim": 32, "n_rot": 34}, "34 of 32"),
    ],
    "streams": [({"n_stream": 2}, "2 streams"), ({"n": 66}, "66 columns"), ({"n_iter": 0}, "0 steps")],
}  # fmt: skip
"""By op: a change of what it takes, and what is said of it."""
LATENT = [
    *(({name: value}, NO_SINKS) for name, value in (("n_kv_head", 2), ("has_sinks", True), ("cap", 50.0))),
    ({"kv": KvFormat.both(F32)}, "keys that are values are f32"), ({"kv": KvFormat(F16, Q8_0)}, "keys that are values are f16/q8_0"),
    ({"head_dim": 580}, WIDE), ({"n_value": 500}, "values are 500 wide; the kernel takes multiples of 16"),
    ({"head_dim": 2048}, "16 queries and 64 keys of 2048 do not fit 228 KB"),
]  # fmt: skip


def of_cuda(op: str) -> Callable[[Any], str | None]:
    return limits_of(import_module(f"pyspec.cuda.ops.{op}.cuda"))


@pytest.mark.parametrize("op", TAKEN)
def test_what_it_takes_runs_on_gpus_only(op: str) -> None:
    for spec in TAKEN[op]:
        assert of_cuda(op)(spec) is None, spec
        assert of_cuda(op)(replace(spec, device=CPU)) == "runs on NVIDIA GPUs only"


@pytest.mark.parametrize(
    ("op", "spec", "change", "says"),
    [
        *((op, TAKEN[op][0], *row) for op, rows in REFUSED.items() for row in rows),
        *(("attend", V3, *row) for row in LATENT),
    ],
)
def test_what_it_can_not_do_is_refused_with_its_numbers(
    op: str, spec: Any, change: dict[str, Any], says: str
) -> None:
    assert says in (of_cuda(op)(replace(spec, **change)) or "")


def test_wgmma_is_for_gpus() -> None:
    assert limits_of(linear_wgmma)(LinearSpec(CPU, GGMLType.Q8_0, 64, 64)) == "runs on NVIDIA GPUs only"
