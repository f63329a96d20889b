"""What is wrong in a file costs what depends on it, or the load; never what a server does later."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from engine_rig import DEMO, DEMO_DRAFT, FIXTURES, plain_rig, rig
from known_texts import tiny
from rewrite import rewrite

from pyspec.config import EngineSettings
from pyspec.engine import warmup
from pyspec.engine.api import Engine
from pyspec.engine.load import load
from pyspec.errors import BadGGUF, BadTensors, ModelError, PairError, RequestError
from pyspec.gguf import open_gguf
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
    warmup.check_drafter(loaded.loop, loaded.tokenizer, template, loaded.info.n_overhang)


def test_a_file_without_a_template_writes_chats_as_chatml_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = changed(tmp_path, DEMO, tokenizer__chat_template=None)
    with Engine.load(path, None, ctx=256, device="cpu", warm_up=False) as engine:
        told = [record.getMessage() for record in caplog.records if "no chat template" in record.getMessage()]
        assert len(told) == 1 and "ChatML" in told[0] and "--chat-template" in told[0]
        prompt = "<|im_start|>system\nA.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        messages = [{"role": "developer", "content": "A."}, {"role": "user", "content": "hi"}]
        assert engine.decode(engine.encode(messages), special=True).removeprefix(engine.info.bos_token) == prompt
        assert engine.info.chat_template == CHATML
        assert (
            engine.chat(messages, max_tokens=2, temperature=0).text
            == engine.generate(prompt, max_tokens=2, temperature=0).text
        )
        engine.use_template("{{ messages[0].content }}")
        assert engine.decode(engine.encode(messages), special=True).endswith("A.")


def test_names_and_templates_that_are_no_utf8_are_told_in_json(tmp_path: Path) -> None:
    odd = "n\udcff\x1b[2J"
    r = plain_rig(changed(tmp_path, general__name=odd, tokenizer__chat_template="\udcff{{ bos_token }}"))
    told = json.dumps(asdict(r.info), ensure_ascii=False).encode()
    assert r.info.model_name == "n\ufffd\ufffd[2J" and r.info.chat_template == "\ufffd{{ bos_token }}" and told


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"general__name": [1, 2]}, "general.name is an array of 2 uint32; want text"),
        ({"general__name": "x" * 2000}, "general.name has 2000 characters; want at most 1000"),
        ({"general__file_type": "x"}, "general.file_type is 'x'"),
        ({"split__count": [1, 2]}, "split.count is an array of 2 uint32"),
        ({"llama__rope__dimension_count": 3}, "rope can not turn 3 dimensions"),
        ({"llama__attention__head_count": 0}, "0 heads do not divide"),
        (
            {"llama__attention__head_count": 1 << 12, "llama__attention__key_length": None},
            "4096 heads do not fit a width of",
        ),
        ({"llama__rope__scaling__type": "\x1b]0;x\x07"}, "rope scaling '.*' is not supported"),
    ],
)
def test_general_and_model_fields_are_held_to_their_types(change: dict[str, object], says: str, tmp_path: Path) -> None:
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
    with pytest.raises(ModelError, match="is not supported") as e:
        plain_rig(path)
    assert str(e.value).isprintable()
    with pytest.raises(BadGGUF, match=r"general\.architecture has 65 characters"):
        plain_rig(rewrite(LLAMA, tmp_path / "n.gguf", arch="x" * 65))
