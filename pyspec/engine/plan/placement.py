"""What goes to host memory, feed-forwards and tables: llama.cpp's flags and the fit, as functions of names and sizes. Nothing is read or allocated."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pyspec.config import EngineSettings
from pyspec.cuda.ops.moe.host import PRODUCTS
from pyspec.engine.plan.memory_plan import PIECE_BYTES
from pyspec.errors import ConfigError
from pyspec.gguf import TensorInfo
from pyspec.models.placement import HITS, Placement
from pyspec.models.wants import EMBEDDING, HEAD, TABLES
from pyspec.models.weight_bytes import repacked_bytes

EXPERTS = re.compile(r"(blk\.\d+)\.ffn_(?:gate|up|down|gate_up)_exps\.weight")
DENSE = re.compile(r"(blk\.\d+)\.ffn_(?:gate|up|down|gate_up)\.weight")
BESIDE = re.compile(r"blk\.\d+\.(ffn_|exp_probs_b)")
"""Norms, routers, biases and shared experts of feed-forwards: small, or read for every token."""
N_POOL = 3  # pieces of memory for a block's slots: gates, ups and downs


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A block's feed-forward in bytes.

    prefix   blk.N
    n_expert routed experts; 0: none
    expert   one of them, as kernels read it
    experts  all of them, as in the file
    dense    its feed-forward without experts, as in the file; 0: none
    """

    prefix: str
    n_expert: int = 0
    expert: int = 0
    experts: int = 0
    dense: int = 0


def blocks_of(tensors: Mapping[str, TensorInfo], first: int, end: int) -> tuple[FeedForward, ...]:
    """Blocks `first` to `end` - 1 of a file, which may be one that is refused: its shapes are checked later."""
    found = {f"blk.{i}": [0, 0, 0, 0] for i in range(first, end)}
    for name, t in tensors.items():
        if (match := EXPERTS.fullmatch(name)) and match[1] in found and len(t.shape) == 3:
            n = t.shape[0]
            sizes = found[match[1]]
            sizes[:3] = n, sizes[1] + -(-repacked_bytes(t) // n), sizes[2] + t.n_bytes
        elif (match := DENSE.fullmatch(name)) and match[1] in found:
            found[match[1]][3] += t.n_bytes
    return tuple(FeedForward(prefix, *sizes) for prefix, sizes in found.items())


@dataclass(frozen=True, slots=True)
class PlaceFlags:
    """Flags that place the feed-forwards of a file. suffix: the end of the drafter's names."""

    n_gpu: int = -1
    n_moe: int = 0
    all_moe: bool = False
    n_ffn: int = 0
    rules: tuple[str, ...] = ()
    suffix: str = ""

    @classmethod
    def of(cls, s: EngineSettings) -> PlaceFlags:
        """Those of the target."""
        return cls(s.n_gpu_layers, s.n_cpu_moe, s.cpu_moe, s.n_cpu_ffn, tuple(s.override_tensor))

    @classmethod
    def of_drafter(cls, s: EngineSettings) -> PlaceFlags:
        """Those of the drafter."""
        rules = tuple(s.draft_override_tensor)
        return cls(s.draft_n_gpu_layers, s.draft_n_cpu_moe, s.draft_cpu_moe, 0, rules, "d")

    @property
    def given(self) -> str:
        """The flags as they were typed, "" if there are none."""
        said = {
            "-ngl": f" {self.n_gpu}" if self.n_gpu >= 0 else "",
            "-ncmoe": f" {self.n_moe}" if self.n_moe else "",
            "-ncffn": f" {self.n_ffn}" if self.n_ffn else "",
            "-ot": f" {','.join(self.rules)}" if self.rules else "",
        }
        words = [f"{name}{self.suffix}{value}" for name, value in said.items() if value]
        return " ".join([*words, *[f"-cmoe{self.suffix}"] * self.all_moe])


@dataclass(frozen=True, slots=True)
class AskedPlaces:
    """The wishes of flags: prefixes of blocks with experts, and with other feed-forwards, in host memory.

    given   the flags; "": none, so that the fit is free
    notes   lines for a user about meanings that are easily missed
    tables  name -> whether it goes to host memory, of tables that rules name: the fit is free with the others
    """

    experts: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    given: str = ""
    notes: tuple[str, ...] = ()
    tables: Mapping[str, bool] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.experts or self.dense or any(self.tables.values()))


NOTHING = AskedPlaces()


