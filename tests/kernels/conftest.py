"""Tests of an op stand in its folder; those of several ops, and of what all share, here.

Tests that launch kernels are collected only on a machine with a GPU, so none is reported as skipped.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pyspec.cuda import faults
from pyspec.cuda.context import context_of

# Tests of mutants import others
sys.path += sorted({str(path.parent) for path in Path(__file__).parent.glob("*/test_*.py")})
collect_ignore_glob = [] if torch.cuda.is_available() else ["*_gpu.py"]


@pytest.fixture(autouse=True, scope="session")
def _held() -> Iterator[None]:
    """As an engine does, so that the record of faults a test reads is the one that launches were given which are gone by then."""
    held = context_of(torch.device("cuda", 0)) if torch.cuda.is_available() else None
    yield
    del held


@pytest.fixture(autouse=True)
def _own_faults() -> Iterator[None]:
    """A test that provokes faults leaves none to the next test of its process, in whatever order they run."""
    yield
    if torch.cuda.is_available():
        faults.read(torch.device("cuda", 0))
