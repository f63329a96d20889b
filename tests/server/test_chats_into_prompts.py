"""The same chat on every API becomes the same prompt, without the parts that only a hosted service knows."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from server_client import App, app_of, refusal
from server_fakes import FakeEngine, Template

from pyspec.text import left_out
from pyspec.text.template import ChatTemplate

XML = "{# <tool_call> <function= <parameter= #}"
STRICT = ChatTemplate(
    XML + "{%- for t in tools or [] -%}{{ t | tojson }}{%- endfor -%}{%- for m in messages -%}"
    "{%- if m.role == 'system' -%}{%- if not loop.first -%}{{ raise_exception('first only') }}{%- endif -%}[sys]{{ m.content }}[/]"
    "{%- elif m.role in ('user', 'assistant', 'tool') -%}[{{ m.role }}]{{ m.content }}"
    "{%- for c in m.tool_calls or [] -%}<{{ c.function.name }}{{ c.function.arguments | tojson }}>{%- endfor -%}[/]"
    "{%- else -%}{{ raise_exception('unknown role') }}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}[assistant]{%- endif -%}"
)
PARAMETERS = {"type": "object", "required": ["at"], "properties": {"at": {"type": "string", "description": "Where."}}}  # fmt: skip
LOOK = {"name": "look", "description": "Looks.", "parameters": PARAMETERS}
WAIT = {"name": "wait", "description": "Waits.", "parameters": {"type": "object", "properties": {}}}


class RealTemplate(Template):
    """A template that renders, without a token before it."""

    add_special = False

    def __init__(self, template: ChatTemplate) -> None:
        self.render, self.able = template.render, template.able


@pytest.fixture
def app(engine: FakeEngine) -> App:
    engine.info = replace(engine.info, chat_template=STRICT.source, n_ctx=1 << 16)
    engine.template = RealTemplate(STRICT)  # type: ignore[assignment]
    return app_of(engine)


def prompt(app: App, engine: FakeEngine, path: str, body: dict[str, Any]) -> str:
    response = app.post(path, body)
    assert response.status_code == 200, response.text
    if path == "/apply-template":
        return str(response.json()["prompt"])
    return engine.tokenizer.decode(engine.seen[-1].prompt, special=True)


def test_late_system_messages_are_the_same_prompt_by_every_interface(
    app: App, engine: FakeEngine
) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    late = [{"role": "user", "content": "bye"}, {"role": "system", "content": "B."}]
    chat = {"messages": [{"role": "developer", "content": "A."}, *turns, *late]}
    want = "[sys]A.[/][user]hi[/][assistant]yes[/][user]bye\n\nB.[/][assistant]"
    assert prompt(app, engine, "/v1/chat/completions", chat) == want
    assert prompt(app, engine, "/apply-template", chat) == want
    assert prompt(app, engine, "/v1/messages", {"system": "A.", "messages": [*turns, *late]}) == want
    items = [
        *turns,
        {"type": "message", "role": "user", "content": "bye"},
        {"role": "developer", "content": "B."},
    ]
    assert prompt(app, engine, "/v1/responses", {"instructions": "A.", "input": items}) == want
    for path, body in (
        ("/v1/messages/count_tokens", {"system": "A.", "messages": [*turns, *late]}),
        ("/v1/chat/completions/input_tokens", chat),
    ):
        assert app.post(path, body).json()["input_tokens"] == len(want.encode())


def test_a_tools_fields_keep_their_order_by_every_interface(app: App, engine: FakeEngine) -> None:
    odd = {"parameters": PARAMETERS, "name": "look", "description": "Looks."}
    hi = [{"role": "user", "content": "hi"}]
    for function in (LOOK, odd):
        sent = dict(function)
        tools = [{"type": "function", "function": sent | {"x-more": {"z": 1, "a": 2}}}]
        text = prompt(app, engine, "/v1/chat/completions", {"messages": hi, "tools": tools})
        assert list_of_keys(text) == [*function, "x-more"] and '{"z": 1, "a": 2}' in text
        assert '"required": ["at"], "properties"' in text
        text = prompt(
            app, engine, "/v1/responses", {"input": "hi", "tools": [{"type": "function"} | sent]}
        )
        assert list_of_keys(text) == list(function)
        messages = [
            {("input_schema" if key == "parameters" else key): value for key, value in sent.items()}
        ]
        text = prompt(app, engine, "/v1/messages", {"messages": hi, "tools": messages})
        assert list_of_keys(text) == list(function)


def list_of_keys(text: str) -> list[str]:
    """Names of the fields of the one function that the prompt begins with."""
    return list(json.JSONDecoder().raw_decode(text)[0]["function"])


def test_calls_that_are_none_and_arguments_that_are_null_are_taken(app: App, engine: FakeEngine) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "null"}}
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes", "tool_calls": [], "function_call": None, "audio": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    want = "[user]hi[/][assistant]yes[/][assistant]<look{}>[/][tool]rain[/][assistant]"
    for path in ("/apply-template", "/v1/chat/completions"):
        assert prompt(app, engine, path, {"messages": chat}) == want


@pytest.mark.parametrize(
    "calls", [5, "x", {"function": {}}, [5], [{"function": 5}], [{"function": {"name": ["look"]}}]]
)
def test_calls_of_other_shapes_are_refused_by_name(app: App, calls: Any) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    }  # fmt: skip
    for path in ("/apply-template", "/v1/chat/completions"):
        response = app.post(path, body)
        assert response.status_code == 400
        assert "messages.1.tool_calls" in response.json()["error"]["message"]


def test_an_answer_may_begin_a_chat(app: App, engine: FakeEngine) -> None:
    engine.template = RealTemplate(  # type: ignore[assignment]
        ChatTemplate(
            "{{ messages[0].role }}:{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
        )
    )
    begun = {"role": "assistant", "content": "Once upon"}
    want = "user:[user][assistant]Once upon"
    assert prompt(app, engine, "/v1/chat/completions", {"messages": [begun]}) == want
    assert prompt(app, engine, "/apply-template", {"messages": [begun]}) == want
    assert prompt(app, engine, "/v1/messages", {"messages": [begun]}) == want
    assert prompt(app, engine, "/v1/responses", {"input": [begun]}) == want
    system = {"role": "system", "content": "A."}
    assert (
        prompt(app, engine, "/apply-template", {"messages": [system, begun]})
        == "system:[system]A.[assistant]Once upon"
    )


def test_content_parts_messages_and_tools_are_as_many_as_agents_send(
    app: App, engine: FakeEngine
) -> None:
    n = 700
    parts = [{"type": "text", "text": f"p{i}"} for i in range(n)]
    body = {
        "messages": [{"role": "user", "content": parts}] * 3 + [{"role": "user", "content": "x"}] * 5000
    }
    tools = [{"type": "function", "function": LOOK | {"name": f"look{i}"}} for i in range(n)]
    shown = prompt(app, engine, "/apply-template", body | {"tools": tools})
    assert shown.count("p699") == 3 and shown.count("[user]x") == 5000 and '"look699"' in shown
    assert "p699" in prompt(
        app, engine, "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}
    )
    assert "p699" in prompt(
        app, engine, "/v1/messages", {"messages": [{"role": "user", "content": parts}]}
    )
    items = [{"role": "user", "content": [{"type": "input_text", "text": f"p{i}"} for i in range(n)]}]
    assert "p699" in prompt(app, engine, "/v1/responses", {"input": items})


# -- parts of hosted services ----------------------------------------------------------------------------------------

HI = [{"role": "user", "content": "hi"}]
OPENAI_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "web_search_preview_2025_03_11"},
    {"type": "image_generation"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "local_shell"},
    {"type": "computer_use_preview", "display_width": 1},
    {"type": "mcp", "server_label": "x", "server_url": "y"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
    {"type": "namespace", "name": "mcp__x", "tools": [{"type": "function", **LOOK}]},
    {"type": "tool_search"},
]
ANTHROPIC_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "mcp_toolset", "mcp_server_name": "x"},
]
OPENAI_ITEMS: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}},
    {"type": "file_search_call", "id": "f", "queries": [], "results": None},
    {"type": "computer_call", "call_id": "k", "action": {}},
    {"type": "computer_call_output", "call_id": "k", "output": {"type": "computer_screenshot"}},
    {"type": "code_interpreter_call", "id": "i", "code": "1"},
    {"type": "image_generation_call", "id": "g", "result": "AA=="},
    {"type": "local_shell_call", "call_id": "s", "action": {"type": "exec", "command": ["ls"]}},
    {
        "type": "function_call_output",
        "call_id": "s",
        "output": "files",
    },  # Codex answers a shell's call so
    {"type": "custom_tool_call", "call_id": "u", "name": "apply_patch", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "u", "output": "done"},
    {"type": "mcp_list_tools", "server_label": "x", "tools": []},
    {"type": "mcp_call", "id": "m", "name": "n", "arguments": "{}"},
    {"type": "mcp_approval_request", "id": "a"},
    {"type": "item_reference", "id": "msg_1"},
    {"type": "reasoning", "summary": [], "encrypted_content": "xyz", "content": None},
    {"type": "compaction", "encrypted_content": "xyz"},
]  # fmt: skip
ANTHROPIC_BLOCKS: list[dict[str, Any]] = [
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result", "url": "u"}]},
    {"type": "code_execution_tool_result", "tool_use_id": "s", "content": {"type": "code_execution_result"}},
    {"type": "mcp_tool_use", "id": "m", "name": "n", "server_name": "x", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "m", "content": []},
    {"type": "redacted_thinking", "data": "xyz"},
]  # fmt: skip


@pytest.mark.parametrize("tool", OPENAI_TOOLS, ids=lambda tool: tool["type"])
def test_hosted_tools_are_left_out(app: App, engine: FakeEngine, tool: dict[str, Any]) -> None:
    responses = {"input": "hi", "tools": [tool, {"type": "function", **WAIT}, tool]}
    want = prompt(app, engine, "/v1/responses", responses | {"tools": [{"type": "function", **WAIT}]})
    assert prompt(app, engine, "/v1/responses", responses) == want and '"wait"' in want
    chat = {"messages": HI, "tools": [{"type": "function", "function": WAIT}, tool]}
    assert prompt(app, engine, "/v1/chat/completions", chat) == want
    assert prompt(app, engine, "/apply-template", chat) == want
    alone = prompt(app, engine, "/v1/responses", {"input": "hi", "tools": [tool], "tool_choice": "auto"})
    assert alone == "[user]hi[/][assistant]"
    assert app.post("/v1/responses", {"input": "hi", "tools": [tool]}).json()["tools"] == [tool], (
        "repeated as it was sent"
    )


@pytest.mark.parametrize("tool", ANTHROPIC_TOOLS, ids=lambda tool: tool["type"])
def test_anthropics_own_tools_are_left_out(app: App, engine: FakeEngine, tool: dict[str, Any]) -> None:
    own = {"type": "custom", "name": "wait", "description": "Waits.", "input_schema": WAIT["parameters"]}
    body = {"messages": HI, "tools": [tool, own]}
    text = prompt(app, engine, "/v1/messages", body)
    assert text == prompt(app, engine, "/v1/messages", body | {"tools": [own]}) and '"wait"' in text
    assert app.post("/v1/messages/count_tokens", body).json()["input_tokens"] == len(text.encode())
    refused = app.post(
        "/v1/messages", body | {"tool_choice": {"type": "tool", "name": tool.get("name", "x")}}
    )
    assert refused.status_code == 400 and "tool_choice: there is no tool" in refused.text


@pytest.mark.parametrize("n", range(len(OPENAI_ITEMS)))
def test_items_of_hosted_tools_are_left_out(app: App, engine: FakeEngine, n: int) -> None:
    first = n - 1 if OPENAI_ITEMS[n]["type"].endswith("_output") else n
    items = [*HI, *OPENAI_ITEMS[first : n + 1], {"role": "user", "content": "bye"}]
    text = prompt(app, engine, "/v1/responses", {"input": items})
    assert text == "[user]hi[/][user]bye[/][assistant]"


def test_calls_of_custom_tools_in_a_history_are_shown_as_functions(app: App, engine: FakeEngine) -> None:
    """OpenAI's SDK sends back the calls of a hosted model."""
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": 'a "b"'}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    body = {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, result]}
    shown = '<patch{"input": "a \\"b\\""}>[/][tool]done[/]'
    assert shown in prompt(app, engine, "/v1/chat/completions", body)
    assert shown in prompt(app, engine, "/apply-template", body)


