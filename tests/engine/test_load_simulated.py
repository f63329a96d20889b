"""More conversations than caches hold, over the server's own policies without an engine (tools/simulate_load.py): they keep what is cached."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "simulate_load.py"


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("simulate_load", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulate_load"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["simulate_load"]


@pytest.mark.parametrize("seed", [1, 2])
def test_replicas_that_are_killed_keep_most_of_one_engine_s_hits(tool: ModuleType, seed: int) -> None:
    args = tool.arguments(["--clients", "90", "--chats", "90", "--every", "10"])
    calm = tool.arguments(["--clients", "50", "--chats", "50", "--every", "0"])
    one = tool.Play(calm, 1, tool.Ways(), seed).run()
    several = tool.Play(args, 3, tool.Ways(), seed).run()
    before = tool.Play(args, 3, tool.Ways(False, False, False), seed).run()
    assert one.hits > 0.84 and several.hits > 0.85 * one.hits
    assert several.hits > before.hits + 0.1 and several.n_moved < before.n_moved


def test_waiting_longer_than_caches_last_is_what_costs_hits(tool: ModuleType) -> None:
    """With caches for all, the order does not matter."""
    args = tool.arguments(["--clients", "50", "--chats", "50", "--every", "0", "--cache", "60000"])
    hits = [
        tool.Play(args, 1, ways).run().hits for ways in (tool.Ways(False, False, False), tool.Ways())
    ]
    assert min(hits) > 0.87 and abs(hits[0] - hits[1]) < 0.01
