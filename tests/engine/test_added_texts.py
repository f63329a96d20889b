"""Texts of architectures that were added one by one, of a synthetic model each: keys of fewer bits, `--exact`, a draft model of another
architecture and blocks of their own that draft leave what plain decoding of one slot says."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
import torch.nn.functional as F
from engine_rig import GREEDY, plain_rig, rig
from harness import DEVICE, Bench
from known_texts import joined, tiny

from pyspec import synth
from pyspec.request import Delta
from pyspec.slots.batch import lay_out
from pyspec.synth.dims import TINY, widened

ADDED = (
    *("muse-glimmer", "laguna", "step35", "falcon-h1", "cohere2", "k2-horizon", "hunyuan-dense", "hunyuan-moe", "gemma2"),
    *("llama4", "kimi-linear", "bailingmoe3", "glm-dsa", "kimi-k3", "k2-horizon-mova", "glm5-next"),
)  # fmt: skip
WITH_MTP = [name for name in ADDED if TINY[name].mtp]
N_TEXT, MARGIN = 20, 0.02  # as in test_kv_types.py


@cache
def wide(name: str) -> Path:
    """With heads that blocks of 32 dimensions divide."""
    path = Path(mkdtemp(prefix="pyspec-added-")) / f"{name}.gguf"
    return synth.write(widened(TINY[name]), path, quant="f32")


@cache
def texts(name: str, kv_type: str, *, exact: bool = False) -> dict[tuple[int, ...], list[int]]:
    """Prompts with their texts by plain decoding in one slot, without near ties."""
    r, rng = plain_rig(wide(name), kv_type=kv_type, exact=exact), random.Random(0)
    out: dict[tuple[int, ...], list[int]] = {}
    while len(out) < 5:
        prompt = tuple(rng.choices(range(256), k=rng.choice((1, 15, 16, 33, 64))))
        h = r.generate(prompt, N_TEXT, replace(GREEDY, logprobs=2), cache_prompt=False)
        gaps = [p.top[0][1] - p.top[1][1] for e in h.events if isinstance(e, Delta) for p in e.logprobs]
        if exact or min(gaps) > MARGIN:
            out[prompt] = h.tokens
    return out


def check(
    name: str, kv_type: str = "f32", *, np: int = 3, exact: bool = False, **settings: object
) -> None:
    r = rig(wide(name), np=np, ubatch=40, kv_type=kv_type, exact=exact, n_draft_fixed=True, **settings)
    want = texts(name, kv_type, exact=exact)
    heard = joined(r, want, N_TEXT, cancels=True)
    for h, text in zip(heard, want.values(), strict=True):
        assert h.tokens == text, f"{h.job.id} in slot {h.slot}"
    assert sum(h.timings.draft_n for h in heard) > 0


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
@pytest.mark.parametrize("name", ADDED)
def test_keys_of_few_bits_give_one_text_with_drafts_and_without(name: str, kv_type: str) -> None:
    check(name, kv_type, spec_type="ngram", ngram_match=1)


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("name", ADDED)
def test_an_exact_engine_gives_one_text_however_near_ties_are(name: str) -> None:
    check(name, exact=True, spec_type="ngram", ngram_match=1)


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("name", ADDED)
def test_a_draft_model_of_another_architecture_leaves_the_text(name: str) -> None:
    check(name, draft_path=tiny("llama"), spec_type="draft", n_draft_max=3)


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("np", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", WITH_MTP)
def test_a_block_of_its_own_leaves_the_text(name: str, np: int) -> None:
    check(name, np=np, spec_type="mtp", n_draft_max=1 + np % 4)


@pytest.mark.parametrize(
    ("name", "raw"), [("step35", True), ("bailingmoe3", False), ("glm-dsa", False), ("glm5-next", False)]
)
def test_hidden_states_are_normed_but_for_those_of_step35(name: str, *, raw: bool) -> None:
    """The trunk's, and the block's own, whose head has a norm of its own."""
    bench = Bench(wide(name))
    block = bench.drafter("mtp", n_draft=2).block  # type: ignore[attr-defined]
    seq = bench.seq(0, [5, 9, 2, 40, 7])
    out, eps = bench.forward(seq), bench.target.config.eps

    def normed(hidden: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, norm.shape, norm, eps) if raw else hidden

    assert torch.allclose(
        bench.target.head(normed(out.hidden, bench.target.norm)), out.logits, atol=1e-4
    )
    with torch.inference_mode():
        states = block.forward(lay_out(bench.table, [seq], DEVICE), out.hidden)
        got, own = block.head(states), block.residual.norm
        assert torch.allclose(bench.target.head(normed(states, own)), got, atol=1e-4)
    assert not torch.equal(own, bench.target.norm)
