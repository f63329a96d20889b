"""Suffix drafts beside a draft model, EAGLE-3 and a block drafter: one verify has drafts of both, the text stays, and tokens a round on known texts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from engine_rig import Heard, Rig, rig
from known_texts import N_TEXT, joined, known_texts, tiny
from plans import choose
from rewrite import rewrite
from sampling import slow

from pyspec import synth
from pyspec.draft.blocks import BlockLength
from pyspec.draft.suffix_drafts import SuffixDrafts
from pyspec.engine.arguments import pair_of
from pyspec.engine.loop.job import Job
from pyspec.engine.named import Named
from pyspec.engine.policy.controller import Controller
from pyspec.errors import ConfigError
from pyspec.gguf import open_gguf
from pyspec.slots.drafts import Drafts
from pyspec.slots.table import Slot
from pyspec.text.tokenizer import Tokenizer

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


ROOT = Path(__file__).parents[2]
N_OWN, N_SUFFIX = 7, 15
PLAIN_MS, ROW_MS, BLOCK_MS = (
    7.0,
    0.06,
    0.9,
)  # a round, each row more, and a draft: a large model on a GPU


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(open_gguf(ROOT / "pyspec" / "demo" / "pyspec-demo.gguf").metadata)


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text))


@dataclass
class Trace:
    """The outcome of a replay."""

    n_token: int = 0
    n_round: int = 0
    n_suffix: int = 0
    ms: float = 0.0

    @property
    def mean_len(self) -> float:
        return self.n_token / self.n_round

    @property
    def rate(self) -> float:
        return self.n_token / self.ms


def controller() -> Controller:
    c = Controller(1, N_SUFFIX, n_own=N_OWN, block=BlockLength(N_OWN + 1))
    for rows in range(1, N_SUFFIX + 2):
        for _ in range(5):
            c.costs.verify.add(rows, PLAIN_MS + ROW_MS * (rows - 1))
    for _ in range(5):
        c.costs.draft.add(N_OWN + 1, BLOCK_MS)
    return c


def replay(texts: Sequence[tuple[str, str]], chance: float, suffixes: SuffixDrafts | None) -> Trace:
    """Answer each prompt with its text. chance: that a token of the drafter is right."""
    trace, c, rng = Trace(), controller(), random.Random(1)
    for prompt, text in texts:
        read, tokens = ids(prompt), ids(text)
        coins = [rng.random() < chance for _ in tokens]  # the same with suffixes and without
        slot = Slot(0, tokens=read)
        c.begin(0)
        if suffixes is not None:
            suffixes.begin(slot, tuple(read), keeps=True)
            for _ in range(len(read) // 2048 + 1):
                suffixes.advance(2048)
        done = 1
        while done < len(tokens):
            most = len(tokens) - done - 1
            offers = {}
            if suffixes is not None:
                offer = suffixes.draft(slot, tokens[done - 1], min(most, N_SUFFIX))
                offers = {0: offer.survival} if offer.tokens else {}
            (n,) = choose(c, [(0, min(most, N_OWN))], offers)
            if 0 in c.offered:
                right = [a == b for a, b in zip(offer.tokens[:n], tokens[done:], strict=False)]
            else:
                right = coins[done : done + n]
            n_right = right.index(False) if False in right else len(right)
            if 0 in c.offered:
                trace.n_suffix += n_right
                suffixes.judge(0, n, n_right)
            else:
                c.record(0, n, n_right)
            ms = PLAIN_MS + ROW_MS * n
            c.timed(1 + n, ms, *((1, n) if n and 0 not in c.offered else (0, 0)), BLOCK_MS)
            trace.ms += ms + (BLOCK_MS if n and 0 not in c.offered else 0.0)
            slot.tokens = slot.tokens + tokens[done - 1 : done + n_right]
            done += n_right + 1
            trace.n_token += n_right + 1
            trace.n_round += 1
        if suffixes is not None:
            suffixes.end(slot)
            suffixes.advance(2048)
    return trace


def source(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def edits() -> list[tuple[str, str]]:
    """Files of this program, and the same with a name changed, a part left out, or lines between."""
    files = [
        source(f"pyspec/{name}.py")
        for name in ("engine/policy/costs", "draft/blocks", "constrain/phrases", "slots/drafts")
    ]
    renamed = [
        (f, f.replace("samples", "timings").replace("Estimate", "Ratio").replace("n_slot", "slots"))
        for f in files
    ]
    shorter = [
        (f, "\n".join(line for i, line in enumerate(f.split("\n")) if i % 40 < 30)) for f in files
    ]
    longer = [
        (
            f,
            f.replace("    def ", "    @logged\n    def ").replace(
                "    return ", "    log.debug(1)\n    return "
            ),
        )
        for f in files
    ]
    return [*renamed, *shorter, *longer]


def prose() -> list[tuple[str, str]]:
    """Parts of texts that are continued, and repeat nothing but words."""
    found = []
    for name in ("README.md", "docs/kernels.md", "docs/features.md", "LICENSE"):
        words = source(name)
        found += [
            (words[i : i + 2000], words[i + 2000 : i + 3200])
            for i in range(0, min(len(words) - 3200, 16000), 3200)
        ]
    return found


# Each third text alone is quick
@pytest.mark.parametrize(("chance", "step"), [(0.75, 3), slow(0.6, 1), slow(0.75, 1), slow(0.85, 1)])
def test_of_edits_more_tokens_come_a_round_than_with_the_drafter_alone(chance: float, step: int) -> None:
    texts = edits()[::step]
    alone, both = replay(texts, chance, None), replay(texts, chance, SuffixDrafts(N_SUFFIX))
    assert both.mean_len / alone.mean_len >= 1.3
    assert both.rate / alone.rate >= 1.3
    assert both.n_suffix > both.n_token / 2


@pytest.mark.parametrize(("chance", "step"), [(0.6, 3), slow(0.3, 1), slow(0.6, 1), slow(0.85, 1)])
def test_of_prose_no_fewer_tokens_come_and_no_slower(chance: float, step: int) -> None:
    texts = prose()[::step]
    alone = replay(texts, chance, None)
    both = replay(texts, chance, SuffixDrafts(N_SUFFIX, answer_bytes=1 << 22))
    assert both.mean_len / alone.mean_len >= 0.99
    assert both.rate / alone.rate >= 0.99


if __name__ == "__main__":
    for name, texts in (("edits", edits()), ("prose", prose())):
        for chance in (0.0, 0.3, 0.6, 0.75, 0.85, 0.95):
            alone = replay(texts, chance, None)
            both = replay(texts, chance, SuffixDrafts(N_SUFFIX, answer_bytes=1 << 22))
            print(  # noqa: T201
                f"{name} {chance}: {alone.mean_len:.2f} -> {both.mean_len:.2f} tokens a round ({both.mean_len / alone.mean_len:.2f}), "
                f"rate x{both.rate / alone.rate:.2f}, {both.n_suffix / both.n_token:.0%} by suffixes"
            )
