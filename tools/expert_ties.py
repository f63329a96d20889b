"""How close choices of experts come, and what rounding does to them: on a CPU, with the tests' files.

    python tools/expert_ties.py

For tests/fixtures/nemotron_latent.gguf: how far scores move when a prompt is cut otherwise, and how many choices are closer than that.
For the packed files: how far logits move when products round their rows to f16, as kernels on GPUs do.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "tests" / "models"))
from harness import FIXTURES, Bench

from pyspec.cuda.ops.moe.ref import Routes
from pyspec.cuda.ops.rows.ref import Prep
from pyspec.models import weights
from pyspec.models.blocks.moe import BoundExperts

N_PROMPT, LENGTH = 40, 200


def scores_of(path: Path, tokens: list[int], chunk: int) -> list[tuple[Tensor, Tensor]]:
    """(scores [row, expert], how much the last chosen is ahead of the first left out [row]) of each block of experts."""
    bench, found = Bench(path, n_ctx=256), dict[int, list[tuple[Tensor, Tensor]]]()

    def watch(i: int, feed: BoundExperts) -> Callable[..., Routes]:
        route, s = feed.route, feed.shape

        def run(x: Tensor, norm: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Routes:
            logits = (feed.norm(x) @ matrix.T)[:, : s.n_expert]
            scores = logits if bias is None else logits.sigmoid() + bias
            best = scores.sort(-1, descending=True).values
            found.setdefault(i, []).append((scores, best[:, s.n_used - 1] - best[:, s.n_used]))
            return route(x, norm, matrix, bias)

        return run

    for i, block in enumerate(bench.target.blocks):
        for part in block.parts:
            if isinstance(part, BoundExperts):
                part.route = watch(i, part)
    for at in range(0, len(tokens), chunk):
        bench.feed(0, tokens[at : at + chunk])
    return [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in found.values()]  # type: ignore[misc]


def ties() -> None:
    rng, gaps, moves = random.Random(1), [], []
    for _ in range(N_PROMPT):
        tokens = [rng.randrange(250) for _ in range(LENGTH)]
        ways = [scores_of(FIXTURES / "nemotron_latent.gguf", tokens, chunk) for chunk in (100, 37, 1)]
        for (scores, gap), *others in zip(*ways, strict=True):
            gaps.append(gap)
            moves.append(torch.stack([(scores - other).abs().amax(-1) for other, _ in others]).amax(0))
    gap, move = torch.cat(gaps), torch.cat(moves)
    density = float((gap < 1e-3).float().mean()) / 1e-3
    print(f"{len(gap)} choices: scores move by {float(move.median()):.1g}, at most {float(move.max()):.1g}; closer than the "
          f"median move: {1e6 * density * float(move.median()):.1f} in a million")  # fmt: skip


def rounded(x: Tensor) -> Tensor:
    power = torch.exp2(x.abs().amax(-1, keepdim=True).clamp(min=1e-30).log2().floor())
    return (x / power).half().float() * power


def rows_of_f16(dense: weights.Dense, x: Tensor, prep: Prep | None = None, residual: Tensor | None = None) -> Tensor:
    x = x if prep is None else prep(x)
    return weights._finish(F.linear(rounded(x), dense.weight), dense.gated, residual)


def rounding() -> None:
    weights.Dense.__call__ = rows_of_f16  # type: ignore[method-assign]
    for name in ("nemotron_latent", "nemotron_latent_q8_0", "qwen35moe_mixed_q8_0"):
        data = np.load(FIXTURES / f"{name}.npz")
        want = torch.from_numpy(data["logits"])
        off = (Bench(FIXTURES / f"{name}.gguf").feed(0, data["tokens"].tolist()) - want).abs().amax(-1)
        share = float((off > 0.05 * want.std()).float().mean())
        print(f"{name}: worst logit off by {float(off.max()):.3g}, {share:.0%} of rows by more than 0.05 deviations")


if __name__ == "__main__":
    torch.set_num_threads(1)
    ties()
    rounding()
