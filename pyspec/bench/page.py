"""The HTML report: one file with an inline picture, without scripts or external resources."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from pyspec.bench.parts import DEVICE_PARTS
from pyspec.bench.picture import picture
from pyspec.bench.report import MADE_UP, device_cells, http_cells, verdict
from pyspec.bench.result import Report

STYLE = "\n" + (files("pyspec") / "bench" / "page.css").read_text(encoding="utf-8")
WHISKERS = (
    "Bars are medians of {turns}; the line on a bar runs from the slowest turn to the fastest. "
    "Plain and speculative turns alternate, and a ratio compares neighbouring turns: x2 is twice as fast."
)


def as_html(report: Report) -> str:
    """A page that is also well-formed XML."""
    title = f"pyspec bench: {report.about['model']}"
    made_up = f"{MADE_UP}: speed only; the text is not the model's"
    warning = f'<p class="warning">{made_up}</p>' if report.synthetic else ""
    about = _table(("", ""), [(str(k), str(v)) for k, v in report.about.items()])
    rates = ("prompt tok/s", "plain tok/s", "spec tok/s")
    head = ("streams", *rates, "ratio", "tokens a round", "accepted")
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
    named, whiskers = escape(title), escape(WHISKERS.format(turns=_turns(report)))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>{named}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{named}</h1>{warning}\n"
        f'<p class="verdict">{escape(verdict(report))}</p>\n'
        f"{picture(report)}\n<p>{whiskers}</p>\n{_table(head, rows)}\n"
        f"{more}<h2>Setup</h2>\n{about}</body></html>\n"
    )


def _turns(report: Report) -> str:
    counts = sorted({r.turns for r in report.rows}) or [0]
    return f"{counts[0]} turns" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} turns"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    top = line(head, "th") if any(head) else ""
    return f"<table>{top}{''.join(line(r, 'td') for r in rows)}</table>"
