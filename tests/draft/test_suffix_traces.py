"""Suffix drafts over a block drafter, replayed on known texts: tokens a round, and rates by set times.

The texts are real, tokenized as the demo's. The drafter is right by coins, because no packaged model copies a text it reads. Each round
is chosen as in the loop: what suffixes offer, and the controller's choice between that and the drafter.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from sampling import slow

from pyspec.draft.blocks import BlockLength
from pyspec.draft.suffix_drafts import SuffixDrafts
from pyspec.engine.policy.controller import Controller
from pyspec.gguf import open_gguf
from pyspec.slots.table import Slot
from pyspec.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
N_OWN, N_SUFFIX = 7, 15
PLAIN_MS, ROW_MS, BLOCK_MS = (
    7.0,
    0.06,
    0.9,
)  # a round, each row more, and a draft: a large model on a GPU


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(open_gguf(ROOT / "pyspec" / "demo" / "pyspec-demo.gguf").metadata)


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text))


@dataclass
class Trace:
    """The outcome of a replay."""

    n_token: int = 0
    n_round: int = 0
    n_suffix: int = 0
    ms: float = 0.0

    @property
    def mean_len(self) -> float:
        return self.n_token / self.n_round

    @property
    def rate(self) -> float:
        return self.n_token / self.ms


def controller() -> Controller:
    c = Controller(1, N_SUFFIX, n_own=N_OWN, block=BlockLength(N_OWN + 1))
    for rows in range(1, N_SUFFIX + 2):
        for _ in range(5):
            c.costs.verify.add(rows, PLAIN_MS + ROW_MS * (rows - 1))
    for _ in range(5):
        c.costs.draft.add(N_OWN + 1, BLOCK_MS)
    return c


def replay(texts: Sequence[tuple[str, str]], chance: float, suffixes: SuffixDrafts | None) -> Trace:
    """Answer each prompt with its text. chance: that a token of the drafter is right."""
    trace, c, rng = Trace(), controller(), random.Random(1)
    for prompt, text in texts:
        read, tokens = ids(prompt), ids(text)
        coins = [rng.random() < chance for _ in tokens]  # the same with suffixes and without
        slot = Slot(0, tokens=read)
        c.begin(0)
        if suffixes is not None:
            suffixes.begin(slot, tuple(read), keeps=True)
            for _ in range(len(read) // 2048 + 1):
                suffixes.advance(2048)
        done = 1
        while done < len(tokens):
            most = len(tokens) - done - 1
            offers = {}
            if suffixes is not None:
                offer = suffixes.draft(slot, tokens[done - 1], min(most, N_SUFFIX))
                offers = {0: offer.survival} if offer.tokens else {}
            (n,) = c.choose([(0, min(most, N_OWN))], offers)
            if 0 in c.offered:
                right = [a == b for a, b in zip(offer.tokens[:n], tokens[done:], strict=False)]
            else:
                right = coins[done : done + n]
            n_right = right.index(False) if False in right else len(right)
            if 0 in c.offered:
                trace.n_suffix += n_right
                suffixes.judge(0, n, n_right)
            else:
                c.record(0, n, n_right)
            ms = PLAIN_MS + ROW_MS * n
            c.timed(1 + n, ms, *((1, n) if n and 0 not in c.offered else (0, 0)), BLOCK_MS)
            trace.ms += ms + (BLOCK_MS if n and 0 not in c.offered else 0.0)
            slot.tokens = slot.tokens + tokens[done - 1 : done + n_right]
            done += n_right + 1
            trace.n_token += n_right + 1
            trace.n_round += 1
        if suffixes is not None:
            suffixes.end(slot)
            suffixes.advance(2048)
    return trace


def source(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def edits() -> list[tuple[str, str]]:
    """Files of this program, and the same with a name changed, a part left out, or lines between."""
    files = [
        source(f"pyspec/{name}.py")
        for name in ("engine/policy/costs", "draft/blocks", "constrain/phrases", "slots/drafts")
    ]
    renamed = [
        (f, f.replace("samples", "timings").replace("Estimate", "Ratio").replace("n_slot", "slots"))
        for f in files
    ]
    shorter = [
        (f, "\n".join(line for i, line in enumerate(f.split("\n")) if i % 40 < 30)) for f in files
    ]
    longer = [
        (
            f,
            f.replace("    def ", "    @logged\n    def ").replace(
                "    return ", "    log.debug(1)\n    return "
            ),
        )
        for f in files
    ]
    return [*renamed, *shorter, *longer]


def prose() -> list[tuple[str, str]]:
    """Parts of texts that are continued, and repeat nothing but words."""
    found = []
    for name in ("README.md", "docs/kernels.md", "docs/features.md", "LICENSE"):
        words = source(name)
        found += [
            (words[i : i + 2000], words[i + 2000 : i + 3200])
            for i in range(0, min(len(words) - 3200, 16000), 3200)
        ]
    return found


# Each third text alone is quick
@pytest.mark.parametrize(("chance", "step"), [(0.75, 3), slow(0.6, 1), slow(0.75, 1), slow(0.85, 1)])
def test_of_edits_more_tokens_come_a_round_than_with_the_drafter_alone(chance: float, step: int) -> None:
    texts = edits()[::step]
    alone, both = replay(texts, chance, None), replay(texts, chance, SuffixDrafts(N_SUFFIX))
    assert both.mean_len / alone.mean_len >= 1.3
    assert both.rate / alone.rate >= 1.3
    assert both.n_suffix > both.n_token / 2


@pytest.mark.parametrize(("chance", "step"), [(0.6, 3), slow(0.3, 1), slow(0.6, 1), slow(0.85, 1)])
def test_of_prose_no_fewer_tokens_come_and_no_slower(chance: float, step: int) -> None:
    texts = prose()[::step]
    alone, both = (
        replay(texts, chance, None),
        replay(texts, chance, SuffixDrafts(N_SUFFIX, answer_bytes=1 << 22)),
    )
    assert both.mean_len / alone.mean_len >= 0.99
    assert both.rate / alone.rate >= 0.99


if __name__ == "__main__":
    for name, texts in (("edits", edits()), ("prose", prose())):
        for chance in (0.0, 0.3, 0.6, 0.75, 0.85, 0.95):
            alone, both = (
                replay(texts, chance, None),
                replay(texts, chance, SuffixDrafts(N_SUFFIX, answer_bytes=1 << 22)),
            )
            print(  # noqa: T201
                f"{name} {chance}: {alone.mean_len:.2f} -> {both.mean_len:.2f} tokens a round ({both.mean_len / alone.mean_len:.2f}), "
                f"rate x{both.rate / alone.rate:.2f}, {both.n_suffix / both.n_token:.0%} by suffixes"
            )
