"""`pyspec doctor`: facts about this machine, the kernels that run on it, and why others do not."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from pyspec.cli.meter import meter
from pyspec.cli.options import ModelChoice, model_options, setting_option

if TYPE_CHECKING:
    from pyspec.cuda.op import Ask
    from pyspec.cuda.survey import Finding

# -- compiling alone -------------------------------------------------------------------------------------------------
# `pyspec doctor --compile`: compile all kernels of a model, or of common shapes, on all cores before a server starts.


def compile_model(choice: ModelChoice, archs: str, as_json: bool) -> int:
    """Exit status 0 if everything compiles."""
    from pyspec.cuda import prepare, verdicts

    targets = prepare.targets_of(archs)
    asks, began = _asks(choice), time.perf_counter()
    wanted = (p for target in targets for p in prepare.programs_of(asks, target))
    programs = list(dict.fromkeys(wanted))
    with meter("compiling") as tell:
        n_all = len(programs)
        found = prepare.compile_all(programs, lambda n, what: tell(n, n_all, f"compiling: {what}"))
    failed = [(program, why) for program, why in found if isinstance(why, str)]
    about: dict[str, Any] = {
        "archs": sorted({program.arch for program in programs}),
        "programs": len(programs),
        "seconds": round(time.perf_counter() - began, 1),
        "cache": str(verdicts.folder().parent / "cubin"),
        "failed": sorted({why for _, why in failed}),
    }
    if as_json:
        click.echo(json.dumps(about, indent=1))
    else:
        click.echo(
            f"{len(programs) - len(failed)} of {len(programs)} programs for {', '.join(about['archs'])} are in "
            f"{about['cache']} ({about['seconds']} s)"
        )
        for why in about["failed"]:
            click.echo(why)
    return 1 if failed else 0


def _asks(choice: ModelChoice) -> list[Ask]:
    import torch

    from pyspec.cuda import survey

    if not (choice.model or choice.repo):
        return [*survey.standard(torch.device("cuda")), *survey.products(torch.device("cuda"))]
    from pyspec.engine.plan.asks import asks_of_file

    return asks_of_file(*choice.pair())


VERDICT = "this machine runs pyspec with its own kernels"
ON_CPU = "this machine runs pyspec on its CPU"
ELSEWHERE = frozenset(
    {"runs on NVIDIA GPUs only", "runs on GPUs only", "runs on CPUs only", "for GPUs"}
)  # reasons that say nothing about this machine
GPU_OPS = frozenset({"linear", "linear_tall", "linear_many", "rows"})
"""Ops that models ask for on GPUs: the products of a CPU are `linear_cpu`."""
FAILED = ("failed its check", "outputs differ", "its check")
"""Beginnings of refusals that show a wrong kernel, not a limit."""


ARCHS = f"{__name__}.archs"


def _remember(ctx: click.Context, option: click.Parameter, archs: str) -> None:
    """Store the architectures for --compile, if they are not this machine's GPU's."""
    ctx.meta[ARCHS] = archs


@click.command()
@model_options
@setting_option("draft_path")
@setting_option("device")
@setting_option("kernels")
@click.option("--recheck", is_flag=True, help="Discard stored results and check the kernels again.")
@click.option("--compile", "compiles", is_flag=True, help="Only compile all kernels of MODEL.")
@click.option(
    "--arch", default="", metavar="LIST", expose_value=False, callback=_remember,
    help="With --compile: target architectures, as sm_90,sm_120. Needs no GPU.",
)  # fmt: skip
@click.option("--cost", is_flag=True, help="Also measure each op one tier lower.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(
    ctx: click.Context,
    choice: ModelChoice,
    device: str,
    kernels: str,
    recheck: bool,
    compiles: bool,
    cost: bool,
    as_json: bool,
) -> None:
    """Check the kernels on this machine.

    Exit status 0 if all run as they should, else 1.

    On a machine without a GPU, check the CPU and torch.

    With MODEL, load it and check the kernels that it uses; without, check a set of common shapes. With --compile, load and check nothing:
    compile the kernels into the cache, so that the first start of a server need not wait for them.
    """
    archs = ctx.meta.get(ARCHS, "")
    if archs and not compiles:
        raise click.UsageError("--arch needs --compile")
    if compiles:
        ctx.exit(compile_model(choice, archs, as_json))
    about = diagnose(choice, device, recheck, kernels, cost)
    if as_json:
        click.echo(json.dumps(about, indent=1))
    else:
        _show(about, bool(ctx.meta.get("pyspec.verbose")))
    ctx.exit(0 if about["healthy"] else 1)


def diagnose(
    choice: ModelChoice, device_name: str, recheck: bool, kernels: str = "auto", cost: bool = False
) -> dict[str, Any]:
    """The whole report of doctor, as for JSON."""
    from dataclasses import asdict

    from pyspec.config import EngineSettings

    EngineSettings(device=device_name, kernels=kernels)  # refuses invalid names

    import torch

    from pyspec.cpu import kernels as cpu_kernels
    from pyspec.cuda import checker, kernel_context, survey, tri, tri_install, verdicts
    from pyspec.cuda.collective import sums_by
    from pyspec.cuda.kernel_context import KernelContext
    from pyspec.cuda.machine import bandwidth, machine, memory_bytes, peer_links
    from pyspec.cuda.op import tiers_of
    from pyspec.engine.plan.describe import pick_device

    device = pick_device(device_name)
    if recheck:
        verdicts.forget_all()
    speed = bandwidth(device)  # before anything else takes memory
    if choice.model or choice.repo:
        _load(choice, str(device), kernels)
        asks = survey.asked()
    else:
        kernel_context.use(KernelContext(tiers_of(kernels)))
        asks = [
            (op, spec)
            for op, spec in survey.standard(device)
            if device.type != "cpu" or op.name not in GPU_OPS or cpu_kernels.missing()
        ]
    found = survey.findings(asks)
    ops = [asdict(f) for f in found]
    if cost:
        from pyspec.cuda.survey import step_downs

        for about, lower in zip(ops, step_downs(asks), strict=True):
            about["lower"] = None if lower is None else asdict(lower)
    checker.close()
    why = _why_not(device.type, found)
    wrong = why if device.type == "cuda" else _wrong_on_cpu(found, was_asked=device_name == "cpu")
    return {
        "machine": {**asdict(machine(device)), "torch": torch.__version__, "device": str(device)},
        "triton": {"version": tri_install.version() or "", "refused": tri.missing(device) or ""},
        "memory_bytes": memory_bytes(device),
        "bandwidth_bytes_per_s": round(speed),
        "ranks": {"sums": sums_by(device), "links": [asdict(link) for link in peer_links(device)]},
        "cpu_kernels": cpu_kernels.described() if device.type == "cpu" else "",
        "cache": str(verdicts.folder().parent),
        "ops": ops,
        "own_kernels": not why,
        "reason": why,
        "healthy": not wrong,
        "verdict": _verdict(device.type, why, wrong),
    }


def _load(choice: ModelChoice, device: str, kernels: str) -> None:
    """Load the model as the server would, with one slot; the ops record the kernels that it requests."""
    from pathlib import Path

    from pyspec.config import EngineSettings
    from pyspec.cuda import kernel_context
    from pyspec.cuda.kernel_context import KernelContext
    from pyspec.cuda.op import listed_ops, tiers_of
    from pyspec.engine.load.load import load

    def plan() -> tuple[Path, EngineSettings]:
        path, draft_path = choice.pair()
        settings = EngineSettings(
            ctx=512, draft_path=draft_path, device=device, check_tap_shift=False, kernels=kernels
        )
        return path, settings

    choice = choice.look_before(plan)
    kernel_context.use(KernelContext(tiers_of(kernels)))
    for op in listed_ops():
        op.decided.clear()
    load(*plan())


def _why_not(device_type: str, found: list[Finding]) -> str:
    """The reason why some ops do not run with pyspec's own kernels; "" if all do."""
    import torch

    if device_type != "cuda":
        if torch.cuda.is_available():
            return "the CPU was requested"
        if torch.version.hip:
            return "no AMD GPU"
        return "no NVIDIA GPU" if torch.version.cuda else "this torch is built without CUDA"
    # without those that have no kernel on any machine
    slow = [f for f in found if not f.own and f.refused]
    if not slow:
        return ""
    first = slow[0]
    reasons = "; ".join(f"{r.impl}: {r.reason}" for r in first.refused)
    return f"{len(slow)} of {len(found)} run as torch, first {first.op} ({first.shape}): {reasons}"


