"""Chats and tools in the form that a template accepts: nothing is lost, and nothing is refused without need."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from text_vocab import bpe

from pyspec.errors import RequestError, Unavailable
from pyspec.text.abilities import Abilities
from pyspec.text.markup import dialect as dialects
from pyspec.text.markup.dialect import AnswerMarkup
from pyspec.text.markup.parts import CallArguments, CallBegin, Content, Reasoning
from pyspec.text.sandbox_process import STALLED
from pyspec.text.template import CHATML, ChatTemplate
from pyspec.text.tokenizer import Tokenizer

END = "{%- endfor -%}{%- if add_generation_prompt -%}[assistant]{%- endif -%}"
EACH = "{%- for m in messages -%}"
SAYS = "[{{ m.role }}]{{ m.content }}[/]"
STRICT = ChatTemplate(
    EACH
    + "{%- if m.role == 'system' -%}{%- if not loop.first -%}{{ raise_exception('first only') }}{%- endif -%}"
    "[sys]{{ m.content }}[/]{%- elif m.role in ('user', 'assistant', 'tool') -%}" + SAYS + "{%- else -%}"
    "{{ raise_exception('unknown role') }}{%- endif -%}" + END
)
FIRST_ONLY = ChatTemplate(
    "{%- if messages[0].role == 'system' -%}[sys]{{ messages[0].content }}[/]{%- endif -%}"
    + EACH
    + "{%- if m.role in ('user', 'assistant', 'tool') -%}"
    + SAYS
    + "{%- endif -%}"
    + END
)
ALTERNATES = ChatTemplate(
    EACH
    + "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('take turns') }}{%- endif -%}"
    + SAYS
    + END
)
NO_SYSTEM = ChatTemplate(
    EACH + "{%- if m.role in ('user', 'assistant') -%}" + SAYS + "{%- endif -%}" + END
)
ANY_ROLE = ChatTemplate(EACH + SAYS + END)
DEVELOPER = ChatTemplate(
    EACH
    + "{%- if m.role == 'developer' -%}[dev]{{ m.content }}[/]{%- else -%}"
    + SAYS
    + "{%- endif -%}"
    + END
)
DEVELOPER_FIRST = ChatTemplate(
    "{%- if messages[0].role in ('system', 'developer') -%}[dev]{{ messages[0].content }}[/]{%- endif -%}"
    + EACH
    + "{%- if m.role in ('user', 'assistant') -%}"
    + SAYS
    + "{%- endif -%}"
    + END
)
NO_DEVELOPER = ChatTemplate(
    EACH
    + "{%- if m.role == 'developer' -%}{{ raise_exception('no developers') }}{%- endif -%}"
    + SAYS
    + END
)
ONLY_DEVELOPER = ChatTemplate(
    EACH + "{%- if m.role in ('user', 'assistant', 'developer') -%}" + SAYS + "{%- endif -%}" + END
)
IN_FIRST_USER = ChatTemplate(
    "{%- if messages[0].role == 'system' -%}{%- set head = messages[0].content + ' ' -%}{%- set messages = messages[1:] -%}{%- endif -%}"
    + EACH
    + "[{{ m.role }}]{%- if loop.first -%}{{ head }}{%- endif -%}{{ m.content }}[/]"
    + END
)
PARTS = ChatTemplate(
    EACH
    + "[{{ m.role }}]{%- for p in m.content -%}{%- if p['type'] == 'text' -%}{{ p['text'] }}{%- endif -%}{%- endfor -%}[/]"
    + END
)


def chat(*turns: str) -> list[dict[str, Any]]:
    """ "system: Be brief." and so on, as messages."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]


HEAD = ("system: A.", "user: hi")
LATE = ("system: A.", "user: hi", "system: B.")
BETWEEN = ("user: hi", "assistant: yes", "system: B.", "user: bye")
BEHIND_A_RESULT = (
    "user: hi",
    "assistant: call",
    "tool: rain",
    "developer: B.",
    "assistant: wet",
    "user: bye",
)


