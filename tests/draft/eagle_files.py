"""Random EAGLE-3 drafters for any file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
from rewrite import rewrite

from pyspec.gguf import open_gguf

LAYERS = [2, 1, 2]  # whose inputs it reads


@cache
def eagle_for(path: Path, *, own: bool) -> Path:
    """A random drafter. own: with an embedding and a smaller head of its own, and the norms that are optional."""
    rng, file = np.random.default_rng(5), open_gguf(path)
    n_vocab, n_target = file.tensors["token_embd.weight"].shape
    n, heads, dim, n_ff = (48, 3, 16, 40) if own else (n_target, 2, 32, 56)
    random = lambda *shape: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype("<f4")  # noqa: E731
    norm = lambda m: (1 + 0.1 * rng.standard_normal(m)).astype("<f4")  # noqa: E731
    tensors = {"fc.weight": random(n, 3 * n_target), "output_norm.weight": norm(n)}
    shapes = {"q": (heads * dim, 2 * n), "k": (dim, 2 * n), "v": (dim, 2 * n), "output": (n, heads * dim)}  # fmt: skip
    tensors |= {f"blk.0.attn_{x}.weight": random(*shape) for x, shape in shapes.items()}
    tensors |= {f"blk.0.{x}.weight": norm(n) for x in ("attn_norm", "attn_norm_2", "ffn_norm")}
    tensors |= {f"blk.0.ffn_{x}.weight": random(n_ff, n) for x in ("gate", "up")} | {
        "blk.0.ffn_down.weight": random(n, n_ff)
    }
    if own:
        d2t = np.sort(rng.choice(n_vocab, 200, replace=False)).astype("<f4")
        tensors |= {
            "token_embd.weight": random(n_vocab, n) * np.sqrt(n),
            "output.weight": random(200, n),
            "d2t": d2t,
        }
        tensors["enc.output_norm.weight"] = norm(3 * n_target)
    keys = {
        "block_count": 1, "embedding_length": n, "feed_forward_length": n_ff, "attention.head_count": heads,
        "attention.head_count_kv": 1, "attention.key_length": dim, "attention.value_length": dim,
        "target_layers": LAYERS, "target_hidden_size": n_target, "norm_before_fc": own, "norm_before_residual": not own,
        "rope.dimension_count": dim, "rope.freq_base": 1e4, "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    return rewrite(
        path,
        Path(mkdtemp(prefix="pyspec-eagle-")) / "eagle3.gguf",
        arch="eagle3",
        drop=lambda name: True,
        add=tensors,
        change={f"eagle3.{key}": value for key, value in keys.items()},
    )
