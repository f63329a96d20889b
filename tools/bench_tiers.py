"""Measure a round with one op a tier lower: op by op, in Triton and as the torch reference, the other ops unchanged.

    python tools/bench_tiers.py qwen3.6-27b --quant q8_0 --layers 16 [--ops gdn attend ...] [--tiers triton torch] [--spec-len 3]
    ... --kernels triton --ops none    the whole model in Triton, and no op beside it
    ... --tiers captured compiled      the torch reference where a graph holds it, as it is and by torch.compile, without a check

The model is synthetic and has only its first N layers, so that it loads in seconds. A round of all layers is extrapolated from two
depths: the difference between N and N / 2 layers is the time of N / 2 layers. An op costs the extra time of its layers; ops that run
once a round (the head's) count once. Rounds with drafts need more tokens: 0.00 ms means that no round had all streams in it. A refused
tier is shown with its reason. Prints a table in Markdown: milliseconds of a round at each number of streams, and the remaining share of
the full rate, for the layers that ran and for all.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pyspec.bench.session import Plan, bench
from pyspec.cuda import kernel_context, survey
from pyspec.cuda.kernel_context import KernelContext
from pyspec.cuda.op import Impl, listed_ops, tiers_of
from pyspec.engine.api import Engine
from pyspec.synth import find, write

ONCE = ("best", "ahead", "embed", "angles", "ring_places", "norms")
IN_TORCH = ("captured", "compiled")
HOW = {"ctx": 2560, "kv_type": "f16"}


@dataclass(frozen=True)
class Rounds:
    """Milliseconds of a round by the number of streams, and the op's tier; `error` instead of both. plain: without drafts, if `ms` is with."""

    ms: dict[int, float]
    ran: str = ""
    error: str = ""
    plain: dict[int, float] = field(default_factory=dict)


def lower(op: str, tier: str) -> tuple[str, ...]:
    """Modules whose implementations are left out, so that `op` runs as `tier`."""
    found = next(o for o in listed_ops() if o.name == op)
    names = [impl.name for impl in found.impls]
    n = names.index(tier) if tier in names else len(names)
    return tuple({impl.bind.__module__ for impl in found.impls[:n]})


class Compiled:
    """A launch, a function or an object with several, compiled by torch."""

    def __init__(self, launch: Any) -> None:
        self._launch, self._run = launch, torch.compile(launch)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._launch, name)
        found = torch.compile(found) if callable(found) else found
        setattr(self, name, found)
        return found


@contextmanager
def in_torch(op: str, tier: str) -> Iterator[None]:
    """While this lasts, the op runs as its reference, which graphs take to be capturable."""
    (found,) = (o for o in listed_ops() if o.name == op)

    def bind(spec: object) -> Any:
        launch = found.reference.bind(spec)
        if tier == "captured":
            return launch
        return (lambda data: torch.compile(launch(data))) if op == "heads" else Compiled(launch)

    before, refusal = found.impls, found.refusal
    found.impls = [Impl(tier, bind, capturable=True), *before]
    found.refusal = lambda impl, spec: None if impl.name == tier else refusal(impl, spec)  # type: ignore[method-assign]
    try:
        yield
    finally:
        found.impls, found.refusal = before, refusal  # type: ignore[method-assign]


