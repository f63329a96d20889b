"""Every drafter that has a file: drafts are a reference's, the text is the target's, passes are recorded, misfits are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import test_assistant as assistant
import test_dflash2 as dflash2
import test_draft_model as draft_model
import test_dspark_streams as streams
import test_eagle3 as eagle3
from block_drafters import DEVICE, Reference
from engine_rig import Rig, rig
from known_texts import N_TEXT, joined, known_texts, tiny
from plans import fix_lengths
from rewrite import rewrite
from sampling import few
from spark_streams import StreamsReference
from test_behind_prompt import Watched

from pyspec.draft.dflash import DFlash
from pyspec.engine.loop import behind_prompt
from pyspec.errors import BadTensors, ModelError, PairError
from pyspec.slots.drafts import DraftRequest, Drafts

Wanted = Callable[[int, list[int], int, int], list[int]]
"""Drafts of a reference: (which text, tokens with the anchor, number of drafts, rows of a block)."""


@dataclass(frozen=True)
class Kind:
    """A drafter of a target. `wanted`: its reference over whole texts, which is asked for every `step`th draft."""

    name: str
    target: Callable[[], Path]
    drafted: Callable[..., Rig]
    file: Callable[[], Path]
    wanted: Callable[[Sequence[list[int]]], Wanted]
    step: int = 1

    def check(
        self, seen: Sequence[tuple[list[int], list[int], int]], wholes: Sequence[list[int]]
    ) -> None:
        want = self.wanted(wholes)
        for tokens, drafts, n_row in seen[:: self.step]:
            at = next(i for i, whole in enumerate(wholes) if whole[: len(tokens)] == tokens)
            assert drafts == want(at, tokens, len(drafts), n_row), f"behind {len(tokens)} tokens"


def blocks(reference: Callable[[], Any], wholes: Sequence[list[int]]) -> Wanted:
    own = reference()
    features = [own.features(whole) for whole in wholes]
    return lambda at, tokens, n, n_row: own.draft(tokens[-1], features[at][: len(tokens) - 1], n, n_row)[
        0
    ]


def heads(reference: Callable[[], eagle3.Reference], wholes: Sequence[list[int]]) -> Wanted:
    own = reference()
    states = [own.states(whole) for whole in wholes]
    return lambda at, tokens, n, _: own.draft(tokens, states[at], n)


def _eagle(target: str, *, own: bool) -> Kind:
    file, reference = partial(eagle3.eagle, target, own=own), partial(eagle3.Reference, target, own=own)
    drafted = partial(eagle3.drafted, target, own=own)
    return Kind("eagle3", partial(tiny, target), drafted, file, partial(heads, reference))


def _block(kind: str, target: str = "qwen35") -> Kind:
    file, path = partial(dflash2.drafter_for, kind, target), partial(tiny, target)
    drafted, name = partial(dflash2.drafted, kind, target), kind.partition("-")[0]
    return Kind(name, path, drafted, file, partial(blocks, lambda: Reference(path(), file())))


def _streams(kind: str) -> Kind:
    file, drafted = partial(streams.drafter, kind), partial(streams.drafted, kind)
    return Kind(
        "dspark",
        partial(tiny, "deepseek4"),
        drafted,
        file,
        partial(blocks, lambda: StreamsReference(file())),
    )


KINDS = {
    **{f"eagle3 {t}": _eagle(t, own=True) for t in eagle3.TARGETS},
    **{f"eagle3 {t} shared": _eagle(t, own=False) for t in eagle3.TARGETS},
    "assistant": Kind(
        "assistant", lambda: assistant.TARGET, assistant.drafted, lambda: assistant.ASSISTANT,
        lambda wholes: lambda at, tokens, n, _: assistant.reference().draft(tokens, n), step=3,
    ),
    "dflash2": _block("dflash2"), "dflash2-capped": _block("dflash2-capped", "qwen3"),
    "dspark": _block("dspark"), "dspark-behind": _block("dspark-behind", "qwen3"),
    "streams": _streams("anchor"), "streams behind": _streams("behind"), "streams unsure": _streams("unsure"),
}  # fmt: skip


def watch(r: Rig) -> list[tuple[list[int], list[int], int]]:
    """(tokens with the anchor, drafts, rows of the block) of each draft that the host asks for."""
    seen: list[tuple[list[int], list[int], int]] = []
    drafter = r.loop.drafter
    assert drafter is not None
    draft = drafter.draft

    def watched(requests: Sequence[DraftRequest]) -> Sequence[Drafts]:
        found = draft(requests)
        asked = [q.n_draft for q in requests if q.n_draft]
        n_row = (
            drafter.length.rows(len(asked), max(asked, default=1)) if isinstance(drafter, DFlash) else 0
        )
        pairs = zip(requests, found, strict=True)
        seen.extend(([*q.slot.tokens, q.anchor], [*d.tokens], n_row) for q, d in pairs if d.tokens)
        return found

    drafter.draft = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(
    "name",
    few(
        KINDS, "eagle3 qwen3", "eagle3 qwen35 shared", "assistant", "dflash2-capped", "dspark", "streams"
    ),
)
def test_drafts_are_those_of_the_reference(name: str) -> None:
    """After prompts, accepted and refused drafts, and rounds without any; DSpark's windows are shorter than these texts."""
    kind, rounds = KINDS[name], count()
    n, least = {"assistant": (3, 20), "streams": (3, 30)}.get(name.split()[0], (4, 40))
    texts, r = list(known_texts(kind.target()).items())[:n], kind.drafted(np=2)
    seen = watch(r)
    fix_lengths(r.loop, lambda caps: [cap * (n % 4 < 3) for n in (next(rounds),) for _, cap in caps])
    heard = r.all([prompt for prompt, _ in texts], N_TEXT)
    assert r.info.drafter == kind.name and [h.tokens for h in heard] == [text for _, text in texts]
    assert not name.startswith("streams") or r.info.n_draft_max == (5 if "behind" in name else 6)
    assert len(seen) > least
    kind.check(seen, [[*prompt, *text] for prompt, text in texts])


