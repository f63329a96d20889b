"""`pyspec fit`: the settings that fit this machine, or a GPU of a given size, with figures and flags."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from pyspec.cli.flags import FlagCommand, grouped
from pyspec.cli.options import EngineChoice, amount, begin_log, engine_options

if TYPE_CHECKING:
    from pyspec.engine.plan.fit import Fit, FitReport

_plan = grouped("Plan")
AUTO_SLOTS = 4


@click.command(cls=FlagCommand)
@partial(engine_options, but=("vram",))
@_plan(
    "--vram",
    callback=amount,
    metavar="SIZE",
    help="Plan for this much GPU memory: 24 or 24G is 24 GiB.",
)
@_plan("--ram", callback=amount, metavar="SIZE", help="With --vram: plan for this much host memory.")
@_plan("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def fit(ctx: click.Context, engine: EngineChoice, vram: int, ram: int, as_json: bool) -> None:
    """Show a model's memory, and the slots and contexts that fit.

    Tables and experts that do not fit on the GPU are planned for host memory, with a forecast of the rate. Computed from the file's head: no weights are
    loaded or downloaded. Exit status 5 if nothing fits.

    Example: pyspec fit -hf user/repo:Q4_K_M --vram 24G
    """
    from pyspec.errors import DoesNotFit
    from pyspec.gguf import has_head
    from pyspec.hub import heads_only

    if ram and not vram:
        raise click.UsageError("--ram needs --vram, the memory of a GPU")
    begin_log()
    engine.choice.check()
    engine.choice.locate()
    from pyspec.engine.plan.fit import fit as plan_fit
    from pyspec.engine.plan.look import instead

    n_slot = engine.np if engine.np > 0 else AUTO_SLOTS
    with TemporaryDirectory(prefix="pyspec-fit-") as folder, heads_only(Path(folder), has_head):
        path, settings = engine.plan(n_slot)
        report = plan_fit(path, settings, vram, ram)
        fits = report.best(n_slot) is not None
        advice = "" if fits else instead(report, engine.choice.name)
    about = summary(report, engine) | {"instead": advice}
    click.echo(json.dumps(about, indent=1)) if as_json else _show(report, about)
    if not about["flags"]:
        ctx.exit(DoesNotFit.exit_code)


def summary(report: FitReport, engine: EngineChoice) -> dict[str, Any]:
    """The whole report of fit as for JSON, in bytes."""
    d, best = report.description, report.best(report.description.settings.np, engine.ctx)
    return {
        "model": engine.choice.model or engine.choice.repo,
        "device": f"a GPU with {report.free} bytes free" if d.assumed else str(d.device),
        "drafter": d.draft.kind,
        "draft_note": d.draft.note,
        "free": report.free,
        "usable": report.usable,
        "np": d.settings.np,
        "n_ctx": d.n_ctx,
        "n_ctx_train": d.n_ctx_train,
        "fits": report.fits_as_asked,
        "plan": asdict(report.asked) | {"total": report.asked.total},
        "per_slot": {
            "kv": report.kv_per_slot,
            "state": report.state_per_slot,
            "draft": report.draft_per_slot,
            "checkpoint": report.checkpoint,
        },
        "host": _host(report),
        "contexts": [{"np": f.np, "n_ctx": f.n_ctx, "total": f.plan.total} for f in report.fits],
        "note": _fewer(report, best) if best is not None else "",
        "flags": []
        if best is None
        else _flags(engine, best.np, min(best.n_ctx, engine.ctx or best.n_ctx)),
    }


def _host(report: FitReport) -> dict[str, Any] | None:
    """Where experts, feed-forwards and tables are, and the rates that memory allows; None if all is on the device."""
    from pyspec.engine.plan.fitted import expected, rates_of, share_on_card

    if report.host is None:
        return None
    rates = rates_of(report.description)
    return {
        "plan": asdict(report.host) | {"total": report.host.total},
        "free": report.host_free,
        "blocks": [[block.prefix, n] for block, n in report.description.in_host],
        "feed_forwards": [block.prefix for block in report.description.away],
        "tables": list(report.description.placement.tables),
        "share_on_gpu": round(share_on_card(report.description), 4),
        "forecast": {name: round(x, 1) for name, x in expected(report.description, rates).items()},
        "rates": rates.said,
    }


def _fewer(report: FitReport, best: Fit) -> str:
    """The reason for advising fewer slots than requested."""
    asked = next(one for one in report.fits if one.np == report.description.settings.np)
    if best.np >= asked.np:
        return ""
    has = f"hold {asked.n_ctx} tokens each" if asked.n_ctx else "do not fit"
    return f"{asked.np} slots {has}; {best.np} {'holds' if best.np == 1 else 'hold'} {best.n_ctx} tokens"


def _flags(engine: EngineChoice, np: int, n_ctx: int) -> list[str]:
    """The flags for `pyspec server` or `run`, including those given to fit."""
    choice = engine.choice
    file = ["-hff", choice.file] if choice.file else []
    words = [choice.model] if choice.model else ["-hf", choice.repo, *file]
    words += ["-md", choice.draft] if choice.draft else []
    words += ["-hfd", choice.draft_repo] if choice.draft_repo else []
    return [*words, "-np", str(np), "-c", str(n_ctx), *_others(engine)]


def _others(engine: EngineChoice) -> list[str]:
    """Every other flag with a value that is not its default: each may change the memory."""
    from pyspec.config import EngineSettings
    from pyspec.ranges import rules_of

    plain, words = EngineSettings(), list[str]()
    for rule in rules_of(EngineSettings):
        value = engine.settings.get(rule.name, getattr(plain, rule.name))
        if value == getattr(plain, rule.name) or not rule.flag.words:
            continue
        if isinstance(value, bool):
            words.append(rule.spelt if value else rule.spelt.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            words += [rule.spelt, ",".join(value)]
        else:
            words += [rule.spelt, f"{value:g}" if isinstance(value, float) else str(value)]
    return words


def _show(report: FitReport, about: dict[str, Any]) -> None:
    from pyspec.cli.tables import row, show, table
    from pyspec.engine.plan.memory_plan import NAMES, size

    d = report.description
    free = f"{size(report.free)} free"
    where = f"a GPU with {free}" if d.assumed else f"{d.device}, {free}"
    if d.settings.tp > 1:
        where = f"{'each of ' if d.is_cuda else ''}{d.settings.tp} ranks; {where}"
    click.echo(f"{about['model']} on {where}; {size(report.usable)} may be used")
    click.echo(about["draft_note"])
    t = table("what", "bytes", "per slot", right=("bytes", "per slot"))
    kv, state, draft_kv = report.kv_per_slot, report.state_per_slot, report.draft_per_slot
    each = {"kv": kv, "state": state, "draft_kv": draft_kv}
    for purpose, title in NAMES.items():
        if n := getattr(report.asked, purpose):
            row(t, title, size(n), size(each[purpose]) if each.get(purpose) else "")
    verdict = "fits" if about["fits"] else "does not fit"
    row(t, f"-np {d.settings.np} -c {d.n_ctx}", size(report.asked.total), verdict)
    show(t)
    if report.host is not None:
        from pyspec.engine.plan.fitted import fit_lines

        verdict = "" if report.host.total <= report.host_free else ", which does not fit"
        click.echo("\n".join(fit_lines(d)))
        click.echo(f"host memory: {report.host}, of {size(report.host_free)} free{verdict}\n")
    if report.checkpoint:
        click.echo(
            f"a checkpoint of a slot's state and windows takes {size(report.checkpoint)}; one per slot is included\n"
        )
    t = table("slots", "tokens each", "bytes", right=("slots", "tokens each", "bytes"))
    for one in report.fits:
        fits = (f"{one.n_ctx}", size(one.plan.total)) if one.n_ctx else ("-", "does not fit")
        row(t, str(one.np), *fits)
    show(t)
    if about["note"]:
        click.echo(about["note"])
    if about["flags"]:
        click.echo("pyspec server " + " ".join(about["flags"]))
    else:
        click.echo(f"nothing fits. {about['instead']}", err=True)
