"""The report's picture: up to four charts in one SVG, drawn without a library. Well-formed XML by construction."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log10
from xml.etree.ElementTree import Element, SubElement, tostring

from pyspec.bench.measure import PARTS
from pyspec.bench.result import Report, Row

LIGHT = {
    "ink": "#1f2933", "grid": "#d9dee3", "plain": "#9aa5b1", "spec": "#1b6ca8",
    "draft": "#e0912f", "verify": "#1b6ca8", "sample": "#7a5195", "host": "#b0b7bf", "other": "#e8ebee",
    "s0": "#9ecae1", "s1": "#5aa2cf", "s2": "#2b7bba", "s3": "#0b559f", "s4": "#08306b",
}  # fmt: skip
DARK = {
    "ink": "#e4e7eb", "grid": "#3b4754", "plain": "#8793a0", "spec": "#5aa9e6",
    "draft": "#f0a94b", "verify": "#5aa9e6", "sample": "#b58bd1", "host": "#6b7783", "other": "#46515c",
    "s0": "#24517a", "s1": "#2f74ad", "s2": "#4b98d4", "s3": "#85bdea", "s4": "#c6e2f8",
}  # fmt: skip
"""Colour of each class of the picture's parts, for light and dark pages."""
PART_KINDS = (*PARTS, "other")
SHADES = ("s0", "s1", "s2", "s3", "s4")
WIDTH, TOP, PLOT, LEFT, RIGHT = 760, 44, 190, 58, 16
LETTER = 7.5  # mean width of a letter, at most


def picture(report: Report) -> str:
    """One SVG with rates, drafted lengths and acceptance by position (if drafts are possible) and the time of a round."""
    charts = [_rates, _times]
    if any(r.per_pos for r in report.rows):
        charts.insert(1, _acceptance)
    if any(r.lengths for r in report.rows):
        charts.insert(1, _lengths)
    svg = Element("svg", xmlns="http://www.w3.org/2000/svg", role="img")
    SubElement(svg, "style").text = _style()
    y = 0
    for draw in charts:
        group = SubElement(svg, "g", transform=f"translate(0 {y})")
        y += draw(group, report)
    svg.set("viewBox", f"0 0 {WIDTH} {y}")
    svg.set("width", str(WIDTH))
    svg.set("height", str(y))
    svg.set("font-family", "system-ui, sans-serif")
    svg.set("font-size", "12")
    return tostring(svg, encoding="unicode")


def _style() -> str:
    """Colours by class; the reader's system selects light or dark."""

    def colours(of: dict[str, str]) -> str:
        return "svg{" + "".join(f"--{name}:{colour};" for name, colour in of.items()) + "}"

    filled = [name for name in LIGHT if name not in ("ink", "grid")]
    fills = "".join(f".{name}{{fill:var(--{name})}}" for name in filled)
    lines = "text{fill:var(--ink)}.axis{stroke:var(--ink)}.grid{stroke:var(--grid)}"
    return f"{colours(LIGHT)}@media (prefers-color-scheme:dark){{{colours(DARK)}}}{lines}{fills}"


def _text(at: Element, x: float, y: float, text: str, anchor: str = "start", **style: str) -> None:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor}
    SubElement(at, "text", place | style).text = text


def _bar(at: Element, x: float, y: float, w: float, h: float, kind: str, tip: str) -> None:
    box = {"x": x, "y": y, "width": max(w, 0), "height": max(h, 0)}
    rect = SubElement(at, "rect", _rounded(box) | {"class": kind})
    SubElement(rect, "title").text = tip


def _line(at: Element, x1: float, y1: float, x2: float, y2: float, kind: str, width: float = 1) -> None:
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    SubElement(at, "line", _rounded(ends) | {"class": kind, "stroke-width": str(width)})


def _rounded(of: dict[str, float]) -> dict[str, str]:
    return {name: f"{value:.1f}" for name, value in of.items()}


def nice_step(top: float, n: int = 5) -> float:
    """A round step (1, 2 or 5 times a power of ten) that reaches `top` in at most `n` steps."""
    if top <= 0:
        return 1.0
    raw = top / n
    unit = 10 ** ceil(log10(raw) - 1 + 1e-9)
    return next(s * unit for s in (1, 2, 5, 10) if s * unit >= raw * (1 - 1e-9))


def _title(at: Element, title: str) -> None:
    _text(at, LEFT, 22, title, **{"font-weight": "600", "font-size": "14"})


