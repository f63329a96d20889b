"""A short name for the contents of a model file: equal weights have equal names, other weights have other names."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from pyspec.gguf.reader import open_gguf

SAMPLES, SAMPLE = 64, 4096  # samples of a file's tensors, and bytes of each sample


def fingerprint(path: Path) -> str:
    """A digest of the file's header, its size and samples of its tensors. Reading tens of gigabytes would take minutes, and weights
    that were trained further differ everywhere."""
    digest = blake2b(digest_size=16)
    with open_gguf(path) as file:
        paths = file.paths
        starts = [
            min((t.offset for t in file.tensors.values() if t.shard == i), default=0) for i in range(len(file.paths))
        ]
    for part, start in zip(paths, starts, strict=True):
        size = part.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with part.open("rb") as f:
            digest.update(f.read(start))
            for i in range(SAMPLES):
                f.seek(start + max(0, size - start - SAMPLE) * i // (SAMPLES - 1))
                digest.update(f.read(SAMPLE))
    return digest.hexdigest()
