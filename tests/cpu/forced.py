"""All rigs of hostile.py with another build of the library: python tests/cpu/forced.py plain|neon|sanitized FOLDER

plain      no vectors beyond those of every CPU of this architecture
neon       arm64 with products of bytes
sanitized  under AddressSanitizer and UBSan; the caller preloads their libraries (preloads)
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

SANITIZERS = (
    "-O1",
    "-g",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-sanitize=float-cast-overflow",
)


def preloads(cxx: str) -> str:
    """LD_PRELOAD for a sanitized library in a process that is not."""
    names = ("libasan.so", "libubsan.so", "libstdc++.so.6")
    found = (
        subprocess.run([cxx, f"-print-file-name={n}"], capture_output=True, text=True, check=True)
        for n in names
    )
    return " ".join(line.stdout.strip() for line in found)


def main(way: str, folder: str) -> int:
    import torch
    from hostile import rigs

    from pyspec.cpu import build, kernels

    build.LIMIT_S = 900  # sanitized products take long
    isa, extra = (build.isas()[0], SANITIZERS) if way == "sanitized" else (way, ())
    opened = kernels._opened(str(build.build(isa, Path(folder), extra)))
    kernels.compiled = lambda: opened  # type: ignore[assignment]
    assert opened.pyspec_isa().decode() == isa
    torch.set_num_threads(2)
    faults = [f"{name}: {why}" for name, rig in rigs() if (why := rig()) is not None]
    print(f"{sum(1 for _ in rigs())} rigs, {len(faults)} faults", *faults, sep="\n")  # noqa: T201
    return len(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
