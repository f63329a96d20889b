"""Parts that encoders of pictures share, in torch: weights, blocks, ropes, and patches.

The stream of a picture is [n, width] f32 on every device, and so are norms, softmax and angles; products are in the precision of the
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.ops.linear.dequant import dequantize
from pyspec.gguf import GGUFFile
from pyspec.vision.kinds import CLAMPS, is_matrix, wants_of
from pyspec.vision.projector import Projector, stored

F16_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class Product:
    """x weight^T + bias, in the weight's precision. clamps: least and most of its input, then of its output; None: free"""

    weight: Tensor
    bias: Tensor | None
    clamps: tuple[float | None, ...]

    def __call__(self, x: Tensor) -> Tensor:
        low, high, out_low, out_high = self.clamps
        if low is not None or high is not None:
            x = x.clamp(low, high)
        y = F.linear(x.to(self.weight.dtype), self.weight, self.bias)
        if out_low is not None or out_high is not None:
            y = y.clamp(out_low, out_high)
        return y.clamp(-F16_MAX, F16_MAX) if y.dtype == torch.float16 else y


class EncoderWeights:
    """All tensors of a projector on a device: matrices in `dtype`, the rest in f32."""

    def __init__(
        self, file: GGUFFile, projector: Projector, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.projector, self.device, self.dtype = projector, device, dtype
        self._tensors: dict[str, Tensor] = {}
        for name, (shape, _) in wants_of(projector.kind, projector).items():
            own = stored(file, projector, name)
            if own not in file.tensors:
                continue
            raw = torch.from_numpy(file.raw(own)).to(device)
            kept = dtype if is_matrix(name, shape) else torch.float32
            self._tensors[name] = dequantize(raw, file.tensors[own].type, shape, kept)
        self._clamps = {
            name: self[name].item() for name in self._tensors if name.rpartition(".")[2] in CLAMPS
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def get(self, name: str) -> Tensor | None:
        """None: the file does not have it."""
        return self._tensors.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def product(self, name: str) -> Product:
        """The product with `name`.weight."""
        bias = self._tensors.get(f"{name}.bias")
        clamps = tuple(self._clamps.get(f"{name}.{clamp}") for clamp in CLAMPS)
        return Product(self[f"{name}.weight"], None if bias is None else bias.to(self.dtype), clamps)

    def layer_norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        """[n, width] f32"""
        eps = self.projector.eps if eps is None else eps
        bias = self._tensors.get(f"{name}.bias")
        return F.layer_norm(x.float(), x.shape[-1:], self[f"{name}.weight"], bias, eps)

    def rms(self, name: str, x: Tensor) -> Tensor:
        """By the root of the mean square, [..., width] f32. name: of its weight; "": without"""
        weight = self[f"{name}.weight"] if name else None
        return F.rms_norm(x.float(), x.shape[-1:], weight, self.projector.eps)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """The kind that the blocks have."""
        return (self.rms if self.projector.kind.block.is_rms else self.layer_norm)(name, x)


@dataclass(frozen=True, slots=True)
class Patches:
    """Where the patches of a picture are. rows, columns: of the picture; y, x: [n] int64 of each patch, in the stream's order"""

    rows: int
    columns: int
    y: Tensor
    x: Tensor

    @staticmethod
    def of(rows: int, columns: int, side: int, device: torch.device) -> Patches:
        """In blocks of side x side patches, row by row inside and outside of them."""
        at = torch.arange(rows * columns, device=device).view(rows // side, side, columns // side, side)
        order = at.transpose(1, 2).reshape(-1)
        return Patches(rows, columns, order // columns, order % columns)


def cut(pixels: Tensor, patch: int, at: Patches) -> Tensor:
    """[n, 3 patch patch] of [3, height, width]: a patch's numbers by channel, row and column."""
    parts = pixels.view(3, at.rows, patch, at.columns, patch).permute(1, 3, 0, 2, 4)
    return parts.reshape(at.rows * at.columns, -1)[at.y * at.columns + at.x]


def convolved(w: EncoderWeights, pixels: Tensor, at: Patches) -> Tensor:
    """[n, width]: a convolution whose stride is the patch. Two kernels are for two frames, of which a picture is both."""
    kernel = w["v.patch_embd.weight"]
    if "v.patch_embd.weight.1" in w:
        kernel = kernel + w["v.patch_embd.weight.1"]
    return F.linear(cut(pixels, w.projector.patch, at), kernel.flatten(1), w.get("v.patch_embd.bias"))


def stretched(table: Tensor, at: Patches, how: str, align_corners: bool) -> Tensor:
    """[n, width] of a square table [side side, width] that is scaled to the picture's rows and columns."""
    side = round(len(table) ** 0.5)
    if (at.rows, at.columns) != (side, side):
        square = table.view(1, side, side, -1).permute(0, 3, 1, 2)
        size = (at.rows, at.columns)
        scaled = F.interpolate(square, size, mode=how, align_corners=align_corners)
        table = scaled[0].permute(1, 2, 0).reshape(at.rows * at.columns, -1)
    return table[at.y * at.columns + at.x]


def by_axes(table: Tensor, at: Patches) -> Tensor:
    """[n, width]: a row of the first table for the column, and one of the second for the row."""
    return table[0][at.x] + table[1][at.y]


@dataclass(frozen=True, slots=True)
class PatchRope:
    """Turns pairs of a head's dimensions. cos, sin [n, 1, a, b]: a head is a parts of two halves of b, and pairs are of both halves"""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def of(angles: Tensor) -> PatchRope:
        """angles [n, a, b] f64"""
        return PatchRope(*(turn.float().unsqueeze(1) for turn in (angles.cos(), angles.sin())))

    def __getitem__(self, rows: slice) -> PatchRope:
        """Of some patches."""
        return PatchRope(self.cos[rows], self.sin[rows])

    def __call__(self, x: Tensor) -> Tensor:
        """[n, head, dim] f32, in four passes over memory"""
        _, _, a, b = self.cos.shape
        one, other = x.float().view(*x.shape[:2], a, 2, b).unbind(-2)
        turned = x.new_empty(*one.shape[:-1], 2, b, dtype=torch.float32)
        first, second = turned.unbind(-2)
        torch.mul(one, self.cos, out=first).addcmul_(other, self.sin, value=-1)
        torch.mul(one, self.sin, out=second).addcmul_(other, self.cos)
        return turned.view(x.shape)


def frequencies(base: float, n: int, first: int, step: int, dim: int, at: Patches) -> Tensor:
    """[n] f64: base^(-(first + step j) / dim)."""
    j = torch.arange(n, dtype=torch.float64, device=at.y.device)
    return base ** (-(first + step * j) / dim)


Act = Callable[[Tensor], Tensor]
gelu: Act = partial(F.gelu, approximate="tanh")
ACTS: dict[str, Act] = {
    "gelu": gelu,
    "silu": F.silu,
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
}


class EncoderBlock:
    """Attention and a feed-forward."""

    def __init__(self, w: EncoderWeights, number: int) -> None:
        p, at = w.projector, f"v.blk.{number}"
        self.w, self.at, self.kind, self.projector = w, at, p.kind.block, p
        self.act = ACTS[p.act]
        names = ("attn_qkv",) if f"{at}.attn_qkv.weight" in w else ("attn_q", "attn_k", "attn_v")
        self.qkv = [w.product(f"{at}.{name}") for name in names]
        self.out, self.up, self.down = (
            w.product(f"{at}.{name}") for name in ("attn_out", "ffn_up", "ffn_down")
        )
        self.gate = w.product(f"{at}.ffn_gate") if f"{at}.ffn_gate.weight" in w else None
        self.scale = w.get(f"{at}.out_scale.weight")

    def __call__(
        self, x: Tensor, rope: PatchRope | None, windows: Sequence[Tensor] | None, n_piece: int
    ) -> Generator[None, None, Tensor]:
        """Returns the stream [n, width] f32 behind it. windows: [window, patches of it] int64 each, which see only themselves; None: all see all.
        n_piece: patches that are computed at once; if there are more, it pauses behind each piece."""
        pieces = [slice(i, i + n_piece) for i in range(0, len(x), n_piece)]
        heads, made = [], []
        for piece in pieces:
            heads.append(self._heads(x[piece], None if rope is None else rope[piece]))
            if len(pieces) > 1:
                yield
        q, k, v = heads[0] if len(heads) == 1 else map(torch.cat, zip(*heads, strict=True))
        del heads
        seen = None if windows is None else self._seen_in(windows, q, k, v)
        for piece in pieces:
            own = self._seen(q[None, piece], k[None], v[None])[0] if seen is None else seen[piece]
            if piece is pieces[-1]:
                del q, k, v  # the feed-forward takes their room
            y = x[piece] + self._after("attn", self.out(own.flatten(1)))
            y = y + self._after("ffn", self._feed(self.w.norm(f"{self.at}.ln2", y)))
            made.append(y if self.scale is None else y * self.scale)
            if len(made) < len(pieces):
                yield
        return made[0] if len(made) == 1 else torch.cat(made)

    def _after(self, name: str, y: Tensor) -> Tensor:
        return self.w.rms(f"{self.at}.{name}_post_norm", y) if self.kind.is_gemma else y

    def _heads(self, x: Tensor, rope: PatchRope | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [n, head, dim] of the stream."""
        n = self.w.norm(f"{self.at}.ln1", x)
        parts, n_head = [product(n) for product in self.qkv], self.projector.n_head
        if len(parts) == 1 and rope is not None and not self.kind.is_gemma:
            qk, v = parts[0].unflatten(-1, (3 * n_head, -1)).split((2 * n_head, n_head), 1)
            return *rope(qk).to(qk.dtype).chunk(2, 1), v
        parts = list(parts[0].chunk(3, -1)) if len(parts) == 1 else parts
        q, k, v = (part.unflatten(-1, (n_head, -1)) for part in parts)
        q, k = self._turned("q", q, rope), self._turned("k", k, rope)
        return q, k, self.w.rms("", v).to(q.dtype) if self.kind.is_gemma else v

    def _seen(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attention(q, k, v, 1.0 if self.kind.is_gemma else None)

    def _seen_in(self, windows: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.empty_like(q)
        for at in windows:
            seen[at] = self._seen(q[at], k[at], v[at])
        return seen

    def _turned(self, name: str, x: Tensor, rope: PatchRope | None) -> Tensor:
        """Queries or keys [n, head, dim]: normed and turned in f32."""
        turned = self.w.rms(f"{self.at}.attn_{name}_norm", x) if self.kind.is_gemma else x
        return (turned if rope is None else rope(turned)).to(x.dtype)

    def _feed(self, n: Tensor) -> Tensor:
        up = self.up(n)
        return self.down(self.act(up) if self.gate is None else self.act(self.gate(n)) * up)


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """[group, n, head, dim]: queries see all keys of their group."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


def pooled(x: Tensor, at: Patches, side: int) -> Tensor:
    """[tokens, width]: means of side x side patches."""
    return _squares(x, at, side).mean((1, 3)).flatten(0, 1)


def side_by_side(x: Tensor, at: Patches, side: int) -> Tensor:
    """[tokens, width side side]: numbers of side x side patches by channel, row and column."""
    return _squares(x, at, side).permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)


def _squares(x: Tensor, at: Patches, side: int) -> Tensor:
    return x.view(at.rows // side, side, at.columns // side, side, -1)


@dataclass(frozen=True, slots=True)
class Tower:
    """A type of encoder, between its blocks.

    embed       pixels [3, height, width] f32 to the stream of patches [n, width]
    rows        the stream behind all blocks to rows of the text model [row, its width], in any precision
    rope        angles [n, a, b] of `PatchRope`, of heads of so many dimensions; None: no rope
    is_blocked  the stream's patches stand in blocks of those that become one token
    deep        the stream behind a block to rows of its own, for blocks of deepstack
    windows     patches that see each other in blocks with windows
    """

    embed: Callable[[EncoderWeights, Tensor, Patches], Tensor]
    rows: Callable[[EncoderWeights, Tensor, Patches], Tensor]
    rope: Callable[[Patches, int], Tensor] | None = None
    is_blocked: bool = False
    deep: Callable[[EncoderWeights, Tensor, int], Tensor] | None = None
    windows: Callable[[Projector, Patches], list[Tensor]] | None = None
