"""`pyspec verify`: proof on this machine that drafts do not change the text."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyspec.cli.fields import Number
from pyspec.cli.flags import FlagCommand
from pyspec.cli.meter import load_with_meter, meter
from pyspec.cli.options import EngineChoice, begin_log, engine_options
from pyspec.config import MAX_CTX

if TYPE_CHECKING:
    from pyspec.bench.prompts import Chat
    from pyspec.bench.verify import Parting, Verification
    from pyspec.engine.api import Engine

AUTO_SLOTS = 4


@click.command(cls=FlagCommand)
@engine_options
@click.option("-f", "--file", type=click.Path(path_type=Path, dir_okay=False), help="Prompts, one per line, or .jsonl with prompt or messages. Default: 16 built-in ones.")  # fmt: skip
@click.option("--random-prompts", default=0, type=click.IntRange(0, 10_000), help="Additional prompts of random ids.")  # fmt: skip
@click.option("-n", "--n-gen", default=128, type=click.IntRange(1, MAX_CTX), help="Answer tokens.")
@click.option("--tie", default=0.0, type=Number(0, 100), help="Logits closer than this are a tie. 0: 0.002 on a CPU, 0.1 on a GPU.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def verify(
    ctx: click.Context,
    engine: EngineChoice,
    file: Path | None,
    random_prompts: int,
    n_gen: int,
    tie: float,
    as_json: bool,
) -> None:
    """Compare greedy texts with and without drafts, token by token.

    Each text is equal, differs at a near tie (with both logits), or shows a bug: then the exit status is 1. Example: pyspec verify demo
    """
    from pyspec.bench.prompts import read_prompts
    from pyspec.bench.verify import verify as run_verify

    begin_log()
    n_slot = engine.np if engine.np > 0 else AUTO_SLOTS
    texts = read_prompts(file) if file is not None else None
    engine = replace(engine, settings={**engine.settings, "n_draft_fixed": True})
    with load_with_meter(engine, n_slot) as loaded:
        prompts = _prompts(loaded, texts, random_prompts, n_gen)
        with meter("comparing") as tell:
            found = run_verify(loaded, prompts, n_gen, tie, tell)
    if as_json:
        click.echo(json.dumps(_as_json(found), indent=1))
    else:
        for parting in found.partings:
            click.echo(describe_parting(parting))
        click.echo(_summary(found))
    ctx.exit(1 if found.bugs else 0)


def _prompts(
    engine: Engine,
    texts: list[str | Chat] | None,
    n_random: int,
    n_gen: int,
) -> list[tuple[int, ...]]:
    """Token ids of the prompts, the demo model's by default, and random ids."""
    from pyspec.bench.prompts import demo_prompts, random_ids

    chats = [[{"role": "user", "content": text}] for text in demo_prompts()]
    prompts = [engine.encode(text) for text in (chats if texts is None else texts)]
    info, banned = engine.info, engine.tokenizer.special
    length = max(1, min(48, info.n_ctx - n_gen - 1))
    random = [tuple(random_ids(info.n_vocab, banned, length, seed)) for seed in range(n_random)]
    return prompts + random


def describe_parting(p: Parting) -> str:
    """A sentence about the first difference of a text."""
    plain, spec = (f"{x:+.5f}" if x is not None else "far below" for x in p.logits)
    margin = f"{p.margin:.2g}" if math.isfinite(p.margin) else "large"
    return (
        f"prompt {p.prompt}, token {p.token} after {p.before!r}: "
        f"plain {p.plain} {p.plain_text!r} (logit {plain}), speculative {p.spec} {p.spec_text!r} ({spec}) "
        f"against the best; margin {margin}: {p.verdict}"
    )


def _summary(v: Verification) -> str:
    ties = len(v.partings) - len(v.bugs)
    share = v.accepted / max(v.n_compared, 1)
    return (
        f"{v.n_prompt} prompts, {v.n_compared} tokens compared, "
        f"{v.accepted} of {v.drafted} drafted tokens accepted ({share:.0%} of the text): "
        f"{v.n_equal} equal, {ties} near ties (margin below {v.tie:g}), {len(v.bugs)} bugs"
    )


def _as_json(v: Verification) -> dict[str, Any]:
    values = asdict(v) | {"equal": v.n_equal, "bugs": len(v.bugs)}
    for p in values["partings"]:
        p["margin"] = p["margin"] if math.isfinite(p["margin"]) else None
    return values
