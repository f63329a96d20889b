"""The demo target (qwen35: Gated DeltaNet + gated attention, one MTP block) and its DFlash drafter, in plain torch.

Parameters keep the GGUF conventions, so export is a copy: norm weights multiply directly (no +1), `ssm_a` is -exp(A_log) at export,
and value heads are in tiled order (value head p reads key head p % n_k_heads).
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import library


@dataclass
class Config:
    n: int = 384
    layers: int = 8
    interval: int = 4  # layer i is full attention when (i + 1) % interval == 0
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 256
    rot: int = 64
    k_heads: int = 2  # Gated DeltaNet
    v_heads: int = 4
    state: int = 128
    conv: int = 4
    ffn: int = 1024
    vocab: int = 4096
    eps: float = 1e-6
    rope_base: float = 1e5
    ctx: int = 2048
    taps: tuple = (1, 4, 6)  # layer outputs read by the drafter
    d_layers: int = 3  # drafter
    d_heads: int = 6
    d_kv_heads: int = 2
    d_head_dim: int = 64
    d_ffn: int = 1024
    block: int = 8
    mask_id: int = 4091


class RMS(nn.Module):
    def __init__(self, n, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x):
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(
            x.dtype
        )


def linear(i, o, scale=1.0):
    m = nn.Linear(i, o, bias=False)
    nn.init.normal_(m.weight, std=0.02 * scale)
    return m


def rope(x, cos, sin):
    """NeoX rotation of the first 2 * cos.shape[-1] dims of x (..., T, hd)."""
    h = cos.shape[-1]
    a, b, rest = x[..., :h].float(), x[..., h : 2 * h].float(), x[..., 2 * h :]
    return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest], -1)


def angles(pos, rot, base):
    f = base ** (-torch.arange(0, rot, 2, device=pos.device, dtype=torch.float32) / rot)
    th = pos.float()[..., None] * f
    return th.cos(), th.sin()


class FFN(nn.Module):
    def __init__(self, n, f, scale):
        super().__init__()
        self.gate, self.up, self.down = linear(n, f), linear(n, f), linear(f, n, scale)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Gated GQA attention; per head the q projection emits [query | gate]."""

    def __init__(self, c, scale):
        super().__init__()
        self.c = c
        self.q, self.k, self.v = (
            linear(c.n, 2 * c.heads * c.head_dim),
            linear(c.n, c.kv_heads * c.head_dim),
            linear(c.n, c.kv_heads * c.head_dim),
        )
        self.o = linear(c.heads * c.head_dim, c.n, scale)
        self.q_norm, self.k_norm = RMS(c.head_dim, c.eps), RMS(c.head_dim, c.eps)

    def forward(self, x, pos, cache=None):
        c, (B, T, _) = self.c, x.shape
        q, gate = self.q(x).view(B, T, c.heads, 2 * c.head_dim).chunk(2, -1)
        k, v = self.k(x).view(B, T, c.kv_heads, -1), self.v(x).view(B, T, c.kv_heads, -1)
        cos, sin = angles(pos, c.rot, c.rope_base)
        q = rope(self.q_norm(q).transpose(1, 2), cos, sin)
        k, v = rope(self.k_norm(k).transpose(1, 2), cos, sin), v.transpose(1, 2)
        if cache is not None:  # one token at index cache["t"], same for all rows
            t = cache["t"]
            cache["k"][:, :, t : t + 1], cache["v"][:, :, t : t + 1] = k, v
            k, v = cache["k"][:, :, : t + 1].to(q.dtype), cache["v"][:, :, : t + 1].to(q.dtype)
        rep = c.heads // c.kv_heads
        k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        y = y.transpose(1, 2) * torch.sigmoid(gate)
        return self.o(y.reshape(B, T, -1))


class TriInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower triangular A (..., 64, 64), by block merging."""

    @staticmethod
    def forward(ctx, A):
        C = A.shape[-1]
        lead = A.shape[:-2]
        s = 8
        d = A.reshape(*lead, C // s, s, C // s, s)
        i = torch.arange(C // s, device=A.device)
        N = -d.movedim(-2, -3)[..., i, i, :, :]
        eye = torch.eye(s, device=A.device, dtype=A.dtype)
        N2 = N @ N
        T = (eye + N) @ (eye + N2) @ (eye + N2 @ N2)
        while s < C:
            m = C // (2 * s)
            d = A.reshape(*lead, m, 2, s, m, 2, s)
            j = torch.arange(m, device=A.device)
            low = d[..., :, 1, :, :, 0, :].movedim(-2, -3)[..., j, j, :, :]
            T = T.reshape(*lead, m, 2, s, s)
            a, b = T[..., 0, :, :], T[..., 1, :, :]
            bl = -b @ low @ a
            T = torch.cat([torch.cat([a, torch.zeros_like(a)], -1), torch.cat([bl, b], -1)], -2)
            s *= 2
        T = T.reshape(A.shape)
        ctx.save_for_backward(T)
        return T

    @staticmethod
    def backward(ctx, dT):
        (T,) = ctx.saved_tensors
        Tt = T.transpose(-1, -2)
        return -(Tt @ dT @ Tt).tril(-1)


@library.custom_op("demo::chunk_scan", mutates_args=())
def chunk_scan(
    U: torch.Tensor, W: torch.Tensor, kd: torch.Tensor, ge: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Carry the state over chunks: new_i = U_i - W_i S_i, S_{i+1} = ge_i S_i + kd_i new_i. Returns every S_i and new_i."""
    B, H, n, C, D = U.shape
    S, new = U.new_zeros(B * H, n, D, D), U.new_empty(B * H, n, C, D)
    U, W, kd, ge = (t.reshape(B * H, *t.shape[2:]) for t in (U, W, kd, ge))
    for i in range(n):
        new[:, i] = torch.baddbmm(U[:, i], W[:, i], S[:, i], alpha=-1)
        if i + 1 < n:
            S[:, i + 1] = torch.baddbmm(ge[:, i] * S[:, i], kd[:, i], new[:, i])
    return S.view(B, H, n, D, D), new.view(B, H, n, C, D)


@chunk_scan.register_fake
def _(U, W, kd, ge):
    B, H, n, _, D = U.shape
    return U.new_empty(B, H, n, D, D), torch.empty_like(U, memory_format=torch.contiguous_format)