@pytest.mark.parametrize(
    ("template", "turns", "text"),
    [
        (STRICT, ("developer: A.", "user: hi"), "[sys]A.[/][user]hi[/]"),
        (STRICT, ("system: A.", "developer: B.", "system: ", "system: C.", "user: hi"), "[sys]A.\n\nB.\n\nC.[/][user]hi[/]"),
        (STRICT, LATE, "[sys]A.[/][user]hi\n\nB.[/]"),
        (STRICT, ("user: hi", "developer: B.", "system: C."), "[user]hi\n\nB.\n\nC.[/]"),
        (STRICT, BETWEEN, "[user]hi[/][assistant]yes[/][user]B.\n\nbye[/]"),
        (STRICT, ("user: hi", "assistant: yes", "system: B.", "assistant: no"), "[user]hi[/][assistant]yes[/][user]B.[/][assistant]no[/]"),
        (STRICT, BEHIND_A_RESULT, "[user]hi[/][assistant]call[/][tool]rain\n\nB.[/][assistant]wet[/][user]bye[/]"),
        (FIRST_ONLY, LATE, "[sys]A.[/][user]hi\n\nB.[/]"),
        (FIRST_ONLY, ("developer: A.", "user: hi"), "[sys]A.[/][user]hi[/]"),
        (ALTERNATES, HEAD, "[user]A.\n\nhi[/]"),
        (ALTERNATES, LATE, "[user]A.\n\nhi\n\nB.[/]"),
        (ALTERNATES, ("system: A.", "assistant: yes", "user: hi"), "[user]A.[/][assistant]yes[/][user]hi[/]"),
        (ALTERNATES, ("system: A.",), "[user]A.[/]"),
        (NO_SYSTEM, HEAD, "[user]A.\n\nhi[/]"),
        (NO_SYSTEM, BETWEEN, "[user]hi[/][assistant]yes[/][user]B.\n\nbye[/]"),
        (ANY_ROLE, LATE, "[system]A.[/][user]hi[/][system]B.[/]"),
        (ANY_ROLE, ("developer: A.", "user: hi", "developer: B."), "[system]A.[/][user]hi[/][system]B.[/]"),
        (DEVELOPER, ("system: A.", "developer: B.", "user: hi"), "[system]A.[/][dev]B.[/][user]hi[/]"),
        (DEVELOPER, ("user: hi", "developer: B.", "user: bye"), "[user]hi[/][dev]B.[/][user]bye[/]"),
        (DEVELOPER_FIRST, ("system: A.", "developer: B.", "user: hi"), "[dev]A.\n\nB.[/][user]hi[/]"),
        (DEVELOPER_FIRST, ("developer: A.", "user: hi", "developer: B."), "[dev]A.[/][user]hi\n\nB.[/]"),
        (NO_DEVELOPER, ("developer: A.", "user: hi"), "[system]A.[/][user]hi[/]"),
        (ONLY_DEVELOPER, HEAD, "[developer]A.[/][user]hi[/]"),
        (IN_FIRST_USER, HEAD, "[user]A. hi[/]"),
        (IN_FIRST_USER, ("system: A.",), "[user]A. [/]"),
        (ANY_ROLE, ("system: A.",), "[system]A.[/]"),
        (PARTS, HEAD, "[system]A.[/][user]hi[/]"),
    ],
)  # fmt: skip
def test_system_messages_stand_where_the_template_accepts_them(
    template: ChatTemplate, turns: tuple[str, ...], text: str
) -> None:
    assert template.render(chat(*turns), add_generation_prompt=False) == text
    sent = chat(*turns)
    template.render(sent)
    assert sent == chat(*turns), "the caller's messages stay as they are"


TURNS_OR_CALLS = ChatTemplate(  # as Mistral's: turns, beside calls and their results, which have ids of nine letters
    "{%- set ns = namespace(n=0) -%}"
    + EACH
    + "{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}"
    "{%- if (m.role == 'user') != (ns.n % 2 == 0) -%}{{ raise_exception('take turns') }}{%- endif -%}{%- set ns.n = ns.n + 1 -%}"
    + SAYS
    + "{%- elif m.tool_calls -%}{%- for c in m.tool_calls -%}{%- if c.id | length != 9 -%}{{ raise_exception('nine') }}{%- endif -%}"
    "[call {{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]{%- endfor -%}"
    "{%- elif m.role == 'tool' -%}{%- if m.tool_call_id | length != 9 -%}{{ raise_exception('nine') }}{%- endif -%}"
    "[result {{ m.tool_call_id }}]{{ m.content }}[/]{%- endif -%}" + END
)