def test_blocks_of_hosted_tools_are_left_out(app: App, engine: FakeEngine) -> None:
    for block in ANTHROPIC_BLOCKS:
        said = {"role": "assistant", "content": [block, {"type": "text", "text": "yes"}, block]}
        alone = {"role": "assistant", "content": [block]}
        text = prompt(app, engine, "/v1/messages", {"messages": [*HI, said, alone, *HI]})
        assert text == "[user]hi[/][assistant]yes[/][user]hi[/][assistant]"
    references = [{"type": "tool_reference", "tool_name": "mcp__x"}, {"type": "text", "text": "found"}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": references}]}  # fmt: skip
    assert (
        prompt(app, engine, "/v1/messages", {"messages": [*HI, result]})
        == "[user]hi[/][tool]found[/][assistant]"
    )


def test_each_kind_that_is_left_out_is_told_once(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(left_out, "_logged", set())
    with caplog.at_level(logging.WARNING, "pyspec.text.left_out"):
        for _ in range(3):
            app.post(
                "/v1/responses",
                {"input": "hi", "tools": [{"type": "odd_search"}, {"type": "odd_shell"}]},
            )
            app.post("/v1/responses", {"input": [*HI, {"type": "odd_call", "id": "x"}]})
        for i in range(2 * left_out.MOST_LOGGED):
            app.post(
                "/v1/responses", {"input": "hi", "tools": [{"type": f"kind{i}"}]}
            ) if i < 3 else left_out.log_left_out("x", f"{i}")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == left_out.MOST_LOGGED and sum("'odd_search'" in line for line in told) == 1
    assert sum("'odd_shell'" in line for line in told) == sum("'odd_call'" in line for line in told) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi", "tools": OPENAI_TOOLS, "tool_choice": "required"}),
        ("/v1/responses", {"input": "hi", "tools": OPENAI_TOOLS, "tool_choice": {"type": "web_search"}}),
        ("/v1/responses", {"input": "hi", "tools": OPENAI_TOOLS, "tool_choice": {"type": "custom", "name": "apply_patch"}}),
        ("/v1/responses", {"input": "hi", "tools": OPENAI_TOOLS, "tool_choice": {"type": "function", "name": "look"}}),
        ("/v1/chat/completions", {"messages": HI, "tools": OPENAI_TOOLS, "tool_choice": "required"}),
        ("/v1/chat/completions", {"messages": HI, "tools": OPENAI_TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "x"}}}),
        ("/v1/messages", {"messages": HI, "tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "any"}}),
    ],
)  # fmt: skip
def test_a_choice_of_what_was_left_out_is_refused(app: App, path: str, body: dict[str, Any]) -> None:
    assert "tool_choice" in refusal(app.post(path, body))


