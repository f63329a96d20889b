"""Experts loaded with their matrices, as calls of a program run them: beside their router, and before the product that reads them.

Which of these calls a program has is chosen when it is bound (`forward/rewrite.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyspec.cuda.ops.moe.ref import Added, ExpertsRun, MoeSpec, Route, Routes
from pyspec.cuda.ops.rows.cuda import Shares
from pyspec.cuda.ops.rows.op import rows
from pyspec.cuda.ops.rows.ref import Norm, PrepKind, RowsSpec

Choice = tuple[Route, tuple[Any, ...], dict[str, Any]]
"""A router, its arguments (rows, norm, matrix, bias, named experts) and those by name."""


class LoadedExperts:
    """Experts of rows x [row, n_in] f32, normed first if a norm is given, plus a stream and a shared expert's output.

    run      the launch, loaded
    readies  it takes rows that are prepared before the choice, and gives products that are not summed
    begins   it begins when the choice is known, beside what does not depend on it
    norms    it norms rows on the way; in plain torch, and beside products that do not, they are normed before
    of_cpu   it is the kernel of CPUs, which norms rows
    summed_by  the streams that sum the outputs of few rows; None: the launch does
    """

    def __init__(self, spec: MoeSpec, run: ExpertsRun, *, of_cpu: bool = False) -> None:
        self.run: Any = run
        self.readies = all(hasattr(run, name) for name in ("room", "prepare", "most", "shares"))
        self.begins = hasattr(run, "begin")
        of_rows = RowsSpec(spec.device, spec.n_in, PrepKind.NORM)
        on_the_way = spec.device.type == "cuda" and rows.chosen(of_rows) is not rows.reference
        self.norms = on_the_way or of_cpu
        self.summed_by: Any = None

    def __call__(
        self,
        x: Tensor,
        norm: Norm | None,
        stream: Tensor | None,
        routes: Routes,
        shared: Tensor | None,
        ready: object,
    ) -> Tensor | Shares:
        """stream + experts(norm(x)) + shared times the rows' gates. ready: rows that `prepare` gave."""
        x, norm = self._normed(x, norm)
        return self._summed(x, routes, norm, Added(stream, shared, routes.gate), ready)

    def _summed(
        self, x: Tensor, routes: Routes, norm: Norm | None, added: Added, ready: object
    ) -> Tensor | Shares:
        leaves = self.readies and self.summed_by is not None and ready is not None and added.gate is None
        if leaves and self.summed_by.sums_of(len(x)):
            shares: Shares = self.run.shares(ready, routes.ids, routes.weights, added)
            return shares
        made: Tensor = self.run(x, routes.ids, routes.weights, norm, added, ready)
        return made

    def prepare(self, x: Tensor, norm: Norm | None) -> object:
        """Rows ready to be multiplied, before their experts are chosen; None for more than go at once."""
        return self.run.prepare(*self._normed(x, norm))

    def begin(self, x: Tensor, norm: Norm | None, routes: Routes, row_seq: Tensor) -> object:
        """Begin with rows whose experts are known; the call takes it as `ready`. row_seq [row] int32: below 0 of rows that are padding."""
        own = row_seq if len(row_seq) == len(x) else None  # a row may stand once for each of its experts
        return self.run.begin(*self._normed(x, norm), routes.ids, routes.weights, own)

    def routed(
        self, x: Tensor, norm: Norm, stream: Tensor | None, choice: Choice, shared: Tensor | None
    ) -> Tensor | Shares:
        """As a call, of rows that the router prepares, as many at a time as go at once: another launch sums their squares in another
        order, and a row's bits must not depend on the number of rows."""
        route, (_, weight, matrix, bias, named), more = choice
        made, most = [], self.run.most
        for first in range(0, max(len(x), 1), most):
            own, *others = (
                None if t is None else t[first : first + most] for t in (x, named, stream, shared)
            )
            assert own is not None
            into = self.run.room(len(own))
            more = {**more, "into": into, "power": norm.power}
            routes = route(own, weight, matrix, bias, others[0], **more)
            added = Added(others[1], others[2], routes.gate)
            if len(x) <= most:
                return self._summed(own, routes, norm, added, into)
            made.append(self.run(own, routes.ids, routes.weights, norm, added, into))
        return torch.cat(made)

    def sums_for(self, product: object) -> bool:
        """Whether the launch that prepares a product's rows may sum what experts made of them."""
        return self.readies and hasattr(product, "sums_of")

    def then(
        self, x: Tensor, routes: Routes, ready: object, product: Any, stream: Tensor | None
    ) -> Tensor:
        """stream + product(experts(x)). Of few rows the launch that prepares the product's rows makes the sums."""
        if ready is not None and (sums := product.sums_of(len(x))) is not None:
            shares = self.run.shares(ready, routes.ids, routes.weights)
            return product(sums.summed(shares), residual=stream)
        return product(self(x, None, None, routes, None, ready), residual=stream)

    def _normed(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
        return (x, norm) if norm is None or self.norms else (norm(x), None)
