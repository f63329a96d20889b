"""Bad CUDA kernels cost a child process: this one's context lives on, and the verdicts are known the next time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from planted_cuda import VectorSpec, planted

from pyspec.cuda import checker, faults, verdicts
from pyspec.cuda.machine import bandwidth, machine

GPU = torch.device("cuda", 0)
SPEC = VectorSpec(GPU, 1000)


def test_bad_cuda_kernels_are_refused_and_the_context_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = checker.Checker({"start": 60.0, "binding": 30.0, "check": 4.0})
    monkeypatch.setattr(checker, "shared", lambda: own)
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    x = torch.arange(1000.0, device=GPU)
    reasons = dict(planted.choices(SPEC))
    own.close()
    assert reasons["wrong"] == "its doubles are no doubles"
    assert "illegal memory access" in (reasons["wild"] or "")
    assert (reasons["trapping"] or "").startswith("failed its check:")
    assert reasons["hanging"] == "its check took more than 4 s"
    assert reasons["right"] is None
    run = planted.bind(SPEC)
    assert planted.chosen(SPEC).name == "right"
    assert torch.equal(run(x), 2 * x)  # type: ignore[operator]
    planted.verdicts.clear()
    planted.decided.clear()
    began = time.perf_counter()
    assert planted.chosen(SPEC).name == "right" and time.perf_counter() - began < 0.2
    assert len(list(verdicts.folder().iterdir())) == 5


def test_a_record_is_read_with_the_wait_that_is_there_anyway() -> None:
    stream = torch.cuda.current_stream(GPU)
    reader, record = faults.Reader(GPU), faults.record(torch.device("cuda"))
    assert record.data_ptr() == reader.record.data_ptr() and all(
        host.is_pinned() for host in reader.hosts
    )
    reader.clear()
    reader.fetch()
    stream.synchronize()
    assert reader.take() is None
    torch.cuda._sleep(50_000_000)
    record.copy_(torch.tensor([1, 3, 2, 9, 4], dtype=torch.int32, device=GPU))
    began = time.perf_counter()
    reader.fetch()
    assert time.perf_counter() - began < 0.01, "fetching does not wait"
    stream.synchronize()
    assert reader.take() == faults.Fault("gdn", 2, 9, 4, faults.FaultPlace.SLOT)
    assert faults.read(GPU) is None, "taking clears"


def test_the_machine_tells_what_it_is() -> None:
    m = machine(GPU)
    assert m.gpu and m.driver and m.nvrtc and m.cuda_core and float(m.capability) >= 8
    assert bandwidth(GPU, 1 << 28) > 1e11
