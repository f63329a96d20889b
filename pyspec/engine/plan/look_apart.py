"""The look at a file's head in a process of its own: a server stays without torch, and takes no memory of a GPU that its engine has planned for."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from pyspec.catalog import Entry, find, lookup
from pyspec.config import EngineSettings
from pyspec.errors import DoesNotFit, PyspecError
from pyspec.hub import split_name

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "pyspec.engine.plan.look_apart")

Plan = Callable[[], tuple[Path, EngineSettings]]


@dataclass(frozen=True)
class Named:
    """How the model was named: of the catalogue (`model`, a quantisation may follow a colon), or in a repository (`repo`, likewise)."""

    model: str = ""
    repo: str = ""

    @property
    def repository(self) -> str:
        """Where its file is; "" if that is here."""
        entry = find(self.model) if self.model else None
        if entry is not None and entry.target is not None:
            return entry.target.repo
        return split_name(self.repo)[0] if self.repo else ""

    def with_quant(self, quant: str) -> str:
        """What to type for another quantisation."""
        return f"{self.model.partition(':')[0]}:{quant}" if self.model else f"-hf {self.repository}:{quant}"


def looked(plan: Plan, named: Named, *, apart: bool) -> str:
    """What `engine.look.look` says of a model, in a process of its own if `apart`; `plan` can be pickled then. Raises what it raises."""
    if apart:
        return _asked(pickle.dumps((plan, named)))
    return _looked(plan, named)


def _looked(plan: Plan, named: Named) -> str:
    return str(import_module("pyspec.engine.plan.look").look(plan, named))  # by name: torch comes with it


def look_at_name(model: str, plan: Plan, *, apart: bool) -> None:
    """For programs: refuse a name of the catalogue that does not run or fit here, before it is downloaded. Files go through. Raises PyspecError."""
    entry = lookup(model)
    if isinstance(entry, Entry) and entry.target is not None and entry.target.repo:
        entry.target.locate()
        if said := looked(plan, Named(model), apart=apart):
            raise DoesNotFit(f"{said}. Nothing was downloaded; `pyspec pull {model}` does it all the same")


def _asked(question: bytes) -> str:
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(COMMAND, input=question, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
    try:
        found = pickle.loads(done.stdout)
    except (EOFError, pickle.UnpicklingError):  # it was killed: the load will say what is wrong
        log.warning("the look at the file's head ended with status %d", done.returncode)
        return ""
    if isinstance(found, PyspecError):
        raise found
    return str(found)


def main() -> None:
    """Read a plan and a name from stdin, write what is found to stdout."""
    plan, named = pickle.load(sys.stdin.buffer)
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # for what others print
    try:
        found: str | PyspecError = _looked(plan, named)
    except PyspecError as e:
        found = e
    out.write(pickle.dumps(found))
    out.flush()


if __name__ == "__main__":
    main()
