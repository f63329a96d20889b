"""The text of real models is that of plain single-slot decoding, for every drafter and number of slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from block_drafters import dflash2_of
from draft_fakes import FAKES
from engine_rig import DEMO, DEMO_DRAFT, FIXTURES, GREEDY, Rig, plain_rig, rig, rig_for
from harness import ADDED
from known_texts import N_TEXT, continuation, demo_prompts, joined, known_texts, tiny
from sampling import slow

from pyspec.request import SamplingParams, Started

QWEN35 = FIXTURES / "qwen35.gguf"
GEMMA3 = FIXTURES / "gemma3.gguf"
QWEN4EXP_MTP = FIXTURES / "qwen4exp-mtp.gguf"
GLM5_NEXT = FIXTURES / "glm5-next.gguf"
DEEPSEEK4, DEEPSEEK4_MTP = FIXTURES / "deepseek4.gguf", FIXTURES / "deepseek4_mtp.gguf"
EXPERTS = ("nemotron_latent", "qwen35moe")  # Mamba-2 with experts, Gated DeltaNet with experts
NEMOTRON = (
    "nemotron_moe",
    "nemotron_latent_q8_0",
)  # experts at full width; as Q5_0, unpacked where they are used
LATENT = FIXTURES / "nemotron_latent.gguf"
LATENT_TEXTS = partial(known_texts, FIXTURES / "nemotron_latent.gguf")


def faked(kind: str, path: Path, **settings: object) -> Rig:
    return rig_for(path, FAKES[kind](5, text=partial(continuation, path)), **settings)


Maker = Callable[..., tuple[Path, Rig]]
"""Of settings: a target, and a rig of it with a drafter."""


def of(path: Path | Callable[[], Path], **given: object) -> Maker:
    """A drafter of a file; what is called makes its file at the first use."""

    def make(**settings: object) -> tuple[Path, Rig]:
        where = path() if callable(path) else path
        own = {k: v() if callable(v) else v for k, v in given.items()}
        return where, rig(where, **({"n_draft_fixed": True} | own | settings))

    return make


def fakes(name: str, path: Path, kinds: Iterable[str] = ("liar", "fickle")) -> dict[str, Maker]:
    return {
        f"{kind}-{name}": partial(lambda kind, **s: (path, faked(kind, path, **s)), kind)
        for kind in kinds
    }


TINY, TRUNK = partial(tiny, "qwen35"), partial(tiny, "qwen35", mtp=False)
DFLASH = partial(tiny, "qwen35", drafter=True)
QWEN4EXP = partial(tiny, "qwen4exp", mtp=False)
MAKERS: dict[str, Maker] = {
    "mtp": of(QWEN35, spec_type="mtp", n_draft_max=4),
    "ngram": of(QWEN35, spec_type="ngram", ngram_match=1),
    "dflash": of(TINY, draft_path=DFLASH),
    "suffix": of(QWEN35, spec_type="suffix", suffix_n_max=6),
    "mtp-suffix": of(QWEN35, spec_type="mtp,suffix", n_draft_max=2, suffix_n_max=6),
    "dflash-suffix": of(TINY, draft_path=DFLASH, spec_type="dflash,suffix"),
    "suffix-gemma3": of(GEMMA3, spec_type="suffix"),
    "dflash-fork": of(partial(tiny, "qwen3"), draft_path=partial(tiny, "qwen3", drafter=True, fork=True)),
    "sidecar": of(TRUNK, draft_path=partial(tiny, "qwen35", sidecar=True), n_draft_max=2),
    **fakes("hybrid", QWEN35, FAKES),
    **fakes("llama", FIXTURES / "llama.gguf", ["fickle"]),
    **fakes("deepseek4", DEEPSEEK4),
    **fakes("qwen4exp", QWEN4EXP_MTP),
    **fakes("glm5-next", GLM5_NEXT),
    **fakes("gemma3", GEMMA3),
    **{f"mtp{n}-deepseek4": of(DEEPSEEK4, draft_path=DEEPSEEK4_MTP, n_draft_max=n) for n in range(1, 6)},
    **{f"mtp{n}-qwen4exp": of(QWEN4EXP_MTP, spec_type="mtp", n_draft_max=n) for n in (1, 3, 5)},
    "dflash2-qwen4exp": of(QWEN4EXP, draft_path=lambda: dflash2_of(tiny("qwen4exp", drafter=True), 320)),
    "suffix-qwen4exp": of(QWEN4EXP_MTP, spec_type="suffix"),
    **{f"mtp{n}-glm5-next": of(GLM5_NEXT, spec_type="mtp", n_draft_max=n) for n in (1, 4)},
    "dflash2-glm5-next": of(partial(tiny, "glm5-next", mtp=False), draft_path=lambda: dflash2_of(tiny("glm5-next", drafter=True), 320)),
    "suffix-glm5-next": of(GLM5_NEXT, spec_type="suffix"),
    **{f"mtp{n}-{name}": of(FIXTURES / f"{name}.gguf", spec_type="mtp", n_draft_max=n) for name in EXPERTS for n in (1, 2, 3)},
    **{f"mtp2-{name}": of(FIXTURES / f"{name}.gguf", spec_type="mtp", n_draft_max=2) for name in NEMOTRON},
    **{kind: maker for name in EXPERTS for kind, maker in fakes(name, FIXTURES / f"{name}.gguf", ("liar", "oracle", "fickle")).items()},
    **{f"ngram-{name}": of(FIXTURES / f"{name}.gguf", spec_type="ngram", ngram_match=1) for name in (*ADDED, "nemotron_latent", "nemotron_dense")},
    "none": lambda **s: (QWEN35, rig(QWEN35, spec_type="none", **s)),
}  # fmt: skip


CASES = [
    *((kind, np) for kind in ("mtp", "dflash", "ngram", "liar-hybrid", "fickle-hybrid") for np in (1, 2, 4, 8)),
    *((kind, np) for kind in ("suffix", "mtp-suffix", "dflash-suffix", "suffix-gemma3") for np in (1, 2, 5, 8, 10)),
    *((f"mtp{n}-deepseek4", np) for n in range(1, 6) for np in (1, 2, 4, 8)),
    *((kind, 3) for kind in ("liar-deepseek4", "fickle-deepseek4", "liar-qwen4exp", "fickle-qwen4exp", "liar-glm5-next", "fickle-glm5-next")),
    *((f"{kind}-qwen4exp", np) for kind in ("mtp1", "mtp3", "mtp5", "dflash2", "suffix") for np in (1, 2, 4, 8)),
    *((f"{kind}-glm5-next", np) for kind in ("mtp1", "mtp4", "dflash2", "suffix") for np in (1, 2, 4, 8)),
    *((f"ngram-{name}", np) for name in ADDED for np in (1, 2, 4, 8)),
    *((kind, 3) for kind in ("liar-gemma3", "fickle-gemma3")),
    *((f"mtp{n}-{name}", np) for name in EXPERTS for n in (1, 2, 3) for np in (1, 2, 4, 8)),
    *((f"{kind}-{name}", 3) for name in EXPERTS for kind in ("liar", "oracle", "fickle")),
    *(("ngram-nemotron_latent", np) for np in (1, 2, 4, 8)),
    *((kind, 3) for kind in ("ngram-nemotron_dense", "mtp2-nemotron_moe", "mtp2-nemotron_latent_q8_0")),
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
    accepted, drafted = (
        sum(getattr(h.timings, x) for h in heard) for x in ("draft_n_accepted", "draft_n")
    )
    if kind.startswith(("oracle", "wild", "fickle")):
        assert accepted > len(heard), "accepted drafts were part of this"
    if kind.startswith(("oracle", "fickle")):
        assert accepted > 0.9 * drafted if kind.startswith("oracle") else accepted < drafted
    if kind.startswith("liar"):
        assert accepted == 0 and drafted > 300
    if kind.startswith(("mtp", "ngram")):
        assert drafted > (100 if kind.startswith("mtp") else 50)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(
    "kind",
    [
        *("mtp", "dflash", "fickle-hybrid", "liar-hybrid", "mtp-suffix"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mtp3-deepseek4", "fickle-deepseek4", "mtp3-nemotron_latent", "mtp3-qwen35moe")),
    ],
)  # fmt: skip
def test_cancels_at_any_moment_leave_the_others_their_text(kind: str) -> None:
    path, r = MAKERS[kind](np=3, ubatch=24)
    texts = list(known_texts(path).items())
    for rounds in range(7):  # in the queue, in the prompt, while decoding
        kept = [(r.submit(p, N_TEXT), text) for p, text in texts[:2]]
        gone = [r.submit(p, N_TEXT) for p, _ in texts[2:5]]
        r.steps(rounds)
        for h in gone:
            r.loop.cancel(h.job)
        late, text = r.submit(texts[5][0], 10), texts[5][1]
        r.run()
        assert late.tokens == text[:10]
        for h, want in kept:
            assert h.tokens == want
        for h, (_, want) in zip(gone, texts[2:5], strict=True):
            assert h.finish == "cancelled" and h.tokens == want[: len(h.tokens)]


@pytest.mark.parametrize(
    ("path", "least"), [(QWEN35, 190), slow(LATENT, 180)], ids=lambda x: getattr(x, "stem", None)
)
def test_two_hundred_refused_rounds_leave_no_trace(path: Path, least: int) -> None:
    """S6: random drafts, all rolled back, against no speculation."""
    prompt = next(iter(known_texts(path)))
    want = plain_rig(path).generate(prompt, 201).tokens
    liar = rig_for(
        path, FAKES["liar"](5, text=lambda tokens, n: [(sum(tokens) * 7 + i) % 298 for i in range(n)])
    )
    h = liar.generate(prompt, 201)
    assert h.timings.n_rounds > least
    assert h.tokens == want


SAMPLED = SamplingParams(
    temperature=0.8, ignore_eos=True, repeat_penalty=1.1, dry_multiplier=0.5, dry_sequence_breakers=()
)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(
    "kind",
    [
        "mtp",
        "dflash",
        "ngram",
        "fickle-llama",
        "dflash-suffix",
        "mtp3-nemotron_latent",
        "mtp3-qwen35moe",
    ],
)
def test_a_seed_gives_its_text_in_any_slot_beside_any_neighbours(kind: str) -> None:
    path, r = MAKERS[kind](np=5)
    prompt, alone = list(known_texts(path))[1], plain_rig(path)
    params = [
        *(replace(SAMPLED, seed=seed) for seed in (1, 2, 3)),
        replace(GREEDY, temperature=0.8, seed=3),
    ]
    want = [alone.generate(prompt, 30, p).tokens for p in params]
    assert len({tuple(t) for t in want}) == 4
    for slot in range(5):
        heard = [r.submit(prompt, 30, p, slot=(slot + i) % 5) for i, p in enumerate(params, 1)]
        r.submit(list(known_texts(path))[slot], 17, SAMPLED, slot=slot)
        r.run()
        for h, text in zip(heard, want, strict=True):
            assert h.tokens == text, f"seed {h.request.params.seed} in slot {h.slot}"


def test_the_demo_pair_gives_its_answers_in_eight_slots() -> None:
    r = rig(DEMO, np=8, draft_path=DEMO_DRAFT, n_draft_max=5, n_draft_fixed=True)
    chosen = demo_prompts()[::4][:10]
    heard = r.all([p for p, _ in chosen], 200, replace(GREEDY, ignore_eos=False))
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
    heard = together.all([p for p, _ in chosen], 60, params)
    for a, h in zip(one, heard, strict=True):
        b = h.timings
        assert abs(a.draft_n_accepted / a.draft_n - b.draft_n_accepted / b.draft_n) < 0.05
    assert (
        abs(sum(a.draft_n_accepted for a in one) - sum(h.timings.draft_n_accepted for h in heard)) <= 3
    )


@pytest.mark.parametrize("name", EXPERTS)
def test_packed_experts_give_the_same_text(name: str) -> None:
    prompt, text = next(iter(known_texts(FIXTURES / f"{name}.gguf").items()))
    assert plain_rig(FIXTURES / f"{name}.gguf", weights="packed").generate(prompt, N_TEXT).tokens == text


def test_a_prompt_that_was_shared_goes_on_from_its_checkpoint() -> None:
    """State, window and the MTP block's hidden state come back; the text is that of a cold start."""
    (prompt, text), r = list(LATENT_TEXTS().items())[4], rig(LATENT, spec_type="mtp", n_draft_max=3)
    long = next(p for p in LATENT_TEXTS() if len(p) == 101)
    want = plain_rig(LATENT).generate([*long, 5, 6], 20).tokens
    r.generate(long, 20)
    h = r.generate([*long, 5, 6], 20)
    started = next(e for e in h.events if isinstance(e, Started))
    assert h.tokens == want and started.n_cached > 64
    assert r.generate(prompt, N_TEXT).tokens == text


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nemotron_latent", "mtp"),
        ("nemotron_dense", "none"),
        ("qwen35moe", "mtp"),
        ("qwen35moe_fused_tied", "none"),
    ],
)
def test_without_a_word_a_file_with_the_block_drafts_with_it(name: str, kind: str) -> None:
    r = rig(FIXTURES / f"{name}.gguf", np=2)
    assert r.info.drafter == kind
    if name == "qwen35moe":
        prompt, text = list(known_texts(FIXTURES / "qwen35moe.gguf").items())[1]
        assert r.info.arch == name and r.generate(prompt, N_TEXT).tokens == text


def test_a_file_of_the_block_alone_drafts_for_a_target_without_it() -> None:
    target, block = tiny("nemotron_h_moe", mtp=False), tiny("nemotron_h_moe", sidecar=True)
    r = rig(target, np=2, draft_path=block, n_draft_max=2, n_draft_fixed=True)
    texts = known_texts(target, 4)
    heard = r.all(texts, N_TEXT)
    assert [h.tokens for h in heard] == list(texts.values())
    assert r.info.drafter == "mtp" and sum(h.timings.draft_n for h in heard) > 50
