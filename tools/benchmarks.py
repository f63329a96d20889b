"""docs/benchmarks.md and docs/rates.svg out of docs/benchmarks.toml, where the figures stand.

python tools/benchmarks.py            write both
python tools/benchmarks.py --check    compare both with the figures; exit status 1 if they differ
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
COLOURS = {
    "blue": ("#0969da", "#58a6ff"),
    "green": ("#1a7f37", "#3fb950"),
    "orange": ("#bc4c00", "#f0883e"),
}
COLOURS["grey"] = ("#6e7781", "#8b949e")
TICKS = (50, 100, 200, 500, 1000, 2000, 5000, 10000)
WIDTH, HEIGHT = 760, 400
LINE = 120  # characters of a command
RUNS = ("pyspec", "python", "make")
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 44, 52  # room around the axes


@dataclass(frozen=True)
class Curve:
    """One line of the plot: (streams, tokens a second), in the order of streams."""

    label: str
    colour: str
    points: Sequence[tuple[int, float]]


# -- tables --------------------------------------------------------------------------------------------------------


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
    if any("curve" in row for row in question["row"]):
        lines.append("![Tokens a second over streams](rates.svg)\n")
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


# -- the plot ------------------------------------------------------------------------------------------------------


def curves(data: Mapping) -> list[Curve]:
    """The rows that are to be drawn; those with one label are one curve, in which the first that has a number of streams counts."""
    found: dict[str, tuple[str, dict[int, float]]] = {}
    for question in data["question"]:
        for row in question.get("row", ()):
            if "curve" in row:
                _, points = found.setdefault(row["curve"], (row["colour"], {}))
                for n, figure in zip(question["columns"], row["figures"], strict=True):
                    if figure:
                        points.setdefault(int(n), float(figure.replace(",", "")))
    return [Curve(label, colour, sorted(points.items())) for label, (colour, points) in found.items()]


def plot(found: Sequence[Curve]) -> str:
    """Tokens a second over streams as SVG, both axes by factors; colours follow the reader's light or dark scheme."""
    streams = sorted({n for curve in found for n, _ in curve.points})
    rates = [rate for curve in found for _, rate in curve.points]
    low = max(t for t in TICKS if t <= min(rates))
    high = min(t for t in TICKS if t >= max(rates))

    def x(n: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(n / streams[0]) / math.log(
            streams[-1] / streams[0]
        )

    def y(rate: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(rate / low) / math.log(high / low)

    out = [_head(found)]
    for tick in (t for t in TICKS if low <= t <= high):
        out.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        )
        out.append(
            f'<text class="soft" x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:,}</text>'
        )
    for n in streams:
        out.append(
            f'<text class="soft" x="{x(n):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{n}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(
        f'<text class="soft" x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">streams at once</text>'
    )
    out.append('<text class="title" x="16" y="24">Tokens a second, Qwen3.6-27B Q8_0 on one H200</text>')
    ends = [(x(curve.points[-1][0]), y(curve.points[-1][1])) for curve in found]
    for curve, (at_x, at_y) in zip(found, _labels(ends, x(streams[-1])), strict=True):
        path = " ".join(f"{x(n):.1f},{y(rate):.1f}" for n, rate in curve.points)
        out.append(f'<polyline class="line {curve.colour}" points="{path}"/>')
        out += [
            f'<circle class="dot {curve.colour}" cx="{x(n):.1f}" cy="{y(r):.1f}" r="3.5"/>'
            for n, r in curve.points
        ]
        out.append(
            f'<text class="name {curve.colour}" x="{at_x:.1f}" y="{at_y:.1f}">{escape(curve.label)}</text>'
        )
    return "\n".join([*out, "</svg>"]) + "\n"


def _labels(
    ends: Sequence[tuple[float, float]], edge: float, least: float = 16.0
) -> list[tuple[float, float]]:
    """Where each curve's label begins: beside its last point at the right edge, one below the other; else above that point."""
    found, last = [(x - 40, y - 12) for x, y in ends], -least
    for i in sorted((i for i, end in enumerate(ends) if end[0] == edge), key=lambda i: ends[i][1]):
        last = max(ends[i][1], last + least)
        found[i] = (edge + 10, last + 4)
    return found


def _head(found: Sequence[Curve]) -> str:
    said = "; ".join(
        f"{c.label}: " + ", ".join(f"{rate:,.0f} at {n}" for n, rate in c.points) for c in found
    )
    light = "".join(f".{name}{{color:{pair[0]}}}" for name, pair in COLOURS.items())
    dark = "".join(f".{name}{{color:{pair[1]}}}" for name, pair in COLOURS.items())
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">
<title>Tokens a second over streams</title>
<desc>{escape(said)}</desc>
<style>
text{{font:13px system-ui,sans-serif;fill:#1f2328}}.title{{font-size:15px;font-weight:600}}.soft{{fill:#59636e}}.grid{{stroke:#d1d9e0}}
.line{{fill:none;stroke:currentColor;stroke-width:2.5}}.dot{{fill:currentColor}}.name{{fill:currentColor;font-weight:600}}{light}
@media (prefers-color-scheme:dark){{text{{fill:#f0f6fc}}.soft{{fill:#9198a1}}.name{{fill:currentColor}}.grid{{stroke:#3d444d}}{dark}}}
</style>"""


def made() -> dict[Path, str]:
    """The text of both files."""
    data = tomllib.loads((DOCS / "benchmarks.toml").read_text(encoding="utf-8"))
    return {DOCS / "benchmarks.md": page(data), DOCS / "rates.svg": plot(curves(data))}


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
