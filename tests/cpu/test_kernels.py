"""Calls of C++ kernels, their tapes, and the pool of threads."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from pyspec.cpu import build, kernels, tensors
from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cpu.tape import CannotRecord, Recorded, TapeMemory
from pyspec.cuda.graph import N_TAPE, Graphed
from pyspec.slots.batch import Batch

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
AXPY = CpuKernel("pyspec_axpy", "qqqd")


def axpy(x: Tensor, y: Tensor, a: float = 1.0) -> Tensor:
    AXPY(x, y, x.numel(), a)
    return y


@pytest.fixture(params=[1, 2, 5])
def n_thread(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("n", [1, 7, 64, 100_003])
def test_a_kernel_reaches_every_value_once(n: int, n_thread: int) -> None:
    x, y = torch.randn(n), torch.zeros(n)
    for _ in range(20):
        axpy(x, y.zero_(), 2.0)
        assert torch.equal(y, 2 * x)


def test_several_threads_call_at_once() -> None:
    """The pool serves one of them; the others run their loops alone."""
    x, wrong = torch.randn(20_000), []

    def call() -> None:
        torch.set_num_threads(4)
        y = torch.zeros_like(x)
        for _ in range(300):
            axpy(x, y.zero_())
            if not torch.equal(x, y):
                wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_forked_child_has_threads_of_its_own(n_thread: int) -> None:
    """numpy fills and compares: torch's own threads do not survive a fork."""
    x, y = np.arange(50_000, dtype=np.float32), np.zeros(50_000, np.float32)
    given = torch.from_numpy(x), torch.from_numpy(y)
    axpy(*given)
    child = os.fork()
    if not child:
        signal.alarm(60)
        y[:] = 0
        axpy(*given)
        os._exit(int(not np.array_equal(x, y)))
    assert os.waitpid(child, 0)[1] == 0


def test_a_recording_runs_nothing_and_a_replay_reads_memory_anew() -> None:
    x, y = torch.ones(10), torch.zeros(10)
    recorded = Recorded(lambda: axpy(x, y), TapeMemory())
    assert not y.any()
    for i in range(3):
        assert torch.equal(recorded.replay(), torch.full((10,), float(i + 1)))
    x.fill_(5.0)
    assert torch.equal(recorded.replay(), torch.full((10,), 8.0))


def chain(x: Tensor) -> Tensor:
    """502 x, by 501 sums that need two rows at a time."""
    y = tensors.add(x, x)
    for _ in range(500):
        y = tensors.add(y, x)
    return y


def test_memory_of_a_recording_is_used_again() -> None:
    x, memory = torch.arange(1000.0)[None], TapeMemory()
    recorded = Recorded(lambda: chain(x), memory)
    assert memory.n_bytes < 3 << 20, "500 rows of 4 kB would take more"
    for _ in range(3):
        assert torch.equal(recorded.replay(), 502 * x)


def test_recordings_over_one_memory_take_as_much_as_the_largest_and_do_not_mix() -> None:
    memory, sizes = TapeMemory(), [300_000, 1, 70_000, 299_999, 1000]
    xs = [torch.arange(float(n))[None] % 100 for n in sizes]
    taken, recorded = [], []
    for x in xs:
        recorded.append(Recorded(lambda x=x: chain(x), memory))
        taken.append(memory.n_bytes)
    assert taken == taken[:1] * len(sizes)
    for i in (0, 1, 2, 3, 4, 3, 0, 4, 2, 1, 0):
        assert torch.equal(recorded[i].replay(), 502 * xs[i])


def test_results_of_dropped_recordings_do_not_come_back_into_later_ones() -> None:
    """A tape may end while another one is recorded; its pieces are not the new one's."""
    memory, x = TapeMemory(), torch.arange(1000.0)[None]
    old = [Recorded(lambda: chain(x), memory)]

    def run() -> Tensor:
        y = tensors.scaled(x, 2.0)
        old.clear()
        return tensors.add(tensors.scaled(x, 3.0), y)

    new = Recorded(run, memory)
    assert torch.equal(new.replay(), 5 * x) and torch.equal(new.replay(), 5 * x)


@pytest.fixture
def _no_pages() -> Iterator[None]:
    kernels.here.kept.clear()
    yield
    kernels.here.kept.clear()


@pytest.mark.usefixtures("_no_pages")
def test_large_outputs_use_the_pages_of_those_that_are_gone() -> None:
    """Those of a smaller one, too; memory that is still read stays, and one piece grows in place of many."""
    n = kernels.LARGE // 4

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    first, other = empty(n, 3).fill_(1.0), empty(3 * n)
    part, at = first[5:7], first.data_ptr()
    assert other.data_ptr() != at and not kernels.here.kept
    del first
    assert not kernels.here.kept and bool((part == 1.0).all()), "a view keeps it"
    del part, other
    assert len(kernels.here.kept) == 2
    before = faults()
    for rows in (3, 2, 1, 3):
        y = empty(n, rows, dtype=torch.int16 if rows == 2 else torch.float32)
        assert y.shape == (n, rows) and y.data_ptr() % 4096 == 0
        y.fill_(3)
        del y
    assert faults() - before < 100
    larger = empty(4 * n)
    assert len(kernels.here.kept) == 1, "it stands in place of one that was too small"
    del larger
    assert len(kernels.here.kept) == 2 and empty(10).data_ptr() != 0


