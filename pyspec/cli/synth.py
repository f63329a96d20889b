"""`pyspec synth`: a model with random weights, for tests and timing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click

from pyspec.cli import verbose_option


@click.command()
@click.argument("entry", metavar="MODEL")
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False), metavar="OUT.gguf")
@click.option("--tiny", is_flag=True, help="The same architecture in a few hundred kilobytes.")
@click.option("--quant", default="q8_0", metavar="TYPE", help="Type of the matrices: f32, q8_0, q4_k ...")
@click.option("--seed", default=0, type=click.IntRange(0, 2**32 - 1), help="Other weights with each seed.")
@click.option("--mtp/--no-mtp", default=True, help="With the MTP block, if the architecture has one.")
@click.option("--drafter", is_flag=True, help="Write the DFlash drafter that fits MODEL instead.")
@click.option("--sidecar", is_flag=True, help="Write only the MTP block, with embedding and head.")
@click.option(
    "--layers",
    "n_layer",
    default=0,
    type=click.IntRange(0, 10_000),
    metavar="N",
    help="Only the first N layers of MODEL.",
)
@verbose_option
def synth(
    entry: str, out: Path, tiny: bool, quant: str, seed: int, mtp: bool, drafter: bool, sidecar: bool, n_layer: int
) -> None:
    """Write a random model with real dimensions.

    Its text means nothing; its speed is the real model's. Example: pyspec synth qwen3 /tmp/tiny.gguf --tiny
    """
    from pyspec.synth import write

    progress = _meter() if sys.stderr.isatty() else None
    path = write(
        entry, out, quant=quant.lower(), seed=seed, tiny=tiny, mtp=mtp, drafter=drafter, sidecar=sidecar,
        n_layer=n_layer, progress=progress,
    )  # fmt: skip
    click.echo(f"{path}: {path.stat().st_size / 1e6:,.2f} MB", err=True)


def _meter() -> Callable[[int, int], None]:
    last = -1

    def tell(done: int, whole: int) -> None:
        nonlocal last
        percent = 100 * done // max(whole, 1)
        if percent != last:
            last = percent
            click.echo(f"\r{percent:3d} %" + ("\n" if done >= whole else ""), nl=False, err=True)

    return tell
