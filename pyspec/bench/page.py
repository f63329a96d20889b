"""The HTML report: one file with an inline picture, without scripts or external resources."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from pyspec.bench.parts import DEVICE_PARTS
from pyspec.bench.picture import picture
from pyspec.bench.report import MADE_UP, device_cells, http_cells, verdict
from pyspec.bench.result import Report

STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --paper: #ffffff; --line: #d9dee3; --warning: #fff3cd; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --paper: #15191e; --line: #3b4754; --warning: #4a3b00; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 800px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
td, th { padding: 2px 10px; text-align: right; border-bottom: 1px solid var(--line); }
td:first-child, th:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
.verdict { font-size: 1.15em; font-weight: 600; }
.warning { background: var(--warning); padding: 6px 10px; }
"""
WHISKERS = (
    "Bars are medians of {turns}; the line on a bar runs from the slowest turn to the fastest. Plain and speculative turns alternate, and a "
    "ratio compares neighbouring turns: x2 is twice as fast."
)


def as_html(report: Report) -> str:
    """A page that is also well-formed XML."""
    title = f"pyspec bench: {report.about['model']}"
    warning = f'<p class="warning">{MADE_UP}: speed only; the text is not the model\'s</p>' if report.synthetic else ""
    about = _table(("", ""), [(str(k), str(v)) for k, v in report.about.items()])
    head = ("streams", "prompt tok/s", "plain tok/s", "spec tok/s", "ratio", "tokens a round", "accepted")
    rows = [
        (
            r.label,
            f"{r.prompt:.0f}",
            f"{r.plain:.1f}",
            f"{r.spec:.1f}" if r.spec else "-",
            f"x{r.ratio:.2f} ({r.ratio_low:.2f}..{r.ratio_high:.2f})" if r.spec else "-",
            f"{r.mean_len:.2f}",
            f"{r.acceptance:.0%}" if r.per_pos else "-",
        )
        for r in report.rows
    ]
    through = [cells for r in report.rows for cells in http_cells(r)]
    http_head = ("streams", "kind", "in process tok/s", "HTTP tok/s", "share", "lowest..highest")
    more = f"<h2>Through HTTP</h2>\n{_table(http_head, through)}\n" if through else ""
    device = [cells for r in report.rows for cells in device_cells(r)]
    device_head = ("streams", "kind", *(f"{part} ms" for part in DEVICE_PARTS))
    if device:
        more += f"<h2>Device time of a round</h2>\n{_table(device_head, device)}\n"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>{warning}\n"
        f'<p class="verdict">{escape(verdict(report))}</p>\n'
        f"{picture(report)}\n<p>{escape(WHISKERS.format(turns=_turns(report)))}</p>\n{_table(head, rows)}\n{more}<h2>Setup</h2>\n{about}</body></html>\n"
    )


def _turns(report: Report) -> str:
    counts = sorted({r.turns for r in report.rows}) or [0]
    return f"{counts[0]} turns" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} turns"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    top = line(head, "th") if any(head) else ""
    return f"<table>{top}{''.join(line(r, 'td') for r in rows)}</table>"
