"""One context a device: launches go to it on any current device, and its memory is freed with its last holder."""

from __future__ import annotations

import ast
import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checker_fakes import planted, right
from torch import Tensor

import pyspec.cuda
from pyspec.config import EngineSettings
from pyspec.cuda import check_child, context, faults, jit, verdicts
from pyspec.cuda.context import context_of, gpu_lock, per_device
from pyspec.cuda.machine import Machine
from pyspec.engine.load import load as loading

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
ROOT = Path(pyspec.cuda.__file__).parent
# functions of pyspec.cuda with @cache: they keep names, numbers, tables of formats, sources, compiled code, and which checks passed before
KEPT = {
    "shared",
    "digest",
    "stems",
    "source",
    "machine",
    "_compiled",
    "_archive",
    "_driver_major",
    "_compilers",
    "_starter",
    "_version_in",
    "_kept",
    "steps_of",
    "_members",
    "_cpu_digest",
    "_passed",
    "bits_of",
}


class Gpus:
    """torch.cuda as far as contexts ask: which device is the thread's current one."""

    def __init__(self) -> None:
        self.own = threading.local()

    @property
    def at(self) -> int:
        return self.own.__dict__.setdefault("at", 0)

    def device(self, index: int) -> Current:
        return Current(self, index)

    def stream(self, index: int | None = None) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=100 + (self.at if index is None else index))


class Current:
    def __init__(self, gpus: Gpus, index: int) -> None:
        self.gpus, self.index, self.before = gpus, index, -1

    def __enter__(self) -> None:
        self.before, self.gpus.own.at = self.gpus.at, self.index

    def __exit__(self, *raised: object) -> None:
        self.gpus.own.at = self.before


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    fake = Gpus()
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: fake.at)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.stream)
    # of a torch with CUDA: it would ask the driver, which may not be there
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", None, raising=False)
    yield fake
    gc.collect()


@pytest.mark.sampled(most=1)
def test_a_device_has_one_context_as_long_as_somebody_holds_it(gpus: Gpus) -> None:
    held = context_of(SECOND)
    assert context_of(SECOND) is held
    assert context_of(FIRST) is not held
    assert context_of(CPU) is context_of(CPU)
    assert gpu_lock(SECOND) is held.lock
    with torch.cuda.device(1):
        assert context_of(torch.device("cuda")) is held, "without an index it is the thread's"
    lock = held.lock
    del held
    gc.collect()
    assert SECOND in context._living, "a lock holds its context: two engines share it"
    del lock
    gc.collect()
    assert SECOND not in context._living


def test_what_is_made_for_a_device_is_made_once_there_and_goes_with_its_context(gpus: Gpus) -> None:
    made: list[tuple[torch.device, int, str]] = []

    class Buffer:
        pass

    @per_device
    def buffer(device: torch.device, name: str) -> Buffer:
        made.append((device, gpus.at, name))
        return Buffer()

    held = context_of(FIRST), context_of(SECOND)
    assert buffer(SECOND, "a") is buffer(SECOND, "a") is not buffer(SECOND, "b") and gpus.at == 0
    assert buffer(FIRST, "a") is not buffer(SECOND, "a")
    assert made == [(SECOND, 1, "a"), (SECOND, 1, "b"), (FIRST, 0, "a")], (
        "made with its device as the thread's"
    )
    del held
    gc.collect()
    assert not context._living
    again = context_of(SECOND)
    buffer(SECOND, "a")
    assert len(made) == 4 and context_of(SECOND) is again


def test_who_holds_the_lock_has_the_device_and_others_have_theirs(gpus: Gpus) -> None:
    lock = gpu_lock(SECOND)
    with lock:
        assert gpus.at == 1
        with lock.released():
            assert gpus.at == 0, "what the caller's code launches goes where the caller wants it"
        assert gpus.at == 1
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(gpus.at))
        thread.start()
        thread.join()
        assert seen == [0]
    assert gpus.at == 0


