"""Some of the mutants of tools/fuzz.py: each loads and drafts, or is refused in one short line. `make fuzz` tries thousands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUMBER, SEED = 200, 4


def fuzzed(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "fuzz.py"), "--seed", str(SEED), *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env)


def test_files_with_one_wrong_field_load_or_are_refused_in_one_line() -> None:
    done = fuzzed("--number", str(NUMBER))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    counts = done.stdout.splitlines()[-1]
    n_load, n_refused = (int(part.split()[0]) for part in counts.split(", ")[:2])
    assert n_load + n_refused == NUMBER and min(n_load, n_refused) > NUMBER // 10, counts
