"""A draft model: a small model of its own that reads the text and chains its best tokens, as llama.cpp's `-md` means it.

Any architecture with attention over pages, with or without recurrent layers. Its pages have the numbers of the target's, so a prefix of
the cache, a page that is copied, a slot's file and refused drafts need nothing more; recurrent layers add a checkpoint of their state.
`chain.py` calls it for every drafted token and has it catch up on tokens that it did not draft. Its vocabulary is the target's, or is
mapped to it (`token_map.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pyspec.config import EngineSettings
from pyspec.cuda.ops.embed.op import embed
from pyspec.cuda.ops.embed.ref import EmbedSpec
from pyspec.draft.chain import Chain, graph_bytes, most_waiting
from pyspec.draft.drafter import OWN_HEAD, DraftOptions, DraftPlan, TargetFile, own_memory
from pyspec.draft.draws import draw_bytes
from pyspec.draft.token_map import TokenMap, placeholder, read_map
from pyspec.errors import ConfigError, PairError
from pyspec.gguf import GGUFFile
from pyspec.models import read_config
from pyspec.models.checks import check_read, check_tensors
from pyspec.models.decoder import Decoder
from pyspec.models.kernels import of_model
from pyspec.models.model import ModelSpec
from pyspec.models.own_vocabulary import BestDrafts
from pyspec.models.part import LoadTypes, Request
from pyspec.models.rope import trained_length
from pyspec.models.ropes import flags_of
from pyspec.models.target import Out, Target
from pyspec.models.wants import EMBEDDING, HEAD, TOKEN_INPUTS
from pyspec.models.weights import Weights
from pyspec.slots.batch import Batch
from pyspec.slots.parts import Recurrent
from pyspec.slots.table import SlotTable

log = logging.getLogger(__name__)

KIND = "draft"
N_DRAFT = 4  # tokens a round, unless a number is asked for
PAYS = 10  # times the bytes of a token from which on pairs have paid (docs/drafters.md)
EXPERTS = "_exps."


@dataclass(frozen=True, kw_only=True)
class ModelPlan(DraftPlan):
    """tokens: reads the partners of the target's tokens; PairError where too few have one."""

    tokens: Callable[[], TokenMap]


def recognises(file: GGUFFile) -> bool:
    return False  # every model could; it is one that was given for a drafter (`pyspec.draft.given`)


