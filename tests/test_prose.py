"""Docstrings, comments and documents use few words of the dialect that tools/house.py counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sampling import few

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import house  # noqa: E402  (tools/ is no package)

LIMIT = 4.0  # of 1,000 words
MODULES = "pyspec/*.py"  # the modules at the top of the package
PENDING: dict[str, float] = {}
"""Parts above LIMIT, with the share that they may have meanwhile. A part that is below LIMIT may not stay here."""


def parts() -> dict[str, list[str]]:
    """Files and folders that have a limit of their own. docs/log is left out: it keeps the words of its day."""
    documents = [
        "README.md",
        "CHANGELOG.md",
        *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
    ]
    folders = [f"pyspec/{path.name}" for path in (ROOT / "pyspec").iterdir() if any(path.glob("*.py"))]
    whole = ["tools", "tests", "examples"]
    found = {name: [name] for name in [*documents, *folders, *whole]}
    return found | {MODULES: [f"pyspec/{path.name}" for path in (ROOT / "pyspec").glob("*.py")]}


def share_of(names: list[str]) -> float:
    return house.share([line for name in names for line in house.lines_of(ROOT, name)])


@pytest.mark.parametrize("part", few(sorted(parts()), *(parts().keys() - {"tests"})))
def test_few_words_of_the_dialect(part):
    share = share_of(parts()[part])
    limit = PENDING.get(part, LIMIT)
    assert share < limit, (
        f"{share:.1f} of 1,000 words; python tools/house.py --prose {' '.join(parts()[part])} lists the lines"
    )


def test_no_finished_part_is_pending():
    known = parts()
    assert [part for part in PENDING if part not in known or share_of(known[part]) < LIMIT] == []


def test_words_in_code_and_in_quotes_do_not_count(tmp_path):
    (tmp_path / "page.md").write_text('Nobody knows. `nobody` "who"\n```\nwho\n```\n')
    (tmp_path / "code.py").write_text('"""Somebody asks."""\nwho = "what"  # told\n')
    lines = [line for name in ("page.md", "code.py") for line in house.lines_of(tmp_path, name)]
    assert sum(line.n_dialect for line in lines) == 3
