"""Counts the words of a dialect that outsiders stumble over: indefinite persons as subjects, clauses without a noun.

    python tools/prose.py                 words and share of this checkout, by folder
    python tools/prose.py PATH ...        each line of these files or folders that has one

It reads docstrings, comments and Markdown. A word that stands in code or between backticks does not count.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DIALECT = re.compile(
    r"\b(nobody|somebody|anybody|everybody|someone|anyone|everyone|no one|whoever|whatever|whichever|who|whom|what"
    r"|told|tells?|heard|hears?)\b",
    re.IGNORECASE,
)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LEFT_OUT = {"docs/log.md"}
"""The log keeps the words of its day."""


@dataclass(frozen=True)
class Line:
    """A line of prose and where it stands."""

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
    """All prose of a file or a folder of the checkout `root`."""
    start = root / below
    for path in [start] if start.is_file() else sorted(start.rglob("*")):
        name = path.relative_to(root).as_posix()
        if name in LEFT_OUT or name.startswith("docs/log/"):
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
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    given = parser.parse_args()
    for below in given.paths:
        found = list(lines_of(given.root, below))
        for line in found:
            if line.n_dialect:
                print(f"{line.path.relative_to(given.root)}:{line.number}: {line.text.strip()}")
        print(f"{below}: {share(found):.1f} of 1,000 ({sum(line.n_word for line in found):,} words)")
    if not given.paths:
        folders = sorted(
            p
            for p in (given.root / "pyspec").iterdir()
            if p.suffix == ".py" or (p.is_dir() and p.name != "__pycache__")
        )
        for below in [
            "README.md",
            "CHANGELOG.md",
            "docs",
            "pyspec",
            "tests",
            "tools",
            *(f"pyspec/{p.name}" for p in folders),
        ]:
            found = list(lines_of(given.root, below))
            print(f"{below:24} {share(found):6.1f} {sum(line.n_word for line in found):8,} words")


if __name__ == "__main__":
    main()
