"""Checks a model's head in another process: a server stays without torch, and takes no GPU memory that its engine has planned for."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from pyspec.catalog import Entry, find, lookup
from pyspec.config import EngineSettings
from pyspec.engine.children import child_environment
from pyspec.errors import DoesNotFit, PyspecError
from pyspec.hub import split_name
from pyspec.hub.heads import Seen

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "pyspec.engine.plan.look_apart")

Plan = Callable[[], tuple[Path, EngineSettings]]


@dataclass(frozen=True)
class Named:
    """A model's name: of the catalogue (`model`, perhaps with a colon and a quantisation), or of a repository (`repo`, likewise, or with
    the name of a `file`)."""

    model: str = ""
    repo: str = ""
    file: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it leaves the quantisation to pyspec."""
        return not self.file and ":" not in (self.model or self.repo)

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


@dataclass(frozen=True)
class HeadsRead:
    """What the heads of a model's files say.

    advice  why the model does not fit, without a full stop, and what would; "" if it fits
    quant   the quantisation to take instead, where none was named
    seen    entity tags of the files whose heads were read
    """

    advice: str = ""
    quant: str = ""
    seen: Seen = field(default_factory=dict)


def looked(plan: Plan, named: Named, *, apart: bool) -> HeadsRead:
    """Call `engine.plan.look.look`, in another process if `apart`; `plan` must be picklable then. Raises the same errors."""
    if apart:
        return _asked(pickle.dumps((plan, named)))
    return _looked(plan, named)


def _looked(plan: Plan, named: Named) -> HeadsRead:
    # imported by name, because torch comes with it
    found = import_module("pyspec.engine.plan.look").look(plan, named)
    assert isinstance(found, HeadsRead)
    return found


def look_at_name(model: str, plan: Plan, *, apart: bool) -> str:
    """For programs: refuse a name of the catalogue that does not run or fit here, before its download. Paths pass. Raises PyspecError.

    Returns the name to load: with another quantisation, where none is in `model` and only another one fits.
    """
    entry = lookup(model)
    if not (isinstance(entry, Entry) and entry.target is not None and entry.target.repo):
        return model
    entry.target.locate()
    named = Named(model)
    found = looked(plan, named, apart=apart)
    if found.quant:
        log.warning("%s", found.advice)
        return named.with_quant(found.quant)
    if found.advice:
        raise DoesNotFit(
            f"{found.advice}. Nothing was downloaded; `pyspec pull {model}` does it all the same"
        )
    return model


def _asked(question: bytes) -> HeadsRead:
    done = subprocess.run(COMMAND, input=question, stdout=subprocess.PIPE, env=child_environment())
    try:
        found = pickle.loads(done.stdout)
    except (
        EOFError,
        pickle.UnpicklingError,
    ):  # the process was killed: the load will report the problem
        log.warning("the look at the file's head ended with status %d", done.returncode)
        return HeadsRead()
    if isinstance(found, PyspecError):
        raise found
    assert isinstance(found, HeadsRead)
    return found


def main() -> None:
    """Read a plan and a name from stdin, write the result to stdout."""
    plan, named = pickle.load(sys.stdin.buffer)
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # other code may print
    try:
        found: HeadsRead | PyspecError = _looked(plan, named)
    except PyspecError as e:
        found = e
    out.write(pickle.dumps(found))
    out.flush()


if __name__ == "__main__":
    main()
