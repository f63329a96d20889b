"""Figures of a checkout's structure, as a table: sizes by folder, the loop, wide and branched functions, long lines, dialect words.

    python tools/house.py            this checkout
    python tools/house.py DIR ...    others beside it, one column each, for example a `git worktree` of an older commit
    python tools/house.py --trace    also the path of a load and of a round, traced over the demo model (house_trace.py)

Without `--trace` it reads files and runs nothing. ruff counts complexity and ignores `noqa`. A code line is neither blank, a comment
nor a docstring. Concepts are the rows of the glossary in docs/architecture.md, and those of drafters and kernels. prose.py counts dialect words.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import prose

MOST_PARAMETERS = 8
MOST_COMPLEX = 14
LONG = 100  # characters of a code line
FOLDERS = ("pyspec", "tests", "tools", "examples")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class File:
    """One source file: where it lies below pyspec/, its lines, and its syntax tree."""

    path: str
    n_line: int
    tree: ast.Module
    text: str

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
        files.append(
            File(path.relative_to(root).as_posix(), len(text.splitlines()), ast.parse(text), text)
        )
    return files


def n_lines(node: Function | ast.ClassDef) -> int:
    """Lines of a definition, its decorators left out."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def n_parameters(function: Function) -> int:
    """Parameters without `self` and `cls`; `*args` and `**kwargs` count as one each."""
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
    out = subprocess.run(
        [*command, "--config", limit, "pyspec"], cwd=root, capture_output=True, text=True
    )
    if out.returncode not in (0, 1):
        raise SystemExit(f"ruff failed in {root}: {out.stderr.strip()}")
    return [
        f"{Path(d['filename']).relative_to(root.resolve()).as_posix()}: {d['message'].split(' is ')[0].strip('`')}"
        f" {d['message'].split('(')[-1].split(' ')[0]}"
        for d in json.loads(out.stdout)
    ]


def public_names(files: Sequence[File]) -> tuple[int, int]:
    """(with a docstring, all) of public classes, functions and methods, without special methods and nested functions."""
    n_said = n_all = 0
    for file in files:
        nodes: list[Function | ast.ClassDef] = []
        for node in file.tree.body:
            if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
                nodes.append(node)
                if isinstance(node, ast.ClassDef):
                    nodes += [
                        m for m in node.body if isinstance(m, Function) and not m.name.startswith("_")
                    ]
        n_all += len(nodes)
        n_said += sum(ast.get_docstring(node) is not None for node in nodes)
    return n_said, n_all


