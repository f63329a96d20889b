"""Acceptance as fixed by a public benchmark of inference engines, so that rates can be compared with its published ones.

That benchmark runs every engine with the same simulated acceptance: mean tokens per round for each number of drafts, measured once on
its coding set at temperatures of 0.6 to 1. These are the values of Qwen3.5-397B with its own MTP block, thinking.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspec.errors import ConfigError

GOLDEN = {2: 2.73, 3: 3.39, 5: 4.41}  # tokens per round, by number of drafts
SOURCE = "Qwen3.5, MTP, thinking"


def golden(settings: Mapping[str, object]) -> dict[str, object]:
    """The settings with a fixed number of drafts and that benchmark's acceptance. Raises ConfigError for conflicting settings."""
    n = settings.get("n_draft_max", 0)
    lengths = ", ".join(f"{name} ({length:g} tokens a round)" for name, length in GOLDEN.items())
    if n not in GOLDEN:
        given = f"{n}" if n else "none"
        raise ConfigError(f"--golden needs --spec-draft-n-max {lengths}; got {given}")
    if settings.get("synth_len") or settings.get("synth_rates"):
        raise ConfigError(
            "--golden simulates acceptance: leave out --spec-synth-len and --spec-synth-rates"
        )
    if settings.get("spec_type", "auto") not in ("auto", "mtp"):
        raise ConfigError(f"--golden is for MTP drafts; --spec-type is {settings['spec_type']}")
    return {**settings, "spec_type": "mtp", "synth_len": GOLDEN[n], "n_draft_fixed": True}
