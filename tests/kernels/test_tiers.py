"""Ops run in the tiers that `--kernels` asks for, or a message says why not."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

import pytest
import torch

from pyspec.config import EngineSettings
from pyspec.cpu.kernels import n_thread
from pyspec.cuda.kernel_context import KernelContext, current, use, within
from pyspec.cuda.op import Impl, Op, op_names, tiers_of, unmet_tiers
from pyspec.cuda.ops.gdn.op import gdn
from pyspec.cuda.ops.gdn.ref import GdnSpec
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.engine.api import Engine
from pyspec.errors import ConfigError

SPEC = GdnSpec(torch.device("cpu"), GdnShape(1, 2, 128, 4, 512), 1e-6)


def ask_for(text: str) -> None:
    """As `--kernels`, for this thread."""
    use(KernelContext(tiers_of(text)))


def fake(name: str, named: str = "") -> Op[str, object]:
    def bind(spec: str) -> object:
        return spec

    return Op(
        name,
        Impl("torch", bind),
        [Impl(tier, bind) for tier in ("cuda", "triton", "cpu")],
        named=named,
    )


@pytest.mark.parametrize(
    ("text", "linear", "attend"),
    [
        ("auto", "cuda", "cuda"),
        ("cuda", "cuda", "cuda"),
        ("triton", "triton", "triton"),
        ("reference", "torch", "torch"),
        ("linear=triton", "triton", "cuda"),
        ("linear=reference,attend=triton", "torch", "triton"),
    ],
)
def test_an_op_runs_as_it_is_asked_to(text: str, linear: str, attend: str) -> None:
    ask_for(text)
    assert fake("linear").chosen("x").name == fake("linear_tall", "linear").chosen("x").name == linear
    assert fake("attend").chosen("x").name == attend


def test_a_context_is_a_thread_s_own_or_handed_to_bind() -> None:
    """Engines of one process do not change each other's kernels, in any order of loading."""
    found: list[tuple[str, bool]] = []

    def bind_as(name: str) -> Callable[[str], None]:
        return lambda spec: found.append((name, current().is_exact))

    op = Op("linear", Impl("torch", bind_as("torch")), [Impl("cuda", bind_as("cuda"))])
    other = KernelContext(tiers=(("linear", "reference"),), is_exact=True)
    for context in (None, other, KernelContext(demoted=frozenset({__name__})), None):
        op.bind("x", context)
    assert found == [("cuda", False), ("torch", True), ("torch", False), ("cuda", False)]
    seen: list[KernelContext] = []
    with within(other):
        thread = Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
        assert current() == other
    assert seen == [KernelContext()]


def test_a_thread_keeps_its_number_of_threads_whatever_another_one_sets() -> None:
    """A thread's first question to torch takes over the number that any thread set last: an engine with -t 2 ran with one thread."""
    before, has_set, goes_on = torch.get_num_threads(), Event(), Event()
    seen: list[int] = []

    def run() -> None:
        use(KernelContext(n_thread=3))
        has_set.set()
        goes_on.wait(60)
        seen.extend((torch.get_num_threads(), n_thread()))

    thread = Thread(target=run)
    try:
        thread.start()
        has_set.wait(60)
        torch.set_num_threads(1)
        goes_on.set()
        thread.join()
        assert seen == [3, 3]
    finally:
        torch.set_num_threads(before)


def test_what_is_left_out_says_who_wanted_that(caplog: pytest.LogCaptureFixture) -> None:
    ask_for("triton")
    with caplog.at_level("INFO", "pyspec"):
        op = fake("linear")
        assert dict(op.choices("x"))["cuda"] == "--kernels wants triton"
    ask_for("cuda")
    assert dict(op.choices("x"))["triton"] == "--kernels wants cuda"
    assert op.refusal(op.impls[2], "x") is None, "what is of no tier stays but for the reference"


def test_what_only_says_that_this_is_a_cpu_is_no_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def op(*reasons: str) -> Op[str, object]:
        impls = [Impl(f"i{i}", str, lambda spec, why=why: why) for i, why in enumerate(reasons)]
        return Op("x", Impl("torch", str), impls)

    with caplog.at_level("INFO", "pyspec"):
        op("runs on NVIDIA GPUs only", "runs on GPUs only").chosen("s")
        assert caplog.records == []
        op("runs on NVIDIA GPUs only", "cuDNN is too old").chosen("s")
    assert [r.getMessage() for r in caplog.records] == [
        "x runs as torch (i0: runs on NVIDIA GPUs only; i1: cuDNN is too old)"
    ]


def test_ops_that_had_decided_decide_again() -> None:
    before = gdn.chosen(SPEC).name
    ask_for("gdn=reference")
    assert gdn.chosen(SPEC) is gdn.reference
    ask_for("auto")
    assert gdn.chosen(SPEC).name == before


@pytest.mark.parametrize(
    "text", ["fast", "linear=fast", "linear", "linear=triton,", "", "=triton", "linear = triton"]
)
def test_what_no_tier_is_called_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--kernels"):
        EngineSettings(kernels=text)


def test_an_op_that_does_not_exist_is_refused_with_the_nearest_one() -> None:
    assert EngineSettings(kernels="liner=triton").kernels == "liner=triton", (
        "which ops there are is known where they are"
    )
    with pytest.raises(ConfigError, match="no op liner; did you mean linear"):
        ask_for("liner=triton")
    assert current().tiers == ()
    assert set(dict(tiers_of(",".join(f"{name}=triton" for name in op_names())))) == set(op_names())


def test_what_was_wanted_and_is_not_to_be_had_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(spec: str) -> object:
        return spec

    missing = Impl("triton", bind, lambda spec: "triton is not installed")
    ops = [
        Op(name, Impl("torch", bind), impls)
        for name, impls in (
            ("linear", [Impl("cuda", bind), missing]),
            ("rows", [Impl("triton", bind)]),
            ("embed", []),
        )
    ]
    monkeypatch.setattr("pyspec.cuda.op.listed_ops", lambda: ops)
    gpu = torch.device("cuda", 0)
    for text, said in (
        ("triton", "linear runs as torch (triton: triton is not installed)"),
        ("linear=triton", "linear runs as torch (triton: triton is not installed)"),
        ("rows=triton", ""),
        ("reference", ""),
        ("auto", ""),
    ):
        ask_for(text)
        for op in ops:
            op.chosen("x")
        assert unmet_tiers(gpu) == said, text
        assert ("GPUs only" in unmet_tiers(torch.device("cpu"))) == (text not in ("auto", "reference"))


@pytest.mark.slow
@pytest.mark.parametrize("isolated", [False, True])
def test_texts_are_the_same_in_any_tier(isolated: bool) -> None:
    """On a CPU: compiled recurrences, and the reference's."""
    texts = []
    for kernels in ("auto", "gdn=reference", "reference", "triton"):
        with Engine.load(
            "demo", kernels=kernels, np=2, ctx=256, device="cpu", isolated=isolated
        ) as engine:
            texts.append(engine.generate("Count from 17 to 29", max_tokens=24, temperature=0.0).text)
    assert len(set(texts)) == 1 and texts[0]
