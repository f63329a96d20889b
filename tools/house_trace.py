"""The path of a load and of a round through a checkout's files, traced while the demo model runs on a CPU.

    python tools/house_trace.py ROOT          one line of JSON: [files, climbs] of a load, and hops; house.py calls it for each checkout
    python tools/house_trace.py ROOT --walk   the walk of a load, a function a line: climbs are numbered, files that are new have a star

Definitions. A reader follows the calls of `Engine.load` in the thread that loads. Each function is read once, at its first call, if it
has LEAST lines or more (a shorter one is read where it is called), and a file above the kernels' layer calls it, not an import. `files` are the
distinct files of that walk. `climbs` count the steps of the walk from a file to one of a higher layer, by the layers of the checkout's
pyproject.toml. (A load on a GPU ends with rounds that warm up, and those on a CPU did until 2026-11-27.) `hops` are the frames of the package between a round's step function and the first frame of the op `attend`, and the
most frames that any call of a round has.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType

LEAST = 8  # lines
KERNELS = ("cuda", "kernels")  # the layer that readers of a load do not enter
STEPS = ("step_plain", "step_ahead")


@dataclass
class Trace:
    """Follows calls within the package that lies in `root`."""

    root: Path
    calls: list[tuple[str, str, int, str]] = field(
        default_factory=list
    )  # file, function, first line, calling file
    attend: list[int] = field(default_factory=list)
    deepest: int = 0
    _package: str = ""

    def __post_init__(self) -> None:
        self._package = f"{self.root.resolve() / 'pyspec'}{os.sep}"

    def name(self, frame: FrameType | None) -> str:
        """The file of a frame below pyspec/; "" for one of another package."""
        path = frame.f_code.co_filename if frame is not None else ""
        return path.removeprefix(self._package) if path.startswith(self._package) else ""

    def is_import(self, frame: FrameType | None) -> bool:
        """A module of the package is being imported: its body calls."""
        while frame is not None and not (frame.f_code.co_name == "<module>" and self.name(frame)):
            frame = frame.f_back
        return frame is not None

    def on_load(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (file := self.name(frame)) and not self.is_import(frame):
            caller = frame.f_back
            while caller is not None and not self.name(caller):
                caller = caller.f_back
            self.calls.append(
                (file, frame.f_code.co_name, frame.f_code.co_firstlineno, self.name(caller))
            )

    def on_round(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not (file := self.name(frame)):
            return
        depth, at = 0, frame.f_back
        while at is not None and at.f_code.co_name not in STEPS:
            depth, at = depth + bool(self.name(at)), at.f_back
        if at is not None:
            self.deepest = max(self.deepest, depth + 1)
            if "/ops/attend/" in f"/{file}":
                self.attend.append(depth + 1)


def layers(root: Path) -> dict[str, int]:
    """The rank of each part of the package, the highest layer first."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    names = next(
        c["layers"] for c in contracts if c["type"] == "layers" and c["containers"] == ["pyspec"]
    )
    return {part.strip(): rank for rank, layer in enumerate(names) for part in layer.split("|")}


def walk(trace: Trace) -> Iterator[tuple[str, str, int, bool]]:
    """(file, function, its lines, whether it is a climb to it) in the order in which a reader meets them."""
    ranks = layers(trace.root)
    floor = min(ranks[name] for name in KERNELS if name in ranks)

    def rank(file: str) -> int:
        return ranks.get(file.split("/")[0].removesuffix(".py"), len(ranks))

    @cache
    def lengths(file: str) -> dict[tuple[str, int], int]:
        found = {}
        for node in ast.walk(ast.parse((trace.root / "pyspec" / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                found[node.name, first] = (node.end_lineno or node.lineno) - node.lineno + 1
        return found

    seen: set[tuple[str, str, int]] = set()
    last = ""
    for file, name, line, caller in trace.calls:
        if caller and rank(caller) >= floor:
            continue
        n_line = lengths(file).get((name, line), 0)
        if (file, name, line) in seen or n_line < LEAST:
            continue
        seen.add((file, name, line))
        yield file, name, n_line, bool(last) and rank(file) < rank(last)
        last = file


def traced(
    profile: Callable[[FrameType, str, object], None], run: Callable[[], object], threads: bool
) -> object:
    """Run with `profile` on this thread, or on threads that begin meanwhile."""
    if threads:
        threading.setprofile(profile)
    else:
        sys.setprofile(profile)
    try:
        return run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(root))
    import pyspec

    load, rounds = Trace(root), Trace(root)
    options = {"np": 1, "ctx": 512, "device": "cpu"}
    with traced(load.on_load, lambda: pyspec.Engine.load("demo", **options), threads=False):  # type: ignore[attr-defined,arg-type]
        pass
    engine = traced(rounds.on_round, lambda: pyspec.Engine.load("demo", None, **options), threads=True)  # type: ignore[arg-type]
    with engine:  # type: ignore[attr-defined]
        engine.generate("Once upon", max_tokens=3, temperature=0.0)  # type: ignore[attr-defined]
    path = list(walk(load))
    if "--walk" in sys.argv:
        files, n_climb = set[str](), 0
        for file, name, n_line, climbs in path:
            n_climb += climbs
            print(
                f"{n_climb if climbs else '':4} {' ' if file in files else '*'} {file}: {name} ({n_line})"
            )
            files.add(file)
    found = {"load": (len({file for file, *_ in path}), sum(climbs for *_, climbs in path))}
    attend = min(rounds.attend, default=0)
    print(json.dumps(found | {"attend": attend, "deepest": rounds.deepest}))


if __name__ == "__main__":
    main()
