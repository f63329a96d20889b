"""Some of the mutants of tests/long_runs/fuzz.py: each loads and drafts, or is refused in one short line. `make fuzz` tries thousands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import few

ROOT = Path(__file__).parents[1]
SEED = 4


def fuzzed(*args: str, tool: str = "fuzz.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tests" / "long_runs" / tool), "--seed", str(SEED), *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.mark.slow
@pytest.mark.parametrize("number", few([60, 400], 60))
def test_files_with_one_wrong_field_load_or_are_refused_in_one_line(number: int) -> None:
    done = fuzzed("--number", str(number))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    counts = done.stdout.splitlines()[-1]
    n_load, n_refused = (int(part.split()[0]) for part in counts.split(", ")[:2])
    assert n_load + n_refused == number and min(n_load, n_refused) > number // 10, counts


@pytest.mark.slow
def test_slot_files_with_one_wrong_field_are_refused_or_right() -> None:
    done = fuzzed("--number", "60", tool="fuzz_slots.py")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " 0 are findings" in done.stdout
