"""`pyspec bench compare`: two reports of `pyspec bench -o json`, checked for rates that fell."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyspec.cli import verbose_option

if TYPE_CHECKING:
    from pyspec.bench.result import Change

REPORT = click.Path(path_type=Path, dir_okay=False)


def percent(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Callback of --max-regress: "3%" or "3" to 0.03."""
    try:
        given = float(value.strip().removesuffix("%"))
    except ValueError:
        given = -1.0
    if not 0 <= given <= 100:
        raise click.BadParameter(f"want a percentage from 0% to 100%, got {value!r}", ctx, param)
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
