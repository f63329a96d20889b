"""Experts that move while rounds run on an emulated card: no slot is read while it is written, sums stay those of the reference, and what fails
leaves each expert where the map says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.lane import served_lane
from emulated.machine import needs_compiler

from pyspec.cpu import build
from pyspec.cuda import context
from pyspec.cuda.ops.moe import check as moe_check
from pyspec.cuda.ops.moe import host
from pyspec.cuda.ops.moe import ref as moe_ref
from pyspec.cuda.ops.moe.host import HostExperts
from pyspec.cuda.ops.moe.lane import HostLane
from pyspec.cuda.ops.moe.ref import MoeSpec
from pyspec.device.expert_uploads import ExpertUploads
from pyspec.device.expert_use import ExpertLog
from pyspec.device.worker import Worker
from pyspec.engine.loop.expert_cache import EXACT, LOSES, ExpertCache
from pyspec.errors import DeviceError
from pyspec.gguf import GGMLType as G
from pyspec.models.placement import Swap

pytestmark = [
    needs_compiler,
    pytest.mark.sampled(1),
    pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler"),
]
SPEC = MoeSpec(CPU, 2, 64, 32, "swiglu", G.Q8_0, G.Q8_0, n_expert=9, slots=3)


@pytest.fixture
def lanes() -> Iterator[list[HostLane]]:
    with served_lane() as lanes, emulated_gpu(seed=3):
        yield lanes


class Rounds:
    """Rounds of two layers with a few rows, launched as a worker launches them."""

    def __init__(self, *, moves: bool = True) -> None:
        self.gen = torch.Generator().manual_seed(1)
        self.stacks = [moe_check.random_stacks(replace(SPEC, slots=None), 9, self.gen) for _ in "ab"]
        self.layers = [HostExperts(SPEC, made) for made in self.stacks]
        self.want = [moe_ref.bind(replace(SPEC, slots=None))(made) for made in self.stacks]
        self.log = ExpertLog(self.layers, 2)
        self.uploads = ExpertUploads(self.log)
        self.cache = ExpertCache(self.uploads, "" if moves else EXACT)
        self.worker: Any = SimpleNamespace(uploads=self.uploads)

    def run(self, favourites: list[int], *, ms: float = 10.0, usual_ms: float = 10.0) -> None:
        """One round whose rows choose among these."""
        self.uploads.before()
        for layer, want in zip(self.layers, self.want, strict=True):
            assert layer.slots is not None and torch.equal(layer.slots, layer.places)
            picks = torch.rand(3, len(favourites), generator=self.gen).argsort(-1)[:, :2]
            ids = torch.tensor(favourites)[picks].int().contiguous()
            x, weights = torch.randn(3, 64, generator=self.gen), torch.rand(3, 2, generator=self.gen)
            got, right = layer(x, ids, weights), want(x, ids, weights)
            assert float((got - right).norm() / right.norm()) < 1e-3
        Worker._upload(self.worker, self.uploads)
        use = self.log.used(self.log.copy(3, 3), [0, 2, 3], 2)
        assert use is not None
        self.cache.landed(use, ms, usual_ms)


def test_experts_that_are_used_come_and_sums_stay_right(
    lanes: list[HostLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, load = Rounds(), HostExperts.load

    def watched(self: HostExperts, slot: int, expert: int) -> None:
        assert self.slots is not None and not (self.slots == slot).any(), "a row may read it"
        load(self, slot, expert)

    monkeypatch.setattr(HostExperts, "load", watched)
    for favourites in ([5, 7, 8], [1, 4, 6]):
        for _ in range(60):
            rounds.run(favourites)
        for layer in rounds.layers:
            assert (layer.places >= 0).nonzero().flatten().tolist() == favourites
            assert sorted(layer.places[favourites].tolist()) == [0, 1, 2]
    cache = rounds.cache
    assert cache.n_upload == 12 and not cache.frozen and cache.hits > 2 * cache.misses
    assert cache.residents.there.nonzero()[0].tolist() == [1, 4, 6, 10, 13, 15]
    for layer, made in zip(rounds.layers, rounds.stacks, strict=True):
        fresh = HostExperts(replace(SPEC, slots=9), made)
        order = layer.places.argsort()[-3:]
        for name in ("inner", "down"):
            own, all = getattr(layer.card, name).stack.records, getattr(fresh.card, name).stack.records
            assert torch.equal(own, all[order])
    x, ids, weights = torch.randn(19, 64), torch.randint(0, 9, (19, 2)).int(), torch.rand(19, 2)
    monkeypatch.setattr(host, "GROUP", 2 * rounds.uploads.bytes[0])
    for layer, want in zip(rounds.layers, rounds.want, strict=True):  # prompts bring what is missing now
        assert [len(runs) for runs, _ in layer.groups()] == [2, 2, 1]
        got, right = layer.streamed(x, ids, weights), want(x, ids, weights)
        assert float((got - right).norm() / right.norm()) < 1e-3


def second_fails(patch: pytest.MonkeyPatch) -> list[int]:
    """The second expert finds no memory on the card. Returns those that were to come."""
    load, asked = HostExperts.load, []

    def failing(self: HostExperts, slot: int, expert: int) -> None:
        asked.append(expert)
        if len(asked) == 2:
            raise torch.OutOfMemoryError("no room")
        load(self, slot, expert)

    patch.setattr(HostExperts, "load", failing)
    return asked


def test_the_next_start_begins_with_what_was_used_most(
    lanes: list[HostLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds()
    for _ in range(30):
        rounds.run([2, 5, 8])
    kept, other = rounds.cache.known(), Rounds()
    other.cache.recall(kept)
    for layer in other.layers:
        assert (layer.places >= 0).nonzero().flatten().tolist() == [2, 5, 8]
    assert bool(other.cache.fixed[[2, 5, 8, 11, 14, 17]].all()) and other.cache.fixed.sum() == 6
    other.run([2, 5, 8])
    assert other.cache.misses == 0 < other.cache.hits
    with pytest.raises(ValueError, match="can not be"):
        other.cache.recall(kept[1:])
    short = Rounds()
    with monkeypatch.context() as patch:
        second_fails(patch)
        short.cache.recall(kept)
    assert "no room" in short.cache.frozen and short.layers[0].places.tolist().count(-1) == 7
    short.run([2, 5, 8])  # sums are compared
    exact = Rounds(moves=False)
    exact.cache.recall(kept)
    assert exact.layers[0].places.tolist()[:4] == [0, 1, 2, -1], "it begins as any other"


def test_with_exact_nothing_moves(lanes: list[HostLane]) -> None:
    rounds = Rounds(moves=False)
    for _ in range(40):
        rounds.run([5, 7, 8])
    assert rounds.cache.frozen == EXACT and rounds.cache.n_upload == 0 and rounds.cache.misses > 40
    assert rounds.layers[0].places.tolist() == [0, 1, 2, -1, -1, -1, -1, -1, -1]


def test_a_cache_that_loses_rests_and_comes_back(lanes: list[HostLane]) -> None:
    """Rounds with copies take twice as long as those without, and save next to nothing."""
    rounds = Rounds()
    cache = rounds.cache
    cache.fixed[:] = True  # the start's placement would have had all
    n = 0
    while not cache.account.rests and n < 300:
        had = rounds.uploads.is_busy or bool(rounds.uploads.arrived)
        rounds.run([[3, 4, 5], [6, 7, 8], [0, 1, 2]][n // 20 % 3], ms=20.0 if had else 10.0)
        n += 1
    assert cache.account.rests and cache.frozen == LOSES and n < 300
    rounds.run([0, 1, 2])  # what is under way arrives
    rounds.run([0, 1, 2])
    moved = cache.n_upload
    for _ in range(20):
        rounds.run([3, 4, 5])
    assert cache.n_upload == moved and cache.frozen == LOSES
    cache.account.debt = 0.0
    cache.fixed[:] = rounds.cache.residents.there
    for _ in range(40):
        rounds.run([6, 7, 8])
    assert cache.n_upload > moved, "a try"


def test_an_upload_that_fails_costs_a_slot_and_no_text(
    lanes: list[HostLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, asked = Rounds(), second_fails(monkeypatch)
    for _ in range(40):
        rounds.run([5, 7, 8])  # sums are compared
    assert "no room" in rounds.cache.frozen and not rounds.cache.moves
    there = [int((layer.places >= 0).sum()) for layer in rounds.layers]
    assert len(asked) == 2 and 0 < sum(there) < 6


def test_an_error_of_the_device_is_raised(
    lanes: list[HostLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds()

    def lost(self: HostExperts, slot: int, expert: int) -> None:
        raise DeviceError("the device is lost")

    monkeypatch.setattr(HostExperts, "load", lost)
    with pytest.raises(DeviceError):
        for _ in range(40):
            rounds.run([5, 7, 8])


def test_a_round_that_fails_between_map_and_copies_loses_nothing(lanes: list[HostLane]) -> None:
    rounds = Rounds(moves=False)
    slots = rounds.uploads.residents()
    rounds.uploads.begin([Swap(1, 2, 9 + 7, int(slots[1][2]))])
    rounds.uploads.before()  # the forward behind it failed: no copies were begun
    assert rounds.layers[1].places.tolist() == [0, 1, -1, -1, -1, -1, -1, -1, -1]
    for _ in range(2):
        rounds.run([0, 1, 2, 3])
    assert rounds.layers[1].places.tolist() == [0, 1, -1, -1, -1, -1, -1, 2, -1]
    assert rounds.cache.n_upload == 1
    rounds.uploads.begin([Swap(0, 0, 8, 0)])
    rounds.uploads.before()
    rounds.uploads.behind()
    waited: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            waited.append("a stream")
            raise RuntimeError("CUDA error: the device is lost")

    streams = Stream(), Stream()
    context.context_of(CPU).copies.update(streams)
    rounds.worker.device = CPU
    Worker.leave(rounds.worker)  # unloaded meanwhile: pages of the host are freed behind that
    assert len(waited) == len(streams)
    del streams  # nothing waits for those of engines that are gone
    Worker.leave(rounds.worker)
    assert len(waited) == 2
    assert rounds.uploads.is_busy and rounds.layers[0].places[8] == -1


def test_a_decision_that_fails_ends_moves_and_nothing_else(
    lanes: list[HostLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds()
    monkeypatch.setattr(rounds.cache, "counts", None)
    for _ in range(3):
        rounds.run([5, 7, 8])
    assert rounds.cache.frozen.startswith("a decision failed") and not rounds.uploads.is_busy
    assert np.array_equal(rounds.uploads.residents()[0], np.array([0, 1, 2]))
