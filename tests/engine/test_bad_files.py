"""A fault in a file costs the features that depend on it, or the load; never a running server."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from engine_rig import DEMO, DEMO_DRAFT, FIXTURES, plain_rig, rig
from known_texts import tiny
from rewrite import rewrite

from pyspec.config import EngineSettings
from pyspec.engine.api import Engine
from pyspec.engine.load import warmup
from pyspec.engine.load.load import load
from pyspec.errors import BadGGUF, BadTensors, ModelError, PairError, RequestError
from pyspec.gguf import GGMLType, open_gguf
from pyspec.text.template import CHATML

LLAMA = FIXTURES / "llama.gguf"


def changed(path: Path, source: Path = LLAMA, **change: object) -> Path:
    return rewrite(source, path / "m.gguf", change={k.replace("__", "."): v for k, v in change.items()})


def test_a_template_that_refuses_a_message_costs_its_chats_and_not_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of a drafter renders a chat of one message."""
    refusing = "{% if messages | length < 2 %}{{ raise_exception('two at least') }}{% endif %}two"
    path = changed(tmp_path, DEMO, tokenizer__chat_template=refusing)
    monkeypatch.setattr(warmup, "BUDGET_S", 1e9)  # it is not skipped on a slow machine
    loaded = load(path, EngineSettings(ctx=256, draft_path=DEMO_DRAFT, device="cpu", warm_up=False))
    template = loaded.template
    assert template is not None and template.render([{"role": "user", "content": "x"}] * 2) == "two"
    with pytest.raises(RequestError, match="refuses the messages: two at least"):
        template.render([{"role": "user", "content": "x"}])
    worker, n_overhang = loaded.loop.worker, loaded.info.n_overhang
    warmup.check_drafter(worker, 1.0, loaded.tokenizer, template, n_overhang)


def test_a_file_without_a_template_writes_chats_as_chatml_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = changed(tmp_path, DEMO, tokenizer__chat_template=None)
    with Engine.load(path, None, ctx=256, device="cpu", warm_up=False) as engine:
        told = [
            record.getMessage() for record in caplog.records if "no chat template" in record.getMessage()
        ]
        assert len(told) == 1 and "ChatML" in told[0] and "--chat-template" in told[0]
        prompt = (
            "<|im_start|>system\nA.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        )
        messages = [{"role": "developer", "content": "A."}, {"role": "user", "content": "hi"}]
        assert (
            engine.decode(engine.encode(messages), special=True).removeprefix(engine.info.bos_token)
            == prompt
        )
        assert engine.info.chat_template == CHATML
        assert (
            engine.chat(messages, max_tokens=2, temperature=0).text
            == engine.generate(prompt, max_tokens=2, temperature=0).text
        )
        engine.use_template("{{ messages[0].content }}")
        assert engine.decode(engine.encode(messages), special=True).endswith("A.")


def test_a_model_is_named_as_its_file_on_one_line_without_blanks(tmp_path: Path) -> None:
    path = changed(
        tmp_path, general__name="x y\n" * 2000, tokenizer__chat_template="\udcff{{ bos_token }}"
    )
    r = plain_rig(path.rename(tmp_path / "My model \udcff\x1b[2J.gguf"))
    told = json.dumps(asdict(replace(r.info, model_path="")), ensure_ascii=False).encode()
    assert r.info.model_name == "My-model-\ufffd\ufffd[2J.gguf"
    assert r.info.chat_template == "\ufffd{{ bos_token }}"
    assert told


LABELS: list[dict[str, object]] = [
    {"general__name": "x" * 100_000},
    {"general__name": ["a", "b"]},
    {"general__name": 7},
    {"general__file_type": "Q4_K_M"},
    {"general__file_type": [1, 2]},
    {"general__license": ["mit", "\udcff"], "general__tags": 5, "general__languages": True},
    {"general__quantization_version": "two", "general__size_label": 1.5},
    {"tokenizer__chat_template": ["{{ 1 }}"]},
    {"general__sampling__temp": "hot", "general__sampling__top_k": [1]},
    {"llama__attention__head_count_kv": [2, 2], "llama__attention__head_count": [4, 4]},
    {"llama__feed_forward_length": [64, 64], "llama__attention__scale": 0.0, "llama__unknown": [1, 2]},
]


@pytest.mark.parametrize("change", LABELS)
def test_what_only_labels_a_file_refuses_nothing_and_changes_no_text(
    change: dict[str, object], tmp_path: Path
) -> None:
    """llama.cpp loads all of these, and most of them as numbers of the right type would be."""
    r = plain_rig(changed(tmp_path, **change))
    assert len(r.info.model_name) <= 256 and r.info.model_name.isprintable()
    assert r.generate([5, 6, 7], 8).tokens == plain_rig(LLAMA).generate([5, 6, 7], 8).tokens
    if "tokenizer__chat_template" in change:
        assert r.info.chat_template == ""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"llama__attention__head_count_kv": [2, 1]}, "head_count_kv is an array of 2"),
        ({"llama__attention__causal": False}, "attends to later tokens"),
        ({"split__count": [1, 2]}, "split.count is an array of 2 uint32"),
        ({"llama__rope__dimension_count": 3}, "rope can not turn 3 dimensions"),
        ({"llama__attention__head_count": 0}, "0 heads do not divide"),
        ({"llama__attention__head_count": 1 << 12, "llama__attention__key_length": None}, "4096 heads do not fit a width of"),
        ({"llama__rope__scaling__type": "\x1b]0;x\x07"}, "rope scaling '.*' is not supported"),
    ],
)  # fmt: skip
def test_general_and_model_fields_are_held_to_their_types(
    change: dict[str, object], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=says) as e:
        plain_rig(changed(tmp_path, **change))
    assert str(e.value).isprintable() and len(str(e.value)) < 300


