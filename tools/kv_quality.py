"""What types of keys and values cost: KL divergence and agreement with f32 along real texts, and how many drafts are accepted.

    python tools/kv_quality.py MODEL.gguf TEXT... [--tokens 768] [--pairs q8_0,q8_0/q4_0] [--unturned] [--accept 160]

Each text is read as one prompt, in chunks of 512 rows, by the forward that serves requests. KL is the mean over tokens of the divergence
of the next token's distribution from that of f32 keys and values, in nats; `same best` is the share of tokens with the same likeliest token.
--unturned measures the types of 4 and 5 bits once more without the Hadamard matrix. --accept N continues the middle of each text by N
greedy tokens with suffix drafts (`--spec-type suffix`), and prints accepted drafts of all drafts, and tokens a round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import pyspec
from pyspec.gguf import open_gguf
from pyspec.logits import compute_logits
from pyspec.slots.kv_types import TYPES
from pyspec.text.tokenizer import Tokenizer

PAIRS = "f16,bf16,q8_0,f8_e4m3,q5_1,q5_0,q4_1,q4_0,q8_0/q5_1,q8_0/q4_0,f16/q4_0,q4_0/f16,q5_1/q4_0"
ROWS = 64  # of a piece of logits


def divergence(right: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """(mean KL of the rows, share of rows with the same best token)."""
    kl, same = 0.0, 0
    for i in range(0, len(right), ROWS):
        p, q = (torch.from_numpy(x[i : i + ROWS]).double().log_softmax(-1) for x in (right, other))
        kl += float((p.exp() * (p - q)).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    return kl / len(right), same / len(right)


@contextmanager
def unturned(off: bool) -> Iterator[None]:
    """Types of 4 and 5 bits without the Hadamard matrix, if `off`."""
    before = dict(TYPES)
    if off:
        TYPES.update({name: replace(t, turns=False) for name, t in before.items()})
    try:
        yield
    finally:
        TYPES.update(before)


def accepted(model: Path, prompts: list[list[int]], kv: str, n: int) -> tuple[int, int, float]:
    """(accepted drafts, drafts, tokens a round) of greedy texts with suffix drafts."""
    k, _, v = kv.partition("/")
    with pyspec.Engine.load(
        str(model), np=1, kv_type=k, kv_type_v=v or None, spec_type="suffix", device="cpu", warm_up=False
    ) as engine:
        done = [engine.generate(ids, max_tokens=n, temperature=0.0, ignore_eos=True) for ids in prompts]
    drafted = sum(d.timings.draft_n for d in done)
    taken = sum(d.timings.draft_n_accepted for d in done)
    rounds = sum(d.timings.n_rounds for d in done)
    return taken, drafted, 1 + taken / max(1, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--pairs", default=PAIRS)
    parser.add_argument("--unturned", action="store_true")
    parser.add_argument("--accept", type=int, default=0)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_metadata(open_gguf(args.model).metadata)
    ids = [tokenizer.encode(t.read_text(), add_special=True)[: args.tokens] for t in args.texts]
    right = [compute_logits(args.model, one, device="cpu") for one in ids]
    print(f"{sum(map(len, ids))} tokens of {len(ids)} texts")
    print("| keys/values | turned | KL | same best | accepted | tokens a round | s |")
    for pair in args.pairs.split(","):
        k, _, v = pair.partition("/")
        packed = TYPES[k].is_packed or TYPES[v or k].is_packed
        for off in (False, True) if args.unturned and packed else (False,):
            begun = time.monotonic()
            with unturned(off):
                found = [
                    divergence(
                        r, compute_logits(args.model, one, kv_type=k, kv_type_v=v or None, device="cpu")
                    )
                    for r, one in zip(right, ids, strict=True)
                ]
                drafts = ""
                if args.accept:
                    halves = [one[: len(one) // 2] for one in ids]
                    taken, drafted, rate = accepted(args.model, halves, pair, args.accept)
                    drafts = f"{taken} of {drafted} | {rate:.2f}"
            kl, same = (float(np.mean(x)) for x in zip(*found, strict=True))
            is_turned = "no" if off else "yes" if packed else "-"
            took = time.monotonic() - begun
            print(
                f"| {pair} | {is_turned} | {kl:.5f} | {same:.4f} | {drafts} | {took:.0f} |", flush=True
            )


if __name__ == "__main__":
    main()
