"""Record what the demo pair's drafter drafts at every token of its target's texts, how sure it is, and whether it is right.

python tools/record_drafts.py OUT.npz    (some minutes on a CPU)

Texts are answers to the pair's prompts, taken greedily, and drawn at temperature 1. Every round drafts a
whole block and keeps none of it (synthetic acceptance of one token), so there is a draft at each token.

OUT.npz: `ends` [text] rows behind each text; `sure` [row, 7] uint8, log-odds of the drafter's probability of its token, 8 steps a unit
around 128; `right` [row] uint8, drafts in a row that are the text's.
"""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from pathlib import Path

import numpy as np

from pyspec import Engine
from pyspec.draft.dflash import DFlash

N_DRAFT = 7
STEPS, ZERO = 8, 128  # of a stored log-odds
TEMPERATURES = (0.0, 1.0)
N_TEXT = 64  # tokens of an answer at most


class Recorder:
    """Notes every draft of an engine with one slot: by position of the anchor, tokens and their probabilities."""

    def __init__(self, drafter: DFlash) -> None:
        self.found: dict[int, tuple[list[int], list[float]]] = {}
        inner, draft = drafter._tokens, drafter.draft

        def tokens(block, n_seq, n_draft):  # type: ignore[no-untyped-def]
            self.last = inner(block, n_seq, n_draft)
            return self.last

        def drafts(requests):  # type: ignore[no-untyped-def]
            given = draft(requests)
            if any(r.n_draft for r in requests):
                chosen, probs = self.last
                self.found[requests[0].slot.n_past] = chosen.tolist(), probs.tolist()
            return given

        drafter._tokens, drafter.draft = tokens, drafts  # type: ignore[method-assign]


def rows_of(
    found: dict[int, tuple[list[int], list[float]]], text: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Log-odds and lengths of right drafts of each anchor that has a whole block of text behind it."""
    sure, right = [], []
    for at in sorted(found):
        tokens, probs = found[at]
        then = text[at + 1 : at + 1 + N_DRAFT]
        if len(tokens) < N_DRAFT or len(then) < N_DRAFT:
            continue
        p = np.clip(np.array(probs), 1e-6, 1 - 1e-6)
        sure.append(np.clip(np.rint(ZERO + STEPS * np.log(p / (1 - p))), 0, 255).astype(np.uint8))
        wrong = [a != b for a, b in zip(tokens, then, strict=True)]
        right.append(wrong.index(True) if any(wrong) else N_DRAFT)
    return np.array(sure, np.uint8).reshape(-1, N_DRAFT), np.array(right, np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    a = parser.parse_args()
    lines = (files("pyspec") / "demo" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt_ids"] for line in lines]
    ends, sure, right = [0], [], []
    with Engine.load(
        "demo", "dflash", np=1, ctx=1024, device="cpu", n_draft_fixed=True, n_draft_max=N_DRAFT,
        draft_p_min=1e-30, synth_len=1.0, prefix_cache=False, warm_up=False,
    ) as engine:  # fmt: skip
        recorder = Recorder(engine.loop.drafter)
        for temperature in TEMPERATURES:
            for i, prompt in enumerate(prompts):
                recorder.found.clear()
                answer = engine.generate(
                    tuple(prompt), max_tokens=N_TEXT, temperature=temperature, seed=i, ignore_eos=True
                )
                p, n = rows_of(recorder.found, [*prompt, *answer.tokens])
                sure.append(p)
                right.append(n)
                ends.append(ends[-1] + len(n))
            print(
                f"temperature {temperature}: {np.mean([1 + n.mean() for n in right[-len(prompts) :]]):.2f} tokens a round",
                flush=True,
            )
    np.savez_compressed(
        a.out, ends=np.array(ends[1:]), sure=np.concatenate(sure), right=np.concatenate(right)
    )
    print(f"{ends[-1]} drafts, {a.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
