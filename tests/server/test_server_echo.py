"""Prompts in answers: `echo`, `prompt_logprobs`, requests of evaluation programs; and `best_of`."""

from __future__ import annotations

from typing import Any

from server_client import App
from server_fakes import BOS, FakeEngine


def test_a_loglikelihood_request_of_lm_eval_gets_what_it_reads(app: App, engine: FakeEngine) -> None:
    """The body of its local-completions model, and the fields that it reads of each choice."""
    prompts = [list(b"The sky is blue"), list(b"One two")]
    body = {
        "model": "m",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = app.post("/v1/completions", body).json()
    for choice, ids in zip(sorted(answer["choices"], key=lambda c: c["index"]), prompts, strict=True):
        found = choice["logprobs"]
        assert (
            len(found["tokens"])
            == len(ids) + 1
            == len(found["token_logprobs"])
            == len(found["top_logprobs"])
        )
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        for token, value, top in list(
            zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
        )[4:-1]:
            assert value == -0.25 and token == max(top, key=top.get)
        assert choice["text"] == bytes(ids).decode() + "H"
        assert found["text_offset"] == list(range(len(ids) + 1))
    assert [r.prompt_logprobs for r in engine.seen] == [1, 1] and engine.seen[0].max_tokens == 1


def test_echo_gives_the_prompt_as_it_was_sent_and_nothing_more_with_max_tokens_0(
    app: App, engine: FakeEngine
) -> None:
    body: dict[str, Any] = {"prompt": "ab", "echo": True, "max_tokens": 0, "logprobs": 0}
    answer = app.post("/v1/completions", body).json()
    choice = answer["choices"][0]
    assert (
        choice["text"] == "ab"
        and choice["finish_reason"] == "length"
        and answer["usage"]["completion_tokens"] == 0
    )
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b"] and choice["logprobs"][
        "token_logprobs"
    ] == [
        None,
        -0.25,
        -0.25,
    ]
    assert choice["logprobs"]["top_logprobs"] == [None, {}, {}] and engine.seen[0].prompt[0] == BOS
    plain = app.post("/v1/completions", {"prompt": "ab", "echo": True, "max_tokens": 2}).json()[
        "choices"
    ][0]
    assert (
        plain["text"] == "abHe" and plain["logprobs"] is None and engine.seen[1].prompt_logprobs is None
    )
    events = app.events("/v1/completions", {"prompt": "ab", "echo": True})
    assert "".join(c["text"] for e in events[:-1] for c in e["choices"]) == "abHello, world"


def test_prompt_logprobs_are_vllms(app: App, engine: FakeEngine) -> None:
    body = {"prompt": "hi", "max_tokens": 1, "prompt_logprobs": 2}
    rows = app.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    assert rows[0] is None and len(rows) == 3
    assert rows[1] == {
        "104": {"logprob": -0.25, "rank": 1, "decoded_token": "h"},
        "257": {"logprob": -2.0, "rank": 2, "decoded_token": "</s>"},
    }
    chat = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 1,
        "prompt_logprobs": 0,
        "n": 2,
    }
    answer = app.post("/v1/chat/completions", chat).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert [r.prompt_logprobs for r in engine.seen[1:]] == [0, None], (
        "one choice tells of the prompt for all"
    )


def test_best_of_shows_the_likeliest_and_counts_all(app: App, engine: FakeEngine) -> None:
    engine.info = engine.info
    body = {"prompt": ["a", "b"], "max_tokens": 4, "n": 2, "best_of": 4, "seed": 5}
    answer = app.post("/v1/completions", body).json()
    assert [r.params.seed for r in engine.seen] == [5, 6, 7, 8] * 2 and {
        r.params.logprobs for r in engine.seen
    } == {0}
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3] and answer["usage"][
        "completion_tokens"
    ] == 32
    assert all(c["logprobs"] is None for c in answer["choices"])
    shown = app.post("/v1/completions", body | {"logprobs": 0}).json()["choices"]
    assert [c["logprobs"]["token_logprobs"][0] for c in shown] == [-0.5, -0.51] * 2, "seeds 7 and 8"
    native = app.post("/completion", {"prompt": "a", "n_predict": 4, "best_of": 3, "seed": 6}).json()
    assert native["generation_settings"]["seed"] == 7 and "completion_probabilities" not in native
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "best_of": 2}
    assert len(app.post("/v1/chat/completions", chat).json()["choices"]) == 1
