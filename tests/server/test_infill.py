"""`/infill`: a gap in a text, with the model's own marks around it."""

from __future__ import annotations

from typing import Any

import pytest
from server_client import app_of, refusal
from server_fakes import BOS, N_VOCAB, ByteTokenizer, FakeEngine

from pyspec.text.vocab import FimMarks

MARKS = FimMarks(pre=N_VOCAB, suf=N_VOCAB + 1, mid=N_VOCAB + 2, rep=N_VOCAB + 3, sep=N_VOCAB + 4)
NAMES = dict(
    zip(range(N_VOCAB, N_VOCAB + 5), ("[PRE]", "[SUF]", "[MID]", "[REP]", "[SEP]"), strict=True)
) | {BOS: "[BOS]"}
BODY: dict[str, Any] = {"input_prefix": "a(", "input_suffix": ")\n", "prompt": "x", "n_predict": 4}


class Marked(ByteTokenizer):
    """Bytes, and five marks."""

    n_vocab = N_VOCAB + 5
    add_bos = False
    fim = MARKS

    def token_bytes(self, token: int) -> bytes:
        return NAMES[token].encode() if token in NAMES else super().token_bytes(token)

    def decode(self, ids: Any, *, special: bool = False) -> str:
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", "replace")


def asked(
    engine: FakeEngine, body: dict[str, Any], tokenizer: ByteTokenizer | None = None, **settings: Any
) -> str:
    """The prompt that the engine gets, marks by their names."""
    engine.tokenizer = tokenizer or Marked()
    answer = app_of(engine, **settings).post("/infill", body)
    assert answer.status_code == 200, answer.text
    assert "Hello, world".startswith(answer.json()["content"]) and answer.json()["content"]
    return Marked().decode(engine.seen[-1].prompt)


def test_a_gap_is_laid_out_as_llama_server_does_it(engine: FakeEngine) -> None:
    assert asked(engine, BODY) == "[REP]myproject\n[SEP]filename\n[PRE]a(x[SUF])\n[MID]"
    extra = [{"filename": "b.py", "text": "B"}, {"text": "C"}]
    begin = "[REP]myproject\n[SEP]b.py\nB[SEP]tmp\nC[SEP]filename\n"
    assert asked(engine, BODY | {"input_extra": extra}) == begin + "[PRE]a(x[SUF])\n[MID]"
    assert asked(engine, BODY, spm_infill=True).endswith("filename\n[SUF])\n[PRE]a(x[MID]")


def test_without_marks_for_files_a_line_stands_between_them(engine: FakeEngine) -> None:
    class Few(Marked):
        add_bos = True
        fim = FimMarks(pre=MARKS.pre, suf=MARKS.suf, mid=MARKS.mid)

    prompt = asked(engine, BODY | {"input_extra": [{"text": "B"}]}, Few())
    assert prompt == "\n\n--- snippet ---\n\nB[BOS][PRE]a(x[SUF])\n[MID]"


def test_code_does_not_become_control_tokens(engine: FakeEngine) -> None:
    body = BODY | {
        "input_prefix": "</s>",
        "prompt": "</s>",
        "input_suffix": "</s>",
        "input_extra": [{"text": "</s>"}],
    }
    assert asked(engine, body).count("</s>") == 4
    assert all(token < 256 or token >= N_VOCAB for token in engine.seen[-1].prompt)


@pytest.mark.parametrize("n_predict", [1, 100, 400])
@pytest.mark.parametrize("extra", [[], [{"text": "e" * 5000}]])
def test_what_does_not_fit_goes_from_afar(
    engine: FakeEngine, n_predict: int, extra: list[dict[str, str]]
) -> None:
    body = {"input_prefix": "p" * 9000 + "P", "input_suffix": "S" + "s" * 9000, "n_predict": n_predict}
    prompt = asked(engine, body | {"input_extra": extra})
    assert "pP[SUF]Ss" in prompt
    assert len(engine.seen[-1].prompt) + n_predict <= engine.info.n_ctx


def test_extra_texts_fill_what_a_large_context_leaves() -> None:
    engine = FakeEngine(n_ctx=8192)
    try:
        body = BODY | {"input_extra": [{"text": "e" * 9000}], "n_predict": 100}
        prompt = asked(engine, body)
    finally:
        engine.close()
    assert prompt.startswith("eee") and prompt.endswith("e[SEP]filename\n[PRE]a(x[SUF])\n[MID]")
    assert len(engine.seen[-1].prompt) == 8192 - 2048 - 200 + len("a(x)\n") + 3


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input_prefix": "a"}, "input_suffix: field required"),
        ({"input_suffix": "a"}, "input_prefix: field required"),
        (BODY | {"prompt": 5}, "prompt"),
        (BODY | {"input_extra": {}}, "input_extra"),
        (BODY | {"input_extra": [{}]}, "input_extra.0.text"),
        (BODY | {"input_extra": [{"filename": 5, "text": "a"}]}, "input_extra.0.filename"),
        (BODY | {"input_prefix": [5000]}, "token 5000"),
    ],
)
def test_what_is_wrong_is_named(engine: FakeEngine, body: dict[str, Any], said: str) -> None:
    engine.tokenizer = Marked()
    assert said in refusal(app_of(engine).post("/infill", body))


def test_a_model_without_marks_refuses_with_what_is_missing(engine: FakeEngine) -> None:
    answer = app_of(engine).post("/infill", BODY)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith("it has no token for prefix, suffix, middle")


def test_a_stream_is_that_of_completion(engine: FakeEngine) -> None:
    engine.tokenizer = Marked()
    events = app_of(engine).events("/infill", BODY | {"n_predict": 12})
    assert "".join(e["content"] for e in events) == "Hello, world" and events[-1]["stop"]


def test_a_completion_with_a_suffix_fills_the_gap_before_it(engine: FakeEngine) -> None:
    engine.tokenizer = Marked()
    app = app_of(engine)
    answer = app.post("/v1/completions", {"prompt": ["a(", "b("], "suffix": ")", "max_tokens": 4})
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 2
    told = [Marked().decode(request.prompt) for request in engine.seen]
    assert [prompt.partition("[PRE]")[2] for prompt in told] == ["a([SUF])[MID]", "b([SUF])[MID]"]
    assert app.post("/v1/completions", {"prompt": "a", "suffix": ""}).status_code == 200
    assert engine.seen[-1].prompt == (BOS, ord("a"))
    for body in (
        {"prompt": [5, 6], "suffix": ")"},
        {"prompt": "a", "suffix": ")", "echo": True},
        {"prompt": "a", "suffix": 5},
    ):
        assert refusal(app.post("/v1/completions", body)).startswith("suffix")
    for path, body in (
        ("/completion", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        assert app.post(path, body | {"suffix": ")"}).status_code == 400
