"""Models whose first tier of one op is wrong, crashes or hangs: they start with that op a tier down, say so, and give the right text.

`python planted_models.py [SECONDS [KIND or OP...]]` plants all of them, or those of a kind or op, on a GPU, op by op, until the time is over;
prints a line with its seconds for each and exits with 1 if one was not as it should. tests/kernels/test_planted_models.py does some of it on a CPU, in Triton's interpreter.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import planted_tiers

from pyspec.cuda import checker, kernel_context, verdicts
from pyspec.cuda.checker import Checker
from pyspec.cuda.kernel_context import KernelContext
from pyspec.cuda.op import listed_ops
from pyspec.engine.api import Engine

WHY = {"wrong": "differ|other|not|as the reference", "crashing": "ended the process", "hanging": "took more than"}  # fmt: skip
LIMITS_S = {"start": 120.0, "binding": 120.0, "check": 20.0}
# Until everything is compiled and libraries are loaded; after that, the cost of a hang
FIRST_CHECK_S, CHECK_S = 60.0, 6.0
SPARE = 2  # children that wait for the next one to be killed: each takes seconds to begin
PROMPT = "the quick brown fox jumps over"
SETTINGS = {"np": 2, "ctx": 256, "warm_up": False, "kv_type": "f16"}
MODELS = {
    "qwen35": ("linear", "attend", "rope_kv", "gdn", "rows", "norms", "best", "ahead"),
    "qwen35moe": ("moe", "moe_route"),
    "nemotron_h": ("mamba2",),
}
"""Tiny models, and whose first tier is planted in them."""


def forget(name: str = "") -> None:
    """Forget the verdicts of an op, or of all ops, so that they are checked again."""
    for op in listed_ops():
        if name in ("", op.name):
            op.decided.clear()
            op.verdicts.clear()
            op.said.clear()


def forget_kept(name: str) -> None:
    """Delete the kept verdicts of an op: those on one planted fault would hold for the next, because both are of one module."""
    for path in verdicts.folder().glob("*.json"):
        if json.loads(path.read_text())["key"]["op"] == name:
            path.unlink()


@contextmanager
def planted(name: str, kind: str) -> Iterator[Any]:
    """The op, with the bad one in front of its tier in Triton, in this process and in the one that checks."""
    forget_kept(name)
    op = next(op for op in listed_ops() if op.name == name)
    bad = getattr(planted_tiers, f"{name}_{kind}")
    impls, home = op.impls, op.home
    op.impls, op.home = bad.impls, bad.home
    forget(name)
    try:
        yield op
    finally:
        op.impls, op.home = impls, home
        forget(name)
        forget_kept(name)


def have_spares() -> None:
    with checker._taking:
        checker._ready += [checker.Child() for _ in range(SPARE - len(checker._ready))]


def text(path: Path, kernels: str = "auto") -> list[int]:
    """Tokens of a greedy answer."""
    with Engine.open(str(path), None, {**SETTINGS, "kernels": kernels}) as engine:
        return list(engine.generate(PROMPT, max_tokens=8, temperature=0.0).tokens)


class Heard(logging.Handler):
    """The messages logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def complaint(path: Path, name: str, kind: str, want: list[int]) -> str:
    """The error with one planted fault; "" if there is none."""
    heard, log = Heard(), logging.getLogger("pyspec")
    log.addHandler(heard)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        with planted(name, kind) as op:
            got = text(path)
            ran = {op.chosen(spec).name for spec in op.decided}
    finally:
        log.removeHandler(heard)
        log.setLevel(level)
    said = [line for line in heard.lines if line.startswith(f"{name} runs as triton (cuda: ")]
    if not ran:
        return "was asked for by nobody"
    if ran != {"triton"}:
        return f"ran as {', '.join(sorted(ran))}"
    if not said or not any(part in said[0] for part in WHY[kind].split("|")):
        return f"said {said or heard.lines[-3:]}"
    return "" if got == want else f"{got} instead of {want}"


def main(seconds: float, asked: Sequence[str]) -> int:
    kinds = [kind for kind in planted_tiers.KINDS if kind in asked] or list(planted_tiers.KINDS)
    wanted = [name for names in MODELS.values() for name in names if name in asked]
    began, bad, left = time.monotonic(), 0, []
    with tempfile.TemporaryDirectory() as folder:
        verdicts.folder = lambda: Path(folder) / "verdicts"  # of its own: kernels that are compiled stay
        from pyspec.synth import write

        for model, names in MODELS.items():
            path = write(model, Path(folder) / f"{model}.gguf", quant="q8_0", tiny=True)
            for name in (n for n in names if not wanted or n in wanted):
                if time.monotonic() - began > seconds:
                    left += [f"{kind} {name}" for kind in kinds]
                    continue
                have_spares()
                bad += _planted_one(path, name, kinds)
                print(f"-- {time.monotonic() - began:.0f} s of {seconds:.0f}", flush=True)
    print(f"no time for {', '.join(left)}" if left else "all of them", flush=True)
    checker.close()
    return int(bad > 0)


def _planted_one(path: Path, name: str, kinds: Sequence[str]) -> int:
    """How many of an op were not as they should, a line each."""
    began, bad = time.monotonic(), 0
    checker.LIMITS_S["check"] = FIRST_CHECK_S
    want = text(path, f"{name}=triton")
    kernel_context.use(KernelContext())
    checker.LIMITS_S["check"] = CHECK_S
    print(f"{name} in Triton: {time.monotonic() - began:.1f} s", flush=True)
    for kind in kinds:
        began = time.monotonic()
        found = complaint(path, name, kind, want)
        bad += bool(found)
        took = time.monotonic() - began
        print(f"{kind} {name}: {found or 'a tier down, said so, same text'}, {took:.1f} s", flush=True)
    return bad


def own_checker() -> Checker:
    return Checker(LIMITS_S)


if __name__ == "__main__":
    checker.LIMITS_S.update(LIMITS_S)
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 600.0, sys.argv[2:]))
