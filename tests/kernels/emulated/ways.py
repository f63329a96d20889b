"""The ways few rows are multiplied, each on its emulated machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from emulated.gpu import emulated_gpu

from pyspec.cuda.ops.linear import pair as linear_pair

WAYS = {"linear": (8, 0), "linear_sm90": (9, 0), "linear_pair": (9, 0)}
"""Source -> compute capability of a machine that runs it."""


@contextmanager
def machine_of(way: str, **settings: int) -> Iterator[None]:
    """`emulated_gpu(**settings)` on which LinearLaunch takes `way` for any matrix."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_pair, "MOST_BYTES", 1 << 40 if way == "linear_pair" else 0)
        with emulated_gpu(WAYS[way], **settings):
            yield
