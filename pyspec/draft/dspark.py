"""DSpark drafter: DFlash's blocks, whose logits are corrected by the token before, and which say how sure they are.

Each row's logits get a bias that the token of the row before gives (Markov head), so the rows are chosen in order; the layers run once.
Where the file says so, rows predict the token behind their own, the anchor's row included: a block of n rows drafts n tokens. The
confidence head gives the chance that a token is accepted; `--spec-draft-p-min` cuts drafts by it. Source: llama.cpp `dflash`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pyspec.config import EngineSettings
from pyspec.cuda.ops.embed.op import embed
from pyspec.cuda.ops.embed.ref import EmbedSpec
from pyspec.draft.dflash import DFlash, block_plan, bound, drafter_of, load_share
from pyspec.draft.dflash import requests as layer_requests
from pyspec.draft.dflash_file import (
    MARKOV,
    DFlashConfig,
    check_is_dflash,
    drafter_tensors,
    read_layers,
)
from pyspec.draft.dflash_net import DFlashNet
from pyspec.draft.drafter import DraftOptions, DraftPlan, TargetFile
from pyspec.errors import ConfigError, PairError
from pyspec.gguf import GGUFFile
from pyspec.models.cuts import Cut, Units
from pyspec.models.matrices import Matrix
from pyspec.models.part import LoadTypes, Request
from pyspec.models.target import Target
from pyspec.models.wants import Want
from pyspec.models.weights import HEAD, Weights
from pyspec.slots.memory import Memory
from pyspec.slots.table import SlotTable

BIAS, SURE, SURE_BIAS = "markov_w2.weight", "conf_proj.weight", "conf_proj.bias"


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """rank: width of the Markov head. from_anchor: rows predict the token behind their own. is_sure: there is a confidence head."""

    rank: int
    from_anchor: bool
    is_sure: bool

    @property
    def most(self) -> int:
        """Tokens that a block drafts at most."""
        return self.block if self.from_anchor else self.block - 1

    @property
    def adds_scores(self) -> str:
        """Why drafts need the target's logits."""
        return "its Markov head adds to the logits"

    @property
    def tells_in_parts(self) -> bool:
        """The confidence head reads no logits."""
        return self.is_sure


def recognises(file: GGUFFile) -> bool:
    return file.architecture == "dflash" and MARKOV in file.tensors


def read_config(file: GGUFFile) -> DSparkConfig:
    """The drafter's configuration; PairError with what is missing, if the file is for another drafter."""
    check_is_dflash(file, "DSpark", (MARKOV,))
    h = file.hparams
    if h.integer("hyper_connection.count", 0) > 0:
        raise PairError("the drafter is DSpark with DeepSeek-V4's layers, which are not supported")
    return DSparkConfig(
        **vars(read_layers(file)),
        rank=file.tensors[MARKOV].shape[-1],
        from_anchor=h.flag("sample_from_anchor", True),
        is_sure=h.flag("has_confidence_head", SURE in file.tensors),
    )


def plan(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    if file is None:
        raise ConfigError("--spec-type dspark needs a draft file (-md)")
    c, n_vocab = read_config(file), target.config.n_vocab
    n_head = file.tensors[HEAD].shape[0] if HEAD in file.tensors else n_vocab
    wants = drafter_tensors(c, file, target.config.n_embd) | {
        MARKOV: Want((n_vocab, c.rank)),
        BIAS: Want((n_head, c.rank), cut=Cut(0, (Units(n_head, "tokens", uneven=True),))),
    }
    if c.is_sure:
        wants[SURE] = Want((1, c.n_embd + c.rank))
        wants[SURE_BIAS] = Want((1,), optional=True)
    whole = block_plan(c, file, target, settings, wants)
    return replace(
        whole,
        kind="dspark",
        requests=partial(requests, c.share(whole.n_rank), file),
        load_share=partial(load_share, bind),
    )


def requests(c: DSparkConfig, file: GGUFFile, on: LoadTypes) -> Iterator[Request]:
    """The ops that layers and heads ask for; products are those of the file."""
    yield from layer_requests(c, file, on)
    yield embed, EmbedSpec(on.device, file.tensors[MARKOV].type, c.rank)


class DSparkNet(DFlashNet):
    """DFlash's layers, the Markov head, and the confidence head if there is one."""

    c: DSparkConfig

    def __init__(
        self, c: DSparkConfig, w: Weights, memory: Memory, target: Target, head: Matrix | None
    ) -> None:
        super().__init__(c, w, memory, target, head)
        self.token, self.bias = w.embedding(MARKOV), w.matrix(BIAS)
        self.sure = w.vector(SURE).view(-1) if c.is_sure else None
        self.sure_bias = w.optional(SURE_BIAS) if c.is_sure else None

    def drafts(
        self, block: Tensor, n_draft: int, anchors: Tensor, *, tells: bool
    ) -> tuple[Tensor, Tensor | None]:
        """As of DFlash. The second is the confidence head's; without one, the tokens' probabilities."""
        first = 0 if self.c.from_anchor else 1
        rows = block[:, first : first + n_draft].transpose(0, 1).contiguous()  # [row, seq, n_embd]
        # of several ranks each has its columns of the logits, and of the Markov head
        head, parts = (self.head, None) if self.parts is None else (self.parts.own, self.parts)
        logits = head(rows.flatten(0, 1)).view(n_draft, len(block), -1)
        given, tokens, probs = [], [anchors], []
        for row in range(n_draft):
            given.append(self.token(tokens[-1]))
            corrected = self.bias(given[-1], residual=logits[row])
            tokens.append(self.best(corrected) if parts is None else parts.best(corrected)[0].long())
            if tells and self.sure is None:
                probs.append(corrected.softmax(-1).amax(-1))
        found = torch.stack(tokens[1:], 1).view(-1)
        if not tells:
            return found, None
        if self.sure is None:
            return found, torch.stack(probs, 1).view(-1)
        return found, self._confidence(self.sure, rows, torch.stack(given))

    def _confidence(self, head: Tensor, rows: Tensor, given: Tensor) -> Tensor:
        """[seq * row], of rows [row, seq, n_embd] and the Markov head's rows of the tokens before them [row, seq, rank]."""
        own, before = head.split([self.c.n_embd, self.c.rank])
        score = rows @ own + given @ before
        score = score if self.sure_bias is None else score + self.sure_bias
        return score.sigmoid().T.reshape(-1)


def load(plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> DFlash:
    return drafter_of(bind(plan, target, table, options), plan, target, table, options)


def bind(plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> DSparkNet:
    """The layers of this rank on the target's device."""
    assert plan.file is not None
    return bound(DSparkNet, read_config(plan.file), plan, target, table, options)
