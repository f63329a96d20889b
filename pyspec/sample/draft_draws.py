"""How a request's drafts are drawn: by the numbers of its own draws, or by others."""

from __future__ import annotations

from pyspec.sample.sampler import SlotSampler
from pyspec.slots.drafts import DraftDraw


def draft_draw(
    sampler: SlotSampler, kind: str, n_draft: int, *, is_held: bool = False
) -> DraftDraw | None:
    """The draws of the next n_draft tokens. None: each draft is its most likely token.

    kind     of --spec-draft-sampling
    is_held  the request has a grammar
    """
    params = sampler.params
    if kind == "argmax" or params.greedy or params.temperature <= 0:
        return None
    # Samplers with a memory choose row by row, and grammars cut drafts by their tokens
    keeps_q = kind == "probabilistic" and not params.is_stepwise and not is_held
    noise = (sampler.draft_noise if keeps_q else sampler.noise)(n_draft).tolist()
    cuts = params.top_k, params.top_p, params.min_p
    return DraftDraw(params.temperature, *cuts, noise=noise, keeps_q=keeps_q)
