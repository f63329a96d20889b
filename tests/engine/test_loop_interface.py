"""Rooms above the loop use its methods and values, not the attributes of its parts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pyspec.engine

ENGINE = Path(pyspec.engine.__file__).parent
ABOVE = [
    *(ENGINE / "process").glob("*.py"),
    ENGINE / "load" / "warmup.py",
    ENGINE / "loop" / "slot_actions.py",
]


def reached(tree: ast.Module) -> list[str]:
    """Attributes of a loop's attributes, as `loop.queue.limit`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            owner = node.value.value
            if (
                isinstance(owner, ast.Name | ast.Attribute)
                and getattr(owner, "id", getattr(owner, "attr", "")) == "loop"
            ):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", ABOVE, ids=lambda path: path.stem)
def test_parts_of_a_loop_are_its_own(path: Path) -> None:
    assert reached(ast.parse(path.read_text(encoding="utf-8"))) == []


def test_a_reach_is_found() -> None:
    assert reached(ast.parse("self.loop.queue.limit = 1\nloop.stats.failed += loop.n_row")) == ["1: self.loop.queue.limit", "2: loop.stats.failed"]  # fmt: skip
