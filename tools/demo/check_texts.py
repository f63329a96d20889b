"""Greedy answers to the demo's 88 prompts, with drafters and slots as asked, against plain decoding in one slot.

    python tools/demo/check_texts.py dflash:8 mtp:8 ngram:4 none:8 [--device cuda]

Prints how many token sequences are the same, and how many answers equal llama.cpp's recorded ones; exit status 1 if a sequence
differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from pyspec.engine.api import Engine, Result

PROMPTS = Path(__file__).parents[2] / "pyspec" / "demo" / "prompts.jsonl"
DRAFTS = {"none": None, "dflash": "auto", "mtp": "mtp", "ngram": "ngram"}


def answers(draft: str, np: int, device: str, cases: list[dict]) -> list[Result]:
    with Engine.load("demo", DRAFTS[draft], np=np, ctx=2048, device=device, queue=len(cases)) as engine:
        prompts = [case["messages"] for case in cases]
        began = time.perf_counter()
        found = engine.generate_many(prompts, temperature=0.0, max_tokens=512)
        n = sum(r.n_predicted for r in found)
        print(f"{draft} np {np}: {n / (time.perf_counter() - began):.0f} tokens/s", end="", flush=True)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="+", metavar="DRAFTER:NP")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    cases = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    expected = answers("none", 1, args.device, cases)
    n_recorded = sum(r.text == case["answer"] for r, case in zip(expected, cases, strict=True))
    print(f", {n_recorded} of {len(cases)} as llama.cpp recorded them")
    n_off = 0
    for setting in args.settings:
        draft, _, np = setting.partition(":")
        found = answers(draft, int(np), args.device, cases)
        n_same = sum(a.tokens == b.tokens for a, b in zip(found, expected, strict=True))
        print(f", {n_same} of {len(cases)} as plain in one slot", flush=True)
        n_off += len(cases) - n_same
    return 1 if n_off else 0


if __name__ == "__main__":
    sys.exit(main())
