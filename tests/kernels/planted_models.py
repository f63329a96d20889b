"""Models whose first tier of one op is wrong, crashes or hangs: they start with that op a tier down, say so, and give the right text.

`python planted_models.py [SECONDS [KIND...]]` plants all of them, or those of a kind, on a GPU, one after the other, until the time is over;
prints a line for each and exits with 1 if one was not as it should. tests/kernels/test_planted_models.py does some of it on a CPU, in Triton's interpreter.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import planted_tiers

from pyspec.cuda import probe, survey, tiers, verdicts
from pyspec.cuda.probe import Prober
from pyspec.engine.api import Engine

WHY = {"wrong": "differ|other|not|as the reference", "crashing": "ended the process", "hanging": "took more than"}
LIMITS_S = {"start": 120.0, "binding": 120.0, "check": 20.0}
CHECK_S = 12.0  # once everything has been compiled: what a hang costs
PROMPT = "the quick brown fox jumps over"
SETTINGS = {"np": 2, "ctx": 256, "warm_up": False, "kv_type": "f16"}
MODELS = {
    "qwen35": ("linear", "attend", "rope_kv", "gdn", "rows", "norms", "best", "ahead"),
    "qwen35moe": ("moe", "moe_route"),
    "nemotron_h": ("mamba2",),
}
"""Tiny models, and whose first tier is planted in them."""


def forget(name: str = "") -> None:
    """What is known of an op, or of all of them: it is checked again."""
    for op in survey.ops():
        if name in ("", op.name):
            op.decided.clear()
            op.verdicts.clear()
            op.said.clear()


@contextmanager
def planted(name: str, kind: str) -> Iterator[Any]:
    """The op, with the bad one in front of its tier in Triton, in this process and in the one that checks. What was kept of another bad one
    would be believed of this one: they are of one module."""
    verdicts.forget_all()
    op, bad = next(op for op in survey.ops() if op.name == name), getattr(planted_tiers, f"{name}_{kind}")
    impls, home = op.impls, op.home
    op.impls, op.home = bad.impls, bad.home
    forget(name)
    try:
        yield op
    finally:
        op.impls, op.home = impls, home
        forget(name)


def text(path: Path, kernels: str = "auto") -> list[int]:
    """Tokens of a greedy answer."""
    with Engine.open(str(path), None, {**SETTINGS, "kernels": kernels}) as engine:
        return list(engine.generate(PROMPT, max_tokens=8, temperature=0.0).tokens)


class Heard(logging.Handler):
    """What was said."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def complaint(path: Path, name: str, kind: str, want: list[int]) -> str:
    """What is not as it should be with one planted; "" if all is."""
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
    if ran != {"triton"}:
        return f"ran as {', '.join(sorted(ran))}"
    if not said or not any(part in said[0] for part in WHY[kind].split("|")):
        return f"said {said or heard.lines[-3:]}"
    return "" if got == want else f"{got} instead of {want}"


def main(seconds: float, kinds: Sequence[str]) -> int:
    began, bad = time.monotonic(), 0
    tiers.use("auto")
    with tempfile.TemporaryDirectory() as folder:
        verdicts.folder = lambda: Path(folder) / "verdicts"  # of its own: kernels that are compiled stay
        from pyspec.synth import write

        wants = {}
        for model, names in MODELS.items():
            path = write(model, Path(folder) / f"{model}.gguf", quant="q8_0", tiny=True)
            for name in names:
                wants[name] = path, text(path, f"{name}=triton")
        tiers.use("auto")
        print(f"texts: {time.monotonic() - began:.0f} s", flush=True)
        probe.LIMITS_S["check"] = CHECK_S
        for kind in kinds:
            for name, (path, want) in wants.items():
                if time.monotonic() - began > seconds:
                    print(f"(no time for {kind} {name})")
                    continue
                found = complaint(path, name, kind, want)
                bad += bool(found)
                print(f"{kind} {name}: {found or 'a tier down, said so, same text'}", flush=True)
    probe.close()
    return int(bad > 0)


def own_prober() -> Prober:
    return Prober(LIMITS_S)


if __name__ == "__main__":
    probe.LIMITS_S.update(LIMITS_S | {"check": 60.0})  # compiling included
    asked = sys.argv[2:] or planted_tiers.KINDS
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 600.0, asked))