@dataclass(frozen=True, slots=True)
class _Rule:
    text: str
    pattern: re.Pattern[str]
    to_host: bool


def _rule(text: str, flag: str, device: str) -> _Rule:
    pattern, _, place = text.rpartition("=")
    place = place.strip().upper()
    if place not in ("CPU", device):
        here = f"the model runs on {device}" if device else "there is no GPU"
        raise ConfigError(
            f"{flag} {text}: {place} is not a place for weights; {here}, so want CPU or {device or 'CPU'}"
        )
    try:
        return _Rule(text, re.compile(pattern), place == "CPU")
    except re.error as e:
        raise ConfigError(f"{flag} {text}: not a regular expression: {e}") from None


def wanted(
    flags: PlaceFlags, blocks: Sequence[FeedForward], names: Iterable[str], device: str
) -> AskedPlaces:
    """The meaning of flags for a file's blocks, in llama.cpp's sense: `-ot` first, of its rules the first that matches; the others add up.

    names   of all tensors that -ot may match
    device  llama.cpp's name of the GPU: CUDA0
    Raises ConfigError for a rule that is none, and for one that would put anything but a feed-forward or a table of the target into host memory.
    """
    if not flags.given:
        return NOTHING
    notes: list[str] = []
    ruled, divided = _ruled(flags, names, device, notes)
    experts, dense = [], []
    for i, block in enumerate(blocks):
        below = 0 <= flags.n_gpu < len(blocks) - i
        if block.n_expert and ruled.get((block.prefix, True), flags.all_moe or i < flags.n_moe or below):
            experts.append(block.prefix)
        if block.dense and ruled.get((block.prefix, False), i < flags.n_ffn or below):
            dense.append(block.prefix)
    if halves := [p for p, is_experts in divided if p in (experts if is_experts else dense)]:
        notes.append(
            f"-ot{flags.suffix}: a block's matrices lie together, so all of {', '.join(halves[:3])}{' ...' * (len(halves) > 3)} are in host memory"
        )
    if 0 <= flags.n_gpu < len(blocks):
        what = f"feed-forwards of the last {flags.n_gpu} of {len(blocks)} blocks stay on the GPU, and attention of all"
        notes.append(f"-ngl{flags.suffix} {flags.n_gpu}: {what}")
    of, others = " of the drafter" * bool(flags.suffix), any(block.dense for block in blocks)
    if (n := len(blocks) + 1 if flags.all_moe else flags.n_moe) and not any(
        b.n_expert for b in blocks[:n]
    ):
        here = f"none of the first {n} blocks" if any(b.n_expert for b in blocks) else "no block"
        more = "; -ncffn N places other feed-forwards" * (others and not of)
        notes.append(f"{flags.given}: {here}{of} has experts{more}")
    if (n := flags.n_ffn) and not any(block.dense for block in blocks[:n]):
        here = f"none of the first {n} blocks" if others else "no block"
        notes.append(f"-ncffn {n}: {here} has a feed-forward without experts; -ncmoe N places experts")
    tables = {name: to_host for name in TABLES if (to_host := ruled.get((name, False))) is not None}
    return AskedPlaces(tuple(experts), tuple(dense), flags.given, tuple(notes), tables)


def _ruled(
    flags: PlaceFlags, names: Iterable[str], device: str, notes: list[str]
) -> tuple[dict[tuple[str, bool], bool], list[tuple[str, bool]]]:
    """(prefix, of its experts), or (table, False) -> whether -ot puts it into host memory; nothing for what no rule names. A block's matrices lie
    together: one of them there takes the others along. And those of which rules say several things."""
    flag = f"-ot{flags.suffix}"
    rules = [_rule(text, flag, device) for text in flags.rules]
    found: dict[tuple[str, bool], set[bool | None]] = {}
    used, stays = set[_Rule](), ""
    for name in names if rules else ():
        rule = next((rule for rule in rules if rule.pattern.search(name)), None)
        used |= set() if rule is None else {rule}
        if match := EXPERTS.fullmatch(name) or DENSE.fullmatch(name):
            key = match[1], match.re is EXPERTS
            found.setdefault(key, set()).add(None if rule is None else rule.to_host)
        elif name in TABLES and not flags.suffix:
            found[name, False] = {None if rule is None else rule.to_host}
        elif rule is not None and rule.to_host:
            if not BESIDE.match(name):
                raise ConfigError(
                    f"{flag} {rule.text} matches {name}, which every token reads, so it stays on the GPU: only experts (ffn_..._exps), "
                    f"feed-forwards (ffn_gate, ffn_up, ffn_down) and the target's tables of rows ({', '.join(TABLES)}) can be in host memory"
                )
            stays = stays or f"{flag} {rule.text}: {name} and its like stay on the GPU"
    notes += [stays] * bool(stays)
    notes += [f"{flag} {rule.text} matches no tensor" for rule in rules if rule not in used]
    ruled = {
        key: True in places for key, places in found.items() if True in places or None not in places
    }
    return ruled, [key for key, places in found.items() if len(places) > 1]