def measured(
    path: Path,
    streams: list[int],
    n_token: int,
    op: str = "",
    tier: str = "",
    spec_len: float = 0.0,
    kernels: str = "auto",
) -> Rounds:
    demoted = lower(op, tier) if op and tier not in IN_TORCH else ()
    kernel_context.use(
        KernelContext(tiers_of(kernels), demoted=frozenset(demoted))
    )  # the engine's, to read its decisions
    for each in listed_ops():
        each.decided.clear()
    settings: dict[str, object] = {**HOW, "np": max(streams), "demoted": demoted}
    settings["kernels"] = kernels
    if spec_len:
        settings |= {"synth_len": spec_len, "n_draft_fixed": True, "n_draft_max": 3}
    plan = Plan(
        streams=streams, turns=1, n_prompt=300, n_predict=n_token, random_prompts=True, ignore_eos=True
    )
    try:
        with (
            in_torch(op, tier) if tier in IN_TORCH else nullcontext(),
            Engine.open(str(path), "mtp" if spec_len else None, settings) as engine,
        ):
            rows = bench(engine, plan).rows
            ran = {each.chosen(spec).name for each, spec in survey.asked() if each.name == op}
    except Exception as e:  # noqa: BLE001 - one op that can not run is a line of the table
        return Rounds({}, error=f"{type(e).__name__}: {str(e)[:80]}")
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    ms = {row.np: row.spec_round_ms if spec_len else row.plain_round_ms for row in rows}
    return Rounds(ms, "/".join(sorted(ran)), plain={row.np: row.plain_round_ms for row in rows})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--quant", default="q8_0")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--ops", nargs="+", default=[])
    parser.add_argument("--tiers", nargs="+", default=["triton", "torch"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--spec-len", type=float, default=0.0, help="MTP with 3 drafted, so many tokens a round"
    )
    parser.add_argument("--kernels", default="auto", help="what ops run as that are not demoted")
    parser.add_argument(
        "--folder", type=Path, help="where the models are written, or lie already (m8.gguf)"
    )
    parser.add_argument(
        "--limit", type=float, default=0.0, help="seconds after which no further op is begun"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a model of a few hundred kilobytes, to try this"
    )
    args = parser.parse_args()
    began, n_all = time.monotonic(), find(args.model, tiny=args.tiny).n_layer
    n_layer = min(args.layers, n_all)
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for n in (n_layer, n_layer // 2):
            paths[n] = to = (args.folder or Path(folder)) / f"m{n}.gguf"
            if not to.exists():
                write(
                    args.model, to, quant=args.quant, tiny=args.tiny, mtp=bool(args.spec_len), n_layer=n
                )
        half, full = (
            measured(paths[n], args.streams, args.tokens, spec_len=args.spec_len, kernels=args.kernels)
            for n in (n_layer // 2, n_layer)
        )
        if full.error or half.error:
            print(full.error or half.error)
            return 1
        whole, plain = (
            {n: b[n] + (b[n] - a[n]) / (n_layer - n_layer // 2) * (n_all - n_layer) for n in b}
            for a, b in ((half.ms, full.ms), (half.plain, full.plain))
        )
        asked = args.ops or list(dict.fromkeys(op.name for op, _ in survey.asked()))
        kinds = [("a round", full.ms, whole)] + (
            [("without drafts", full.plain, plain)] if args.spec_len else []
        )
        for name, some, drawn in kinds:
            shown = ", ".join(
                f"{n}: {some[n]:.2f} ms ({drawn[n]:.2f} of all {n_all})" for n in args.streams
            )
            print(f"{args.model} {args.quant}, {n_layer} layers, {name} of streams {shown}\n")
        print(
            "| op | as | "
            + " | ".join(f"{n}: ms, of the rate, of all layers'" for n in args.streams)
            + " |"
        )
        print("| --- " * (2 + len(args.streams)) + "|")
        for op in asked if asked != ["none"] else ():
            for tier in args.tiers:
                if args.limit and time.monotonic() - began > args.limit:
                    print(f"(no time for {op} as {tier})")
                    continue
                got = measured(
                    paths[n_layer], args.streams, args.tokens, op, tier, args.spec_len, args.kernels
                )
                cells = [got.error] * len(args.streams)
                if not got.error:
                    more = {
                        n: (got.ms[n] - full.ms[n]) * (1 if op in ONCE else n_all / n_layer)
                        for n in full.ms
                    }
                    cells = [
                        f"{got.ms[n]:.2f}, {full.ms[n] / got.ms[n]:.2f}, {whole[n] / (whole[n] + more[n]):.2f}"
                        for n in args.streams
                    ]
                print(
                    f"| {op} | {got.ran or f'{tier} (not asked for)'} | " + " | ".join(cells) + " |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
