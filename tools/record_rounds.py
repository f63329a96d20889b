"""Record real rounds for `tools/replay.py`: what suffix drafts offer at every token of real answers, and what rounds of that model take.

python tools/record_rounds.py MODEL.gguf OUT.npz [--streams 8 16] [--tokens 96]    (some minutes on a CPU)

Prompts are those of `tools/real_texts.py`; requests join as others end. The engine's doors are `Loop._count_round`, which has every
committed round, and `SuffixSource.draft_all`.

OUT.npz: `ends` [text] tokens behind each answer; `right` [token] uint8, offered tokens in a row that are the text's; `offer` [token, 15] uint8,
chance of each offered token and all before it in 1/255, 0 behind the last; `rounds` [round, 4] rows, busy slots, rows of prompts and microseconds;
`lookups` [call, 2] slots and microseconds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from real_texts import code, edit, manual, prose

from pyspec import Engine
from pyspec.draft.suffix_drafts import SuffixDrafts
from pyspec.slots.table import Slot

N_SUFFIX = 15


def watch(loop: Any, rounds: list[list[float]], lookups: list[list[float]]) -> None:
    """Note every committed round and every look-up."""
    count, draft_all = loop._count_round, loop.speculator.suffixes.draft_all

    def counted(pending: Any, work: Any, chosen: Any, n_row: int, *, is_last: bool) -> None:
        n_read = sum(w.seq.width for w in pending.work if w.is_prompt)
        rounds.append([n_row, len(work), n_read, 1e6 * (loop.ended - pending.since)])
        count(pending, work, chosen, n_row, is_last=is_last)

    def drafts(wishes: Any) -> Any:
        began = time.thread_time()
        found = draft_all(wishes)
        lookups.append([len(wishes), 1e6 * (time.thread_time() - began)])
        return found

    loop._count_round, loop.speculator.suffixes.draft_all = counted, drafts


def offers_of(texts: list[tuple[list[int], list[int]]]) -> tuple[np.ndarray, np.ndarray]:
    """What one text after the other is offered at each token, and how much of that is right. Verdicts are whole drafts."""
    drafts, slots = SuffixDrafts(N_SUFFIX), [Slot(0) for _ in texts]
    right, offer = [], []
    for slot, (prompt, answer) in zip(slots, texts, strict=True):
        slot.tokens = list(prompt)
        drafts.begin(slot, tuple(prompt), keeps=True)
        while drafts.advance(1 << 20):
            pass
        for i, token in enumerate(answer):
            then = answer[i + 1 :]
            found = drafts.draft(slot, token, max(len(then) - 1, 0))
            wrong = [a != b for a, b in zip(found.tokens, then, strict=False)]
            n = wrong.index(True) if any(wrong) else len(wrong)
            drafts.judge(0, len(found.tokens), n)
            right.append(n)
            chance = np.ceil(255 * np.array([*found.survival, *[0.0] * N_SUFFIX][:N_SUFFIX]))
            offer.append(chance.astype(np.uint8))
            slot.tokens = [*slot.tokens, token]
        drafts.end(slot)
    return np.array(right, np.uint8), np.array(offer)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--tokens", type=int, default=96)
    a = parser.parse_args()
    rounds: list[list[float]] = []
    lookups: list[list[float]] = []
    texts: list[tuple[list[int], list[int]]] = []
    for n in a.streams:
        with Engine.load(a.model, "suffix", np=n, ctx=2048, device="cpu", prefix_cache=False) as engine:
            watch(engine.loop, rounds, lookups)
            prompts = [p for texts_of in (edit, code, manual, prose) for p in [*texts_of()][:6]]
            asked = [engine.encode(p)[-400 - 37 * (i % 5) :] for i, p in enumerate(prompts)]
            found = engine.generate_many(asked, max_tokens=a.tokens, temperature=0.0, ignore_eos=True)
            if n == a.streams[0]:
                texts = [(list(p), list(r.tokens)) for p, r in zip(asked, found, strict=True)]
        print(f"{n} streams: {len(rounds)} rounds so far", flush=True)
    right, offer = offers_of(texts)
    np.savez_compressed(
        a.out, ends=np.cumsum([len(answer) for _, answer in texts]).astype(np.int32), right=right, offer=offer,
        rounds=np.rint(rounds).astype(np.int32), lookups=np.rint(lookups).astype(np.int32),
    )  # fmt: skip
    print(f"{len(right)} tokens, {right.mean():.2f} right offers a token, {a.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
