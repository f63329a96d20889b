"""The command line: `pyspec COMMAND`. Results go to stdout, everything else to stderr.

Heavy modules are imported only when a command runs, so that help is instant. Errors that a user can act on become one line and an
exit status here and nowhere else.
"""

from __future__ import annotations

import errno
import signal
from importlib import import_module
from typing import Any

import click

from pyspec import __version__, streams
from pyspec.errors import PyspecError

COMMANDS = {
    "server": "Serve a model over HTTP: the OpenAI API and llama-server's.",
    "run": "Answer one prompt, or chat in the terminal.",
    "demo": "Show the packaged pair with and without speculation.",
    "bench": "Measure speed, plain and speculative in turns.",
    "models": "List the models that can be given by name.",
    "pull": "Download a model, its drafter and its projector.",
    "list": "List the models on this machine.",
    "ps": "Show running servers: model, slots, drafts.",
    "fit": "Show a model's memory, and the slots and contexts that fit.",
    "verify": "Compare greedy texts with and without drafts, token by token.",
    "inspect": "Show metadata, tensors and sizes of a GGUF file.",
    "tokenize": "Print the token ids of a text.",
    "logits": "Write the logits of given tokens to a file.",
    "perplexity": "Compute the perplexity of a text, as llama-perplexity does.",
    "synth": "Write a random model with real dimensions.",
    "doctor": "Check the kernels on this machine.",
    "config": "Show settings and their origin, or llama-server's flags.",
    "completion": "Print a completion script for bash, zsh or fish.",
}
"""The help line of each command. They are repeated here so that `--help` imports no command."""
PLACES = {"list": "listing:list_models"}
"""Module and function of a command that are not its name."""
AHEAD = "server"
"""The command whose engine runs in a process of its own, which imports while this one does."""
NO_ENGINE = frozenset(["-h", "--help", "--version", "--list-devices", "--in-process"])
"""With one of these words the command needs no such process."""
BELOW = {("bench", "compare"): "bench:compare"}
"""Subcommands of a command that also runs by itself."""
ELSEWHERE = {
    "chat": "pyspec run MODEL",
    "generate": 'pyspec run MODEL "TEXT"',
    "complete": "pyspec run MODEL -p TEXT",
    **dict.fromkeys(("serve", "start"), "pyspec server MODEL"),
    **dict.fromkeys(("show", "info"), "pyspec inspect MODEL, or pyspec fit MODEL for its memory"),
    "ls": "pyspec list",
    "download": "pyspec pull MODEL",
    "search": "pyspec models",
    "benchmark": "pyspec bench MODEL",
    "detokenize": "pyspec tokenize MODEL TEXT --json",
    **dict.fromkeys(("rm", "remove", "delete"), "your shell: pyspec list --json shows the paths"),
    "stop": "Ctrl-C, or the signal SIGTERM: a server ends when its process does",
    "create": "a GGUF file: pyspec server FILE",
    "quantize": "llama-quantize; pyspec runs the file that it writes",
    "version": "pyspec --version",
    "help": "pyspec --help, or pyspec COMMAND --help",
}
"""Commands of other programs, and what to use instead."""
click.IntRange.name, click.FloatRange.name = "integer", "number"  # no word is "a valid integer range"
INTERRUPTED = 130  # the exit status that a shell reports for Ctrl-C


def _load(place: str) -> click.Command:
    module, name = place.split(":")
    return getattr(import_module(f"{__name__}.{module}"), name)


def command_of(name: str) -> click.Command:
    """A command of the table, imported."""
    return _load(PLACES.get(name, f"{name}:{name}"))


class Commands(click.Group):
    """The commands of the table above; turns errors into exit statuses."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return command_of(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        room = formatter.width - 6 - max(map(len, COMMANDS))
        commands = {name: click.Command(name, help=line) for name, line in COMMANDS.items()}
        said = {name: command.get_short_help_str(room) for name, command in commands.items()}
        with formatter.section("Commands"):
            formatter.write_dl(list(said.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if (words := tuple(args[:2])) in BELOW:
            return " ".join(words), _load(BELOW[words]), args[2:]
        if args[0] == AHEAD and not ctx.resilient_parsing and NO_ENGINE.isdisjoint(args):
            from pyspec.engine.process.ahead import end_ahead, start_ahead

            start_ahead()
            ctx.call_on_close(end_ahead)
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as e:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            if args[0] in ELSEWHERE:
                hint = f" Use {ELSEWHERE[args[0]]}."
            elif args[0].lower().endswith(".gguf"):
                hint = f" To run the file: pyspec run {args[0]}, or pyspec server {args[0]}."
            raise click.UsageError(f"{e.message}{hint}", ctx) from e

    def main(self, *args: Any, **kwargs: Any) -> Any:
        streams.fill_in()
        return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> object:
        try:
            found = super().invoke(ctx)
            if (lost := streams.flush()) is not None:
                raise lost
            return found
        except PyspecError as e:
            if ctx.meta.get("pyspec.verbose"):
                raise
            click.echo(f"Error: {e}", err=True)
            ctx.exit(e.exit_code)
        except (KeyboardInterrupt, RuntimeError) as e:  # of a class that was being made
            if KeyboardInterrupt not in (type(e), type(e.__cause__)):
                raise
            exec("")  # code of a string, as a dataclass is, would have Python end by the signal
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except OSError as e:
            # If the reader of a pipe has closed it, click ends silently
            if not streams.is_lost(e) or e.errno == errno.EPIPE:
                raise
            streams.flush()
            click.echo(f"Error: cannot write to stdout: {(e.strerror or str(e)).lower()}", err=True)
            ctx.exit(1)


def show_traceback(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Callback of -v: stored for the whole call, because click's contexts share `meta`."""
    if value:
        ctx.meta["pyspec.verbose"] = True


verbose_option = click.option(
    "-v",
    "--verbose",
    "--log-verbose",
    "verbose",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=show_traceback,
    help="Log more and show tracebacks.",
)


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, "--version", message="pyspec %(version)s")
@verbose_option
@click.pass_context
def main(ctx: click.Context) -> None:
    """Speculative decoding for GGUF models. Start with `pyspec demo`, then `pyspec server MODEL -np 8`.

    MODEL is a GGUF file or a name from `pyspec models`.
    """
    # a server takes the signal when it listens: asyncio's own handler would lose one that comes before
    if signal.getsignal(signal.SIGINT) is ctx.obj and ctx.invoked_subcommand != "server":
        signal.signal(signal.SIGINT, signal.default_int_handler)