@pytest.mark.parametrize(
    ("template", "turns", "text"),
    [
        (ALTERNATES, ("user: a", "user: b", "user: c"), "[user]a\n\nb\n\nc[/]"),
        (ALTERNATES, ("user: a", "assistant: b", "assistant: c", "user: d"), "[user]a[/][assistant]b\n\nc[/][user]d[/]"),
        (ALTERNATES, ("assistant: a", "user: b"), "[user][/][assistant]a[/][user]b[/]"),
        (IN_FIRST_USER, ("user: a", "user: b"), "[user]a[/][user]b[/]"),
        (STRICT, ("system: A.", "user: a", "user: b"), "[sys]A.[/][user]a[/][user]b[/]"),
        (STRICT, ("assistant: a", "user: b"), "[assistant]a[/][user]b[/]"),
    ],
)  # fmt: skip
def test_a_template_that_wants_turns_gets_them(
    template: ChatTemplate, turns: tuple[str, ...], text: str
) -> None:
    assert template.render(chat(*turns), add_generation_prompt=False) == text


def called_by(*ids: str | None) -> list[dict[str, Any]]:
    """A question, calls with these ids, and a result for each."""
    function = {"name": "f", "arguments": '{"a": 1}'}
    calls = [{"function": function} | ({"id": id_} if id_ else {}) for id_ in ids]
    results = [
        {"role": "tool", "content": f"r{i}"} | ({"tool_call_id": id_} if id_ else {})
        for i, id_ in enumerate(ids)
    ]
    return [*chat("user: hi"), {"role": "assistant", "content": None, "tool_calls": calls}, *results]


def test_a_user_message_behind_a_result_joins_it_if_turns_must_change() -> None:
    messages = [
        *called_by("abcdefgh1"),
        *chat("user: and?", "user: now?", "assistant: wet", "user: bye"),
    ]
    text = TURNS_OR_CALLS.render(messages, add_generation_prompt=False)
    assert text.endswith("[result abcdefgh1]r0\n\nand?\n\nnow?[/][assistant]wet[/][user]bye[/]")
    assert ANY_ROLE.render(messages, add_generation_prompt=False).endswith(
        "[tool]r0[/][user]and?[/][user]now?[/][assistant]wet[/][user]bye[/]"
    )


@pytest.mark.parametrize(
    "ids", [("call_0123456789abcdef", "toolu_01", "abcdefgh1"), (None, None), ("call_1", None)]
)
def test_ids_of_calls_have_the_form_that_the_template_wants(ids: tuple[str | None, ...]) -> None:
    text = TURNS_OR_CALLS.render(called_by(*ids))
    written = re.findall(r"\[call (\w{9}) ", text)
    assert written == re.findall(r"\[result (\w{9})\]", text) and len(set(written)) == len(ids)
    assert text == TURNS_OR_CALLS.render(called_by(*ids)), "the same in every request"
    assert ("abcdefgh1" in text) == ("abcdefgh1" in ids)


def test_ids_stay_where_any_will_do() -> None:
    shown = ChatTemplate(
        EACH
        + "{%- for c in m.tool_calls -%}{{ c.id }}{%- endfor -%}{{ m.tool_call_id }}{{ m.content }}"
        + END
    )
    assert "call_0123456789abcdef" in shown.render(called_by("call_0123456789abcdef"))


def test_earlier_messages_keep_their_text_when_a_later_system_message_comes() -> None:
    """A moved message stays near its place, so that the prefix cache keeps the text before it."""
    before = STRICT.render(
        chat("system: A.", "user: hi", "assistant: yes", "user: bye"), add_generation_prompt=False
    )
    after = STRICT.render(
        chat("system: A.", "user: hi", "assistant: yes", "user: bye", "system: B."),
        add_generation_prompt=False,
    )
    assert after == before.removesuffix("[/]") + "\n\nB.[/]"


def test_a_template_that_fails_on_everything_gets_the_chat_as_it_was_sent() -> None:
    failing = ChatTemplate(
        "{{ raise_exception('not ' + messages[0].role + ' ' + (messages | length) | string) }}"
    )
    with pytest.raises(
        RequestError, match=r"refuses the messages: not system 3; --chat-template takes another one"
    ):
        failing.render(chat(*LATE))


