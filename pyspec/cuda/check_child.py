"""The child in which implementations are checked: it binds one, compares it with the reference, and reports each stage.

checker.py starts it (`python -m pyspec.cuda.check_child`), asks on its stdin and reads its stdout, a line each.
"""

from __future__ import annotations

import base64
import faulthandler
import importlib
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

import torch

from pyspec.cuda import faults, tri
from pyspec.cuda.checker import LIMITS_S, Verdict, sentence
from pyspec.cuda.context import context_of
from pyspec.cuda.op import Impl, Op, all_ops, device_of

log = logging.getLogger(__name__)

PASSING = ("out of memory", "error code -9", "error code -15")  # the last two: `ptxas` was killed
IDLE_S = 20.0  # then the child leaves, and its memory on the GPU with it


def serve(requests: IO[bytes], answers: IO[str]) -> None:
    """Answer requests until there are none."""

    def tell(**what: object) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    while True:
        idle = threading.Timer(IDLE_S, os._exit, (0,))
        idle.daemon = True
        idle.start()
        line = requests.readline()
        idle.cancel()
        if not line:
            return
        home, name, spec = pickle.loads(base64.b64decode(line))
        module, _, attribute = home.partition(":")
        op = getattr(importlib.import_module(module), attribute)
        impl = next(i for i in op.impls if i.name == name)

        def goes_on(at: str) -> None:
            # the parent kills a check that takes too long; this ends the child if the parent is gone
            faulthandler.dump_traceback_later(sum(LIMITS_S.values()), exit=True)
            tell(at=at)

        tri.HEARS.at = goes_on
        found = examine(op, impl, spec, goes_on)
        faulthandler.cancel_dump_traceback_later()
        spoilt = found.refusal is not None and not _is_sound(spec)
        tell(refusal=found.refusal, lasting=found.lasting, choice=found.choice, spoilt=spoilt)
        if spoilt:
            return


def examine(op: Op[Any, Any], impl: Impl[Any, Any], spec: Any, tell: Callable[[str], None]) -> Verdict:
    """Bind and check in this process. `tell` is called with each stage."""
    assert op.check is not None
    device = device_of(spec)
    context = context_of(device)  # held, because kernels write into its fault record, which is read here
    try:
        with context.current():  # checks allocate and copy on the thread's device
            tell("binding")
            if device.type == "cuda":
                torch.zeros(1, device=device)  # makes the driver's context that kernels are loaded into
            launch, reference = impl.bind(spec), op.reference.bind(spec)
            tell("check")
            faults.read(device)
            refusal = op.check(launch, reference, spec)
            if (fault := faults.read(device)) is not None and refusal is None:
                refusal = f"its guard tripped in its check: {fault.error(faults.ALL_SLOTS)}"
            return Verdict(refusal, choice="" if refusal is not None else _tuned(impl, spec))
    except Exception as e:  # noqa: BLE001 - any error of a foreign compiler means "do not use it"
        return Verdict(f"failed its check: {sentence(e)}", lasting=not _may_pass(e))


def _may_pass(error: BaseException) -> bool:
    """Whether the next try may end otherwise: memory, room on a disk or the right to write is missing, or a program is missing or was
    killed. Errors of foreign compilers say so in their text or in the error that caused them."""
    passing = (MemoryError, OSError, subprocess.SubprocessError, torch.OutOfMemoryError)
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, passing) or any(words in str(found) for words in PASSING):
            return True
        found = found.__cause__ or found.__context__
    return False


def _tuned(impl: Impl[Any, Any], spec: Any) -> str:
    """The fastest choice on this GPU, of an implementation that is right with any choice."""
    try:
        return impl.tune(spec) if impl.tune is not None else ""
    except Exception as e:  # noqa: BLE001 - it runs without, too
        log.info("%s was not tuned: %s", impl.name, sentence(e))
        return ""


def _is_sound(spec: object) -> bool:
    """Whether the GPU still obeys: an illegal access poisons a process for good."""
    device = device_of(spec)
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def _main() -> None:
    """Stdout carries the answers only: other writes to it go to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        log.debug("cores are dumped as usual")
    all_ops()  # imports all ops, while the parent is still starting
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    _main()
