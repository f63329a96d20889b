"""The memory through which ranks on NVIDIA GPUs sum (peers.cuh), as numbers that plans read, too."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK, BLOCKS, MOST_RANKS = 1024, 256, 8
PLACE = 12_288  # numbers of a block, so that a sum takes up to 12 MiB (600 rows of 5,120), and 24 MiB of memory a rank


@dataclass(frozen=True, slots=True)
class Places:
    """Of the memory that `n` ranks send to (peers.cuh). place: numbers of one rank's for one block, whole chunks."""

    n: int
    chunk: int = CHUNK
    blocks: int = BLOCKS
    place: int = PLACE

    @property
    def most(self) -> int:
        """Numbers of a sum."""
        return self.place * self.blocks

    @property
    def n_number(self) -> int:
        """Flags of every block and rank, for even and odd calls."""
        return self.blocks * 2 * self.n * self.place

    @property
    def n_bytes(self) -> int:
        return 4 * (self.n_number + self.blocks + 1)

    @property
    def defines(self) -> dict[str, int]:
        return {"RANKS": self.n, "CHUNK": self.chunk, "BLOCKS": self.blocks, "PLACE": self.place}
