"""Checks of implementations in a child process: one that crashes, hangs or poisons the GPU costs the child.

This is the parent's side, which knows candidates by name only; check_child.py is the other. The child starts with the first check,
runs one after another, reports each stage, and exits when it is idle for a while. If it dies, the candidate under check is refused, and
a new child goes on with the next. Verdicts are kept on disk (verdicts.py), so each check runs once per machine, spec and source.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import pickle
import queue
import signal
import threading
import time
from concurrent.futures import CancelledError, Future
from functools import cache

from pyspec.cuda.checks import process, verdicts
from pyspec.cuda.checks.process import Checker as _Child
from pyspec.cuda.checks.verdicts import Candidate, Verdict

log = logging.getLogger(__name__)

LIMITS_S = {"start": 120.0, "binding": 300.0, "check": 60.0}  # how long the child may be at each, compiling included


promised: dict[str, Future[Verdict]] = {}
"""Verdicts under way (prepare.py), by `verdicts.name_of`."""


def verdict(candidate: Candidate) -> str | None:
    """Why the candidate must not be used for its spec: the verdict kept on this machine, or a child's."""
    key = verdicts.key_of(candidate)
    if (promise := promised.get(verdicts.name_of(key))) is not None:
        with contextlib.suppress(CancelledError):  # the preparation was closed
            if (found := promise.result()).lasting:
                return found.refusal
    return examined(candidate, key, prober()).refusal


def is_awaited(candidate: Candidate) -> bool:
    """Whether its verdict is under way, so that a caller would wait."""
    promise = promised.get(verdicts.name_of(verdicts.key_of(candidate)))
    return promise is not None and not promise.done()


def examined(candidate: Candidate, key: verdicts.Key, by: Prober) -> Verdict:
    """The kept verdict, or that of a child of `by`, which is kept then."""
    kept = verdicts.load(key)
    if kept is not None:
        return kept
    began = time.perf_counter()
    found = by.check(candidate.home, candidate.impl, candidate.spec)
    took = time.perf_counter() - began
    log.info("checked %s %s in %.1f s: %s", candidate.op, candidate.impl, took, found.refusal or "right")
    if found.lasting:
        verdicts.save(key, found.refusal, found.choice)
    return found


def close() -> None:
    """Let children go now instead of when they have been idle."""
    prober().close()
    process.let_go()


@cache
def prober() -> Prober:
    return Prober(LIMITS_S)


def sentence(error: BaseException) -> str:
    """An exception in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


class Prober:
    """The parent's side. Safe to use from several threads; one check at a time."""

    def __init__(self, limits_s: dict[str, float]) -> None:
        self.limits_s = limits_s
        self._child: _Child | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start a child for checks to come, because it takes seconds to start."""
        with self._lock:
            self._child = self._child or process.take()

    def check(self, home: str, impl: str, spec: object) -> Verdict:
        """Have `impl` of the op at `home` ("module:name") checked for `spec`."""
        try:
            request = base64.b64encode(pickle.dumps((home, impl, spec))) + b"\n"
        except (pickle.PicklingError, AttributeError, TypeError) as e:
            return Verdict(f"could not be checked: {sentence(e)}", lasting=False)
        with self._lock:
            why = ""
            for _ in range(2):  # an idle child may exit just before the request
                child = self._child = self._child or process.take()
                child.send(request)
                found, why = self._listen(child)
                if found is not None:
                    return found
            return Verdict(f"could not be checked: {why}", lasting=False)

    def _listen(self, child: _Child) -> tuple[Verdict | None, str]:
        """The child's verdict; None and the reason if it never came to this request."""
        at = "start"
        while True:
            try:
                line = child.lines.get(timeout=self.limits_s[at])
            except queue.Empty:
                self._drop()
                late = f"its {at} took more than {self.limits_s[at]:.0f} s"
                return (None, late) if at == "start" else (Verdict(late), "")
            if line is None:
                self._drop()
                why = child.last_words()
                if at == "start":
                    return None, why
                killed = child.process.returncode == -signal.SIGKILL  # by a user or the kernel's out-of-memory killer
                return Verdict(f"its {at} ended the process: {why}", lasting=not killed), ""
            answer = json.loads(line)
            if "at" in answer:
                at = answer["at"]
                continue
            if answer["spoilt"]:
                self._drop()
            return Verdict(answer["refusal"], answer["lasting"], answer["choice"]), ""

    def _drop(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def close(self) -> None:
        with self._lock:
            self._drop()