# -- allowed tools ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_limit_what_may_be_called_and_not_what_is_shown(
    app: App, engine: FakeEngine, mode: str
) -> None:
    chat_tools = [{"type": "function", "function": each} for each in (LOOK, WAIT)]
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "wait"}}, {"type": "web_search"}]}  # fmt: skip
    chat = {"messages": HI, "tools": chat_tools, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}  # fmt: skip
    text = prompt(app, engine, "/v1/chat/completions", chat)
    assert '"look"' in text and '"wait"' in text
    held = engine.seen[-1].grammar
    assert held is not None and "wait" in held.source and "look" not in held.source
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "wait"}, {"type": "mcp"}]}  # fmt: skip
    tools = [{"type": "function", **each} for each in (LOOK, WAIT)]
    assert (
        prompt(app, engine, "/v1/responses", {"input": "hi", "tools": tools, "tool_choice": choice})
        == text
    )
    assert engine.seen[-1].grammar == held


def test_all_tools_allowed_is_as_no_word_on_it_and_none_is_none(app: App, engine: FakeEngine) -> None:
    tools = [{"type": "function", "function": each} for each in (LOOK, WAIT)]

    def asked(names: list[str], mode: str = "auto") -> Any:
        named = [{"type": "function", "function": {"name": name}} for name in names]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        return app.post("/v1/chat/completions", {"messages": HI, "tools": tools, "tool_choice": choice})

    assert asked(["wait", "look"]).status_code == 200 and engine.seen[-1].grammar is None
    assert asked([]).status_code == 200 and engine.seen[-1].grammar is None
    assert (
        asked([], "required").status_code
        == asked(["other"]).status_code
        == asked(["wait"], "any").status_code
        == 400
    )