def _axis(at: Element, top: float, step: float, form: str = "g") -> None:
    """Horizontal grid and labels for values 0..top in the plot area."""
    for i in range(round(top / step) + 1):
        y = TOP + PLOT - PLOT * i * step / top
        _line(at, LEFT, y, WIDTH - RIGHT, y, "axis" if i == 0 else "grid")
        _text(at, LEFT - 6, y + 4, format(i * step, form), "end")


def _whisker(at: Element, x: float, low: float, high: float) -> None:
    """From the slowest turn to the fastest, with an end at each."""
    _line(at, x, low, x, high, "axis", 1.2)
    for y in (low, high):
        _line(at, x - 4, y, x + 4, y, "axis", 1.2)


def _wide(text: str) -> float:
    """Approximate width of a text in the picture's font."""
    return LETTER * len(text)


def _legend(at: Element, items: Sequence[tuple[str, str]], y: float = 18) -> None:
    """A legend at the right, in one line."""
    x: float = WIDTH - RIGHT
    for name, colour in reversed(items):
        x -= _wide(name) + 24
        _bar(at, x, y - 9, 11, 11, colour, name)
        _text(at, x + 16, y, name)


def _long_legend(at: Element, items: Sequence[tuple[str, str]]) -> int:
    """A legend below the title, in as many lines as needed. Returns its height."""
    x, y = float(LEFT), 42
    for name, colour in items:
        if x > LEFT and x + 16 + _wide(name) > WIDTH - RIGHT:
            x, y = float(LEFT), y + 16
        _bar(at, x, y - 9, 11, 11, colour, name)
        _text(at, x + 16, y, name)
        x += _wide(name) + 28
    return y - 26


def _places(at: Element, names: Sequence[str]) -> int:
    """Names below the plot area, alternating between two lines if one is too narrow. Returns their height."""
    slot = (WIDTH - LEFT - RIGHT) / max(len(names), 1)
    down = 14 if len(names) > 1 and slot < max(map(_wide, names)) + 8 else 0
    for i, name in enumerate(names):
        _text(at, LEFT + slot * (i + 0.5), TOP + PLOT + 18 + down * (i % 2), name, "middle")
    return down


def _rates(at: Element, report: Report) -> int:
    best = max((max(r.plain_high, r.spec_high) for r in report.rows), default=0.0)
    step = nice_step(best * 1.08)
    top = step * max(1, ceil(best * 1.08 / step))
    made_up = " (synthetic acceptance)" if report.synthetic else ""
    _title(at, f"tokens/s of all streams{made_up}")
    _axis(at, top, step)
    _legend(at, [("plain", "plain"), ("speculative", "spec")])
    slot = (WIDTH - LEFT - RIGHT) / max(len(report.rows), 1)
    bar = min(46.0, slot * 0.32)
    for i, r in enumerate(report.rows):
        middle = LEFT + slot * (i + 0.5)
        kinds = [(middle - bar - 2, "plain", "plain", r.plain, r.plain_low, r.plain_high)]
        if r.spec:
            kinds.append((middle + 2, "spec", "speculative", r.spec, r.spec_low, r.spec_high))
            y = TOP + PLOT * (1 - max(r.plain_high, r.spec_high) / top) - 6
            _text(at, middle, y, f"x{r.ratio:.2f}", "middle", **{"font-weight": "600"})
        for x, shade, kind, rate, low, high in kinds:
            y = TOP + PLOT * (1 - rate / top)
            tip = f"{r.label} streams, {kind}: {rate:.1f} tokens/s, turns {low:.1f} to {high:.1f}"
            _bar(at, x, y, bar, PLOT * rate / top, shade, tip)
            _whisker(at, x + bar / 2, TOP + PLOT * (1 - low / top), TOP + PLOT * (1 - high / top))
    names = [r.label if r.case else f"{r.np} stream{'s' if r.np > 1 else ''}" for r in report.rows]
    return TOP + PLOT + 44 + _places(at, names)


def _shades(n: int) -> list[str]:
    return [SHADES[round(i * (len(SHADES) - 1) / max(n - 1, 1))] for i in range(n)]


def _coloured(at: Element, rows: Sequence[Row], title: str) -> tuple[Element, list[str], int]:
    """A picture with a colour per row: the area to draw on, the colours, and the height of the legend above it."""
    _title(at, title)
    colours = _shades(len(rows))
    down = _long_legend(at, [(f"np {r.label}", c) for r, c in zip(rows, colours, strict=True)])
    return SubElement(at, "g", transform=f"translate(0 {down})"), colours, down