@pytest.mark.sampled(1, most=5)
@pytest.mark.parametrize("np", [1, 2, 4, 10])
@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize(
    "name", ["eagle3 qwen3", "eagle3 qwen35", "assistant", "dflash2", "dspark", "streams"]
)
def test_the_text_is_the_targets_with_staggered_joins_and_cancels(
    name: str, is_ahead: bool, np: int
) -> None:
    kind = KINDS[name]
    texts, r = known_texts(kind.target()), kind.drafted(np=np, ubatch=40)
    r.loop.lookahead.on = is_ahead
    heard = joined(r, texts, cancels=True)
    assert [h.tokens for h in heard] == list(texts.values())
    assert sum(h.timings.draft_n for h in heard) > 100


@pytest.mark.skipif(DEVICE != "cpu", reason="recordings are a CPU's")
@pytest.mark.parametrize(
    "name",
    few(
        ["eagle3 qwen3 shared", "assistant", "dflash2", "dspark"],
        "eagle3 qwen3 shared",
        "assistant",
        "dflash2",
    ),
)
def test_passes_are_recorded(name: str) -> None:
    kind = KINDS[name]
    r, (prompt, text) = kind.drafted(), next(iter(known_texts(kind.target()).items()))
    assert r.generate(prompt, N_TEXT).tokens == text
    drafter: Any = r.loop.drafter
    passes = drafter.block if isinstance(drafter, DFlash) else drafter._steps[0]
    assert not passes._cannot and passes._tapes


@pytest.mark.parametrize(
    "name",
    few(["eagle3 qwen3", "assistant", "dflash2", "dspark"], "eagle3 qwen3", "assistant", "dflash2"),
)
def test_a_prefix_of_the_cache_is_drafted_from_as_a_text_that_was_read(name: str) -> None:
    kind = KINDS[name]
    prompt, r = max(known_texts(kind.target()), key=len), kind.drafted(page_size=16)
    first = r.generate(prompt, 12)
    seen, turn = watch(r), [*prompt, *first.tokens, 3, 4, 5]
    h = r.generate(turn, 20)
    assert h.timings.cache_n == len(prompt) + 11 and seen
    kind.check(seen, [[*turn, *h.tokens]])


