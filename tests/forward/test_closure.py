"""A model's file imports data and specs of ops, and no implementation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LISTED = "import {}, sys; print(*(name for name in sys.modules if name.startswith('pyspec.')))"
BOUND = (
    "cuda.op",
    "cuda.fuse",
    "cuda.jit",
    "cuda.streamed",
    "cpu.kernels",
    "models.weights",
    "models.decoder",
)


@pytest.mark.parametrize("arch", ["gemma3", "llama", "qwen2", "qwen3moe", "deepseek4"])
def test_a_model_is_data(arch: str) -> None:
    code = LISTED.format(f"pyspec.models.arch.{arch}")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = run.stdout.split()
    assert not {f"pyspec.{name}" for name in BOUND} & {*found}
    if arch in ("qwen3moe", "deepseek4"):  # stacks of experts unpack themselves
        return
    kernels = [name for name in found if name.startswith("pyspec.cuda.ops.") and name.count(".") == 4]
    assert {name.rsplit(".", 1)[1] for name in kernels} <= {"ref", "spec"}, kernels
    assert len(found) < 60


def test_a_model_without_experts_loads_nothing_of_theirs() -> None:
    code = (
        "import harness, sys; harness.Bench(harness.FIXTURES / '{}.gguf').feed(0, [1, 2]);"
        "print(*(name for name in sys.modules if name in {!r}))"
    )
    own = "pyspec.cuda.ops.moe.loaded", "pyspec.cuda.ops.moe.op", "pyspec.models.stacks"
    for name, wanted in (("llama", set()), ("qwen3moe", {*own})):
        run = subprocess.run(
            [sys.executable, "-c", code.format(name, own)],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "models")])},
        )
        assert {*run.stdout.split()} == wanted
