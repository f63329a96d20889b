"""Which model loads, leaves and runs next: a table of models, changed by one event at a time. No threads, no I/O, no clock of its own.

Every method is one event. It gets the time and returns the actions that follow, in order; their ends come back as events.

* Nothing that runs leaves: a model with claims is drained at most, and its requests end by themselves (but by a call to unload it).
* A model loads if the bytes of its plan fit beside all others, in each place. If not, idle models leave in the order of `rank`, and none
  that is not needed for it. What can never fit is refused with its plan.
* Where a plan says what a parked model keeps, and the host has room for that, a model that leaves is parked: it wakes sooner than it loads.
  Parked models are the first to leave, and make room for one that was used later. Until a park or a wake is over, the model counts with the
  larger of both needs in each place.
* Models wait in the order of their oldest requests. One passes those before it if it fits beside all that is there now, and none of them
  would have to wait for it. Requests of loaded models pass, too, until a model has waited PATIENCE_S: then busy ones are drained for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import inf, log2
from typing import Literal

from pyspec.errors import DoesNotFit, PyspecError, QueueFull, Unavailable

Bytes = Mapping[str, int]
"""Memory by place: "host", "cuda:0" and so on."""
State = Literal["unloaded", "loading", "loaded", "draining", "stopping", "parking", "parked", "waking"]

PATIENCE_S = 30.0  # then busy models are drained for the one that waits
SOON_S = 8.0  # models that load within that are equally cheap: their times depend on other work
YOUNG_S = 2.0  # a model without a request stays that long after its load
BACKOFF_S = (1.0, 5.0, 30.0, 60.0)  # in which a model that failed to load fails its requests at once
MOST_BEFORE = 6  # models, busy or waiting, that one can pass: it counts what follows if any of them end
MOST_PARKED = 4  # beside those that wake next: each keeps a process, with a context on its card
START_S, LOAD_RATE, WAKE_RATE = 4.0, 1e9, 2e10  # of a process; bytes/s, until one was measured


@dataclass(frozen=True)
class _OfModel:
    name: str


class AskNeed(_OfModel):
    """Find the bytes of a model: `planned` or `failed` comes back."""


class Start(_OfModel):
    """Load a model: `loaded` or `failed` comes back."""


class Stop(_OfModel):
    """Unload a model, or end its load: `gone` comes back. Requests that still run are ended."""


class Park(_OfModel):
    """Take a model from its card, or a CPU's slots their memory: `parked` or `died` comes back. Nothing of it runs."""


class Wake(_OfModel):
    """Undo `Park`: `loaded` or `died` comes back."""


class Changed(_OfModel):
    """A model has another state."""


@dataclass(frozen=True)
class Grant:
    """A request runs now. Its claim lasts until `end`."""

    ticket: int


@dataclass(frozen=True)
class Refuse:
    """A request ends with an error; it has no claim."""

    ticket: int
    error: PyspecError


Action = AskNeed | Start | Stop | Park | Wake | Grant | Refuse | Changed


