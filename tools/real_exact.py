"""Computes the answers that `make real` has to meet, by Gemma 3's formulas in F64: tests/real/exact.json.

    python tools/real_exact.py MODEL.gguf          about a minute; needs 4 GB of memory

Nothing of pyspec takes part: the `gguf` package unpacks the weights, numpy computes. Token ids and prompts are those of tests/real/answers.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from real_compare import ANSWERS, EXACT, N_TOKEN, N_TOP, N_TOP_POSITION

EVERY, FAR_BASE, NEAR_BASE = 6, 1e6, 1e4  # each sixth block sees all; bases of the ropes
ENDS = ("<eos>", "<end_of_turn>")
N_COLUMN = 16384  # of the head at once
N_DIGIT = 6


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def turned(x: np.ndarray, base: float) -> np.ndarray:
    """The rope of x [row, head, dim] in half-split pairs."""
    half = x.shape[-1] // 2
    at = np.arange(len(x))[:, None, None] * base ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate((a * np.cos(at) - b * np.sin(at), a * np.sin(at) + b * np.cos(at)), -1)


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


class Gemma:
    """The model of a file. Weights are F64, but for the embedding, which is large."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self.w = {
            t.name.removesuffix(".weight"): dequantize(t.data, t.tensor_type) for t in reader.tensors
        }
        self.embedding = self.w.pop("token_embd")
        self.w = {name: w.astype(np.float64) for name, w in self.w.items()}

        def number(key: str) -> Any:
            return reader.fields[f"gemma3.{key}"].contents()

        self.n_block, self.n_head = number("block_count"), number("attention.head_count")
        self.window, self.eps = (
            number("attention.sliding_window"),
            number("attention.layer_norm_rms_epsilon"),
        )
        names = reader.fields["tokenizer.ggml.tokens"].contents()
        self.eog = [names.index(name) for name in ENDS]

    def logits(self, tokens: Sequence[int], first: int) -> np.ndarray:
        """[row, vocabulary] of the tokens from `first` on."""
        x = self.embedding[list(tokens)].astype(np.float64) * self.embedding.shape[1] ** 0.5
        for i in range(self.n_block):
            x = x + self._attention(i, x)
            y = rms(x, self.w[f"blk.{i}.ffn_norm"], self.eps)
            gate, up, down = (self.w[f"blk.{i}.ffn_{name}"] for name in ("gate", "up", "down"))
            x = x + rms(
                (gelu(y @ gate.T) * (y @ up.T)) @ down.T, self.w[f"blk.{i}.post_ffw_norm"], self.eps
            )
        x = rms(x[first:], self.w["output_norm"], self.eps)
        pieces = range(0, len(self.embedding), N_COLUMN)
        return np.concatenate(
            [x @ self.embedding[i : i + N_COLUMN].astype(np.float64).T for i in pieces], -1
        )

    def _attention(self, i: int, x: np.ndarray) -> np.ndarray:
        """One key head, as this size has."""
        n = len(x)
        w = {
            name: self.w[f"blk.{i}.attn_{name}"]
            for name in ("norm", "q", "k", "v", "q_norm", "k_norm", "output")
        }
        is_near = (i + 1) % EVERY != 0
        base = NEAR_BASE if is_near else FAR_BASE
        y = rms(x, w["norm"], self.eps)
        d = len(w["q_norm"])
        q, k, v = ((y @ w[name].T).reshape(n, -1, d) for name in "qkv")
        q, k = turned(rms(q, w["q_norm"], self.eps), base), turned(rms(k, w["k_norm"], self.eps), base)
        behind = np.arange(n)[:, None] - np.arange(n)
        is_hidden = (behind < 0) | (is_near & (behind >= self.window))
        out = np.empty((n, self.n_head, d))
        for head in range(self.n_head):
            scores = np.where(is_hidden, -np.inf, q[:, head] @ k[:, 0].T * d**-0.5)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = p / p.sum(-1, keepdims=True) @ v[:, 0]
        return rms(out.reshape(n, -1) @ w["output"].T, self.w[f"blk.{i}.post_attention_norm"], self.eps)


def answer(model: Gemma, ids: Sequence[int], guess: Sequence[int]) -> dict[str, Any]:
    """The greedy text, in the form of answers.json. Forwards run over a guess until each token of it is the best one."""
    tokens = list(guess)
    while True:
        logits = model.logits([*ids, *tokens[:-1]], len(ids) - 1)
        best = logits.argmax(-1).tolist()
        wrong = next((i for i, token in enumerate(tokens) if token != best[i]), None)
        if wrong is None:
            break
        tokens = [*tokens[:wrong], *best[wrong:]]
        end = next((i + 1 for i in range(wrong + 1) if tokens[i] in model.eog), None)
        tokens = tokens[:end] if end else [*tokens, *[best[-1]] * (N_TOKEN - len(tokens))]
    top = logits.max(-1, keepdims=True)
    logprobs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    order = np.argsort(-logprobs, -1)[:, :N_TOP]
    tops = [
        [[token, round(row[token], N_DIGIT)] for token in best]
        for best, row in zip(order.tolist(), logprobs, strict=True)
    ]
    return {
        "tokens": tokens,
        "ended": tokens[-1] in model.eog,
        "logprobs": [best[0][1] for best in tops],
        "second": [best[1][1] for best in tops],
        "top": tops[:N_TOP_POSITION],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=EXACT)
    arguments = parser.parse_args()
    model = Gemma(arguments.model)
    rows = json.loads(ANSWERS.read_text(encoding="utf-8"))["prompts"]
    found = {row["name"]: answer(model, row["ids"], row["f32"]["tokens"]) for row in rows}
    lines = [
        f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}"
        for name, value in found.items()
    ]
    arguments.out.write_text("{" + ",\n ".join(lines) + "}\n", encoding="ascii")


if __name__ == "__main__":
    main()
