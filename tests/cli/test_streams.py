"""Streams that are closed or take no more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = f"{sys.executable} -m pyspec models"


def outcome(redirections: str) -> tuple[int, str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(f"{COMMAND} {redirections}", shell=True, env=env, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr


def test_a_closed_stdout_loses_the_text_and_nothing_else() -> None:
    assert outcome(">&-") == (0, "")


def test_streams_that_are_all_closed_end_no_command() -> None:
    assert outcome("<&- >&- 2>&-")[0] == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_stdout_is_one_line_and_an_exit_code() -> None:
    code, said = outcome(">/dev/full")
    assert code == 1 and said == "Error: cannot write to stdout: no space left on device\n"


def test_a_reader_that_has_read_enough_hears_no_complaint() -> None:
    assert outcome("| head -n 1 >/dev/null") == (0, "")
