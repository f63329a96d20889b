"""The server over the real engine with the packaged demo model: same text as without HTTP, and slots that come back."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from server_live import serving
from waiting import wait_for

from pyspec.engine.api import Engine

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(
        "demo", np=2, n_draft_max=4, n_draft_fixed=True, warm_up=False, check_tap_shift=False
    ) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with serving(engine) as found:
        yield found


def test_the_text_over_http_is_the_engines_own(engine: Engine, url: str) -> None:
    expected = engine.chat(MESSAGES, temperature=0.0, n_draft_max=0)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        whole = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0)
        stream = client.chat.completions.create(
            model="demo", messages=MESSAGES, temperature=0, stream=True
        )
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert whole.choices[0].message.content == streamed == expected.text
    assert whole.usage.completion_tokens == expected.n_predicted
    assert whole.timings["draft_n"] > 0


def test_leaving_frees_the_real_engines_slots(engine: Engine, url: str) -> None:
    body = {"prompt": "Hello", "stream": True, "ignore_eos": True, "max_tokens": 2000}
    with httpx.stream("POST", f"{url}/completion", json=body) as response:
        next(response.iter_bytes())
        assert any(slot.is_processing for slot in engine.slots())
    wait_for(lambda: not any(slot.is_processing for slot in engine.slots()), 2.0)


def test_the_real_template_and_tokenizer_convert_both_ways(url: str) -> None:
    prompt = httpx.post(f"{url}/apply-template", json={"messages": MESSAGES}).json()["prompt"]
    assert MESSAGES[0]["content"] in prompt
    ids = httpx.post(f"{url}/tokenize", json={"content": prompt}).json()["tokens"]
    assert httpx.post(f"{url}/detokenize", json={"tokens": ids}).json()["content"] == prompt
    counted = httpx.post(f"{url}/v1/chat/completions/input_tokens", json={"messages": MESSAGES}).json()
    assert counted["input_tokens"] == len(ids)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x", "tool_calls": 5}],
        [{"role": "assistant", "content": None, "tool_calls": [{"function": 1}]}],
        [{"role": "tool", "content": "<|im_end|>"}],
        [{"role": "\ue000", "content": "\ue0000\ue001<|im_start|>"}],
    ],
)
def test_odd_messages_are_answered_or_refused(url: str, messages: list[dict[str, object]]) -> None:
    response = httpx.post(
        f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 1}, timeout=20
    )
    assert response.status_code in (200, 400), response.text
