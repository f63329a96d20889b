"""A whole benchmark on a loaded engine: every number of streams, plain and speculative alternately."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspec.bench.measure import Mode, Run, Turn, measure, with_rate
from pyspec.bench.over_http import Clients, measure_http
from pyspec.bench.parts import watch_rounds
from pyspec.bench.prompts import Chat, make_prompts
from pyspec.bench.result import Report, Row, summarise_turns
from pyspec.gguf import open_gguf
from pyspec.version import __version__

if TYPE_CHECKING:
    from pyspec.engine.api import Engine
    from pyspec.request import EngineInfo


WARM_UP = 16  # tokens of each stream before its rates count
PROFILED = 512  # most tokens of a stream while kernels are profiled; it is cancelled earlier


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parameters of a benchmark."""

    streams: Sequence[int] = (1, 2, 4, 8)
    turns: int = 3
    n_prompt: int = 0  # tokens of a prompt; 0: the length of the questions
    n_predict: int = 128  # most tokens of an answer
    random_prompts: bool = False
    prompts: Sequence[str | Chat] = ()  # own ones, in place of the built-in questions
    ignore_eos: bool = False
    temperature: float = 0.0
    bandwidth: float = 0.0  # GB/s of the weights' memory; 0: unknown
    warm_up: bool = True
    case: str = ""  # its name, if several are measured
    parts: bool = False  # also split a round's device time by kernel

    @property
    def source(self) -> str:
        """The kind of prompts, for the report."""
        return "random ids" if self.random_prompts else "own" if self.prompts else "questions"


def bench(
    engine: Engine,
    plan: Plan,
    report: Callable[[str], None] = lambda line: None,
    clients: Clients | None = None,
) -> Report:
    """Measure. Turns alternate plain, speculative, plain ... so that a slow minute of the machine affects both. With `clients` of
    this engine's server, each turn is followed by the same turn through HTTP.

    Each turn has its own prompts, the same for all kinds: a ratio compares equal work, and a few streams are not judged by a single
    text.
    """
    modes: tuple[Mode, ...] = ("plain", "spec") if engine.info.drafter != "none" else ("plain",)
    count = max(plan.streams) * plan.turns
    prompts = make_prompts(engine, count, plan.n_prompt, plan.random_prompts, plan.prompts)
    runs: list[Run] = []
    for n in plan.streams:
        for mode in modes if plan.warm_up else ():
            for _ in _turns(engine, clients, plan, prompts[:n], mode, 0, WARM_UP):
                pass
        for turn in range(plan.turns):
            asked = prompts[turn * n : (turn + 1) * n]
            for mode in modes:
                for run in _turns(
                    engine,
                    clients,
                    plan,
                    asked,
                    mode,
                    turn,
                    plan.n_predict,
                    most=room(engine.info, asked),
                ):
                    runs.append(replace(run, case=plan.case))
                    case = f"{plan.case} " if plan.case else ""
                    report(f"{case}np {n} {mode} turn {turn + 1}{run.result_text}")
    rows = summarise_turns(runs, n_bytes=engine.info.n_bytes, bandwidth=plan.bandwidth)
    if plan.parts:
        rows = _with_parts(engine, plan, rows, modes, prompts, report)
    http = {"http": "loopback, clients in one process of their own"} if clients else {}
    facts = setup_of(engine, plan) | http
    return Report(about=facts, rows=rows, runs=tuple(runs))


def _with_parts(
    engine: Engine,
    plan: Plan,
    rows: Sequence[Row],
    modes: Sequence[Mode],
    prompts: Sequence[tuple[int, ...]],
    report: Callable[[str], None],
) -> tuple[Row, ...]:
    """The rows with device time by kind of kernel."""
    if not engine.info.device.startswith("cuda"):
        report("--parts: no GPU, so there is no device time")
        return tuple(rows)
    split = []
    for row in rows:
        found: dict[str, Any] = {}
        for mode in modes:
            how = Turn(
                mode=mode, turn=0, n_predict=PROFILED, ignore_eos=True, temperature=plan.temperature
            )
            found[f"{mode}_parts"] = watch_rounds(engine, prompts[: row.np], how)
            if not found[f"{mode}_parts"]:
                why = "the streams ended before enough rounds had passed"
                report(f"--parts: np {row.np} {mode}: {why}")
        split.append(replace(row, **found))
    return tuple(split)


def _turns(
    engine: Engine,
    clients: Clients | None,
    plan: Plan,
    prompts: Sequence[tuple[int, ...]],
    mode: Mode,
    turn: int,
    n_predict: int,
    most: int = 0,
) -> Iterator[Run]:
    """One turn in process and, with clients, the same one through HTTP. most: answer tokens allowed if a rate needs longer answers."""
    how = Turn(
        mode=mode,
        turn=turn,
        n_predict=n_predict,
        ignore_eos=plan.ignore_eos or plan.random_prompts,
        temperature=plan.temperature,
    )
    measured = partial(measure, engine.submit, engine.cancel, engine.metrics, prompts)
    yield with_rate(measured, how, most)
    if clients is not None:
        yield with_rate(partial(measure_http, clients, engine.metrics, prompts), how, most)


def room(info: EngineInfo, prompts: Sequence[tuple[int, ...]]) -> int:
    """Answer tokens for which all of these prompts have room concurrently."""
    each = info.n_row // len(prompts) - info.n_overhang if info.n_row else info.n_ctx
    return min(info.n_ctx, each) - max(map(len, prompts))


def routing_of(path: Path) -> str:
    """The synthetic routing of a random model's experts, as its file says it; "": it has none."""
    if not path.is_file():  # of an engine elsewhere
        return ""
    from pyspec.synth.routing import ROUTING

    with open_gguf(path) as file:
        return file.fields.title(ROUTING)


def setup_of(engine: Engine, plan: Plan) -> dict[str, object]:
    """The setup: model, machine and settings."""
    import torch

    info = engine.info
    facts: dict[str, object] = {
        "model": info.model_name,
        "arch": info.arch,
        "parameters": info.n_params,
        "bytes": info.n_bytes,
        "device": torch.cuda.get_device_name(info.device)
        if info.device.startswith("cuda")
        else info.device,
        **({"cpu activations": info.cpu_activations} if info.cpu_activations == "q8" else {}),
        "drafter": info.drafter,
        "draft": info.draft_note,
        "slots": info.n_slot,
        "ctx": info.n_ctx,
        "turns": plan.turns,
        "n_predict": plan.n_predict,
        "prompts": plan.source,
        "temperature": plan.temperature,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "pyspec": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    if info.synthetic_len:
        facts["synthetic_len"] = info.synthetic_len
    if routing := routing_of(Path(info.model_path)):
        facts["routing"] = routing
    if plan.bandwidth:
        facts["bandwidth_gbps"] = plan.bandwidth
    return facts
