"""Grouped-query attention over the slot's pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyspec.cpu.tensors import add, side_by_side, times_rows
from pyspec.cuda import fuse
from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.angles.op import angles
from pyspec.cuda.ops.angles.ref import AnglesSpec
from pyspec.cuda.ops.attend.op import attend
from pyspec.cuda.ops.attend.prompt import attend_blocks, attend_prompt, takes_prompts, with_prompts
from pyspec.cuda.ops.attend.ref import Attend, AttendSpec
from pyspec.cuda.ops.hadamard.op import hadamard
from pyspec.cuda.ops.hadamard.ref import HadamardSpec
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.cuda.ops.rope_kv.op import rope_kv
from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec
from pyspec.cuda.ops.rows.op import rows
from pyspec.cuda.ops.rows.ref import HeadGate, PrepKind, RowsSpec
from pyspec.models.cuts import Cut, Divided, Keys, Readers
from pyspec.models.matrices import Matrix, sum_of
from pyspec.models.part import AttentionShape, Binding, LoadTypes, Pass, Place, Request
from pyspec.models.rope import Angles, RopeSpec
from pyspec.models.wants import Want
from pyspec.models.weights import Weights
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.memory import KV
from pyspec.slots.parts import LayerParts, Paged

SINKS = "attn_sinks.weight"  # one logit a head
FEW = 32  # rows whose biases are ready


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention as data. Optional tensors (fused q, k, v, biases, sinks) are found in the file.

    window   a row sees itself and the window - 1 rows before it; 0: all rows before it
    qk_norm  heads of q and k are normed before they are turned
    row_norm  instead all heads of q are normed at once, and all of k
    biased   q, k and v have biases
    sinks    each head has a sink
    norms_v  values are normed, without weights
    may_share_keys  where the file has no matrix of values, they are the products of keys
    reads    the layer whose keys and values it reads, having none of its own; None: it writes them itself
    """

    shape: AttentionShape
    rope: RopeSpec
    window: int = 0
    qk_norm: bool = False
    biased: bool = False
    row_norm: bool = False
    sinks: bool = False
    norms_v: bool = False
    may_share_keys: bool = False
    reads: int | None = None
    scratch = None

    @property
    def captures_prompts(self) -> bool:
        return self.window == 0  # graphs of prompts attend by the library, which has no windows

    @property
    def attends(self) -> AttentionShape:
        return self.shape

    def tensors(self, at: Place) -> dict[str, Want]:
        s, n = self.shape, at.n_embd
        q, kv = s.n_head * s.head_dim * (2 if s.gated else 1), s.n_kv_head * s.head_dim
        of_q, of_kv = self._units()
        heads = self._readers()
        wants = {at.name("attn_output.weight"): Want((n, s.n_head * s.head_dim), cut=Cut(1, (heads,)))}
        if at.has("attn_qkv.weight"):
            wants[at.name("attn_qkv.weight")] = Want((q + 2 * kv, n), cut=Cut(0, (of_q, of_kv, of_kv)))
        else:
            wants |= self.matrices(at)
        return wants | self._extras(at) | self.rope.tensors()

    def matrices(self, at: Place) -> dict[str, Want]:
        """Queries, keys and values in a matrix each."""
        s = self.shape
        q, kv = s.n_head * s.head_dim * (2 if s.gated else 1), s.n_kv_head * s.head_dim
        of_q, of_kv = self._units()
        parts = {"q": Want((q, at.n_embd), cut=Cut(0, (of_q,)))}
        parts |= dict.fromkeys("kv", Want((kv, at.n_embd), cut=Cut(0, (of_kv,))))
        return {at.name(f"attn_{x}.weight"): parts[x] for x in self.products(at.has)}

    def _extras(self, at: Place) -> dict[str, Want]:
        """Norms of heads and biases, of all that they go with or of none; sinks."""
        s = self.shape
        q, kv = s.n_head * s.head_dim * (2 if s.gated else 1), s.n_kv_head * s.head_dim
        of_q, of_kv = self._units()
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
        if self.row_norm:
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
        return "q" if self.reads is not None else "qk" if self.keys_are_values(has) else "qkv"

    def keys_are_values(self, has: Callable[[str], bool]) -> bool:
        """As `RopeKvSpec`."""
        return self.may_share_keys and not has("attn_v.weight")

    def memory(self) -> LayerParts:
        if self.reads is not None:
            return {}
        return {KV: Paged(self.shape.n_kv_head, self.shape.head_dim, window=self.window)}

    def share(self, n: int) -> Attention:
        return replace(self, shape=self.shape.share(n))

    def requests(self, at: Place, on: LoadTypes) -> Iterator[Request]:
        s, has_sinks = self.shape, at.has(SINKS)
        yield angles, AnglesSpec(on.device)
        spec = self.attend_spec(on.device, on.kv, has_sinks=has_sinks)
        yield attend, spec
        if n := on.kv.turned_v(s.head_dim):
            yield hadamard, HadamardSpec(on.device, s.head_dim, n)
        if on.is_cuda and not has_sinks:
            yield attend_prompt, spec
            yield attend_blocks, spec
        turned = self.rope_spec(on.device, at.eps, on.kv, at.has)
        if self.row_norm:
            for n in self.row_widths:
                yield norms, NormsSpec(on.device, n, at.eps)
        yield rope_kv, turned
        if self.reads is None:
            yield rope_kv, _keys_alone(turned)
        if on.streams and s.gated:
            yield rows, RowsSpec(on.device, s.n_head * s.head_dim, PrepKind.GATE, s.head_dim)
        if on.streams:
            yield rows, RowsSpec(on.device, at.n_embd, PrepKind.NORM)

    @property
    def row_widths(self) -> tuple[int, int]:
        """Values of q and of k in a row."""
        s = self.shape
        return s.n_head * s.head_dim, s.n_kv_head * s.head_dim

    def attend_spec(self, device: torch.device, kv: KvFormat, *, has_sinks: bool) -> AttendSpec:
        s = self.shape
        scale = s.head_dim**-0.5 if s.scale is None else s.scale
        return AttendSpec(device, s.n_head, s.n_kv_head, s.head_dim, scale, kv, has_sinks)

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
            has(f"attn_{'q' if reads else 'k'}_norm.weight") and not self.row_norm,
            eps,
            kv,
            self.norms_v,
            not reads and self.keys_are_values(has),
        )

    def bind(self, at: Binding) -> BoundAttention:
        return BoundAttention(self, at)


