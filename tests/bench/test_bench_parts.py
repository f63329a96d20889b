"""Kernels to parts, from names as profilers list them."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch.profiler
from clockwork import WIDTH, Clockwork
from torch.autograd import DeviceType

from pyspec.bench.measure import Turn
from pyspec.bench.parts import N_ROUND, add_up, by_kernel, part_of, watch_rounds

NAMES = {
    "linear": [
        "linear",
        "linear_wgmma",
        "rows",
        "rows_finish",
        "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT",
        "gemvx::kernel",
        "void cutlass::Kernel2<cutlass_80_tensorop>",
        "void cublasLt::splitKreduce_kernel<32, 16>",
        "sm90_xmma_gemm_f16f16",
    ],
    "attention": ["attend_split", "attend_merge_long", "attend_plain", "rope_kv", "void flash_fwd_kernel<Traits>"],
    "state": ["gdn_conv", "gdn_rows", "gdn_chunk_state", "mamba2_rows", "mamba2_chunk_state"],
    "other": ["Memcpy HtoD (Pinned -> Device)", "void at::native::vectorized_elementwise_kernel<4>", "rowsum", "linearise"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part, names in NAMES.items() for name in names]
)
def test_a_kernels_name_tells_its_part(part: str, name: str):
    assert part_of(name) == part


def test_parts_are_milliseconds_of_one_round():
    records = [
        (100.0, 30_100.0, "linear"),
        (40_100.0, 40_200.0, "Memset (Device)"),  # listed before an earlier kernel
        (10_000.0, 40_100.0, "rows"),  # waited for the product, then ran 10 ms
        (41_000.0, 45_000.0, "gdn_rows"),
        (42_000.0, 44_000.0, "attend_split"),  # beside it all along
    ]
    assert add_up(records, 20) == {"linear": 2.0, "attention": 0.0, "state": 0.2, "other": 0.005}
    lines = by_kernel(records, 2)
    assert lines[:2] == [
        " 15000.0 us a round,   0.5 of 30000.0,   0.0 idle before: linear after ",
        "  5000.0 us a round,   0.5 of 10000.0,   0.0 idle before: rows after linear",
    ]
    assert [line for line in lines if " 400.0 idle" in line] == [
        line for line in lines if ": gdn_rows after" in line
    ]
    assert lines[-1] == "   400.0 us a round idle" and len(lines) == 6
    assert add_up([], 0) == {"linear": 0.0, "attention": 0.0, "state": 0.0, "other": 0.0}


@contextmanager
def profile(**options: Any):
    """In place of torch's: 3 ms of products were seen."""
    times = SimpleNamespace(start=0.0, end=3000.0)
    seen = [
        SimpleNamespace(name="linear", device_type=kind, time_range=times)
        for kind in (DeviceType.CUDA, DeviceType.CPU)
    ]
    yield SimpleNamespace(events=lambda: seen)


@pytest.mark.parametrize(("n_predict", "is_enough"), [(1000 * WIDTH, True), (N_ROUND * WIDTH, False)])
def test_rounds_are_watched_while_all_streams_decode(
    monkeypatch: pytest.MonkeyPatch, n_predict: int, is_enough: bool
):
    monkeypatch.setattr(torch.profiler, "profile", profile)
    engine = Clockwork(2, device_ms=2.0)
    how = Turn(mode="plain", turn=0, n_predict=n_predict, ignore_eos=True)
    found = watch_rounds(engine, [(1, 2), (3, 4)], how)
    assert not engine.streams, "a stream was left running"
    engine.close()
    if is_enough:
        assert 3.0 / (2 * N_ROUND) < found["linear"] <= 3.0 / N_ROUND
    else:
        assert found == {}
