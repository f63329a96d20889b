"""The ops of a load are known from its description: on a CPU all but packed products, and rows for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rewrite import rewrite

import pyspec
from pyspec import synth
from pyspec.config import EngineSettings
from pyspec.cuda import survey
from pyspec.cuda.jit import GpuKind
from pyspec.cuda.op import Ask, listed_ops
from pyspec.cuda.ops.linear.ref import Epilogue
from pyspec.cuda.ops.moe import cuda as moe_cuda
from pyspec.cuda.ops.moe_route import cuda as moe_route_cuda
from pyspec.cuda.ops.rows.ref import PrepKind
from pyspec.cuda.prepare import wanted_of
from pyspec.engine.load.load import load
from pyspec.engine.plan.asks import asks_of, asks_of_file
from pyspec.engine.plan.describe import Description, describe
from pyspec.engine.plan.memory_plan import AssumedGpu
from pyspec.gguf import GGMLType

FIXTURES = Path(__file__).parent.parent / "fixtures"
DEMO = Path(pyspec.__file__).parent / "demo"
USUAL = [
    "llama",
    "qwen35_q8_0",
    "qwen35moe_mixed_q8_0",
    "nemotron_latent_q8_0",
    "gemma3",
    "gpt-oss",
    "deepseek2",
]
LATER = {"ahead", "best"}  # requested by the worker and by samplers, for every model


def settings(**more: object) -> EngineSettings:
    return EngineSettings(np=2, ctx=64, device="cpu", check_tap_shift=False, **more)  # type: ignore[arg-type]


def names(asks: list[Ask]) -> set[str]:
    return {f"{op.name}: {spec}" for op, spec in asks if op.name not in LATER}


def loaded_asks(path: Path, s: EngineSettings) -> set[str]:
    for op in listed_ops():
        op.decided.clear()
    load(path, s)
    return names(survey.asked())


@pytest.mark.parametrize("name", USUAL)
def test_a_model_asks_what_its_description_says(name: str) -> None:
    path = FIXTURES / f"{name}.gguf"
    assert loaded_asks(path, settings()) == names(asks_of(describe(path, settings())))


def test_rings_ask_for_their_places() -> None:
    path, s = FIXTURES / "gemma3.gguf", settings(batch=5)
    found = names(asks_of(describe(path, s)))
    assert loaded_asks(path, s) == found and any(ask.startswith("ring_places") for ask in found)


def test_so_do_drafters(tmp_path: Path) -> None:
    s = settings(draft_path=DEMO / "pyspec-demo-dflash.gguf")
    assert loaded_asks(DEMO / "pyspec-demo.gguf", s) == names(
        asks_of(describe(DEMO / "pyspec-demo.gguf", s))
    )
    for kind in ("dflash2", "dspark"):
        draft = synth.write("qwen35", tmp_path / f"{kind}.gguf", tiny=True, drafter=True, kind=kind)
        s, path = settings(draft_path=draft), synth.write("qwen35", tmp_path / "t.gguf", tiny=True)
        assert loaded_asks(path, s) == names(asks_of(describe(path, s)))
    path = FIXTURES / "qwen35.gguf"
    s = settings(spec_type="mtp")
    assert loaded_asks(path, s) == names(asks_of(describe(path, s)))
    for name in ("llama", "gemma3", "qwen35_q8_0"):
        s = settings(draft_path=FIXTURES / f"{name}.gguf", spec_type="draft")
        assert loaded_asks(FIXTURES / "qwen3.gguf", s) == names(
            asks_of(describe(FIXTURES / "qwen3.gguf", s))
        )


def on_gpu(name: str, **more: object) -> Description:
    s = replace(settings(**more), device="auto")
    return describe(FIXTURES / f"{name}.gguf", s, AssumedGpu(free=100 << 30))


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspec.cuda import jit

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(jit, "missing", lambda device: None)


@pytest.mark.usefixtures("an_h200")
def test_packed_products_are_asked_as_layers_will() -> None:
    d = on_gpu("qwen35_q8_0")
    products = [(op.name, spec) for op, spec in asks_of(d) if op.name in ("linear", "linear_tall")]
    widths = {t.shape[1] for t in d.file.tensors.values() if len(t.shape) == 2 and t.type.name == "Q8_0"}
    few = {
        (spec.n_in, spec.epilogue)
        for name, spec in products
        if name == "linear" and spec.type.name == "Q8_0"
    }
    assert few == {(n, e) for n in widths for e in Epilogue}
    gated = {
        spec.n_in for name, spec in products if name == "linear_tall" and spec.epilogue is Epilogue.GATED
    }
    assert gated == {d.config.n_embd}
    copies = [spec for name, spec in products if spec.type.name == "Q4_0"]
    assert bool(copies) == (d.head is not None) and all(
        spec.epilogue is not Epilogue.GATED for spec in copies
    )


@pytest.mark.usefixtures("an_h200")
def test_products_of_a_copy_of_the_head_are_asked_for_any_number_of_rows() -> None:
    """Four checks of the copy ran during the load, one after the other."""
    d = on_gpu("qwen35_q8_0", spec_type="mtp", draft_head="q4_0")
    assert d.head is not None
    copies = {
        (op.name, spec.epilogue)
        for op, spec in asks_of(d)
        if op.name.startswith("linear") and spec.type is GGMLType.Q4_0
    }
    ways = Epilogue.PLAIN, Epilogue.RESIDUAL
    assert copies == {(op, way) for op in ("linear", "linear_tall", "linear_many") for way in ways}


@pytest.mark.usefixtures("an_h200")
def test_a_gated_product_is_asked_for_where_it_has_the_activation(tmp_path: Path) -> None:
    """gemma3's gates are gelu, which the product does not have: its matrices are multiplied as they are."""
    inner = [f"blk.{i}.ffn_{x}.weight" for i in range(7) for x in ("gate", "up")]
    path = rewrite(
        FIXTURES / "gemma3.gguf", tmp_path / "m.gguf", retype=dict.fromkeys(inner, GGMLType.Q8_0)
    )
    d = describe(path, replace(settings(), device="auto"), AssumedGpu(free=100 << 30))
    asks = asks_of(d)
    tall = {
        spec.epilogue for op, spec in asks if op.name == "linear_tall" and spec.type is GGMLType.Q8_0
    }
    assert tall == {Epilogue.PLAIN, Epilogue.RESIDUAL}
    assert not any(op.name == "rows" and spec.kind is PrepKind.GLU for op, spec in asks)