# -- by sizes ----------------------------------------------------------------------------------------------------------


def within(blocks: Sequence[FeedForward], room: int) -> tuple[FeedForward, ...]:
    """The first blocks, as many as have their experts in `room` bytes of the host; those behind stay on the card without a copy."""
    n, taken = 0, 0
    for block in blocks:
        taken += block.experts
        n += taken <= room
    return tuple(blocks[:n])


def even(blocks: Sequence[FeedForward], room: int) -> tuple[int, ...]:
    """Slots of each block's experts in `room` bytes of the card: as many in all of them, and of the rest one more in the first."""
    each = sum(block.expert for block in blocks)
    room -= N_POOL * PIECE_BYTES * len(blocks)  # which they share, and the allocator rounds up
    if not each or room < each:
        return (0,) * len(blocks)
    n, found = room // each, list[int]()
    room -= n * each
    for block in blocks:
        more = block.expert <= room and n < block.n_expert
        room -= block.expert * more
        found.append(min(n + more, block.n_expert))
    return tuple(found)


def placement(
    blocks: Sequence[FeedForward],
    slots: Sequence[int],
    dense: Collection[str] = (),
    tables: tuple[str, ...] = (),
) -> Placement:
    """Of blocks whose experts are in host memory, of prefixes whose other feed-forwards are, and of tables there."""
    experts = tuple((block.prefix, n) for block, n in zip(blocks, slots, strict=True))
    return Placement(experts, frozenset(dense), tables)


def in_host(place: Placement, tensors: Collection[str]) -> frozenset[str]:
    """Names of the tensors that are not on the card, or there by slots alone; a file has some of them. tensors: of the file, where the embedding may be
    the head, too, which stays."""
    parts = ("gate", "up", "down", "gate_up")
    experts = {f"{prefix}.ffn_{x}_exps.weight" for prefix, _ in place.experts for x in parts}
    dense = {f"{prefix}.ffn_{x}.weight" for prefix in place.dense for x in parts}
    return frozenset(experts | dense | {t for t in place.tables if t != EMBEDDING or HEAD in tensors})


# -- the rate to expect ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rates:
    """Memory of a machine in bytes per second: the card's, and the host's as experts are read. said: where they come from."""

    card: float
    host: float
    said: str


CARDS = (
    (9, "RTX 4060", 272e9),
    (14, "RTX 3060", 360e9),
    (20, "RTX 5060 Ti", 448e9),
    (28, "RTX 3090", 936e9),
    (1 << 20, "RTX 5090", 1792e9),
)
"""A usual card of up to so many GiB, and its memory's rate by its data sheet."""
DDR4 = 42e9  # bytes per second that two channels of DDR4-3200 give to readers
CARD_SHARE = 0.85  # of the data sheet's rate that kernels reach


def assumed_rates(vram: int) -> Rates:
    """Of a home machine with a card of this size."""
    name, card = next((name, rate) for gib, name, rate in CARDS if vram <= gib << 30)
    said = f"assumed: {name} with {card / 1e9:,.0f} GB/s, DDR4 with {DDR4 / 1e9:.0f} GB/s"
    return Rates(CARD_SHARE * card, DDR4, said)


def bounds(
    trunk: int, active: int, share: float, rates: Rates, dense: int = 0, products: float = 0.0
) -> dict[str, float]:
    """Most tokens per second of one stream without drafts, by kind of routing: a forecast from the rates of memory alone.

    trunk   bytes of weights that every token reads on the card
    active  bytes of the experts that a token chooses
    share   of the experts that have a place on the card
    dense   bytes of other weights that the host multiplies with
    products  of those weights
    """
    found = {}
    for routing, e in HITS.items():
        misses = active * (1 - share) ** e
        # hits beyond balance are left to the CPU
        seconds = max(active / (rates.card + rates.host), misses / rates.host)
        of_dense = max(dense / rates.host, products / PRODUCTS)
        found[routing] = 1 / (trunk / rates.card + seconds + of_dense)
    return found
