"""`pyspec logits`: the logits of given tokens, for comparison with other programs."""

from __future__ import annotations

from pathlib import Path

import click

from pyspec.cli.options import ModelChoice, model_options, setting_option
from pyspec.config import KV_TYPES, MAX_ROWS


def _ids(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    try:
        return [int(part) for part in value.replace(",", " ").split()]
    except ValueError as e:
        raise click.BadParameter(f"want numbers between commas, got {value!r}") from e


@click.command()
@model_options
@click.option("--ids", required=True, callback=_ids, help="Token ids: 1,2,3.")
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="Output file.")  # fmt: skip
@click.option("--chunk", default=512, type=click.IntRange(1, MAX_ROWS), help="Tokens per forward.")
@click.option("--kv-type", type=click.Choice(KV_TYPES), default="f32", help="Type of KV entries.")
@setting_option("device")
@setting_option("weights")
def logits(
    choice: ModelChoice,
    ids: list[int],
    out: Path,
    chunk: int,
    kv_type: str,
    device: str,
    weights: str,
) -> None:
    """Write the logits of given tokens to a file.

    OUT gets arrays `tokens` (int32) and `logits` (float32 [token, vocab])."""
    from pyspec.catalog import resolve
    from pyspec.config import EngineSettings

    n_ctx = len(ids)
    settings = EngineSettings(
        ctx=n_ctx, kv_type=kv_type, device=device, weights=weights, spec_type="none"
    )
    choice = choice.look_before(lambda: (resolve(choice.target())[0], settings))
    from pyspec.logits import compute_logits, save_logits

    path = resolve(choice.target())[0]
    rows = compute_logits(path, ids, chunk=chunk, kv_type=kv_type, device=device, weights=weights)
    save_logits(out, ids, rows)
    click.echo(f"{out}: {rows.shape[0]} rows of {rows.shape[1]} logits", err=True)