@pytest.mark.usefixtures("an_h200")
def test_experts_whose_outputs_have_factors_are_kernels(tmp_path: Path) -> None:
    """The factors are the weights' of a row, so products of any type have none."""
    for quant in ("q4_k", "nvfp4"):
        path = synth.write("gemma-4-26b-a4b", tmp_path / "m.gguf", quant=quant, hollow=True)
        asks = asks_of_file(path, None)
        (experts,) = (spec for op, spec in asks if op.name == "moe")
        (route,) = (spec for op, spec in asks if op.name == "moe_route")
        assert (
            moe_cuda.limits(experts) is None and route.factored and moe_route_cuda.limits(route) is None
        )


@pytest.mark.usefixtures("an_h200")
def test_what_is_prepared_has_programs_and_a_child_that_can_find_it() -> None:
    wanted = wanted_of(asks_of(on_gpu("qwen35moe_mixed_q8_0")), GpuKind((9, 0), 132))
    assert {w.candidate.op for w in wanted} >= {"linear", "linear_tall", "linear_many", "moe", "moe_route", "attend", "embed"}  # fmt: skip
    assert all(w.programs for w in wanted if w.candidate.impl in ("cuda", "wgmma"))
    assert any(w.candidate.impl == "library" for w in wanted), (
        "checked, though nothing of it is compiled by us"
    )
