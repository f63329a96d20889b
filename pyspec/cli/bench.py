"""`pyspec bench`: plain and speculative decoding, measured alternately."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from pyspec.cli import verbose_option
from pyspec.cli.fields import Number
from pyspec.cli.flags import FlagCommand, gathered, option
from pyspec.cli.meter import load_with_meter
from pyspec.cli.options import EngineChoice, begin_log, engine_options
from pyspec.config import MAX_CTX, MAX_SLOTS, MAX_THREADS

if TYPE_CHECKING:
    from pyspec.bench.over_http import Clients
    from pyspec.bench.result import Change, Report
    from pyspec.bench.session import Plan
    from pyspec.engine.api import Engine

# -- lists of numbers ------------------------------------------------------------------------------------------------
# Lists of numbers as in llama-bench: 512,1024 and ranges: 1-8, 0-512+128, 1-64*2.

PART = re.compile(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?")
MOST = 64  # numbers in one list
FORM = "want numbers between commas, or ranges: 512,1024 or 1-8 or 0-512+128 or 1-64*2"


def numbers(text: str) -> list[int]:
    """The numbers of a list. Raises ValueError."""
    found: list[int] = []
    for part in text.split(","):
        match = PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{FORM}; got {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        by, multiplies = int(match[4] or 1), match[3] == "*"
        if last < first or by < 1 + multiplies or (multiplies and not first):
            raise ValueError(f"the range {part.strip()!r} does not end; {FORM}")
        while first <= last:
            found.append(first)
            if len(found) > MOST:
                raise ValueError(f"{text!r} has more than {MOST} numbers")
            first = first * by if multiplies else first + by
    return found


def in_list(low: int, high: int, what: str) -> Callable[..., tuple[int, ...]]:
    """A callback for an option that may be repeated or hold a list: its numbers in order, without duplicates."""

    def read(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> tuple[int, ...]:
        try:
            found = [number for text in texts for number in numbers(text)]
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
        wrong = next((number for number in found if not low <= number <= high), None)
        if wrong is not None:
            raise click.BadParameter(f"want {low} to {high} {what}, got {wrong}")
        return tuple(dict.fromkeys(found))

    return read


def pairs(
    ctx: click.Context,
    param: click.Parameter,
    texts: Sequence[str],
) -> tuple[tuple[int, int], ...]:
    """Callback of -pg: prompt tokens and answer tokens, PROMPT,ANSWER."""
    found = []
    for text in texts:
        match = re.fullmatch(r"(\d{1,8}),(\d{1,8})", text.strip())
        if match is None or int(match[2]) < 4:
            raise click.BadParameter(
                f"want tokens of a prompt and of an answer, such as 512,128; got {text!r}"
            )
        found.append((int(match[1]), int(match[2])))
    return tuple(found)


# -- two reports -----------------------------------------------------------------------------------------------------
# `pyspec bench compare`: two reports of `pyspec bench -o json`, checked for rates that fell.

REPORT = click.Path(path_type=Path, dir_okay=False)


def percent(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Callback of --max-regress: "3%" or "3" to 0.03."""
    try:
        given = float(value.strip().removesuffix("%"))
    except ValueError:
        given = -1.0
    if not 0 <= given <= 100:
        raise click.BadParameter(f"want a percentage from 0% to 100%, got {value!r}")
    return given / 100


