"""Acceptance as public tables fix it, so that rates can be compared with published ones.

The benchmark InferenceX runs every engine with the same simulated acceptance: mean tokens a round for each number of drafts, measured
once with the model's real drafter. golden.toml has its values, and those of other public tables.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from pyspec.errors import ConfigError

USUAL = "qwen3.5-397b"


@dataclass(frozen=True)
class Golden:
    """One line of a public table.

    drafter  --spec-type
    of       model, drafter and texts, in words
    source   of the figures
    lengths  mean tokens a round by the number of drafted tokens
    """

    drafter: str
    of: str
    source: str
    lengths: Mapping[int, float]


def _read() -> dict[str, Golden]:
    table = tomllib.loads((files("pyspec") / "bench" / "golden.toml").read_text(encoding="utf-8"))
    return {
        name: Golden(**{**row, "lengths": {int(n): length for n, length in row["lengths"].items()}})
        for name, row in table.items()
    }


GOLDEN = _read()
"""By name."""


def golden_named(name: str) -> Golden:
    """The line of that name. Raises ConfigError."""
    if name not in GOLDEN:
        raise ConfigError(f"--golden {name}: no such table; there are {', '.join(GOLDEN)}")
    return GOLDEN[name]


def golden(settings: Mapping[str, object], name: str = USUAL) -> dict[str, object]:
    """The settings with a fixed number of drafts and that table's acceptance. Raises ConfigError for conflicting settings."""
    table = golden_named(name)
    n = settings.get("n_draft_max", 0)
    if not n and len(table.lengths) == 1:
        (n,) = table.lengths
    lengths = ", ".join(f"{n} ({length:g} tokens a round)" for n, length in table.lengths.items())
    if n not in table.lengths:
        given = f"{n}" if n else "none"
        raise ConfigError(f"--golden {name} needs --spec-draft-n-max {lengths}; got {given}")
    assert isinstance(n, int)
    if settings.get("synth_len") or settings.get("synth_rates"):
        raise ConfigError(
            "--golden simulates acceptance: leave out --spec-synth-len and --spec-synth-rates"
        )
    if settings.get("spec_type", "auto") not in ("auto", table.drafter):
        raise ConfigError(
            f"--golden {name} is for {table.drafter} drafts; --spec-type is {settings['spec_type']}"
        )
    fixed = {"spec_type": table.drafter, "n_draft_max": n, "n_draft_fixed": True}
    return {**settings, **fixed, "synth_len": table.lengths[n]}
