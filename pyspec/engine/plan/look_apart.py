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

from pyspec.catalog import Entry, lookup
from pyspec.config import EngineSettings
from pyspec.engine.children import child_environment
from pyspec.engine.named import Named
from pyspec.errors import DoesNotFit, PyspecError
from pyspec.hub import Repository, split_name
from pyspec.hub.heads import Seen

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "pyspec.engine.plan.look_apart")

Plan = Callable[[], tuple[Path, EngineSettings]]


@dataclass(frozen=True)
class HeadsRead:
    """A summary of the heads of a model's files.

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


def look_at_name(named: Named, plan: Plan, *, apart: bool) -> Named:
    """For programs: refuse a name of the catalogue or of a repository that does not run or fit here, before its download. Paths pass.
    Raises PyspecError.

    Returns the name to load: with another quantisation, where none is named and only another one fits.
    """
    if named.repo:
        repo, quant = split_name(named.repo)
        Repository.open(repo).choose(quant)
    else:
        entry = lookup(named.model)
        if not (isinstance(entry, Entry) and entry.target is not None and entry.target.repo):
            return named
        entry.target.locate()
    found = looked(plan, named, apart=apart)
    if found.quant:
        log.warning("%s", found.advice)
        other = named.with_quant(found.quant)
        return Named(repo=other.removeprefix("-hf ")) if named.repo else Named(other)
    if found.advice:
        name = named.model or f"--hf-repo {named.repo}"  # a command, no argument
        raise DoesNotFit(
            f"{found.advice}. Nothing was downloaded; `pyspec pull {name}` does it all the same"
        )
    return named


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