def _wrong_on_cpu(found: list[Finding], *, was_asked: bool) -> str:
    """The fault of a machine that runs on its CPU; "" if there is none."""
    import torch

    from pyspec.cuda.machine import CUDA_PACKAGES, has_driver

    if has_driver() and not (was_asked or torch.cuda.is_available() or torch.version.hip):
        if torch.version.cuda is None:
            packages = f"'torch>=2.11' {CUDA_PACKAGES}"
            fix = f"pip uninstall torch, then pip install {packages}"
            return f"there is an NVIDIA driver, but this torch was built for CPUs ({fix})"
        built = torch.version.cuda
        return f"there is an NVIDIA driver, but torch (CUDA {built}) finds no GPU that it can use"
    for finding in found:
        for refused in finding.refused:
            if refused.reason.startswith(FAILED):
                return f"{finding.op} ({finding.shape}): {refused.impl}: {refused.reason}"
    return ""


def _verdict(device_type: str, why: str, wrong: str) -> str:
    """The last line of the report."""
    if device_type == "cuda":
        return f"{VERDICT}: no: {why}" if why else f"{VERDICT}: yes"
    if wrong:
        return f"{ON_CPU}: no: {wrong}"
    return f"{ON_CPU}: yes ({why})"


def _link(link: dict[str, Any]) -> str:
    how = "directly" if link["is_direct"] else "through host memory"
    rate = f"{link['bytes_per_s'] / 1e9:,.0f} GB/s measured"
    return f"{link['first']} to {link['second']} {how}, {rate}"


