"""From single turns to rows of a report, and from a report's JSON file back to rows. Needs no engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pyspec.bench.measure import PARTS, Mode, Run
from pyspec.engine.process.metrics_sum import sums
from pyspec.errors import ConfigError

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """All turns of one number of streams. Rates are medians over turns, in tokens per second.

    prompt       prompt processing, all streams together
    plain, spec  decoding, all streams together; spec is 0 without a drafter
    ratio        median of spec / plain of neighbouring turns, with the lowest and the highest
    mean_len     tokens per slot and round; acceptance: accepted / drafted; per_pos: acceptance at each draft position
    n_draft      share of slot rounds with 0, 1, 2 ... drafts
    lengths      drafts of a stream over the rounds of the first speculative turn, `all_rounds` of them, as chosen by the controller
    plain_ms, spec_ms    milliseconds of a round by part; round_ms: wall milliseconds
    floor        share of the bandwidth limit reached: time to read the weights once / time of a round
    *_parts      device milliseconds of a round by kind of kernel, drafting included; empty unless requested
    *_http       the same through HTTP; share: relative to the in-process rate of the neighbouring turn, lowest and highest
    case         other parameters that vary, "p512 n128 t4"; "" if none do
    """

    np: int
    turns: int
    n_prompt: int
    n_predicted: int
    prompt: float
    plain: float
    plain_low: float
    plain_high: float
    spec: float = 0.0
    spec_low: float = 0.0
    spec_high: float = 0.0
    ratio: float = 0.0
    ratio_low: float = 0.0
    ratio_high: float = 0.0
    mean_len: float = 1.0
    acceptance: float = 0.0
    per_pos: tuple[float, ...] = ()
    n_draft: tuple[float, ...] = ()
    plain_ms: dict[str, float] = field(default_factory=dict)
    spec_ms: dict[str, float] = field(default_factory=dict)
    plain_round_ms: float = 0.0
    spec_round_ms: float = 0.0
    plain_floor: float = 0.0
    spec_floor: float = 0.0
    plain_http: float = 0.0
    plain_http_share: float = 0.0
    plain_http_low: float = 0.0
    plain_http_high: float = 0.0
    plain_http_ms: dict[str, float] = field(default_factory=dict)
    plain_http_round_ms: float = 0.0
    spec_http: float = 0.0
    spec_http_share: float = 0.0
    spec_http_low: float = 0.0
    spec_http_high: float = 0.0
    spec_http_ms: dict[str, float] = field(default_factory=dict)
    spec_http_round_ms: float = 0.0
    plain_parts: dict[str, float] = field(default_factory=dict)
    spec_parts: dict[str, float] = field(default_factory=dict)
    case: str = ""
    lengths: tuple[float, ...] = ()
    all_rounds: int = 0

    @property
    def label(self) -> str:
        """Number of streams, and the case if there are several."""
        return f"{self.np} {self.case}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Report:
    """All results of a benchmark. `about` is the setup: model, drafter, machine, settings; all JSON values."""

    about: dict[str, object]
    rows: tuple[Row, ...]
    runs: tuple[Run, ...]

    @property
    def synthetic(self) -> bool:
        """True if acceptance was simulated."""
        return any(r.synthetic for r in self.runs)


def summarise_turns(runs: Sequence[Run], *, n_bytes: int = 0, bandwidth: float = 0.0) -> tuple[Row, ...]:
    """One row per number of streams.

    n_bytes    bytes of the weights read in a round; bandwidth: of the memory, in GB/s, 0 if unknown
    """
    floor_ms = n_bytes / (bandwidth * 1e6) if bandwidth > 0 else 0.0
    cases = list(dict.fromkeys(r.case for r in runs))
    kinds = [(case, np) for case in cases for np in sorted({r.np for r in runs if r.case == case})]
    return tuple(_row([r for r in runs if (r.case, r.np) == kind], floor_ms) for kind in kinds)


def joined(reports: Sequence[Report]) -> Report:
    """One report of several cases on one machine; differing values of `about` become lists."""
    about: dict[str, object] = {}
    for name in dict.fromkeys(name for report in reports for name in report.about):
        values = list(dict.fromkeys(report.about.get(name) for report in reports))
        is_one = len(values) == 1 or name == "date"
        about[name] = values[0] if is_one else ", ".join(map(str, values))
    rows = tuple(row for report in reports for row in report.rows)
    runs = tuple(run for report in reports for run in report.runs)
    return Report(about=about, rows=rows, runs=runs)


def _row(every: Sequence[Run], floor_ms: float) -> Row:
    runs = [r for r in every if r.via == "engine"]
    plain, spec = [[r for r in runs if r.mode == mode] for mode in ("plain", "spec")]
    drafted, accepted = sums([r.drafted for r in spec]), sums([r.accepted for r in spec])
    n_draft = sums([r.n_draft for r in spec])
    pairs = [(p.rate, s.rate) for p, s in zip(plain, spec, strict=False)]
    ratios = [s / p for p, s in pairs if p > 0 and s > 0]
    # A rate of 0 was not measured
    plain_rates, spec_rates = [[r.rate for r in kind if r.rate > 0] for kind in (plain, spec)]
    plain_round, spec_round = [_middle([r.round_ms for r in kind]) for kind in (plain, spec)]
    return Row(
        np=runs[0].np,
        case=runs[0].case,
        turns=len(plain),
        n_prompt=runs[0].n_prompt,
        n_predicted=sum(r.n_predicted for r in every),
        prompt=_middle([r.prompt_rate for r in runs]),
        plain=_middle(plain_rates),
        plain_low=min(plain_rates, default=0.0),
        plain_high=max(plain_rates, default=0.0),
        spec=_middle(spec_rates),
        spec_low=min(spec_rates, default=0.0),
        spec_high=max(spec_rates, default=0.0),
        ratio=_middle(ratios),
        ratio_low=min(ratios, default=0.0),
        ratio_high=max(ratios, default=0.0),
        mean_len=_middle([r.mean_len for r in spec]) or 1.0,
        acceptance=sum(accepted) / sum(drafted) if sum(drafted) else 0.0,
        per_pos=tuple(a / d for a, d in zip(accepted, drafted, strict=False) if d),
        n_draft=tuple(n / sum(n_draft) for n in n_draft) if sum(n_draft) else (),
        plain_ms={p: _middle([r.ms[p] for r in plain]) for p in PARTS},
        spec_ms={p: _middle([r.ms[p] for r in spec]) for p in PARTS} if spec else {},
        plain_round_ms=plain_round,
        spec_round_ms=spec_round,
        plain_floor=floor_ms / plain_round if plain_round > 0 else 0.0,
        spec_floor=floor_ms / spec_round if spec_round > 0 else 0.0,
        lengths=spec[0].lengths if spec else (),
        all_rounds=spec[0].all_rounds if spec else 0,
        **_http(every, "plain"),
        **_http(every, "spec"),
    )


def _http(runs: Sequence[Run], mode: Mode) -> dict[str, Any]:
    """The fields of Row about HTTP turns of one mode."""
    through = [r for r in runs if (r.via, r.mode) == ("http", mode)]
    direct = {r.turn: r.rate for r in runs if (r.via, r.mode) == ("engine", mode)}
    measured = [r for r in through if r.rate > 0 and direct.get(r.turn, 0.0) > 0]
    shares = [r.rate / direct[r.turn] for r in measured]
    figures = {
        "": _middle([r.rate for r in through if r.rate > 0]),
        "_share": _middle(shares),
        "_low": min(shares, default=0.0),
        "_high": max(shares, default=0.0),
        "_ms": {p: _middle([r.ms[p] for r in through]) for p in PARTS} if through else {},
        "_round_ms": _middle([r.round_ms for r in through]),
    }
    return {f"{mode}_http{name}": value for name, value in figures.items()}


def _middle(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def to_json(report: Report) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "about": report.about,
        "synthetic": report.synthetic,
        "rows": [asdict(r) for r in report.rows],
        "runs": [asdict(r) for r in report.runs],
    }


@dataclass(frozen=True)
class Change:
    """One figure that changed against the baseline; `change` is relative: -0.04 is four percent slower."""

    np: int | str  # with the case, if there were several
    what: str
    before: float
    after: float

    @property
    def change(self) -> float:
        return self.after / self.before - 1


COMPARED = ("prompt", "plain", "spec", "plain_http", "spec_http")
"""Fields of Row that are rates: higher is better."""
Rates = dict[int | str, dict[str, float]]
"""Rates by name, by number of streams."""


def read_rates(path: Path) -> Rates:
    """Rates by number of streams of a report written with -o json. Raises ConfigError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ConfigError(f"{path}: schema {data['schema']}; this version reads {SCHEMA}")
        return {
            _key(int(row["np"]), str(row.get("case", ""))): {x: float(row.get(x, 0.0)) for x in COMPARED}
            for row in data["rows"]
        }
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror or e}") from e
    except (ValueError, KeyError, TypeError) as e:
        why = f"{type(e).__name__}: {e}"
        raise ConfigError(f"{path} is not a report of `pyspec bench -o json`: {why}") from e


def _key(np: int, case: str) -> int | str:
    return f"{np} {case}" if case else np


def changes(rows: Sequence[Row], baseline: Rates) -> list[Change]:
    """Every rate of the baseline for this run's numbers of streams, in its order: see `compare`."""
    now = {_key(r.np, r.case): {name: getattr(r, name) for name in COMPARED} for r in rows}
    return compare(baseline, now)


def compare(before: Rates, after: Rates) -> list[Change]:
    """Every rate measured before, at the numbers of streams that both have, in the order of the later report.

    Raises ConfigError if there are none, or if one was not measured now: both would otherwise look like a pass.
    """
    found = []
    for np, now in after.items():
        known = {name: rate for name, rate in before.get(np, {}).items() if rate > 0}
        for name in known:
            if now[name] <= 0:
                why = "is the drafter or --http missing, or -n too small?"
                raise ConfigError(f"np {np}: {name} was not measured; {why}")
        found += [Change(np, name, known[name], now[name]) for name in known]
    if not found:
        theirs, ours = [", ".join(map(str, rates)) or "none" for rates in (before, after)]
        raise ConfigError(f"the baseline has streams {theirs}, this run {ours}")
    return found