@click.command("compare")
@click.argument("before", metavar="A.json", type=REPORT)
@click.argument("after", metavar="B.json", type=REPORT)
@click.option("--max-regress", default="3%", callback=percent, help="Exit status 1 if a rate fell by more.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@verbose_option
@click.pass_context
def compare(
    ctx: click.Context,
    before: Path,
    after: Path,
    max_regress: float,
    as_json: bool,
) -> None:
    """Compare two reports of `pyspec bench -o json`: every rate of A with B's.

    Exit status 1 if a rate fell by more than --max-regress. Example: pyspec bench compare main.json mine.json --max-regress 3%
    """
    from pyspec.bench.result import compare as compared
    from pyspec.bench.result import read_rates

    found = compared(read_rates(before), read_rates(after))
    if as_json:
        regressions = [{"change": c.change, "regression": c.change < -max_regress} for c in found]
        rows = [asdict(c) | more for c, more in zip(found, regressions, strict=True)]
        click.echo(json.dumps({"max_regress": max_regress, "changes": rows}, indent=1))
        ctx.exit(1 if any(row["regression"] for row in rows) else 0)
    if not holds(found, max_regress, err=False):
        ctx.exit(1)


def holds(found: Sequence[Change], max_regress: float, *, err: bool = True) -> bool:
    """True if no rate fell by more than `max_regress`. Prints changed rates to stderr or stdout."""
    good = True
    for c in found:
        is_worse = c.change < -max_regress
        good = good and not is_worse
        verdict = f"  REGRESSION beyond {max_regress:.1%}" if is_worse else ""
        rates = f"{c.before:.1f} -> {c.after:.1f} ({c.change:+.1%})"
        click.echo(f"np {c.np} {c.what}: {rates}{verdict}", err=err)
    return good


DEFAULT_GEN = 128  # tokens of an answer
LONG_CTX = 8192  # tokens of a request; a load always finds room for this length by itself
PATH = click.Path(path_type=Path, dir_okay=False)
SPARE = 64  # tokens that a chat template adds around a question
_what, _report = partial(option, "Workload"), partial(option, "Report")


def _thread_counts(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> tuple[int, ...]:
    """Numbers of threads; -1 becomes 0: by measured times."""
    counts = ["0" if text.strip() == "-1" else text for text in texts]
    return in_list(0, MAX_THREADS, "threads")(ctx, param, counts)


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """The workload and the form of the report: options of `pyspec bench`."""

    # fmt: off
    streams: Annotated[tuple[int, ...], _what("-npl", "--streams", multiple=True, default=("1,2,4,8",), callback=in_list(1, MAX_SLOTS, "streams"), metavar="LIST", help="Numbers of concurrent streams.")]
    n_prompt: Annotated[tuple[int, ...], _what("-p", "--n-prompt", multiple=True, callback=in_list(0, MAX_CTX, "tokens"), metavar="LIST", help="Prompt tokens. 0, the default: the length of the built-in questions.")]
    n_gen: Annotated[tuple[int, ...], _what("-n", "--n-gen", multiple=True, callback=in_list(4, MAX_CTX, "tokens"), metavar="LIST", help=f"Maximum tokens of an answer. Default {DEFAULT_GEN}.")]
    n_depth: Annotated[tuple[int, ...], _what("-d", "--n-depth", multiple=True, default=("0",), callback=in_list(0, MAX_CTX, "tokens"), metavar="LIST", help="Tokens before the prompt; the prompt rate includes them.")]
    prompt_gen: Annotated[tuple[tuple[int, int], ...], _what("-pg", multiple=True, callback=pairs, metavar="P,N", help="Prompt tokens and answer tokens as a pair.")]
    threads: Annotated[tuple[int, ...], _what("-t", "--threads", multiple=True, default=("0",), callback=_thread_counts, metavar="LIST", help="CPU threads; each number loads the model again. 0: by measured times.")]
    repetitions: Annotated[int, _what("-r", "--repetitions", default=3, type=click.IntRange(1, 1000), help="Repetitions of each measurement.")]
    temperature: Annotated[float, _what("--temp", default=0.0, type=Number(-100, 100), help="Temperature; 0 and below is greedy.")]
    random_prompts: Annotated[bool, _what("--random-prompts", is_flag=True, help="Random prompt ids, for random models (`pyspec synth`).")]
    file: Annotated[Path | None, _what("-f", "--file", type=PATH, help="Own prompts, one per line, or .jsonl with prompt (a text to continue) or messages.")]
    ignore_eos: Annotated[bool, _what("--ignore-eos", is_flag=True, help="Continue after an end-of-generation token.")]
    http: Annotated[bool, _what("--http", is_flag=True, help="Also measure through the HTTP server, streamed to another process.")]
    isolated: Annotated[bool, _what("--isolated", is_flag=True, help="Run the engine in its own process, as the server does.")]
    parts: Annotated[bool, _what("--parts", is_flag=True, help="Also report a round's device time by part: linear, attention, state (GPU).")]
    bandwidth: Annotated[float, _what("--bandwidth", default=0.0, type=Number(0, 1e6), metavar="GB/S", help="Memory bandwidth, to report the share of it that is used.")]
    output: Annotated[str, _report("-o", "--output", type=click.Choice(["md", "json", "csv", "jsonl"]), default="md", help="Output format on stdout.")]
    baseline: Annotated[Path | None, _report("--baseline", type=PATH, help="Compare with an -o json report.")]
    max_regress: Annotated[float, _report("--max-regress", default="3%", callback=percent, help="Exit status 1 if slower than the baseline by more than this.")]
    # fmt: on

    def plans(self, case: str = "") -> list[Plan]:
        """One plan per case, in list order: depths, then prompts, then answers; pairs last."""
        from pyspec.bench.prompts import read_prompts
        from pyspec.bench.session import Plan

        own = read_prompts(self.file) if self.file else ()
        pairs = [(p, n) for p in self.n_prompt or (0,) for n in self.n_gen or (DEFAULT_GEN,)]
        has_own = self.n_prompt or self.n_gen or not self.prompt_gen
        pairs = [*(pairs if has_own else ()), *self.prompt_gen]
        cases = [(d, p, n) for d in self.n_depth for p, n in pairs]
        return [
            Plan(
                streams=self.streams,
                turns=self.repetitions,
                n_prompt=d + p,
                n_predict=n,
                random_prompts=self.random_prompts,
                prompts=own,
                ignore_eos=self.ignore_eos,
                temperature=self.temperature,
                bandwidth=self.bandwidth,
                parts=self.parts,
                case=_case_name(d, p, n, case) if case or len(cases) > 1 else "",
            )
            for d, p, n in cases
        ]


def _case_name(n_depth: int, n_prompt: int, n_gen: int, case: str) -> str:
    depth = f"d{n_depth}" if n_depth else ""
    return " ".join(filter(None, (depth, f"p{n_prompt}", f"n{n_gen}", case)))


@click.command(cls=FlagCommand)
@partial(engine_options, but=("threads",))
@gathered(BenchFlags)
@click.pass_context
def bench(ctx: click.Context, engine: EngineChoice, flags: BenchFlags) -> None:
    """Measure speed, plain and speculative in turns.

    A LIST is written as for llama-bench: 512,1024 or 1-8 or 0-4096+1024 or 1-64*2; options may be repeated. `pyspec bench compare A.json B.json`
    compares two reports written with -o json.
    Example: pyspec bench demo -npl 1,8 -p 128,256 -o json
    """
    from pyspec.bench.report import FORMATS
    from pyspec.bench.result import changes, joined, read_rates

    begin_log()
    if flags.isolated and flags.parts:
        raise click.UsageError("--parts needs the engine in this process: leave --isolated out")
    if flags.file is not None and flags.random_prompts:
        raise click.UsageError("--file or --random-prompts: only one of them gives the prompts")
    before = read_rates(flags.baseline) if flags.baseline else {}
    loads = [replace(engine, settings={**engine.settings, "threads": n}) for n in flags.threads]
    for one in loads:
        one.check(max(engine.np, *flags.streams))
    reports = []
    for n, one in zip(flags.threads, loads, strict=True):
        reports += _measured(one, flags, f"t{n}" if len(loads) > 1 else "")
    report = joined(reports)
    click.echo(FORMATS[flags.output](report), nl=False)
    if before and not holds(changes(report.rows, before), flags.max_regress):
        ctx.exit(1)


def _measured(engine: EngineChoice, flags: BenchFlags, case: str) -> list[Report]:
    """Reports of all cases of one load."""
    from pyspec.bench.session import bench as run_bench

    plans = flags.plans(case)
    longest = max(plan.n_prompt + plan.n_predict for plan in plans) + SPARE
    if not engine.ctx and longest > LONG_CTX:
        # possibly more than the model's training length; a log line says so
        engine = replace(engine, ctx=longest)
    n_slot = max(engine.np, *flags.streams)
    with (
        load_with_meter(engine, n_slot, isolated=flags.isolated) as loaded,
        _clients(loaded) if flags.http else nullcontext() as clients,
    ):
        log = partial(click.echo, err=True)
        return [run_bench(loaded, plan, log, clients) for plan in plans]


@contextmanager
def _clients(engine: Engine) -> Iterator[Clients]:
    """A server for the engine, and a client process for it."""
    from pyspec.bench.over_http import Clients
    from pyspec.cli.chats import served

    with served(engine) as port, Clients(port) as clients:
        yield clients