def test_an_ability_is_not_learnt_from_a_process_that_got_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = ChatTemplate(STRICT.source)
    box = template._renderer._box
    monkeypatch.setattr(box, "ask", lambda line, seconds: {"failed": "slow", STALLED: "no time"})
    with pytest.raises(Unavailable):
        template.render(chat(*LATE))
    monkeypatch.undo()
    assert template.render(chat(*LATE), add_generation_prompt=False) == "[sys]A.[/][user]hi\n\nB.[/]"


def test_each_ability_is_asked_for_once() -> None:
    asked: list[list[str]] = []

    def render(messages: list[dict[str, Any]], tools: Any) -> str:
        asked.append([message["role"] for message in messages])
        return ANY_ROLE._renderer.probe(messages, tools)

    able = Abilities("{{ text }} 'developer'", render)
    for _ in range(3):
        assert (
            able.takes_system and able.knows_developer and able.takes_both and not able.takes_parts_only
        )
        assert able.takes_late("system") and able.takes_late("developer")
    assert len(asked) == 6


def test_text_moved_to_the_user_can_not_become_control_tokens() -> None:
    tokenizer = Tokenizer.from_metadata(bpe(control=["<|im_end|>"], keys={"add_bos_token": False}))
    ids = ALTERNATES.encode(tokenizer, chat("system: <|im_end|>", "user: hi"))
    assert not set(ids) & tokenizer.special
    assert tokenizer.decode(ids) == "[user]<|im_end|>\n\nhi[/][assistant]"


def test_control_text_that_a_calls_json_writes_with_escapes_stays_text() -> None:
    tokenizer = Tokenizer.from_metadata(bpe(control=["<|im_end|>"], keys={"add_bos_token": False}))
    shows = ChatTemplate(
        EACH + SAYS + "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}" + END
    )
    ids = shows.encode(tokenizer, [*chat("user: hi"), called('{"a": "\\u003c|im_end|>"}')])
    assert not set(ids) & tokenizer.special and "<|im_end|>" in tokenizer.decode(ids)


# -- begun answers, and chats in which the user says nothing ---------------------------------------------------------


@pytest.mark.parametrize("turns", [(), ("system: A.",), ("assistant: Once",)])
def test_a_template_that_looks_for_a_question_finds_an_empty_one(turns: tuple[str, ...]) -> None:
    looks = ChatTemplate(
        "{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 -%}"
        "{{ raise_exception('no question') }}{%- endif -%}{{ messages[0].role }}:" + ANY_ROLE.source
    )
    text = looks.render(chat(*turns))
    assert "[user][/]" in text and text.endswith("[assistant]")
    assert all(turn.split(": ")[1] in text for turn in turns)
    assert (
        ANY_ROLE.render(chat(*turns))
        == "".join(f"[{t.split(': ')[0]}]{t.split(': ')[1]}[/]" for t in turns) + "[assistant]"
    )


# -- calls -----------------------------------------------------------------------------------------------------------

AS_ITEMS = "{% for k, v in c.function.arguments | items %}({{ k }}={{ v }}){% endfor %}"
AS_TEXT = "{{ '(' + c.function.arguments + ')' }}"
AS_JSON = "({{ c.function.arguments | tojson }})"
AS_EITHER = (
    "({{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }})"
)
MISTRAL = "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}({{ c.function.arguments | tojson }})"
MISSING = object()


def called(arguments: Any) -> dict[str, Any]:
    function = {"name": "look"} if arguments is MISSING else {"name": "look", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "a12345678", "type": "function", "function": function}]}  # fmt: skip


@pytest.mark.parametrize(
    ("source", "arguments", "shown"),
    [
        (AS_ITEMS, "null", "look"),
        (AS_ITEMS, None, "look"),
        (AS_ITEMS, "", "look"),
        (AS_ITEMS, MISSING, "look"),
        (AS_ITEMS, '{"at": "Oslo"}', "look(at=Oslo)"),
        (AS_ITEMS, "Oslo", "look(arguments=Oslo)"),
        (AS_ITEMS, "[1]", "look(arguments=[1])"),
        (AS_ITEMS, "NaN", "look(arguments=NaN)"),
        (AS_TEXT, {"at": "Ålesund"}, 'look({"at": "Ålesund"})'),
        (AS_TEXT, None, "look({})"),
        (AS_TEXT, '{"at":1}', 'look({"at":1})'),
        (AS_JSON, '{"at":1}', 'look({"at": 1})'),
        (AS_JSON, "Oslo", 'look("Oslo")'),
        (AS_EITHER, '{"at":1}', 'look({"at": 1})'),
        (AS_EITHER, "Oslo", "look(Oslo)"),
        (MISTRAL, '{"at":1}', 'look({"at": 1})'),
    ],
)
def test_arguments_have_the_form_that_the_template_writes(
    source: str, arguments: Any, shown: str
) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}" + source + "{% endfor %}"
    template = ChatTemplate(EACH + calls + END)
    assert template.render([*chat("user: hi"), called(arguments)], add_generation_prompt=False) == shown


