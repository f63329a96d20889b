"""Compile kernels of known models into the package, so that a first start from its wheel compiles nothing.

    python tools/cubins.py [--arch sm_80,sm_86,sm_89,sm_90,sm_100,sm_120] [--models qwen3.6-27b:q8_0,...]

An archive for each architecture, in pyspec/cuda/cubins (`pyspec/cuda/shipped.py` says how they are found). Models are those of `pyspec synth`, each
with its MTP block and its DFlash drafter. `make wheel` calls this.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from pyspec.cuda import prepare, shipped
from pyspec.cuda.jit import GpuKind, Program, source
from pyspec.cuda.machine import nvrtc_version
from pyspec.cuda.prepare import Ask
from pyspec.engine.plan.asks import asks_of_file
from pyspec.errors import ConfigError
from pyspec.synth import write

ARCHS = "sm_80,sm_86,sm_89,sm_90,sm_100,sm_120"  # sm_120's run on 12.1, too
MODELS = (
    "qwen3.6-27b:q8_0,qwen3.6-27b:q4_k,qwen3.6-35b-a3b:q8_0,qwen3.6-35b-a3b:q4_k,qwen3.5-122b-a10b:q4_k,"
    "qwen3.5-9b:q8_0,qwen3.5-9b:q4_k,qwen3.5-4b:q8_0,qwen3-8b:q8_0,nemotron-3-super:q4_k"
)


def asks_of_model(name: str, quant: str, folder: Path) -> list[Ask]:
    """Of a model with its MTP block, and of the same with a DFlash drafter."""
    target = write(name, folder / f"{name}-{quant}.gguf", quant=quant, hollow=True)
    found = asks_of_file(target, None)
    try:
        drafter = write(
            name, folder / f"{name}-{quant}-draft.gguf", quant=quant, hollow=True, drafter=True
        )
    except ConfigError:
        return found
    return found + asks_of_file(target, drafter)


def build(target: GpuKind, asks: list[Ask], folder: Path) -> str:
    """The archive for one kind of GPU; a line about it."""
    began, programs = time.perf_counter(), prepare.programs_of(asks, target)
    every = max(1, len(programs) // 8)

    def tell(n: int, what: str) -> None:
        if n % every == 0:
            print(f"  {n} of {len(programs)}: {what}", flush=True)

    cubins: dict[str, bytes] = {}
    failed = []
    for program, code in prepare.compile_all(programs, tell):
        if isinstance(code, str):
            failed.append(code)
        else:
            cubins[name_of(program)] = bytes(code.code.code)
    path = shipped.write(target.arch, nvrtc_version(), cubins, folder)
    whole, packed = sum(map(len, cubins.values())), path.stat().st_size
    said = f"{target.arch}: {len(cubins)} cubins, {whole / 1e6:.1f} MB, {packed / 1e6:.1f} MB packed, {time.perf_counter() - began:.0f} s"
    return "\n".join([said, *sorted(set(failed))])


def name_of(program: Program) -> str:
    return shipped.name_of(*program, source(program.stem))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default=ARCHS)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--out", type=Path, default=shipped.FOLDER)
    how = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asks = [
            ask
            for model in how.models.split(",")
            for ask in asks_of_model(*model.split(":"), Path(folder))  # type: ignore[call-arg]
        ]
    for path in how.out.glob("*.zip"):
        path.unlink()
    for name in how.arch.split(","):
        print(build(prepare.target_named(name), asks, how.out), flush=True)


if __name__ == "__main__":
    main()
