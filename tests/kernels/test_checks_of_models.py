"""The checks that decide on a card whether an op runs as a kernel, with the sizes of every architecture, on the emulated one.

A check that refuses its kernel is a line of the log, the op runs as torch, and no round of such a model is a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler

from pyspec.config import EngineSettings
from pyspec.cuda.check_child import examine
from pyspec.cuda.op import Op, all_ops
from pyspec.cuda.prepare import GpuKind, as_if
from pyspec.engine.plan.asks import asks_of
from pyspec.engine.plan.describe import describe
from pyspec.engine.plan.memory_plan import AssumedGpu
from pyspec.synth import write
from pyspec.synth.dims import TINY, widened

PACKED = "linear", "linear_tall", "linear_many", "moe", "rows"  # their checks pack matrices on a GPU
NAMES = sorted(op.name for op in all_ops() if op.check is not None and op.name not in PACKED)
HOPPER = GpuKind((9, 0), 132)

pytestmark = [needs_compiler, pytest.mark.slow]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[Any]]:
    """Specs by op, of all loads of tiny models on a card."""
    found: dict[str, set[Any]] = {name: set() for name in NAMES}
    path = tmp_path_factory.mktemp("models") / "m.gguf"
    for dims in TINY.values():
        write(widened(dims), path, quant="q8_0")
        for op, spec in asks_of(describe(path, EngineSettings(ctx=300), AssumedGpu(free=1 << 40))):
            if op.name in found:
                found[op.name].add(spec)
    return found


def refusals(op: Op[Any, Any], specs: set[Any]) -> Iterator[tuple[Any, str]]:
    """Of kernels that are within their limits."""
    for spec in specs:
        with as_if(HOPPER):
            impl = next((i for i in op.impls if op.out_of_question(i, spec) is None), None)
        if impl is None or impl.name != "cuda":
            continue
        here = replace(spec, device=CPU)
        with emulated_gpu(seed=1), torch.inference_mode():
            why = examine(op, impl, here, lambda at: None).refusal
        if why is not None:
            yield spec, why


@pytest.mark.parametrize("name", NAMES)
def test_no_check_refuses_a_kernel_for_a_model(name: str, asked: dict[str, set[Any]]) -> None:
    (op,) = (op for op in all_ops() if op.name == name)
    assert not list(refusals(op, asked[name]))
