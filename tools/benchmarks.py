"""docs/benchmarks.md out of docs/benchmarks.toml, where the figures stand.

python tools/benchmarks.py            write it
python tools/benchmarks.py --check    compare it with the figures; exit status 1 if it differs
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
LINE = 120  # characters of a command
RUNS = ("pyspec", "python", "make")


def page(data: Mapping) -> str:
    """docs/benchmarks.md."""
    parts = [
        "<!-- made by tools/benchmarks.py of benchmarks.toml; change that and run it -->",
        f"# {data['title']}",
    ]
    parts += [data["lead"].strip(), *(table(q) for q in data["question"])]
    return "\n\n".join(parts) + "\n"


def table(question: Mapping) -> str:
    """One question: its head, its words, its rows, and below them the commands by number. Without rows it is words alone."""
    lines = [f"## {question['title']}\n\n{question['lead'].strip()}\n"]
    if "row" not in question:
        return lines[0].rstrip()
    heads = ["", *question["columns"], "date", "on", ""]
    lines.append("| " + " | ".join(heads) + " |")
    lines.append("| --- |" + " ---: |" * len(question["columns"]) + " --- |" * 3)
    commands: list[str] = []
    for row in question["row"]:
        if len(row["figures"]) != len(question["columns"]):
            raise SystemExit(
                f"{row['what']}: {len(row['figures'])} figures for {len(question['columns'])} columns"
            )
        if row["command"] != "the same":
            commands.append(row["command"])
        number = f"[{len(commands)}]"
        lines.append(
            "| " + " | ".join([row["what"], *row["figures"], str(row["date"]), row["on"], number]) + " |"
        )
    return "\n".join([*lines, "", "```", *_commands(question["row"]), "```"])


def _commands(rows: Sequence[Mapping]) -> list[str]:
    """A block of code: each command below its number and the remarks of the rows that share it."""
    found: list[tuple[str, list[str]]] = []
    for row in rows:
        if row["command"] != "the same":
            found.append((row["command"], []))
        if "note" in row:
            found[-1][1].append(row["note"])
    lines = []
    for number, (command, notes) in enumerate(found, start=1):
        runs = command.split()[0] in RUNS or "=" in command.split()[0]
        remarks = "; ".join(notes if runs else [command, *notes])
        lines += textwrap.wrap(
            f"[{number}] {remarks}".rstrip(), LINE, initial_indent="# ", subsequent_indent="#     "
        )
        if runs:
            lines += [f"{line} \\" for line in _cut(command)[:-1]] + _cut(command)[-1:]
    return lines


def _cut(command: str) -> list[str]:
    return textwrap.wrap(
        command, LINE - 2, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def made() -> dict[Path, str]:
    """The page's text."""
    data = tomllib.loads((DOCS / "benchmarks.toml").read_text(encoding="utf-8"))
    return {DOCS / "benchmarks.md": page(data)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for path, text in made().items():
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(
                f"docs/{path.name} is not what docs/benchmarks.toml gives; run python tools/benchmarks.py"
            )


if __name__ == "__main__":
    main()