MISFITS: dict[str, list[tuple[dict[str, object], type[Exception], str]]] = {
    "eagle3 qwen3": [
        ({"target_hidden_size": 32}, PairError, "reads layers of width 32; the target's have 64"),
        ({"target_layers": [1, 2, 3]}, PairError, r"taps the inputs of layers \[1, 2, 3\]; inputs of layers 1\.\.2"),
        ({"target_layers": [0, 1, 2]}, PairError, r"taps the inputs of layers \[0, 1, 2\]"),
        ({"block_count": 2}, PairError, "has 2 layers; one is supported"),
    ],
    "assistant": [
        ({"embedding_length_out": 48}, PairError, "made for a width of 48; the target's is 32"),
        ({"attention.key_length": 32, "attention.value_length": 32}, PairError, "heads of 32 dimensions; the keys of the target's layer 2"),
        ({"attention.head_count": 0}, ModelError, "0 heads do not divide"),
        ({"attention.sliding_window_pattern": [True]}, ModelError, "sliding_window_pattern has 1 entries; want 2"),
    ],
    "dflash2": [
        ({"target_layers": [1, 9]}, PairError, r"taps layers \[0, 8\]; the target has layers 0\.\."),
        ({"conv_group_size": 7}, PairError, "width 64, no multiple of its groups of 7"),
        ({"selector_rank": 5}, BadTensors, "selector_hidden.weight: want "),
        ({"conv_kernel_size": 4}, BadTensors, "attn_conv_base: want "),
        ({"hidden_activation": "gelu"}, PairError, "activation is gelu; silu is supported"),
    ],
    "dspark": [
        ({"target_layers": [1]}, PairError, "reads 128 features; 1 taps of the target give 64"),
        ({"embedding_length": 32}, PairError, "has hidden size 32, the target 64"),
        ({"embedding_scale": 2.0}, PairError, "embedding_scale of the drafter is 2; 1 is supported"),
        ({"hyper_connection.count": 4}, ModelError, "this architecture has one"),
    ],
    "streams": [
        ({"attention.compress_ratios": [0, 4]}, PairError, r"is \[0, 4\]; layers without compressed rows"),
        ({"hash_layer_count": 1}, PairError, "tables name the experts of 1 of the drafter's layers"),
        ({"expert_gating_func": 2}, ModelError, "this architecture scores by"),
        ({"attention.sliding_window": 0}, ModelError, "attention.sliding_window"),
        ({"attention.head_count_kv": 2}, ModelError, "this architecture has one"),
        ({"attention.q_lora_rank": 16}, BadTensors, "attn_q_a.weight: want"),
        ({"hyper_connection.count": 3}, BadTensors, "hc_attn_fn.weight: want"),
        ({"target_layers": [1, 9, 2]}, PairError, r"taps layers \[0, 8, 1\]"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "error", "says"), [(name, *row) for name, rows in MISFITS.items() for row in rows]
)
def test_what_does_not_fit_its_target_is_refused_in_a_sentence(
    name: str, change: dict[str, object], error: type[Exception], says: str, tmp_path: Path
) -> None:
    kind = KINDS[name]
    arch = {"eagle3 qwen3": "eagle3", "assistant": "gemma4-assistant"}.get(name, "dflash")
    other = rewrite(
        kind.file(),
        tmp_path / "d.gguf",
        change={f"{arch}.{key}": value for key, value in change.items()},
    )
    with pytest.raises(error, match=says) as caught:
        rig(kind.target(), draft_path=other)
    assert "\n" not in str(caught.value)


# -- behind a lone prompt --------------------------------------------------------------------------------------------

N_MOST = 3
MAKERS: dict[str, tuple[Callable[[], Path], Callable[..., Rig]]] = {
    name: (KINDS[name].target, KINDS[name].drafted) for name in ("eagle3 qwen3", "dflash2", "dspark", "streams", "assistant")
}  # fmt: skip
for _name, _path in (
    ("draft model", draft_model.LLAMA),
    ("draft model with states", draft_model.QWEN35),
):
    MAKERS[_name] = (
        lambda path=_path: path,
        lambda path=_path, **s: draft_model.drafted(path, draft_model.near(path), **s),
    )


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("np", [3, 5])
@pytest.mark.parametrize("kind", [*MAKERS])
def test_drafts_behind_a_lone_prompt_are_those_of_the_host(
    kind: str, np: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that are made while the device reads a prompt alone, of every drafter that makes some."""
    target, drafted = MAKERS[kind]
    texts, drafts, counts = known_texts(target()), [], list[Counter[str]]()
    for on in (True, False):
        monkeypatch.setattr(behind_prompt, "ON", on)
        w = Watched(drafted(np=np, n_draft_max=N_MOST))
        heard = joined(w.r, [*texts, *texts], cancels=True)
        assert [h.tokens for h in heard] == [*texts.values()] * 2
        drafts.append(w.drafts)
        counts.append(w.behind)
    now, before = counts
    assert before["decodes, by the host"] > 2 and not before["decodes, ahead"]
    # records of recurrent layers can not follow a token that the host does not know
    assert (now["decodes, ahead"] > 2) == (kind != "draft model with states")
    whole = [
        {(i, at): d for i, own in each.items() for at, d in own.items() if len(d) == N_MOST}
        for each in drafts
    ]
    same = whole[0].keys() & whole[1].keys()
    assert len(same) > 20 and all(whole[0][x] == whole[1][x] for x in same)