def _lower(found: dict[str, Any] | None) -> str:
    return "-" if found is None else f"{found['impl']}: {found['times']:.3g} times its time"


def _show(about: dict[str, Any], with_shapes: bool) -> None:
    """Print the report; shapes of an op with one outcome are one row unless `with_shapes`."""
    from pyspec.cli.tables import row, show, table

    m, triton = about["machine"], about["triton"]
    facts = table("machine", "")
    for name, value in (
        ("device", f"{m['device']}: {m['gpu']}"),
        ("compute capability", m["capability"]),
        ("memory", f"{about['memory_bytes'] / 1e9:,.1f} GB"),
        ("ranks (--tp)", about["ranks"]["sums"]),
        ("peers", "\n".join(map(_link, about["ranks"]["links"])) or "no other GPU"),
        ("bandwidth", f"{about['bandwidth_bytes_per_s'] / 1e9:,.0f} GB/s measured"),
        ("driver", m["driver"]),
        ("NVRTC", m["nvrtc"]),
        ("cuda-core", m["cuda_core"]),
        ("torch", m["torch"]),
        ("Triton", f"{triton['version'] or 'none'}: {triton['refused'] or 'runs here'}"),
        ("CPU kernels", about["cpu_kernels"]),
        ("cache", about["cache"]),
    ):
        row(facts, name, value or "-")
    show(facts)
    has_cost = any("lower" in f for f in about["ops"])
    t = table("op", "shape", "runs as", *(["a tier lower"] if has_cost else []), "refused")
    rows: dict[tuple[str, ...], list[str]] = {}
    for f in about["ops"]:
        here = (r for r in f["refused"] if r["reason"] not in ELSEWHERE)
        refused = "\n".join(f"{r['impl']}: {r['reason']}" for r in here) or "-"
        lower = [_lower(f["lower"])] if has_cost else []
        own = [f["shape"]] if with_shapes else []
        rows.setdefault((f["op"], f["choice"], *lower, refused, *own), []).append(f["shape"])
    for (op, *rest), shapes in rows.items():
        shown = rest[: 2 + has_cost]
        row(t, op, shapes[0] if len(shapes) == 1 else f"{len(shapes)} shapes", *shown)
    show(t)
    click.echo(
        "Implementations for other kinds of devices are left out; -v lists all shapes, --json everything."
    )
    click.echo(about["verdict"])
