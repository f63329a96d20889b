"""Drafters of other packages: found by their entry point, run like ours, and no trouble where they are not asked for."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from engine_rig import DEMO, DEMO_DRAFT, FIXTURES, ROOT, plain_rig, rig
from known_texts import demo_prompts

from pyspec import draft, hub, registry
from pyspec.config import EngineSettings
from pyspec.errors import BadGGUF, ConfigError, PairError
from pyspec.gguf import ValueType, open_gguf
from pyspec.gguf.write import GGUFWriter

OWN = ROOT / "examples" / "own_drafter"


def install(folder: Path, project: str, drafters: dict[str, str]) -> None:
    """The files that `pip install` leaves for importlib.metadata."""
    info = folder / f"{project}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
    lines = [f"[{registry.GROUP}]", *(f"{name} = {module}" for name, module in drafters.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example, installed. Returns the folder that makes it so."""
    project = tomllib.loads((OWN / "pyproject.toml").read_text())["project"]
    install(tmp_path, project["name"].replace("-", "_"), project["entry-points"][registry.GROUP])
    (tmp_path / "own_drafter.py").write_bytes((OWN / "own_drafter.py").read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_drafter", raising=False)
    return tmp_path


def module(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)
    install(folder, name, {name: name})


def test_the_example_is_short() -> None:
    assert len((OWN / "own_drafter.py").read_text().splitlines()) < 60


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("n_slot", [1, 3])
def test_the_example_drafts_and_the_text_is_that_of_plain_decoding(own: Path, n_slot: int) -> None:
    known = demo_prompts()[:3] * 2  # answers of the first time are known the second time
    r = rig(DEMO, np=n_slot, spec_type="own", n_draft_fixed=True)
    assert r.info.drafter == "own" and r.info.n_draft_max == 4
    heard = [r.submit(prompt, len(answer)) for prompt, answer in known]
    r.run()
    assert [h.tokens for h in heard] == [answer for _, answer in known] != []
    one, plain = heard[0], plain_rig(DEMO).generate(known[0][0], len(known[0][1]))
    assert one.tokens == plain.tokens and one.timings.draft_n > plain.timings.draft_n == 0
    assert sum(h.timings.draft_n_accepted for h in heard) > 10


@pytest.mark.slow
def test_the_command_line_takes_an_installed_drafters_name(own: Path) -> None:
    texts = {}
    for kind in ("own", "none"):
        command = [
            sys.executable,
            "-m",
            "pyspec",
            "run",
            "demo",
            "--chat",
            "Count from 1 to 10.",
            "--temp",
            "0",
            "--json",
        ]
        options = ["--spec-type", kind, "--spec-fixed", "--no-warmup", "-n", "24"]
        path = os.pathsep.join([str(own), str(ROOT)])
        done = subprocess.run(
            [*command, *options], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        texts[kind] = json.loads(done.stdout)
    assert texts["own"]["tokens"] == texts["none"]["tokens"]
    assert texts["own"]["timings"]["draft_n"] > 0 and texts["none"]["timings"]["draft_n"] == 0


def test_a_file_that_was_given_for_a_drafter_without_weights_is_refused(own: Path) -> None:
    with pytest.raises(ConfigError, match="--spec-type is own; drop one of them"):
        rig(DEMO, spec_type="own", draft_path=DEMO_DRAFT)


def test_an_unknown_name_is_refused_with_all_there_are(own: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--spec-type is 'owm'; want one of auto, none, .*, ngram, .*, own"
    ):
        EngineSettings(spec_type="owm")


def test_an_installed_drafter_recognises_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def recognises(file): return file.architecture == 'llama'\nplan = load = print\n"
    module(tmp_path, "for_llama", text)
    assert draft.recognised(open_gguf(FIXTURES / "llama.gguf")) is None
    monkeypatch.syspath_prepend(tmp_path)
    assert draft.recognised(open_gguf(FIXTURES / "llama.gguf")) == "for_llama"
    assert draft.recognised(open_gguf(FIXTURES / "qwen35.gguf")) == "mtp", "ours are asked first"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1 / 0", "importing broken gave ZeroDivisionError"),
        ("plan = print", "broken has no recognises, load"),
    ],
)
def test_a_broken_drafter_is_told_to_whoever_names_it_and_stops_nobody_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    text: str,
    why: str,
) -> None:
    module(tmp_path, "broken", text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with pytest.raises(ConfigError, match=f"drafter 'broken' can not be had: {why}"):
        rig(FIXTURES / "llama.gguf", spec_type="broken")
    with caplog.at_level(logging.WARNING, "pyspec"):
        assert rig(FIXTURES / "llama.gguf").info.drafter == "none"
    assert why in caplog.text


def test_what_a_module_loads_has_to_be_a_drafter(own: Path) -> None:
    text = READS_ITS_FILE.replace('kind="table"', 'kind="thing"')
    module(own, "thing", f"{text}\nload = lambda *given: object()\n")
    path = own_file(own / "table.gguf", 3, [1, 2])
    with pytest.raises(ConfigError, match=r"it loads no pyspec\.draft\.drafter\.Drafter"):
        rig(DEMO, spec_type="thing", draft_path=path)


READS_ITS_FILE = """
from own_drafter import Bigrams
from pyspec.draft.drafter import Drafter, DraftPlan
from pyspec.ranges import Real, Whole

def recognises(file):
    return file.architecture == "table"

def plan(file, target, settings):
    own = file.hparams
    own.integers("orders", 2, legal=Whole(1, 8))
    own.number("decay", 0.5, legal=Real(0, 1))
    return DraftPlan(kind="table", n_draft=own.integer("depth", legal=Whole(1, 4)), no_copy="it needs no head")

def load(plan, target, table, options):
    return Table(plan, Bigrams(plan.n_draft))

class Table(Drafter):
    def __init__(self, plan, known):
        self.plan, self.known = plan, known

    def begin(self, slot, saved):
        self.known.begin(slot)

    def draft(self, requests):
        return self.known.draft(requests)
"""


def own_file(path: Path, depth: object, orders: list[int], vocabulary: tuple[str, ...] = ()) -> Path:
    """A file of a drafter of another package: an architecture and keys that pyspec does not know."""
    writer = GGUFWriter(path, "table")
    if vocabulary:
        writer.add("tokenizer.ggml.tokens", list(vocabulary), ValueType.STRING)
    writer.add("table.depth", depth, ValueType.FLOAT32 if isinstance(depth, float) else ValueType.UINT32)
    writer.add("table.orders", orders, ValueType.INT32)
    writer.write(lambda tensor: [])
    return path


def test_a_drafter_of_another_package_reads_the_keys_of_its_own_file(own: Path) -> None:
    module(own, "table", READS_ITS_FILE)
    prompt, answer = demo_prompts()[0]
    r = rig(
        DEMO, spec_type="table", draft_path=own_file(own / "table.gguf", 3, [1, 2]), n_draft_fixed=True
    )
    assert (r.info.drafter, r.info.n_draft_max) == ("table", 3)
    assert r.generate(prompt, 8).tokens == answer[:8]


@pytest.mark.parametrize(
    ("depth", "orders", "flaw"),
    [
        (5, [1, 2], "table.depth is 5; want a whole number from 1 to 4"),
        (float("nan"), [1, 2], "table.depth is nan; want a whole number from 1 to 4"),
        (3, [1, 2, 2], "table.orders has 3 entries; want 2"),
        (3, [1, -2], "entry 1 of table.orders is -2; want a whole number from 1 to 8"),
    ],
)
def test_a_key_of_its_own_outside_its_range_is_refused_by_name(
    own: Path, depth: object, orders: list[int], flaw: str
) -> None:
    module(own, "table", READS_ITS_FILE)
    path = own_file(own / "table.gguf", depth, orders)
    with pytest.raises(BadGGUF, match=re.escape(flaw)):
        rig(DEMO, spec_type="table", draft_path=path)


MAPS = """
from table import Table, plan as base, recognises
from own_drafter import Bigrams
from dataclasses import replace

def plan(file, target, settings):
    return replace(base(file, target, settings), kind="mapping", maps_tokens=True)

def load(plan, target, table, options):
    return Table(plan, Mapping(plan.n_draft, target.n_vocab))

class Mapping(Bigrams):
    def __init__(self, n_draft, n_vocab):
        super().__init__(n_draft)
        self.n_own = n_vocab // 2  # it knows the even tokens, the last one first

    def own(self, token):
        return self.n_own - 1 - token // 2

    def continued(self, slot, anchor, n):
        found = super().continued(slot, anchor, n)
        known = [self.own(t) for t in found[: next((i for i, t in enumerate(found) if t % 2), len(found))]]
        return [2 * (self.n_own - 1 - t) for t in known]
"""


def test_a_drafter_with_a_vocabulary_of_its_own_maps_it(own: Path) -> None:
    """Its file has other tokens than the target, which is refused unless its plan says that it maps them."""
    module(own, "table", READS_ITS_FILE)
    module(own, "mapping", MAPS)
    path = own_file(own / "table.gguf", 3, [1, 2], vocabulary=("a", "b"))
    with pytest.raises(
        PairError, match=r"the drafter has 2 tokens, the target .*: they do not share a vocabulary"
    ):
        rig(DEMO, spec_type="table", draft_path=path)
    known = demo_prompts()[:2] * 2
    r = rig(DEMO, spec_type="mapping", draft_path=path, n_draft_fixed=True)
    heard = [r.generate(prompt, len(answer)) for prompt, answer in known]
    assert [h.tokens for h in heard] == [answer for _, answer in known]
    assert sum(h.timings.draft_n_accepted for h in heard) > 0


def test_a_name_that_is_taken_stays_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "squatter", {"mtp": "nowhere", "none": "nowhere", "free": "somewhere"})
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.added_drafters() == {"free": "somewhere"}
    assert registry.drafters()["mtp"] == registry.DRAFTERS["mtp"]


def test_files_called_after_a_drafter_are_no_models() -> None:
    names = [f"{kind}-big.gguf" for kind in registry.DRAFTERS]
    assert hub.choose([*names, "model.gguf"]) == ["model.gguf"]