@library.custom_op("demo::chunk_scan_back", mutates_args=())
def chunk_scan_back(
    dS: torch.Tensor, dnew: torch.Tensor, W: torch.Tensor, kd: torch.Tensor, ge: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reverse scan: gradients at each new_i and at each S_{i+1}."""
    B, H, n, C, D = dnew.shape
    dS, dnew, W, kd, ge = (t.reshape(B * H, *t.shape[2:]) for t in (dS, dnew, W, kd, ge))
    dU, nxt = torch.empty_like(dnew), torch.zeros_like(dS)
    for i in range(n - 1, -1, -1):
        dU[:, i] = torch.baddbmm(dnew[:, i], kd[:, i].transpose(1, 2), nxt[:, i])
        if i:
            nxt[:, i - 1] = torch.baddbmm(
                dS[:, i] + ge[:, i] * nxt[:, i], W[:, i].transpose(1, 2), dU[:, i], alpha=-1
            )
    return dU.view(B, H, n, C, D), nxt.view(B, H, n, D, D)


@chunk_scan_back.register_fake
def _(dS, dnew, W, kd, ge):
    return torch.empty_like(dnew, memory_format=torch.contiguous_format), torch.empty_like(
        dS, memory_format=torch.contiguous_format
    )


def _scan_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:], *output)


def _scan_grad(ctx, dS, dnew):
    W, kd, ge, S, new = ctx.saved_tensors
    dU, nxt = chunk_scan_back(dS.contiguous(), dnew.contiguous(), W, kd, ge)
    return (
        dU,
        -(dU @ S.transpose(-1, -2)),
        nxt @ new.transpose(-1, -2),
        (nxt * S).sum((-1, -2), keepdim=True),
    )


chunk_scan.register_autograd(_scan_grad, setup_context=_scan_setup)


def gdn_chunked(q, k, v, g, beta, C=64):
    """Gated delta rule over (B, H, T, D) in chunks of C tokens, float32. Returns o before the norm."""
    B, H, T, D = v.shape
    n = T // C
    q, k, v = (x.reshape(B, H, n, C, D) for x in (q, k, v))
    g, beta = g.reshape(B, H, n, C), beta.reshape(B, H, n, C, 1)
    G = g.cumsum(-1)
    mask = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    decay = (G[..., :, None] - G[..., None, :]).masked_fill(~mask, float("-inf")).exp()
    A = ((beta * k) @ k.transpose(-1, -2) * decay).tril(-1)
    Tm = TriInverse.apply(A)
    eG = G.exp()[..., None]
    U, W = Tm @ (beta * v), Tm @ (beta * eG * k)
    end = G[..., -1:]
    kd = ((end - G).exp()[..., None] * k).transpose(-1, -2).contiguous()  # (.., D, C)
    ge = end.exp()[..., None]
    S, vn = chunk_scan(U, W, kd, ge)
    o = (eG * q) @ S + (q @ k.transpose(-1, -2) * decay) @ vn
    return o.reshape(B, H, T, D) * D**-0.5


def l2norm(x, eps):
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps)


class DeltaNet(nn.Module):
    def __init__(self, c, scale):
        super().__init__()
        self.c = c
        self.kd, self.vd = c.k_heads * c.state, c.v_heads * c.state
        self.qkv, self.gate = linear(c.n, 2 * self.kd + self.vd), linear(c.n, self.vd)
        self.alpha, self.beta = linear(c.n, c.v_heads), linear(c.n, c.v_heads)
        self.conv = nn.Parameter(torch.randn(2 * self.kd + self.vd, c.conv) * 0.3)
        self.A_log = nn.Parameter(torch.empty(c.v_heads).uniform_(1, 16).log())
        dt = torch.exp(torch.empty(c.v_heads).uniform_(-6.9, -2.3))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.norm, self.out = RMS(c.state, c.eps), linear(self.vd, c.n, scale)

    def project(self, x):
        m, z = self.qkv(x), self.gate(x)
        beta = torch.sigmoid(self.beta(x).float())
        g = -self.A_log.exp() * F.softplus(self.alpha(x).float() + self.dt_bias)
        return m, z, g, beta

    def split(self, y):
        """(B, T, C) after conv -> q, k, v as (B, Hv, T, D), float32."""
        c, (B, T, _) = self.c, y.shape
        q, k, v = y.float().split([self.kd, self.kd, self.vd], -1)
        rep = c.v_heads // c.k_heads
        q, k = (
            l2norm(t.reshape(B, T, c.k_heads, -1), c.eps).repeat(1, 1, rep, 1).transpose(1, 2)
            for t in (q, k)
        )
        return q, k, v.reshape(B, T, c.v_heads, -1).transpose(1, 2)

    def finish(self, o, z):
        B, _, T, _ = o.shape
        o = self.norm(o.transpose(1, 2)) * F.silu(z.float().view(B, T, self.c.v_heads, -1))
        return self.out(o.reshape(B, T, -1).to(z.dtype))

    def forward(self, x):
        m, z, g, beta = self.project(x)
        T = x.shape[1]
        p = F.pad(m, (0, 0, self.c.conv - 1, 0))
        y = F.silu(sum(p[:, j : j + T].float() * self.conv[:, j] for j in range(self.c.conv)))
        q, k, v = self.split(y)
        pad = -T % 64
        g, beta = g.transpose(1, 2), beta.transpose(1, 2)
        if pad:
            q, k, v = (F.pad(t, (0, 0, 0, pad)) for t in (q, k, v))
            g, beta = F.pad(g, (0, pad)), F.pad(beta, (0, pad))
        with torch.autocast(x.device.type, enabled=False):
            o = gdn_chunked(q, k, v, g, beta)[:, :, :T]
        return self.finish(o, z)

    def step(self, x, st):
        """One token; st holds `conv` (B, 3, C) and `S` (B, Hv, Dk, Dv)."""
        m, z, g, beta = self.project(x)
        w = torch.cat([st["conv"], m.float()], 1)
        y = F.silu((w * self.conv.t()).sum(1, keepdim=True))
        st["conv"].copy_(w[:, 1:])
        q, k, v = (t[:, :, 0] for t in self.split(y))
        S = st["S"]
        S.mul_(g[:, 0, :, None, None].exp())
        d = beta[:, 0, :, None] * (v - (k[..., None] * S).sum(-2))
        S.add_(k[..., None] * d[:, :, None])
        o = (q[..., None] * S).sum(-2) * self.c.state**-0.5
        return self.finish(o[:, :, None], z)


class Block(nn.Module):
    def __init__(self, c, recurrent):
        super().__init__()
        scale = (2 * c.layers) ** -0.5
        self.recurrent = recurrent
        self.attn_norm, self.ffn_norm = RMS(c.n, c.eps), RMS(c.n, c.eps)
        self.mix = DeltaNet(c, scale) if recurrent else Attention(c, scale)
        self.ffn = FFN(c.n, c.ffn, scale)

    def forward(self, x, pos):
        a = self.attn_norm(x)
        x = x + (self.mix(a) if self.recurrent else self.mix(a, pos))
        return x + self.ffn(self.ffn_norm(x))

    def step(self, x, pos, st):
        a = self.attn_norm(x)
        x = x + (self.mix.step(a, st) if self.recurrent else self.mix(a, pos, st))
        return x + self.ffn(self.ffn_norm(x))


class MTP(nn.Module):
    """Row p: token x_p with the final hidden of position p - 1, predicts token p + 1."""

    def __init__(self, c):
        super().__init__()
        self.enorm, self.hnorm, self.head_norm = RMS(c.n, c.eps), RMS(c.n, c.eps), RMS(c.n, c.eps)
        self.eh_proj, self.block = linear(2 * c.n, c.n), Block(c, False)

    def forward(self, emb, h, pos):
        return self.head_norm(
            self.block(self.eh_proj(torch.cat([self.enorm(emb), self.hnorm(h)], -1)), pos)
        )


class Target(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocab, c.n)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(c, (i + 1) % c.interval != 0) for i in range(c.layers))
        self.norm, self.head, self.mtp = RMS(c.n, c.eps), linear(c.n, c.vocab), MTP(c)

    def forward(self, ids, taps=None):
        """ids (B, T) -> final-normed hidden (B, T, n); appends tap outputs to the list `taps`."""
        pos = torch.arange(ids.shape[1], device=ids.device)
        x = self.embed(ids)
        for i, b in enumerate(self.blocks):
            x = b(x, pos)
            if taps is not None and i in self.c.taps:
                taps.append(x)
        return self.norm(x)

    def new_state(self, B, T, device, kv_dtype=torch.bfloat16):
        c, out = self.c, []
        for b in self.blocks:
            if b.recurrent:
                out.append(
                    {
                        "conv": torch.zeros(B, c.conv - 1, 2 * b.mix.kd + b.mix.vd, device=device),
                        "S": torch.zeros(B, c.v_heads, c.state, c.state, device=device),
                    }
                )
            else:
                out.append(
                    {
                        "k": torch.zeros(B, c.kv_heads, T, c.head_dim, device=device, dtype=kv_dtype),
                        "v": torch.zeros(B, c.kv_heads, T, c.head_dim, device=device, dtype=kv_dtype),
                        "t": 0,
                    }
                )
        return out

    def step(self, ids, t, state):
        """ids (B,) at position t -> logits (B, vocab)."""
        pos = torch.full((1,), t, device=ids.device)
        x = self.embed(ids)[:, None]
        for b, st in zip(self.blocks, state, strict=True):
            if not b.recurrent:
                st["t"] = t
            x = b.step(x, pos, st)
        return self.head(self.norm(x))[:, 0]


class DraftLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c, h = c, c.d_head_dim
        scale = (2 * c.d_layers) ** -0.5
        self.q, self.k, self.v = (
            linear(c.n, c.d_heads * h),
            linear(c.n, c.d_kv_heads * h),
            linear(c.n, c.d_kv_heads * h),
        )
        self.o = linear(c.d_heads * h, c.n, scale)
        self.q_norm, self.k_norm = RMS(h, c.eps), RMS(h, c.eps)
        self.attn_norm, self.ffn_norm, self.ffn = (
            RMS(c.n, c.eps),
            RMS(c.n, c.eps),
            FFN(c.n, c.d_ffn, scale),
        )

    def kv(self, u, cs):
        B, T, _ = u.shape
        k = rope(self.k_norm(self.k(u).view(B, T, self.c.d_kv_heads, -1)).transpose(1, 2), *cs)
        return k, self.v(u).view(B, T, self.c.d_kv_heads, -1).transpose(1, 2)

    def forward(self, x, ctx, cs_x, cs_ctx, mask):
        B, R, _ = x.shape
        u = self.attn_norm(x)
        q = rope(self.q_norm(self.q(u).view(B, R, self.c.d_heads, -1)).transpose(1, 2), *cs_x)
        k, v = (torch.cat(p, 2) for p in zip(self.kv(ctx, cs_ctx), self.kv(u, cs_x), strict=True))
        rep = self.c.d_heads // self.c.d_kv_heads
        y = F.scaled_dot_product_attention(
            q, k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1), attn_mask=mask
        )
        x = x + self.o(y.transpose(1, 2).reshape(B, R, -1))
        return x + self.ffn(self.ffn_norm(x))


class Drafter(nn.Module):
    """DFlash: a block [anchor, mask x (B-1)] filled in at once; context keys come from tapped target hiddens."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.fc = linear(len(c.taps) * c.n, c.n)
        self.hidden_norm, self.norm = RMS(c.n, c.eps), RMS(c.n, c.eps)
        self.layers = nn.ModuleList(DraftLayer(c) for _ in range(c.d_layers))

    def forward(self, taps, emb, pos, mask):
        """taps (B, T, 3n), emb (B, R, n) block rows at positions pos (B, R), mask (B, 1, R, T + R) -> normed hidden (B, R, n)."""
        c = self.c
        ctx = self.hidden_norm(self.fc(taps))
        cs_ctx = angles(torch.arange(taps.shape[1], device=taps.device), c.d_head_dim, c.rope_base)
        cs_x = tuple(t[:, None] for t in angles(pos, c.d_head_dim, c.rope_base))
        x = emb
        for layer in self.layers:
            x = layer(x, ctx, cs_x, cs_ctx, mask)
        return self.norm(x)


def quantize_q8(w):
    """Round-trip a matrix through Q8_0 (blocks of 32 along the input dim, fp16 scale)."""
    b = w.float().reshape(-1, 32)
    d = b.abs().amax(1, keepdim=True) / 127
    q = torch.where(d > 0, (b / d), torch.zeros_like(b))
    q = torch.sign(q) * torch.floor(q.abs() + 0.5)
    return (q * d.half().float()).reshape(w.shape)


def is_matrix(name, p):
    """Stored as Q8_0; everything else (norms, conv, the two small per-head projections, per-head scalars) stays F32."""
    return p.ndim == 2 and not name.endswith(("conv", "alpha.weight", "beta.weight"))


@torch.no_grad()
def quantize_module(m):
    for name, p in m.named_parameters():
        if is_matrix(name, p):
            p.copy_(quantize_q8(p))
