"""Suffix drafts beside a draft model and beside EAGLE-3: one verify has drafts of both, and the text stays the target's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from engine_rig import Heard, Rig, rig
from known_texts import N_TEXT, joined, known_texts, tiny
from rewrite import rewrite

from pyspec import synth
from pyspec.engine.arguments import pair_of
from pyspec.engine.loop.job import Job
from pyspec.engine.named import Named
from pyspec.errors import ConfigError
from pyspec.gguf import open_gguf
from pyspec.slots.drafts import Drafts

TARGETS = ("qwen3", "qwen35")
KINDS = ("draft", "eagle3")


@cache
def drafter(kind: str, target: str) -> Path:
    """A drafter that is right at times: the target with another norm before its head, or a random layer."""
    path = Path(mkdtemp(prefix="pyspec-beside-")) / f"{kind}-{target}.gguf"
    if kind == "eagle3":
        return synth.write(target, path, quant="f32", tiny=True, drafter=True, kind="eagle3")
    file, name = open_gguf(tiny(target)), "output_norm.weight"
    own = np.array(file.raw(name)).view("<f4")
    other = (own * np.random.default_rng(3).normal(1, 0.4, own.shape)).astype("<f4")
    return rewrite(tiny(target), path, drop=name.__eq__, add={name: other})


def beside(kind: str, target: str, **settings: object) -> Rig:
    return rig(
        tiny(target),
        draft_path=drafter(kind, target),
        spec_type=f"{kind},suffix",
        n_draft_fixed=True,
        **settings,
    )


def watch(r: Rig) -> list[tuple[int, int]]:
    """(slots with a suffix draft, slots with one of the drafter's) of each verify that the host drafts for."""
    seen: list[tuple[int, int]] = []
    speculator, draft = r.loop.speculator, r.loop.speculator.draft

    def watched(jobs: Sequence[Job], *beside: int) -> dict[int, Drafts]:
        found = draft(jobs, *beside)
        with_drafts = {slot for slot, drafts in found.items() if drafts.tokens}
        n_suffix = len(with_drafts & set(speculator.controller.offered))
        seen.append((n_suffix, len(with_drafts) - n_suffix))
        return found

    speculator.draft = watched  # type: ignore[method-assign]
    return seen


def assert_texts(heard: Sequence[Heard], texts: dict[tuple[int, ...], list[int]]) -> None:
    assert [h.tokens for h in heard] == list(texts.values())


@pytest.mark.sampled(4, most=4)
@pytest.mark.parametrize("is_ahead", [False, True], ids=["plain loop", "ahead"])
@pytest.mark.parametrize("np", [1, 3, 10])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_both_are_in_one_verify_and_the_text_is_the_targets(
    kind: str, target: str, np: int, is_ahead: bool
) -> None:
    """Texts that were answered before are found by suffixes; new ones are the drafter's."""
    texts = known_texts(tiny(target))
    again, r = dict(list(texts.items())[:5]), beside(kind, target, np=np, ubatch=40)
    r.overwrite_results()
    if is_ahead:
        r.run_ahead(defers=True)
    seen = watch(r)
    assert_texts(joined(r, again, cancels=True), again)
    assert_texts(joined(r, texts, cancels=True), texts)
    metrics = r.loop.metrics()
    assert 0 < metrics.suffix_accepted_tokens <= metrics.suffix_draft_tokens < metrics.draft_tokens
    assert any(n_suffix for n_suffix, _ in seen) and any(n_own for _, n_own in seen)
    if np > 1:
        assert any(n_suffix and n_own for n_suffix, n_own in seen), "both kinds in one verify"


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_that_pauses_for_suffix_drafts_goes_on_where_it_was(kind: str) -> None:
    """Behind rounds of suffix drafts its own are those that it makes without any."""
    texts = list(known_texts(tiny("qwen35")).items())[:3]

    def drafts_of(*, suffix: bool) -> dict[int, list[int]]:
        """By tokens before, the drafts of the last text, which is answered for the second time."""
        r, found = beside(kind, "qwen35", np=1), {}
        if not suffix:
            r.loop.speculator.suffixes.drafts = None
        own = r.loop.drafter
        assert own is not None
        draft = own.draft

        def watched(requests):  # type: ignore[no-untyped-def]
            made = draft(requests)
            found.update({q.slot.n_past: [*d.tokens] for q, d in zip(requests, made, strict=True)})
            return made

        for prompt, _ in texts:
            r.generate(prompt, N_TEXT // 2)
        own.draft = watched  # type: ignore[method-assign]
        h = r.generate(texts[-1][0], N_TEXT, cache_prompt=False)
        assert h.tokens == texts[-1][1] and (h.timings.suffix_n > 0) == suffix
        return found

    with_suffixes, alone = drafts_of(suffix=True), drafts_of(suffix=False)
    both = with_suffixes.keys() & alone.keys()
    assert both and all(with_suffixes[n] == alone[n] for n in both)


@pytest.mark.parametrize(
    ("draft", "kind"), [(None, "mtp,suffix"), (None, "suffix"), ("none", "mtp"), ("mtp", "mtp,suffix")]
)
def test_two_names_for_a_drafter_are_refused(draft: str | None, kind: str) -> None:
    """Neither goes silently before the other."""
    with pytest.raises(ConfigError, match=f"draft is {draft!r}.*but --spec-type is '{kind}'"):
        pair_of(Named("demo"), draft, {"spec_type": kind})
    assert pair_of(Named("demo"), kind, {"spec_type": kind})[1].spec_type == kind
    assert pair_of(Named("demo"), draft, {"spec_type": "auto"})[1].spec_type == (draft or "none")


def test_an_engine_without_drafts_says_why_and_the_way_out() -> None:
    path = Path(__file__).parents[1] / "fixtures" / "llama.gguf"
    assert rig(path).info.draft_note == "speculation: off (no drafter); --spec-type suffix needs no file"
    assert rig(path, spec_type="none").info.draft_note == "speculation: off (--spec-type none)"
