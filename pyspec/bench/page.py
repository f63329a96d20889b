"""The HTML report: one file with its picture inside, no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from pyspec.bench.parts import DEVICE_PARTS
from pyspec.bench.picture import picture
from pyspec.bench.report import MADE_UP, device_cells, http_cells
from pyspec.bench.result import Report

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 800px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
td, th { padding: 2px 10px; text-align: right; border-bottom: 1px solid #d9dee3; }
td:first-child, th:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
.warning { background: #fff3cd; padding: 6px 10px; }
"""


def as_html(report: Report) -> str:
    """A page that is also well-formed XML."""
    title = f"pyspec bench: {report.about['model']}"
    warning = f'<p class="warning">{MADE_UP}: speed only; the text is not the model\'s</p>' if report.synthetic else ""
    about = _table(("", ""), [(str(k), str(v)) for k, v in report.about.items()])
    head = ("streams", "prompt tok/s", "plain tok/s", "spec tok/s", "ratio", "tokens a round", "accepted")
    rows = [
        (
            str(r.np),
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
        f"{picture(report)}\n{_table(head, rows)}\n{more}<h2>What ran</h2>\n{about}</body></html>\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    top = line(head, "th") if any(head) else ""
    return f"<table>{top}{''.join(line(r, 'td') for r in rows)}</table>"
