"""The heads of DSpark over a block's rows: logits corrected by the token before, and how sure it is of each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.draft.dflash_file import MARKOV, DFlashConfig
from pyspec.draft.dflash_net import DFlashNet
from pyspec.draft.draws import Draws
from pyspec.models.target import Matrix, Target
from pyspec.models.weights import Weights
from pyspec.slots.memory import Memory

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
        self, block: Tensor, n_draft: int, anchors: Tensor, *, tells: bool, draws: Draws | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As of DFlash. The second is the confidence head's; without one, the probabilities. Draws count for the rows behind them."""
        first = 0 if self.c.from_anchor else 1
        rows = block[:, first : first + n_draft].transpose(0, 1).contiguous()  # [row, seq, n_embd]
        # of several ranks each has its columns of the logits, and of the Markov head
        head, parts = (self.head, None) if self.parts is None else (self.parts.own, self.parts)
        logits = head(self._normed(rows.flatten(0, 1))).view(n_draft, len(block), -1)
        given, tokens, probs = [], [anchors], []
        for row in range(n_draft):
            given.append(self.token(tokens[-1]))
            corrected = self.bias(given[-1], residual=logits[row])
            best = self.best(corrected) if parts is None else parts.best(corrected)[0].long()
            tokens.append(best if draws is None else draws.take(row, corrected, best))
            if tells and self.sure is None:
                probs.append(corrected.softmax(-1).amax(-1))
        found = torch.stack(tokens[1:], 1).view(-1)
        if not tells:
            return found, None
        if self.sure is None:
            return found, torch.stack(probs, 1).view(-1)
        return found, self._confidence(self.sure, rows, torch.stack(given))

    def _normed(self, rows: Tensor) -> Tensor:
        """Rows of a block as the head reads them."""
        return rows

    def _confidence(self, head: Tensor, rows: Tensor, given: Tensor) -> Tensor:
        """[seq * row], of rows [row, seq, n_embd] and the Markov head's rows of the tokens before them [row, seq, rank]."""
        own, before = head.split([self.c.n_embd, self.c.rank])
        score = rows @ own + given @ before
        score = score if self.sure_bias is None else score + self.sure_bias
        found: Tensor = score.sigmoid().T.reshape(-1)
        return found
