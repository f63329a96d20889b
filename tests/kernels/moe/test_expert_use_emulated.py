"""What a forward used of the experts in the host's memory, as kernels log it and the host counts it, against a count by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.lane import served_lane
from emulated.machine import needs_compiler
from torch import Tensor

from pyspec.cpu import build
from pyspec.cuda.ops.moe import check as moe_check
from pyspec.cuda.ops.moe import host
from pyspec.cuda.ops.moe.host import HostExperts
from pyspec.cuda.ops.moe.lane import HostLane
from pyspec.cuda.ops.moe.ref import MoeSpec
from pyspec.device.expert_use import ExpertLog
from pyspec.gguf import GGMLType as G

pytestmark = [
    needs_compiler,
    pytest.mark.sampled(1),
    pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler"),
]
SPECS = [
    MoeSpec(CPU, n_used, 64, 32, "swiglu", G.Q8_0, G.Q8_0, n_expert=n, slots=slots)
    for n_used, n, slots in ((3, 7, 3), (2, 5, 0), (3, 9, 9), (2, 6, 2))
]


@pytest.fixture
def lanes() -> Iterator[list[HostLane]]:
    with served_lane() as lanes, emulated_gpu(seed=3):
        yield lanes


def layer(spec: MoeSpec) -> HostExperts:
    gen = torch.Generator().manual_seed(1)
    return HostExperts(spec, moe_check.random_stacks(replace(spec, slots=None), spec.n_expert, gen))


def run(made: HostExperts, n_row: int, gen: torch.Generator) -> Tensor:
    """The ids that it was run with; the last row is padding."""
    n, n_used = made.n_expert, made.spec.n_used
    ids = torch.rand(n_row, n, generator=gen).argsort(-1)[:, :n_used].int().contiguous()
    row_seq = torch.zeros(n_row, dtype=torch.int32)
    row_seq[-1] = -1
    x, weights = torch.randn(n_row, 64, generator=gen), torch.rand(n_row, n_used, generator=gen)
    ready = made.begin(x, None, ids, weights, row_seq)
    made(x, ids, weights, ready=ready)
    return ids[:-1]


def test_a_forwards_experts_are_counted_by_row_and_over_layers(lanes: list[HostLane]) -> None:
    host.take_layers(CPU)
    layers, n_own = [layer(spec) for spec in SPECS], 3
    assert host.take_layers(CPU) == layers and host.take_layers(CPU) == []
    log, gen = ExpertLog(layers, n_own), torch.Generator().manual_seed(4)
    assert log.firsts.tolist() == [0, 7, 12, 21, 27]
    for starts, n_decoding in (([0, 1], 1), ([0, 3, 4, 9], 2), ([0, 2, 4, 9], 3), ([0, 5], 0)):
        ids = [run(made, starts[-1] + 1, gen) for made in layers[:n_own]] + [run(layers[3], 2, gen)]
        assert bool((log.log[starts[-1] :] == -1).all()), "padding is none"
        use = log.used(log.copy(starts[-1], starts[-1] + 1), starts, n_decoding)
        assert bool((log.log == -1).all()) and use is not None
        pairs = [
            [{(i, e) for i in range(n_own) for e in ids[i][row].tolist()} for row in range(a, b)]
            for a, b in pairwise(starts)
        ]
        places = [made.places.tolist() for made in layers]
        missing = {(i, e) for i, own in enumerate(places) for e, place in enumerate(own) if place < 0}
        for of_seq, hits, misses in zip(pairs, use.row_hits, use.row_misses, strict=True):
            seen: set[tuple[int, int]] = set()
            for own, hit, miss in zip(of_seq, hits, misses, strict=True):
                assert miss == len((own - seen) & missing) and hit == len(own - seen - missing)
                seen |= own
        every = set().union(*(own for of_seq in pairs for own in of_seq))
        assert (use.hits, use.misses) == (len(every - missing), len(every & missing))
        drafted = {(3, e) for row in ids[3].tolist() for e in row}
        decoding = set().union(*(own for of_seq in pairs[:n_decoding] for own in of_seq))
        others = set().union(*(own for of_seq in pairs[n_decoding:] for own in of_seq))
        is_plain = n_decoding == len(pairs)
        for found, given in (
            (use.keys, decoding | (drafted if is_plain else set())),
            (use.prompts, others | (set() if is_plain else drafted)),
        ):
            assert found.tolist() == sorted(int(log.firsts[i]) + e for i, e in given)
        by_key = {int(log.firsts[i]) + e for i, e in missing}
        assert use.is_miss.tolist() == [key in by_key for key in use.keys.tolist()]


def test_more_rows_than_a_job_has_are_not_logged(
    lanes: list[HostLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = layer(SPECS[0])
    log, gen = ExpertLog([made], 1), torch.Generator().manual_seed(4)
    monkeypatch.setattr(host, "JOB_ROWS", 4)
    made.streams_from = 1000
    ids, x = torch.zeros(9, 3).int(), torch.randn(9, 64, generator=gen)
    made(x, ids, torch.rand(9, 3))
    assert bool((log.log == -1).all())
    assert log.copy(2, 200) is None and log.used(None, [0, 2], 1) is None
    assert ExpertLog.of([], []) is None