def test_a_load_has_its_device_as_the_threads(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    about = SimpleNamespace(
        device=SECOND,
        template=None,
        n_ctx=1,
        dense=None,
        head=None,
        is_cuda=True,
        rope=None,
        own=SimpleNamespace(parts=list),
        settings=EngineSettings(),
        file=SimpleNamespace(end_ahead=lambda: None),
    )
    monkeypatch.setattr(loading, "describe", lambda *_, **__: about)
    monkeypatch.setattr(loading, "widened", lambda d: d)
    monkeypatch.setattr(loading, "stretch_words", lambda *_: "")
    plan = SimpleNamespace(together=lambda n: None)
    for name in ("check_host", "fit_lines", "without", "cap_memory"):
        monkeypatch.setattr(loading, name, lambda *_: [])
    monkeypatch.setattr(loading, "cache_ram", lambda _: 0)
    monkeypatch.setattr(loading, "plan_host", lambda _: None)
    for step in ("plan_memory", "check_fit", "memory_snapshot", "build"):
        monkeypatch.setattr(loading, step, lambda *_, **__: seen.append(gpus.at) or plan)
    loading._load(Path("none.gguf"), EngineSettings(), False, None)
    assert seen == [1, 1, 1, 1] and gpus.at == 0


def test_a_kernel_is_loaded_for_the_specs_device_and_launched_on_its_stream(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = pytest.importorskip("cuda.core")
    launched, set_to = [], []
    monkeypatch.setattr(
        core, "launch", lambda stream, config, kernel, *values: launched.append((stream, gpus.at))
    )

    @dataclass
    class Device:
        index: int

        def set_current(self) -> None:
            set_to.append(self.index)

        def create_stream(self, own: object) -> str:
            return f"stream {own.__cuda_stream__()[1]} of {self.index}"  # type: ignore[attr-defined]

    monkeypatch.setattr(core, "Device", Device)
    monkeypatch.setattr(core, "LaunchConfig", lambda **_: SimpleNamespace())
    code = SimpleNamespace(get_kernel=lambda symbol: SimpleNamespace(arguments_info=[]))

    @per_device
    def kernel(device: torch.device) -> jit.Kernel:
        return jit.Compiled("none", "sm_90a", code, {}).kernel("nothing", "")  # type: ignore[arg-type]

    own, other = kernel(SECOND), kernel(FIRST)
    assert set_to == [1, 0] and own.context is context_of(SECOND)
    for k in (own, other, own):
        k.launch((1,), 32, [])
    assert launched == [("stream 101 of 1", 0), ("stream 100 of 0", 0), ("stream 101 of 1", 0)]
    assert set_to == [1, 0, 1, 0], "a stream is wrapped once"


def test_devices_of_one_kind_share_verdicts_and_are_bound_apart(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "machine", lambda device: Machine("H200", "9.0", "1", "2", "3"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    @dataclass(frozen=True)
    class Spec:
        device: torch.device
        n: int = 3

    op, seen = planted(right, name="twice"), []
    impl = replace(op.impls[0], bind=lambda spec: seen.append(spec.device))
    op = replace(op, impls=[impl], verdicts={}, _decided={})
    assert verdicts.key_of(op.candidate(impl, Spec(FIRST))) == verdicts.key_of(
        op.candidate(impl, Spec(SECOND))
    )
    assert verdicts.key_of(op.candidate(impl, Spec(FIRST))) != verdicts.key_of(
        op.candidate(impl, Spec(SECOND, 4))
    )
    monkeypatch.setattr("pyspec.cuda.verdicts.refusal", lambda candidate: None)
    for device in (FIRST, SECOND):
        op.bind(Spec(device))
    assert seen == [FIRST, SECOND]


def test_a_check_has_its_device_as_the_threads(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Spec:
        device: torch.device

    at: list[int] = []
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: at.append(gpus.at))
    monkeypatch.setattr(faults, "read", lambda device: at.append(gpus.at))
    op = planted(right, name="twice")

    def check(launch: object, reference: object, spec: Spec) -> None:
        at.append(gpus.at)

    found = check_child.examine(replace(op, check=check), op.impls[0], Spec(SECOND), lambda what: None)
    assert found.refusal is None and at == [1] * 4 and gpus.at == 0


IN_TRITON = (
    "triton_kernels.py",
    "triton_tiles.py",
    "tri_guards.py",
)  # functions of a compiler that need not be here


def modules() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py") if p.name not in ("__init__.py", *IN_TRITON))


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_keeps_memory_of_a_device(path: Path) -> None:
    """Neither in a cache of its own nor in a name of the module: `per_device` is for that."""
    tree = ast.parse(path.read_text())
    cached = {
        f.name
        for f in ast.walk(tree)
        if isinstance(f, ast.FunctionDef)
        for d in f.decorator_list
        if ast.unparse(d).split("(")[0].split(".")[-1] in ("cache", "lru_cache", "cached_property")
    }
    assert cached <= KEPT
    calls = {ast.unparse(c.func).split(".")[-1] for c in ast.walk(tree) if isinstance(c, ast.Call)}
    assert not calls & {"cache", "lru_cache"} or cached, "a cache that is no decorator"
    name = ".".join(("pyspec.cuda", *path.relative_to(ROOT).with_suffix("").parts))
    held = [n for n, thing in vars(import_module(name)).items() if holds_tensors(thing)]
    assert not held


def holds_tensors(thing: object) -> bool:
    if isinstance(thing, dict):
        return any(map(holds_tensors, (*thing.keys(), *thing.values())))
    if isinstance(thing, list | tuple | set | frozenset):
        return any(map(holds_tensors, thing))
    return isinstance(thing, Tensor)


def test_a_launch_hands_over_pointers_and_numbers_of_the_signatures_types(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        jit, "_starter", lambda: lambda stream, config, handle, *args: started.append(args)
    )
    monkeypatch.setattr(jit.Kernel, "_configured", lambda *given: None)
    x, weight = torch.zeros(3), torch.nn.Parameter(torch.zeros(2))
    kernel = jit.Kernel("k", None, "ppppliuf", SimpleNamespace(stream=lambda: None))  # type: ignore[arg-type]
    kernel.launch((1,), 32, [x, weight, None, np.int64(0), 1 << 40, True, np.int32(7), 3])
    (args,) = started
    assert args == (x.data_ptr(), weight.data_ptr(), 0, 0, 1 << 40, 1, 7, 3.0)
    assert [type(a) for a in args[4:]] == [np.int64, np.int32, np.uint32, np.float32]
    with pytest.raises(AttributeError):  # a number is no pointer
        kernel.launch((1,), 32, [1, x, x, x, 1, 1, 1, 1.0])
    with pytest.raises(AssertionError, match="7 arguments for 'ppppliuf'"):
        kernel.launch((1,), 32, [x] * 7)
    assert len(started) == 1
