"""DFlash2 and DSpark drafters made of DFlash files, and the same drafters in numpy over the taps of a target that reads whole texts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch
from engine_rig import FIXTURES, plain_rig
from rewrite import rewrite

from pyspec.draft import dflash2, dspark
from pyspec.draft.dflash_net import DFlashNet
from pyspec.gguf import GGUFFile, open_gguf
from pyspec.models.weights import Weights
from pyspec.ranges import Real
from pyspec.slots.batch import Batch, Seq, SeqMode, lay_out
from pyspec.slots.kv import KvFormat
from pyspec.slots.memory import allocate
from pyspec.slots.parts import CacheSizes
from pyspec.slots.table import SlotTable

DEVICE = os.environ.get("PYSPEC_TEST_DEVICE", "cpu")
TAPS, GROUP, RANK, BEST = 3, 8, 6, 5
EPS = 1e-6


def _sizes(draft: Path) -> tuple[GGUFFile, int, int]:
    file = open_gguf(draft)
    return file, file.hparams.integer("embedding_length"), file.hparams.integer("block_count")


def dflash2_of(draft: Path, n_vocab: int, *, quiet: bool = False, cap: float = 0.0) -> Path:
    """quiet: convolutions pass rows on, and the selector has no opinion, so its drafts are DFlash's."""
    (_, n, n_layer), rng = _sizes(draft), np.random.default_rng(7)
    random = lambda *shape: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype("<f4")  # noqa: E731
    tensors = {
        "selector_hidden.weight": random(RANK, n),
        "selector_predecessor.weight": 2 * random(n_vocab, RANK),
        "selector_successor.weight": 2 * random(n_vocab, RANK),
    }
    for name in (f"blk.{i}.{part}_conv" for i in range(n_layer) for part in ("attn", "ffn")):
        tensors[f"{name}_base"] = (0.4 * rng.standard_normal((2, TAPS, n))).astype("<f4")
        tensors[f"{name}_base"][:, 0] += 1
        tensors[f"{name}_proj.weight"] = 0.3 * random(2 * TAPS * (n // GROUP), n)
    if quiet:
        tensors = {name: 0 * values for name, values in tensors.items()}
        for name in tensors:
            if name.endswith("_base"):
                tensors[name][:, 0] = 1
    keys = {"conv_kernel_size": TAPS, "conv_group_size": GROUP, "selector_rank": RANK}
    keys |= {"selector_top_k": BEST} | ({"final_logit_softcapping": cap} if cap else {})
    return _made(draft, tensors, keys, "dflash2")


def dspark_of(
    draft: Path, n_vocab: int, *, quiet: bool = False, from_anchor: bool = True, sure: bool = True
) -> Path:
    """quiet: the Markov head has no opinion."""
    (_, n, _), rng = _sizes(draft), np.random.default_rng(8)
    random = lambda *shape: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype("<f4")  # noqa: E731
    tensors = {"markov_w1.weight": random(n_vocab, RANK), "markov_w2.weight": (0 if quiet else 2) * random(n_vocab, RANK)}  # fmt: skip
    if sure:
        tensors |= {"conf_proj.weight": random(1, n + RANK), "conf_proj.bias": random(1)}
    keys = {"sample_from_anchor": from_anchor, "has_confidence_head": sure}
    return _made(draft, tensors, keys, "dspark")


def _made(draft: Path, tensors: dict[str, np.ndarray], keys: dict[str, object], name: str) -> Path:
    change = {f"dflash.{key}": value for key, value in keys.items()}
    path = Path(mkdtemp(prefix=f"pyspec-{name}-")) / f"{name}.gguf"
    return rewrite(draft, path, add=tensors, change=change)


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Reference:
    """The layers of a block drafter in numpy."""

    def __init__(self, target: Path, draft: Path) -> None:
        self.file, whole = open_gguf(draft), open_gguf(target)
        self.h = self.file.hparams
        head = "output.weight" if "output.weight" in whole.tensors else "token_embd.weight"
        self.embedding, self.head = self._of(whole, "token_embd.weight"), self._of(whole, head)
        self.target = plain_rig(target).loop.target
        self.taps = [t - 1 for t in self.h.integers("target_layers")]
        self.dim, self.base = self.h.integer("attention.key_length"), self.h.number("rope.freq_base")
        self.n_layer, self.block = self.h.integer("block_count"), self.h.integer("block_size")
        self.slides = [False] * self.n_layer
        if "attention.sliding_window_pattern" in self.h:
            self.slides = self.h.flags("attention.sliding_window_pattern", self.n_layer)
        self.mask = self.file.fields.integer("tokenizer.ggml.mask_token_id")

    @staticmethod
    def _of(file: GGUFFile, name: str) -> np.ndarray:
        info = file.tensors[name]
        return file.raw(name).view("<f4").reshape(info.shape).astype(np.float64)

    def w(self, name: str) -> np.ndarray:
        return self._of(self.file, name)

    def features(self, tokens: Sequence[int]) -> np.ndarray:
        """Taps of every token."""
        table = SlotTable(1, 64, 16)
        table.acquire(table.slots[0], 200)
        self.target.memory.reset(0)
        batch = lay_out(table, [Seq(0, 0, tokens, SeqMode.KEEP)], torch.device("cpu"))
        out = self.target.forward(batch, self.taps)
        assert out.taps is not None
        return out.taps.numpy().astype(np.float64)

    def turned(self, x: np.ndarray, first: int) -> np.ndarray:
        """x [row, head, dim] at positions `first` and on; pairs are half a head apart."""
        half = x.shape[-1] // 2
        theta = (first + np.arange(len(x)))[:, None, None] * self.base ** (-np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate(
            [a * np.cos(theta) - b * np.sin(theta), b * np.cos(theta) + a * np.sin(theta)], -1
        )

    def filter(self, name: str, n: np.ndarray) -> Callable[[np.ndarray, int], np.ndarray]:
        """The convolutions of a part whose normed input is n, by their sides."""
        if f"{name}_base" not in self.file.tensors:
            return lambda x, side: x
        base = self.w(f"{name}_base")
        given = (n @ self.w(f"{name}_proj.weight").T).reshape(len(n), 2, base.shape[1], -1)

        def run(x: np.ndarray, side: int) -> np.ndarray:
            y = np.zeros_like(x)
            for row in range(len(x)):
                for t in range(min(row + 1, base.shape[1])):
                    own = np.repeat(given[row, side, t], x.shape[1] // given.shape[-1])
                    y[row] += (base[side, t] + own) * x[row - t]
            return y

        return run

    def rows(self, anchor: int, features: np.ndarray, n_row: int) -> np.ndarray:
        """[n_row, n] of a block behind rows of features."""
        n_past, at = len(features), len(features) + np.arange(n_row)
        c = rms(features @ self.w("fc.weight").T, self.w("enc.output_norm.weight"))
        x = self.embedding[[anchor, *[self.mask] * (n_row - 1)]]
        for i in range(self.n_layer):
            p = f"blk.{i}"
            n = rms(x, self.w(f"{p}.attn_norm.weight"))
            run = self.filter(f"{p}.attn_conv", n)
            u = run(n, 0)

            def heads(y: np.ndarray, m: str, p: str = p) -> np.ndarray:
                y = (y @ self.w(f"{p}.attn_{m}.weight").T).reshape(len(y), -1, self.dim)
                return y if m == "v" else rms(y, self.w(f"{p}.attn_{m}_norm.weight"))

            q = self.turned(heads(u, "q"), n_past)
            k = np.concatenate([self.turned(heads(c, "k"), 0), self.turned(heads(u, "k"), n_past)])
            v = np.concatenate([heads(c, "v"), heads(u, "v")])
            k, v = (np.repeat(y, q.shape[1] // y.shape[1], 1) for y in (k, v))
            s = np.einsum("thd,uhd->htu", q, k) / np.sqrt(self.dim)
            if self.slides[i]:
                far = at[:, None] - np.arange(len(k))
                sees = (far < self.h.integer("attention.sliding_window")) & (far >= 0)
                s = np.where(sees, s, -np.inf)
            o = np.einsum("htu,uhd->thd", softmax(s), v).reshape(n_row, -1)
            x = x + run(o @ self.w(f"{p}.attn_output.weight").T, 1)
            n = rms(x, self.w(f"{p}.ffn_norm.weight"))
            run = self.filter(f"{p}.ffn_conv", n)
            u = run(n, 0)
            gate = u @ self.w(f"{p}.ffn_gate.weight").T
            inner = gate / (1 + np.exp(-gate)) * (u @ self.w(f"{p}.ffn_up.weight").T)
            x = x + run(inner @ self.w(f"{p}.ffn_down.weight").T, 1)
        return rms(x, self.w("output_norm.weight"))

    def draft(
        self, anchor: int, features: np.ndarray, n: int, n_row: int
    ) -> tuple[list[int], list[float]]:
        """Drafts behind the anchor, and how sure the drafter is of each."""
        y = self.rows(anchor, features, n_row)
        return (
            self._spark(anchor, y, n)
            if "markov_w1.weight" in self.file.tensors
            else self._select(anchor, y, n)
        )

    def _select(self, anchor: int, y: np.ndarray, n: int) -> tuple[list[int], list[float]]:
        logits, cap = y @ self.head.T, self.h.number("final_logit_softcapping", 0.0, legal=Real(0, 100))
        logits = cap * np.tanh(logits / cap) if cap else logits
        before, behind = self.w("selector_predecessor.weight"), self.w("selector_successor.weight")
        drafts, sure = [anchor], []
        for row in range(1, n + 1):
            found = np.argsort(-logits[row])[: self.h.integer("selector_top_k")]
            gate = self.w("selector_hidden.weight") @ y[row]
            scores = logits[row, found] + behind[found] @ (before[drafts[-1]] * gate)
            drafts.append(int(found[scores.argmax()]))
            sure.append(float(softmax(scores).max()))
        return drafts[1:], sure

    def _spark(self, anchor: int, y: np.ndarray, n: int) -> tuple[list[int], list[float]]:
        first, drafts, sure = 0 if self.h.flag("sample_from_anchor", True) else 1, [anchor], []
        for row in range(first, first + n):
            given = self.w("markov_w1.weight")[drafts[-1]]
            logits = self.head @ y[row] + self.w("markov_w2.weight") @ given
            if self.h.flag("has_confidence_head", False):
                score = self.w("conf_proj.weight")[0] @ np.concatenate([y[row], given])
                sure.append(float(1 / (1 + np.exp(-score - self.w("conf_proj.bias")[0]))))
            else:
                sure.append(float(softmax(logits).max()))
            drafts.append(int(logits.argmax()))
        return drafts[1:], sure


class Sparse:
    """A target's size, for nets without one."""

    def __init__(self, n_vocab: int, n_embd: int) -> None:
        self.n_vocab, self.n_embd, self.embed = n_vocab, n_embd, None


def recorded_block(kind: str) -> tuple[DFlashNet, torch.Tensor, Batch, dict[str, np.ndarray]]:
    """The net of a fixture, the rows of its block behind the recorded features, their batch, and llama.cpp's results."""
    want, path = np.load(FIXTURES / f"{kind}.npz"), FIXTURES / f"{kind}.gguf"
    file, device, table = open_gguf(path), torch.device("cpu"), SlotTable(1, 4, 16)
    module, net_of = {
        "dflash2": (dflash2, dflash2.DFlash2Net),
        "dspark": (dspark, dspark.DSparkNet),
        "dspark_streams": (dspark, dspark.StreamsNet),
    }[kind]
    c = module.read_config(file)
    sizes = CacheSizes(1, table.n_alloc_row, 16, 1, KvFormat.named("f32", None))
    memory = allocate([block.memory() for block in c.blocks], sizes, device)
    target = Sparse(len(file.fields.strings("tokenizer.ggml.tokens")), c.n_embd)
    net = net_of(c, Weights(file, device, torch.float32), memory, target, None)  # type: ignore[arg-type, operator]
    features, block = torch.from_numpy(want["features"]), want["block"].tolist()
    table.acquire(table.slots[0], 40)
    context = lay_out(table, [Seq(0, 0, [0] * len(features))], device)
    net.inject(features, context.kv_rows, context.positions)
    batch = lay_out(table, [Seq(0, len(features), block)], device, see_block=True)
    return net, net.forward(batch), batch, dict(want)
