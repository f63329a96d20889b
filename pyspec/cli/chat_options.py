"""Options of `pyspec server` for chats: templates, tool calls and reasoning, under llama-server's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from pyspec.cli.fields import options_of
from pyspec.cli.flags import grouped
from pyspec.server.settings import CHATS, ServerSettings

ON, OFF = dict.fromkeys(("on", "true", "1"), "on"), dict.fromkeys(("off", "false", "0"), "off")
WORDS = ON | OFF | {"auto": "auto"}


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


_chats = grouped(CHATS)
CHAT_OPTIONS = [
    _chats(
        "--chat-template", llama="CHAT_TEMPLATE", default="", metavar="NAME|TEXT", callback=template_text,
        help="Chat template instead of the model's: a name (chatml, llama3 ...) or its text.",
    ),
    _chats(
        "--chat-template-file", llama="CHAT_TEMPLATE_FILE", default=None, metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File with a chat template, instead of the model's.",
    ),
    _chats("--chat-template-kwargs", llama="CHAT_TEMPLATE_KWARGS", default="", metavar="JSON", callback=template_values,
           help="Default values for the chat template."),
    *options_of(ServerSettings, {"reasoning": {"type": ReasoningWord()}}, CHATS),
    _chats("--reasoning-effort", llama="REASONING_EFFORT", default="default", metavar="LEVEL",
           help="Effort passed to the template: low, high ..."),
    _chats("--skip-chat-parsing/--no-skip-chat-parsing", llama="SKIP_CHAT_PARSING", default=False,
           help="Leave calls and thoughts in the text."),
]  # fmt: skip


def chat_settings(values: dict[str, Any]) -> None:
    """Fold options of chats into `chat_template`, the text of a template that replaces the file's, and fields of ServerSettings."""
    text, path = values["chat_template"], values.pop("chat_template_file")
    if text and path:
        raise click.UsageError("--chat-template and --chat-template-file: give one of them")
    if path is not None:
        try:
            values["chat_template"] = path.read_text(encoding="utf-8")
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
