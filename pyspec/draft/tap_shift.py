"""Does the drafter read the target layers it was trained on? An off-by-one in a converter costs half the acceptance, silently.

The target's own greedy text is drafted with the configured taps and with their neighbours; with the taps it was trained on
a drafter goes on being right for far longer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pyspec.models.target import Target
from pyspec.slots.batch import Seq, SeqMode, lay_out
from pyspec.slots.prefix import common_prefix
from pyspec.slots.table import Slot, SlotTable

if TYPE_CHECKING:
    from pyspec.draft.dflash_net import DFlashNet

log = logging.getLogger(__name__)

SHIFTS = (0, -1, 1)
EVERY = 3  # tokens between anchors
MIN_ANCHORS = 6


@torch.inference_mode()
def run_by_shift(
    net: DFlashNet,
    n_draft: int,
    target: Target,
    table: SlotTable,
    slot: Slot,
    tokens: Sequence[int],
) -> dict[int, float]:
    """Mean number of drafted tokens in a row that are the text's, per shift of all taps. Empty if the text is too short.

    `slot` must be seated and empty; it is left with used pages and no tokens.
    """
    taps = net.c.taps
    anchors = range(len(tokens) - 1 - n_draft, len(tokens) // 3, -EVERY)
    if len(anchors) < MIN_ANCHORS:
        return {}
    shifts = [s for s in SHIFTS if all(0 <= t + s < target.n_layer for t in taps)]
    wanted = sorted({t + s for s in shifts for t in taps})
    batch = lay_out(table, [Seq(slot.index, 0, tokens, mode=SeqMode.KEEP)], target.device)
    out = target.forward(batch, wanted).taps
    assert out is not None
    layers = dict(zip(wanted, out.split(target.n_embd, -1), strict=True))
    runs = {}
    for shift in shifts:
        net.inject(torch.cat([layers[t + shift] for t in taps], -1), batch.kv_rows, batch.positions)
        n = 0
        for at in anchors:  # from the end: a block overwrites the context behind its anchor only
            block = Seq(slot.index, at, [tokens[at], *[net.c.mask_id] * (net.c.block - 1)])
            rows = net.forward(lay_out(table, [block], target.device, see_block=True))
            anchor = torch.tensor([tokens[at]], device=target.device)
            guess = net.drafts(rows[None], n_draft, anchor, tells=False)[0].tolist()
            n += common_prefix(guess, tokens[at + 1 : at + 1 + n_draft])
        runs[shift] = n / len(anchors)
    return runs


def verdict(runs: dict[int, float]) -> str | None:
    """A warning if other taps fit clearly better than the configured ones."""
    log.debug("tokens right in a row by tap shift: %s", runs)
    if not runs:
        return None
    best = max(runs, key=lambda s: (runs[s], s == 0))
    if best == 0 or runs[best] < 1.3 * runs[0] + 0.3:
        return None
    return (
        f"the drafter's taps look shifted: as the file says it is right for {runs[0]:.1f} tokens in a row, with all taps "
        f"{best:+d} for {runs[best]:.1f}; the file was probably converted with another numbering of layers"
    )
