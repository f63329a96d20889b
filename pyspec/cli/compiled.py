"""`pyspec doctor --compile`: compile all kernels of a model, or of common shapes, on all cores before a server starts."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from pyspec.cli.meter import meter
from pyspec.cli.options import ModelChoice

if TYPE_CHECKING:
    from pyspec.cuda.op import Ask


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
