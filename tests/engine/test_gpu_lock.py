"""Two engines of one process: the launches of each stay together, and neither waits for the other's listeners."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pyspec import synth
from pyspec.cuda.context import GpuLock, gpu_lock
from pyspec.device import worker
from pyspec.engine.api import Engine
from pyspec.request import Delta, Event


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth.write("qwen35", tmp_path_factory.mktemp("locks") / "tiny.gguf", quant="f32", tiny=True)


@contextmanager
def two(
    model: Path, locks: Callable[[], GpuLock], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Engine]]:
    """Engines that defer as on a GPU, each with the lock it is given."""
    monkeypatch.setattr(worker, "gpu_lock", lambda device: locks())
    with (
        Engine.load(model, None, np=2, warm_up=False) as a,
        Engine.load(model, None, np=2, warm_up=False) as b,
    ):
        for engine in (a, b):
            engine.loop.committer.defers = True
        yield [a, b]


def most_at_once(engines: list[Engine]) -> int:
    """Forwards that ran at the same time while both engines answered."""
    inside, most, count = 0, 0, threading.Lock()

    def watched(run: Callable[..., object]) -> Callable[..., object]:
        def forward(*args: object) -> object:
            nonlocal inside, most
            with count:
                inside += 1
                most = max(most, inside)
            time.sleep(0.002)
            out = run(*args)
            with count:
                inside -= 1
            return out

        return forward

    for engine in engines:
        engine.loop.worker.forward = watched(engine.loop.worker.forward)  # type: ignore[assignment]
    threads = [
        threading.Thread(target=lambda e=e: e.generate([1, 2, 3], max_tokens=40)) for e in engines
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return most


def test_forwards_of_two_engines_do_not_mix(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = GpuLock(threading.RLock())
    with two(model, lambda: shared, monkeypatch) as engines:
        assert most_at_once(engines) == 1
    with two(model, lambda: GpuLock(threading.RLock()), monkeypatch) as engines:
        assert most_at_once(engines) == 2  # or this test could not fail


def test_a_listener_may_wait_for_another_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, said = GpuLock(threading.RLock()), []
    with two(model, lambda: shared, monkeypatch) as (a, b):
        over = threading.Event()

        def listen(event: Event) -> None:
            if isinstance(event, Delta) and not said:
                said.append(b.generate([4, 5], max_tokens=8, ignore_eos=True).tokens)
                over.set()

        a.submit(a.request([1, 2, 3], max_tokens=20), listen)
        assert over.wait(30)
    assert len(said[0]) == 8


def test_a_lock_is_the_devices_and_is_held_again_after_a_pause() -> None:
    mine, order = GpuLock(threading.RLock()), []

    def other() -> None:
        with mine:
            order.append("other")

    thread = threading.Thread(target=other)
    with mine:
        thread.start()
        time.sleep(0.02)
        order.append("mine")
        with mine.released():
            thread.join()
        order.append("mine again")
    assert order == ["mine", "other", "mine again"]
    with gpu_lock(torch.device("cpu")), gpu_lock(torch.device("cpu")).released():
        pass  # no thread waits