@pytest.mark.parametrize("calls", [[], None, ()])
def test_calls_that_are_none_are_no_field(calls: Any) -> None:
    shows = ChatTemplate(
        EACH
        + "{%- if m.tool_calls is defined or 'function_call' in m or m.refusal is defined -%}[call]{%- else -%}"
        + SAYS
        + "{%- endif -%}"
        + END
    )
    message = {"role": "assistant", "content": "Hello.", "tool_calls": calls, "function_call": None, "refusal": None}  # fmt: skip
    assert shows.render([message], add_generation_prompt=False) == "[assistant]Hello.[/]"


# -- tools -----------------------------------------------------------------------------------------------------------

TOJSON = ChatTemplate("{% for t in tools %}{{ t | tojson }}{% endfor %}")
FIELDS = ChatTemplate(
    "{% for t in tools %}{{ t.function.name + ': ' + t.function.description }}{% for k, v in t.function.parameters.properties.items() %}"
    " {{ k }}{% endfor %}{% endfor %}{{ messages[0].content }}"
)
USER = chat("user: hi")


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": fields}]


def test_a_tools_fields_come_out_in_the_order_in_which_they_were_sent() -> None:
    sent = [
        {"function": {"zeta": 1, "parameters": {"b": {"z": 1, "a": 2}, "a": []}, "name": "n", "description": "d"}, "type": "function", "x": 1}
    ]  # fmt: skip
    assert TOJSON.render(USER, tools=sent) == (
        '{"function": {"zeta": 1, "parameters": {"b": {"z": 1, "a": 2}, "a": []}, "name": "n", "description": "d"}, "type": "function", "x": 1}'
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": "now"}, '"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}'),
        (
            {"parameters": {"type": "object"}, "name": "now", "description": None},
            '"parameters": {"type": "object"}, "name": "now", "description": ""',
        ),
        (
            {"name": "now", "description": "d", "parameters": None, "strict": None},
            '"name": "now", "description": "d", "parameters": {"type": "object", "properties": {}}',
        ),
    ],
)  # fmt: skip
def test_absent_fields_of_a_tool_are_empty(fields: dict[str, Any], text: str) -> None:
    assert (
        TOJSON.render(USER, tools=function(**fields))
        == '{"type": "function", "function": {' + text + "}}"
    )


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}])
def test_templates_that_read_a_tool_field_by_field_find_every_field(parameters: Any) -> None:
    assert FIELDS.render(USER, tools=function(name="now", parameters=parameters)) == "now: hi"


def test_messages_and_parts_are_as_many_as_agents_send() -> None:
    part = {"type": "text", "text": "p"}
    text = ChatTemplate(CHATML).render([{"role": "user", "content": [part] * 5000}] + USER * 5000)
    assert text.count("p\np") > 2000 and text.count("hi") == 5000


def test_refusals_of_a_template_name_the_flag_for_another() -> None:
    with pytest.raises(
        RequestError, match=r"fails on these messages: .*; --chat-template takes another one"
    ):
        ChatTemplate("{{ messages[0].a.b.c }}").render(USER)
    with pytest.raises(RequestError, match=r"does not compile: .*; --chat-template takes another one"):
        ChatTemplate("{% if %}").render(USER)


@pytest.mark.parametrize(
    ("source", "tools", "calls"),
    [
        ("{{ messages[0].content }}", False, False),
        ("{{ messages[0].content }}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}", True, False),
        ("{% for m in messages %}{{ m.content }}{{ (m.tool_calls or []) | tojson }}{% endfor %}", False, True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False, False),
        ("{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ m | tojson }}{% endfor %}", False, False),
        (
            "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
            "{% for k, v in c.function.arguments.items() %}{{ k }}{% endfor %}{% endfor %}{% endfor %}",
            False,
            True,
        ),
    ],
)  # fmt: skip
def test_probes_find_the_tools_that_a_template_shows(source: str, tools: bool, calls: bool) -> None:
    able = ChatTemplate(source).able()
    assert (able.shows_tools, able.shows_calls) == (tools, calls)


