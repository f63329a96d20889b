"""Log probabilities of a prompt's own tokens, sent chunk by chunk: logits over the whole vocabulary are too large to keep."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyspec.engine.loop.round import Work
from pyspec.errors import SlotError
from pyspec.request import PromptLogprobs, TokenLogprob
from pyspec.sample.choose import Chosen, logprobs_of
from pyspec.slots.images import IMAGE, is_image


def send_scores(w: Work, logits: Tensor) -> Chosen | None:
    """Send the scores of one prompt chunk. logits [row, vocab] begin with its rows.

    Returns a failed verdict if the logits are invalid, else None.
    """
    at = w.seq.n_past + 1
    tokens = w.job.prefill[at : at + w.n_scored]
    try:
        entries, ranks = scores(logits[: len(tokens)], tokens, w.job.request.prompt_logprobs or 0)
    except SlotError as e:
        return Chosen([], 0, error=e)
    w.job.sink(PromptLogprobs(w.job.id, at, tuple(entries), tuple(ranks)))
    return None


def scores(logits: Tensor, tokens: Sequence[int], n_top: int) -> tuple[list[TokenLogprob], list[int]]:
    """Log probabilities of the tokens under the logits [row, vocab] before them, and each token's rank: 1 is the likeliest."""
    spoken = [i for i, token in enumerate(tokens) if not is_image(token)]
    if len(spoken) < len(tokens):
        entries, ranks = [TokenLogprob(IMAGE, math.nan)] * len(tokens), [0] * len(tokens)
        found = scores(logits[spoken], [tokens[i] for i in spoken], n_top) if spoken else ([], [])
        for i, entry, rank in zip(spoken, *found, strict=True):
            entries[i], ranks[i] = entry, rank
        return entries, ranks
    ids = torch.tensor(tokens, device=logits.device)[:, None]
    own, peaks = logits.gather(1, ids), logits.amax(-1)
    places = (logits > own).sum(-1) + 1
    table = torch.stack([places.double(), peaks.double()]).tolist()
    for token, peak in zip(tokens, table[1], strict=True):
        if not math.isfinite(peak):
            raise SlotError(
                f"the target's logits before prompt token {token} have no finite maximum: {peak}"
            )
    return logprobs_of(logits, list(tokens), n_top), list(map(int, table[0]))
