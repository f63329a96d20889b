"""`--exact` on a GPU: a row has the same bits however many rows run with it, in products and in whole models, prompts included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pyspec.config import EngineSettings
from pyspec.cuda.kernel_context import KernelContext, within
from pyspec.cuda.ops.linear.cuda import random_matrix
from pyspec.cuda.ops.rows.ref import HeadGate, HeadNorm, Norm, Prep
from pyspec.cuda.streamed import Streamed
from pyspec.engine.load.load import Loaded, load
from pyspec.gguf import GGMLType
from pyspec.models.matrices import Dense
from pyspec.slots.batch import Seq, SeqMode, lay_out
from pyspec.synth import write

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda", 0)
N_ROWS = (1, 17, 48, 49, 64, 128, 300)


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with within(KernelContext(is_exact=True)):
        yield


def preparations(kind: str, n_in: int, n_row: int, gen: torch.Generator) -> Prep | None:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).to(GPU)

    if kind == "norm":
        return Norm(1 + 0.1 * draw(n_in), 1e-6)
    if kind == "heads":
        return HeadNorm(1 + 0.1 * draw(128), 1e-6, draw(n_row, n_in + 64)[:, 64:])
    return HeadGate(draw(n_row, n_in // 256, 512)[..., 256:]) if kind == "gate" else None


def cut(prep: Prep | None, n: int) -> Prep | None:
    if isinstance(prep, HeadNorm):
        return HeadNorm(prep.weight, prep.eps, prep.gate[:n], prep.power)
    return HeadGate(prep.gate[:n]) if isinstance(prep, HeadGate) else prep


@pytest.mark.parametrize("kind", ["plain", "norm", "heads", "gate"])
@pytest.mark.parametrize("type", [GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.IQ4_XS])
def test_products_of_any_number_of_rows(type: GGMLType, kind: str) -> None:
    """A matrix that pairs of CTAs would take, and one that they would not."""
    for n_out, n_in in ((5120, 2048), (16480, 5120)):
        gen = torch.Generator().manual_seed(n_in)
        product = Streamed(random_matrix(type, n_out, n_in, gen, GPU), GPU, False, None)
        x, prep = torch.randn(300, n_in, generator=gen).to(GPU), preparations(kind, n_in, 300, gen)
        residual = torch.randn(300, n_out, generator=gen).to(GPU)
        whole = product(x, prep, residual)
        for n in N_ROWS:
            assert torch.equal(product(x[:n], cut(prep, n), residual[:n]), whole[:n]), n


def test_unpacked_matrices_of_any_number_of_rows() -> None:
    gen = torch.Generator().manual_seed(0)
    for n_out, dtype in ((48, torch.float32), (5120, torch.bfloat16)):
        product = Dense(torch.randn(n_out, 5120, generator=gen).to(GPU, dtype))
        norm = preparations("norm", 5120, 1, gen)
        x = torch.randn(300, 5120, generator=gen).to(GPU)
        whole = product(x, norm)
        assert all(torch.equal(product(x[:n], norm), whole[:n]) for n in N_ROWS)


def rows_of(loaded: Loaded, ids: Sequence[int], widths: Sequence[int], n_beside: int = 0) -> Tensor:
    """[token, vocab] logits of a prompt that comes in pieces of `widths`, beside prompts of as many rows in other slots."""
    loop, found = loaded.loop, []
    slots = loop.table.slots[: n_beside + 1]
    for slot in slots:
        loop.table.acquire(slot, len(ids))
        loop.memory.reset(slot.index)
    past = 0
    for width in widths:
        seqs = [
            Seq(
                slot.index,
                past,
                [(t + 7 * i) % 1000 for t in ids[past : past + width]],
                mode=SeqMode.KEEP,
                n_out=width,
            )
            for i, slot in enumerate(slots)
        ]
        with loop.worker.lock, torch.inference_mode():
            batch = lay_out(loop.table, seqs, GPU)
            found.append(loop.target.forward(batch).logits[:width].clone())
        past += width
    for slot in slots:
        loop.table.release(slot)
        loop.table.drop(slot)
    return torch.cat(found)


@pytest.mark.parametrize(
    ("model", "quant", "n_layer"),
    [
        ("qwen3.6-27b", "q8_0", 8),
        ("qwen3.6-35b-a3b", "q4_k", 8),
        ("nemotron-3-nano", "q8_0", 8),
        # Window alone, compressed by 4 and by 128; experts by table and by score
        ("deepseek-v4-flash", "iq2_xxs_moe", 4),
    ],
)
def test_a_prompt_has_the_same_logits_however_it_comes(
    tmp_path: Path, model: str, quant: str, n_layer: int
) -> None:
    """Token by token, in pieces, at once, and beside others: attention over more than one split of keys among them, and more rows than experts take
    at once."""
    path = write(model, tmp_path / "m.gguf", quant=quant, n_layer=n_layer)
    n = 1100
    loaded = load(
        path,
        EngineSettings(
            np=3,
            ctx=n + 64,
            exact=True,
            spec_type="none",
            warm_up=False,
            device="cuda",
            prefix_cache=False,
        ),
    )
    ids = torch.randint(1000, (n,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = rows_of(loaded, ids, [n])
    assert whole.isfinite().all()
    for widths in (
        [300] * 3 + [200],
        [129, 64, 49, 48, 17, 1, 700, 92],
        [128] * 8 + [76],
        [1] * 40 + [1060],
    ):
        assert torch.equal(rows_of(loaded, ids, widths), whole), widths[:3]
    assert torch.equal(rows_of(loaded, ids, [500, 600], n_beside=2), whole)
