"""The text of real models is that of plain single-slot decoding, for every drafter and number of slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from draft_fakes import FAKES
from engine_rig import DEMO, DEMO_DRAFT, FIXTURES, GREEDY, Rig, plain_rig, rig, rig_for
from harness import ADDED
from known_texts import N_TEXT, continuation, demo_prompts, joined, known_texts, tiny

from pyspec.request import SamplingParams

QWEN35 = FIXTURES / "qwen35.gguf"
GEMMA3 = FIXTURES / "gemma3.gguf"
DEEPSEEK4, DEEPSEEK4_MTP = FIXTURES / "deepseek4.gguf", FIXTURES / "deepseek4_mtp.gguf"


def faked(kind: str, path: Path, **settings: object) -> Rig:
    return rig_for(path, FAKES[kind](5, text=partial(continuation, path)), **settings)


def fixed(path: Path, **settings: object) -> Rig:
    return rig(path, **({"n_draft_fixed": True} | settings))


MAKERS: dict[str, Callable[..., tuple[Path, Rig]]] = {
    "mtp": lambda **s: (QWEN35, fixed(QWEN35, spec_type="mtp", n_draft_max=4, **s)),
    "ngram": lambda **s: (QWEN35, fixed(QWEN35, spec_type="ngram", ngram_match=1, **s)),
    "dflash": lambda **s: (
        tiny("qwen35"),
        fixed(tiny("qwen35"), draft_path=tiny("qwen35", drafter=True), **s),
    ),
    "suffix": lambda **s: (QWEN35, fixed(QWEN35, spec_type="suffix", suffix_n_max=6, **s)),
    "mtp-suffix": lambda **s: (
        QWEN35,
        fixed(QWEN35, spec_type="mtp,suffix", n_draft_max=2, suffix_n_max=6, **s),
    ),
    "dflash-suffix": lambda **s: (
        tiny("qwen35"),
        fixed(tiny("qwen35"), draft_path=tiny("qwen35", drafter=True), spec_type="dflash,suffix", **s),
    ),
    "suffix-gemma3": lambda **s: (GEMMA3, fixed(GEMMA3, spec_type="suffix", **s)),
    "dflash-fork": lambda **s: (
        tiny("qwen3"),
        fixed(tiny("qwen3"), draft_path=tiny("qwen3", drafter=True, fork=True), **s),
    ),
    "sidecar": lambda **s: (
        tiny("qwen35", mtp=False),
        fixed(tiny("qwen35", mtp=False), draft_path=tiny("qwen35", sidecar=True), n_draft_max=2, **s),
    ),
    **{
        f"{kind}-hybrid": partial(lambda kind, **s: (QWEN35, faked(kind, QWEN35, **s)), kind)
        for kind in FAKES
    },
    "fickle-llama": lambda **s: (FIXTURES / "llama.gguf", faked("fickle", FIXTURES / "llama.gguf", **s)),
    **{
        f"{kind}-deepseek4": partial(lambda kind, **s: (DEEPSEEK4, faked(kind, DEEPSEEK4, **s)), kind)
        for kind in ("liar", "fickle")
    },
    **{
        f"mtp{n}-deepseek4": partial(
            lambda n, **s: (DEEPSEEK4, fixed(DEEPSEEK4, draft_path=DEEPSEEK4_MTP, n_draft_max=n, **s)), n
        )
        for n in range(1, 6)
    },
    **{
        f"ngram-{name}": partial(
            lambda path, **s: (path, fixed(path, spec_type="ngram", ngram_match=1, **s)),
            FIXTURES / f"{name}.gguf",
        )
        for name in ADDED
    },
    **{
        f"{kind}-gemma3": partial(lambda kind, **s: (GEMMA3, faked(kind, GEMMA3, **s)), kind)
        for kind in ("liar", "fickle")
    },
    "none": lambda **s: (QWEN35, rig(QWEN35, spec_type="none", **s)),
}


CASES = [
    *((kind, np) for kind in ("mtp", "dflash", "ngram", "liar-hybrid", "fickle-hybrid") for np in (1, 2, 4, 8)),
    *((kind, np) for kind in ("suffix", "mtp-suffix", "dflash-suffix", "suffix-gemma3") for np in (1, 2, 5, 8, 10)),
    *((f"mtp{n}-deepseek4", np) for n in range(1, 6) for np in (1, 2, 4, 8)),
    *((kind, 3) for kind in ("liar-deepseek4", "fickle-deepseek4")),
    *((f"ngram-{name}", np) for name in ADDED for np in (1, 2, 4, 8)),
    *((kind, 3) for kind in ("liar-gemma3", "fickle-gemma3")),
    *((kind, 3) for kind in ("none", "dflash-fork", "sidecar", "oracle-hybrid", "wild-hybrid", "broken-hybrid", "fickle-llama")),
]  # fmt: skip


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize(("kind", "np"), CASES)
def test_same_text_with_staggered_joins(kind: str, np: int) -> None:
    path, r = MAKERS[kind](np=np, ubatch=40)
    texts = known_texts(path)
    heard = joined(r, texts)
    for h, text in zip(heard, texts.values(), strict=True):
        assert h.tokens == text, f"{h.job.id} in slot {h.slot}"
    accepted = sum(h.timings.draft_n_accepted for h in heard)
    if kind.startswith(("oracle", "wild", "fickle")):
        assert accepted > len(heard), "accepted drafts were part of this"
    if kind.startswith("liar"):
        assert accepted == 0 and sum(h.timings.draft_n for h in heard) > 300


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(
    "kind",
    [
        *("mtp", "dflash", "fickle-hybrid", "liar-hybrid", "mtp-suffix"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mtp3-deepseek4", "fickle-deepseek4")),
    ],
)
def test_cancels_at_any_moment_leave_the_others_their_text(kind: str) -> None:
    path, r = MAKERS[kind](np=3, ubatch=24)
    texts = list(known_texts(path).items())
    for rounds in range(7):  # in the queue, in the prompt, while decoding
        kept = [(r.submit(p, N_TEXT), text) for p, text in texts[:2]]
        gone = [r.submit(p, N_TEXT) for p, _ in texts[2:5]]
        for _ in range(rounds):
            r.loop.step()
        for h in gone:
            r.loop.cancel(h.job)
        late, text = r.submit(texts[5][0], 10), texts[5][1]
        r.run()
        assert late.tokens == text[:10]
        for h, want in kept:
            assert h.tokens == want
        for h, (_, want) in zip(gone, texts[2:5], strict=True):
            assert h.finish == "cancelled" and h.tokens == want[: len(h.tokens)]


def test_two_hundred_refused_rounds_leave_no_trace() -> None:
    """S6: random drafts, all rolled back, against no speculation."""
    prompt = next(iter(known_texts(QWEN35)))
    want = plain_rig(QWEN35).generate(prompt, 201).tokens
    liar = rig_for(
        QWEN35, FAKES["liar"](5, text=lambda tokens, n: [(sum(tokens) * 7 + i) % 298 for i in range(n)])
    )
    h = liar.generate(prompt, 201)
    assert h.timings.n_rounds > 190
    assert h.tokens == want


SAMPLED = SamplingParams(
    temperature=0.8, ignore_eos=True, repeat_penalty=1.1, dry_multiplier=0.5, dry_sequence_breakers=()
)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ["mtp", "dflash", "ngram", "fickle-llama", "dflash-suffix"])
def test_a_seed_gives_its_text_in_any_slot_beside_any_neighbours(kind: str) -> None:
    path, r = MAKERS[kind](np=4)
    prompt = list(known_texts(path))[1]
    alone = plain_rig(path)
    want = {seed: alone.generate(prompt, 30, replace(SAMPLED, seed=seed)).tokens for seed in (1, 2, 3)}
    assert len({tuple(t) for t in want.values()}) == 3
    for slot in range(4):
        heard = [
            r.submit(prompt, 30, replace(SAMPLED, seed=seed), slot=(slot + seed) % 4) for seed in want
        ]
        r.submit(list(known_texts(path))[slot], 17, SAMPLED, slot=slot)
        r.run()
        for h, (seed, text) in zip(heard, want.items(), strict=True):
            assert h.tokens == text, f"seed {seed} in slot {h.slot}"


def test_the_demo_pair_gives_its_answers_in_eight_slots() -> None:
    r = rig(DEMO, np=8, draft_path=DEMO_DRAFT, n_draft_max=5, n_draft_fixed=True)
    chosen = demo_prompts()[::4][:10]
    heard = [r.submit(p, 200, replace(GREEDY, ignore_eos=False)) for p, _ in chosen]
    r.run()
    for h, (_, answer) in zip(heard, chosen, strict=True):
        assert h.tokens == answer and h.finish == "eos"
    t = [h.timings for h in heard]
    assert sum(x.draft_n_accepted for x in t) > 0.3 * sum(x.draft_n for x in t)


def test_eight_slots_accept_what_one_slot_accepts() -> None:
    """Same prompts, same drafts: per-slot acceptance does not depend on the neighbours."""
    chosen, params = demo_prompts()[2::5][:8], replace(GREEDY, ignore_eos=False)
    alone, together = (
        rig(DEMO, np=np, draft_path=DEMO_DRAFT, n_draft_max=5, n_draft_fixed=True) for np in (1, 8)
    )
    one = [alone.generate(p, 60, params, cache_prompt=False).timings for p, _ in chosen]
    heard = [together.submit(p, 60, params) for p, _ in chosen]
    together.run()
    for a, h in zip(one, heard, strict=True):
        b = h.timings
        assert abs(a.draft_n_accepted / a.draft_n - b.draft_n_accepted / b.draft_n) < 0.05
    assert (
        abs(sum(a.draft_n_accepted for a in one) - sum(h.timings.draft_n_accepted for h in heard)) <= 3
    )