def test_more_tokens_than_rows_of_the_embedding_are_refused(tmp_path: Path) -> None:
    """The ids beyond would be looked up by the first request that bans or ends at them."""
    with open_gguf(LLAMA) as file:
        tokens = [*file.fields.strings("tokenizer.ggml.tokens"), "one more"]
        types = [*file.fields.integers("tokenizer.ggml.token_type"), 1]
    path = changed(tmp_path, tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=types)
    with pytest.raises(BadTensors, match=r"token_embd\.weight has 300 rows for 301 tokens"):
        plain_rig(path)


def test_what_an_error_repeats_of_a_file_is_short_and_can_not_act_on_a_terminal(tmp_path: Path) -> None:
    draft = tiny("qwen35", drafter=True)
    with open_gguf(draft) as file:
        tokens = list(file.fields.strings("tokenizer.ggml.tokens"))
    tokens[17] = "\x1b[2J" * 1_000_000
    with pytest.raises(PairError, match=r"token 17 is '\\x1b\[2J") as e:
        rig(tiny("qwen35"), draft_path=changed(tmp_path, draft, tokenizer__ggml__tokens=tokens))
    assert str(e.value).isprintable() and len(str(e.value)) < 250


def test_an_architecture_with_a_wild_name_is_refused_in_one_line(tmp_path: Path) -> None:
    path = rewrite(LLAMA, tmp_path / "m.gguf", arch="x\x1b[2J\n")
    with pytest.raises(ModelError, match="which pyspec does not run") as e:
        plain_rig(path)
    assert str(e.value).isprintable()
    with pytest.raises(BadGGUF, match=r"general\.architecture has 65 characters"):
        plain_rig(rewrite(LLAMA, tmp_path / "n.gguf", arch="x" * 65))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen35", "qwen35moe", "nemotron_moe"])
def test_a_file_with_more_blocks_than_it_says_is_another_model(name: str, tmp_path: Path) -> None:
    source = FIXTURES / f"{name}.gguf"
    with open_gguf(source) as file:
        arch, n = file.architecture, file.hparams.integer("block_count")
    with pytest.raises(
        BadTensors,
        match=rf"{arch}\.block_count makes \d+ blocks, and the file has \d+ tensors of \d more",
    ):
        plain_rig(changed(tmp_path, source, **{f"{arch}__block_count": n - 1}))


