"""Keys and values in fewer bits: texts may differ from those of f32, never between speculative and plain decoding.

On a CPU a forward's sums depend on its number of rows by 1e-6, which now and then tips a value to the next code. So texts
without near ties are compared, as everywhere, with a margin for that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from engine_rig import DEMO, DEMO_DRAFT, FIXTURES, GREEDY, Rig, plain_rig, rig
from known_texts import demo_prompts, tiny

from pyspec.config import EngineSettings
from pyspec.draft.drafter import draft_format
from pyspec.engine.plan.describe import describe
from pyspec.engine.plan.planned_bytes import plan_memory
from pyspec.errors import ModelError
from pyspec.logits import compute_logits
from pyspec.request import Delta
from pyspec.slots.kv_types import TYPES as KV_TYPES

QWEN35 = FIXTURES / "qwen35.gguf"  # heads of 32
TYPES = ("q8_0", "f8_e4m3")
PAIRS = (("q8_0", "f16"), ("f16", "f8_e4m3"), ("q8_0", "q4_0"), ("q4_1", "q5_0"))  # keys, values
PACKED = ("q4_0", "q5_1")
FORMATS = [*((t, None) for t in (*TYPES, *PACKED)), *PAIRS]
EVERY = [*FORMATS, ("q4_1", None), ("q5_0", None), ("f16", "q4_0"), ("q4_0", "f16"), ("q5_1", "q8_0")]
N_TEXT, MARGIN = 30, 0.02

MAKERS: dict[str, Callable[..., Rig]] = {
    "mtp": lambda **s: rig(QWEN35, spec_type="mtp", n_draft_max=4, n_draft_fixed=True, **s),
    "mtp-demo": lambda **s: rig(DEMO, spec_type="mtp", n_draft_max=3, n_draft_fixed=True, **s),
    "dflash-demo": lambda **s: rig(DEMO, draft_path=DEMO_DRAFT, n_draft_max=5, n_draft_fixed=True, **s),
}
PATHS = {"mtp": QWEN35, "mtp-demo": DEMO, "dflash-demo": DEMO}


@cache
def texts(path: Path, kv_type: str, kv_type_v: str | None) -> dict[tuple[int, ...], list[int]]:
    """Prompts with their texts by plain decoding in one slot, without near ties."""
    r, rng = plain_rig(path, kv_type=kv_type, kv_type_v=kv_type_v), random.Random(0)
    out: dict[tuple[int, ...], list[int]] = {}
    asked = iter([p for p, _ in demo_prompts()])
    while len(out) < 6:
        prompt = (
            next(asked)
            if path == DEMO
            else tuple(rng.choices(range(256), k=rng.choice((1, 15, 16, 33, 64))))
        )
        h = r.generate(prompt, N_TEXT, replace(GREEDY, logprobs=2), cache_prompt=False)
        gaps = [p.top[0][1] - p.top[1][1] for e in h.events if isinstance(e, Delta) for p in e.logprobs]
        if min(gaps) > MARGIN:
            out[prompt] = h.tokens
    return out


@pytest.mark.slow
@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("np", [1, 3, 10])
@pytest.mark.parametrize(("kv_type", "kv_type_v"), EVERY)
@pytest.mark.parametrize("kind", MAKERS)
def test_speculation_leaves_the_text_as_it_is(
    kind: str, kv_type: str, kv_type_v: str | None, np: int
) -> None:
    r = MAKERS[kind](np=np, ubatch=40, kv_type=kv_type, kv_type_v=kv_type_v)
    want = texts(PATHS[kind], kv_type, kv_type_v)
    heard = []
    for i, prompt in enumerate(want):
        heard.append(r.submit(prompt, N_TEXT))
        gone = r.submit([*prompt[: len(prompt) // 2], i, 7], 200)
        r.steps(2)
        r.loop.cancel(gone.job)
    r.run()
    for h, text in zip(heard, want.values(), strict=True):
        assert h.tokens == text, f"{h.job.id} in slot {h.slot}"
    assert sum(h.timings.draft_n for h in heard) > 0
    if kind.endswith("demo"):
        assert sum(h.timings.draft_n_accepted for h in heard) > 0.3 * sum(
            h.timings.draft_n for h in heard
        )


@pytest.mark.slow
def test_few_bits_change_logits_by_little() -> None:
    """And do change them: a cache that stored f32 would pass all other tests."""
    prompt, answer = demo_prompts()[0]
    ids = [*prompt, *answer]
    rows = {
        t: torch.as_tensor(compute_logits(DEMO, ids, kv_type=t, device="cpu"))
        for t in ("f32", "f16", *TYPES)
    }
    off = {t: float((rows[t] - rows["f32"]).abs().max()) for t in rows}
    assert 0 < off["f16"] < off["q8_0"] / 4 < off["f8_e4m3"] / 8 < 0.1
    for t in TYPES:
        assert rows[t][len(prompt) - 1 : -1].argmax(-1).tolist() == answer


@pytest.mark.sampled(1, most=2)
@pytest.mark.parametrize(
    ("k", "v"),
    [("q8_0", "f16"), ("f16", "q8_0"), ("f8_e4m3", "f32"), ("bf16", "f8_e4m3"), ("q5_0", "f16")],
)
def test_keys_and_values_are_off_by_what_their_types_are_off(k: str, v: str) -> None:
    """A pair is near the sum of the effects of each type on its own side, and a type on the wrong side shows."""
    ids = random.Random(3).choices(range(256), k=40)

    def off(**types: str) -> torch.Tensor:
        return torch.as_tensor(compute_logits(QWEN35, ids, device="cpu", **types)) - right

    right = torch.as_tensor(compute_logits(QWEN35, ids, kv_type="f32", device="cpu"))
    pair, keys, values = (off(kv_type=a, kv_type_v=b) for a, b in ((k, v), (k, "f32"), ("f32", v)))
    assert pair.norm() > 0
    assert (pair - keys - values).norm() < 0.1 * max(keys.norm(), values.norm())
    whole = max(off(kv_type=t).norm() for t in (k, v))
    assert pair.norm() < 1.2 * whole


def test_a_drafter_may_have_types_of_its_own() -> None:
    s = EngineSettings(kv_type="q8_0", kv_type_v="f16")
    for own, want in (
        ({}, "q8_0/f16"),
        ({"draft_kv_type": "q4_0"}, "q4_0"),
        ({"draft_kv_type_v": "q5_1"}, "q8_0/q5_1"),
        ({"draft_kv_type": "f16", "draft_kv_type_v": "q4_1"}, "f16/q4_1"),
    ):
        assert draft_format(replace(s, **own)).name == want  # type: ignore[arg-type]
    r = MAKERS["mtp"](np=2, kv_type="f32", draft_kv_type="q8_0", draft_kv_type_v="q4_0")
    drafter = r.loop.drafter
    assert drafter is not None and r.loop.memory.kv_format.name == "f32"
    assert {pool.kv.name for pool in drafter.pools()} == {"q8_0/q4_0"}
    (prompt, text), *_ = texts(QWEN35, "f32", None).items()
    heard = r.generate(prompt, N_TEXT)
    assert heard.tokens == text and heard.timings.draft_n > 0


def test_a_model_whose_keys_are_its_values_has_the_type_of_its_keys(
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = FIXTURES / "deepseek2.gguf"
    with caplog.at_level("WARNING", "pyspec.engine.plan.describe"):
        r = plain_rig(path, kv_type="bf16", kv_type_v="q8_0")
    assert "both are bf16 (-ctk), and -ctv q8_0 is not used" in caplog.text
    prompt = [3, 70, 33, 120]
    assert r.generate(prompt, 8).tokens == plain_rig(path, kv_type="bf16").generate(prompt, 8).tokens


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize(("kv_type", "kv_type_v"), FORMATS)
@pytest.mark.parametrize("kind", ["mtp", "mtp-demo", "dflash-demo"])
def test_what_the_prefix_cache_gives_back_is_what_was_computed(
    kind: str, kv_type: str, kv_type_v: str | None
) -> None:
    r, cold = (MAKERS[kind](np=2, page_size=16, kv_type=kv_type, kv_type_v=kv_type_v) for _ in range(2))
    (prompt, text), *_ = texts(PATHS[kind], kv_type, kv_type_v).items()
    r.generate(prompt, N_TEXT)
    turn = [*prompt, *text, 5, 6, 7]
    want = cold.generate(turn, 20, cache_prompt=False)
    for _ in range(2):  # from the end of the first request, then from the end of this one
        warm = r.generate(turn, 20)
        assert warm.timings.cache_n > 0
        assert warm.tokens == want.tokens


def test_a_page_that_is_gone_on_from_is_copied_with_its_scales() -> None:
    r = rig(FIXTURES / "qwen3_tied_q8_0.gguf", np=2, spec_type="none", kv_type="q8_0", page_size=16)
    first = random.Random(1).choices(range(256), k=40)
    r.generate(first, 2)
    r.generate([*first[:37], 1, 2, 3], 2)
    old, new = r.filed(first)[32:37], r.filed([*first[:37], 1, 2, 3])[32:37]
    assert len(old) == len(new) == 5 and old != new
    for pool in r.loop.memory.kv.values():
        assert len(pool.planes) == 4
        for plane in pool.planes:
            assert plane[old].any() and torch.equal(plane[old], plane[new])


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize(("kv_type", "kv_type_v"), [("f16", None), *FORMATS])
@pytest.mark.parametrize("kind", ["mtp", "dflash-demo"])
def test_the_memory_plan_has_the_bytes_that_are_taken(
    kind: str, kv_type: str, kv_type_v: str | None
) -> None:
    r = MAKERS[kind](np=3, kv_type=kv_type, kv_type_v=kv_type_v)
    draft = DEMO_DRAFT if kind == "dflash-demo" else None
    settings = EngineSettings(
        np=3,
        ctx=256,
        kv_type=kv_type,
        kv_type_v=kv_type_v,
        n_draft_max=4 if kind == "mtp" else 5,
        draft_path=draft,
    )
    plan = plan_memory(replace(describe(PATHS[kind], settings), n_page=r.loop.table.n_page))
    drafter = r.loop.drafter
    assert drafter is not None
    assert plan.kv == r.loop.memory.kv_bytes
    taken = [t.numel() * t.element_size() for pool in drafter.pools() for t in pool.tensors()]
    assert plan.draft_kv == sum(taken) > 0


def test_heads_that_q8_0_can_not_hold_are_refused_before_anything_is_allocated() -> None:
    with pytest.raises(ModelError, match="the heads are 16 wide"):
        plain_rig(tiny("qwen3"), kv_type="q8_0")
    assert plain_rig(tiny("qwen3"), kv_type="f8_e4m3").generate([1, 2, 3], 4).tokens


@pytest.mark.parametrize("name", ["deepseek2", "gemma3", "llama", "qwen35"])
def test_turned_heads_give_the_logits_of_heads_as_they_are(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores do not change, and sums of values are turned back; also where the keys are the values."""
    ids = random.Random(4).choices(range(200), k=30)

    def logits() -> torch.Tensor:
        found = compute_logits(FIXTURES / f"{name}.gguf", ids, chunk=13, kv_type="f32", device="cpu")
        return torch.as_tensor(found)

    plain = logits()
    monkeypatch.setitem(KV_TYPES, "f32", replace(KV_TYPES["f32"], turns=True))
    off = (logits() - plain).abs().max()
    assert 0 < off < 2e-4 * plain.abs().max()
