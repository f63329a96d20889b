"""One word, one meaning: the glossaries of docs/ against the names in the tree."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pyspec"
CORE = (
    "engine",
    "device",
    "slots",
    "draft",
)  # whose classes the glossary has to know, if they bear its words

# Words that had several meanings, or none that a reader could guess, and the folders in which no name has one of them as a part;
# () are all. What they are called now: lost_track, Lookahead, launch_next, PendingRound; the rest says what is meant each time.
DEAD: dict[str, tuple[str, ...]] = {
    "deaf": (),
    "course": (),
    "fly": (),
    "laid": (),
    "told": (),
    "turn": (
        "cuda",
        "models",
        "slots",
        "device",
        "draft",
        "sample",
    ),  # a chat's and a benchmark's are turns
    "job": ("server", "bench", "cli"),  # the loop's
}
DEAD_FILES = {"whole.cuh", "next.cuh", "next_product.py", "only_folds.py", "turns.py", "flight.py"}


@cache
def _trees() -> dict[str, ast.Module]:
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def _classes() -> dict[str, list[str]]:
    """Files by the name of the classes at their top."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path, tree in _trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path)
    return homes


GLOSSARIES = (
    ("architecture.md", "Words"),
    ("architecture.md", "Words of drafters"),
    ("kernels.md", "Words"),
)  # pages and headings


def _rows(page: str, heading: str) -> list[list[str]]:
    """The rows of a page's glossary: words, meaning, where."""
    section = (
        (ROOT / "docs" / page)
        .read_text(encoding="utf-8")
        .split(f"\n## {heading}\n")[1]
        .split("\n## ")[0]
    )
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [re.split(r"\s*\|\s*", line.strip("| ")) for line in lines[2:]]


@cache
def _words() -> dict[str, str]:
    """The glossaries: where each word is at home."""
    words = {}
    for names, _, where in (row for place in GLOSSARIES for row in _rows(*place)):
        for word in names.split(", "):
            assert word not in words, f"'{word}' stands twice in the glossaries"
            words[word] = where.strip("`")
    return words


def _class_name(word: str) -> str:
    return "".join(part.capitalize() for part in re.split(r"[ _-]", word))


def _parts(name: str) -> list[str]:
    """Of launch_next, RunBehind and _run_behind alike: run, behind."""
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


@cache
def _named() -> dict[str, list[tuple[int, str, list[str]]]]:
    """Of each file: the names it gives, where, and in parts."""
    return {
        path: [(*found, _parts(found[1])) for found in _given_names(tree)]
        for path, tree in _trees().items()
    }


def _given_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names that the file gives: of classes, functions, parameters, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def test_no_two_classes_have_the_same_name():
    assert {name: paths for name, paths in _classes().items() if len(paths) > 1} == {}


def test_the_glossary_is_read():
    words = _words()
    assert len(words) > 30 and words["slot"] == "slots/table.py" and words["op"] == "cuda/op.py"


@pytest.mark.parametrize("word", sorted(_words()))
def test_every_word_names_a_file_that_has_it(word):
    path = _words()[word]
    text = f"{path} {(PACKAGE / path).read_text(encoding='utf-8')}".lower()
    first = word.split(" of ")[0]  # records of a state
    stem = first if len(first) < 5 else first[:-1]  # records, accepted
    assert any(form in text for form in (stem, stem.replace(" ", "_"), stem.replace(" ", "")))


def test_a_class_that_bears_a_word_is_where_the_glossary_says():
    wrong = {}
    for word, where in _words().items():
        homes = [path for path in _classes().get(_class_name(word), ()) if path.split("/")[0] in CORE]
        if homes and homes != [where]:
            wrong[word] = homes
    assert wrong == {}


@pytest.mark.parametrize("word", sorted(DEAD))
def test_a_dead_word_does_not_come_back(word):
    folders = DEAD[word]
    found = [
        f"pyspec/{path}:{line}: {name}"
        for path, names in _named().items()
        if not folders or path.split("/")[0] in folders
        for line, name, parts in names
        if word in parts
    ]
    assert found == []


def test_dead_files_do_not_come_back():
    assert [path.name for path in PACKAGE.rglob("*") if path.name in DEAD_FILES] == []
