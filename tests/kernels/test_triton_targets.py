"""Triton's kernels for GPUs that are not here: they compile and fit. That they run there is not said."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TARGETS = ("80", "86", "89", "90", "100", "120", "121", "gfx942", "gfx1100")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.timeout(3700)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_for_and_fits(target: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(HERE.parent.parent), environment.get("PYTHONPATH", "")]
    )
    command = [sys.executable, str(HERE / "triton_targets.py"), target]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=3600)
    assert done.returncode == 0, (
        "\n".join(line for line in done.stdout.splitlines() if "shared memory" not in line) + done.stderr
    )
    assert "attend_split" in done.stdout and "gdn_rows" in done.stdout
