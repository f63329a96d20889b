"""A report as text: Markdown, CSV, JSON or JSON lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from pyspec.bench.measure import PARTS
from pyspec.bench.parts import DEVICE_PARTS
from pyspec.bench.result import Report, Row, to_json

MADE_UP = "synthetic acceptance"
HEIGHTS, LETTERS = "▁▂▃▄▅▆▇█", 24  # of drafted lengths over rounds


def as_markdown(report: Report) -> str:
    """Tables: rates, then the time of a round by part, then the drafts."""
    about = report.about
    head = [f"{about['model']}, {about['device']}, drafter {about['drafter']}, {about['date']}"]
    if report.synthetic:
        head.append(f"**{MADE_UP}**: speed only; the text is not the model's")
    if routing := about.get("routing"):
        head.append(f"**synthetic routing of experts**: {routing}")
    kinds = ["prompt tok/s", "plain tok/s", "per stream", "spec tok/s", "per stream"]
    rates = ["np", *kinds, "ratio", "lowest..highest"]
    tables = [_table(rates, [_rate_cells(r) for r in report.rows])]
    if any(r.plain_http for r in report.rows):
        through = ["np", "kind", "in process tok/s", "HTTP tok/s", "share", "lowest..highest"]
        tables.append(_table(through, [cells for r in report.rows for cells in _http_cells(r)]))
    parts = ["np", "kind", "round ms", "draft", "verify", "sample", "host", "of floor"]
    tables.append(_table(parts, [cells for r in report.rows for cells in _part_cells(r)]))
    if any(r.plain_parts or r.spec_parts for r in report.rows):
        device = ["np", "kind", *(f"{part} ms" for part in DEVICE_PARTS)]
        tables.append(_table(device, [cells for r in report.rows for cells in _device_cells(r)]))
    if any(r.n_draft for r in report.rows):
        fares = ["np", "tokens a round", "accepted", "by position", "n_draft used", "over rounds"]
        tables.append(_table(fares, [_draft_cells(r) for r in report.rows]))
    return "\n\n".join(["\n".join(head), *tables]) + "\n"


def _rate_cells(r: Row) -> list[str]:
    plain, spec = f"{r.plain:.1f}", f"{r.spec:.1f}"
    if not r.spec:
        return [r.label, f"{r.prompt:.0f}", plain, f"{r.plain / r.np:.1f}", "-", "-", "-", "-"]
    spread = f"{r.ratio_low:.2f}..{r.ratio_high:.2f} ({r.turns})"
    rates = [plain, f"{r.plain / r.np:.1f}", spec, f"{r.spec / r.np:.1f}"]
    return [r.label, f"{r.prompt:.0f}", *rates, f"x{r.ratio:.2f}", spread]


def _http_cells(r: Row) -> list[list[str]]:
    """Rates in process and through HTTP, a line for each measured kind."""
    kinds = [
        ("plain", r.plain, r.plain_http, r.plain_http_share, r.plain_http_low, r.plain_http_high),
        ("spec", r.spec, r.spec_http, r.spec_http_share, r.spec_http_low, r.spec_http_high),
    ]
    cells = []
    for kind, direct, http, share, low, high in kinds:
        if http:
            spread = f"{low:.3f}..{high:.3f} ({r.turns})"
            cells.append([r.label, kind, f"{direct:.1f}", f"{http:.1f}", f"{share:.3f}", spread])
    return cells


def _device_cells(r: Row) -> list[list[str]]:
    """Device time of a round by kind of kernel."""
    kinds = {"plain": r.plain_parts, "spec": r.spec_parts}
    return [
        [r.label, kind, *(f"{parts[p]:.2f}" for p in DEVICE_PARTS)]
        for kind, parts in kinds.items()
        if parts
    ]


def _part_cells(r: Row) -> list[list[str]]:
    kinds = [("plain", r.plain_round_ms, r.plain_ms, r.plain_floor)]
    if r.plain_http:
        kinds.append(("plain HTTP", r.plain_http_round_ms, r.plain_http_ms, 0.0))
    if r.spec:
        kinds.append(("spec", r.spec_round_ms, r.spec_ms, r.spec_floor))
    if r.spec_http:
        kinds.append(("spec HTTP", r.spec_http_round_ms, r.spec_http_ms, 0.0))
    cells = []
    for kind, whole, ms, floor in kinds:
        times = [f"{v:.2f}" for v in (whole, *ms.values())]
        cells.append([r.label, kind, *times, f"{floor:.0%}" if floor else "-"])
    return cells


def _draft_cells(r: Row) -> list[str]:
    by_pos = " ".join(f"{p:.2f}" for p in r.per_pos)
    used = " ".join(f"{i}:{share:.0%}" for i, share in enumerate(r.n_draft) if share >= 0.005)
    shown = [text or "-" for text in (by_pos, used, _over_rounds(r))]
    return [r.label, f"{r.mean_len:.2f}", f"{r.acceptance:.0%}", *shown]


def _over_rounds(r: Row) -> str:
    """Drafted lengths from the first round to the last, as bars from none to the maximum."""
    most, n = max(len(r.n_draft) - 1, 1), len(r.lengths)
    shown = [r.lengths[i * n // LETTERS] for i in range(LETTERS)] if n > LETTERS else r.lengths
    top = len(HEIGHTS) - 1
    return "".join(HEIGHTS[min(round(length / most * top), top)] for length in shown)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    padded = [[cell.rjust(w) for cell, w in zip(line, widths, strict=True)] for line in [head, *rows]]
    lines = [" | ".join(cells) for cells in padded]
    rule = " | ".join("-" * (w - 1) + ":" for w in widths)
    return "\n".join(f"| {line} |" for line in [lines[0], rule, *lines[1:]])


def as_csv(report: Report) -> str:
    """One line per number of streams; lists are joined by spaces, parts are separate columns."""
    out = io.StringIO()
    rows = [_flat(report, r) for r in report.rows]
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flat(report: Report, row: Row) -> dict[str, object]:
    names = ("model", "device", "drafter", "date")
    flat: dict[str, object] = {name: report.about[name] for name in names}
    flat["synthetic"], flat["routing"] = report.synthetic, report.about.get("routing", "")
    for name, value in asdict(row).items():
        if isinstance(value, dict):
            known = DEVICE_PARTS if name.endswith("_parts") else PARTS
            flat |= {f"{name}_{part}": round(value.get(part, 0.0), 4) for part in known}
        elif isinstance(value, tuple):
            flat[name] = " ".join(f"{v:.4f}" for v in value)
        else:
            flat[name] = value if isinstance(value, str) else round(value, 4)
    return flat


def as_json(report: Report) -> str:
    return json.dumps(to_json(report), indent=2) + "\n"


def as_jsonl(report: Report) -> str:
    """One line per turn, each with the setup."""
    return "".join(json.dumps({**report.about, **asdict(run)}) + "\n" for run in report.runs)


FORMATS: dict[str, Callable[[Report], str]] = {
    "md": as_markdown,
    "json": as_json,
    "csv": as_csv,
    "jsonl": as_jsonl,
}
