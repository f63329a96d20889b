"""Measure the loss by shorter DFlash blocks: the demo pair over its 88 prompts, three tokens drafted, from whole blocks and from four rows.

python tools/short_blocks.py    (a minute on a CPU; prints drafts that were right, all drafts, and their ratio)
"""

from __future__ import annotations

import json
from importlib.resources import files

from pyspec import Engine
from pyspec.draft import dflash


def kept(prompts: list[tuple[int, ...]]) -> tuple[int, int]:
    """Drafts that were right, and all."""
    with Engine.load(
        "demo", "dflash", np=1, ctx=1024, device="cpu", n_draft_fixed=True, n_draft_max=3
    ) as engine:
        for prompt in prompts:
            engine.generate(prompt, max_tokens=128, temperature=0.0)
        counts = engine.metrics()
        return counts.accepted_tokens, counts.draft_tokens


def main() -> None:
    lines = (files("pyspec") / "demo" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [tuple(json.loads(line)["prompt_ids"]) for line in lines]
    for name, few_rows in (("whole", 128), ("of four rows", 0)):
        dflash.FEW_ROWS_CPU = few_rows
        right, n = kept(prompts)
        print(f"{name}: {right} of {n}, {right / n:.4f}", flush=True)


if __name__ == "__main__":
    main()
