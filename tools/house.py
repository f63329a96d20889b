"""The house in figures: lines of each folder, what one reads below a file, and the budget that holds both (house-budget.toml).

    python tools/house.py                  this checkout beside its budget
    python tools/house.py --lower          write the budget anew where the house has shrunk; a number that rises is written by hand, with why
    python tools/house.py --trace          also the path of a load and of a round, traced over the demo model on a CPU; --walk lists it
    python tools/house.py --prose PATH...  lines of these files or folders with words of a dialect that outsiders stumble over

Lines are all lines of Python. `below` a file are it and the modules of the package that it imports, and so on: imports inside functions and for
type checkers count, packages that only lead to a module do not.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import sys
import threading
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
BUDGET = "house-budget.toml"
STEP = 50  # numbers of the budget are multiples


# -- sizes -------------------------------------------------------------------------------------------------------------


def n_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def folders(root: Path) -> dict[str, int]:
    """Lines of Python by folder: those of the package, its modules that stand in none, and tests and tools."""
    package = root / "pyspec"
    found = {"pyspec/*.py": sum(map(n_lines, package.glob("*.py")))}
    for folder in sorted(p for p in package.iterdir() if any(p.rglob("*.py"))):
        found[f"pyspec/{folder.name}"] = sum(map(n_lines, folder.rglob("*.py")))
    found["pyspec"] = sum(found.values())
    return found | {name: sum(map(n_lines, (root / name).rglob("*.py"))) for name in ("tests", "tools")}


@cache
def modules(root: Path) -> dict[str, Path]:
    """Files of the package by dotted name."""
    names = {}
    for path in (root / "pyspec").rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@cache
def imports(root: Path, module: str) -> frozenset[str]:
    """Modules of the package that a module names anywhere."""
    known, found = modules(root), set()
    for node in ast.walk(ast.parse(known[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{name.name}" for name in node.names}
            found |= {name if name in known else node.module for name in inner}
    return frozenset(found & known.keys())


def below(root: Path, file: str) -> list[Path]:
    """The files that one reads to know all of a file of the package."""
    known = modules(root)
    left = [next(name for name, path in known.items() if path == root / "pyspec" / file)]
    seen: set[str] = set()
    while left:
        if (name := left.pop()) not in seen:
            seen.add(name)
            left += imports(root, name)
    return [known[name] for name in seen]


def protocols(root: Path) -> int:
    """Classes that are protocols."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in modules(root).values())
    classes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return sum(any(ast.unparse(base).startswith("Protocol") for base in c.bases) for c in classes)