@pytest.mark.usefixtures("_no_pages")
def test_forwards_of_many_rows_take_no_new_pages() -> None:
    """glibc gives back blocks of more than 32 MiB: eight prompts at once were slower than one."""
    from pyspec.cuda.ops.linear.cpu import CpuLinearSpec, bind, prepared, sample
    from pyspec.gguf import GGMLType

    raw = sample(GGMLType.Q8_0, 20_000, 32, torch.Generator().manual_seed(1))
    product = bind(CpuLinearSpec(torch.device("cpu"), GGMLType.Q8_0))

    def forward() -> None:
        out = empty(512, 20_000)  # 39 MiB
        product(prepared(torch.ones(512, 32), None, whole=True), raw, out, 1.0, None)

    forward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        forward()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.zero_(),
        lambda x: float(x.sum()),
        lambda x: x.clone(),
        lambda x: x.view(2, 2).T.reshape(-1),
        lambda x: x[::2].contiguous(),
    ],
)
@pytest.mark.parametrize("infers", [False, True])
def test_what_a_replay_would_not_repeat_cannot_be_recorded(compute: object, infers: bool) -> None:
    x = torch.ones(4)
    with pytest.raises(CannotRecord, match="aten::"), torch.inference_mode(infers):
        Recorded(lambda: compute(x), TapeMemory())  # type: ignore[operator]
    assert kernels.here.tape is None, "the recording is over"
    assert torch.equal(axpy(x, torch.zeros(4)), torch.ones(4)), "and calls run again"


def test_first_recordings_of_a_shape_are_counted_and_those_that_were_dropped_are_not_first_again() -> (
    None
):
    """A round's time is not its size's where it recorded a forward; one that is recorded again and again costs that each time."""
    x = torch.ones(5, 3)

    def scaled(batch: Batch) -> Tensor:
        return tensors.scaled(x, float(batch.n_row))

    forward = Graphed(scaled)

    def run(n_row: int) -> int:
        before = kernels.here.n_first
        shape = {"bucket": n_row, "n_row": n_row, "n_place": 3, "out_rows": range(n_row), "single": False}  # fmt: skip
        assert torch.equal(forward(SimpleNamespace(tokens=x, **shape)), n_row * x)  # type: ignore[arg-type]
        return kernels.here.n_first - before

    assert [run(n) for n in (3, 5, 3, 10, 5)] == [1, 1, 0, 1, 0]
    assert sum(run(n) for n in range(100, 101 + N_TAPE)) == 1 + N_TAPE
    assert [run(3), run(3)] == [0, 0], "it was dropped and recorded again"


def test_views_may_be_recorded() -> None:
    x = torch.arange(24.0).view(2, 12)

    def run() -> Tensor:
        left, right = x.split([4, 8], 1)
        return tensors.side_by_side(
            [right.unflatten(1, (2, 4)).flatten(1)[:, 2:6], left, empty(2, 8)[:, :1]]
        )

    assert torch.equal(Recorded(run, TapeMemory()).replay()[:, :8], torch.cat([x[:, 6:10], x[:, :4]], 1))


@pytest.mark.parametrize("n", [1, 9, 70])
def test_operations_between_kernels_are_torchs(n: int) -> None:
    x, y, bias = torch.randn(n, 21) * 9, torch.randn(n, 40)[:, 3:24], torch.randn(21)
    rows = torch.randint(0, n, (13,))
    far, factors, heads = rows * 7, torch.rand(n), x.view(n, 3, 7)
    for call in (
        lambda: tensors.add(x, y),
        lambda: tensors.add(x, bias),
        lambda: tensors.scaled(y, 0.3),
        lambda: tensors.picked(y, rows),
        lambda: tensors.side_by_side([x, y, x]),
        lambda: tensors.capped(x, 5.0),
        lambda: tensors.next_positions(rows),
        lambda: tensors.query_factors(far, 0.1, 16, 1),
        lambda: tensors.times_rows(heads, factors),
        *(partial(tensors.gate_times, y, x, act) for act in tensors.GATE_ACTS),
        *(partial(tensors.gate_times, y[:, 4:7], x, act) for act in tensors.GATE_ACTS),
    ):
        want = call()
        assert torch.allclose(Recorded(call, TapeMemory()).replay(), want, atol=2e-6, rtol=2e-6)


def test_without_a_compiler_the_reason_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    with pytest.raises(build.CannotBuild, match="no C\\+\\+ compiler"):
        build.build("plain")


def test_a_compilers_error_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    with pytest.raises(build.CannotBuild, match=r"failed: .*no-such-option"):
        build.build("plain", extra=("--no-such-option",))


def test_libraries_of_other_sources_go_when_they_are_old(tmp_path: Path) -> None:
    name = build.file_name("plain")
    other = name.rsplit("-", 1)[0] + "-0123456789abcdef.so"
    for each in (name, other, "libpyspec-elsewhere-plain-1.so"):
        (tmp_path / each).touch()
    build.drop_old(tmp_path, "plain", 1)
    assert len(list(tmp_path.iterdir())) == 3, "they are new"
    os.utime(tmp_path / other, (0, 0))
    build.drop_old(tmp_path, "plain", 1)
    assert {p.name for p in tmp_path.iterdir()} == {name, "libpyspec-elsewhere-plain-1.so"}
