"""Prompts with pictures of the fixtures in tests/fixtures/images: their ids, spans and encoded rows, and what has to come out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from harness import DEVICE, Bench
from numpy.typing import NDArray
from torch import Tensor

from pyspec.slots.batch import Seq, SeqMode, lay_out
from pyspec.slots.images import ImageSpan, image_id, shift_before

IMAGES = Path(__file__).parents[1] / "fixtures" / "images"
PROMPTS = ("one", "two", "side", "late")
CLOSE = 1e-3  # of logits, as the fixtures' README bounds it


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt's ids, its pictures with their rows, and the fixture's logits [12, vocab] and tokens behind it."""

    ids: list[int]
    spans: tuple[ImageSpan, ...]
    rows: Mapping[int, Tensor]
    logits: NDArray[np.float64]
    tokens: list[int]
    has_axes: bool


def read_prompt(name: str, prompt: str, handle: int = 3) -> SeenPrompt:
    """One of a fixture. handle: of its first picture."""
    about, found = json.loads((IMAGES / f"{name}.json").read_text()), np.load(IMAGES / f"{name}.npz")
    own = about["prompts"][prompt]
    ids: list[int] = []
    spans: list[ImageSpan] = []
    rows: dict[int, Tensor] = {}
    for chunk in own["chunks"]:
        if "ids" in chunk:
            ids += chunk["ids"]
            continue
        n, at = chunk["image_tokens"], handle + len(spans)
        rows[at] = torch.tensor(found[f"{prompt}.exact{len(spans)}"], dtype=torch.float32, device=DEVICE)
        assert len(rows[at]) == n
        spans.append(ImageSpan(at, len(ids), n, chunk["nx"], chunk["ny"]))
        ids += [image_id(at, i) for i in range(n)]
    return SeenPrompt(ids, tuple(spans), rows, found[f"{prompt}.exact"], own["tokens"], about["mrope"])


class Seeing(Bench):
    """A bench whose slots read prompts with pictures."""

    def rows(self, slot: int, p: SeenPrompt, ids: list[int], *, keep: bool = True) -> Seq:
        """The next rows of a prompt, or of the text behind it."""
        s = self.table.slots[slot]
        end = s.n_past + len(ids)
        spans = tuple(x for x in p.spans if x.first < end and x.end > s.n_past)
        mode = SeqMode.KEEP if keep else SeqMode.VERIFY
        shift = shift_before(p.spans, s.n_past)
        return Seq(slot, s.n_past, ids, mode, 1, s.n_fold, shift=shift, images=spans)

    def see(self, p: SeenPrompt, *seqs: Seq) -> torch.Tensor:
        """Logits of a forward of all these rows, which are kept."""
        out = self.target.forward(lay_out(self.table, seqs, DEVICE, pictures=p.rows))
        for seq in seqs:
            self.commit(seq, seq.width)
        return out.logits.cpu()

    def pieces(self, slot: int, p: SeenPrompt, cuts: tuple[int, ...]) -> torch.Tensor:
        """The prompt cut there: logits of its last row."""
        for first, end in zip((0, *cuts), (*cuts, len(p.ids)), strict=True):
            logits = self.see(p, self.rows(slot, p, p.ids[first:end]))
        return logits

    def answer(self, slot: int, p: SeenPrompt, logits: torch.Tensor) -> torch.Tensor:
        """[12, vocab]: the prompt's logits, and those of the fixture's tokens behind it, one by one."""
        found = [logits[-1]]
        for token in p.tokens[:-1]:
            found.append(self.see(p, self.rows(slot, p, [token]))[-1])
        return torch.stack(found)


NO_PICTURES = SeenPrompt([], (), {}, np.empty(0), [], False)


def bench(name: str, n_slot: int = 1, **more: object) -> Seeing:
    return Seeing(IMAGES / f"{name}.gguf", n_slot=n_slot, n_ctx=320, **more)  # type: ignore[arg-type]
