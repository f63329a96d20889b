"""An operation and the ways to run it: the first implementation that does not refuse, the torch reference last.

An implementation states its limits as data: `limits(spec)` returns a sentence for what it can not do, and looks only at the
spec (shapes, dtypes, device), so a planner can ask before anything is allocated. A chosen implementation is compared with
the reference on the op's own cases once per process; one that differs or fails is refused and the next one is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

Spec = TypeVar("Spec")
Launch = Callable[..., object]


def _no_limits(spec: object) -> str | None:
    return None


@dataclass(frozen=True)
class Impl(Generic[Spec]):
    """One way to run an op. `bind(spec)` checks, compiles and returns the callable; it may be slow, the callable may not."""

    name: str
    bind: Callable[[Spec], Launch]
    limits: Callable[[Spec], str | None] = _no_limits
    capturable: bool = False  # reads everything that varies from device memory, so a CUDA graph may hold it


@dataclass
class Op(Generic[Spec]):
    """`check(launch, reference_launch, spec)` returns a sentence when an implementation differs from the reference."""

    name: str
    reference: Impl[Spec]
    impls: Sequence[Impl[Spec]] = ()
    check: Callable[[Launch, Launch, Spec], str | None] | None = None
    verdicts: dict[tuple[str, object], str | None] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)

    def refusal(self, impl: Impl[Spec], spec: Spec) -> str | None:
        """Why `impl` can not run `spec`; None if it can."""
        if (why := impl.limits(spec)) is not None:
            return why
        key = (impl.name, spec)
        if key not in self.verdicts:
            self.verdicts[key] = self._verdict(impl, spec)
        return self.verdicts[key]

    def _verdict(self, impl: Impl[Spec], spec: Spec) -> str | None:
        if self.check is None:
            return None
        try:
            return self.check(impl.bind(spec), self.reference.bind(spec), spec)
        except Exception as e:  # noqa: BLE001 - whatever a foreign compiler raises means "do not use it"
            return f"failed its self-check: {type(e).__name__}: {e}"

    def chosen(self, spec: Spec) -> Impl[Spec]:
        """The implementation `spec` runs with. Falling back is logged once per reason."""
        refused = []
        for impl in self.impls:
            if (why := self.refusal(impl, spec)) is None:
                return impl
            refused.append(f"{impl.name}: {why}")
        text = f"{self.name} runs as {self.reference.name} ({'; '.join(refused)})"
        if refused and text not in self.told:
            self.told.add(text)
            log.info("%s", text)
        return self.reference

    def bind(self, spec: Spec) -> Launch:
        """Choose now; the returned callable only runs."""
        return self.chosen(spec).bind(spec)

    def choices(self, spec: Spec) -> Iterable[tuple[str, str | None]]:
        """(implementation, refusal or None) in order of preference, for `pyspec doctor`."""
        for impl in self.impls:
            yield impl.name, self.refusal(impl, spec)
        yield self.reference.name, None
