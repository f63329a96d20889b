"""Children of the engine import the pyspec of their parent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pyspec
from pyspec.engine.children import child_environment
from pyspec.engine.load import ranks
from pyspec.engine.plan import look_apart
from pyspec.engine.process import ahead

ROOT = Path(pyspec.__file__).parents[1]


def test_the_checkout_comes_first() -> None:
    assert child_environment()["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)


@pytest.mark.parametrize(
    "module", [ranks, look_apart, ahead], ids=lambda module: module.__name__.rsplit(".")[-1]
)
def test_every_starter_of_a_process_uses_it(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of each started process, seen by a stand-in for subprocess."""
    seen: list[dict[str, str]] = []

    class Stop(Exception):
        pass

    def record(*args: object, env: dict[str, str], **how: object) -> None:
        seen.append(env)
        raise Stop

    monkeypatch.setattr(subprocess, "Popen", record)
    monkeypatch.setattr(subprocess, "run", record)
    start = {
        ranks: lambda: ranks.RankProcess(1, [sys.executable], lambda: None),
        look_apart: lambda: look_apart._asked(b""),
        ahead: lambda: ahead.start([sys.executable]),
    }[module]
    with pytest.raises(Stop):
        start()
    assert seen[0]["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