@dataclass
class ModelRow:
    """One model.

    idle_s   seconds without a claim after which it is unloaded; below 0: never
    stop_s   seconds that its requests get when it is unloaded by a call
    need     bytes by place, None: not known yet
    rest     the same while it is parked; None: it is not parked, but unloaded
    claims   requests that run; waiting: those that wait, with their arrival
    asked    since when a load was asked for without a request
    used     end of its last claim
    has_run  a request had a claim since its load
    until    when its requests are ended; drained_for: the model that it makes room for; then_park: it is parked then
    last     what it took before it was stopped
    began    when its last load or wake began; load_s, wake_s: how long they took, 0: not known
    failed   why its last load failed; until `retry` its requests fail for that
    """

    name: str
    pinned: bool = False
    idle_s: float = -1.0
    stop_s: float = 10.0
    need: Bytes | None = None
    rest: Bytes | None = None
    state: State = "unloaded"
    claims: set[int] = field(default_factory=set)
    waiting: dict[int, float] = field(default_factory=dict)
    asked: float | None = None
    is_planning: bool = False
    loaded_at: float = 0.0
    used: float = 0.0
    has_run: bool = False
    until: float = inf
    drained_for: str = ""
    then_park: bool = False
    last: Bytes = field(default_factory=dict)
    began: float = 0.0
    load_s: float = 0.0
    wake_s: float = 0.0
    failed: PyspecError | None = None
    n_failed: int = 0
    retry: float = 0.0

    @property
    def since(self) -> float:
        """Since when the model is wanted; infinity if it is not."""
        first = next(iter(self.waiting.values()), inf)
        return first if self.asked is None else min(first, self.asked)

    @property
    def is_resident(self) -> bool:
        """It takes memory."""
        return self.state != "unloaded"

    @property
    def held(self) -> Bytes:
        """What it takes now."""
        need, rest = self.need or {}, self.rest or {}
        if self.state == "stopping":
            return self.last
        if self.state in ("parking", "waking"):
            return {place: max(need.get(place, 0), rest.get(place, 0)) for place in {**need, **rest}}
        return {} if self.state == "unloaded" else rest if self.state == "parked" else need

    @property
    def later(self) -> Bytes:
        """What it takes once it has left, if it is about to."""
        if self.state == "stopping":
            return {}
        return (self.rest or {}) if self.state == "parking" else self.held

    @property
    def on_its_way(self) -> ModelRow:
        """The same during its load, or its wake."""
        return replace(self, state="waking" if self.state == "parked" else "loading")

    @property
    def cost_s(self) -> float:
        """Seconds until it serves again, if it leaves now."""
        n = sum((self.need or {}).values())
        if self.rest is not None and self.state != "parked":
            return self.wake_s or n / WAKE_RATE
        return self.load_s or START_S + n / LOAD_RATE

    def is_evictable(self, now: float) -> bool:
        """Nothing runs, and what it was loaded for has begun."""
        if self.claims or self.pinned:
            return False
        is_young = not self.has_run and now - self.loaded_at < YOUNG_S
        return self.state == "parked" or (self.state == "loaded" and not is_young)


def rank(row: ModelRow, now: float) -> tuple[bool, bool, int, int, float]:
    """Which models leave first, the smallest first: parked ones, those that are drained already, those unused for longest (minutes, each class
    twice as long as the one before), those that serve again soonest (in SOON_S, likewise), and the one used longest ago."""
    minutes = max(0.0, now - row.used) / 60.0
    age = int(log2(1.0 + minutes))
    cost = 0 if row.state == "parked" else int(log2(1.0 + row.cost_s / SOON_S))
    return row.state != "parked", row.state != "draining", -age, cost, row.used


def size(n: float) -> str:
    """Bytes for people."""
    return f"{n / 2**30:.2f} GiB" if n >= 1 << 29 else f"{n / 2**20:.1f} MiB"


