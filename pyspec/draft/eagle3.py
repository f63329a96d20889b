"""EAGLE-3 drafter: one layer over three taps of the target, chained (`chain.py`), with a vocabulary of its own.

The taps of a token become its state g. A row pairs a token with the g of the position before it, drafts by its own output, and chains
that. The row of a text's first token has no g and is seen by no other (`first_key`); rope turns every row one position farther than
the training did, which changes no score. Source: arXiv:2503.01840; llama.cpp `eagle3` (layout, tap numbers).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from pyspec.config import EngineSettings
from pyspec.cuda.ops.embed.op import embed
from pyspec.cuda.ops.embed.ref import EmbedSpec
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.draft.chain import Chain, graph_bytes, most_waiting
from pyspec.draft.drafter import OWN_HEAD, DraftOptions, DraftPlan, TargetFile, own_memory
from pyspec.draft.draws import draw_bytes
from pyspec.draft.token_map import placeholder
from pyspec.errors import ConfigError, PairError
from pyspec.forward.call import Value
from pyspec.forward.trace import Forward
from pyspec.gguf import GGUFFile
from pyspec.gguf.fields import SIZE
from pyspec.models.binding import Pass, bound_at
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.bound import BoundForward
from pyspec.models.checks import check_read, check_tensors
from pyspec.models.decoder import Decoder
from pyspec.models.kernels import kernels, program_of
from pyspec.models.matrices import Embedding
from pyspec.models.model import ModelSpec
from pyspec.models.own_vocabulary import D2T, BestDrafts, check_own, read_d2t
from pyspec.models.part import LoadTypes, Place, Request
from pyspec.models.read import read_attention, read_rope
from pyspec.models.ropes import Ropes, flags_of
from pyspec.models.target import Matrix, Out, Target
from pyspec.models.wants import EMBEDDING, HEAD, Want
from pyspec.models.weights import Weights
from pyspec.slots.batch import Batch
from pyspec.slots.memory import Memory
from pyspec.slots.table import SlotTable

N_DRAFT = 3  # tokens a round, unless a number is asked for
N_TAP = 3
PREFIX = "blk.0"
ALIAS = {"rope_freqs.weight": f"{PREFIX}.rope_freqs.weight"}


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """taps: 0-based target layers whose outputs are read. adds_normed: the layer's attention is added to the normed g; normed_taps: taps are
    normed before they become g."""

    n_embd: int
    eps: float
    taps: tuple[int, ...]
    attention: Attention
    mlp: Mlp
    adds_normed: bool
    normed_taps: bool

    def place(self, file: GGUFFile) -> Place:
        """Of its layer."""
        return Place(file, PREFIX, self.n_embd, self.eps)

    def forward(self, f: Forward, e: Value, hidden: Value) -> Value:
        """The layer, of a token's embedding and g of the position before it, both [row, n_embd]."""
        token, state = (f.vector(f"{x}.weight") for x in ("attn_norm", "attn_norm_2"))
        n, spec = e.width, NormsSpec(f.device, e.width, f.eps)
        both = f.op("norms.paired", spec, e, token, hidden, state, shape=(2 * n,))
        stream = f.norm_apart(hidden, state) if self.adds_normed else hidden
        x = self.attention.attended(f, self.attention.projected(f, both), stream, n)
        return self.mlp.forward(f.behind("ffn_norm"), x, x)


def recognises(file: GGUFFile) -> bool:
    return file.architecture == "eagle3"


def read_eagle(file: GGUFFile) -> EagleConfig:
    """The drafter's configuration. Its tap numbers mean the inputs of layers."""
    h, shape = file.hparams, read_attention(file)
    if (n := h.integer("block_count")) != 1:
        raise PairError(f"the EAGLE-3 drafter has {n} layers; one is supported")
    return EagleConfig(
        n_embd=h.integer("embedding_length"),
        eps=h.number("attention.layer_norm_rms_epsilon"),
        taps=tuple(t - 1 for t in h.integers("target_layers", N_TAP)),
        attention=Attention(shape, read_rope(file, shape, neox=False)),
        mlp=Mlp(h.integer("feed_forward_length")),
        adds_normed=h.flag("norm_before_residual", False),
        normed_taps=h.flag("norm_before_fc", False),
    )


