"""`pyspec config`: the server's settings and their origins, and the support of llama-server's flags."""

from __future__ import annotations

import json
from typing import Any

import click

from pyspec.cli.flags import OTHERS, FlagCommand, env_of, honoured_flags, llama_flags

SECRET = ("api_keys",)


@click.group()
def config() -> None:
    """Show settings and their origin, or llama-server's flags."""


@config.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[SERVER ARGUMENTS]")
@click.pass_context
def show(ctx: click.Context, as_json: bool, args: tuple[str, ...]) -> None:
    """Show each setting of `pyspec server ARGUMENTS`, its value and its origin; nothing is loaded.

    The origin is default, command line, or the name of an environment variable.
    """
    rows = settings_of(ctx, list(args))
    for line in (*ctx.meta.get("pyspec.warnings", []), *ctx.meta.get("pyspec.notes", [])):
        click.echo(line, err=True)
    if as_json:
        click.echo(json.dumps(rows, indent=1, default=str))
        return
    from pyspec.cli.tables import row, show, table

    t = table("setting", "value", "origin")
    for one in rows:
        row(t, one["flag"], _shown(one["value"]), one["origin"])
    show(t)


def settings_of(ctx: click.Context, args: list[str]) -> list[dict[str, Any]]:
    """Flag, value and origin of every option of the server, in the order of its help. Raises UsageError."""
    from pyspec.cli.server import server

    assert isinstance(server, FlagCommand)
    within = server.make_context("server", args, parent=ctx.find_root())
    options = [p for p in server.params if p.name in within.params]
    options.sort(key=lambda p: getattr(p, "group", OTHERS) == OTHERS and isinstance(p, click.Option))
    return [
        {"flag": _flag(p), "value": _public(p.name, within.params[p.name]), "origin": _origin(within, p)}
        for p in options
    ]


def _flag(parameter: click.Parameter) -> str:
    if not isinstance(parameter, click.Option):
        return "MODEL"
    return next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0])


def _public(name: str | None, value: Any) -> Any:
    """The value, with secrets hidden."""
    if name in SECRET:
        return f"{len(value)} keys" if value else ""
    return value


def _origin(ctx: click.Context, parameter: click.Parameter) -> str:
    from click.core import ParameterSource

    source = ctx.get_parameter_source(parameter.name or "")
    other = "command line" if source is ParameterSource.COMMANDLINE else "default"
    return env_of(ctx, parameter) or other


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple | list):
        return ", ".join(map(_shown, value))
    return str(getattr(value, "pattern", value))


@config.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def flags(as_json: bool) -> None:
    """List every flag of llama-server: honoured, ignored or refused, with the reason."""
    listed = dict.fromkeys((*honoured_flags(), *llama_flags().values()))
    if as_json:
        rows = [
            {"names": list(flag.names), "env": flag.env, "fate": flag.fate, "why": flag.why}
            for flag in listed
        ]
        click.echo(json.dumps(rows, indent=1))
        return
    from pyspec.cli.tables import row, show, table

    t = table("llama-server's flag", "here", "why")
    for flag in listed:
        row(t, " ".join(flag.names), flag.fate, flag.why)
    show(t)
