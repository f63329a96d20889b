"""Every two values of two flags of the server, together: refused in one line, or planned, captured and warmed up with forwards that are fakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from sampling import all_pairs

from pyspec.cli import main
from pyspec.config import EngineSettings
from pyspec.device.capture import capture
from pyspec.engine.arguments import pair_of
from pyspec.engine.load.load import info_of
from pyspec.engine.load.warmup import rehearsed
from pyspec.engine.named import Named
from pyspec.engine.plan import describe, planned_bytes
from pyspec.engine.plan.describe import Description
from pyspec.engine.plan.longest import widened
from pyspec.engine.plan.memory_plan import AssumedGpu
from pyspec.errors import PyspecError
from pyspec.sample.synth import synth_of
from pyspec.slots.arena import Arena

DEMO = Path(__file__).parents[2] / "pyspec" / "demo"
ACCEPTED = 99
VALUES: dict[str, tuple[str, ...]] = {
    "-np": ("", "1", "5", "10", "33", "70"),
    "-c": ("", "0", "97", "1021"),
    "-b": ("", "1", "37", "4097"),
    "-ub": ("", "1", "35", "700"),
    "--kv-pool": ("", "4099"),
    "--kv-unified-per-slot": ("", "130"),
    "--page-size": ("", "16", "64"),
    "--spec-type": ("", "none", "draft-mtp", "draft-dflash", "ngram-simple", "suffix", "draft-mtp,suffix"),
    "--spec-draft-n-max": ("", "1", "7", "16"),
    "--spec-draft-p-min": ("", "0.35"),
    "--spec-fixed": ("", "on"),
    "--spec-ngram-simple-size-n": ("", "5"),
    "--spec-synth-len": ("", "2.7"),
    "--spec-synth-rates": ("", "0.9,0.3"),
    "--spec-draft-sampling": ("", "coupled", "probabilistic"),
    "--draft-head": ("", "full", "q4_0"),
    "--cache-prompt": ("", "off"),
    "--cache-device": ("", "3"),
    "--cache-ram": ("", "0", "-1"),
    "--cache-disk": ("", "kept"),
    "--cache-disk-size": ("", "77"),
    "--checkpoint-every": ("", "0", "61"),
    "--prompt-weight": ("", "0", "2.5"),
    "-ctk": ("", "f32", "q8_0", "bf16"),
    "-ctv": ("", "f32", "f8_e4m3"),
    "-t": ("", "-1", "3"),
    "-dev": ("", "cpu"),
    "--tp": ("", "2"),
    "--weights": ("", "packed", "dense"),
    "--warmup": ("", "off"),
    "--plain-loop": ("", "on"),
    "--exact": ("", "on"),
    "--kernels": ("", "reference", "linear=triton"),
    "-md": ("", str(DEMO / "pyspec-demo-dflash.gguf")),
    "-ngl": ("", "all", "0", "1"),
    "-ncmoe": ("", "3"),
    "-ncffn": ("", "1"),
    "-ot": ("", "exps=CPU,ffn_up=CUDA0", "attn=CPU"),
    "-otd": ("", "ffn=CPU"),
    "--moe-cache-mib": ("", "0"),
    "-fit": ("", "off"),
    "-fitt": ("", "1000"),
    "--vram": ("", "3G"),
    "--queue": ("", "1", "77"),
    "--hang-timeout": ("", "7.5"),
    "-n": ("", "-1", "33"),
    "--temp": ("", "0", "1.3"),
    "--api-prefix": ("", "/llm"),
    "--metrics": ("", "on"),
    "--slots": ("", "off"),
    "--props": ("", "on"),
    "--ui": ("", "off"),
    "--threads-http": ("", "-1", "3"),
    "--timeout": ("", "5"),
    "--in-process": ("", "on"),
    "--log-format": ("", "json"),
    "--verbosity": ("", "0", "5"),
}  # fmt: skip
"""Flags that change the load or the server. "": not given; "on", "off": a switch."""


def words(case: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for flag, value in case.items():
        if value == "on":
            found.append(flag)
        elif value == "off":
            found.append(flag.replace("--", "--no-", 1))
        elif value:
            found += [flag, value]
    return found


class Accepted(PyspecError):
    """Raised where a load would begin."""

    exit_code = ACCEPTED


@pytest.fixture
def asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[list[tuple[Path, EngineSettings]]]:
    """The parameters of loads."""
    found: list[tuple[Path, EngineSettings]] = []

    def accept(
        target: str, draft: str | None, values: dict[str, object], isolated: bool = False
    ) -> None:
        found.append(pair_of(Named(target), draft, values))
        raise Accepted("accepted")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pyspec.engine.api.Engine.open", accept)
    monkeypatch.setattr("pyspec.server.http.listen.listen", lambda settings: [])
    monkeypatch.setattr("pyspec.server.http.serve.run", lambda load, *rest: load())
    monkeypatch.setattr("pyspec.engine.process.ahead.start_ahead", lambda: None)
    yield found


class Lays:
    """In place of a worker's graphs."""

    by_single = False

    def __call__(self, batch: Any) -> None:
        assert batch.n_row > 0

    def seal(self) -> None:
        pass


