"""A feed-forward of experts between several streams: a table of tokens or the router names the experts, and activations are cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.ops.moe import cpu as moe_cpu
from pyspec.cuda.ops.moe import op as moe_op
from pyspec.cuda.ops.moe.op import moe
from pyspec.cuda.ops.moe.ref import Added, MoeSpec
from pyspec.cuda.ops.moe_route.op import moe_route
from pyspec.cuda.ops.streams.ref import Streams
from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.binding import Binding, Pass
from pyspec.models.blocks.moe import Experts
from pyspec.models.part import ForwardSize, LoadTypes, OneCall, Place, PlannedSite, Request
from pyspec.models.stacks import stacks_of
from pyspec.models.wants import Want

TABLE = "ffn_gate_tid2eid.weight"  # the experts of each token

Limits = tuple[float, float]
"""Where activations are cut, the experts' and the shared one's; 0: nowhere."""


@dataclass(frozen=True, slots=True)
class StreamExperts(OneCall, Experts):
    """The feed-forward as data.

    limits   None: those of the file that it is bound from, whose last block it is then
    n_named  tokens whose experts a table names; 0: the router chooses
    """

    limits: Limits | None = None
    n_named: int = 0

    def tensors(self, at: Place) -> dict[str, Want]:
        named = {at.name(TABLE): Want((self.n_named, self.n_used), whole=True)} if self.n_named else {}
        return Experts.tensors(self, at) | named

    def scratch(self, size: ForwardSize) -> int:
        """Buffers of rows for experts."""
        if size.device.type != "cuda":
            return moe_cpu.buffer_bytes(size.n_row, self.n_used, size.n_embd, self.n_ff)
        return moe_op.buffer_bytes(self.n_used, self.n_expert, size.n_embd, self.n_ff)

    def kernels(self, at: PlannedSite, on: LoadTypes) -> Iterator[Request]:
        """None: the ops are compiled and checked when they are bound."""
        return iter(())

    def bind(self, at: Binding) -> BoundStreamExperts:
        return BoundStreamExperts(self, at)


class BoundStreamExperts:
    """experts(n) + shared(n) with n = norm(y). Implements `WorksForStreams`."""

    gives = None

    def __init__(self, spec: StreamExperts, at: Binding) -> None:
        w = at.weights
        limit, own = spec.limits or read_limits(w.file, at.layer + 1)[at.layer]
        self.ranks, self.norm = w.ranks, at.bound_norm()
        self.router = w.vector(at.name("ffn_gate_inp.weight"))
        self.named = _table(at, spec.n_expert) if spec.n_named else None
        self.bias = w.optional(at.name("exp_probs_b.bias")) if self.named is None else None
        route = spec.route_spec(w.device, at.n_embd, at.eps, has_bias=self.bias is not None)
        route = replace(route, given=self.named is not None)
        self.route, self.capturable = moe_route.bind(route), moe_route.chosen(route).capturable
        self.capturable = self._bind_experts(at, spec, limit) and self.capturable
        self.gate_up = self.down = None
        if spec.n_ff_shared:
            self.gate_up = w.gated(at.name("ffn_gate_shexp.weight"), at.name("ffn_up_shexp.weight"), own)
            self.down = w.matrix(at.name("ffn_down_shexp.weight"))
        self.hands = fuse.handing(self.gate_up, self.down, own * own)  # silu of a cut value is no larger

    def _bind_experts(self, at: Binding, s: StreamExperts, limit: float) -> bool:
        """True if a CUDA graph may hold them. The file's bytes go with the end of the call."""
        device, stacks = at.weights.device, stacks_of(at.weights, at.name("ffn"), act=s.act)
        n, up, down = at.n_embd, stacks.up.type, stacks.down.type
        run = MoeSpec(device, s.n_used, n, s.n_ff, s.act, up, down, n_expert=s.n_expert, limit=limit)
        run = replace(run, gate=stacks.other_gate)
        self.experts = moe.bind(run)(stacks)
        return moe.chosen(run).capturable

    def place(self, streams: Streams, n_row: int) -> fuse.RowBuffer | None:
        """Of the shared expert."""
        return fuse.place_for(streams, self.gate_up, n_row, self.norm)

    def between(
        self, y: Tensor, run: Pass, place: fuse.RowBuffer | None, streams: Streams | None
    ) -> Tensor | fuse.Shares:
        """Of one rank `streams` may sum the experts' outputs."""
        shared, named = None, None if self.named is None else run.rows[self.named]
        if self.gate_up is not None and self.down is not None:
            shared = fuse.one_after_other(self.gate_up, self.down, self.hands, y, self.norm, place)
        parts = fuse.at_once(self.route, self.experts, len(y), self.norm, self.norm)
        # several parts are no few rows, which alone are left for streams to sum: the last of them may be
        chosen = partial(self._chosen, streams if self.ranks is None and len(parts) == 1 else None)
        whole = fuse.by_parts(parts, chosen, y, named, shared)
        return whole if self.ranks is None else self.ranks.sum(whole)

    def __call__(self, x: Tensor, residual: Tensor | None, run: Pass) -> Tensor:
        y = self.between(x, run, None, None)
        assert isinstance(y, Tensor)  # no streams were given to sum the experts' outputs
        return y if residual is None else residual + y

    def _chosen(
        self, streams: Streams | None, y: Tensor, named: Tensor | None, shared: Tensor | None
    ) -> Tensor | fuse.Shares:
        """experts(norm(y)) + shared, for as many rows as experts take at once. named: their experts by the table."""
        ready, beside = fuse.before_choice(self.route, self.experts, y, self.norm, self.norm)
        routes = self.route(y, self.norm.weight, self.router, self.bias, named, **beside)
        return fuse.experts_into(self.experts, y, routes, self.norm, Added(shared), ready, streams)


def _table(at: Binding, n_expert: int) -> int:
    """The place of the block's table. ModelError if it names an expert that is not there."""
    table = at.weights.table(at.name(TABLE))
    if not bool(((table >= 0) & (table < n_expert)).all()):
        raise ModelError(f"{at.name(TABLE)} names an expert outside 0..{n_expert - 1}")
    return at.tables.place(table)


def read_limits(file: GGUFFile, n_block: int) -> list[Limits]:
    """The limits of each block."""
    own = _each_number(file, "swiglu_clamp_exp", [0.0] * n_block)
    shared = _each_number(file, "swiglu_clamp_shexp", own)
    return [(a if a > 1e-6 else 0.0, b if b > 1e-6 else 0.0) for a, b in zip(own, shared, strict=True)]


def _each_number(file: GGUFFile, name: str, default: list[float]) -> list[float]:
    """A number for each block, or one for all."""
    h, n = file.hparams, len(default)
    if name not in h:
        return default
    try:
        return [h.number(name)] * n
    except ModelError:
        return h.numbers(name, n)
