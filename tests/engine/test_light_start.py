"""Left out of a start on a CPU: modules, copies and rounds that the first token does not need."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_rig import DEMO, rig
from llguidance import LLTokenizer

from pyspec import Engine, synth
from pyspec.constrain.trie import TokenTable
from pyspec.cuda import verdicts
from pyspec.cuda.kernel_context import KernelContext, within
from pyspec.cuda.op import Impl, Op
from pyspec.engine.load import load as loading
from pyspec.engine.process import core
from pyspec.gguf import open_gguf
from pyspec.models.weights import EMBEDDING, Weights
from pyspec.synth.dims import find
from pyspec.text.tokenizer import Tokenizer

ANSWER = """
import json, sys
from pyspec import Engine
with Engine.load("demo", None, np=1, ctx=256, device="cpu") as engine:
    engine.generate("Once upon a time", max_tokens=8)
print(json.dumps(sorted(sys.modules)))
"""
HEAVY = {
    "torch._dynamo",
    "torch._inductor",
    "sympy",
    "triton",
    "jinja2",
    "pydantic",
    "starlette",
    "huggingface_hub",
}


@pytest.mark.slow
def test_an_engine_on_a_cpu_answers_without_heavy_modules() -> None:
    """The first recording had imported torch's compiler: 800 modules, a second and 70 MiB."""
    made = subprocess.run([sys.executable, "-c", ANSWER], capture_output=True, text=True, check=True)
    assert not HEAVY & set(json.loads(made.stdout.splitlines()[-1]))


def test_a_cpu_times_its_rounds_as_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits to be compiled there: eight slots of the demo were ready 0.6 s later with rounds that were tried first."""
    tried: list[object] = []
    monkeypatch.setattr(loading, "warm_up", lambda *args: tried.append(args))
    made = rig(DEMO, spec_type="mtp", np=3, warm_up=True)
    timer = made.loop.controller.costs.verify
    assert not tried and not timer.samples
    made.generate([1, 2, 3], 9)
    assert timer.samples


def test_a_cpu_prepares_for_grammars_with_the_first_one_on_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A vocabulary's tree takes 80 MiB, of which a server without grammars needs none."""
    monkeypatch.setattr(core, "REST_S", 0.01)
    built: list[str] = []
    build = TokenTable.build

    def noted(table: TokenTable, encode: Callable[[str], list[int]]) -> LLTokenizer:
        built.append(threading.current_thread().name)
        return build(table, encode)

    monkeypatch.setattr(TokenTable, "build", noted)
    with Engine.load("demo", None, np=1, ctx=256, device="cpu") as engine:
        assert len(engine.generate("Once", max_tokens=4).tokens) == 4 and not built
        for _ in range(3):
            assert engine.generate("Once", max_tokens=9, regex="[xyz]{3}").text
        assert len(built) == 1 and built[0].startswith("pyspec-grammar")


def test_a_tied_head_and_the_embedding_are_read_once(tmp_path: Path) -> None:
    dims = replace(find("qwen3", tiny=True), tied=True)
    path = synth.write(dims, tmp_path / "tied.gguf", quant="q8_0")
    with open_gguf(path) as file:
        assert "output.weight" not in file.tensors
        weights = Weights(file, torch.device("cpu"), None)
        assert weights.packed(EMBEDDING)[0].data_ptr() == weights.head().parts[0][0].data_ptr()  # type: ignore[attr-defined]


def test_an_encoder_that_is_built_later_gives_the_same_ids() -> None:
    with open_gguf(DEMO) as file:
        now = Tokenizer.from_metadata(file.metadata)
        later = Tokenizer.from_metadata(file.metadata, later=True)
    assert now._built and not later._built
    assert later.piece(70) == now.piece(70) and later.eog == now.eog and not later._built
    assert later.encode("Once upon a time") == now.encode("Once upon a time")
    assert list(later.bytes_of_first(later.n_vocab + 2)) == [
        now.token_bytes(i) for i in range(now.n_vocab + 2)
    ]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(verdicts, "folder", lambda: tmp_path)
    monkeypatch.setattr(verdicts, "CPU_SOURCES", ("cpu",))
    forget()
    return tmp_path / verdicts.PASSED


def forget() -> None:
    """As a new process."""
    verdicts._passed.cache_clear()
    verdicts._cpu_digest.cache_clear()


def op_of(checked: list[int], flaw: str | None = None) -> Op[int, int]:
    def check(launch: int, reference: int, spec: int) -> str | None:
        checked.append(spec)
        return flaw

    own = Impl[int, int]("cpu", bind=lambda spec: spec)
    return Op("made_up", Impl[int, int]("torch", bind=lambda spec: spec), [own], check=check)


def test_a_check_that_passed_is_not_repeated_by_the_next_process(kept: Path) -> None:
    checked: list[int] = []
    for spec in (1, 1, 2):
        forget()
        with within(KernelContext(keeps_checks=True)):
            assert op_of(checked).chosen(spec).name == "cpu"
    assert checked == [1, 2]
    with within(KernelContext()):  # a program's own engines check each time
        op_of(checked).chosen(1)
    assert checked == [1, 2, 1]


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"about": "other sources", "passed": ["pyspec.cuda.ops.made_up.op:made_up cpu 1"]}'],
)
def test_a_check_is_repeated_for_other_sources_and_after_a_broken_file(kept: Path, content: str) -> None:
    kept.write_text(content)
    checked: list[int] = []
    with within(KernelContext(keeps_checks=True)):
        op_of(checked).chosen(1)
    assert checked == [1]


def test_a_check_that_failed_is_repeated(kept: Path) -> None:
    checked: list[int] = []
    for _ in range(2):
        forget()
        with within(KernelContext(keeps_checks=True)):
            assert op_of(checked, flaw="it differs").chosen(1).name == "torch"
    assert checked == [1, 1] and not kept.exists()