def test_a_template_of_its_own_for_tools_answers_for_chats_with_tools() -> None:
    own = ChatTemplate("{{ tools | tojson }}")
    both = ChatTemplate("{{ messages[0].content }}", tool_use=own)
    assert both.able(tools=True).shows_tools and not both.able(tools=False).shows_tools


RESPONSES = ChatTemplate(
    EACH
    + "<{{ m.role }}>{% for c in m.tool_calls or [] %}call:{{ c.function.name }}{{ c.function.arguments | tojson }};{% endfor %}"
    "{% for r in m.tool_responses or [] %}response:{{ r.name }}"
    "{{ r.response.ok if r.response is mapping else r.response }};{% endfor %}{{ m.content }}" + END
)


def test_results_stand_beside_their_calls_where_a_template_has_them_there() -> None:
    def call(id_: str, name: str) -> dict[str, Any]:
        return {"id": id_, "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}}

    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call("1", "f"), call("2", "g")]},
        {"role": "tool", "tool_call_id": "2", "content": '{"ok": "yes"}'},
        {"role": "tool", "tool_call_id": "1", "content": "[1]"},
        {"role": "assistant", "content": "", "tool_calls": [call("3", "h")]},
        {"role": "tool", "content": "late"},
        {"role": "user", "content": "and?"},
    ]
    assert RESPONSES.render(chat) == (
        '<user>hi<assistant>I look.call:f{"a": 1};call:g{"a": 1};response:gyes;response:f[1];'
        '<assistant>call:h{"a": 1};response:hlate;<user>and?[assistant]'
    )
    assert ANY_ROLE.render(chat).count("[tool]") == 3, "elsewhere they are messages"


KIMI = (
    EACH + "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments }}{% endfor %}{% if m.role == 'tool' %} of {{ m.tool_call_id }}{% endif %}" + END
)  # fmt: skip


@pytest.mark.parametrize("ids", [("functions.f:4", "functions.g:5"), ("call_a", "call_b"), (None, None)])
def test_calls_that_a_template_writes_by_their_ids_stay_together_and_keep_their_names(
    ids: tuple[str | None, str | None],
) -> None:
    calls = [
        {"type": "function", "function": {"name": name, "arguments": "{}"}}
        | ({"id": id_} if id_ else {})
        for name, id_ in zip("fg", ids, strict=True)
    ]
    results = [{"role": "tool", "content": "r"} | ({"tool_call_id": id_} if id_ else {}) for id_ in ids]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    own = ids if ids[0] == "functions.f:4" else ("functions.f:0", "functions.g:1")
    text = ChatTemplate(KIMI).render([*chat, *results])
    begin, sep = "<|tool_call_begin|>", "<|tool_call_argument_begin|>{}"
    assert f"[assistant]{begin}{own[0]}{sep}{begin}{own[1]}{sep}[tool]" in text
    if ids[0]:
        assert f"[tool]r of {own[0]}[tool]r of {own[1]}" in text


TURNS = ChatTemplate(
    "{% set ns = namespace(last='') %}" + EACH + "{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{% if role != 'model' or ns.last != 'model' %}<|turn>{{ role }}\n{% endif %}{% for c in m.tool_calls or [] %}"
    "<|tool_call>call:{{ c.function.name }}{}<tool_call|>{% endfor %}{% for r in m.tool_responses or [] %}"
    "<|tool_response>{{ r.response }}<tool_response|>{% endfor %}{{ m.content }}"
    "{% if m.content or not m.tool_responses %}<turn|>\n{% endif %}{% set ns.last = role %}{% endfor %}"
)  # fmt: skip


