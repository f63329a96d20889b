"""The tensors that an architecture wants of a file."""

from __future__ import annotations

from dataclasses import dataclass

from pyspec.forward.trace import TOKEN_INPUTS as TOKEN_INPUTS
from pyspec.gguf import GGMLType
from pyspec.models.cuts import Cut

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
TABLES = (TOKEN_INPUTS, EMBEDDING)  # of which a token reads a few rows; the second may be the head, too
WHOLE = (GGMLType.I8, GGMLType.I16, GGMLType.I32, GGMLType.I64)


@dataclass(frozen=True, slots=True)
class Want:
    """A tensor an architecture needs: torch shape (slowest first); several shapes if writers differ.

    cut    how ranks divide it; None: each of them has all of it
    whole  a table of whole numbers, which no weights are
    """

    shape: tuple[int, ...]
    optional: bool = False
    also: tuple[tuple[int, ...], ...] = ()
    cut: Cut | None = None
    whole: bool = False


def scale_of(name: str) -> str:
    """The tensor beside a matrix, if the file has it, whose numbers the matrix is multiplied with: one, or one for each expert."""
    return name.removesuffix(".weight") + ".scale"