def plan(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    if file is None:
        raise ConfigError("--spec-type eagle3 needs a draft file (-md)")
    if not recognises(file):
        raise PairError(
            f"an EAGLE-3 drafter is of architecture eagle3; this file is {file.architecture}"
        )
    c = read_eagle(file)
    _check_pair(c, file, target.config)
    wants = tensors(c, file, target.config.n_embd)
    check_tensors(file, wants, ALIAS)
    check_read(file, (*wants, D2T), 1, ALIAS)
    head = file.tensors.get(HEAD)
    n_draft, n_waiting = settings.n_draft_max or N_DRAFT, most_waiting(settings.np)
    return DraftPlan(
        kind="eagle3",
        n_draft=n_draft,
        taps=c.taps,
        observes="taps",
        draws=settings.draft_sampling,
        file=file,
        layers=(c.attention.memory(),),
        attention=(c.attention.shape,),
        wants=wants,
        requests=partial(_requests, c, file),
        n_waiting=n_waiting,
        graph_bytes=graph_bytes(
            settings.np,
            max(n_draft + 1, n_waiting),
            target.config,
            settings.draft_p_min,
            0 if head is None else head.shape[0],
        )
        + draw_bytes(settings, n_draft, target.config.n_vocab),
        no_copy="" if head is None else OWN_HEAD,
        # pictures' rows are as those of the target's embedding
        placeholder=placeholder(target.file) if EMBEDDING in file.tensors else None,
    )


def _check_pair(c: EagleConfig, file: GGUFFile, target: ModelSpec) -> None:
    """Refuse a drafter that was made for another target, with the numbers that differ."""
    n_target, n = file.hparams.integer("target_hidden_size", target.n_embd, legal=SIZE), target.n_layer
    if n_target != target.n_embd:
        raise PairError(
            f"the drafter reads layers of width {n_target}; the target's have {target.n_embd}"
        )
    if any(not 0 <= t < n - 1 for t in c.taps):
        raise PairError(
            f"the drafter taps the inputs of layers {[t + 1 for t in c.taps]}; inputs of layers 1..{n - 1} of the target can be read"
        )
    shares = [name for name in (EMBEDDING, HEAD) if name not in file.tensors]
    if shares and c.n_embd != target.n_embd:
        raise PairError(
            f"the drafter has width {c.n_embd}, the target {target.n_embd}: it can not share {shares[0]}"
        )
    check_own(file, target.n_vocab)


def tensors(c: EagleConfig, file: GGUFFile, n_target: int) -> dict[str, Want]:
    """The manifest. The attention's products read two rows side by side."""
    at, n, s = c.place(file), c.n_embd, c.attention.shape
    wants = {
        name: Want(want.shape, want.optional)
        for name, want in (c.attention.tensors(at) | c.mlp.tensors(at)).items()
    }
    rows = {"q": s.n_head * s.head_dim, "k": s.n_kv_head * s.head_dim, "v": s.n_kv_head * s.head_dim}
    wants |= {at.name(f"attn_{x}.weight"): Want((m, 2 * n)) for x, m in rows.items()}
    wants |= {at.name(f"{x}.weight"): Want((n,)) for x in ("attn_norm", "attn_norm_2", "ffn_norm")}
    wants |= {"fc.weight": Want((n, N_TAP * n_target)), "output_norm.weight": Want((n,))}
    if c.normed_taps:
        wants["enc.output_norm.weight"] = Want((N_TAP * n_target,))
    wants |= {
        name: Want((file.tensors[name].shape[0], n))
        for name in (EMBEDDING, HEAD)
        if name in file.tensors
    }
    return wants


def _requests(c: EagleConfig, file: GGUFFile, on: LoadTypes) -> Iterator[Request]:
    """The ops that the layer asks for; its products are those of its file."""
    if EMBEDDING in file.tensors:
        yield embed, EmbedSpec(on.device, file.tensors[EMBEDDING].type, c.n_embd)
    yield from kernels([program_of(c.forward, c.place(file), on, c.n_embd, c.n_embd)])
    yield norms, NormsSpec(on.device, c.n_embd, c.eps)
    if c.normed_taps:
        yield norms, NormsSpec(on.device, file.tensors["fc.weight"].shape[1], c.eps)


class EagleBlock:
    """The layer bound to its memory; `head` stands for the target's if it is given. Implements `MtpNet`."""

    first_key = 1

    def __init__(
        self, c: EagleConfig, w: Weights, memory: Memory, target: Target, head: Matrix | None
    ) -> None:
        self.c, self.memory, self.n_hidden = c, memory, c.n_embd
        self.ropes = Ropes(w)
        at = bound_at(w, PREFIX, 0, c.n_embd, c.eps, memory.kv_format, self.ropes)
        self.layer = BoundForward(c.forward, at, c.n_embd, c.n_embd)
        self.fc, self.norm = w.matrix("fc.weight"), w.vector("output_norm.weight")
        self.norms = norms.bind(NormsSpec(w.device, c.n_embd, c.eps))
        self.of_taps = w.vector("enc.output_norm.weight") if c.normed_taps else None
        if self.of_taps is not None:
            self.norms_taps = norms.bind(NormsSpec(w.device, len(self.of_taps), c.eps))
        self.embedding = w.embedding(EMBEDDING) if w.has(EMBEDDING) else _embedding_of(target)
        self.output = w.matrix(HEAD) if w.has(HEAD) else head or target.head
        self.best = BestDrafts(w.device, read_d2t(w, target.n_vocab))

    def forward(self, batch: Batch, hidden: Tensor) -> Tensor:
        """hidden [row, n_embd] f32: g of the position before each row. Returns what stands for that of each row's own."""
        e, angles = self.ropes.embedded(self.embedding, batch)
        return self.layer.run(e, hidden, Pass(angles, self.memory, batch))

    def propose(self, hidden: Tensor, out: Tensor) -> Tensor:
        """The target's tokens for the best logits, and these, of the drafter's own tokens."""
        logits = self.output(self.norms(hidden, self.norm))
        self.best(logits, out)
        return logits

    def states_of(self, out: Out) -> Tensor:
        """g of every row."""
        assert out.taps is not None
        return self.fc(out.taps if self.of_taps is None else self.norms_taps(out.taps, self.of_taps))


def _embedding_of(target: Target) -> Embedding:
    if not isinstance(target, Decoder):
        raise PairError("this target does not give the embedding that its drafter shares")
    return target.embedding


def load(plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> Chain:
    assert plan.file is not None
    rope = flags_of(options.settings)
    weights = Weights(plan.file, target.device, alias=ALIAS, rope=rope, **options.of_weights)
    memory = own_memory(plan, table, options, target.device)
    block = EagleBlock(read_eagle(plan.file), weights, memory, target, options.head)
    return Chain(block, plan, table, target.device, options.settings.draft_p_min, target.n_vocab)
