"""`pyspec synth`: models with random weights, for tests and timing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pyspec.cli import verbose_option
from pyspec.cli.meter import meter


def _lower(ctx: click.Context, param: click.Parameter, value: str) -> str:
    return value.lower()


@click.command()
@click.argument("entry", metavar="MODEL")
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False), metavar="OUT.gguf")
@click.option("--tiny", is_flag=True, help="Write a tiny model of this architecture (some 100 kB).")
@click.option("--quant", default="q8_0", callback=_lower, metavar="TYPE", help="Matrix type: f32, q8_0, q4_k ...")  # fmt: skip
@click.option("--seed", default=0, type=click.IntRange(0, 2**32 - 1), help="Seed of the weights.")
@click.option("--mtp/--no-mtp", default=True, help="Include the MTP blocks, if there are any.")
@click.option("--drafter", is_flag=True, help="Write MODEL's drafter instead.")
@click.option("--kind", default="dflash", callback=_lower, metavar="KIND", help="Of drafters: dflash, dflash2, dspark, eagle3.")  # fmt: skip
@click.option("--sidecar", is_flag=True, help="Write only the MTP blocks, with embedding and head.")
@click.option("--layers", "n_layer", default=0, type=click.IntRange(0, 10_000), metavar="N", help="Write only the first N layers.")  # fmt: skip
@click.option("--routing", default="", callback=_lower, metavar="CURVE", help="Of experts: uniform, modest, hot. `pyspec bench` names it.")  # fmt: skip
@verbose_option
def synth(entry: str, out: Path, **parts: Any) -> None:
    """Write a random model with real dimensions.

    The text is meaningless; the speed is the real model's. MODEL: a published size such as qwen3.6-27b or gemma-3-270m, or with --tiny an
    architecture; a wrong name gets a list of all. Example: pyspec synth qwen3 /tmp/tiny.gguf --tiny
    """
    from pyspec.synth import write

    with meter("writing") as tell:
        path = write(entry, out, **parts, progress=tell)
    click.echo(f"{path}: {path.stat().st_size / 1e6:,.2f} MB", err=True)
