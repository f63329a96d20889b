"""Grouped-query attention over the slot's pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyspec.cuda.ops.attend.spec import AttendSpec
from pyspec.cuda.ops.hadamard.spec import HadamardSpec
from pyspec.cuda.ops.rope_kv.spec import RopeKvSpec
from pyspec.forward.call import Value, Weight
from pyspec.forward.trace import Forward
from pyspec.models.cuts import Cut, Divided, Keys, Readers
from pyspec.models.part import AttentionShape, Place, Plain
from pyspec.models.rope import RopeSpec
from pyspec.models.wants import Want
from pyspec.slots.kv_types import KvFormat
from pyspec.slots.parts import KV, LayerParts, Paged

SINKS = "attn_sinks.weight"  # one logit a head
GATE = "attn_gate.weight"


@dataclass(frozen=True, slots=True)
class Attention(Plain):
    """Attention as data. Optional tensors (fused q, k, v, biases, sinks) are found in the file.

    window   a row sees itself and the window - 1 rows before it; 0: all rows before it; negative: those of its chunk of -window positions
    qk_norm  heads of q and k are normed before they are turned
    norm_behind  heads of q and k are normed behind the rope: with weights where the file has them
    row_norm  instead all heads of q are normed at once, and all of k
    own_norms  instead each head is normed with weights of its own
    biased   q, k and v have biases
    sinks    each head has a sink
    cap      scores are cap * tanh(score / cap); 0: as they are
    norms_v  values are normed, without weights
    may_share_keys  where the file has no matrix of values, they are the products of keys
    gate     the result is multiplied with act(a product of `attn_gate`): the act, of `cpu.tensors.GATE_ACTS`, and the gates of a head, which
             are one or one for each dimension; None: it has no such gates
    values   a `value_experts.ValueExperts` that makes values; None: a matrix does
    reads    the layer whose keys and values it reads, having none of its own; None: it writes them itself
    """

    shape: AttentionShape
    rope: RopeSpec
    window: int = 0
    qk_norm: bool = False
    norm_behind: bool = False
    biased: bool = False
    row_norm: bool = False
    own_norms: bool = False
    sinks: bool = False
    cap: float = 0.0
    norms_v: bool = False
    may_share_keys: bool = False
    gate: tuple[str, int] | None = None
    values: Any = None
    reads: int | None = None

    @property
    def attends(self) -> AttentionShape:
        return self.shape

    def tensors(self, at: Place) -> dict[str, Want]:
        s, n, (q, kv) = self.shape, at.n_embd, self.sizes
        of_q, of_kv = self._units()
        heads = self._readers()
        wants = {at.name("attn_output.weight"): Want((n, s.n_head * s.head_dim), cut=Cut(1, (heads,)))}
        if at.has("attn_qkv.weight"):
            wants[at.name("attn_qkv.weight")] = Want((q + 2 * kv, n), cut=Cut(0, (of_q, of_kv, of_kv)))
        else:
            wants |= self.matrices(at)
        if self.gate is not None:
            n_gate = self.gate[1]
            wants[at.name(GATE)] = Want((s.n_head * n_gate, n), cut=Cut(0, (self._readers(n_gate),)))
        if self.values is not None:
            wants |= self.values.tensors(at, s.n_kv_head * s.head_dim, of_kv)
        return wants | self._extras(at) | self.rope.tensors()

    def matrices(self, at: Place) -> dict[str, Want]:
        """Queries, keys and values in a matrix each."""
        (q, kv), (of_q, of_kv) = self.sizes, self._units()
        parts = {"q": Want((q, at.n_embd), cut=Cut(0, (of_q,)))}
        parts |= dict.fromkeys("kv", Want((kv, at.n_embd), cut=Cut(0, (of_kv,))))
        return {at.name(f"attn_{x}.weight"): parts[x] for x in self.products(at.has)}

    def _extras(self, at: Place) -> dict[str, Want]:
        """Norms of heads and biases, of all that they go with or of none; sinks."""
        s, (q, kv), (of_q, of_kv) = self.shape, self.sizes, self._units()
        of_heads = [f"attn_{x}_norm.weight" for x in "qk"]
        biases: dict[str, tuple[int, Divided]] = {
            "attn_q.bias": (q, of_q),
            "attn_k.bias": (kv, of_kv),
            "attn_v.bias": (kv, of_kv),
        }
        is_fused = at.has("attn_qkv.bias")
        if self.reads is not None:
            return {at.name(of_heads[0]): Want((s.head_dim,), optional=not self.qk_norm)}
        has_norms = self.qk_norm or any(map(at.has, of_heads))
        has_biases = (self.biased and not is_fused) or any(map(at.has, biases))
        of_norms = [Want((s.head_dim,), optional=not has_norms)] * 2
        if self.norms_apart:
            of_norms = [Want((q,), cut=Cut(0, (of_q,))), Want((kv,), cut=Cut(0, (of_kv,)))]
        return {
            **{at.name(name): want for name, want in zip(of_heads, of_norms, strict=True)},
            **{
                at.name(name): Want((n,), not has_biases, cut=Cut(0, (of,)))
                for name, (n, of) in biases.items()
            },
            at.name("attn_qkv.bias"): Want(
                (q + 2 * kv,), optional=True, cut=Cut(0, (of_q, of_kv, of_kv))
            ),
            at.name("attn_output.bias"): Want((at.n_embd,), optional=True),
            at.name(SINKS): Want((s.n_head,), not self.sinks, cut=Cut(0, (self._readers(),))),
        }

    @property
    def norms_apart(self) -> bool:
        """Norms of q and k are a call of their own, before the rope."""
        return self.row_norm or self.own_norms

    def _readers(self, size: int = 1) -> Readers:
        """Heads of queries, `size` rows or columns each."""
        return Readers(self.shape.groups, "heads", size=size)

    def _units(self) -> tuple[Readers, Keys]:
        """Rows of queries and of keys (or values) by head. Ranks that share a key head have a copy each, but for norms over all heads of a
        row: each rank's squares count once."""
        s = self.shape
        keys = Keys(s.groups, "key heads", size=s.head_dim, whole=self.row_norm)
        return self._readers(s.head_dim * (2 if s.gated else 1)), keys

    def products(self, has: Callable[[str], bool]) -> str:
        """The parts whose products of a row stand side by side: queries, keys, values. has: whether the file has a tensor of that name."""
        if self.reads is not None:
            return "q"
        return "qk" if self.values is not None or self.keys_are_values(has) else "qkv"

    def keys_are_values(self, has: Callable[[str], bool]) -> bool:
        """As `RopeKvSpec`."""
        return self.may_share_keys and not has("attn_v.weight")

    def memory(self) -> LayerParts:
        if self.reads is not None:
            return {}
        return {KV: Paged(self.shape.n_kv_head, self.shape.head_dim, window=abs(self.window))}

    def share(self, n: int) -> Attention:
        return replace(self, shape=self.shape.share(n))

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of the matrices of queries, gates among them, and of keys or values."""
        q, kv = self.row_widths
        return q * (2 if self.shape.gated else 1), kv

    @property
    def row_widths(self) -> tuple[int, int]:
        """Values of q and of k in a row."""
        s = self.shape
        return s.n_head * s.head_dim, s.n_kv_head * s.head_dim

    def attend_spec(self, device: torch.device, kv: KvFormat, *, has_sinks: bool) -> AttendSpec:
        s = self.shape
        scale = s.head_dim**-0.5 if s.scale is None else s.scale
        return AttendSpec(device, s.n_head, s.n_kv_head, s.head_dim, scale, kv, has_sinks, cap=self.cap)

    def rope_spec(
        self, device: torch.device, eps: float, kv: KvFormat, has: Callable[[str], bool]
    ) -> RopeKvSpec:
        """has: as `products`."""
        s, r, reads = self.shape, self.rope, self.reads is not None
        return RopeKvSpec(
            device,
            s.n_head,
            0 if reads else s.n_kv_head,
            s.head_dim,
            r.n_rot,
            r.neox,
            s.gated,
            has(f"attn_{'q' if reads else 'k'}_norm.weight") and not self.norms_apart,
            eps,
            kv,
            self.norms_v,
            not reads and self.keys_are_values(has),
            self.norm_behind,
        )

    def forward(self, f: Forward, x: Value, stream: Value | None) -> Value:
        """Writes the rows' K and V, then attends."""
        n = f.normed(x)
        y = f.biased(self.projected(f, n), _bias(f), few=True)
        if self.norms_apart:
            y = self._normed_apart(f, y)
        gate = self.gate and f.product(n, GATE, n_out=self.shape.n_head * self.gate[1])
        return self.attended(f, y, stream, x.width, gate)

    def projected(self, f: Forward, n: Value) -> Value:
        """q, k and v of normed rows, side by side."""
        parts, (n_q, n_k) = self.products(f.at.has), self.sizes
        names = [f"attn_{x}.weight" for x in parts]
        if f.at.has("attn_qkv.weight"):
            names = ["attn_qkv.weight"]
        y = f.product(n, *names, n_out=n_q + (len(parts) - 1) * n_k)
        return y if self.values is None else f.side_by_side(y, self.values.forward(f, n, n_k))

    def _normed_apart(self, f: Forward, y: Value) -> Value:
        names, widths = [f"attn_{x}_norm.weight" for x in "qk"], self.row_widths
        if self.own_norms:
            return f.slice_norm(y, *names, n_slice=y.width // self.shape.head_dim)
        if f.at.n_rank > 1:
            both = Weight("rank_norms", tuple(names), (("widths", widths), ("eps", f.eps)))
            return f.op("rank_norms", both, y, shape=y.shape)
        q, k, v = f.split(y, (*widths, widths[1]))
        q, k = (f.norm_apart(x, f.vector(name)) for x, name in zip((q, k), names, strict=True))
        return f.side_by_side(q, k, v)

    def attended(
        self,
        f: Forward,
        y: Value,
        stream: Value | None,
        n_out: int,
        gate: Value | None = None,
        seen: Value | None = None,
    ) -> Value:
        """Of products q, k, v of rows, side by side. gate: of the result; seen: the batch in place of its own, as attention reads it"""
        s, at, is_near = self.shape, f.at, self.window != 0
        norms = [None if self.norms_apart else f.optional(f"attn_{x}_norm.weight") for x in "qk"]
        pool = f.pool(self.reads)
        given = *norms, f.angles(self.rope, is_near=is_near), pool, f.kv_rows(pool)
        heads = s.n_head, s.head_dim
        q = f.op("rope_kv", self.rope_spec(f.device, f.eps, f.kv, at.has), y, *given, shape=heads)
        if self.rope.queries is not None:
            q = f.op("times_rows", None, q, f.queries(self.rope, is_near=is_near), shape=heads)
        sinks = f.optional(SINKS)
        spec = self.attend_spec(f.device, f.kv, has_sinks=sinks is not None)
        rows = f.placed(pool, is_near=is_near) if seen is None else seen
        o = f.op("attend", spec, q, pool, rows, self.window, sinks, shape=heads)
        if turned := f.kv.turned_v(s.head_dim):
            o = f.op("hadamard", HadamardSpec(f.device, s.head_dim, turned), o, shape=heads)
        o = f.flat(o)
        if s.gated:
            both = f"[:, :{2 * s.n_head * s.head_dim}].view(-1, {s.n_head}, {2 * s.head_dim})"
            o = f.head_gate(o, f.view(y, f"{both}[..., {s.head_dim}:]", heads))
        if gate is not None and self.gate == ("sigmoid", s.head_dim):
            o = f.head_gate(o, f.view(gate, f".view(-1, {s.n_head}, {s.head_dim})", heads))
        elif gate is not None and self.gate is not None:
            o = f.gate_times(gate, o, self.gate[0], o.width)
        o = f.summed(o, "attn_output.weight", n_out, stream)
        return f.biased(o, f.optional("attn_output.bias"))

    def write(self, f: Forward, c: Value, rows: Value) -> Value:
        """Keys and values alone, of normed c [row, n_embd], to `rows` [row] of the pool."""
        spec = replace(self.rope_spec(f.device, f.eps, f.kv, f.at.has), n_q=0, gated=False)
        n_key = 2 * self.shape.n_kv_head * self.shape.head_dim
        kv = f.product(c, "attn_k.weight", "attn_v.weight", n_out=n_key)
        given = None, f.optional("attn_k_norm.weight"), f.angles(self.rope, is_near=self.window != 0)
        return f.op("rope_kv", spec, kv, *given, f.pool(), rows, shape=())


def _bias(f: Forward) -> Weight | None:
    """Biases of q, k, v side by side, if the file has them."""
    if f.at.has("attn_qkv.bias"):
        return f.vector("attn_qkv.bias")
    if not f.at.has("attn_q.bias"):
        return None
    return f.read(in_a_row, *(f"attn_{p}.bias" for p in "qkv"))


def in_a_row(w: Any, *names: str) -> Tensor:
    """Vectors one behind the other."""
    return torch.cat([w.vector(name) for name in names])