def _keys_alone(spec: RopeKvSpec) -> RopeKvSpec:
    return replace(spec, n_q=0, gated=False)


class BoundAttention:
    """Attention over pages whose entries are of the load's types."""

    fold = None

    def __init__(self, spec: Attention, at: Binding) -> None:
        w = at.weights
        self.spec = spec
        self.shape = spec.shape
        self.layer = at.layer if spec.reads is None else spec.reads
        self.norm, self.rope = at.optional_norm(), at.ropes.place(spec.rope, is_near=spec.window > 0)
        names = [at.name("attn_qkv.weight")]
        if not w.has(names[0]):
            names = [at.name(f"attn_{x}.weight") for x in spec.products(at.has)]
        self.qkv: Matrix = w.matrix(*names)
        self.bias = _bias(w, at.prefix)
        self.few = _few(self.bias)
        self.out: Matrix = w.summed(at.name("attn_output.weight"))
        self.out_bias = w.optional(at.name("attn_output.bias"))
        self.reads = None if self.norm is None else (self.qkv, self.norm)
        self.gives = None if self.out_bias is not None else sum_of(self.out)
        self.q_norm, self.k_norm = (w.optional(at.name(f"attn_{p}_norm.weight")) for p in "qk")
        self.row_norms: RowNorms | None = None
        if spec.row_norm:
            assert self.q_norm is not None and self.k_norm is not None, "wanted of the file"
            self.row_norms = RowNorms(spec, at, (self.q_norm, self.k_norm))
            self.q_norm = self.k_norm = None
        self.sinks = w.optional(at.name(SINKS))
        attends = spec.attend_spec(w.device, at.kv, has_sinks=self.sinks is not None)
        own = attend.bind(attends)
        self.attend = turned_back(with_prompts(own, attends), attends)
        self.read_next = fuse.read_next(own, self.out)
        roped = spec.rope_spec(w.device, at.eps, at.kv, at.has)
        self.rope_kv = self.store = rope_kv.bind(roped)
        if spec.reads is None:
            self.store = rope_kv.bind(_keys_alone(roped))
        self.capturable = attend.chosen(attends).capturable and rope_kv.chosen(roped).capturable
        if self.row_norms is not None:
            self.capturable = self.capturable and self.row_norms.capturable
        self.captures_prompts = self.capturable and spec.captures_prompts and takes_prompts(attends)

    def write(self, kv: Tensor, angles: Angles, pool: KVPool, rows: Tensor) -> None:
        """Keys and values alone: kv [row, 2 * n_kv * dim] raw products go to `rows` [row] of the pool."""
        self.store(kv, None, self.k_norm, angles, pool, rows)

    def __call__(self, x: Tensor, residual: Tensor | None, run: Pass) -> Tensor:
        """Writes the rows' K and V, then attends."""
        s, n, pool = self.shape, x.shape[0], run.memory.kv[self.layer]
        batch = run.placed(pool)
        y = self._projected(x)
        if self.row_norms is not None:
            y = self.row_norms(y)
        q = self.rope_kv(y, self.q_norm, self.k_norm, run.angles[self.rope], pool, batch.kv_rows)
        factors = None if self.spec.rope.queries is None else run.queries[self.rope]
        if factors is not None:
            q = times_rows(q, factors)
        o = self.attend(q, pool, batch, self.spec.window, self.sinks, **self.read_next).view(n, -1)
        gate = None
        if s.gated:
            gate = HeadGate(y[:, : 2 * s.n_head * s.head_dim].view(n, s.n_head, -1)[..., s.head_dim :])
        y = self.out(o, gate, residual=residual)
        return y if self.out_bias is None else add(y, self.out_bias)

    def _projected(self, x: Tensor) -> Tensor:
        """q, k and v with their biases."""
        if self.few is not None and x.shape[0] <= len(self.few):
            return self.qkv(x, self.norm, residual=self.few[: x.shape[0]])
        y = self.qkv(x, self.norm)
        return y if self.bias is None else add(y, self.bias)


