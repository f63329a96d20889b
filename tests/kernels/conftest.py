"""Tests of kernels that launch them are collected only where there is a GPU, so none is reported as skipped."""

from collections.abc import Iterator

import pytest
import torch

from pyspec.cuda.context import context_of

collect_ignore_glob = [] if torch.cuda.is_available() else ["*_gpu.py"]


@pytest.fixture(autouse=True, scope="session")
def _held() -> Iterator[None]:
    """As an engine does, so that the record of faults a test reads is the one that launches were given which are gone by then."""
    held = context_of(torch.device("cuda", 0)) if torch.cuda.is_available() else None
    yield
    del held
