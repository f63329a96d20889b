"""Checks a model's head in another process: a server stays without torch, and takes no GPU memory that its engine has planned for."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from pyspec.catalog import Entry, find, lookup
from pyspec.config import EngineSettings
from pyspec.engine.children import child_environment
from pyspec.errors import DoesNotFit, PyspecError
from pyspec.hub import split_name

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "pyspec.engine.plan.look_apart")

Plan = Callable[[], tuple[Path, EngineSettings]]


@dataclass(frozen=True)
class Named:
    """A model's name: of the catalogue (`model`, perhaps with a colon and a quantisation), or of a repository (`repo`, likewise)."""

    model: str = ""
    repo: str = ""

    @property
    def repository(self) -> str:
        """Its repository; "" for a local file."""
        entry = find(self.model) if self.model else None
        if entry is not None and entry.target is not None:
            return entry.target.repo
        return split_name(self.repo)[0] if self.repo else ""

    def with_quant(self, quant: str) -> str:
        """The argument for another quantisation."""
        return (
            f"{self.model.partition(':')[0]}:{quant}" if self.model else f"-hf {self.repository}:{quant}"
        )


def looked(plan: Plan, named: Named, *, apart: bool) -> str:
    """Call `engine.plan.look.look`, in another process if `apart`; `plan` must be picklable then. Raises the same errors."""
    if apart:
        return _asked(pickle.dumps((plan, named)))
    return _looked(plan, named)


def _looked(plan: Plan, named: Named) -> str:
    # imported by name, because torch comes with it
    return str(import_module("pyspec.engine.plan.look").look(plan, named))


def look_at_name(model: str, plan: Plan, *, apart: bool) -> None:
    """For programs: refuse a name of the catalogue that does not run or fit here, before its download. Paths pass. Raises PyspecError."""
    entry = lookup(model)
    if isinstance(entry, Entry) and entry.target is not None and entry.target.repo:
        entry.target.locate()
        if advice := looked(plan, Named(model), apart=apart):
            raise DoesNotFit(
                f"{advice}. Nothing was downloaded; `pyspec pull {model}` does it all the same"
            )


def _asked(question: bytes) -> str:
    done = subprocess.run(COMMAND, input=question, stdout=subprocess.PIPE, env=child_environment())
    try:
        found = pickle.loads(done.stdout)
    except (
        EOFError,
        pickle.UnpicklingError,
    ):  # the process was killed: the load will report the problem
        log.warning("the look at the file's head ended with status %d", done.returncode)
        return ""
    if isinstance(found, PyspecError):
        raise found
    return str(found)


def main() -> None:
    """Read a plan and a name from stdin, write the result to stdout."""
    plan, named = pickle.load(sys.stdin.buffer)
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # other code may print
    try:
        found: str | PyspecError = _looked(plan, named)
    except PyspecError as e:
        found = e
    out.write(pickle.dumps(found))
    out.flush()


if __name__ == "__main__":
    main()
