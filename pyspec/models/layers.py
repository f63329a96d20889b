"""The layers that architectures are put together from: norms, rope, attention, Gated DeltaNet, feed-forward.

Activations and the residual stream are f32; matrices decide their own input dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.ops.angles.op import angles
from pyspec.cuda.ops.angles.ref import AnglesSpec
from pyspec.cuda.ops.attend.op import attend
from pyspec.cuda.ops.attend.prompt import with_prompts
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.cuda.ops.gdn.op import gdn
from pyspec.cuda.ops.gdn.ref import GdnSpec
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.rope_kv.op import rope_kv
from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec
from pyspec.cuda.ops.rows.ref import RELU2, HeadGate, HeadNorm, Norm, head_power
from pyspec.models.rope_scaling import NOT_STRETCHED, RopeScaling
from pyspec.models.weights import Embedding, Matrix, Weights, sum_of
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool
from pyspec.slots.memory import Memory


class Rope:
    """Rotary embedding of the first `n_rot` dimensions.

    neox: pairs (d, d + n_rot/2); otherwise adjacent pairs (2d, 2d + 1), as llama's converter permutes them.
    scaling: how a file stretches it. `divisors` [n_rot/2] f32 are llama 3's rope_freqs.
    """

    def __init__(
        self,
        n_rot: int,
        base: float,
        neox: bool,
        device: torch.device,
        scaling: RopeScaling = NOT_STRETCHED,
        divisors: Tensor | None = None,
    ) -> None:
        self.n_rot, self.neox, self.factor, self.length = n_rot, neox, scaling.factor, scaling.length
        d = torch.arange(0, n_rot, 2, device=device, dtype=torch.float32)
        freq = base ** (-d / n_rot)
        self.freq = freq if divisors is None else freq / divisors
        if scaling.is_yarn:
            kept = scaling.kept(n_rot, base, device)
            self.freq, self.factor = self.freq * (kept + (1 - kept) / scaling.factor), 1.0
        self.launch = angles.bind(AnglesSpec(device))

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [row, 1, n_rot/2] f32 for positions [row]; computed once per forward."""
        return self._lengthened(self.launch(positions, self.freq, self.factor))

    def _lengthened(self, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if self.length != 1.0:
            for each in angles:
                each.mul_(self.length)
        return angles

    def embedded(self, embedding: Embedding, tokens: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What a forward begins with: the tokens' rows of the embedding, and the angles of their positions."""
        rows, angles = embedding.with_angles(tokens, positions, self.freq, self.factor)
        return rows, self._lengthened(angles)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    n_head: int
    n_kv_head: int
    head_dim: int
    gated: bool = False  # the q projection emits [query | gate] per head; the output is multiplied by sigmoid(gate)
    scale: float | None = None  # default 1/sqrt(head_dim)

    def share(self, n: int) -> AttentionShape:
        """Of each of `n` ranks; with fewer key heads than ranks several have the same one."""
        return replace(self, n_head=self.n_head // n, n_kv_head=max(1, self.n_kv_head // n))


SINKS = "attn_sinks.weight"  # one logit a head


class Attention:
    """Grouped-query attention over the slot's pages, whose entries are of type `kv` (slots.kv)."""

    def __init__(self, w: Weights, prefix: str, shape: AttentionShape, rope: Rope, eps: float, kv: torch.dtype) -> None:
        self.shape, self.rope, self.eps = shape, rope, eps
        self.norm = Norm(w.vector(f"{prefix}.attn_norm.weight"), eps)
        names = [f"{prefix}.attn_qkv.weight"]
        if not w.has(names[0]):
            names = [f"{prefix}.attn_{p}.weight" for p in "qkv"]
        self.qkv: Matrix = w.matrix(*names)
        self.bias = _bias(w, prefix)
        self.out: Matrix = w.summed(f"{prefix}.attn_output.weight")
        self.out_bias = w.optional(f"{prefix}.attn_output.bias")
        self.reads, self.gives = (self.qkv, self.norm), None if self.out_bias is not None else sum_of(self.out)
        self.q_norm = w.optional(f"{prefix}.attn_q_norm.weight")
        self.k_norm = w.optional(f"{prefix}.attn_k_norm.weight")
        self.sinks = w.optional(f"{prefix}.{SINKS}")
        scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
        heads, has_sinks = (shape.n_head, shape.n_kv_head, shape.head_dim), self.sinks is not None
        spec = AttendSpec(w.device, *heads, scale, kv, has_sinks)
        own = attend.bind(spec)
        self.attend, self.read_next = with_prompts(own, spec), fuse.read_next(own, self.out)
        roped = RopeKvSpec(w.device, *heads, rope.n_rot, rope.neox, shape.gated, self.k_norm is not None, eps)
        self.rope_kv, alone = rope_kv.bind(roped), replace(roped, n_q=0, gated=False)
        self.store = rope_kv.bind(alone)
        self.capturable = attend.chosen(spec).capturable and rope_kv.chosen(roped).capturable
        self.captures_prompts = self.capturable and self.attend is not own

    def write(self, kv: Tensor, angles: tuple[Tensor, Tensor], pool: KVPool, rows: Tensor) -> None:
        """Keys and values alone: kv [row, 2 * n_kv * dim] raw products go to `rows` [row] of the pool."""
        self.store(kv, None, self.k_norm, angles, pool, rows)

    def __call__(
        self, x: Tensor, angles: tuple[Tensor, Tensor], memory: Memory, layer: int, batch: Batch, window: int = 0
    ) -> Tensor:
        """The residual stream x [row, n_embd] -> x + attention(norm(x)). Writes the rows' K and V, then attends."""
        s, n, pool = self.shape, x.shape[0], memory.kv[layer]
        y = self.qkv(x, self.norm)
        if self.bias is not None:
            y = y + self.bias
        q = self.rope_kv(y, self.q_norm, self.k_norm, angles, pool, batch.kv_rows)
        o = self.attend(q, pool, batch, window, self.sinks, **self.read_next).view(n, -1)
        gate = None
        if s.gated:
            gate = HeadGate(y[:, : 2 * s.n_head * s.head_dim].view(n, s.n_head, -1)[..., s.head_dim :])
        y = self.out(o, gate, residual=x)
        return y if self.out_bias is None else y + self.out_bias


def _bias(w: Weights, prefix: str) -> Tensor | None:
    """Biases of q, k, v side by side, if the file has them."""
    if w.has(f"{prefix}.attn_qkv.bias"):
        return w.vector(f"{prefix}.attn_qkv.bias")
    if not w.has(f"{prefix}.attn_q.bias"):
        return None
    return torch.cat([w.vector(f"{prefix}.attn_{p}.bias") for p in "qkv"])


class GatedDeltaNet:
    """Linear attention with a decaying state (qwen35): conv, delta rule, gated norm."""

    def __init__(self, w: Weights, prefix: str, shape: GdnShape, eps: float) -> None:
        self.shape, self.eps = shape, eps
        parts = ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta")
        self.proj = w.matrix(*(f"{prefix}.{p}.weight" for p in parts))
        self.out = w.summed(f"{prefix}.ssm_out.weight")
        self.conv = w.vector(f"{prefix}.ssm_conv1d.weight")
        self.a, self.dt_bias = w.vector(f"{prefix}.ssm_a"), w.vector(f"{prefix}.ssm_dt.bias")
        self.norm = Norm(w.vector(f"{prefix}.attn_norm.weight"), eps)
        self.reads, self.gives = (self.proj, self.norm), sum_of(self.out)
        self.gate_norm = w.vector(f"{prefix}.ssm_norm.weight")
        self.gate_power = head_power(self.gate_norm)
        spec = GdnSpec(w.device, shape, eps)
        self.gdn, self.capturable = gdn.bind(spec), gdn.chosen(spec).capturable
        self.captures_prompts = gdn.runs_as("cuda", spec)
        self.fold = fuse.folder(self.gdn)
        self.split = [shape.n_channel, shape.n_v_head * shape.dim, shape.n_v_head, shape.n_v_head]

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], memory: Memory, layer: int, batch: Batch) -> Tensor:
        """The residual stream x [row, n_embd] -> x + delta(norm(x))."""
        m, z, alpha, beta = self.proj(x, self.norm).split(self.split, -1)
        args = (m, alpha, beta, self.a, self.dt_bias, self.conv, memory.states[layer], batch)
        prep = HeadNorm(self.gate_norm, self.eps, z, self.gate_power)
        return fuse.then(self.gdn, args, self.out, prep, residual=x)


class FeedForward:
    """SwiGLU behind its norm: x + down(silu(gate n) * up n) with n = norm(x). `norm` is the norm tensor's GGUF name."""

    capturable = captures_prompts = True

    def __init__(self, w: Weights, prefix: str, eps: float, norm: str = "ffn_norm") -> None:
        self.norm = Norm(w.vector(f"{prefix}.{norm}.weight"), eps)
        self.gate_up = w.gated(f"{prefix}.ffn_gate.weight", f"{prefix}.ffn_up.weight")
        self.down = w.summed(f"{prefix}.ffn_down.weight")
        self.reads, self.gives = (self.gate_up, self.norm), sum_of(self.down)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(*fuse.unfinished(self.gate_up, x, self.norm), residual=x)


class Relu2:
    """Behind its norm: x + down(relu(up n)^2) with n = norm(x), biases where the file has them."""

    capturable = captures_prompts = True

    def __init__(self, w: Weights, prefix: str, eps: float, norm: str) -> None:
        self.norm = Norm(w.vector(f"{prefix}.{norm}.weight"), eps)
        self.up, self.up_bias = w.matrix(f"{prefix}.ffn_up.weight"), w.optional(f"{prefix}.ffn_up.bias")
        self.down, self.down_bias = w.summed(f"{prefix}.ffn_down.weight"), w.optional(f"{prefix}.ffn_down.bias")
        self.reads, self.gives = (self.up, self.norm), None if self.down_bias is not None else sum_of(self.down)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.up(x, self.norm)
        y = y if self.up_bias is None else y + self.up_bias
        y = self.down(y, RELU2, residual=x)
        return y if self.down_bias is None else y + self.down_bias