def _lengths(at: Element, report: Report) -> int:
    """The controller's draft lengths, round by round."""
    rows = [r for r in report.rows if r.lengths]
    title = "drafts of a stream's round, over the rounds of the first turn"
    at, colours, down = _coloured(at, rows, title)
    most = max(*(len(r.n_draft) - 1 for r in rows), *(max(r.lengths) for r in rows), 1)
    step = nice_step(most)
    top = step * ceil(most / step)
    _axis(at, top, step)
    across = max(r.all_rounds for r in rows)
    for r, colour in zip(rows, colours, strict=True):
        wide = (WIDTH - LEFT - RIGHT) * r.all_rounds / across / len(r.lengths)
        heights = [TOP + PLOT * (1 - n / top) for n in r.lengths]
        points = [(LEFT + wide * (i + 0.5), y) for i, y in enumerate(heights)]
        line = {"class": colour, "style": f"fill:none;stroke:var(--{colour});stroke-width:1.5"}
        line["points"] = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        drawn = SubElement(at, "polyline", line)
        SubElement(drawn, "title").text = f"np {r.label}: {r.all_rounds} rounds"
    _text(at, LEFT, TOP + PLOT + 18, "first round")
    _text(at, WIDTH - RIGHT, TOP + PLOT + 18, f"round {across}", "end")
    return TOP + PLOT + 44 + down


def _acceptance(at: Element, report: Report) -> int:
    rows = [r for r in report.rows if r.per_pos]
    title = "share of drafted tokens accepted, by position in the draft"
    at, colours, down = _coloured(at, rows, title)
    _axis(at, 1.0, 0.25)
    n_pos = max(len(r.per_pos) for r in rows)
    slot = (WIDTH - LEFT - RIGHT) / n_pos
    bar = slot * 0.8 / len(rows)
    for pos in range(n_pos):
        for k, r in enumerate(rows):
            if pos < len(r.per_pos):
                share = r.per_pos[pos]
                x, high = LEFT + slot * (pos + 0.1) + bar * k, PLOT * share
                tip = f"np {r.label}: {share:.1%}"
                _bar(at, x, TOP + PLOT * (1 - share), bar - 1, high, colours[k], tip)
        _text(at, LEFT + slot * (pos + 0.5), TOP + PLOT + 18, str(pos + 1), "middle")
    return TOP + PLOT + 44 + down


def _times(at: Element, report: Report) -> int:
    """Horizontal stacks: milliseconds that a stream waits for a token, by part of the round."""
    bars = [b for r in report.rows for b in _token_bars(r)]
    top = max((whole for _, whole, _ in bars), default=0.0) or 1.0
    shared = "a round's parts, shared by the tokens it gives"
    _title(at, f"milliseconds a stream waits for a token: {shared}")
    _legend(at, [(part, part) for part in PART_KINDS], 44)
    height, first = 20, TOP + 22
    left = max(LEFT + 54, 12 + max((_wide(name) for name, _, _ in bars), default=0.0))
    scale = (WIDTH - left - RIGHT - 72) / top
    for i, (name, whole, parts) in enumerate(bars):
        x, y = float(left), first + i * (height + 6)
        _text(at, left - 6, y + 14, name, "end")
        for part, ms in parts.items():
            _bar(at, x, y, ms * scale, height, part, f"{name}: {part} {ms:.2f} ms a token")
            x += max(ms, 0) * scale
        _text(at, x + 6, y + 14, f"{whole:.2f} ms")
    return first + len(bars) * (height + 6) + 16


def _token_bars(r: Row) -> list[tuple[str, float, dict[str, float]]]:
    """(name, milliseconds per token, the same by part). A plain round gives a stream one token, a round with drafts `mean_len`."""
    kinds = [(f"np {r.label} plain", r.plain_round_ms, r.plain_ms, 1.0)]
    if r.spec:
        kinds.append((f"np {r.label} spec", r.spec_round_ms, r.spec_ms, max(r.mean_len, 1.0)))
    bars = []
    for name, round_ms, ms, n_token in kinds:
        parts = {p: ms.get(p, 0.0) / n_token for p in PARTS}
        whole, known = round_ms / n_token, sum(parts.values())
        bars.append((name, max(whole, known), {**parts, "other": max(whole - known, 0.0)}))
    return bars
