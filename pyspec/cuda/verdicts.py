"""Verdicts on implementations: asked of a child (checker.py) once on a machine, and kept on disk.

A verdict holds for one op, implementation and spec, on one kind of GPU with one driver and compiler, and for the sources it
was made with. Each is a file of its own, written whole or not at all; one that can not be read is as good as none.

Checks of C++ kernels run in the process itself and take half a second of a start. Those that passed are kept together in one file
(`PASSED`), for one build of the library, one torch, and the sources of the checks as they are. A check that failed is repeated.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import json
import logging
import re
import time
from concurrent.futures import CancelledError, Future
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pyspec.cache import write_json
from pyspec.cpu.build import find, isas
from pyspec.cuda import checker, jit, shipped, tri_install
from pyspec.cuda.checker import Checker, Verdict
from pyspec.cuda.machine import machine

log = logging.getLogger(__name__)

# Sources that count if an implementation imports them
OURS = ("pyspec.cuda.ops", "pyspec.cuda.jit", "pyspec.cuda.tri", "pyspec.slots")
Key = dict[str, str]
ROOT = Path(__file__).resolve().parents[1]
CPU_SOURCES = ("cpu", "cuda", "slots", "gguf")  # folders that checks of C++ kernels depend on
PASSED = "cpu.json"
MOST_PASSED = 4096  # checks in that file; one with more begins again


@dataclass(frozen=True, slots=True)
class Candidate:
    """An implementation that is to be used for a spec.

    home    "module:name" where a process finds its op
    module  the one that binds it
    """

    op: str
    home: str
    impl: str
    module: str
    spec: Any


promised: dict[str, Future[Verdict]] = {}
"""Verdicts under way (prepare.py), by `name_of`."""


def refusal(candidate: Candidate) -> str | None:
    """Why the candidate must not be used for its spec: the verdict kept on this machine, or a child's."""
    key = key_of(candidate)
    if (promise := promised.get(name_of(key))) is not None:
        with contextlib.suppress(CancelledError):  # the preparation was closed
            if (found := promise.result()).lasting:
                return found.refusal
    return checked(candidate, key, checker.shared()).refusal


def is_awaited(candidate: Candidate) -> bool:
    """Whether its verdict is under way, so that a caller would wait."""
    promise = promised.get(name_of(key_of(candidate)))
    return promise is not None and not promise.done()


def checked(candidate: Candidate, key: Key, by: Checker) -> Verdict:
    """The kept verdict, or that of a child of `by`, which is kept then."""
    if (kept := load(key)) is not None:
        return kept
    began = time.perf_counter()
    found = by.check(candidate.home, candidate.impl, candidate.spec)
    took = time.perf_counter() - began
    log.info("checked %s %s in %.1f s: %s", candidate.op, candidate.impl, took, found.refusal or "right")
    if found.lasting:
        save(key, found.refusal, found.choice)
    return found


def folder() -> Path:
    return jit.cache_folder().parent / "verdicts"


def key_of(candidate: Candidate) -> Key:
    """Everything a verdict depends on. Devices of one kind share verdicts."""
    spec = candidate.spec
    device = getattr(spec, "device", torch.device("cpu"))
    if is_dataclass(spec) and not isinstance(spec, type) and hasattr(spec, "device"):
        spec = replace(spec, device=torch.device(device.type))
    modules = (candidate.home.partition(":")[0], candidate.module)
    about = {"op": candidate.op, "impl": candidate.impl, "spec": repr(spec), "sources": digest(modules)}
    if candidate.impl == "triton":
        about["triton"] = tri_install.version() or ""
    elif device.type == "cuda" and (
        cubins := shipped.identity(jit.arch_of(torch.cuda.get_device_capability(device)))
    ):
        about["cubins"] = cubins
    return about | asdict(machine(device))


def load(key: Key) -> Verdict | None:
    """The verdict that was kept, if any."""
    try:
        kept = json.loads(_path(key).read_text())
        refusal, choice = kept["refusal"], kept.get("choice", "")
        known = (
            kept["key"] == key
            and (refusal is None or isinstance(refusal, str))
            and isinstance(choice, str)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Verdict(refusal, choice=choice) if known else None


def save(key: Key, refusal: str | None, choice: str = "") -> None:
    """Keep a verdict. A folder that can not be written costs the next process a check."""
    write_json(_path(key), {"key": key, "refusal": refusal, "choice": choice})


def forget_all() -> None:
    """Delete all verdicts, so that everything is checked again."""
    for path in folder().glob("*.json"):
        path.unlink(missing_ok=True)


def name_of(key: Key) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:40]


def _path(key: Key) -> Path:
    return folder() / f"{name_of(key)}.json"


@cache
def digest(modules: tuple[str, ...]) -> str:
    """A hash of these modules, their imports from `OURS`, and the kernels they name with all includes."""
    files = {name: path for name in modules if (path := _file_of(name)) is not None}
    todo = list(files)
    while todo:
        for name in _imports(files[todo.pop()].read_text()):
            if name not in files and (path := _file_of(name)) is not None:
                files[name] = path
                todo.append(name)
    kernels = jit.stems().keys()
    sha = hashlib.sha256()
    for _, path in sorted(files.items()):
        text = path.read_text()
        sha.update(text.encode())
        for stem in sorted(kernels & set(re.findall(r'"(\w+)"', text))):
            sha.update(jit.source(stem).encode())
    return sha.hexdigest()[:16]


def _file_of(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return None if spec is None or not spec.has_location or spec.origin is None else Path(spec.origin)


def _imports(text: str) -> set[str]:
    """Modules of ours that a source imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
        elif isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
    return {n for n in names if n.startswith(OURS)}


# -- checks of C++ kernels, which run in the process itself -------------------------------------------------------------


def has_passed(candidate: Candidate) -> bool:
    """Whether its check passed in an earlier process."""
    return _line(candidate) in _passed()


def keep_passed(candidate: Candidate) -> None:
    """A process that keeps another check at the same time may overwrite this one, which costs the next start a check."""
    passed = _passed()
    passed.add(_line(candidate))
    write_json(folder() / PASSED, {"about": _cpu_digest(), "passed": sorted(passed)})


def _line(candidate: Candidate) -> str:
    return f"{candidate.home} {candidate.impl} {candidate.spec!r}"


@cache
def _cpu_digest() -> str:
    """A digest of all that a check depends on. Sources count by size and time, because reading two hundred takes as long as a check."""
    sha = hashlib.blake2b(digest_size=16)
    library = find(isas()[0])
    sha.update(f"{torch.__version__} {None if library is None else library.name}".encode())
    for path in sorted(path for name in CPU_SOURCES for path in (ROOT / name).rglob("*.py")):
        about = path.stat()
        sha.update(f"{path.relative_to(ROOT)} {about.st_size} {about.st_mtime_ns}\n".encode())
    return sha.hexdigest()


@cache
def _passed() -> set[str]:
    try:
        kept = json.loads((folder() / PASSED).read_text())
        if kept["about"] == _cpu_digest() and len(kept["passed"]) <= MOST_PASSED:
            return set(map(str, kept["passed"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return set()