def start(d: Description) -> None:
    """All that a load computes from its settings before and after weights are there."""
    plan = planned_bytes.plan_memory(d)
    assert plan.total > 0 and d.kv.name
    table = d.table()
    assert table.n_row >= d.n_overhang + 2
    rehearsed(d.settings.np, d.draft.longest)
    synth_of(d.settings, d.draft.longest)
    info_of(d, plan)
    worker = SimpleNamespace(
        table=table,
        plan=d.draft,
        n_draft=d.draft.longest,
        device=torch.device("cpu"),
        arena=Arena(d.settings.np, describe.arena_pages(d), torch.device("cpu"), d.width),
        forward=Lays(),
        drafter=None,
        target=SimpleNamespace(most_captured_prompt=0),
        memory=SimpleNamespace(reset=lambda slot: None),
    )
    capture(worker, d.batch, 0, d.settings.ubatch)  # type: ignore[arg-type]
    table.check()


def test_every_two_values_of_two_flags_meet() -> None:
    cases = all_pairs(VALUES)
    assert 30 <= len(cases) <= 90
    for a, b in (("-np", "--spec-type"), ("-c", "-b"), ("--tp", "--exact")):
        met = {(case[a], case[b]) for case in cases}
        assert met == {(x, y) for x in VALUES[a] for y in VALUES[b]}


def test_all_pairs_of_flags_start_or_are_refused_in_one_line(
    asked: list[tuple[Path, EngineSettings]],
) -> None:
    n_refused, cases = 0, all_pairs(VALUES)
    for case in cases:
        given = words(case)
        result = CliRunner().invoke(main, ["server", "demo", *given])
        error = result.stderr.rstrip("\n").rpartition("Error: ")[2]
        assert result.exception is None or isinstance(result.exception, SystemExit), (
            given,
            result.exception,
        )
        if result.exit_code == ACCEPTED:
            continue
        assert result.exit_code == 2 and error and "\n" not in error, (
            given,
            result.exit_code,
            result.stderr,
        )
        n_refused += 1
    assert len(asked) == len(cases) - n_refused >= len(cases) // 4, (
        "most of them say nothing against each other"
    )
    n_planned = 0
    for path, settings in asked:
        for gpu in (None, AssumedGpu(80 << 30)):
            try:
                d = widened(describe.describe(path, settings, gpu))
            except PyspecError as e:  # that they do not go together is found in the files
                assert "\n" not in str(e), (settings, e)
                continue
            start(d)
            n_planned += 1
    assert n_planned >= len(asked) * 3 // 4, (
        "of twice as many: suffixes refuse a draft file, fixed rates another length"
    )
