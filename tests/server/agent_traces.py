"""Sequences of requests as coding agents send them: a long system prompt, twenty tools, and a history that grows by calls and results.

Own texts in the shape of agents' requests on each API. `scale` 1 has about 14,000 tokens before the first word of the user
with the demo model's tokenizer; smaller ones keep the ratios.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

TEXT = (
    "read the file before you change it and never guess what a function does when you can look at its body run tests after"
    " each edit keep answers short say what you did and why ask only if the task can not be done without more use tools rather"
    " than words search with patterns list folders first write whole lines respect the style of the code that is there"
)
TOOLS = ("read", "write", "edit", "list", "search", "run", "fetch", "plan", "ask", "patch") * 2

TEMPLATE = """\
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else -%}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- if loop.first and tools %}

# Tools
{% for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
{%- endif %}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
"""A chat template with tools, in the manner of Qwen's: they stand behind the system prompt."""


def prose(seed: int, n: int) -> str:
    """`n` words of instructions, in lines of sixteen."""
    words = random.Random(seed).choices(TEXT.split(), k=n)
    return "\n".join(" ".join(words[i : i + 16]) for i in range(0, n, 16))


def functions(scale: float) -> list[dict[str, Any]]:
    """Name, description and schema of each tool: twenty, or fewer in a smaller trace."""
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    return [
        {"name": f"{name}_{i}", "description": prose(100 + i, 110), "parameters": schema}
        for i, name in enumerate(TOOLS[: max(2, round(len(TOOLS) * scale))])
    ]


def turns(scale: float, n: int) -> list[tuple[str, str, str]]:
    """The model's text, the requested file and its contents, for each turn but the last."""
    return [
        (prose(200 + i, int(90 * scale)), f"src/part_{i}.py", prose(300 + i, int(400 * scale)))
        for i in range(n)
    ]


def opening(scale: float, seed: int) -> str:
    """The system prompt without its first lines."""
    return prose(seed, int(6800 * scale))


def claude(scale: float, n: int) -> list[dict[str, Any]]:
    """Bodies for `/v1/messages`: a billing header that changes, marks for the cache that move, a reminder only in the newest message."""
    bodies = []
    for k in range(n):
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch=a51{k}5;"},
            {"type": "text", "text": "You are an agent for code.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "\n" + opening(scale, 10), "cache_control": {"type": "ephemeral"}},
        ]  # fmt: skip
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": [{"type": "text", "text": prose(2, int(200 * scale))}]}
        ]
        for i, (said, path, held) in enumerate(turns(scale, k)):
            call = {"type": "tool_use", "id": f"toolu_{i}", "name": "read_0", "input": {"path": path}}
            result = {"type": "tool_result", "tool_use_id": f"toolu_{i}", "content": [{"type": "text", "text": held}]}  # fmt: skip
            messages += [
                {"role": "assistant", "content": [{"type": "text", "text": said}, call]},
                {"role": "user", "content": [result]},
            ]
        last = messages[-1]["content"]
        last[-1] = last[-1] | {"cache_control": {"type": "ephemeral"}}
        last.append(
            {
                "type": "text",
                "text": f"<system-reminder>\nThe plan has {k} open points.\n</system-reminder>",
            }
        )
        tools = [
            {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
            for f in functions(scale)
        ]
        bodies.append(
            {"system": system, "messages": messages, "tools": tools, "metadata": {"user_id": "u"}}
        )
    return bodies


def codex(scale: float, n: int) -> list[dict[str, Any]]:
    """Bodies for `/v1/responses`: the date in the instructions, items of thoughts, calls and outputs."""
    bodies = []
    for k in range(n):
        items: list[dict[str, Any]] = [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You may write files."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": prose(2, int(200 * scale))}]},
        ]  # fmt: skip
        for i, (said, path, held) in enumerate(turns(scale, k)):
            arguments = f'{{"path": "{path}"}}'
            items += [
                {"type": "reasoning", "summary": [], "encrypted_content": None},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": said}],
                },
                {
                    "type": "function_call",
                    "call_id": f"call_{i}",
                    "name": "read_0",
                    "arguments": arguments,
                },
                {"type": "function_call_output", "call_id": f"call_{i}", "output": held},
            ]
        instructions = f"You are an agent for code.\nCurrent time: 12:00:{k:02}\n{opening(scale, 11)}"
        tools = [{"type": "function", "strict": False} | f for f in functions(scale)]
        more = {"store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k"}
        bodies.append({"instructions": instructions, "input": items, "tools": tools} | more)
    return bodies


def cline(scale: float, n: int) -> list[dict[str, Any]]:
    """Bodies for `/v1/chat/completions`: the date in the system prompt's second line, results as messages of their own."""
    bodies = []
    for k in range(n):
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": f"You are an agent for code.\nCurrent time: 12:00:{k:02}\n{opening(scale, 12)}"},
            {"role": "user", "content": prose(2, int(200 * scale))},
        ]  # fmt: skip
        for i, (said, path, held) in enumerate(turns(scale, k)):
            function = {"name": "read_0", "arguments": f'{{"path": "{path}"}}'}
            messages += [
                {
                    "role": "assistant",
                    "content": said,
                    "tool_calls": [{"id": f"call_{i}", "type": "function", "function": function}],
                },
                {"role": "tool", "tool_call_id": f"call_{i}", "content": held},
            ]
        tools = [{"type": "function", "function": f} for f in functions(scale)]
        bodies.append({"messages": messages, "tools": tools})
    return bodies


TRACES: dict[str, tuple[str, Callable[[float, int], list[dict[str, Any]]]]] = {
    "claude": ("/v1/messages", claude),
    "codex": ("/v1/responses", codex),
    "cline": ("/v1/chat/completions", cline),
}


def used(path: str, answer: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt, and how many of them came from the cache."""
    usage = answer["usage"]
    if path == "/v1/messages":
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]
    if path == "/v1/responses":
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
