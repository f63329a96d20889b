"""Acceptance as public tables fix it, so that rates can be compared with published ones.

The benchmark InferenceX runs every engine with the same simulated acceptance: mean tokens a round for each number of drafts, measured
once with the model's real drafter. golden.toml has its values, and those of other public tables.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Golden:
    """One line of a public table.

    drafter  value of --spec-type
    of       model, drafter and texts, in words
    source   of the figures
    lengths  mean tokens a round by the number of drafted tokens
    """

    drafter: str
    of: str
    source: str
    lengths: Mapping[int, float]


def _read() -> dict[str, Golden]:
    table = tomllib.loads(Path(__file__).with_name("golden.toml").read_text(encoding="utf-8"))
    return {
        name: Golden(**{**row, "lengths": {int(n): length for n, length in row["lengths"].items()}})
        for name, row in table.items()
    }


GOLDEN = _read()
"""By name."""


def flags(name: str, n: int = 0) -> list[str]:
    """Flags of a server or a bench that simulate a table's acceptance with `n` drafted tokens, which may be 0 where the table has one number.
    SystemExit for a number that the table does not have."""
    table = GOLDEN[name]
    if not n and len(table.lengths) == 1:
        (n,) = table.lengths
    if n not in table.lengths:
        lengths = ", ".join(f"{n} ({length:g} tokens a round)" for n, length in table.lengths.items())
        raise SystemExit(f"--golden {name} needs --drafts {lengths}; got {n or 'none'}")
    return [
        *("--spec-type", table.drafter, "--spec-draft-n-max", str(n)),
        *("--spec-fixed", "--spec-synth-len", f"{table.lengths[n]:g}"),
    ]
