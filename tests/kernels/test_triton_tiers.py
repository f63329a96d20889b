"""An op whose CUDA kernels are wrong, crash or hang runs in Triton, says why, and gives the reference's results."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import planted_tiers
import pytest
import triton_interpreter  # noqa: F401

from pyspec.cuda import checker
from pyspec.cuda.checker import Checker

WHY = {"wrong": "differ|other|not", "crashing": "ended the process", "hanging": "took more than"}
LIMITS_S = {"start": 120.0, "binding": 60.0, "check": 10.0}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checker]:
    own = Checker(LIMITS_S)
    yield own
    own.close()


@pytest.mark.parametrize("kind", planted_tiers.KINDS)
@pytest.mark.parametrize("name", planted_tiers.OPS)
def test_the_next_tier_is_taken_with_the_reason_and_is_right(
    name: str,
    kind: str,
    children: Checker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(checker, "shared", lambda: children)
    op, spec = getattr(planted_tiers, f"{name}_{kind}"), planted_tiers.SPECS[name]
    op = replace(op, verdicts={}, said=set(), _decided={})
    with caplog.at_level(logging.INFO):
        assert op.chosen(spec).name == "triton", dict(op.choices(spec))
    reasons = dict(op.choices(spec))
    assert reasons["triton"] is None
    why = reasons["cuda"] or ""
    assert any(part in why for part in WHY[kind].split("|")), why
    assert f"{name} runs as triton (cuda: {why}" in caplog.text
    assert op.bind(spec) is not None