def turned_back(run: Attend, spec: AttendSpec) -> Attend:
    """`run`, and its sums of values turned back, where the pool's values are turned (`KvFormat.turned_v`)."""
    if not (n := spec.kv.turned_v(spec.head_dim)):
        return run
    back = hadamard.bind(HadamardSpec(spec.device, spec.head_dim, n))

    def attend(q: Tensor, pool: KVPool, batch: Batch, *args: Any, **more: Any) -> Tensor:
        return back(run(q, pool, batch, *args, **more))

    return attend


class RowNorms:
    """Norms of all heads of q at once, and of all of k. Several ranks sum the squares of their heads."""

    def __init__(self, spec: Attention, at: Binding, weights: tuple[Tensor, Tensor]) -> None:
        self.widths, self.weights, self.eps, self.ranks = (
            spec.row_widths,
            weights,
            at.eps,
            at.weights.ranks,
        )
        device = at.weights.device
        names = [at.name(f"attn_{x}_norm.weight") for x in "qk"]
        self.whole = [at.weights.file.tensors[name].shape[-1] for name in names]  # of all ranks
        self.capturable = self.ranks is None or device.type != "cpu"  # sums of ranks are torch's
        if self.ranks is None:
            self.norms = [norms.bind(NormsSpec(device, n, at.eps)) for n in self.widths]

    def __call__(self, y: Tensor) -> Tensor:
        """y [row, q | k | v] -> the same, normed."""
        n_q, n_k = self.widths
        q, k, v = y[:, :n_q], y[:, n_q : n_q + n_k], y[:, n_q + n_k :]
        if self.ranks is None:
            parts = [run(x, w) for run, x, w in zip(self.norms, (q, k), self.weights, strict=True)]
            return side_by_side([*parts, v])
        squares = torch.stack([q.square().sum(-1), k.square().sum(-1)], -1)
        squares = self.ranks.sum(squares)
        parts = []
        for i, (x, w) in enumerate(zip((q, k), self.weights, strict=True)):
            parts.append(x * (squares[:, i : i + 1] / self.whole[i] + self.eps).rsqrt() * w)
        return torch.cat([*parts, v], -1)


def _few(bias: Tensor | None) -> Tensor | None:
    """[FEW, n] the biases of a few rows on a GPU: a product adds them as its residual, which saves a launch of its own."""
    if bias is None or bias.device.type != "cuda" or current().is_exact:
        return None
    return bias.repeat(FEW, 1)


def _bias(w: Weights, prefix: str) -> Tensor | None:
    """Biases of q, k, v side by side, if the file has them."""
    if w.has(f"{prefix}.attn_qkv.bias"):
        return w.vector(f"{prefix}.attn_qkv.bias")
    if not w.has(f"{prefix}.attn_q.bias"):
        return None
    return torch.cat([w.vector(f"{prefix}.attn_{p}.bias") for p in "qkv"])