def plan(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    if file is None:
        raise ConfigError(f"--spec-type {KIND} needs a draft model (-md)")
    c = read_config(file)
    wants = c.tensors(file)
    check_tensors(file, wants)
    check_read(file, wants, c.n_layer)
    _check_memory(c)
    n_draft, n_waiting = settings.n_draft_max or N_DRAFT, most_waiting(settings.np)
    tokens = partial(read_map, target.file, target.config.n_vocab, file, c.n_vocab)
    flags = flags_of(settings)
    n_ctx = trained_length(file, c.n_ctx_train, flags)
    is_shorter = n_ctx < trained_length(target.file, target.config.n_ctx_train, flags)
    return ModelPlan(
        kind=KIND,
        n_draft=n_draft,
        n_ctx=n_ctx,
        draws=settings.draft_sampling,
        file=file,
        layers=tuple(c.parts()),
        attention=c.attention,
        # It is whole on the first of several ranks
        wants={name: replace(want, cut=None) for name, want in wants.items()},
        requests=partial(_requests, c, file),
        n_waiting=n_waiting,
        n_late=2 * (n_draft + 1),  # a verify's rows, and as many chained ones behind them
        graph_bytes=graph_bytes(settings.np, max(n_draft + 1, n_waiting), c, settings.draft_p_min)
        + draw_bytes(settings, n_draft, target.config.n_vocab),
        no_copy=OWN_HEAD,
        maps_tokens=True,
        placeholder=placeholder(target.file),
        check=partial(_expected, file, target.file, tokens),
        tokens=tokens,
        remark=f", by the model {file.path.name}"
        + (f", in the first {n_ctx} tokens of a context (its trained length)" if is_shorter else ""),
    )


def _expected(file: GGUFFile, target: GGUFFile, tokens: Callable[[], TokenMap]) -> str:
    """What may be expected of the pair: its common tokens, and its sizes. PairError where it can not draft."""
    found, larger = tokens().remark, row_bytes(target) / max(row_bytes(file), 1)
    if larger < PAYS:
        log.warning(
            "the target reads %.1f times the bytes of its draft model for a token: below %d such a pair seldom pays; --spec-type suffix needs no model",
            larger,
            PAYS,
        )
    return f"{found}; the target reads {larger:.1f} times its bytes for a token"


def row_bytes(file: GGUFFile) -> int:
    """Bytes of a model's file that a forward of one token reads: all matrices, of its experts those that a token uses."""
    h = file.hparams
    n = h.integer("expert_count", 0)
    used = max(h.one_or_more("expert_used_count")) / n if n and "expert_used_count" in h else 1
    head = HEAD if HEAD in file.tensors else EMBEDDING
    rows = {EMBEDDING, TOKEN_INPUTS} - {head}  # a token reads one of each
    kept = (t for name, t in file.tensors.items() if name not in rows)
    return int(sum(t.n_bytes * (used if EXPERTS in t.name else 1) for t in kept))


def _check_memory(c: ModelSpec) -> None:
    """Refuse a model whose layers keep the last rows of a slot only: a chain would overwrite those of the text."""
    if not all(
        part.paged or isinstance(part, Recurrent) for layer in c.parts() for part in layer.values()
    ):
        raise PairError(
            f"{c.arch} keeps rows that refused drafts would overwrite: it can not be the draft model"
        )


def _requests(c: ModelSpec, file: GGUFFile, on: LoadTypes) -> Iterator[Request]:
    """The ops that the model's layers ask for, and its embedding's."""
    yield embed, EmbedSpec(on.device, file.tensors[EMBEDDING].type, c.n_embd)
    yield from of_model(c, file, on)


class DraftModel:
    """A model as a chain's block. It takes no hidden states. Implements `MtpNet`.

    n_common  columns of its logits that it may propose; the rest stand for no token of the target
    to_own    [token of the target] int64: the model's token for each; None: they are the same
    first     as of TokenMap
    """

    def __init__(
        self,
        model: Decoder,
        best: BestDrafts,
        n_common: int,
        to_own: Tensor | None = None,
        first: int | None = None,
    ) -> None:
        self.model, self.memory, self.n_hidden, self.first_key = model, model.memory, 0, 0
        self.best, self.n_common, self.to_own, self.first = best, n_common, to_own, first

    def forward(self, batch: Batch, hidden: Tensor) -> Tensor:
        """The model's own hidden states of every row, [row, n] f32."""
        if self.to_own is not None:
            tokens = self.to_own[batch.tokens]
            if self.first is not None:
                tokens = tokens.masked_fill(batch.positions == 0, self.first)
            batch = replace(batch, tokens=tokens)
        return self.model.states(batch)

    def propose(self, hidden: Tensor, out: Tensor) -> Tensor:
        """The target's tokens for the best logits, and these."""
        logits = self.model.of_states(hidden)[:, : self.n_common]
        self.best(logits, out)
        return logits

    def states_of(self, out: Out) -> Tensor:
        """Nothing of each row: the model reads tokens."""
        return out.hidden.new_empty(out.hidden.shape[0], 0)


def load(plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> Chain:
    assert isinstance(plan, ModelPlan) and plan.file is not None
    c, device = read_config(plan.file), target.device
    weights = Weights(plan.file, device, rope=flags_of(options.settings), **options.of_weights)
    model = Decoder(c, weights, own_memory(plan, table, options, device))
    block = bound(model, plan.tokens(), target.n_vocab)
    return Chain(block, plan, table, device, options.settings.draft_p_min, target.n_vocab)


def bound(model: Decoder, tokens: TokenMap, n_target: int) -> DraftModel:
    """The model as a block that reads and proposes tokens of a target with `n_target` of them."""
    ids = [
        None if of is None else torch.tensor(of, device=model.device)
        for of in (tokens.to_own, tokens.to_target)
    ]
    to_own, to_target = ids
    if to_target is not None:
        return DraftModel(
            model, BestDrafts(model.device, to_target), model.n_vocab, to_own, tokens.first
        )
    # Rows of its embedding in the order of the target's ids: passes stay recorded
    if to_own is not None:
        model.embedding.raw = model.embedding.raw[to_own]
    return DraftModel(model, BestDrafts(model.device), min(model.n_vocab, n_target))