def code_lines(file: File) -> list[str]:
    """The lines of a file that are code: docstrings, comments and blank lines are left out."""
    docs = {
        n
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for n in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    skipped = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    tokens = tokenize.generate_tokens(io.StringIO(file.text).readline)
    numbers = {n for t in tokens if t.type not in skipped for n in range(t.start[0], t.end[0] + 1)}
    lines = file.text.split("\n")
    return [lines[n - 1] for n in sorted(numbers - docs)]


def n_concepts(root: Path) -> str:
    """Rows of the glossaries: the loop's, and those of other pages."""

    def n_row(path: Path) -> int:
        section = re.split(r"\n## Words\b.*\n", path.read_text(encoding="utf-8"))[1:]
        lines = "".join(section).partition("\n## ")[0].splitlines()
        return len([line for line in lines if re.match(r"\| (?!---|word)", line)])

    loop = root / "docs" / "architecture.md"
    return f"{n_row(loop)}, {sum(n_row(p) for p in (root / 'docs').glob('*.md') if p != loop)}"


def folder_rows(root: Path) -> dict[str, str]:
    """Lines of Python by folder, those of the package by its own folders, and of other sources."""

    def n_line(path: Path) -> int:
        return len(path.read_text(encoding="utf-8", errors="replace").splitlines())

    def total(folder: Path, *patterns: str) -> str:
        found = [p for pattern in patterns for p in folder.rglob(pattern) if ".venv" not in p.parts]
        return f"{sum(map(n_line, found)):,}"

    rows = {f"lines of Python in {name}/": total(root / name, "*.py") for name in FOLDERS}
    rows["lines of CUDA"] = total(root / "pyspec", "*.cu", "*.cuh")
    rows["lines of docs/*.md and README, without the log"] = (
        f"{sum(n_line(p) for p in [*(root / 'docs').glob('*.md'), root / 'README.md'] if p.name != 'log.md'):,}"
    )
    for folder in sorted((root / "pyspec").iterdir()):
        if folder.is_dir() and any(folder.rglob("*.py")):
            rows[f"lines of Python in pyspec/{folder.name}/"] = total(folder, "*.py")
    return rows


def prose_rows(root: Path) -> dict[str, str]:
    """Dialect words of 1,000."""
    names = ("pyspec", "docs", "README.md", "tests", "tools")
    return {
        f"dialect words of 1,000, {name}": f"{prose.share(list(prose.lines_of(root, name))):.1f}"
        for name in names
    }


def trace_rows(root: Path) -> dict[str, str]:
    """The path of a load and of a round."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("house_trace.py")), str(root)]
    out = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
    if out.returncode:
        raise SystemExit(f"the trace failed in {root}: {out.stderr.strip()[-500:]}")
    found = json.loads(out.stdout.splitlines()[-1])
    return {
        "files and climbs of load(path)": "{}, {}".format(*found["load"]),
        "hops of a step to attention; most": f"{found['attend']}; {found['deepest']}",
    }


def figures(root: Path) -> tuple[dict[str, str], dict[str, list[str]]]:
    """(figures by name, the names behind those that count a list) of a checkout."""
    files = read(root)
    every = [(file, name, node) for file in files for name, node in file.functions()]
    loops = [(file, cls) for file in files for cls in file.classes() if cls.name == "Loop"]
    wide = [(n_parameters(node), file.path, name) for file, name, node in every]
    lists = {
        f"functions with more than {MOST_PARAMETERS} parameters": [
            f"{path}: {name} {n}" for n, path, name in sorted(wide, reverse=True) if n > MOST_PARAMETERS
        ],
        f"functions above complexity {MOST_COMPLEX}": complex_functions(root),
        "class names that are double": [
            f"{name}: {', '.join(paths)}" for name, paths in doubles(files).items()
        ],
    }
    row = {"files, lines": f"{len(files)}, {sum(f.n_line for f in files):,}"}
    for file, cls in loops:
        methods = [m for m in cls.body if isinstance(m, Function)]
        steps = [m for m in methods if m.name.startswith("step")]
        row["file of the loop"] = file.path
        row["its lines; those of class Loop"] = f"{file.n_line}; {n_lines(cls)}"
        row["methods of Loop"] = str(len(methods))
        row["its step functions, lines"] = ", ".join(f"{m.name} {n_lines(m)}" for m in steps)
    row["lines of files: median, 90 %, most"] = "{}, {}, {}".format(
        *quantiles([f.n_line for f in files])
    )
    row["lines of functions: median, 90 %, most"] = "{}, {}, {}".format(
        *quantiles([n_lines(n) for _, _, n in every])
    )
    row |= {name: str(len(found)) for name, found in lists.items()}
    n_said, n_all = public_names(files)
    row["public names with a docstring"] = f"{n_said} of {n_all} ({n_said / n_all:.0%})"
    row["functions"] = f"{len(every):,}"
    lines = [line for file in files for line in code_lines(file)]
    row[f"code lines; above {LONG} characters"] = (
        f"{len(lines):,}; {sum(len(x) > LONG for x in lines) / len(lines):.1%}"
    )
    row["concepts (rows of the glossary): of the loop, of other rooms"] = n_concepts(root)
    row |= prose_rows(root) | folder_rows(root)
    return row, lists


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).resolve().parents[1]])
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also list the names behind the numbers"
    )
    parser.add_argument("--trace", action="store_true")
    given = parser.parse_args()
    columns = [figures(root) for root in given.checkouts]
    for root, (row, _) in zip(given.checkouts, columns, strict=True):
        row |= trace_rows(root) if given.trace else {}
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
