"""`pyspec server`: load a model and serve it."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyspec.cli.chat_options import ChatOptions, chat_options
from pyspec.cli.options import EngineChoice, Number, engine_options, sampling_options, tell_ignored
from pyspec.request import EngineInfo, SamplingParams

if TYPE_CHECKING:
    from pyspec.server.engine import EngineLike
    from pyspec.server.http.serve import Served

AUTO_SLOTS = 4
CLOSE_S = 10.0  # for the round that is under way


def patterns(ctx: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """Regular expressions, or a usage error that says what is wrong with one."""
    try:
        return tuple(re.compile(text) for text in texts)
    except re.error as error:
        raise click.BadParameter(f"{error.pattern!r} is no regular expression: {error}", ctx, option) from None


@click.command()
@engine_options
@sampling_options
@chat_options
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", default=8080, type=click.IntRange(0, 65535), help="Port; 0 picks a free one.")
@click.option("--api-key", multiple=True, envvar="LLAMA_API_KEY", help="Key clients must send; may be repeated.")
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without a key.")
@click.option("-a", "--alias", default="", help="The model's name in answers.")
@click.option("--metrics/--no-metrics", default=True, help="Serve /metrics.")
@click.option("--slots/--no-slots", default=True, help="Serve /slots.")
@click.option(
    "--slot-save-path", default="", metavar="DIR", help="Directory for POST /slots/ID?action=save and restore."
)
@click.option("--props/--no-props", default=True, help="Serve /props.")
@click.option("--cors-origin", multiple=True, help="Origin browsers may call from, besides this machine.")
@click.option(
    "--volatile-lines",
    multiple=True,
    metavar="REGEX",
    callback=patterns,
    help="Move lines of system prompts that match behind the conversation, so that the prefix cache outlives their change.",
)
@click.option("--queue", default=0, help="Requests that may wait. 0: 4 for each slot, at least 16.")
@click.option("--in-process", is_flag=True, help="Run the engine in this process: if it fails, it is not replaced.")
@click.option(
    "--hang-timeout", default=0.0, help="Seconds of a round after which the engine is replaced. 0: by its pace."
)
@click.option(
    "--drain-timeout",
    default=30.0,
    type=Number(0, 86400),
    help="Seconds that running requests get when the server is told to end.",
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", help="How log lines look.")
@click.option("-lv", "--verbosity", type=click.IntRange(0, 5), default=3, help="0 silent, 3 normal, 5 everything.")
@click.pass_context
def server(
    ctx: click.Context,
    engine: EngineChoice,
    sampling: SamplingParams,
    chat: ChatOptions,
    n_predict: int,
    host: str,
    port: int,
    api_key: tuple[str, ...],
    insecure: bool,
    alias: str,
    metrics: bool,
    slots: bool,
    slot_save_path: str,
    props: bool,
    cors_origin: tuple[str, ...],
    volatile_lines: tuple[re.Pattern[str], ...],
    queue: int,
    in_process: bool,
    hang_timeout: float,
    drain_timeout: float,
    log_format: str,
    verbosity: int,
) -> None:
    """Serve a model over HTTP: the OpenAI API and llama-server's.

    Example: pyspec server demo -np 8
    """
    from pyspec.cli.logs import set_up
    from pyspec.cli.running import enter, leave
    from pyspec.server.http.serve import run
    from pyspec.server.settings import Limits, ServerSettings

    set_up(5 if ctx.meta.get("pyspec.verbose") else verbosity, log_format)
    tell_ignored()
    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=api_key,
        insecure=insecure,
        alias=alias,
        metrics=metrics,
        slots=slots,
        slot_save_path=slot_save_path,
        props=props,
        cors_origins=cors_origin,
        volatile_lines=volatile_lines,
        sampling=sampling,
        max_tokens=n_predict,
        limits=Limits(drain_s=drain_timeout),
        **chat.settings,
    )
    engine = replace(engine, settings={**engine.settings, "queue": queue, "hang_timeout": hang_timeout})
    n_slot = engine.np if engine.np > 0 else AUTO_SLOTS
    engine.check(n_slot)

    entered: list[Path | None] = []

    def ready(loaded: EngineLike, url: str) -> None:
        entered.append(enter(url, alias or loaded.info.model_name))
        for line in banner(loaded.info, url) if log_format == "text" else ():
            click.echo(line, err=True)

    def load() -> EngineLike:
        loaded = engine.load(n_slot, isolated=not in_process)
        if chat.template:
            loaded.use_template(chat.template)
        return loaded

    try:
        served = run(load, settings, ready)
    finally:
        for path in entered:
            leave(path)
    _end(served)


def _end(served: Served) -> None:
    """Close what was served. A process whose GPU hangs, or that is told to go while it loads, does not end by itself."""
    loaded = served.engine
    if loaded is None or not loaded.close(0.0 if served.is_hurried else CLOSE_S):  # type: ignore[attr-defined]
        logging.shutdown()
        os._exit(0 if loaded is None else 1)


def banner(info: EngineInfo, url: str) -> list[str]:
    """What runs, in a few lines, once requests are taken."""
    lines = [
        f"model    {info.model_name} ({info.arch}, {info.n_params / 1e9:.3g} B parameters, {info.n_bytes / 1e9:.3g} GB)",
        f"device   {info.device}",
        f"draft    {info.draft_note}",
        f"slots    {info.n_slot}, {info.n_ctx} tokens each",
        f"url      {url}  (OpenAI API at {url}/v1)",
    ]
    if info.synthetic_len:
        lines.insert(
            3, f"WARNING  acceptance is made up (--spec-synth-len {info.synthetic_len:g}): text is not the model's"
        )
    return lines
