"""DFlash2 drafter: DFlash's blocks with convolutions in their layers, and a selector that chooses among the best tokens of each row.

A layer convolves the rows of a block before and after its attention and its feed-forward (`models/blocks/convolved.py`); context rows are
not convolved. The selector scores each candidate of a row by its logit and by how well it follows the token chosen for the row before.
Scores of all pairs of neighbours are made at once, so only the walk through them goes row by row. Source: llama.cpp `dflash`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyspec.config import EngineSettings
from pyspec.cpu.tensors import capped
from pyspec.cuda.ops.embed.op import embed
from pyspec.cuda.ops.embed.ref import EmbedSpec
from pyspec.draft.dflash import DFlash, block_plan, bound
from pyspec.draft.dflash import requests as layer_requests
from pyspec.draft.dflash_file import (
    CONVOLUTION,
    SELECTOR,
    DFlashConfig,
    check_is_dflash,
    drafter_tensors,
    read_layers,
)
from pyspec.draft.dflash_net import DFlashNet
from pyspec.draft.drafter import DraftOptions, DraftPlan, TargetFile
from pyspec.draft.draws import Draws
from pyspec.errors import ConfigError, PairError
from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.convolved import Convolved
from pyspec.models.own_vocabulary import D2T
from pyspec.models.part import LoadTypes, Request
from pyspec.models.target import Matrix, Target
from pyspec.models.wants import HEAD, Want
from pyspec.models.weights import Weights
from pyspec.ranges import Real
from pyspec.slots.memory import Memory
from pyspec.slots.table import SlotTable

BEFORE, BEHIND = "selector_predecessor.weight", "selector_successor.weight"
PIECE = 128  # logits whose largest is found first; divides the usual vocabulary sizes


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DFlashConfig):
    """n_tap, group: of the convolutions. rank: width of the selector's rows; n_best: candidates of a row. logit_scale, cap: of the head's
    logits, before scores are added to them."""

    n_tap: int
    group: int
    rank: int
    n_best: int
    logit_scale: float
    cap: float

    @property
    def adds_scores(self) -> str:
        """Why drafts need the target's logits."""
        return "its selector adds scores to the logits"

    @property
    def tells_in_parts(self) -> bool:
        """Probabilities are those among the candidates, which every rank has."""
        return True

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """Its layers."""
        return tuple(
            BlockSpec(tuple(replace(part, spec=self._convolved(part)) for part in block.parts))
            for block in super().blocks
        )

    def _convolved(self, part: Part) -> Convolved:
        return Convolved(part.spec, part.norm.replace("_norm", "_conv"), self.n_tap, self.group)


def recognises(file: GGUFFile) -> bool:
    return file.architecture == "dflash" and SELECTOR in file.tensors


def read_config(file: GGUFFile) -> DFlash2Config:
    """The drafter's configuration; PairError with what is missing, if the file is for another drafter."""
    check_is_dflash(file, "DFlash2", (SELECTOR, CONVOLUTION))
    h, common = file.hparams, read_layers(file)
    c = DFlash2Config(
        **vars(common),
        n_tap=h.integer("conv_kernel_size"),
        group=h.integer("conv_group_size"),
        rank=h.integer("selector_rank"),
        n_best=h.integer("selector_top_k"),
        logit_scale=h.number("logit_scale", 1.0, legal=Real(1e-6, 1e6)),
        cap=h.number("final_logit_softcapping", 0.0, legal=Real(0, 1e6)),
    )
    if c.n_embd % c.group:
        raise PairError(
            f"the drafter has width {c.n_embd}, no multiple of its groups of {c.group} columns"
        )
    return c


