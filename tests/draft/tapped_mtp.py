"""A second chained head, as a package of its own would bring it: MTP's block, fed from a tap of the last layer.

Its hidden states are the target's, so its drafts are MTP's; but it asks for taps, and makes its states of them itself.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from pyspec.config import EngineSettings
from pyspec.draft import mtp
from pyspec.draft.chain import Chain
from pyspec.draft.drafter import DraftOptions, DraftPlan, TargetFile, own_memory
from pyspec.gguf import GGUFFile
from pyspec.models.decoder import Decoder
from pyspec.models.mtp_block import MtpBlock
from pyspec.models.target import Out, Target
from pyspec.models.weights import Weights
from pyspec.slots.table import SlotTable


class TappedBlock(MtpBlock):
    final: Tensor  # weights of the target's last norm

    def states_of(self, out: Out) -> Tensor:
        assert out.taps is not None
        return self.residual.norms(out.taps, self.final)


def recognises(file: GGUFFile) -> bool:
    return False


def plan(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    base, last = mtp.plan(file, target, settings), target.config.n_layer - 1
    return replace(base, kind="tapped", observes="taps", taps=(last,))


def load(plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> Chain:
    assert plan.file is not None and isinstance(target, Decoder)
    weights = Weights(plan.file, target.device, options.dense)
    memory = own_memory(plan, table, options, target.device)
    spec = target.config.mtp
    assert spec is not None
    block = TappedBlock(spec, weights, memory, target, options.head)
    block.final = target.norm
    return Chain(block, plan, table, target.device, options.settings.draft_p_min)
