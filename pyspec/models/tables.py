"""Tables by token that parts look up in every forward."""

from __future__ import annotations

import torch
from torch import Tensor


class Tables:
    """Tables [token, n] of one shape. A part keeps its table's place here, and a forward looks all up at once, because each gather between
    kernels that begin before the one before them is over would cost five microseconds."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._all: Tensor | None = None

    def place(self, table: Tensor) -> int:
        """Where a forward's rows have those of `table`."""
        self._parts.append(table)
        return len(self._parts) - 1

    def close(self) -> None:
        """No more are coming."""
        self._all = torch.stack(self._parts) if self._parts else None
        self._parts = []

    def rows(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Of tokens [row]."""
        return () if self._all is None else self._all[:, tokens].unbind()
