"""Random drafters for the targets of tests/fixtures/images, or any other file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from eagle_files import eagle_for
from rewrite import rewrite

from pyspec import synth
from pyspec.draft.drafter import Drafter
from pyspec.gguf import open_gguf
from pyspec.slots.drafts import DraftRequest, Drafts
from pyspec.slots.images import IMAGE

TAPPED = ("dflash", "dflash2", "dspark", "eagle3", "eagle3-own")
"""Kinds of drafters that read the outputs of a target's layers."""


@cache
def drafter_for(target: Path, kind: str) -> Path:
    """A random one of TAPPED. It reads middle layers, and shares embedding and head with the target; not `eagle3-own`."""
    if kind.startswith("eagle3"):
        return eagle_for(target, own=kind.endswith("own"))
    file = open_gguf(target)
    n_vocab, n_embd = file.tensors["token_embd.weight"].shape
    n_layer = file.hparams.integer("block_count")
    dims = replace(
        synth.find("qwen35", tiny=True), n_vocab=n_vocab, n_embd=n_embd, n_layer=min(n_layer, 4)
    )
    folder = Path(mkdtemp(prefix="pyspec-seen-"))
    own = synth.drafter_of(dims, kind=kind)
    made = synth.write(own, folder / "own.gguf", quant="f32", tiny=True, drafter=True)
    tokenizer = {k: v for k, v in file.metadata.items() if k.startswith("tokenizer.")}
    mask = {"tokenizer.ggml.mask_token_id": own.mask_id}
    return rewrite(made, folder / f"{kind}.gguf", change=tokenizer | mask)


def guided(drafter: Drafter, texts: Sequence[Sequence[int]]) -> dict[tuple[int, ...], list[int]]:
    """Let a random drafter be right at times: of some drafts the first tokens become those that follow in one of `texts`, whose pictures have no
    tokens. All that it reads and keeps is its own. Returns, once it runs, its own drafts by the tokens before them."""
    draft, own = drafter.draft, dict[tuple[int, ...], list[int]]()

    def known(request: DraftRequest, found: Drafts) -> Drafts:
        before = [t for t in (*request.slot.tokens, request.anchor) if t < IMAGE]
        own.setdefault(tuple(before), [*found.tokens])
        right = next((text[len(before) :] for text in texts if [*text[: len(before)]] == before), [])
        n = min(len(before) % 5, len(right), len(found.tokens))
        return replace(found, tokens=[*right[:n], *found.tokens[n:]])

    def guide(requests: Sequence[DraftRequest]) -> list[Drafts]:
        return [
            known(*each) if each[1].tokens else each[1]
            for each in zip(requests, draft(requests), strict=True)
        ]

    drafter.draft = guide  # type: ignore[method-assign]
    return own
