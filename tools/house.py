"""Figures of a checkout's structure: how long the loop is, what is too wide or too branched, which class names are double.

    python tools/house.py            this checkout
    python tools/house.py DIR ...    others beside it, one column each: a `git worktree` of an older commit, say

It reads the files under pyspec/ and runs nothing of them; complexity is counted by ruff, whatever `noqa` says.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_PARAMETERS = 8
MOST_COMPLEX = 14
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class File:
    """One source file: where it lies below pyspec/, its lines, and its syntax tree."""

    path: str
    n_line: int
    tree: ast.Module

    def functions(self) -> Iterator[tuple[str, Function]]:
        """Every function and method with its dotted name, those inside others included."""
        yield from _functions(self.tree, "")

    def classes(self) -> Iterator[ast.ClassDef]:
        """The classes of the module itself, not those inside functions or other classes."""
        return (node for node in self.tree.body if isinstance(node, ast.ClassDef))


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield name, child
            yield from _functions(child, f"{name}.")
        else:
            yield from _functions(child, prefix)


def read(root: Path) -> list[File]:
    """The Python files of a checkout's package."""
    files = []
    for path in sorted((root / "pyspec").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        files.append(File(path.relative_to(root).as_posix(), len(text.splitlines()), ast.parse(text)))
    return files


def n_lines(node: Function | ast.ClassDef) -> int:
    """Lines of a definition, its decorators left out."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def n_parameters(function: Function) -> int:
    """What a caller can give: `self` and `cls` do not count, `*args` and `**kwargs` do as one each."""
    a = function.args
    names = [arg.arg for arg in (*a.posonlyargs, *a.args)]
    n_self = 1 if names[:1] in (["self"], ["cls"]) else 0
    return len(names) - n_self + len(a.kwonlyargs) + (a.vararg is not None) + (a.kwarg is not None)


def quantiles(values: Sequence[int]) -> tuple[int, int, int]:
    """(median, ninth decile, largest)."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 9 // 10], ordered[-1]


def doubles(files: Sequence[File]) -> dict[str, list[str]]:
    """Class names that stand in more than one place, with the files."""
    homes: dict[str, list[str]] = defaultdict(list)
    for file in files:
        for cls in file.classes():
            homes[cls.name].append(file.path)
    return {name: paths for name, paths in sorted(homes.items()) if len(paths) > 1}


def complex_functions(root: Path) -> list[str]:
    """`path: name (complexity)` of functions above MOST_COMPLEX, by ruff."""
    command = [
        "ruff",
        "check",
        "--isolated",
        "--no-cache",
        "--ignore-noqa",
        "--select",
        "C901",
        "--output-format",
        "json",
    ]
    limit = f"lint.mccabe.max-complexity={MOST_COMPLEX}"
    ruff = Path(sys.executable).with_name("ruff")
    command[0] = str(ruff) if ruff.exists() else "ruff"
    out = subprocess.run([*command, "--config", limit, "pyspec"], cwd=root, capture_output=True, text=True)
    if out.returncode not in (0, 1):
        raise SystemExit(f"ruff failed in {root}: {out.stderr.strip()}")
    return [
        f"{Path(d['filename']).relative_to(root.resolve()).as_posix()}: {d['message'].split(' is ')[0].strip('`')}"
        f" {d['message'].split('(')[-1].split(' ')[0]}"
        for d in json.loads(out.stdout)
    ]


def public_names(files: Sequence[File]) -> tuple[int, int]:
    """(with a docstring, all) of public classes, functions and methods; special methods and what lies in functions do not count."""
    n_said = n_all = 0
    for file in files:
        nodes: list[Function | ast.ClassDef] = []
        for node in file.tree.body:
            if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
                nodes.append(node)
                if isinstance(node, ast.ClassDef):
                    nodes += [m for m in node.body if isinstance(m, Function) and not m.name.startswith("_")]
        n_all += len(nodes)
        n_said += sum(ast.get_docstring(node) is not None for node in nodes)
    return n_said, n_all


def figures(root: Path) -> tuple[dict[str, str], dict[str, list[str]]]:
    """(figures by name, what stands behind those that are lists) of a checkout."""
    files = read(root)
    every = [(file, name, node) for file in files for name, node in file.functions()]
    loops = [(file, cls) for file in files for cls in file.classes() if cls.name == "Loop"]
    wide = [(n_parameters(node), file.path, name) for file, name, node in every]
    lists = {
        f"functions with more than {MOST_PARAMETERS} parameters": [
            f"{path}: {name} {n}" for n, path, name in sorted(wide, reverse=True) if n > MOST_PARAMETERS
        ],
        f"functions above complexity {MOST_COMPLEX}": complex_functions(root),
        "class names that are double": [f"{name}: {', '.join(paths)}" for name, paths in doubles(files).items()],
    }
    row = {"files, lines": f"{len(files)}, {sum(f.n_line for f in files):,}"}
    for file, cls in loops:
        methods = [m for m in cls.body if isinstance(m, Function)]
        steps = [m for m in methods if m.name.startswith("step")]
        row["file of the loop"] = file.path
        row["its lines; those of class Loop"] = f"{file.n_line}; {n_lines(cls)}"
        row["methods of Loop"] = str(len(methods))
        row["its step functions, lines"] = ", ".join(f"{m.name} {n_lines(m)}" for m in steps)
    row["lines of files: median, 90 %, most"] = "{}, {}, {}".format(*quantiles([f.n_line for f in files]))
    row["lines of functions: median, 90 %, most"] = "{}, {}, {}".format(*quantiles([n_lines(n) for _, _, n in every]))
    row |= {name: str(len(found)) for name, found in lists.items()}
    n_said, n_all = public_names(files)
    row["public names with a docstring"] = f"{n_said} of {n_all} ({n_said / n_all:.0%})"
    return row, lists


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).resolve().parents[1]])
    parser.add_argument("-v", "--verbose", action="store_true", help="name what was counted, too")
    given = parser.parse_args()
    columns = [figures(root) for root in given.checkouts]
    names = list(dict.fromkeys(name for row, _ in columns for name in row))
    print("| | " + " | ".join(root.resolve().name for root in given.checkouts) + " |")
    print("| --- |" + " --- |" * len(columns))
    for name in names:
        print(f"| {name} | " + " | ".join(row.get(name, "-") for row, _ in columns) + " |")
    if given.verbose:
        for root, (_, lists) in zip(given.checkouts, columns, strict=True):
            for name, found in lists.items():
                print(f"\n{root.resolve().name}: {name}")
                print("\n".join(f"  {line}" for line in found))


if __name__ == "__main__":
    main()
