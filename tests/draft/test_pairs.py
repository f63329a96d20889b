"""A drafter that was given runs or is refused with the numbers; the type is read from the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_rig import DEMO, FIXTURES, GREEDY, Rig, plain_rig, rig
from known_texts import tiny
from rewrite import rewrite

from pyspec import synth
from pyspec.errors import BadGGUF, BadTensors, ConfigError, ModelError, PairError

QWEN35 = FIXTURES / "qwen35.gguf"


def drafter_with(path: Path, **changes: object) -> Path:
    dims = replace(synth.drafter_of(synth.find("qwen35", tiny=True)), **changes)  # type: ignore[arg-type]
    return synth.write(dims, path / "d.gguf", quant="f32", tiny=True, drafter=True)


def pair(draft: Path, target: Path | None = None, **settings: object) -> Rig:
    return rig(target or tiny("qwen35"), draft_path=draft, **settings)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"n_embd": 96, "n_head": 6, "n_head_kv": 3}, "hidden size 96, the target 64"),
        ({"taps": (1, 4)}, r"taps layers \[1, 4\]; the target has layers 0\.\.3"),
        ({"taps": (-1, 2)}, r"taps layers \[-1, 2\]"),
        ({"mask_id": 320}, "mask token is 320; the target has 320 tokens"),
        ({"n_target_embd": 32}, "reads 64 features; 2 taps of the target give 128"),
    ],
)
def test_a_drafter_for_another_target_is_refused_with_the_numbers(
    tmp_path: Path, changes: dict[str, object], text: str
) -> None:
    if min(changes.get("taps", (0,))) < 0:  # type: ignore[arg-type, type-var]  # the writer would not write these
        draft = rewrite(
            tiny("qwen35", drafter=True), tmp_path / "d.gguf", change={"dflash.target_layers": [0, 3]}
        )
    else:
        draft = drafter_with(tmp_path, **changes)
    with pytest.raises(PairError, match=text) as e:
        pair(draft)
    assert e.value.exit_code == 4


@pytest.mark.parametrize("block", [0, 1, 257, 2**32 - 1])
def test_a_block_of_no_draft_or_of_too_many_is_refused_before_anything_is_allocated(
    tmp_path: Path, block: int
) -> None:
    with pytest.raises(
        BadGGUF, match=f"dflash.block_size is {block}; want a whole number from 2 to 256"
    ):
        pair(drafter_with(tmp_path, block=block))


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    draft = tiny("qwen35", drafter=True)
    with pytest.raises(PairError, match="320 tokens, the target 300"):
        pair(draft, QWEN35)
    from pyspec.gguf import open_gguf

    tokens = list(open_gguf(draft).metadata["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    tokens[17], tokens[18] = tokens[18], tokens[17]
    other = rewrite(draft, tmp_path / "d.gguf", change={"tokenizer.ggml.tokens": tokens})
    with pytest.raises(PairError, match=r"token 17 is .* in the drafter and .* in the target"):
        pair(other)


def test_missing_and_misshaped_tensors_are_listed_at_once(tmp_path: Path) -> None:
    gone = ("blk.0.attn_q.weight", "blk.1.ffn_down.weight", "fc.weight")
    draft = rewrite(tiny("qwen35", drafter=True), tmp_path / "d.gguf", drop=lambda name: name in gone)
    with pytest.raises(BadTensors) as e:
        pair(draft)
    assert all(name in str(e.value) for name in gone) and "3 tensors" in str(e.value)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        ("blk.0.attn_conv_base", "convolutions.*--spec-type dflash2"),
        ("markov_w1.weight", "DSpark.*--spec-type dspark"),
    ],
)
def test_relatives_of_dflash_are_called_by_their_name(tmp_path: Path, tensor: str, text: str) -> None:
    rename = lambda name: tensor if name == "blk.0.attn_q_norm.weight" else name  # noqa: E731
    path = rewrite(tiny("qwen35", drafter=True), tmp_path / "d.gguf", rename=rename)
    with pytest.raises(PairError, match=text):
        rig(tiny("qwen35"), spec_type="dflash", draft_path=path)


def test_a_window_pattern_of_another_length_is_refused(tmp_path: Path) -> None:
    change = {"dflash.attention.sliding_window_pattern": [True, True, False]}
    with pytest.raises(ModelError, match="has 3 entries; want 2"):
        pair(rewrite(tiny("qwen35", drafter=True), tmp_path / "d.gguf", change=change))


def test_a_file_that_is_no_drafter_and_no_model_is_refused(tmp_path: Path) -> None:
    other = rewrite(FIXTURES / "llama.gguf", tmp_path / "d.gguf", arch="rwkv7")
    want = r"draft file \(rwkv7\) is for none of the drafters there are \(dflash2, .*, draft\), and no model that"
    with pytest.raises(PairError, match=want):
        rig(FIXTURES / "qwen3.gguf", draft_path=other)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"spec_type": "none", "draft": True}, ConfigError, "--spec-type is none"),
        ({"spec_type": "ngram", "draft": True}, ConfigError, "--spec-type is ngram"),
        ({"spec_type": "mtp", "draft": True}, PairError, "no MTP block"),
        ({"spec_type": "dflash"}, ConfigError, "needs a draft file"),
    ],
)
def test_conflicting_flags_are_refused(
    settings: dict[str, object], error: type[Exception], text: str
) -> None:
    if settings.pop("draft", False):
        settings["draft_path"] = tiny("qwen35", drafter=True)
    with pytest.raises(error, match=text):
        rig(tiny("qwen35"), **settings)


def test_mtp_that_was_asked_for_and_is_not_there_is_refused() -> None:
    with pytest.raises(PairError, match="no MTP block in the file"):
        rig(tiny("qwen35", mtp=False), spec_type="mtp")
    with pytest.raises(PairError, match="no MTP block in the file"):
        rig(FIXTURES / "llama.gguf", spec_type="mtp")


def test_the_type_is_recognised_from_the_file() -> None:
    assert pair(tiny("qwen35", drafter=True)).info.drafter == "dflash"
    assert rig(QWEN35).info.drafter == "mtp"
    assert pair(tiny("qwen35", sidecar=True), tiny("qwen35", mtp=False)).info.drafter == "mtp"
    assert rig(tiny("qwen35", mtp=False)).info.drafter == "none"
    assert rig(FIXTURES / "llama.gguf").info.drafter == "none"


def test_a_sidecar_drafts_as_the_block_inside_the_file(tmp_path: Path) -> None:
    inside, trunk = tiny("qwen35"), tiny("qwen35", mtp=False)
    sidecar = rewrite(
        inside, tmp_path / "s.gguf", drop=lambda n: n.startswith("blk.") and not n.startswith("blk.4.")
    )
    one = rig(inside, spec_type="mtp", n_draft_max=3, n_draft_fixed=True).generate([1, 2, 3, 4], 40)
    two = pair(sidecar, trunk, n_draft_max=3, n_draft_fixed=True).generate([1, 2, 3, 4], 40)
    assert two.tokens == one.tokens == plain_rig(inside).generate([1, 2, 3, 4], 40).tokens
    assert two.timings.accepted_per_pos == one.timings.accepted_per_pos and two.timings.draft_n > 0


def test_a_sidecar_of_another_model_is_refused(tmp_path: Path) -> None:
    dims = synth.find("qwen35", tiny=True)
    wide = synth.write(
        replace(dims, n_embd=96), tmp_path / "w.gguf", quant="f32", tiny=True, sidecar=True
    )
    with pytest.raises(PairError, match="of width 96; the target has 4 layers of width 64"):
        pair(wide)
    deep = synth.write(
        replace(dims, n_layer=8), tmp_path / "d.gguf", quant="f32", tiny=True, sidecar=True
    )
    with pytest.raises(PairError, match="follows layer 8"):
        pair(deep)


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize(
    ("asked", "got", "note"), [(0, 7, ""), (3, 3, ""), (7, 7, ""), (12, 7, "12 lowered to 7 (block 8)")]
)
def test_the_block_caps_the_draft_length(asked: int, got: int, note: str) -> None:
    r = pair(tiny("qwen35", drafter=True), n_draft_max=asked, n_draft_fixed=True)
    assert r.info.n_draft_max == got == r.loop.worker.plan.n_draft and note in r.info.draft_note
    h = r.generate([5, 6, 7], 60, GREEDY)
    assert len(h.timings.drafted_per_pos) == got


def test_the_demo_target_runs_with_every_drafter() -> None:
    for kind in ("mtp", "ngram", "none"):
        assert rig(DEMO, spec_type=kind).info.drafter == kind
