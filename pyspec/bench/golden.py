"""Acceptance as a public benchmark of inference engines fixes it, so that rates can be laid beside those it publishes.

It runs every engine with the same made-up acceptance: mean tokens a round by how many are drafted, measured once on its coding set at
temperatures of 0.6 to 1. These are those of Qwen3.5-397B with its own MTP block, thinking.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspec.errors import ConfigError

GOLDEN = {2: 2.73, 3: 3.39, 5: 4.41}  # tokens a round, by drafted tokens
SOURCE = "Qwen3.5, MTP, thinking"


def golden(settings: Mapping[str, object]) -> dict[str, object]:
    """The settings with drafts of a fixed number, kept as often as there. Raises ConfigError where they say something else."""
    n = settings.get("n_draft_max", 0)
    lengths = ", ".join(f"{drafted} ({length:g} tokens a round)" for drafted, length in GOLDEN.items())
    if n not in GOLDEN:
        given = f"{n}" if n else "none"
        raise ConfigError(f"--golden is known for --spec-draft-n-max {lengths}; given is {given}")
    if settings.get("synth_len") or settings.get("synth_rates"):
        raise ConfigError("--golden makes acceptance up: leave out --spec-synth-len and --spec-synth-rates")
    if settings.get("spec_type", "auto") not in ("auto", "mtp"):
        raise ConfigError(f"--golden is of MTP drafts; --spec-type is {settings['spec_type']}")
    return {**settings, "spec_type": "mtp", "synth_len": GOLDEN[n], "n_draft_fixed": True}
