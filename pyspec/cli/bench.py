"""`pyspec bench`: plain and speculative decoding, measured in turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyspec.cli.compare import holds, percent
from pyspec.cli.flags import FlagCommand
from pyspec.cli.options import EngineChoice, Number, engine_options, tell_ignored
from pyspec.config import MAX_CTX, MAX_SLOTS

if TYPE_CHECKING:
    from pyspec.bench.over_http import Clients
    from pyspec.bench.result import Report
    from pyspec.engine.api import Engine


def _counts(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        counts = tuple(sorted({int(part) for part in value.split(",")}))
    except ValueError as e:
        raise click.BadParameter(f"want numbers between commas, such as 1,2,4,8: {e}", ctx, param) from e
    if not 1 <= counts[0] <= counts[-1] <= MAX_SLOTS:
        raise click.BadParameter(f"want 1 to {MAX_SLOTS} streams, got {value!r}", ctx, param)
    return counts


@click.command(cls=FlagCommand)
@engine_options
@click.option("-npl", "--streams", default="1,2,4,8", callback=_counts, help="Numbers of streams side by side.")
@click.option(
    "-p", "--n-prompt", default=0, type=click.IntRange(0, MAX_CTX), help="Tokens of a prompt. 0: as questions are."
)
@click.option("-n", "--n-gen", default=128, type=click.IntRange(4, MAX_CTX), help="Most tokens of an answer.")
@click.option("-r", "--repetitions", default=3, type=click.IntRange(1, 1000), help="Turns of each kind.")
@click.option("--temp", "temperature", default=0.0, type=Number(0, 100), help="Temperature; 0 is greedy.")
@click.option("--random-prompts", is_flag=True, help="Random ids, for models without meaning (`pyspec synth`).")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-generation token.")
@click.option("--http", is_flag=True, help="Each turn also through the HTTP server, streamed to another process.")
@click.option("--isolated", is_flag=True, help="With the engine in a process of its own, as the server has it.")
@click.option("--parts", is_flag=True, help="Also split a round's device time: linear, attention, state (GPU).")
@click.option(
    "--bandwidth",
    default=0.0,
    type=Number(0, 1e6),
    metavar="GB/S",
    help="Memory bandwidth, to show the share of the floor.",
)
@click.option("-o", "--output", type=click.Choice(["md", "json", "csv", "jsonl"]), default="md", help="Form on stdout.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write a report with a picture.")
@click.option("--baseline", type=click.Path(path_type=Path, dir_okay=False), help="Compare with an -o json report.")
@click.option("--max-regress", default="3%", callback=percent, help="Slower than the baseline by more: exit code 1.")
@click.pass_context
def bench(
    ctx: click.Context,
    engine: EngineChoice,
    streams: tuple[int, ...],
    n_prompt: int,
    n_gen: int,
    repetitions: int,
    temperature: float,
    random_prompts: bool,
    ignore_eos: bool,
    http: bool,
    isolated: bool,
    parts: bool,
    bandwidth: float,
    output: str,
    html: Path | None,
    baseline: Path | None,
    max_regress: float,
) -> None:
    """Measure speed, plain and speculative in turns.

    Example: pyspec bench demo -npl 1,8 --html report.html
    """
    from pyspec.bench.report import FORMATS
    from pyspec.bench.result import changes, read_rates
    from pyspec.bench.session import Plan
    from pyspec.bench.session import bench as run_bench
    from pyspec.cli.logs import set_up

    set_up(4 if ctx.meta.get("pyspec.verbose") else 2)
    tell_ignored()
    before = read_rates(baseline) if baseline else {}
    plan = Plan(
        streams=streams,
        turns=repetitions,
        n_prompt=n_prompt,
        n_predict=n_gen,
        random_prompts=random_prompts,
        ignore_eos=ignore_eos,
        temperature=temperature,
        bandwidth=bandwidth,
        parts=parts,
    )
    if isolated and parts:
        raise click.UsageError("--parts looks into the engine: not with --isolated")
    n_slot = max(engine.np, *streams)
    with engine.load(n_slot, isolated=isolated) as loaded, _clients(loaded) if http else nullcontext() as clients:
        report = run_bench(loaded, plan, lambda line: click.echo(line, err=True), clients)
    click.echo(FORMATS[output](report), nl=False)
    if html is not None:
        _write_page(html, report)
    if before and not holds(changes(report.rows, before), max_regress):
        ctx.exit(1)


@contextmanager
def _clients(engine: Engine) -> Iterator[Clients]:
    """A server for the engine, and the process that asks it."""
    from pyspec.bench.over_http import Clients
    from pyspec.cli.chats import served

    with served(engine) as port, Clients(port) as clients:
        yield clients


def _write_page(path: Path, report: Report) -> None:
    from pyspec.bench.page import as_html
    from pyspec.errors import ConfigError

    try:
        path.write_text(as_html(report), encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror or e}") from e
    click.echo(f"report: {path}", err=True)
