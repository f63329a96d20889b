"""A program that has closed its engines ends with the status that it asked for, although threads still free their memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

FREES = """
import mmap, sys, threading, time, weakref
import torch
from pyspec.engine import aside, served

is_released, is_freed, kept = threading.Event(), threading.Event(), []

class SlowToEnd:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)  # the interpreter ends meanwhile

def on_free(ref, sleep=time.sleep):
    is_freed.set()
    sleep(0.2)  # lets the GIL go inside a destructor of torch

class Core:
    def __init__(self):
        piece = mmap.mmap(-1, 1 << 20)
        kept.append(weakref.ref(piece, on_free))
        self.memory = torch.frombuffer(piece, dtype=torch.uint8)

    def close(self):
        return is_released.wait()

slow = SlowToEnd()
"""
BEGINS = {
    "an engine's end": "served.end_aside(Core(), [])\n",
    "a thread of a slot's file": "held = [Core()]\naside.AsideThread(lambda: held.pop().close(), 'pyspec-slot-file').start()\n",
}
ENDS = "is_released.set()\nis_freed.wait()\nsys.exit(1)\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("way", BEGINS)
def test_memory_that_a_thread_frees_does_not_abort_the_program(way: str) -> None:
    """A destructor of torch that waits for the GIL while the interpreter ends aborted it: "terminate called without an active exception"."""
    ended = run(FREES + BEGINS[way] + ENDS)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_a_thread_that_hangs_keeps_the_program_no_longer_than_the_limit() -> None:
    code = "import threading\nfrom pyspec.engine import aside\naside.LIMIT_S = 0.2\n"
    ended = run(
        code + "aside.AsideThread(threading.Event().wait, 'hangs').start()\nraise SystemExit(3)\n"
    )
    assert (ended.returncode, ended.stderr) == (3, "")


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(4))
def test_a_program_that_closed_two_engines_ends_with_its_status(turn: int) -> None:
    code = """
import sys
import pyspec

def main():
    for n in (1, 2):
        with pyspec.Engine.load("demo", "ngram", np=n, ctx=128, warm_up=False, device="cpu") as engine:
            engine.generate("One two one two one", max_tokens=8)

main()
sys.exit(1)
"""
    ended = run(code)
    assert (ended.returncode, ended.stderr) == (1, "")