def figures(root: Path, budget: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """The house in the form of the budget."""
    read = {file: below(root, file) for file in budget["files below"]}
    return {
        "lines": folders(root),
        "files below": {file: len(paths) for file, paths in read.items()},
        "lines below": {file: sum(map(n_lines, paths)) for file, paths in read.items()},
        "counts": {"protocols": protocols(root)},
    }


def read_budget(root: Path) -> dict[str, dict[str, int]]:
    tables: dict[str, dict[str, int]] = tomllib.loads((root / BUDGET).read_text(encoding="utf-8"))
    return tables


def over(root: Path) -> list[str]:
    """What is above the budget, or has no number in it."""
    budget, flaws = read_budget(root), []
    for table, numbers in figures(root, budget).items():
        for name, n in numbers.items():
            most = budget[table].get(name)
            if most is None:
                flaws.append(f"{table}: {name} has {n} and no number in {BUDGET}")
            elif n > most:
                flaws.append(f"{table}: {name} has {n} and no more than {most} in {BUDGET}")
    return flaws


def lower(root: Path) -> None:
    """Write smaller numbers where the house has shrunk. Comments stay."""
    now, table, lines = figures(root, read_budget(root)), "", []
    for line in (root / BUDGET).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            table = line.strip('[]"')
        elif found := re.match(r'"?([^"=]+?)"? = (\d+)', line):
            n = now[table].get(found[1], 0)
            least = -(-n // STEP) * STEP if table.startswith("lines") else n
            line = line.replace(found[2], str(min(int(found[2]), least)), 1)
        lines.append(line)
    (root / BUDGET).write_text("\n".join(lines) + "\n", encoding="utf-8")


# -- the path of a load and of a round -----------------------------------------------------------------------------------

LEAST = 8  # lines of a function that is read at its first call, and not where it is called
KERNELS = "cuda"  # the layer that readers of a load do not enter
STEPS = ("step_plain", "step_ahead")


@dataclass
class Trace:
    """Follows calls within the package.

    A reader follows the calls of `Engine.load` in the thread that loads. Each function is read once, if it has LEAST lines or more, and a file above
    the kernels' layer calls it, not an import. Hops are the frames of the package between a round's step function and the op `attend`.
    """

    root: Path
    calls: list[tuple[str, str, int, str]] = field(
        default_factory=list
    )  # file, function, first line, calling file
    attend: list[int] = field(default_factory=list)
    deepest: int = 0

    def name(self, frame: FrameType | None) -> str:
        """The file of a frame below pyspec/; "" for one of another package."""
        package = f"{self.root / 'pyspec'}{os.sep}"
        path = frame.f_code.co_filename if frame is not None else ""
        return path.removeprefix(package) if path.startswith(package) else ""

    def is_import(self, frame: FrameType | None) -> bool:
        while frame is not None and not (frame.f_code.co_name == "<module>" and self.name(frame)):
            frame = frame.f_back
        return frame is not None

    def on_load(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (file := self.name(frame)) and not self.is_import(frame):
            caller = frame.f_back
            while caller is not None and not self.name(caller):
                caller = caller.f_back
            code = frame.f_code
            self.calls.append((file, code.co_name, code.co_firstlineno, self.name(caller)))

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

    def rank(file: str) -> int:
        return ranks.get(file.split("/")[0].removesuffix(".py"), len(ranks))

    @cache
    def lengths(file: str) -> dict[tuple[str, int], int]:
        tree = ast.parse((trace.root / "pyspec" / file).read_text(encoding="utf-8"))
        found = (
            node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        )
        return {
            (n.name, min([n.lineno, *(d.lineno for d in n.decorator_list)])): (n.end_lineno or n.lineno)
            - n.lineno
            + 1
            for n in found
        }

    seen: set[tuple[str, str, int]] = set()
    last = ""
    for file, name, line, caller in trace.calls:
        n_line = lengths(file).get((name, line), 0)
        is_below = bool(caller) and rank(caller) >= ranks[KERNELS]
        if is_below or (file, name, line) in seen or n_line < LEAST:
            continue
        seen.add((file, name, line))
        yield file, name, n_line, bool(last) and rank(file) < rank(last)
        last = file


def trace(root: Path, *, lists: bool) -> None:
    """Load the demo pair, answer, and print the path."""
    import pyspec

    def traced(
        profile: Callable[[FrameType, str, object], None], draft: dict[str, None], threads: bool
    ) -> pyspec.Engine:
        set_profile = threading.setprofile if threads else sys.setprofile
        set_profile(profile)
        try:
            return pyspec.Engine.load("demo", *draft, np=1, ctx=512, device="cpu")
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    load, rounds = Trace(root), Trace(root)
    traced(load.on_load, {}, threads=False).close()
    with traced(rounds.on_round, {}, threads=True) as engine:
        engine.generate("Once upon", max_tokens=3, temperature=0.0)
    path = list(walk(load))
    for file, name, n_line, climbs in path if lists else ():
        print(f"{'^' if climbs else ' '} {file}: {name} ({n_line})")
    n_file, n_climb = len({file for file, *_ in path}), sum(climbs for *_, climbs in path)
    print(f"a load walks through {n_file} files and climbs {n_climb} times to a higher layer")
    print(f"a step has {min(rounds.attend, default=0)} hops to attention, and {rounds.deepest} at most")


# -- prose -------------------------------------------------------------------------------------------------------------

DIALECT = re.compile(
    r"\b(nobody|somebody|anybody|everybody|someone|anyone|everyone|no one|whoever|whatever|whichever|who|whom|what"
    r"|told|tells?|heard|hears?)\b",
    re.IGNORECASE,
)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Line:
    """A line of prose and where it stands. Words in code, in quotes and between backticks are no dialect."""

    path: Path
    number: int
    text: str

    @property
    def n_word(self) -> int:
        return len(WORD.findall(self.text))

    @property
    def n_dialect(self) -> int:
        return len(DIALECT.findall(QUOTED.sub("", self.text)))


def of_python(path: Path) -> Iterator[Line]:
    """Docstrings, strings that stand alone as docstrings do, and comments."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            for i, line in enumerate(node.value.value.split("\n")):
                yield Line(path, node.lineno + i, line)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield Line(path, token.start[0], token.string)


def of_markdown(path: Path) -> Iterator[Line]:
    """A document without its blocks of code."""
    text = FENCED.sub(lambda m: "\n" * m[0].count("\n"), path.read_text(encoding="utf-8"))
    for i, line in enumerate(text.split("\n"), start=1):
        yield Line(path, i, line)


def lines_of(root: Path, below: str) -> Iterator[Line]:
    """All prose of a file or a folder of a checkout, but the log's, which keeps the words of its day."""
    start = root / below
    for path in [start] if start.is_file() else sorted(start.rglob("*")):
        if path.relative_to(root).as_posix().startswith(("docs/log/", "docs/log.md")):
            continue
        if path.suffix == ".py":
            yield from of_python(path)
        elif path.suffix == ".md":
            yield from of_markdown(path)


def share(lines: list[Line]) -> float:
    """Dialect words in a thousand."""
    return 1e3 * sum(line.n_dialect for line in lines) / max(1, sum(line.n_word for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lower", action="store_true")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--walk", action="store_true")
    parser.add_argument("--prose", nargs="+", default=[], metavar="PATH")
    how = parser.parse_args()
    for name in how.prose:
        found = list(lines_of(ROOT, name))
        for line in (line for line in found if line.n_dialect):
            print(f"{line.path.relative_to(ROOT)}:{line.number}: {line.text.strip()}")
        print(f"{name}: {share(found):.1f} of 1,000 words")
    if how.prose:
        return
    if how.lower:
        lower(ROOT)
    budget = read_budget(ROOT)
    for table, numbers in figures(ROOT, budget).items():
        print(f"\n{table:36} {'now':>8} {'budget':>8}")
        for name, n in numbers.items():
            most = budget[table].get(name, 0)
            print(f"  {name:34} {n:8,} {most:8,}{'  OVER' if n > most else ''}")
    if how.trace or how.walk:
        trace(ROOT, lists=how.walk)
    sys.exit("\n".join(["", *flaws]) if (flaws := over(ROOT)) else 0)


if __name__ == "__main__":
    main()
