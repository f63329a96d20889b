"""`tools/bench_host.py` follows the loop: it runs, for every kind of round."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import bench_host


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", bench_host.KINDS)
def test_a_few_rounds_are_timed(kind: str, tmp_path: Path) -> None:
    line = bench_host.run(kind, 2, tmp_path, cold=0, n_round=3, repeats=1)
    assert re.match(
        rf"{kind} +2 slots: sample +\d+\.\d, host +\d+\.\d, all before the launch +\d+\.\d us", line
    )
