"""Ops of a model bound to their CUDA kernels, which run thread by thread on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated.gpu import emulated_gpu

from pyspec.cuda import jit
from pyspec.cuda.op import Impl, Op, all_ops

CARD = torch.device("cuda", 0)


def no_limits(_: Impl[Any, Any]) -> Callable[[Any], str | None]:
    return lambda spec: None


def of_a_card(impl: Impl[Any, Any]) -> Callable[[Any], str | None]:
    """Its limits on a GPU."""
    return lambda spec: impl.limits(replace(spec, device=CARD))


@contextmanager
def only(
    name: str,
    ops: Iterable[Op[Any, Any]],
    limits: Callable[[Impl[Any, Any]], Callable[[Any], str | None]] = no_limits,
) -> Iterator[None]:
    """The ops bound to their kernels, without a GPU, or ("torch") to the references; also to these where `limits` refuse a kernel."""
    with emulated_gpu(seed=1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "missing", lambda device: None)
        for op in all_ops():  # other ops are bound inside, too: their decisions end with the block
            patch.setattr(op, "_decided", {})
            patch.setattr(op, "verdicts", {})
        for op in ops:
            own = [replace(i, limits=limits(i)) for i in op.impls if i.name == name]
            patch.setattr(op, "impls", own)
            patch.setattr(op, "check", None)
        yield
