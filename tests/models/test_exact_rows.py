"""`--exact` on a CPU: a row has the same bits whatever runs with it, however a prompt comes, drafts or none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pyspec.config import EngineSettings
from pyspec.cuda.kernel_context import KernelContext, within
from pyspec.engine.load.load import Loaded, load
from pyspec.slots.batch import Seq, SeqMode, lay_out
from pyspec.synth import write

N = 139
CUTS = ([1] * 9 + [130], [24, 1, 7, 64, 43], [65, 74], [3, 8, 8, 120])


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    """Threads are part of it: what several of them divide they must divide by rows."""
    n = torch.get_num_threads()
    torch.set_num_threads(2)
    with within(KernelContext(is_exact=True)):
        yield
    torch.set_num_threads(n)


def logits_of(
    loaded: Loaded, ids: Sequence[int], widths: Sequence[int], beside: Sequence[int] = ()
) -> Tensor:
    """[token, vocab] of a prompt in pieces of `widths`, behind others of `beside` tokens in other slots. Pieces of up to 8 rows are verifies,
    of which all is kept."""
    loop, found, past = loaded.loop, [], 0
    slots = loop.table.slots[: len(beside) + 1]
    for slot in slots:
        loop.table.acquire(slot, N + 64)
        loop.memory.reset(slot.index)
    n_fold = 0
    for round_, width in enumerate(widths):
        is_verify = 1 < width <= 8
        seqs = [
            Seq(slots[i + 1].index, 0, [(3 * t + i) % 200 for t in range(n)], mode=SeqMode.KEEP, n_out=n)
            for i, n in enumerate(beside)
            if round_ == 0
        ]
        seqs.append(
            Seq(
                slots[0].index,
                past,
                list(ids[past : past + width]),
                mode=SeqMode.KEEP if not is_verify else SeqMode.VERIFY,
                n_out=width,
                n_fold=n_fold,
            )
        )
        with loop.worker.lock, torch.inference_mode():
            batch = lay_out(loop.table, seqs, torch.device("cpu"))
            found.append(loop.target.forward(batch).logits[-width:].clone())
        n_fold = width if is_verify else 0
        past += width
    for slot in slots:
        loop.table.release(slot)
    return torch.cat(found)


@pytest.mark.sampled(most=3)
@pytest.mark.parametrize(
    "model", ["llama", "qwen3", "qwen35", "qwen35moe", "nemotron_h_moe", "qwen4exp", "glm5-next"]
)
def test_a_prompt_has_the_same_bits_however_it_comes(tmp_path: Path, model: str) -> None:
    path = write(model, tmp_path / "m.gguf", quant="q8_0", tiny=True)
    settings = EngineSettings(
        np=3,
        ctx=N + 64,
        exact=True,
        spec_type="ngram",
        n_draft_max=7,
        warm_up=False,
        prefix_cache=False,
        threads=2,
        device="cpu",
    )
    loaded = load(path, settings)
    ids = torch.randint(200, (N,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = logits_of(loaded, ids, [N])
    assert whole.isfinite().all()
    for widths in CUTS:
        assert torch.equal(logits_of(loaded, ids, widths), whole), widths
    assert torch.equal(logits_of(loaded, ids, [70, 69], beside=(5, 33)), whole)
