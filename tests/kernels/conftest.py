"""Tests of an op stand in its folder; those of several ops, and of what all share, here.

Tests that launch kernels on a card (files test_*_gpu.py, and what machines.cases marks) are collected only on a machine with a GPU, so none is
reported as skipped; all have the mark `card`.
"""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulated.gpu import emulated_gpu
from emulated.machine import COMPILER
from machines import CARDS_ARE_EMULATED, EMULATED, HAS_CARD, Machine

from pyspec.cuda import faults
from pyspec.cuda.context import context_of

# Tests of mutants import others
sys.path += sorted({str(path.parent) for path in Path(__file__).parent.glob("*/test_*.py")})
collect_ignore_glob = [] if torch.cuda.is_available() else ["*_gpu.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before -m looks at the marks."""
    for item in items:
        if item.path.stem.endswith("_gpu") and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("card")
    if not HAS_CARD:
        items[:] = [item for item in items if item.get_closest_marker("card") is None]


@pytest.fixture
def machine() -> Machine:
    """Of tests that name no cases for machines (machines.cases): the emulated one."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C++ compiler ({COMPILER}) on this machine")
    return EMULATED


@pytest.fixture(autouse=True)
def _emulated_card(request: pytest.FixtureRequest) -> Iterator[None]:
    """PYSPEC_TEST_CARD=emulated."""
    if not CARDS_ARE_EMULATED or request.node.get_closest_marker("card") is None:
        yield
        return
    with emulated_gpu():
        yield


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