def plan(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    if file is None:
        raise ConfigError("--spec-type dflash2 needs a draft file (-md)")
    c, n_vocab = read_config(file), target.config.n_vocab
    n_head = file.tensors[HEAD].shape[0] if HEAD in file.tensors else n_vocab
    if c.n_best > n_head:
        raise PairError(f"the drafter's selector takes {c.n_best} of {n_head} tokens")
    wants = tensors(c, file, target.config.n_embd, n_vocab)
    return block_plan(c, file, target, settings, wants, "dflash2", requests)


def tensors(c: DFlash2Config, file: GGUFFile, n_target: int, n_vocab: int) -> dict[str, Want]:
    """The manifest, for a target of this width and vocabulary."""
    return drafter_tensors(c, file, n_target) | {
        SELECTOR: Want((c.rank, c.n_embd)),
        BEFORE: Want((n_vocab, c.rank)),
        BEHIND: Want((n_vocab, c.rank)),
    }


def requests(c: DFlash2Config, file: GGUFFile, on: LoadTypes) -> Iterator[Request]:
    """The ops that layers and selector ask for; products are those of the file."""
    yield from layer_requests(c, file, on)
    for name in (BEFORE, BEHIND):
        yield embed, EmbedSpec(on.device, file.tensors[name].type, c.rank)


def largest(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n largest of each row of logits [row, token] f32, and their columns; both [row, n].

    They lie in the n pieces with the largest maxima, so that most logits are read once.
    """
    n_row, n_vocab = logits.shape
    if n_vocab % PIECE or n_vocab < 2 * n * PIECE:
        values, columns = logits.topk(n)
        return values, columns
    pieces = logits.view(n_row, -1, PIECE)
    first = pieces.amax(-1).topk(n, sorted=False).indices
    values, at = pieces.gather(1, first[..., None].expand(-1, -1, PIECE)).flatten(1).topk(n)
    return values, first.gather(1, at // PIECE) * PIECE + at % PIECE


class DFlash2Net(DFlashNet):
    """DFlash's layers with convolutions, and the selector."""

    c: DFlash2Config

    def __init__(
        self, c: DFlash2Config, w: Weights, memory: Memory, target: Target, head: Matrix | None
    ) -> None:
        super().__init__(c, w, memory, target, head)
        self.gate = w.matrix(SELECTOR)
        self.before, self.behind = w.embedding(BEFORE), w.embedding(BEHIND)

    def drafts(
        self, block: Tensor, n_draft: int, anchors: Tensor, *, tells: bool, draws: Draws | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As of DFlash. Probabilities are those among a row's candidates behind the draft before, and so draws are from these."""
        n_seq, k = len(block), self.c.n_best
        values, ids, gate = self._candidates(block[:, 1 : 1 + n_draft].flatten(0, 1))
        ids = ids.view(n_seq, n_draft, k)
        # scores [seq, row, token of the row before, token]: the first row's one before is the anchor, for all places alike
        before = torch.cat([anchors[:, None, None].expand(-1, 1, k), ids[:, :-1]], 1)
        follows = self.behind(ids.flatten()).view(-1, k, self.c.rank) * gate[:, None]
        scores = values[:, None] + self.before(before.flatten()).view(-1, k, self.c.rank) @ follows.mT
        if draws is None:
            found = _walked(scores.argmax(-1).view(n_seq, n_draft, k))
        else:
            found = _drawn(scores.view(n_seq, n_draft, k, k), ids, draws)
        tokens = ids.gather(2, found[..., None]).flatten()
        return tokens, self._sure(scores, found) if tells else None

    def _candidates(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of rows [row, n_embd]: logits and target's tokens of the candidates, [row, n_best] both; gate [row, rank]."""
        logits = self.head(rows) if self.parts is None else self.parts.own(rows)
        logits = capped(logits if self.c.logit_scale == 1.0 else logits * self.c.logit_scale, self.c.cap)
        n = self.c.n_best
        values, columns = largest(logits, n) if self.parts is None else self._of_all(logits)
        return values, self.best.mapped(columns), self.gate(rows)

    def _of_all(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As `largest`, of the columns of all ranks. logits: this one's."""
        assert self.parts is not None
        n = self.c.n_best
        return self.parts.largest(*largest(logits, min(n, logits.shape[1])), n)

    def _sure(self, scores: Tensor, found: Tensor) -> Tensor:
        """Probability of each draft, [seq * row]. scores: as in `drafts`; found [seq, row]: the walk's places."""
        came = torch.cat([torch.zeros_like(found[:, :1]), found[:, :-1]], 1).view(-1, 1)
        return scores.softmax(-1).amax(-1).gather(1, came).view(-1)


def _walked(follower: Tensor) -> Tensor:
    """Places of the chosen candidates, [seq, row]. follower [seq, row, place in the row before] int64: the place that follows best."""
    places = [follower[:, 0, :1]]
    for row in range(1, follower.shape[1]):
        places.append(follower[:, row].gather(1, places[-1]))
    return torch.cat(places, 1)


def _drawn(scores: Tensor, ids: Tensor, draws: Draws) -> Tensor:
    """Places of the drawn candidates, [seq, row]. scores [seq, row, place in the row before, place] f32; ids [seq, row, place] int64."""
    places = [ids.new_zeros(len(ids))]
    for row in range(ids.shape[1]):
        came = places[-1][:, None, None].expand(-1, 1, ids.shape[2])
        follows = scores[:, row].gather(1, came).squeeze(1)
        places.append(draws.take_among(row, follows, ids[:, row]))
    return torch.stack(places[1:], 1)


def check_candidates(net: DFlash2Net, draws: str) -> None:
    """Refuse draws whose probabilities would be wrong: candidates have to be different tokens."""
    if draws == "probabilistic" and not net.drawing.one_to_one:
        raise ConfigError(
            f"--spec-draft-sampling probabilistic can not be: the drafter's {D2T} has a token twice; coupled can"
        )


def load(plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> DFlash:
    net = bind(plan, target, table, options)
    return DFlash(net, plan, table, target.device, options.settings.draft_p_min)


def bind(plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> DFlash2Net:
    """The layers of this rank on the target's device."""
    assert plan.file is not None
    net = bound(DFlash2Net, read_config(plan.file), plan, target, table, options)
    check_candidates(net, plan.draws)
    return net
