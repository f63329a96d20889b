"""DSpark drafters over DeepSeek-V4's layers, and the same in numpy, by the formulas of the architecture."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp

import numpy as np
from block_drafters import Reference, rms, softmax
from known_texts import tiny
from rewrite import rewrite

from pyspec import synth
from pyspec.gguf import open_gguf

TAPPED = [4, 2, 3]  # layers whose inputs it reads; 4: the output of the last one
BLOCK = 6
HEAD_MIX = "output_hc"


def streams_drafter(*, from_anchor: bool = True, sure: bool = True, **changes: object) -> Path:
    """For the tiny DeepSeek-V4: a file of pyspec's, with a smaller window, an odd order of taps, and a louder Markov head."""
    folder = Path(mkdtemp(prefix="pyspec-streams-"))
    source = synth.write(
        "deepseek4", folder / "own.gguf", quant="f32", seed=5, tiny=True, drafter=True, kind="dspark"
    )
    file = open_gguf(source)
    loud = {name: 3 * np.array(file.raw(name)).view("<f4") for name in ("markov_w1.weight",)}
    loud = {name: values.reshape(file.tensors[name].shape) for name, values in loud.items()}
    confidence = () if sure else ("conf_proj.weight", "conf_proj.bias")
    keys = {
        "block_size": BLOCK,
        "target_layers": TAPPED,
        "attention.sliding_window": 9,
        "sample_from_anchor": from_anchor,
        "has_confidence_head": sure,
        **changes,
    }
    return rewrite(
        source,
        folder / "dspark.gguf",
        drop=(*loud, *confidence).__contains__,
        add=loud,
        change={f"dflash.{key}": value for key, value in keys.items()},
    )


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class StreamsReference(Reference):
    """The layers in numpy."""

    def __init__(self, draft: Path) -> None:
        super().__init__(tiny("deepseek4"), draft)
        h = self.h
        self.n_stream, self.floor = (
            h.integer("hyper_connection.count"),
            h.number("hyper_connection.epsilon"),
        )
        self.n_rot, self.n_head = h.integer("rope.dimension_count"), h.integer("attention.head_count")
        self.window, self.n_group = (
            h.integer("attention.sliding_window"),
            h.integer("attention.output_group_count"),
        )

    def tail(self, x: np.ndarray, first: int, sign: int = 1) -> np.ndarray:
        """x [row, head, dim] at positions `first` and on: the last dimensions turn, in pairs side by side."""
        y, turned = x.copy(), x[..., -self.n_rot :]
        at = (first + np.arange(len(x)))[:, None, None] * sign
        theta = at * self.base ** (-np.arange(0, self.n_rot, 2) / self.n_rot)
        a, b, out = turned[..., ::2], turned[..., 1::2], np.empty_like(turned)
        out[..., ::2], out[..., 1::2] = (
            a * np.cos(theta) - b * np.sin(theta),
            a * np.sin(theta) + b * np.cos(theta),
        )
        y[..., -self.n_rot :] = out
        return y

    def mixed(self, x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The row that a part reads of streams x [row, stream, n], and coefficients of its output and of the streams [row, from, to]."""
        n, flat = self.n_stream, x.reshape(len(x), -1)
        m = rms(flat, np.ones(flat.shape[1])) @ self.w(f"{name}_fn.weight").T
        scale, base = self.w(f"{name}_scale.weight"), self.w(f"{name}_base.weight")
        pre = sigmoid(m[:, :n] * scale[0] + base[:n]) + self.floor
        post = 2 * sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        c = softmax((m[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)) + self.floor
        c /= c.sum(1, keepdims=True) + self.floor
        for _ in range(self.h.integer("hyper_connection.sinkhorn_iterations") - 1):
            c /= c.sum(2, keepdims=True) + self.floor
            c /= c.sum(1, keepdims=True) + self.floor
        return np.einsum("ts,tsn->tn", pre, x), post, c

    def attention(self, p: str, n: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Of a block's normed rows n behind context rows."""
        first, norm = len(context), self.w(f"{p}.attn_kv_a_norm.weight")
        q = rms(n @ self.w(f"{p}.attn_q_a.weight").T, self.w(f"{p}.attn_q_a_norm.weight"))
        q = (q @ self.w(f"{p}.attn_q_b.weight").T).reshape(len(n), self.n_head, self.dim)
        q = self.tail(rms(q, np.ones(self.dim)), first)
        both = np.concatenate([context, n]) @ self.w(f"{p}.attn_kv.weight").T
        k = self.tail(rms(both, norm)[:, None], 0)[:, 0]
        far = (first + np.arange(len(n)))[:, None] - np.arange(len(k))
        s = np.einsum("thd,ud->htu", q, k) / np.sqrt(self.dim)
        s = np.where(far < self.window, s, -np.inf)
        sinks = np.broadcast_to(self.w(f"{p}.attn_sinks.weight")[:, None, None], (*s.shape[:2], 1))
        a = softmax(np.concatenate([s, sinks], -1))[..., :-1]
        o = self.tail(np.einsum("htu,ud->thd", a, k), first, -1).reshape(len(n), self.n_group, -1)
        w = self.w(f"{p}.attn_output_a.weight")
        u = np.einsum("tgi,goi->tgo", o, w.reshape(self.n_group, -1, w.shape[-1]))
        return u.reshape(len(n), -1) @ self.w(f"{p}.attn_output_b.weight").T

    def feed(self, p: str, n: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
        """Experts, and the shared one."""

        def expert(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray, limit: float):  # type: ignore[no-untyped-def]
            g = np.minimum(x @ gate.T, limit)
            return (g * sigmoid(g) * np.clip(x @ up.T, -limit, limit)) @ down.T

        parts = [self.w(f"{p}.ffn_{x}_exps.weight") for x in ("gate", "up", "down")]
        own = [self.w(f"{p}.ffn_{x}_shexp.weight") for x in ("gate", "up", "down")]
        scores = np.sqrt(np.log1p(np.exp(n @ self.w(f"{p}.ffn_gate_inp.weight").T)))
        bias, n_used = self.w(f"{p}.exp_probs_b.bias"), self.h.integer("expert_used_count")
        out = expert(n, *own, limits[1])
        for row, score in enumerate(scores):
            chosen = np.argsort(-(score + bias))[:n_used]
            weights = score[chosen] / score[chosen].sum() * self.h.number("expert_weights_scale")
            for weight, e in zip(weights, chosen, strict=True):
                out[row] += weight * expert(n[row], *(part[e] for part in parts), limits[0])
        return out

    def rows(self, anchor: int, features: np.ndarray, n_row: int) -> np.ndarray:
        """[n_row, n] of a block behind rows of features: merged streams, not normed."""
        context = rms(features @ self.w("fc.weight").T, self.w("enc.output_norm.weight"))
        tokens = [anchor, *[self.mask] * (n_row - 1)]
        x = np.repeat(self.embedding[tokens][:, None], self.n_stream, 1)
        limits = [self.h.numbers(f"swiglu_clamp_{k}", self.n_layer) for k in ("exp", "shexp")]
        for i in range(self.n_layer):
            p = f"blk.{i}"
            for part in ("attn", "ffn"):
                y, post, c = self.mixed(x, f"{p}.hc_{part}")
                n = rms(y, self.w(f"{p}.{part}_norm.weight"))
                o = (
                    self.attention(p, n, context)
                    if part == "attn"
                    else self.feed(p, n, (limits[0][i], limits[1][i]))
                )
                x = post[..., None] * o[:, None] + np.einsum("tsd,tsn->tdn", c, x)
        flat = x.reshape(len(x), -1)
        m = rms(flat, np.ones(flat.shape[1])) @ self.w(f"{HEAD_MIX}_fn.weight").T
        pre = sigmoid(m * self.w(f"{HEAD_MIX}_scale.weight")[0] + self.w(f"{HEAD_MIX}_base.weight"))
        return np.einsum("ts,tsn->tn", pre + self.floor, x)

    def draft(
        self, anchor: int, features: np.ndarray, n: int, n_row: int
    ) -> tuple[list[int], list[float]]:
        merged = self.rows(anchor, features, n_row)
        normed = rms(merged, self.w("output_norm.weight"))
        first, drafts, sure = 0 if self.h.flag("sample_from_anchor", True) else 1, [anchor], []
        for row in range(first, first + n):
            given = self.w("markov_w1.weight")[drafts[-1]]
            logits = self.head @ normed[row] + self.w("markov_w2.weight") @ given
            if self.h.flag("has_confidence_head", False):
                score = self.w("conf_proj.weight")[0] @ np.concatenate([merged[row], given])
                sure.append(float(sigmoid(score + self.w("conf_proj.bias")[0])))
            else:
                sure.append(float(softmax(logits).max()))
            drafts.append(int(logits.argmax()))
        return drafts[1:], sure