def test_an_mtp_block_is_a_drafters_to_read(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("qwen35", "nemotron_moe"):
        plain_rig(FIXTURES / f"{name}.gguf")
    assert not [line for line in lines(caplog) if "nothing reads" in line]


def test_a_drafter_with_more_blocks_than_it_says_is_another_drafter(tmp_path: Path) -> None:
    with open_gguf(DEMO_DRAFT) as file:
        n = file.hparams.integer("block_count")
    path = changed(tmp_path, DEMO_DRAFT, dflash__block_count=n - 1)
    with pytest.raises(
        ModelError,
        match=rf"dflash\.block_count makes {n - 1} blocks|entries for {n - 1} layers|has {n} entries",
    ):
        load(DEMO, EngineSettings(ctx=64, draft_path=path, device="cpu", warm_up=False))


def test_tensors_that_nothing_reads_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    add = {f"blk.1.extra{i}.weight": np.ones(4, np.float32) for i in range(7)} | {
        "v.patch.weight": np.ones(4, np.float32)
    }
    plain_rig(rewrite(LLAMA, tmp_path / "m.gguf", add=add))
    (line,) = [line for line in lines(caplog) if "nothing reads" in line]
    assert "nothing reads 8 of its" in line and "'blk.1.extra0.weight'" in line and line.endswith("...")


@pytest.mark.parametrize("kind", [GGMLType.I8, GGMLType.I16, GGMLType.I32, GGMLType.I64])
@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "blk.1.ffn_up.weight", "token_embd.weight"])
def test_whole_numbers_are_no_weights(kind: GGMLType, name: str, tmp_path: Path) -> None:
    with pytest.raises(BadTensors, match=f"{name}: type {kind.name} is for tables"):
        plain_rig(rewrite(LLAMA, tmp_path / "m.gguf", retype={name: kind}))


def test_a_table_is_no_weights(tmp_path: Path) -> None:
    path = rewrite(
        FIXTURES / "deepseek4.gguf",
        tmp_path / "m.gguf",
        retype={"blk.0.ffn_gate_tid2eid.weight": GGMLType.F32},
    )
    with pytest.raises(BadTensors, match=r"ffn_gate_tid2eid\.weight: type F32 is for weights"):
        plain_rig(path)


@pytest.mark.parametrize("value", [300, 70_000, 2**32 - 2])
def test_ids_that_no_token_has_are_told_and_not_used(
    value: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stray = changed(
        tmp_path, tokenizer__ggml__eos_token_id=value, tokenizer__ggml__bos_token_id=2**32 - 1
    )
    r = plain_rig(stray)
    assert (
        f"tokenizer.ggml.eos_token_id is {value}, and the vocabulary has 300 tokens: it is not used"
        in lines(caplog)
    )
    assert not [line for line in lines(caplog) if "bos" in line] and r.info.eos_token == ""


def test_a_vocabulary_without_an_end_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_gguf(LLAMA) as file:
        tokens = [
            t.replace("<|im_end|>", "<|x|>").replace("<|endoftext|>", "<|y|>")
            for t in file.fields.strings("tokenizer.ggml.tokens")
        ]
    plain_rig(changed(tmp_path, tokenizer__ggml__tokens=tokens, tokenizer__ggml__eos_token_id=999))
    assert any(line.startswith("no token ends a generation") for line in lines(caplog))


def test_a_file_that_names_no_pre_tokenizer_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain_rig(changed(tmp_path, tokenizer__ggml__pre=None))
    assert any("'default' is taken, as llama.cpp does" in line for line in lines(caplog))


def test_a_token_of_3000_bytes_costs_no_load(tmp_path: Path) -> None:
    with open_gguf(LLAMA) as file:
        tokens = list(file.fields.strings("tokenizer.ggml.tokens"))
    tokens[284] = "a" * 3000
    loaded = load(
        changed(tmp_path, tokenizer__ggml__tokens=tokens), EngineSettings(ctx=64, device="cpu")
    )
    assert loaded.tokenizer.token_bytes(284) == b"a" * 3000


@pytest.mark.parametrize("value", [0.0, -1e-6, float("nan"), 2.0])
def test_norms_need_an_epsilon(value: float, tmp_path: Path) -> None:
    with pytest.raises(BadGGUF, match=r"layer_norm_rms_epsilon is .*; want a number above 0"):
        plain_rig(changed(tmp_path, llama__attention__layer_norm_rms_epsilon=value))


@pytest.mark.parametrize("isolated", [False, True])
def test_a_projector_as_a_model_is_called_one(isolated: bool) -> None:
    with pytest.raises(ModelError, match="is a projector for images, no model that answers"):
        Engine.load(FIXTURES / "images" / "mmproj-gemma3.gguf", device="cpu", isolated=isolated)
