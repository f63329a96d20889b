"""The public API and the core have docstrings."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pyspec"
PUBLIC = [  # modules that programs import, and the rooms that everything else is built on
    *(PACKAGE / name for name in ("__init__.py", "config.py", "errors.py", "ranges.py", "registry.py", "request.py")),
    *(path for name in ("draft", "slots", "device", "engine") for path in sorted((PACKAGE / name).glob("*.py"))),
]  # fmt: skip
Named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _is_public(node: ast.stmt) -> bool:
    return isinstance(node, Named) and not node.name.startswith("_")


def _is_property(node: Named) -> bool:
    names = {getattr(d, "id", getattr(d, "attr", "")) for d in getattr(node, "decorator_list", ())}
    return bool(names & {"property", "cached_property", "setter"})


def _says_itself(node: Named) -> bool:
    """A property of a line or two is explained by its name; a function's overloads are explained by the last one."""
    if "overload" in {getattr(d, "id", "") for d in getattr(node, "decorator_list", ())}:
        return True
    return _is_property(node) and (node.end_lineno or node.lineno) - node.lineno <= 3


def _explained(owner: ast.AST) -> dict[str, bool]:
    """Public functions of a class or module, and whether they have a docstring."""
    functions = [
        n for n in getattr(owner, "body", ()) if isinstance(n, ast.FunctionDef) and _is_public(n)
    ]
    return {n.name: ast.get_docstring(n) is not None for n in functions if not _is_property(n)}


@cache
def _contracts() -> list[dict[str, bool]]:
    """The protocols of these modules: methods explained there need no docstring where they are implemented."""
    classes = [node for path in PUBLIC for node in _tree(path).body if isinstance(node, ast.ClassDef)]
    return [
        _explained(c) for c in classes if any(getattr(base, "id", "") == "Protocol" for base in c.bases)
    ]


@cache
def _classes() -> dict[str, ast.ClassDef]:
    return {n.name: n for path in PUBLIC for n in _tree(path).body if isinstance(n, ast.ClassDef)}


def _inherited(owner: ast.AST) -> set[str]:
    """Methods that a base class of these modules explains."""
    found = [_classes().get(getattr(base, "id", "")) for base in getattr(owner, "bases", ())]
    bases = [base for base in found if base is not None]
    said = {name for base in bases for name, is_explained in _explained(base).items() if is_explained}
    return said.union(*map(_inherited, bases))


def _explained_elsewhere(owner: ast.AST) -> set[str]:
    own = _explained(owner)
    fulfilled = [contract for contract in _contracts() if contract and contract.keys() <= own.keys()]
    said = {name for contract in fulfilled for name, is_explained in contract.items() if is_explained}
    return said | _inherited(owner)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _missing(path: Path) -> list[str]:
    tree, found = _tree(path), []
    for owner in (
        tree,
        *(node for node in tree.body if isinstance(node, ast.ClassDef) and _is_public(node)),
    ):
        elsewhere = _explained_elsewhere(owner)
        for node in filter(_is_public, owner.body):
            is_said = ast.get_docstring(node) is not None or _says_itself(node) or node.name in elsewhere
            if not is_said:
                found.append(f"{path.relative_to(PACKAGE.parent).as_posix()}:{node.lineno}: {node.name}")
    return found


@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_public_names_say_what_they_are_for(path):
    assert _missing(path) == []


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").exists()
