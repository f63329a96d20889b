"""Requests that join and leave, over a device on paper (tools/simulate_churn.py): what the drafter does where its drafts do not pay."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from pyspec.device import worker
from pyspec.engine.policy import controller

TOOL = Path(__file__).parents[2] / "tools" / "simulate_churn.py"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulate_churn", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "simulate_churn", module)
    monkeypatch.setattr(worker, "stamp", worker.stamp)  # the tool replaces it
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_drafter_computes_a_quarter_of_the_rows(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and answers are the same in number; drafts that pay are drafted as before, at any setting."""
    found: dict[tuple[float, int], Counter[str]] = {}
    for length in (1.2, 3.0):
        for rest_after in (0, controller.REST_AFTER):
            with monkeypatch.context() as m:
                m.setattr(controller, "REST_AFTER", rest_after)
                args = argparse.Namespace(np=47, len=length, lockstep=256, each=2, then=0.0)
                found[length, rest_after] = tool.play("mtp", 47, args, tmp_path)[1]
    few, many = found[1.2, controller.REST_AFTER], found[1.2, 0]
    assert few["prompt rows"] == many["prompt rows"] == 47 * 2 * tool.PROMPT
    assert many["late rows"] > 2.2 * few["verify rows"]
    assert few["late rows"] < 0.25 * many["late rows"]
    assert few["drafted tokens"] < 0.02 * few["verify rows"]
    for each in (found[3.0, 0], found[3.0, controller.REST_AFTER]):
        assert each["late rows"] > 47 * 2 * tool.PROMPT and each["drafted tokens"] > 8_000


@pytest.mark.slow
def test_drafts_come_back_in_the_middle_of_requests(tool: ModuleType, tmp_path: Path) -> None:
    """Texts become easy when half of the requests have begun: within 450 rounds all are read, and drafted for."""
    args = argparse.Namespace(np=37, len=1.2, lockstep=256, each=8, then=3.0)
    found = tool.play("mtp", 37, args, tmp_path)[1]
    assert 0 < found["rounds until all requests are read"] < 450
    assert found["drafted tokens"] > 37 * 3 * tool.ANSWER / 2
