"""The documents' statements about the tree are true: files, links, commands, figures."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from pyspec.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import benchmarks  # noqa: E402  (tools/ is no package)

INDEX = ROOT / "docs" / "log.md"
MONTHS = sorted((ROOT / "docs" / "log").glob("*.md"))
NOW = sorted({ROOT / "README.md", *(ROOT / "docs").glob("*.md")} - {INDEX})
PAGES = [*NOW, INDEX, *MONTHS]  # the log may name files that are gone
PLACES = (
    "",
    "pyspec",
    "pyspec/cuda",
    "pyspec/cuda/ops",
)  # where a file that is named without its folder may lie


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _anchor(head: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", head.lower().replace("`", "")).strip().replace(" ", "-")


def _anchors(page: Path) -> set[str]:
    return {_anchor(head) for head in re.findall(r"^#+ (.+)$", _text(page), re.MULTILINE)}


def test_the_tables_are_made_of_the_figures():
    for path, text in benchmarks.made().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python tools/benchmarks.py"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", _text(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        assert not anchor or anchor in _anchors(there), target


@pytest.mark.parametrize("month", MONTHS, ids=_name)
def test_every_section_of_the_log_stands_in_its_index(month):
    index, sections = _text(INDEX), re.findall(r"^## (.+)$", _text(month), re.MULTILINE)
    assert (
        sections
        and [head for head in sections if f"(log/{month.name}#{_anchor(head)})" not in index] == []
    )


@pytest.mark.parametrize("month", MONTHS, ids=_name)
def test_a_file_of_the_log_has_the_sections_of_its_month_only(month):
    assert {date[:7] for date in re.findall(r"^## (\S+)", _text(month), re.MULTILINE)} == {month.stem}


@pytest.mark.parametrize("page", NOW, ids=_name)
def test_commits_are_named_in_the_log_only(page):
    words = re.findall(r"\b[0-9a-f]{7,40}\b", _text(page))
    assert [w for w in words if re.search(r"\d", w) and re.search(r"[a-f]", w)] == []


def _exists(name: str) -> bool:
    if "/" not in name:  # a file that the text around it has given a folder
        return any((ROOT / "pyspec").rglob(name)) or (ROOT / name).exists()
    return any((ROOT / place / name).exists() for place in PLACES)


@pytest.mark.parametrize("page", NOW, ids=_name)
def test_every_file_that_is_named_exists(page):
    named = re.findall(r"`((?:[\w.]+/)*(?:\w+\.(?:py|cuh?|toml|md))?)`", _text(page))
    assert [name for name in named if name and not _exists(name)] == []


def _commands(page: Path) -> list[str]:
    """Lines of code blocks, and code in text, that call pyspec."""
    text = _text(page).replace("$HOW", "")
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    blocks = blocks.replace("\\\n", " ")
    lines = [line.split("  #")[0].strip() for line in blocks.splitlines()]
    inline = re.findall(r"`(pyspec \w+ -[^`]+)`", text)
    return [line for line in [*lines, *inline] if line.startswith("pyspec ")]


@pytest.mark.parametrize("page", NOW, ids=_name)
def test_every_command_that_is_shown_has_the_flags_it_is_given(page):
    for line in _commands(page):
        _, name, *given = shlex.split(line)
        assert name in COMMANDS, line
        command = main.get_command(None, name)  # type: ignore[arg-type]
        known = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
        assert [w for w in given if re.match(r"--?[a-zA-Z]", w) and w not in known] == [], line


def test_the_readme_shows_commands_to_check():
    assert len(_commands(ROOT / "README.md")) >= 5
