"""Calls whose marks models write loosely are read as they were meant; what is quoted in prose stays prose.

The texts are made from well-formed calls by changing one mark or several, so the right reading is known.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Mapping
from typing import Any

import pytest
from sampling import few

from pyspec.text.markup import dialect as dialects
from pyspec.text.markup.call_grammar import Lark
from pyspec.text.markup.dialect import AnswerMarkup
from pyspec.text.markup.parts import CallArguments, CallBegin, Content

Call = tuple[str, dict[str, Any]]
Forms = Mapping[str, tuple[str, ...]]
"""How the parts of a call are written: the right form first, then those of models."""


def _tool(**kinds: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": kind} for name, kind in kinds.items()}}


TOOLS: dict[str, dict[str, Any]] = {
    "look": _tool(place="string", days="integer", deep="boolean"),
    "look_up": _tool(text="string"),
    "save": _tool(path="string", text="string"),
    "mcp__files__read-all": _tool(path="string", range="array", options="object"),
    "run_it": _tool(command="string"),
    "now": _tool(),
}
TEXTS = (
    "Bern", "Bern by the river", "ls -l | grep 'x' > out", "two\nlines", "a < b && c > d", "x = {1: [2, 3]}, y", 'say "hi", it\'s', "<p>so</p>\n<br>",
    "def f(a, b):\n    return a[0]", "50 %, or: more", "C:/a/b.txt", "日本語 🦊", "<text>in</text> a tag",
)  # fmt: skip
PLAIN = ("Bern", "Bern by the river", "a.txt", "日本語 🦊", "50 %", "ls -l")
OTHERS: Mapping[str, tuple[Any, ...]] = {
    "integer": (3, -12),
    "boolean": (True, False),
    "array": ([1, 2], ["a", None]),
    "object": ({}, {"a": 1, "b": ["c"]}),
}


def some_call(rng: random.Random, texts: tuple[str, ...] = TEXTS) -> Call:
    name = rng.choice(list(TOOLS))
    kinds = {key: each["type"] for key, each in TOOLS[name]["properties"].items()}
    keys = [key for key in kinds if rng.random() < 0.8]
    return name, {k: rng.choice(texts if kinds[k] == "string" else OTHERS[kinds[k]]) for k in keys}


def bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read(markup: AnswerMarkup, text: str, size: int) -> tuple[list[tuple[str, Any]], str]:
    """The calls and the content of an answer that comes in pieces of this size."""
    parser = markup.parser()
    names, texts, content = list[str](), list[str](), ""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for part in [*itertools.chain(*map(parser.push, pieces)), *parser.finish()]:
        if isinstance(part, CallBegin):
            names.append(part.name)
            texts.append("")
        elif isinstance(part, CallArguments):
            texts[part.index] += part.text
        elif isinstance(part, Content):
            content += part.text
    read = []
    for name, arguments in zip(names, texts, strict=True):
        try:
            read.append((name, json.loads(arguments)))
        except ValueError:
            read.append((name, arguments))
    return read, content


def check(name: str, text: str, calls: list[Call], content: str = "") -> None:
    markup = AnswerMarkup(calls=dialects.dialect(name), tools=TOOLS)
    for size in (1, 5, len(text)):
        assert read(markup, text, size) == (calls, content), (size, text)


def tags(
    word: str, key: str, prefix: str = "", open_: str = "", close: str = "", line: str = ""
) -> Forms:
    """Of a dialect with tags: the exact ones are <word=name> or <word name="name">."""
    begin, end = f"<{prefix}", f"</{prefix}"
    heads = [f'{begin}{word} name="NAME">', f"{begin}{word}=NAME>"]
    keys = [f'{begin}{key} name="NAME">', f"{begin}{key}=NAME>"]
    own = [heads, keys] if word == "invoke" else [heads[::-1], keys[::-1]]
    loose = [
        [
            f'{begin}{each}="NAME">', f"{begin}{each}='NAME'>", f"{begin}{each} name='NAME'>", f"{begin}{each}=NAME >", f"{begin}{each} NAME>",
            f"{begin}{each}=NAME", f"{prefix}{each}=NAME>", f'{begin}{each}="NAME>', f"{begin}{each}=NAME>\n{begin}{each}=NAME>", f'{begin}{each} name="NAME" kind="x">',
        ]
        for each in (word, key)
    ]  # fmt: skip
    return {
        "open": (open_, f"{open_}\n{open_}", ""),
        "head": (*own[0], *loose[0]),
        "key": (*own[1], *loose[1]),
        "value_end": (
            f"{line}{end}{key}>\n", f"{end}{key}>\n{end}{key}>", f"{line}{end}{key}\n", "\n</KEY>\n", f"{line}{end}{key}=KEY>", f"{end}{key} >",
            f"{line}{end}param>", f"{line}{begin}{key}>\n", "\n",
        ),
        "end": (f"{end}{word}>", "", f"{end}{word}>\n{end}{word}>", f"{end}{word}", f"{end}{word} >"),
        "close": (close, f"{close}\n{close}", close[:-1], ""),
        "line": (line,),
    }  # fmt: skip


FORMS: dict[str, Forms] = {
    "qwen3_coder": tags("function", "parameter", "", "<tool_call>", "</tool_call>", "\n"),
    "seed_oss": tags("function", "parameter", "", "<seed:tool_call>", "</seed:tool_call>"),
    "minimax_m2": tags("invoke", "parameter", "", "<minimax:tool_call>", "</minimax:tool_call>"),
    "muse": tags("invoke", "parameter", "atem:", "<atem:function_calls>", "</atem:function_calls>"),
    "deepseek_v32": tags("invoke", "parameter", "｜DSML｜", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    "glm45": {
        "open": ("<tool_call>", "<tool_call>\n<tool_call>"),
        "head": ("NAME\n",  "NAME"),
        "key": (
            "<arg_key>NAME</arg_key>\n<arg_value>", "<arg_key>NAME</arg_key><arg_value>", "<arg_key>NAME</arg_key>", "<arg_key>NAME</arg_key></arg_key><arg_value>",
            "<arg_key><arg_key>NAME</arg_key><arg_value>", "<arg_key>NAME<arg_value>", "<tool_call>NAME</arg_key><arg_value>", "NAME</arg_key><arg_value>",
            "<arg_key>NAME</arg_key><arg_value><arg_value>", "<arg_key>NAME</arg_value><arg_value>", "<arg_key>NAME</arg_key>\n<arg_key>", "<arg_value>NAME</arg_key><arg_value>",
            "<arg_key>NAME: <arg_value>", "<arg_key>NAME</arg_key>: <arg_value>", "NAME=<arg_value>", "<arg_key>NAME:</arg_key><arg_value>",
            "<arg_key>NAME</arg_key\n<arg_value>", "<arg_key>NAME/arg_key><arg_value>", "<arg_key>NAME</arg_key><arg_value", "<arg_key>NAME</arg_key>arg_value>",
        ),
        "value_end": (
            "</arg_value>\n", "</arg_value>", "</arg_value></arg_value>", "</arg_value\n", "</arg_key>", "\n",
        ),
        "end": ("",),
        "line": ("",),
        "close": ("</tool_call>", "</tool_call>\n</tool_call>", "</tool_call", ""),
    },
}  # fmt: skip


def elements(form: Mapping[str, str], call: Call) -> str:
    """A call in these forms, without the marks around it."""
    rows = [
        form["key"].replace("NAME", key)
        + (form["line"] if form["key"].endswith(">") else "\n")
        + bare(value)
        + form["value_end"].replace("KEY", key)
        for key, value in call[1].items()
    ]
    return form["head"].replace("NAME", call[0]) + "".join(rows) + form["end"]


def chosen(forms: Forms, rng: random.Random, n: int) -> dict[str, str]:
    """The right forms, and n other ones among them."""
    form = {part: each[0] for part, each in forms.items()}
    for part in rng.sample(list(forms), n):
        form[part] = rng.choice(forms[part])
    return form


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("n", few([150, 2000], 150))
def test_elements_with_marks_that_are_missing_twice_quoted_or_wrong(name: str, n: int) -> None:
    rng = random.Random(51)
    for i in range(n):
        form = chosen(FORMS[name], rng, i % 3)
        call = some_call(rng, PLAIN if form["value_end"] == "\n" else TEXTS)
        if form["value_end"] == "\n" and not form["end"] + form["close"]:
            form["close"] = FORMS[name]["close"][0]  # an answer that ends inside a value
        if not form["head"].startswith("<"):
            form["open"] = FORMS[name]["open"][0]  # nothing else would tell that it is a call
        inside = elements(form, call)
        end = "" if inside.endswith("\n") else "\n"
        check(name, f"{form['open']}\n{inside}{end}{form['close']}", [call])


@pytest.mark.parametrize("name", FORMS)
def test_several_calls_of_elements_and_text_around_them(name: str) -> None:
    """In one block, in one each, and where the first has no end at all."""
    rng, forms = random.Random(52), FORMS[name]
    form = {part: each[0] for part, each in forms.items()}
    open_, close = form["open"], form["close"]
    for _ in range(60):
        calls = [some_call(rng), some_call(rng)]
        one, two = (elements(form, call) for call in calls)
        check(
            name,
            f"Well.\n\n{open_}\n{one}\n{close}\n{open_}\n{two}\n{close}\n\nDone.",
            calls,
            "Well.Done.",
        )
        check(name, f"{open_}\n{one}\n{close} Done.", calls[:1], "Done.")
        if form["end"]:
            check(name, f"{open_}\n{one}\n{two}\n{close}", calls)
            no_end = one.removesuffix(form["end"])
            if calls[0][1]:
                check(name, f"{open_}\n{no_end}\n{open_}\n{two}\n{close}", calls)
        elif calls[0][1]:
            check(name, f"{open_}\n{one}\n{open_}\n{two}\n{close}", calls)


def as_object(call: Call) -> str:
    return json.dumps({"name": call[0], "arguments": call[1]}, ensure_ascii=False)


OBJECTS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "nemotron_v2": ("<TOOLCALL>", "</TOOLCALL>"),
    "granite": ("<|tool_call|>", "<|/tool_call|>"),
    "mistral": ("[TOOL_CALLS]", ""),
    "cohere": ("<|START_ACTION|>", "<|END_ACTION|>"),
}
BARE = ("qwen3_coder", "seed_oss", "glm45", "minimax_m2", "muse", "deepseek_v32", "gemma4", "lfm2")


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_with_brackets_and_marks_that_are_left_over_or_missing(name: str) -> None:
    rng, (open_, close) = random.Random(53), OBJECTS[name]
    for _ in range(60):
        calls = [some_call(rng), some_call(rng)]
        one, two = map(as_object, calls)
        for between in ("", "\n", ", ", "}\n", "]\n"):
            check(name, f"{open_}\n{one}{between}{two}\n{close}", calls)
        check(name, f"{open_}[{one}, {two}]{close}", calls)
        for end in ("", "}", "}}", "]", "\n}\n"):
            check(name, f"{open_}{one}{end}\n{close}", calls[:1])
            check(name, f"{open_}{one}{end}", calls[:1])
        check(name, f"{open_}\n{open_}\n{one}\n{close}", calls[:1])
        if close:
            for n in (1, 2) if calls[0][1] else (1,):
                check(name, f"{open_}{one[:-n]}\n{close}", calls[:1])
            check(name, f"{open_}{one}\n{close}\n{close}\nDone.", calls[:1], "Done.")
            check(name, f"{open_}{one}\n{open_}{two}\n{close}", calls)
        if close.startswith("</"):
            check(name, f"{open_}{one}\n{close[:-1]}", calls[:1])


@pytest.mark.parametrize("name", BARE)
def test_objects_where_other_syntax_was_expected(name: str) -> None:
    rng = random.Random(54)
    open_, close = {
        "gemma4": ("<|tool_call>", "<tool_call|>"), "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    }.get(name) or (FORMS[name]["open"][0], FORMS[name]["close"][0])  # fmt: skip
    for _ in range(40):
        calls = [some_call(rng), some_call(rng)]
        one, two = map(as_object, calls)
        check(name, f"{open_}\n{one}\n{close}", calls[:1])
        check(name, f"Well.\n{open_}[{one}, {two}]{close}", calls, "Well.")
        if name in FORMS:
            head = FORMS[name]["head"][0].replace("NAME", calls[0][0])
            body = json.dumps(calls[0][1], ensure_ascii=False)
            check(name, f"{open_}{head}{body}{FORMS[name]['end'][0]}\n{close}", calls[:1])


@pytest.mark.parametrize(
    ("name", "other"),
    [("hermes", "qwen3_coder"), ("hermes", "glm45"), ("qwen3_coder", "glm45"), ("glm45", "qwen3_coder")],
)
def test_elements_where_other_syntax_was_expected(name: str, other: str) -> None:
    rng = random.Random(55)
    form = {part: each[0] for part, each in FORMS[other].items()}
    for _ in range(60):
        call = some_call(rng)
        check(name, f"{form['open']}\n{elements(form, call)}\n{form['close']}", [call])


@pytest.mark.parametrize("space", ["functions.", "default_api:", "mcp/"])
@pytest.mark.parametrize(
    "name", ["hermes", "qwen3_coder", "lfm2", "mistral_args", "deepseek_v3", "kimi_k2", "nemotron_v2"]
)
def test_a_name_behind_a_namespace_is_the_tools(name: str, space: str) -> None:
    for call in (("look", {"days": 3}), ("look_up", {"text": "a"})):
        check(name, written(name, (space + call[0], call[1])), [call])


def marked(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{marked(v, quote)}" for k, v in value.items()) + "}"
    return (
        "[" + ",".join(marked(v, quote) for v in value) + "]"
        if isinstance(value, list)
        else json.dumps(value)
    )


def test_gemma4_with_other_openers_brackets_and_quotes() -> None:
    rng = random.Random(56)
    for _ in range(400):
        call = some_call(rng, (*PLAIN, "Fine words, they: {said}", "x = (1, 2), y: [3]"))
        openers = (
            "call:", ":", "call ", "call: ", "", "call:google:mcp:", "call:default_api.", "google:", "call:a/b/",
        )  # fmt: skip
        opener = rng.choice(openers)
        begin, between, end = rng.choice(
            ("{:}", "{=}", "(=)", "(:)", ("{", " : ", " }"), ("(", "= ", ")"))
        )
        quote = rng.choice(('<|"|>', "'", '"')) if "(1" not in str(call) or begin == "{" else '<|"|>'
        key_quote = rng.choice(("", "", quote))
        pairs = rng.choice((",", ", ")).join(
            f"{key_quote}{k}{key_quote}{between}{marked(v, quote)}" for k, v in call[1].items()
        )
        close = rng.choice(("<tool_call|>", "<tool_call|>", "", "<tool_call|><tool_call|>"))
        check("gemma4", f"<|tool_call>{opener}{call[0]}{begin}{pairs}{end}{close}", [call])
    check(
        "gemma4",
        "<|tool_call>call:run_it{command:'it's: a, b'}<tool_call|>",
        [("run_it", {"command": "it's: a, b"})],
    )
    check(
        "gemma4", '<|tool_call>call:look{place:<|"|>Bern<|"|><tool_call|>', [("look", {"place": "Bern"})]
    )
    check("gemma4", '<|tool_call>call:look{place:<|"|>Bern}<tool_call|>', [("look", {"place": "Bern"})])
    check(
        "gemma4",
        "<|tool_call>call:now{}call:look{days:3}<tool_call|>",
        [("now", {}), ("look", {"days": 3})],
    )


WORDS = "calls_section_begin call_begin call_argument_begin call_end calls_section_end"
KIMI = tuple(f"<|tool_{word}|>" for word in WORDS.split())
DEEPSEEK = tuple(
    f"<｜tool▁{word}｜>" for word in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)


@pytest.mark.parametrize(("name", "marks"), [("kimi_k2", KIMI), ("deepseek_v3", DEEPSEEK)])
def test_named_calls_without_marks_and_under_other_names(name: str, marks: tuple[str, ...]) -> None:
    rng, (open_, begin, sep, end, close) = random.Random(57), marks
    for _ in range(200):
        calls = [some_call(rng), some_call(rng)]
        texts = []
        for i, (tool, values) in enumerate(calls):
            heads = (
                f"functions.{tool}:{i}", f"functions_{tool}_{i}", f"functions:{tool}:{i}", tool, f"{tool}:{i}",
                f"functions.{tool}", f" functions.{tool}:{i} ",
            )  # fmt: skip
            head = rng.choice(heads) if name == "kimi_k2" else tool
            body = json.dumps(values, ensure_ascii=False)
            text = json.dumps(body, ensure_ascii=False)
            body = rng.choice((body, body, text, f"```json\n{body}\n```", f"\n{body}\n", body + "}"))
            texts.append(
                begin
                + head
                + rng.choice((sep, sep, "" if body[0] in '{"' else sep))
                + body
                + rng.choice((end, end, "", end + end))
            )
        text = (
            rng.choice((open_, open_, ""))
            + rng.choice(("", "\n")).join(texts)
            + rng.choice((close, close, ""))
        )
        check(name, text, calls)


def in_tags(call: Call, rng: random.Random | None = None) -> str:
    """A call of Kimi K3. rng: chooses marks that models write in place of the right ones."""

    def one_of(*forms: str) -> str:
        return rng.choice(forms) if rng else forms[0]

    kinds = {str: "string", bool: "boolean", int: "number", list: "array", dict: "object"}
    rows = [
        one_of(
            f'<|open|>argument key="{k}" type="{kinds[type(v)]}"<|sep|>',
            f"<|open|>argument key='{k}'<|sep|>",
        )
        + bare(v)
        + one_of("<|close|>argument<|sep|>", "", "<|close|>argument<|sep|>\n")
        for k, v in call[1].items()
    ]
    if rng and rng.random() < 0.2:
        rows = [
            f'<|open|>json type="object"<|sep|>{json.dumps(call[1])}'
            + one_of("<|close|>json<|sep|>", "")
        ]
    head = one_of(
        f'<|open|>call tool="{call[0]}" index="1"<|sep|>', f"<|open|>call tool='{call[0]}'<|sep|>"
    )
    end = one_of("<|close|>call<|sep|>", "")
    begin = one_of(
        "<|open|>tools<|sep|>", "<|open|>tools<|sep|>\n", "<|open|>tools<|sep|><|open|>tools<|sep|>"
    )
    return (
        begin
        + head
        + "".join(rows)
        + end
        + one_of("<|close|>tools<|sep|>", "" if end else "<|close|>tools<|sep|>")
    )


def test_kimi_k3_with_other_quotes_and_marks_that_are_missing_or_twice() -> None:
    rng = random.Random(58)
    for _ in range(300):
        call = some_call(rng)
        check("kimi_k3", in_tags(call, rng), [call])


def test_the_ids_of_kimi_are_kept_and_those_of_odd_form_become_its_own() -> None:
    markup = AnswerMarkup(calls=dialects.dialect("kimi_k2"), tools=TOOLS)
    open_, begin, sep, end, close = KIMI
    heads = ("functions.look:3", "functions_now_4", "look", "functions.look:3", "functions.nobody:9")
    text = open_ + "".join(f"{begin}{head}{sep}{{}}{end}" for head in heads) + close
    parser = markup.parser()
    ids = [part.id for part in [*parser.push(text), *parser.finish()] if isinstance(part, CallBegin)]
    numbered = ("look:3", "now:4", "look:2", "look:4", "nobody:9")
    assert ids == [f"functions.{each}" for each in numbered]


@pytest.mark.parametrize("values", [{"place": "Bern"}, {"place": "Bern", "days": 3}, {}])
@pytest.mark.parametrize("word", ["arguments", "input", "parameters"])
def test_arguments_in_one_that_the_tool_does_not_have(word: str, values: dict[str, Any]) -> None:
    for name, kinds in itertools.product(
        ("deepseek_v32", "minimax_m2", "qwen3_coder", "glm45"), ("true", "false")
    ):
        form = {part: each[0] for part, each in FORMS[name].items()}
        if name == "deepseek_v32":
            form["key"] = form["key"].replace(">", f' string="{kinds}">')
        text = f"{form['open']}\n{elements(form, ('look', {word: values}))}\n{form['close']}"
        check(name, text, [("look", values)])
        other = f"{form['open']}\n{elements(form, ('look', {word: {'else': 1}}))}\n{form['close']}"
        assert read(AnswerMarkup(calls=dialects.dialect(name), tools=TOOLS), other, 7)[0][0][
            1
        ].keys() == {word}


def written(name: str, call: Call) -> str:
    """A well-formed call with its marks."""
    if name in FORMS:
        form = {part: each[0] for part, each in FORMS[name].items()}
        return f"{form['open']}\n{elements(form, call)}\n{form['close']}"
    if name in OBJECTS:
        return f"{OBJECTS[name][0]}[{as_object(call)}]{OBJECTS[name][1]}"
    body = json.dumps(call[1], ensure_ascii=False)
    pairs = ",".join(f"{k}:{marked(v, chr(34))}" for k, v in call[1].items())
    python = ", ".join(f"{k}={json.dumps(v)}" for k, v in call[1].items())
    return {
        "gemma4": f"<|tool_call>call:{call[0]}{{{pairs}}}<tool_call|>",
        "lfm2": f"<|tool_call_start|>[{call[0]}({python})]<|tool_call_end|>",
        "kimi_k2": f"{KIMI[0]}{KIMI[1]}functions.{call[0]}:0{KIMI[2]}{body}{KIMI[3]}{KIMI[4]}",
        "kimi_k3": in_tags(call),
        "deepseek_v3": f"{DEEPSEEK[0]}{DEEPSEEK[1]}{call[0]}{DEEPSEEK[2]}{body}{DEEPSEEK[3]}{DEEPSEEK[4]}",
        "mistral_args": f"[TOOL_CALLS]{call[0]}[ARGS]{body}",
        "functionary_v31": f"<function={call[0]}>{body}</function>",
        "firefunction_v2": f"functools[{as_object(call)}]",
        "llama3_json": f'<|python_tag|>{json.dumps({"name": call[0], "parameters": call[1]})}',
        "llama4": f"<|python_start|>[{call[0]}({python})]<|python_end|>",
    }[name]  # fmt: skip


LOST = {
    "cohere": {"<|START_ACTION|>"},
    "deepseek_v3": {DEEPSEEK[1], DEEPSEEK[2]},
    "deepseek_v32": set(),
    "firefunction_v2": {"functools["},
    "functionary_v31": set(),
    "gemma4": {"<|tool_call>"},
    "glm45": {"<tool_call>"},
    "granite": {"<|tool_call|>"},
    "hermes": {"<tool_call>"},
    "kimi_k2": {KIMI[1], KIMI[2]},
    "kimi_k3": set(),
    "lfm2": {"<|tool_call_start|>"},
    "llama3_json": {"<|python_tag|>"},
    "llama4": {"<|python_start|>"},
    "minimax_m2": set(),
    "mistral": {"[TOOL_CALLS]"},
    "mistral_args": {"[TOOL_CALLS]", "[ARGS]"},
    "muse": set(),
    "nemotron_v2": {"<TOOLCALL>"},
    "qwen3_coder": set(),
    "seed_oss": set(),
}
"""Marks without which, or without whose last sign, a text is no call: docs/agents.md says so."""
SPOKEN = sorted(LOST)
QUOTED: tuple[str, ...] = (
    "Write `CALL` then.", "Like this:\n\n```xml\nCALL\n```\n\nThat is all.", "So: ```\nCALL\n```", "~~~\nCALL\n~~~\nis it.", "````md\n```\nCALL\n```\nCALL\n````",
    'He said "CALL" once.', "It is 'CALL', or (\"CALL\").", "“CALL” and „CALL“ and «CALL».", "> CALL\n\nwas cited.", "- `CALL`\n- ``CALL``\n", "1. Put `so: CALL` there.",
)  # fmt: skip
BEFORE: tuple[str, ...] = (
    "Well.\n\n", "`ls` is `it`. ", "```\nls\n```\n", "The dogs' ", 'Say "so". ', 'I look for "x"', "It's a ` sign.\n", "> cited\n\n", "a > b\n", "~~old~~ ", "``a ` b`` ", "",
)  # fmt: skip


@pytest.mark.parametrize("name", SPOKEN)
def test_what_is_quoted_or_stands_in_code_is_no_call(name: str) -> None:
    rng = random.Random(58)
    for prose in QUOTED:
        call = rng.choice(
            (("now", {}), ("look", {"place": "Bern"}), ("save", {"path": "a", "text": "b"}))
        )
        text = prose.replace("CALL", written(name, call).replace("\n\n", "\n"))
        if "> " in prose:
            text = text.replace("\n", "\n> ").replace("\n> \n> was", "\n\nwas")
        check(name, text, [], text)
        if prose[-1] != "\n" and "```" not in prose:
            check(name, f"{text}\n\n{written(name, call)}", [call], text)


@pytest.mark.parametrize("name", SPOKEN)
def test_a_call_behind_text_with_quotes_and_code_is_one(name: str) -> None:
    for before in BEFORE:
        call = ("look", {"place": "Bern"})
        check(name, before + written(name, call), [call], before.rstrip())


@pytest.mark.parametrize("name", SPOKEN)
def test_mentions_of_marks_in_prose_are_no_calls(name: str) -> None:
    call = written(name, ("now", {}))
    marks = {mark for mark in dialects.dialect(name).marks if mark in call} | {
        "<function=now>",
        "<tool_call>",
        '<function="look">',
    }
    for mark in sorted(marks):
        for text in (
            f"Write `{mark}` first.",
            f"Then comes {mark} and so on.",
            f"{mark}\nis a mark.",
            f"A mark: {mark}",
        ):
            check(name, text, [], text)


def test_an_argument_that_is_nullable_in_openapis_words_may_be_null() -> None:
    tools = {
        "f": {"type": "object", "properties": {"n": {"type": "integer", "nullable": True}, "t": {"type": "string"}}}
    }  # fmt: skip
    for name, form in FORMS.items():
        right = {part: each[0] for part, each in form.items()}
        text = f"{right['open']}\n{elements(right, ('f', {'n': None, 't': 'null'}))}\n{right['close']}"
        markup = AnswerMarkup(calls=dialects.dialect(name), tools=tools)
        assert read(markup, text, 3) == ([("f", {"n": None, "t": "null"})], "")
        rules = Lark()
        source = rules.calls(dialects.dialect(name).rules(rules, tools, is_single=True))
        assert '"null"' in source and "nullable" not in source


@pytest.mark.parametrize(
    "word", ["gap", "name", "word", "tail", "attributes", "inside", "sign", "number", "ahead", "over"]
)
@pytest.mark.parametrize("name", FORMS)
def test_a_tool_and_an_argument_may_have_any_word_as_a_name(name: str, word: str) -> None:
    """Marks around names of no offered tool have to be exact, whatever the offered ones are called."""
    markup = AnswerMarkup(calls=dialects.dialect(name), tools={word: _tool(**{word: "string"})})
    rng = random.Random(59)
    for i in range(24):
        form = chosen(FORMS[name], rng, i % 3)
        if not form["head"].startswith("<"):
            form["open"] = FORMS[name]["open"][0]
        if form["value_end"] == "\n" and not form["end"] + form["close"]:
            form["close"] = FORMS[name]["close"][0]
        inside = elements(form, (word, {word: "Bern"}))
        end = "" if inside.endswith("\n") else "\n"
        text = f"{form['open']}\n{inside}{end}{form['close']}"
        assert read(markup, text, 5) == ([(word, {word: "Bern"})], ""), text
        if form["head"].startswith("<"):
            other = text.replace(f"={word}", "=other").replace(f'"{word}', '"other')
            assert read(markup, f"Write {other}", 5)[0] in ([], [("other", {"other": "Bern"})]), other


TOKENS = {"missing": "", "twice": "TT", "with spaces": " T ", "between lines": "\nT\n", "cut": "CUT"}


@pytest.mark.parametrize("how", TOKENS)
def test_tokens_of_kimi_k3_that_are_missing_twice_or_with_spaces(how: str) -> None:
    text = in_tags(("look", {"place": "Bern", "days": 3}))
    for found in re.finditer(r"<\|(open|close|sep)\|>", text):
        token, end = found.group(), text[found.end() :]
        is_needed = token != "<|sep|>" or text[: found.start()].endswith('"')
        if found.start() < len("<|open|>tools<|sep|>") or (how == "missing" and is_needed):
            continue  # docs/agents.md: without it a mark is text
        other = TOKENS[how].replace("CUT", token[:-1]).replace("T", token)
        said = text[: found.start()] + other + end
        (call,), content = read(AnswerMarkup(calls=dialects.dialect("kimi_k3"), tools=TOOLS), said, 3)
        values = {k: v.strip() if isinstance(v, str) else v for k, v in call[1].items()}
        assert (call[0], values) == ("look", {"place": "Bern", "days": 3}), said
        assert content.strip() in ("", "<|sep|>"), said


NO_CALLS = (
    "{'place': 'it\\'s',  \"deep\": True}", '{"a":[1,2,{"b":  3}],\n "c" :None}', "{'name': 'nobody', 'arguments': {}}", "[ {'a': .5,} ]", "[{]", "{",
)  # fmt: skip


@pytest.mark.parametrize("text", NO_CALLS)
@pytest.mark.parametrize(
    "name", [*OBJECTS, "llama3_json", "llama4", "deepseek_v3", "kimi_k2", "glm45", "lfm2"]
)
def test_an_object_that_is_no_call_stays_as_it_was_written(name: str, text: str) -> None:
    mark = "" if name.startswith("llama") else dialects.dialect(name).syntax.open[0]
    for begin, end in (("", ""), ("```json\n", "\n```")):
        if "nobody" not in text or not mark:
            check(name, f"{mark}{begin}{text}{end}", [], f"{mark}{begin}{text}{end}")


INNER = (
    'echo "hi"', '"a" b', 'sed "s/a/b/" | grep "x y" && ls', 'say "no", then leave', '"q"', 'x="$y"', "it's", "the 'a' b", 'a="b c"; d',
)  # fmt: skip


@pytest.mark.parametrize("text", INNER)
def test_quotes_in_a_string_that_are_not_escaped(text: str) -> None:
    for before, behind in (("", ', "deep": true'), ('"deep": true, ', "")):
        body = f'{{{before}"place": "{text}"{behind}}}'
        said = f'<tool_call>\n{{"name": "look", "arguments": {body}}}\n</tool_call>'
        check("hermes", said, [("look", {"place": text, "deep": True})])
    if '"' not in text:
        said = f"<tool_call>{{'name': 'look', 'arguments': {{'place': '{text}'}}}}</tool_call>"
        check("hermes", said, [("look", {"place": text})])


def test_a_schema_of_one_type_counts_more_than_the_mark_of_a_value() -> None:
    """The marks of DeepSeek and Kimi K3 say whether a value is a string; models write the wrong one."""
    values = {"place": "3", "days": 3, "deep": "soon"}
    rows = "".join(
        f'<｜DSML｜parameter name="{k}" string="{kind}">{bare(v)}</｜DSML｜parameter>\n'
        for (k, v), kind in zip(values.items(), ("false", "true", "true"), strict=True)
    )
    text = f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n{rows}</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    check("deepseek_v32", text, [("look", values)])
    text = '<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|><|open|>argument key="days" type="string"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
    check("kimi_k3", text, [("look", {"days": 3})])


BERN, BERN_3 = {"place": "Bern"}, {"place": "Bern", "days": 3}
XML = "<tool_call>\n<function=look>\n<parameter=place>\nBern\n</parameter>\n</function>\n</tool_call>"
OTHERWISE: tuple[tuple[str, str, list[Call]], ...] = (
    *(("qwen3_coder", XML.replace(*each), [("look", BERN)]) for each in (
        ("=look", ' = "look"'), ("=look", "= look"), ("=place", ' = "place"'), ("=place", "= place"),
        ("<parameter=", "<param="), ("<parameter=place", '<param name="place"'), ("</parameter>", "</parameter>\n</place>"),
        ("</function>", "</look>"), ("</function>", "</func>"), ("</tool_call>", "</tool_"), ("</tool_call>", "<"),
    )),
    ("qwen3_coder", XML.replace("\n</function>\n</tool_call>", "\n<function=now>\n</function>\n</tool_call>"), [("look", BERN), ("now", {})]),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="look">\n<parameter name="place">Bern</parameter>\n<invoke name="now">\n</invoke>\n</tool_call>', [("look", BERN), ("now", {})]),
    ("minimax_m2", '<minimax:tool_call>\n<invoke  name="look">\n<param name="place">Bern</parameter>\n</invoke>\n</tool_call>', [("look", BERN)]),
    ("glm45", '<tool_call>look<arg_key>"place"</arg_key><arg_value>Bern</arg_value></tool_call>', [("look", BERN)]),
    ("glm45", "<tool_call>look<arg_key>place><arg_value>Bern<arg_value></tool_call>", [("look", BERN)]),
    *(("glm45", f"<tool_call>look\n{key}Bern</arg_value>\n</tool_call>", [("look", BERN)]) for key in (
        "<arg_key>place: <arg_value>", "<arg_key>place: ", "place: <arg_value>", "<arg_key>place</arg_key>: <arg_value>", "<arg_key>place</arg_key", "<arg_key>place =\n<arg_value>",
    )),
    ("glm45", "<tool_call>look\n<arg_key>place</arg_key>\n<arg_value>Bern</arg_value>\ndays: <arg_value>3</arg_value></tool_call>", [("look", BERN_3)]),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="look">\n<parameter name="place"Bern</parameter>\n<parameter name="days"3</parameter>\n</invoke>\n</minimax:tool_call>', [("look", BERN_3)]),
    *(("hermes", f"<tool_call>\n{body}\n</tool_call>", [("look", BERN)]) for body in (
        '{"type": "function", "function": {"name": "look", "arguments": {"place": "Bern"}}}', '{"function": "look", "arguments": {"place": "Bern"}}',
        '{"name": "look", "place": "Bern"}', '{"name": "look", "input": {"place": "Bern"}}', '```json\n{"name": "look", "arguments": {"place": "Bern"}}\n```',
    )),
    *(("cohere", f"<|START_ACTION|>{body}<|END_ACTION|>", [("look", BERN)]) for body in (
        '[\n    {"tool_call_id": "0", "tool_name": "look", "parameters": {"place": "Bern"}}\n]', '{"tool_name": "look", "parameters": {"place": "Bern"}}',
        '[{"tool_name": "look", "tool_call_id": 0, "parameters": {"place": "Bern"}}]', "[{'tool_call_id': '0', 'tool_name': 'look', 'parameters': {'place': 'Bern'}}]",
        '[{"tool_call_id": "0", "tool_name": "tools.look", "place": "Bern"}]',
    )),
    ("cohere", '<|START_ACTION|>[{"tool_name": "nobody", "parameters": {}}]<|END_ACTION|>', [("nobody", {})]),
    ("gemma4", '<|tool_call>call:"look"{place:<|"|>Bern<|"|>}<tool_call|>', [("look", BERN)]),
    ("gemma4", "<|tool_call>call:now<tool_call|>", [("now", {})]),
    ("kimi_k2", f"{KIMI[0]}functions.look:0{KIMI[2]}{{'place': 'Bern'}}{KIMI[3]}{KIMI[4]}", [("look", BERN)]),
    ("kimi_k2", f"{KIMI[0]}{KIMI[1]}functions.now:0:{KIMI[3]}{KIMI[4]}", [("now", {})]),
    ("kimi_k2", f"{KIMI[0]}{KIMI[1]}functions.now:0{KIMI[2]}null{KIMI[3]}{KIMI[4]}", [("now", {})]),
    ("kimi_k2", f'{KIMI[0]}{KIMI[1]}{{"name": "look", "arguments": {{"place": "Bern"}}}}{KIMI[3]}{KIMI[4]}', [("look", BERN)]),
    ("deepseek_v3", f'{DEEPSEEK[0]}look{DEEPSEEK[2]}{{"place": "Bern"}}{DEEPSEEK[3]}{DEEPSEEK[4]}', [("look", BERN)]),
    ("mistral_args", '[TOOL_CALLS]look[ARGS][ARGS]{"place": "Bern", "days": 3}now[ARGS]{}', [("look", BERN_3), ("now", {})]),
    ("lfm2", '<|tool_call_start|>[look({"place": "Bern"}); now()]<|tool_call_end|>', [("look", BERN), ("now", {})]),
    ("lfm2", '<|tool_call_start|>[look("place"="Bern")]<|tool_call_end|>', [("look", BERN)]),
    *(("hermes", f'<tool_call>{{"name": "now", "arguments": {none}}}</tool_call>', [("now", {})]) for none in ("[]", '""', "null", "{},")),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"days": NaN}}</tool_call>', [("look", {"days": None})]),
    *(("granite", f'{open_}[{{"name": "look", "arguments": {{"place": "Bern"}}}}]{close}', [("look", BERN)]) for open_, close in (("<tool_call>", "</tool_call>"), ("<tool_call>", ""))),
    *(("deepseek_v3", written("deepseek_v3", ("look", BERN)).replace("look", f"function{sep}look").replace("▁", sign), [("look", BERN)]) for sign in "▁_ " for sep in (
        DEEPSEEK[2], 2 * DEEPSEEK[2], f" {DEEPSEEK[2]} ", f"\n{DEEPSEEK[2]}\n",
    )),
    *(("mistral_args", f'[TOOL_CALLS]look{between}{{"place": "Bern"}}', [("look", BERN)]) for between in (
        "[CALL_ID]abcDEF123[ARGS][ARGS]", " [CALL_ID] abcDEF123 [ARGS] ", "[CALL_ID][CALL_ID]abcDEF123[ARGS]", "[CALL_ID]abcDEF123\n[ARGS]\n", "[CALL_ID][ARGS]",
    )),
    ("functionary_v31", '<function=look>\n<function=look>{"place": "Bern"}</function>', [("look", BERN)]),
    *((name, '<function_calls>\n<invoke name="look">\n<parameter name="place">Bern</parameter>\n</invoke>\n</function_calls>', [("look", BERN)]) for name in ("deepseek_v32", "muse")),
    *(("gemma4", f"<|tool_call>call:look{{place:{text},days:3}}<tool_call|>", [("look", BERN_3)]) for text in ('<|"|><|"|>Bern<|"|>', '<|"|>Bern<|"|><|"|>', 'Bern<|"|>')),
    ("gemma4", "<|tool_call>call:look{place:'a 'b', then c'}<tool_call|>", [("look", {"place": "a 'b', then c"})]),
    ("gemma4", 'call:look{place:<|"|>Bern<|"|>}<tool_call|>call:now{}', [("look", BERN), ("now", {})]),
    *((name, f"{begin}[look(place='Bern'), now()]", [("look", BERN), ("now", {})]) for name, begin in (
        ("llama3_json", ""), ("llama3_json", "<|python_tag|>"), ("llama4", ""), ("llama4", "<|python_start|>"),
    )),
    ("llama3_json", '[{"name": "look", "parameters": {"place": "Bern"}}, {"name": "now", "parameters": {}}]', [("look", BERN), ("now", {})]),
    *(("harmony", f'<|channel|>commentary {to}<|message|>{{"place": "Bern"}}<|call|>', [("look", BERN)]) for to in (
        "to= functions.look", 'to="functions.look"', "to=function.look", "to=functions.functions.look", "to=functions.look:0", "to=functions_look", "functions.look",
    )),
)  # fmt: skip


@pytest.mark.parametrize(("name", "text", "calls"), OTHERWISE)
def test_calls_of_offered_tools_in_other_forms(name: str, text: str, calls: list[Call]) -> None:
    check(name, text, calls, "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4", "Write call:look{place:x} there."),
        ("gemma4", "call:look{here}"),
        ("gemma4", "- call:now{}"),
        ("gemma4", "call:nobody{a:1}"),
        ("llama4", "[look(here)] and [now]"),
        ("llama4", "So: [now()](link)"),
        ("llama4", "[nobody(a=1)]"),
        ("llama3_json", "[1, 2]"),
        ("llama3_json", "[]"),
    ],
)
def test_calls_without_their_marks_begin_a_line_and_name_an_argument(name: str, text: str) -> None:
    check(name, text, [], text)


MARK = re.compile(r"<[^<>]*>|\[TOOL_CALLS\]|\[ARGS\]|functools\[")


@pytest.mark.parametrize("name", SPOKEN)
def test_a_mark_without_its_last_sign_is_read_or_nothing_is_a_call(name: str) -> None:
    call: Call = ("look", {"place": "Bern by the river", "days": 3})
    text, markup = written(name, call), AnswerMarkup(calls=dialects.dialect(name), tools=TOOLS)
    lost = set()
    for found in MARK.finditer(text):
        cut = text[: found.end() - 1] + text[found.end() :]
        one, whole = read(markup, cut, 1), read(markup, cut, len(cut))
        assert one == whole, cut
        if whole[0] == [call]:
            continue
        assert whole == ([], cut), f"{found.group()}: arguments are lost without a word"
        lost.add(found.group())
    assert lost == LOST[name]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "kimi_k2", "mistral_args"])
def test_a_fence_ends_as_in_markdown(name: str) -> None:
    call = ("look", {"place": "Bern"})
    own = written(name, call)
    for text in ("```\nfoo ``` bar\nCALL\n```", "```md\n```py\nCALL\n```", "> ```\n> x\n> ```\n`CALL`"):
        text = text.replace("CALL", own)
        check(name, text, [], text)
    befores = (
        "Use ``` as a mark.", "a ~~ b ~~~ c", "Use ~~~ as one.", "```x``` so", "> ```\n> x\n\nWell.",
    )  # fmt: skip
    for before in befores:
        check(name, f"{before}\n{own}", [call], before)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "kimi_k2", "gemma4", "mistral_args"])
def test_calls_that_end_an_answer_count_behind_a_fence_that_was_left_open(name: str) -> None:
    call = ("look", {"place": "Bern"})
    own = written(name, call)
    for before in ("```python\nprint(1)\n\nNow I call.", "~~~\nx", "```\na\n```\n```\nb"):
        check(name, f"{before}\n\n{own}", [call], before)
        closed = f"{before}\n\n{own}\n{'~~~' if '~' in before else '```'}"
        check(name, closed, [], closed)
        check(name, f"{before}\n\n{own}\nis one.", [], f"{before}\n\n{own}\nis one.")
    for text in (f"So:\n```xml\n{own}", f"So:\n```xml\n{own}\n{own}", f"```\nWrite {own}"):
        check(name, text, [], text)
