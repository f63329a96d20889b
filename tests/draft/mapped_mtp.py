"""A chained head with a vocabulary of its own, as a package of its own would bring it: some of the target's tokens, in another order.

Its block names its tokens by their places there, and maps them to the target's before they leave it (EAGLE-3's d2t).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pyspec.config import EngineSettings
from pyspec.draft import mtp
from pyspec.draft.chain import Chain
from pyspec.draft.drafter import DraftOptions, DraftPlan, TargetFile, own_memory
from pyspec.gguf import GGUFFile
from pyspec.models.decoder import Decoder
from pyspec.models.mtp_block import MtpBlock
from pyspec.models.own_vocabulary import BestDrafts
from pyspec.models.target import Target
from pyspec.models.weights import Weights
from pyspec.slots.table import SlotTable

EVERY = 1  # of the target's tokens, one of so many is in the block's vocabulary


class MappedBlock(MtpBlock):
    to_target: Tensor  # [own token] int64

    def propose(self, hidden: Tensor, out: Tensor) -> Tensor:
        logits = self.head(hidden)[:, self.to_target]
        self.best(logits, out)
        return logits


def own_tokens(n_vocab: int, every: int) -> Tensor:
    """The target's tokens that the block knows, in its order."""
    known = torch.randperm(n_vocab, generator=torch.Generator().manual_seed(7))
    return known[known % every == 0]


def recognises(file: GGUFFile) -> bool:
    return False


def plan(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    return replace(mtp.plan(file, target, settings), kind="mapped")


def load(plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> Chain:
    assert plan.file is not None and isinstance(target, Decoder)
    weights = Weights(plan.file, target.device, options.dense)
    memory = own_memory(plan, table, options, target.device)
    spec = target.config.mtp
    assert spec is not None
    block = MappedBlock(spec, weights, memory, target, options.head)
    block.to_target = own_tokens(target.n_vocab, EVERY)
    block.best = BestDrafts(target.device, block.to_target)
    return Chain(block, plan, table, target.device, options.settings.draft_p_min)
