"""The thread of the lane (native/moe_lane.cpp) with a card that is none: this process, or threads in C++, which a sanitizer watches."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pyspec.cpu import build, kernels
from pyspec.cuda.ops.moe import cpu as moe_cpu
from pyspec.cuda.ops.moe.lane import HostLane, LaneJob
from pyspec.cuda.ops.moe.ref import MoeSpec
from pyspec.gguf import GGMLType as G

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
CPU = torch.device("cpu")
SPEC = MoeSpec(CPU, 3, 512, 288, "swiglu", G.Q4_K, G.Q8_0)
N_EXPERT = 6


def experts(spec: MoeSpec = SPEC, seed: int = 3) -> moe_cpu.CpuExperts:
    made = moe_cpu.stacks_for(spec, N_EXPERT, spec.n_in, spec.n_ff, torch.Generator().manual_seed(seed))
    return moe_cpu.CpuExperts(spec, made)


def send(job: LaneJob, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> int:
    """As lane_split does. The number."""
    n_row = len(x)
    job.x[:n_row], job.ids[:n_row], job.weights[:n_row] = x, ids, weights
    number = int(job.head[0]) + 1
    job.head[1:4] = torch.tensor([layer, n_row, int((ids >= 0).sum())])
    job.head[0] = number
    return number


def answer(job: LaneJob, number: int, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while int(job.head[16]) != number:
        if time.monotonic() > end:
            return False
        time.sleep(0)
    return True


def drawn(n_row: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.rand(n_row, N_EXPERT).argsort(-1)[:, :3].int()
    ids[torch.rand(n_row, 3) < 0.5] = -1
    return 0.3 * torch.randn(n_row, SPEC.n_in), ids.contiguous(), torch.rand(n_row, 3)


def test_answers_have_the_bits_of_experts_on_the_cpu() -> None:
    lane, counts = HostLane(CPU, 2), torch.zeros(2, 2, dtype=torch.int64)
    runs = [experts(), experts(seed=4)]
    layers = [lane.add(run, 3, own) for run, own in zip(runs, counts, strict=True)]
    job, misses = lane.job(SPEC.n_in, 3), [0, 0]
    for i in range(150):
        given, at = drawn(1 + i % 9), i % 2
        lane.wake()
        assert answer(job, send(job, layers[at].number, *given))
        assert torch.equal(job.y[: len(given[0])], runs[at](*given))
        misses[at] += int((given[1] >= 0).sum())
    assert counts.tolist() == [[n, 75] for n in misses]


def test_a_thread_that_sleeps_comes_for_a_job_that_nobody_announces() -> None:
    lane, run, counts = HostLane(CPU, 1), experts(), torch.zeros(2, dtype=torch.int64)
    layer, job, given = lane.add(run, 3, counts), lane.job(SPEC.n_in, 3), drawn(2)
    for pause in (0.03, 1.2):  # it naps, and it dozes
        time.sleep(pause)
        assert answer(job, send(job, layer.number, *given), 5.0)


def test_each_layer_has_the_threads_of_the_load_that_bound_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the processors stays for the engine."""
    monkeypatch.setattr("pyspec.cuda.ops.moe.lane.n_cores", lambda: 4)
    lane, run = HostLane(CPU), experts()
    job, given, found = lane.job(SPEC.n_in, 3), drawn(4), []
    for n in (1, 3, 9):
        with kernels.threads(n):
            layer = lane.add(run, 3, torch.zeros(2, dtype=torch.int64))
        assert answer(job, send(job, layer.number, *given)) and torch.equal(job.y[:4], run(*given))
        found.append(layer.n_thread)
    assert found == [1, 3, 3]


def test_experts_that_are_gone_are_not_read_and_the_lane_goes_on() -> None:
    lane, counts = HostLane(CPU, 1), torch.zeros(2, 2, dtype=torch.int64)
    gone, kept = (lane.add(experts(), 3, own) for own in counts)
    number, job, given = gone.number, lane.job(SPEC.n_in, 3), drawn(2)
    del gone
    other = lane.add(experts(replace(SPEC, n_used=2)), 2, torch.zeros(2, dtype=torch.int64))
    for wrong in (77, other.number):  # of another shape, in the place that was free
        assert not answer(job, send(job, wrong, *given), 0.1)
    assert other.number == number
    assert answer(job, send(job, kept.number, *given))
    del other


def test_an_end_waits_for_the_job_it_is_at() -> None:
    for i in range(30):
        lane, counts = HostLane(CPU, 2), torch.zeros(2, dtype=torch.int64)
        layer, job, given = lane.add(experts(), 3, counts), lane.job(SPEC.n_in, 3), drawn(9)
        number = send(job, layer.number, *given)
        time.sleep(0.0002 * (i % 4))
        lane.stop()
        assert int(job.head[16]) == number * int(counts[1]), "answered as a whole, or not at all"
        del lane, layer


def test_two_threads_wake_it_while_layers_come_and_go() -> None:
    lane, counts = HostLane(CPU, 1), torch.zeros(2, dtype=torch.int64)
    run = experts()
    layer, job, over = lane.add(run, 3, counts), lane.job(SPEC.n_in, 3), threading.Event()

    def change() -> None:
        while not over.is_set():
            lane.add(run, 3, torch.zeros(2, dtype=torch.int64))
            lane.wake()

    threads = [threading.Thread(target=change) for _ in "ab"]
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            given = drawn(3)
            assert answer(job, send(job, layer.number, *given))
            assert torch.equal(job.y[:3], run(*given))
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_thousands_of_jobs_without_a_race(sanitizer: str, tmp_path: Path) -> None:
    """Numbers that wrap around, layers that come and go, late cards, ends in the middle of a job: lane_card.cpp."""
    cxx, here = build.compiler(), Path(__file__).parent
    assert cxx is not None
    sources = [build.SOURCES / f"{name}.cpp" for name in ("moe", "moe_lane", "pool", "plain", "linear")]
    options = build.sets()[build.isas()[0]][0].split()
    command = [cxx, *options, *build.OPTIONS, "-O1", "-g", f"-fsanitize={sanitizer}"]
    program = tmp_path / "card"
    whole = [*command, str(here / "lane_card.cpp"), *map(str, sources), "-o", str(program)]
    subprocess.run(whole, check=True, timeout=600)
    env = dict(os.environ) | {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [program, "1500"], capture_output=True, text=True, timeout=280, env=env, check=False
    )
    assert done.returncode == 0 and done.stdout == "right\n", done.stdout + done.stderr[-4000:]