def test_text_a_call_and_its_result_are_one_turn_where_results_stand_beside_calls() -> None:
    def called(id_: str, said: str) -> list[dict[str, Any]]:
        call = {"id": id_, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        return [{"role": "assistant", "content": said, "tool_calls": [call]}, {"role": "tool", "tool_call_id": id_, "content": f"r{id_}"}]  # fmt: skip

    chat = [
        {"role": "user", "content": "hi"},
        *called("1", "So."),
        *called("2", ""),
        *called("3", "More."),
    ]
    call, result = "<|tool_call>call:f{}<tool_call|>", "<|tool_response>r%d<tool_response|>"
    assert TURNS.render(chat) == (
        f"<|turn>user\nhi<turn|>\n<|turn>model\nSo.{call}{result % 1}{call}{result % 2}More.{call}{result % 3}"
    )
    assert TURNS.render([*chat, {"role": "assistant", "content": "End."}]).endswith("End.<turn|>\n")


IN_TURNS = (
    "{% set ns = namespace(n=0) %}" + EACH + "{% if m.role != 'tool' and m.tool_calls is not defined %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('turns alternate') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
)  # fmt: skip
LISTED = "[TOOL_CALLS] [{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}, \"id\": \"{{ c.id }}\"}{{ '' if loop.last else ', ' }}{% endfor %}]</s>"
ONE_CALL = '<|head|>{{ m.role }}<|body|>\n\n{% if m.tool_calls %}{{ raise_exception(\'one\') if m.tool_calls | length > 1 }}{"name": "{{ m.tool_calls[0].function.name }}"}'
PLAIN_CALLS = "{% for c in m.tool_calls %}<call>{{ c.function.name }}</call>{% endfor %}"


@pytest.mark.parametrize(
    ("source", "first", "last"),
    [
        (
            IN_TURNS + EACH + "{% if m.tool_calls %}" + LISTED + "{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>{% else %}" + SAYS + "{% endif %}",
            ' I {look}.[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "a12345678"}, {"name": "g"', " More.[TOOL_CALLS] [{",
        ),
        (EACH + ONE_CALL + "{% else %}{{ m.content | trim }}{% endif %}<|end|>", '<|body|>\n\nI {look}.{"name": "f"}<|end|>', '<|body|>\n\nMore.{"name": "f"}<|end|>'),
        (EACH + "{% if m.tool_calls %}<turn>" + PLAIN_CALLS + "</turn>{% else %}" + SAYS + "{% endif %}", "[assistant]I {look}.[/]<turn><call>f</call><call>g", "[assistant]More.[/]<turn>"),
        (EACH + "[{{ m.role }}]{% if m.content %}{{ m.content }}{% else %}" + PLAIN_CALLS + "{% endif %}[/]", "[assistant]I {look}.<call>f</call><call>g", "[assistant]More.<call>f"),
        (EACH + "{{ raise_exception('both') if m.content and m.tool_calls }}[{{ m.role }}]{{ m.content }}" + PLAIN_CALLS.replace("m.tool_calls", "m.tool_calls or []") + "[/]", "]I {look}.<call>f", "]More.<call>f"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("has_results", [True, False])
def test_text_beside_a_call_stands_before_it_where_a_template_hides_one_of_the_two(
    source: str, first: str, last: str, has_results: bool
) -> None:
    def called(said: str, *ids: str) -> list[dict[str, Any]]:
        calls = [{"id": f"{i}12345678", "type": "function", "function": {"name": n, "arguments": "{}"}} for i, n in zip(ids, "fg", strict=False)]  # fmt: skip
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in calls]
        return [{"role": "assistant", "content": said, "tool_calls": calls}, *results[: 9 * has_results]]

    turn = [*called("I {look}.", "a", "b"), *called("", "c"), *called(" More.", "d")]
    said = [*turn, {"role": "assistant", "content": "Done."}]
    template = ChatTemplate(source + "{% endfor %}")
    texts = [template.render(part) for part in (USER + turn, USER + said, USER + said + USER + turn)]
    assert texts[1].startswith(texts[0]) and texts[2].startswith(texts[1]), "as the cache needs it"
    assert [texts[2].count(each) for each in (first, last, "Done.")] == [2, 2, 1]
    assert "12345678T" not in texts[2] and texts[0].index("I {look}.") < texts[0].index("More.")


def test_a_call_that_begins_otherwise_than_in_the_probe_hides_its_text_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = EACH + "{% if m.tool_calls %}<{{ loop.index }}>" + PLAIN_CALLS + "{% else %}" + SAYS
    template = ChatTemplate(source + "{% endif %}{% endfor %}")
    for _ in range(2):
        text = template.render([*USER, *USER, {**called(""), "content": "I look."}])
        assert text == "[user]hi[/][user]hi[/]<3><call>look</call>"
    assert caplog.text.count("the chat template hides them") == 1


def test_templates_read_json_and_change_lists_of_their_own() -> None:
    reads = ChatTemplate("{{ ('{\"a\": [1, 2]}' | fromjson).a[1] }}{{ ('[3]' | from_json)[0] }}")
    assert reads.render(USER) == "23"
    makes = "{% set l = [] %}{% set d = {} %}{% for m in messages %}{% set _ = l.append(m.role) %}{% set _ = d.update({m.role: 1}) %}{% endfor %}"
    assert ChatTemplate(makes + "{{ l | join }}{{ d }}").render(USER) == "user{'user': 1}"
    for given in ("messages.append(1)", "messages.clear()", "tools.pop()"):
        with pytest.raises(RequestError, match="can not be rendered"):
            ChatTemplate("{{ " + given + " }}").render(USER, tools=function(name="now"))


def test_a_file_with_an_empty_template_has_none() -> None:
    for empty in ("", " \n"):
        assert ChatTemplate.from_metadata({"tokenizer.chat_template": empty}) is None


COHERE = (
    "{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.tool_calls %}<|CHATBOT_TOKEN|><|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|><|START_ACTION|>[\n"
    '{% for c in m.tool_calls %}    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% if not loop.last %},{% endif %}\n{% endfor %}]<|END_ACTION|>{% else %}<|USER_TOKEN|>{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
)
MUSE = (
    "{% for m in messages %}{% if m.tool_calls %}<|start|>assistant to=self<|message|>{{ m.reasoning_content }}<|eom|>{% for c in m.tool_calls %}<|start|>assistant"
    ' to={{ c.function.name }}<|message|><atem:function_calls>\n<atem:invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments.items() %}'
    '<atem:parameter name="{{ k }}">{{ v if v is string else v | tojson }}</atem:parameter>\n{% endfor %}</atem:invoke>\n</atem:function_calls>'
    "{{ '<|eot|>' if loop.last else '<|eom|>' }}{% endfor %}{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|eot|>{% endif %}{% endfor %}"
)
LAGUNA = (
    "{% for m in messages %}{% if m.tool_calls %}<assistant>\n<think>{{ m.reasoning_content }}</think>{% for c in m.tool_calls %}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}"
    "</assistant>{% else %}<user>\n{{ m.content }}</user>\n{% endif %}{% endfor %}"
)
STEP = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}<think>\n{{ m.reasoning_content }}\n</think>\n{% for c in m.tool_calls %}<tool_call>\n"
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "before", "end", "name"),
    [
        (COHERE, "<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "cohere"),
        (MUSE, "<|start|>assistant", "<|eot|>", "muse"),
        (LAGUNA, "<assistant>\n", "</assistant>", "glm45"),
        (STEP, "<|im_start|>assistant\n", "<|im_end|>", "qwen3_coder"),
    ],
)
def test_calls_that_a_template_in_a_model_s_form_shows_are_read(
    source: str, before: str, end: str, name: str
) -> None:
    """Templates of the form of Command R7B's, Muse's, Laguna's and Step 3.5's: dialect and marks of reasoning are recognised, and what they
    show of an earlier answer is what the parser makes of it."""
    spoken, think = dialects.recognised(source), dialects.think_marks(source)
    assert spoken is not None and spoken.name == name and think is not None
    meant = [("look", {"place": "Bern", "days": 3}), ("look", {"place": "Genève", "days": 1})]
    calls = [
        {"type": "function", "function": {"name": tool, "arguments": json.dumps(values)}}
        for tool, values in meant
    ]
    said = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": calls}
    text = ChatTemplate(source).render([{"role": "user", "content": "?"}, said])
    answer = text.partition(before)[2].partition(end)[0]
    kinds = {"place": {"type": "string"}, "days": {"type": "integer"}}
    markup = AnswerMarkup(spoken, think, tools={"look": {"type": "object", "properties": kinds}})
    parser = markup.parser()
    parts = [*parser.push(answer), *parser.finish()]
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    values = [
        "".join(p.text for p in parts if isinstance(p, CallArguments) and p.index == i) for i in (0, 1)
    ]
    assert list(zip(names, map(json.loads, values), strict=True)) == meant
    assert "".join(part.text for part in parts if isinstance(part, Reasoning)).strip() == "Hm."
    assert not any(isinstance(part, Content) for part in parts)
