"""Options of `pyspec server` for chats: templates, tool calls and reasoning, under llama-server's names."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from pyspec.cli.flags import grouped
from pyspec.cli.options import F, apply, folding
from pyspec.ranges import INT32
from pyspec.text.markup.dialect import NAMES

ON, OFF = dict.fromkeys(("on", "true", "1"), "on"), dict.fromkeys(("off", "false", "0"), "off")
WORDS = ON | OFF | {"auto": "auto"}


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """template: a chat template that replaces the file's; settings: fields of ServerSettings."""

    template: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


class ReasoningWord(click.ParamType):
    """on, off or auto, also in llama-server's other spellings."""

    name = "on|off|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if str(value).lower() not in WORDS:
            self.fail(f"want on, off or auto, got {value!r}", param, ctx)
        return WORDS[str(value).lower()]


def template_text(ctx: click.Context, option: click.Parameter, value: str) -> str:
    """A template given by name or as text."""
    from pyspec.text.named_templates import NAMED

    if value in NAMED:
        return NAMED[value]
    if value and "{{" not in value and "{%" not in value:
        raise click.BadParameter(
            f"{value[:40]!r} is neither a template's text nor one of {', '.join(NAMED)}; "
            "--chat-template-file takes a file",
            ctx,
            option,
        )
    return value


def template_values(ctx: click.Context, option: click.Parameter, value: str) -> dict[str, Any]:
    """The template's own values."""
    try:
        values = json.loads(value or "{}")
    except ValueError as error:
        raise click.BadParameter(f"not JSON: {error}", ctx, option) from None
    if not isinstance(values, dict):
        raise click.BadParameter(
            'want a JSON object such as {"enable_thinking": false}',
            ctx,
            option,
        )
    return values


_chats = grouped("Chats")

CHAT_OPTIONS = [
    _chats(
        "--chat-template",
        default="",
        metavar="NAME|TEXT",
        callback=template_text,
        help="Chat template instead of the model's: a name (chatml, llama3 ...) or its text.",
    ),
    _chats(
        "--chat-template-file",
        default=None,
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File with a chat template, instead of the model's.",
    ),
    _chats("--chat-template-kwargs", default="", metavar="JSON", callback=template_values,
           help="Default values for the chat template."),
    _chats(
        "--tool-call-parser",
        default="auto",
        type=click.Choice(["auto", "none", *NAMES]),
        metavar="NAME",
        help=f"Format of the model's tool calls: auto (the template's, or generic), none, {', '.join(NAMES)}.",
    ),
    _chats(
        "--reasoning-format",
        default="auto",
        type=click.Choice(["none", "auto", "deepseek", "deepseek-legacy"]),
        help="Field for thoughts: none leaves them in content; the others use reasoning_content.",
    ),
    _chats("-rea", "--reasoning", default="auto", type=ReasoningWord(),
           help="Thinking: on, off, or auto for the chat template's default."),
    _chats("--reasoning-effort", default="default", metavar="LEVEL",
           help="Effort passed to the template: low, high ..."),
    _chats("--reasoning-budget", default=-1, type=click.IntRange(-1, INT32),
           help="Maximum thinking tokens of a request. -1: no limit."),
    _chats("--reasoning-budget-message", default="", metavar="TEXT",
           help="Text inserted at the end of the reasoning budget."),
    _chats("--prefill-assistant/--no-prefill-assistant", default=True,
           help="Continue an assistant message at the end of a chat."),
    _chats("--spm-infill", is_flag=True, help="/infill: put the suffix before the prefix."),
    _chats("--skip-chat-parsing/--no-skip-chat-parsing", default=False,
           help="Leave calls and thoughts in the text."),
]  # fmt: skip


def chat_options(function: F) -> F:
    """Add the chat options to a command; it receives `chat: ChatOptions`."""

    def fold(values: dict[str, Any]) -> None:
        values["chat"] = _chat(values)

    return apply(CHAT_OPTIONS)(folding(function, fold))


def _chat(values: dict[str, Any]) -> ChatOptions:
    text, path = values.pop("chat_template"), values.pop("chat_template_file")
    if text and path:
        raise click.UsageError("--chat-template and --chat-template-file: give one of them")
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise click.BadParameter(
                f"{path} can not be read: {error}",
                param_hint="--chat-template-file",
            ) from None
    effort = values.pop("reasoning_effort")
    if effort != "default":
        own = values["chat_template_kwargs"]
        values["chat_template_kwargs"] = {"reasoning_effort": effort} | own
    if values.pop("skip_chat_parsing"):
        values["tool_call_parser"] = values["reasoning_format"] = "none"
    names = (
        "chat_template_kwargs",
        "tool_call_parser",
        "reasoning_format",
        "reasoning",
        "reasoning_budget",
        "reasoning_budget_message",
        "prefill_assistant",
        "spm_infill",
    )
    return ChatOptions(template=text, settings={name: values.pop(name) for name in names})
