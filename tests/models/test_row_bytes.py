"""The bytes of a row that a memory plan reads of a model's programs are those that a forward takes."""

from __future__ import annotations

import pytest
import torch
from harness import DEVICE, FIXTURES, Bench
from torch.profiler import ProfilerActivity, profile

from pyspec.cpu import build
from pyspec.models.kernels import needs_of_model
from pyspec.models.part import LoadTypes
from pyspec.models.weight_bytes import row_bytes

N = 240  # rows, so that what a forward takes once is little beside them


def taken(bench: Bench) -> int:
    """Most bytes that a forward of N rows has allocated at once."""
    seq = bench.seq(0, [(7 * i * i + 3 * i) % 200 for i in range(N)], n_out=1)
    bench.forward(seq)  # later tensors are allocated
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        bench.forward(seq)
    results = found.profiler.kineto_results  # type: ignore[union-attr]
    live = most = 0
    for event in results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


@pytest.mark.skipif(
    DEVICE.type != "cpu" or build.compiler() is None, reason="references take memory of their own"
)
@pytest.mark.parametrize(
    ("name", "is_wide"),
    [("llama", False), ("gemma3", False), ("granite", True), ("glm4moe", True), ("minimax-m2", True)],
)
def test_a_plan_has_room_for_every_row(name: str, is_wide: bool) -> None:
    """Attention may be wider than a feed-forward, whose rows alone were counted once."""
    bench = Bench(FIXTURES / f"{name}.gguf", n_slot=1, width=N)
    model, on = bench.target.config, LoadTypes(DEVICE, bench.memory.kv_format, torch.float32)
    row = needs_of_model(model, bench.file, on, N, 256).row
    most, of_feed = taken(bench), row_bytes(model.n_ff, model.n_embd)
    assert most <= N * (row + 1)
    assert (most > N * of_feed) == is_wide and (row > of_feed) == is_wide
