"""Without cuda-python, as the extra `cpu` has it, models are planned, loaded and run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyspec.cuda import jit

ROOT = Path(__file__).parents[2]
CODE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "cuda":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from pyspec.cuda import jit
from pyspec.engine.api import Engine
assert not jit.is_installed()
with Engine.load("demo", np=1, ctx=256, warm_up=False, device="cpu") as engine:
    assert len(engine.generate("Hello", max_tokens=3, temperature=0, ignore_eos=True).tokens) == 3
"""


def test_a_package_that_is_not_there_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.util.find_spec", absent)
    assert not jit.is_installed()


@pytest.mark.slow
def test_the_demo_runs_where_no_cuda_package_is() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
