"""Tokens a round and acceptance by --spec-draft-sampling, beside the bound: `python tools/draft_sampling.py [MODEL] [--draft D] [-t 1 0.7]`.

The packaged pair by default, on its own prompts. Drafts have one length, so that modes judge alike. A row is judged if all drafts
before it were accepted; the bound is the mean of sum(min(p, q)) over judged rows, beyond which a single row's acceptance can not go;
"favourites" is how often argmax would be accepted in these rows. Modes write other texts, so compare within a line.
Block verification keeps more than it row by row, because rows help each other. Below the table: drafts that both rules are expected to
keep of the same blocks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import pyspec
from pyspec import Engine
from pyspec.engine.loop import pending_round, speculator
from pyspec.sample import chain
from pyspec.sample.choose import Chosen, Span, choose
from pyspec.sample.draft_draws import draft_draw
from pyspec.slots.drafts import DraftDraw

PROMPTS = Path(pyspec.__file__).parent / "demo" / "prompts.jsonl"
MODES = ("argmax", "coupled", "probabilistic")


@dataclass
class Count:
    rounds: int = 0
    tokens: int = 0
    judged: int = 0
    accepted: int = 0
    bound: float = 0.0
    bounded: int = 0
    favoured: float = 0.0
    by_rows: float = 0.0
    by_blocks: float = 0.0

    def add(self, logits: Tensor, span: Span, chosen: Chosen) -> None:
        n = len(span.drafts.tokens)
        self.rounds, self.tokens = self.rounds + 1, self.tokens + len(chosen.tokens)
        is_end = (
            len(chosen.tokens) == chosen.n_accepted
        )  # nothing behind an accepted end token is judged
        n_judged = min(n, chosen.n_accepted + (not is_end))
        self.judged, self.accepted = self.judged + n_judged, self.accepted + chosen.n_accepted
        if span.drafts.q is not None and n_judged:
            rows = logits[span.first_row : span.first_row + n_judged]
            params = [span.sampler.params] * n_judged
            settings = chain.Settings.stack(params, [0.0] * n_judged, rows.shape[1], rows.device)
            p, q = chain.probabilities(rows, settings), span.drafts.q[:n_judged].double()
            self.bound += float(torch.minimum(p, q).sum())
            self.favoured += float(p.gather(1, q.argmax(-1, keepdim=True)).sum())
            self.bounded += n_judged
            self._expect(logits, span)

    def _expect(self, logits: Tensor, span: Span) -> None:
        """Expected numbers of accepted drafts, given the drafts: row by row, and as a block."""
        n, q = len(span.drafts.tokens), span.drafts.q
        assert q is not None
        rows = logits[span.first_row : span.first_row + n]
        settings = chain.Settings.stack([span.sampler.params] * n, [0.0] * n, rows.shape[1], rows.device)
        p, q = chain.probabilities(rows, settings), q[:n].double()
        drafts = torch.tensor(span.drafts.tokens)[:, None]
        ratios = (p.gather(1, drafts) / q.gather(1, drafts))[:, 0].tolist()
        kept, is_left, chances = 1.0, 1.0, []
        for i, ratio in enumerate(ratios):
            rest = float((kept * p[i] - q[i]).clamp(min=0).sum())
            chances.append(rest / (rest + 1 - kept) if rest + 1 - kept > 0 else 1.0)
            kept, is_left = min(1.0, kept * ratio), is_left * min(1.0, ratio)
            self.by_rows += is_left
        is_last = 1.0  # no longer prefix is accepted
        for i, chance in reversed(list(enumerate([*chances, kept]))):
            self.by_blocks += i * chance * is_last
            is_last *= 1 - chance


@contextmanager
def counted(mode: str) -> Iterator[Count]:
    """Count verdicts meanwhile. Coupled drafts bring their probabilities, too, which their verdict does not read."""
    count = Count()

    def asked(*of: Any, **more: Any) -> DraftDraw | None:
        draw = draft_draw(*of, **more)
        return None if draw is None else replace(draw, keeps_q=True)

    def watched(logits: Tensor, spans: Sequence[Span], **more: Any) -> list[Chosen]:
        bare = [replace(s, drafts=replace(s.drafts, q=None)) for s in spans]
        found = choose(logits, spans if mode == "probabilistic" else bare, **more)
        for span, chosen in zip(spans, found, strict=True):
            if span.width > 1:
                count.add(logits, span, chosen)
        return found

    with patch.object(speculator, "draft_draw", asked), patch.object(pending_round, "choose", watched):
        yield count


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("model", nargs="?", default="demo")
    args.add_argument("--draft", default="auto")
    args.add_argument("-t", "--temperature", type=float, nargs="+", default=[1.0, 0.7])
    args.add_argument("--n-draft", type=int, default=7)
    args.add_argument("--prompts", type=int, default=40)
    args.add_argument("-n", type=int, default=96)
    asked = args.parse_args()
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    chats = [row["messages"] for row in rows[:: max(1, len(rows) // asked.prompts)]][: asked.prompts]
    print(
        "| temperature | drafts | tokens a round | accepted | favourites | bound | share |\n"
        + "| --- " * 7
        + "|"
    )
    for temperature in asked.temperature:
        for mode in MODES:
            settings = {"n_draft_max": asked.n_draft, "n_draft_fixed": True, "draft_sampling": mode}
            with Engine.load(asked.model, asked.draft, np=1, **settings) as engine, counted(mode) as c:
                for seed, chat in enumerate(chats):
                    engine.chat(
                        chat,
                        temperature=temperature,
                        seed=seed,
                        max_tokens=asked.n,
                        top_k=0,
                        top_p=1.0,
                        min_p=0.0,
                    )
            rate = c.accepted / max(1, c.judged)
            bound, favoured = c.bound / max(1, c.bounded), c.favoured / max(1, c.bounded)
            share = rate / bound if bound else 0.0
            print(
                f"| {temperature:g} | {mode} | {c.tokens / max(1, c.rounds):.2f} | {rate:.3f} | {favoured:.3f} | {bound:.3f} | {share:.3f} |",
                flush=True,
            )
            if mode == "probabilistic":
                print(
                    f"<!-- row by row {c.by_rows / c.rounds:.3f}, as blocks {c.by_blocks / c.rounds:.3f} -->"
                )


if __name__ == "__main__":
    main()
