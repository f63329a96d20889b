"""The number of threads that a load on a CPU takes by itself: cores, sockets, limits of a container, and one measurement."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pyspec import cache
from pyspec.cpu import kernels
from pyspec.engine.load import threads


def machine(folder: Path, n_socket: int, n_core: int, n_thread: int) -> int:
    """Topology files as Linux has them; the number of processors."""
    n = n_socket * n_core
    for cpu in range(n * n_thread):
        at = folder / f"cpu{cpu}" / "topology"
        at.mkdir(parents=True)
        core = cpu % n
        (at / "thread_siblings_list").write_text(",".join(str(core + n * i) for i in range(n_thread)))
        (at / "physical_package_id").write_text(str(core // n_core))
    return n * n_thread


@pytest.fixture
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SYSTEM", tmp_path / "system")
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "missing", lambda _=None: None)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    ("sockets", "cores", "each", "own", "want"),
    [
        (2, 16, 2, 64, [64, 32, 16]),
        (1, 16, 2, 32, [32, 16, 8]),
        (1, 16, 1, 16, [16, 8]),
        (1, 16, 2, 10, [10, 8]),
        (1, 6, 1, 6, [6]),
    ],
)
def test_candidates_are_cores_sockets_and_halves_within_the_limit(
    sockets: int, cores: int, each: int, own: int, want: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    n = machine(threads.SYSTEM, sockets, cores, each)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(n)), raising=False)
    assert threads.candidates(own) == want


@pytest.mark.usefixtures("_alone")
def test_the_fastest_is_taken_and_kept_and_fewer_only_where_they_are_worth_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n, asked = machine(threads.SYSTEM, 2, 16, 2), list[int]()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(n)), raising=False)
    times = {64: 2.0, 32: 1.0, 16: 0.97}

    def seconds(n: int) -> float:
        asked.append(n)
        return times[n]

    assert threads.usual(64, seconds) == 32 and asked == [16, 32, 64]
    assert threads.usual(64, seconds) == 32 and len(asked) == 3, "it is kept"
    (path,) = (cache.cache_root() / "cpu").iterdir()
    assert list(json.loads(path.read_text()).values()) == [32]
    path.write_text("[not what it was")
    times[16] = 0.9
    assert threads.usual(64, seconds) == 16 and threads.usual(4, seconds) == 4 and len(asked) == 6


@pytest.mark.skipif(kernels.missing() is not None, reason="there is no C++ compiler")
def test_times_are_of_kernels_on_so_many_threads() -> None:
    seen, before = set[int](), kernels.n_thread()
    timed = threads._Timed()
    product = timed.product
    timed.product = lambda *args: (seen.add(kernels.n_thread()), product(*args))[1]  # type: ignore[assignment,func-returns-value]
    assert 0 < timed(3) < 100 and seen == {3} and kernels.n_thread() == before


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "max 100000\n"}, 1 << 20),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 1 << 20),
        ({}, 1 << 20),
    ],
)
def test_a_containers_share_of_the_time_bounds_the_processors(
    files: dict[str, str], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cache, "GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert cache.n_cores() == min(64, most)