class Schedule:
    """All models.

    budget  bytes of each place for all models together
    most    number of models that are loaded at once; 0: no limit
    queue   requests that may wait; wait_s: how long
    """

    def __init__(self, budget: Bytes, *, most: int = 4, queue: int = 64, wait_s: float = 600.0) -> None:
        self.rows: dict[str, ModelRow] = {}
        self.budget, self.most, self.queue, self.wait_s = dict(budget), most, queue, wait_s
        self._of: dict[int, ModelRow] = {}  # by ticket
        self._out: list[Action] = []

    @property
    def n_waiting(self) -> int:
        """Requests that wait for a model."""
        return sum(len(row.waiting) for row in self.rows.values())

    @property
    def is_timed(self) -> bool:
        """Something may follow from time alone, soon."""
        leaving = ("draining", "stopping")
        return any(row.since < inf or row.state in leaving for row in self.rows.values())

    def used(self, *, but: Iterable[ModelRow] = ()) -> dict[str, int]:
        """Bytes of the models that are loaded or on their way, by place."""
        total = dict.fromkeys(self.budget, 0)
        for row in self.rows.values():
            if row not in but:
                for place, n in row.held.items():
                    total[place] = total.get(place, 0) + n
        return total

    # -- events ------------------------------------------------------------------------------------------------------

    def request(self, name: str, ticket: int, now: float, idle_s: float | None = None) -> list[Action]:
        """A request has come. idle_s: the model's new limit"""
        row = self.rows[name]
        if idle_s is not None:
            row.idle_s = idle_s
        if row.state == "loaded":
            self._grant(row, ticket, now)
        elif row.failed is not None and now < row.retry:
            self._out.append(Refuse(ticket, row.failed))
        elif self.n_waiting >= self.queue:
            self._out.append(Refuse(ticket, QueueFull(self.n_waiting)))
        else:
            row.waiting[ticket] = now
            self._of[ticket] = row
        return self._settled(now)

    def end(self, ticket: int, now: float) -> list[Action]:
        """A request has ended, or its client has left while it waited. Unknown ones are ignored."""
        if (row := self._of.pop(ticket, None)) is not None:
            row.waiting.pop(ticket, None)
            if ticket in row.claims:
                row.claims.remove(ticket)
                row.used = now
        return self._settled(now)

    def load(self, name: str, now: float) -> list[Action]:
        """A load without a request. It is tried at once, whatever failed before."""
        row = self.rows[name]
        if row.state not in ("loading", "loaded", "waking"):
            row.asked, row.retry = now, 0.0
        return self._settled(now)

    def unload(self, name: str, now: float) -> list[Action]:
        """A model shall leave: its requests get `stop_s`, and new ones wait for its next load. A load ends, and all that waits for it."""
        row = self.rows[name]
        row.asked = None
        if row.state not in ("loaded", "draining", "stopping"):
            self._refuse(row, Unavailable(f"{name} was unloaded before it was loaded"))
        if row.state in ("loading", "parking", "parked", "waking"):
            self._stop(row)
        elif row.state in ("loaded", "draining"):
            self._drain(row, now)
        return self._settled(now)

    def park(self, name: str, now: float) -> list[Action]:
        """A loaded model shall be parked, as soon as its requests have ended; they get `stop_s`. Without room for that it is unloaded."""
        row = self.rows[name]
        if row.state in ("loaded", "draining"):
            self._drain(row, now)
            row.then_park = True
        return self._settled(now)

    def planned(
        self, name: str, need: Bytes | None, now: float, rest: Bytes | None = None
    ) -> list[Action]:
        """The bytes of a model are known; None: they have changed meanwhile. rest: while it is parked, if it may be"""
        row = self.rows[name]
        row.need, row.rest, row.is_planning = need, rest, False
        return self._settled(now)

    def parked(self, name: str, now: float) -> list[Action]:
        """A model has left its card."""
        if self.rows[name].state == "parking":
            self._to(self.rows[name], "parked")
        return self._settled(now)

    def loaded(self, name: str, now: float) -> list[Action]:
        """A load, or a wake, is over: all that waited for the model runs."""
        row = self.rows[name]
        if row.state in ("loading", "waking"):
            took = max(now - row.began, 1e-3)
            row.load_s, row.wake_s = (took, row.wake_s) if row.state == "loading" else (row.load_s, took)
            row.loaded_at = row.used = now
            row.has_run, row.asked, row.failed, row.n_failed = False, None, None, 0
            self._to(row, "loaded")
            self._grant_all(row, now)
        return self._settled(now)

    def failed(self, name: str, error: PyspecError, now: float) -> list[Action]:
        """A plan or a load has failed: so does all that waits for it."""
        row = self.rows[name]
        row.is_planning = False
        if row.state in ("loading", "unloaded"):
            self._fail(row, error, now)
        return self._settled(now)

    def died(self, name: str, error: PyspecError, now: float) -> list[Action]:
        """A model that was loaded serves no more. What waits for it, or for its wake, waits for its next load."""
        row = self.rows[name]
        if row.state in ("loaded", "draining", "parking", "parked", "waking"):
            row.failed = error
            self._stop(row)
        return self._settled(now)

    def gone(self, name: str, now: float) -> list[Action]:
        """A model has left, and its memory is free."""
        self._to(self.rows[name], "unloaded")
        return self._settled(now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        return self._settled(now)

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _settled(self, now: float) -> list[Action]:
        for row in self.rows.values():
            self._drop_late(row, now)
            if row.state == "draining" and row.drained_for and not self._is_wanted(row.drained_for):
                row.asked = None
                self._to(row, "loaded")
                self._grant_all(row, now)
            is_idle = row.state == "loaded" and not row.claims and not row.pinned
            if is_idle and 0 <= row.idle_s <= now - row.used and row.is_evictable(now):
                self._leave(row)
            if row.state == "draining" and not row.claims and (row.drained_for or row.then_park):
                self._leave(row, self.rows.get(row.drained_for))
            elif row.state == "draining" and (not row.claims or now >= row.until):
                self._stop(row)
        parked = [
            row for row in self.rows.values() if row.state in ("parking", "parked") and row.since == inf
        ]
        if len(parked) > MOST_PARKED:  # one that another was parked for is not wanted any more
            self._stop(min(parked, key=lambda row: (row.pinned, row.used)))
        while any(self._admit(row, before, now) for row, before in self._queue()):
            pass
        out, self._out = self._out, []
        return out

    def _drop_late(self, row: ModelRow, now: float) -> None:
        late = [ticket for ticket, began in row.waiting.items() if now - began >= self.wait_s]
        for ticket in late:
            del row.waiting[ticket], self._of[ticket]
            is_on_its_way = row.is_planning or row.state in ("loading", "waking")
            why = "it is still on its way" if is_on_its_way else "other models are busy"
            message = f"{row.name} could not be loaded within {self.wait_s:g} s: {why}"
            self._out.append(Refuse(ticket, Unavailable(message)))

    def _is_wanted(self, name: str) -> bool:
        row = self.rows.get(name)
        return row is not None and row.state in ("unloaded", "parked") and row.since < inf

    def _queue(self) -> Iterator[tuple[ModelRow, list[ModelRow]]]:
        """The models that wait, the oldest first, each with those before it; a parked one may leave meanwhile. Models whose bytes are not known are
        planned, which for one that is downloaded takes long: they hold up nobody."""
        wanted = [row for row in self.rows.values() if self._is_wanted(row.name)]
        for row in wanted:
            if row.need is None and not row.is_planning:
                row.is_planning = True
                self._out.append(AskNeed(row.name))
        known = sorted((row for row in wanted if row.need is not None), key=lambda row: row.since)
        return ((row, known[:i]) for i, row in enumerate(known) if self._is_wanted(row.name))

    def _admit(self, head: ModelRow, before: Sequence[ModelRow], now: float) -> bool:
        """Load a model, or refuse it; False if it has to wait. Room is made for it if no model is before it."""
        if why := self.never(head):
            self._fail(head, DoesNotFit(why), now)
            return True
        victims = [] if before else self.victims(head, now)
        if victims is None:
            if now - head.since >= PATIENCE_S:
                self._drain_for(head, now)
            return False
        for row in victims:
            self._leave(row, head, victims)
        if victims or not self._has_room(head, self.rows.values()) or self._delays(head, before, now):
            return False  # until they are gone
        head.asked, head.began = None, now
        is_parked = head.state == "parked"
        self._to(head, "waking" if is_parked else "loading")
        self._out.append(Wake(head.name) if is_parked else Start(head.name))
        return True

    def _delays(self, late: ModelRow, before: Sequence[ModelRow], now: float) -> bool:
        """Whether one of those before it would wait for it: there are models whose end would make room for that one, but not beside this one."""
        staying = [row for row in self.rows.values() if row.is_resident and row.state != "stopping"]
        staying = [row for row in staying if row not in (late, *before) and not row.is_evictable(now)]
        pinned, busy = ([row for row in staying if row.pinned is which] for which in (True, False))
        if len(busy) + len(before) > MOST_BEFORE:
            return bool(before)
        return any(
            self._has_room(head, [*pinned, *left], later=True)
            and not self._has_room(head, [*pinned, *left, late.on_its_way], later=True)
            for i, head in enumerate(before)
            for n in range(len(busy) + i + 1)
            for left in combinations([*busy, *(row.on_its_way for row in before[:i])], n)
        )

    def _drain(self, row: ModelRow, now: float) -> None:
        self._to(row, "draining")
        row.until, row.drained_for, row.then_park = min(row.until, now + row.stop_s), "", False

    def _drain_for(self, head: ModelRow, now: float) -> None:
        """Let busy models end, so that one which has waited for long has its turn."""
        may_leave = ("loaded", "draining", "parked")
        victims = self._victims(head, lambda row: row.state in may_leave and not row.pinned, now)
        for row in victims or ():
            if not row.claims:
                self._leave(row, head, victims or ())
            elif row.state == "loaded":
                row.drained_for = head.name
                self._to(row, "draining")

    def _leave(
        self, row: ModelRow, head: ModelRow | None = None, leaving: Iterable[ModelRow] = ()
    ) -> None:
        """Park a model, one of those that are `leaving`, beside `head`, which loads next; or unload it if there is no room for that. Parked ones
        that were used before it make room; while they leave, nothing happens to this one."""
        older = [other for other in self.rows.values() if other.state == "parked" and not other.pinned]
        older = [other for other in older if other.used < row.used and other is not head]
        older.sort(key=lambda other: other.used)
        gone: list[ModelRow] = []
        leaving = [other for other in leaving if other.state in ("loaded", "draining")]
        while not (is_possible := self.may_park(row, head, [*leaving, *gone])) and older:
            gone.append(older.pop(0))
        if not is_possible:
            self._stop(row)
            return
        for other in gone:
            self._stop(other)
        need = row.need or {}
        grows = {place: n for place, n in (row.rest or {}).items() if n > need.get(place, 0)}
        if self._fits(grows, [self.used(but=[row])]):
            self._to(row, "parking")
            self._out.append(Park(row.name))

    def may_park(self, row: ModelRow, head: ModelRow | None, gone: Iterable[ModelRow]) -> bool:
        """Whether a model fits, parked, once all others that leave have left, `gone` among them, and `head` is there."""
        if row.rest is None or row.state not in ("loaded", "draining"):
            return False
        others = [other for other in self.rows.values() if other not in (row, head, *gone)]
        if sum(other.state in ("parking", "parked") for other in others) >= MOST_PARKED:
            return False
        beside = [other.later for other in others]
        return self._fits(row.rest, beside if head is None else [*beside, head.on_its_way.held])

    def never(self, head: ModelRow) -> str:
        """Why a model can not be loaded, whichever others leave; "" if it can."""
        pinned = [
            row for row in self.rows.values() if row.pinned and row.is_resident and row is not head
        ]
        if self.most and len(pinned) >= self.most:
            return (
                f"{head.name} has no place: --models-max is {self.most}, and so many models are pinned"
            )
        for place, n in (head.need or {}).items():
            kept = sum((row.need or {}).get(place, 0) for row in pinned)
            if n > self.budget.get(place, 0) - kept:
                beside = f", {size(kept)} of which pinned models keep" if kept else ""
                return (
                    f"{head.name} needs {size(n)} of {place}, and all models together may use "
                    f"{size(self.budget.get(place, 0))}{beside}; a smaller -c or -np, or -ctk q8_0, needs less"
                )
        return ""

    def victims(self, head: ModelRow, now: float) -> list[ModelRow] | None:
        """The models that would leave for this one now; None: those that could are busy."""
        return self._victims(head, lambda row: row.is_evictable(now), now)

    def _victims(
        self, head: ModelRow, may_leave: Callable[[ModelRow], bool], now: float
    ) -> list[ModelRow] | None:
        staying = [row for row in self.rows.values() if row.is_resident and row.state != "stopping"]
        taken: list[ModelRow] = []

        def fits(without: list[ModelRow]) -> bool:
            return self._has_room(head, [row for row in staying if row not in without], later=True)

        for row in sorted(filter(may_leave, staying), key=lambda row: rank(row, now)):
            if fits(taken):
                break
            if row is not head:
                taken.append(row)
        if not fits(taken):
            return None
        for row in sorted(taken, key=lambda row: (-row.cost_s, -sum((row.need or {}).values()))):
            if fits([other for other in taken if other is not row]):
                taken.remove(row)
        return taken

    def _has_room(self, head: ModelRow, others: Iterable[ModelRow], *, later: bool = False) -> bool:
        """Whether a model can load, or wake, beside others. later: once those have left that are about to"""
        beside = [row for row in others if row.is_resident and row is not head]
        inactive = ("parked", "parking") if later else ("parked",)
        if self.most and sum(row.state not in inactive for row in beside) >= self.most:
            return False
        return self._fits(head.on_its_way.held, [row.later if later else row.held for row in beside])

    def _fits(self, wanted: Bytes, beside: Sequence[Bytes]) -> bool:
        """Whether all models together may use that much."""
        return all(
            n + sum(one.get(place, 0) for one in beside) <= self.budget.get(place, 0)
            for place, n in wanted.items()
        )

    def _grant(self, row: ModelRow, ticket: int, now: float) -> None:
        row.claims.add(ticket)
        self._of[ticket] = row
        row.used, row.has_run = now, True
        self._out.append(Grant(ticket))

    def _grant_all(self, row: ModelRow, now: float) -> None:
        waiting, row.waiting = row.waiting, {}
        for ticket in waiting:
            self._grant(row, ticket, now)

    def _refuse(self, row: ModelRow, error: PyspecError) -> None:
        waiting, row.waiting = row.waiting, {}
        for ticket in waiting:
            del self._of[ticket]
            self._out.append(Refuse(ticket, error))

    def _fail(self, row: ModelRow, error: PyspecError, now: float) -> None:
        row.failed, row.asked = error, None
        row.retry = now + BACKOFF_S[min(row.n_failed, len(BACKOFF_S) - 1)]
        row.n_failed += 1
        self._refuse(row, error)
        if row.state != "parked":
            self._to(row, "unloaded")
        self._out.append(Changed(row.name))

    def _stop(self, row: ModelRow) -> None:
        row.last = dict(row.held)
        self._to(row, "stopping")
        self._out.append(Stop(row.name))

    def _to(self, row: ModelRow, state: State) -> None:
        if row.state != state:
            row.state = state
            if state != "draining":
                row.until, row.drained_for, row.then_park = inf, "", False
            self._out.append(Changed(row.name))
