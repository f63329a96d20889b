"""Tests import each other's helper modules by name; nothing else is shared but the seed, and which cases are slow."""

import sys
from pathlib import Path

import pytest
import torch

for folder in ("models", "engine", "draft", "constrain"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
sys.path.insert(0, str(Path(__file__).parent))

from sampling import mark_slow  # noqa: E402


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before -m looks at the marks."""
    mark_slow(items)


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    """A test that draws from torch's own generator draws the same numbers in every run and order."""
    torch.manual_seed(0)
