"""`pyspec perplexity`: the perplexity of a text as llama-perplexity computes it, and the divergence from another load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyspec.cli.flags import FlagCommand
from pyspec.cli.meter import meter
from pyspec.cli.options import ModelChoice, begin_log, keys_as_values, model_options, setting_option
from pyspec.config import MAX_CTX, MAX_ROWS, settings_from

if TYPE_CHECKING:
    from pyspec.perplexity import Compared, Scored

READABLE = click.Path(path_type=Path, dir_okay=False)
N_CTX = 512


def text_of(path: Path) -> str:
    """The file as llama-perplexity reads it: a line end at its end is left out. ConfigError if it can not be read as UTF-8."""
    from pyspec.errors import ConfigError

    try:
        return path.read_bytes().decode("utf-8").removesuffix("\n")
    except OSError as e:
        raise ConfigError(f"-f {path}: {e.strerror or e}") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"-f {path} is not UTF-8: byte {e.start}") from e


@click.command(cls=FlagCommand)
@model_options
@click.option("-f", "--file", required=True, type=READABLE, help="The text, in UTF-8.")
@click.option("-c", "--ctx-size", "ctx", default=N_CTX, type=click.IntRange(4, MAX_CTX - 1), help="Tokens of a sequence.")  # fmt: skip
@click.option("--chunks", default=-1, type=click.IntRange(-1, MAX_CTX), help="Sequences to score at most. -1 or 0: all.")  # fmt: skip
@click.option("-b", "--batch-size", "batch", default=N_CTX, type=click.IntRange(1, MAX_ROWS), help="Rows of a forward.")  # fmt: skip
@click.option("-ub", "--ubatch-size", "ubatch", default=N_CTX, type=click.IntRange(1, MAX_ROWS), help="The same; the smaller counts.")  # fmt: skip
@setting_option("kv_type")
@setting_option("kv_type_v")
@setting_option("threads")
@setting_option("device")
@setting_option("weights")
@setting_option("cpu_activations")
@setting_option("kernels")
@click.option("--kl-divergence", is_flag=True, help="Also the divergence from f32 keys and values, or from --kl-base.")  # fmt: skip
@click.option("--kl-base", default="", metavar="MODEL", help="Another model of the same vocabulary to compare with, with f32 keys and values.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def perplexity(
    ctx_: click.Context,
    choice: ModelChoice,
    file: Path,
    chunks: int,
    kl_divergence: bool,
    kl_base: str,
    as_json: bool,
    **values: Any,
) -> None:
    """Compute the perplexity of a text, as llama-perplexity does.

    The second half of each sequence of -c tokens is scored. Example: pyspec perplexity model.gguf -f text.txt -ctk q8_0
    """
    text = text_of(file)
    keys_as_values(values)
    values["batch"] = values["ubatch"] = min(values["batch"], values["ubatch"], values["ctx"])
    settings = settings_from({**values, "ctx": values["ctx"] + 1, "spec_type": "none"})
    from pyspec.catalog import resolve
    from pyspec.hub import expecting

    begin_log()
    choice = choice.look_before(lambda: (resolve(choice.target())[0], settings))
    with expecting(choice.seen):
        path = resolve(choice.target())[0]
    from pyspec.logits import LogitReader
    from pyspec.perplexity import chunks_of, compare, score

    reader = LogitReader(path, settings)
    parts = chunks_of(reader.tokenizer, text, values["ctx"], chunks)
    with meter("scoring") as tell:

        def done(n: int) -> None:
            tell(n, len(parts))

        if not (kl_divergence or kl_base):
            show(score(reader, parts, done), len(parts), as_json=as_json)
            return
        other = resolve(kl_base)[0] if kl_base else path
        base = LogitReader(other, replace(settings, kv_type="f32", kv_type_v=None))
        show_compared(compare(base, [reader], parts, done)[0], len(parts), as_json=as_json)


def show(found: Scored, n_chunk: int, *, as_json: bool) -> None:
    """Print a text's perplexity."""
    if as_json:
        click.echo(json.dumps(_values(found, n_chunk)))
        return
    click.echo(
        f"perplexity {found.perplexity:.4f} +/- {found.error:.4f} ({found.n} tokens of {n_chunk} sequences)"
    )


def show_compared(found: Compared, n_chunk: int, *, as_json: bool) -> None:
    """Print both perplexities and the divergence."""
    if as_json:
        more = {
            "base_perplexity": found.base.perplexity,
            "kl_divergence": found.mean,
            "kl_error": found.error,
            "kl_median": found.quantile(0.5),
            "kl_99": found.quantile(0.99),
            "kl_max": found.quantile(1.0),
            "same_best": found.same,
            "rms_probability": found.rms,
        }
        click.echo(json.dumps(_values(found.own, n_chunk) | more))
        return
    show(found.own, n_chunk, as_json=False)
    click.echo(f"of the base {found.base.perplexity:.4f} +/- {found.base.error:.4f}")
    click.echo(
        f"KL divergence {found.mean:.6f} +/- {found.error:.6f} nats; median {found.quantile(0.5):.6f}, "
        f"99 % below {found.quantile(0.99):.6f}, largest {found.quantile(1.0):.6f}"
    )
    click.echo(
        f"same likeliest token {found.same:.2%}; the token's probability differs by {found.rms:.3%} (root of mean square)"
    )


def _values(found: Scored, n_chunk: int) -> dict[str, Any]:
    return {
        "perplexity": found.perplexity,
        "error": found.error,
        "tokens": found.n,
        "sequences": n_chunk,
    }
