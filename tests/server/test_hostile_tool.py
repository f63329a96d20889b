"""The short form of `make hostile`: all kinds of hostile clients at once, and answers that are right meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_hostile_clients_end_nothing_and_answers_beside_them_are_right() -> None:
    command = [
        sys.executable,
        str(ROOT / "tools" / "hostile.py"),
        "--timid",
        "--minutes",
        "0.4",
        "--clients",
        "12",
        "--answer-s",
        "90",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    last = done.stdout.splitlines()[-1]
    assert int(last.split()[0]) > 30 and last.endswith("0 statuses above 499, 0 wrong"), last
