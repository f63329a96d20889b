"""Measure the drafts lost by a coarse head: the demo's 88 prompts with the target's own head and with copies of it.

    python tools/demo/draft_heads.py mtp dflash [--temperature 0.7 --seed 7]

Drafts have a fixed length. Prints accepted tokens a round for each head, and how many texts are the same; exit status 1 if one
differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pyspec.config import DRAFT_HEADS
from pyspec.engine.api import Engine, Result

PROMPTS = Path(__file__).parents[2] / "pyspec" / "demo" / "prompts.jsonl"
DRAFTS = {"dflash": "auto", "mtp": "mtp"}


def answers(draft: str, head: str, temperature: float, seed: int, device: str) -> list[Result]:
    prompts = [json.loads(line)["messages"] for line in PROMPTS.read_text().splitlines()]
    options = {
        "np": 8,
        "ctx": 2048,
        "device": device,
        "n_draft_fixed": True,
        "draft_head": head,
        "queue": len(prompts),
    }
    with Engine.load("demo", DRAFTS[draft], **options) as engine:
        sampling = {"temperature": temperature, "seed": seed, "ignore_eos": temperature > 0.5}
        return engine.generate_many(prompts, max_tokens=120 if temperature > 0.5 else 512, **sampling)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafters", nargs="+", choices=DRAFTS)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    n_off = 0
    for draft in args.drafters:
        expected: list[Result] = []
        for head in [h for h in DRAFT_HEADS if h != "auto"]:
            found = answers(draft, head, args.temperature, args.seed, args.device)
            expected = expected or found
            drafted, accepted = (
                sum(getattr(r.timings, n) for r in found) for n in ("draft_n", "draft_n_accepted")
            )
            n_round = sum(r.n_predicted for r in found) - accepted
            n_same = sum(a.tokens == b.tokens for a, b in zip(found, expected, strict=True))
            n_off += len(found) - n_same
            print(
                f"{draft}, head {head}: {accepted} of {drafted} drafted accepted, {1 + accepted / n_round:.3f} tokens a round, "
                f"{n_same} of {len(found)} texts the same",
                flush=True,
            )
    return 1 if n_off else 0


if __name__ == "__main__":
    sys.exit(main())
