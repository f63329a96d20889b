"""The memory plan: the memory of a load, shown before it happens and refused if the machine has less."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from pyspec.config import EngineSettings
from pyspec.cuda.ops.peer_sum.places import Places
from pyspec.cuda.packed_cpu import runs_experts, runs_packed
from pyspec.errors import DoesNotFit
from pyspec.gguf import GGUFFile
from pyspec.gguf.read_ahead import held_bytes
from pyspec.models.wants import WHOLE
from pyspec.models.weight_bytes import weight_bytes
from pyspec.slots.arena import PROMPTS
from pyspec.slots.parts import CacheSizes, LayerParts, kept

log = logging.getLogger(__name__)

RESERVE = 0.04  # share of free memory left to other processes
CUDA_BYTES = 600 << 20  # of a process on a GPU before it allocates anything: context, libraries, kernels
PIECE_BYTES = 1 << 20  # mean loss per driver allocation: torch makes those in pieces of 2 MiB and more
GRAPH_LOSS = 1.5  # factor on a forward's memory in a graph: results lie in its midst
LIBRARY_BYTES = 860 << 20  # of NCCL's channels, on each rank
SPARE_BYTES = 4 << 30  # of the host, left to this process and others beside experts
# Architectures where prompts run from packed weights at the rate of copies
NO_COPIES: tuple[str, ...] = ()


def rank_bytes(n: int) -> int:
    """Additional workspace of each of `n` ranks on GPUs: the library's, and buffers for sums from others (ops/peer_sum)."""
    return LIBRARY_BYTES + Places(n).n_bytes + PIECE_BYTES


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose; NAMES has all purposes in display order."""

    weights: int
    kv: int  # parts that have pages
    state: int  # parts that are the slots' own (rings of windows, too), and their checkpoints
    draft_weights: int = 0
    draft_kv: int = 0
    draft_head: int = 0  # a coarse copy of the head, for drafts
    expert_cache: int = 0  # copies of experts that are in host memory
    staging: int = 0  # experts on their way from there
    projector: int = 0  # the encoder of images: weights, and activations of one image
    wide: int = 0  # f16 copies for wide batches
    activations: int = 0  # temporary memory of forwards
    workspace: int = 0  # results that graphs keep, the GPU's own
    divides_draft: bool = False  # each rank has a share of the drafter

    @property
    def total(self) -> int:
        return sum(getattr(self, purpose) for purpose in NAMES)

    @property
    def of_others(self) -> MemoryPlan:
        """The plan of any rank but the first, which has the drafter, unless ranks divide it."""
        if self.divides_draft:
            return replace(self, projector=0)
        return replace(self, draft_weights=0, draft_kv=0, draft_head=0, projector=0)

    def together(self, n: int) -> MemoryPlan:
        """The plan of all `n` ranks together."""
        other = self.of_others
        return replace(self, **{x: getattr(self, x) + (n - 1) * getattr(other, x) for x in NAMES})

    @property
    def by_purpose(self) -> tuple[tuple[str, int], ...]:
        """(purpose, bytes) of the purposes that need memory."""
        return tuple((name, n) for purpose, name in NAMES.items() if (n := getattr(self, purpose)))

    def __str__(self) -> str:
        return (
            ", ".join(f"{name} {size(n)}" for name, n in self.by_purpose)
            + f"; {size(self.total)} in all"
        )


@dataclass(frozen=True, slots=True)
class AssumedGpu:
    """An assumed GPU, for a plan on paper: its free memory, and the architecture of its kernels. ram: free memory of its host; 0: as here."""

    free: int
    arch: str = "sm_90a"
    n_sm: int = 132
    ram: int = 0


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Bytes of the host where experts, other feed-forwards or tables are in its memory.

    weights  those, as in the file
    jobs     page-locked rows, choices and results that card and host exchange
    cache    checkpoints of the prefix cache
    spare    for all else
    """

    weights: int
    jobs: int
    cache: int
    spare: int = SPARE_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.jobs + self.cache + self.spare

    def __str__(self) -> str:
        parts = (
            ("weights", self.weights),
            ("jobs", self.jobs),
            ("prefix cache", self.cache),
            ("spare", self.spare),
        )
        return ", ".join(f"{name} {size(n)}" for name, n in parts if n) + f"; {size(self.total)} in all"


_SAID = {"kv": "KV", "draft_kv": "draft KV", "wide": "f16 copies"}
NAMES = {
    f.name: _SAID.get(f.name, f.name.replace("_", " "))
    for f in fields(MemoryPlan)
    if f.name != "divides_draft"
}


def size(n: float) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on the device. Weights that were read ahead of their plan count as free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 + held_bytes()
    return 8 << 30  # an unknown system: assume a small machine rather than an endless one


def memory_bytes(layers: Sequence[LayerParts], sizes: CacheSizes) -> tuple[int, int]:
    """(KV bytes, state bytes) of `slots.memory.allocate` with these arguments, and of one checkpoint for every slot."""
    kv = state = 0
    for part in (part for layer in kept(layers, sizes) for part in layer.values()):
        if part.paged:
            kv += part.n_bytes(sizes)
        else:
            state += part.n_bytes(sizes) + sizes.n_slot * part.saved_bytes(sizes)
    return kv, state


def checkpoint_bytes(layers: Sequence[LayerParts], sizes: CacheSizes) -> int:
    """Most bytes of one checkpoint of a slot; `memory_bytes` counts one for every slot."""
    return sum(part.saved_bytes(sizes) for layer in kept(layers, sizes) for part in layer.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSizes:
    """The sizes that determine the memory of forwards.

    n_row       rows of the largest forward
    row         bytes of each while it runs (`models.kernels.ForwardNeeds`)
    graph_rows  rows of all graphs together: their logits, hidden states and taps have fixed places
    graph_most  rows of the largest of them
    prompt_rows  the same of graphs of prompts, which have logits of one row
    large_rows  rows of the largest verify or draft outside graphs: its logits are temporary
    n_column    columns of this rank's logits; of one rank all
    shared_rows most rows whose logits several ranks gather: as received, and side by side
    n_hidden    width of the hidden states that graphs keep
    n_held      rows whose taps a drafter keeps for later; they are gathered once more when it reads them
    key_bytes   keys and values of one layer and slot: a prompt's attention gathers them from their pages, as f16
    """

    n_row: int
    row: int
    n_embd: int
    n_hidden: int
    n_vocab: int
    n_column: int
    graph_rows: int
    graph_most: int
    prompt_rows: int
    large_rows: int
    shared_rows: int
    n_tap: int
    n_held: int
    key_bytes: int


def workspace_bytes(s: ForwardSizes, *, cuda: bool) -> tuple[int, int]:
    """(activations, workspace): memory of forwards besides weights and slots."""
    activations = s.n_row * (s.row + s.n_tap * s.n_embd * 4)
    activations += (s.large_rows + 2 * s.shared_rows) * 4 * s.n_vocab
    results = s.graph_rows * 4 * s.n_column + (s.graph_rows + s.prompt_rows) * 4 * (
        s.n_hidden + s.n_tap * s.n_embd
    )
    # and the temporary memory of each graph, apart from the others'
    results += int(GRAPH_LOSS * (s.graph_most + (PROMPTS[-1] if s.prompt_rows else 0)) * s.row)
    held = 2 * s.n_held * s.n_tap * s.n_embd * 4
    return activations + held + (s.key_bytes if cuda else 0), results + (CUDA_BYTES if cuda else 0)


def used_bytes(device: torch.device) -> int:
    """Memory in use on a GPU, by all processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def memory_snapshot(device: torch.device) -> tuple[int, int, int]:
    """Bytes in use on a GPU: by all processes, by this process's allocator, by its tensors."""
    return used_bytes(device), torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)


def growth(before: tuple[int, int, int], device: torch.device) -> str:
    """The memory taken since, by owner."""
    used, kept, held = (now - then for now, then in zip(memory_snapshot(device), before, strict=True))
    return f"{size(used)} (tensors {size(held)}, kept for tensors {size(kept - held)}, others {size(used - kept)})"


def pick_dense(file: GGUFFile, device: torch.device, wanted: str) -> torch.dtype | None:
    """The dtype that matrices are unpacked to, or None to keep them packed.

    Kernels multiply with packed matrices. A CPU without kernels for all of a file's, experts among them, unpacks them if they fit.
    """
    if wanted == "packed" or (
        wanted == "auto" and (device.type == "cuda" or _runs_packed(file, device))
    ):
        return None
    exact = device.type == "cpu" or all(
        t.type.name == "F32" for t in file.tensors.values() if len(t.shape) > 1
    )
    dense = torch.float32 if exact else torch.bfloat16
    if wanted == "dense" or weight_bytes(file, dense) < 0.6 * free_bytes(device):
        return dense
    return None


def _runs_packed(file: GGUFFile, device: torch.device) -> bool:
    """Whether a CPU's kernels multiply with every matrix of the file, those of experts among them."""
    big = [t for t in file.tensors.values() if len(t.shape) > 1 and t.type not in WHOLE]
    types, of_experts = (
        {t.type for t in big if (len(t.shape) == 3) is is_stack} for is_stack in (False, True)
    )
    return device.type == "cpu" and all(map(runs_packed, types)) and all(map(runs_experts, of_experts))


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """Memory of a device for this process: free bytes, of which `margin` stay free; -1: a share, RESERVE."""

    free: int
    margin: int = -1

    @classmethod
    def of(
        cls, device: torch.device, s: EngineSettings, assumed: AssumedGpu | None = None
    ) -> DeviceRoom:
        """On the device, or on the assumed one, within --vram and -fitt."""
        free = free_bytes(device) if assumed is None else assumed.free
        if device.type != "cuda":
            return cls(free)
        targets = [int(mib) << 20 for mib in s.fit_target.split(",") if mib]
        at = min(device.index or 0, len(targets) - 1)
        return cls(min(free, s.vram or free), targets[at] if targets else -1)

    @property
    def usable(self) -> int:
        """Bytes for a plan."""
        return int(self.free * (1 - RESERVE)) if self.margin < 0 else max(0, self.free - self.margin)


def cap_memory(device: torch.device, s: EngineSettings) -> None:
    """Let this process take no more of a GPU than --vram, beside what engines before this one have, or as much as there is without it; what it
    has before it allocates, and NCCL's, count."""
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        others = CUDA_BYTES + (LIBRARY_BYTES if s.tp > 1 else 0)
        most = s.vram + torch.cuda.memory_reserved(device) - others if s.vram else total
        torch.cuda.set_per_process_memory_fraction(min(max(0, most), total) / total, device)


def with_copies(
    plan: MemoryPlan, n_bytes: int, device: torch.device, wanted: str, room: DeviceRoom
) -> MemoryPlan:
    """Add f16 copies for wide batches, if a GPU has memory to spare and `packed` is not set."""
    if device.type != "cuda" or wanted != "auto" or plan.total + n_bytes > 0.85 * room.free:
        return plan
    return replace(plan, wide=n_bytes)


def with_head(plan: MemoryPlan, n_bytes: int, wanted: str, room: DeviceRoom) -> MemoryPlan:
    """Add a coarse copy of the head, if memory suffices or it was asked for."""
    more = replace(plan, draft_head=n_bytes)
    return plan if wanted == "auto" and more.total > room.usable else more


def check_fit(
    plan: MemoryPlan,
    device: torch.device,
    *,
    n_slot: int,
    n_ctx: int,
    packed: bool,
    settings: EngineSettings = EngineSettings(),  # noqa: B008 - frozen
    more: str = "",
) -> None:
    """Refuse a plan that is larger than the device, and name the flags that would make it fit. more: a flag that would, too."""
    here = DeviceRoom.of(device, settings)
    free, usable = here.free, here.usable
    log.info("memory plan: %s; %s free on %s", plan, size(free), device)
    if plan.total <= usable:
        return
    room: float = usable - plan.weights - plan.draft_weights - plan.draft_head
    room -= plan.activations + plan.workspace + plan.staging + plan.projector
    slots = plan.kv + plan.state + plan.draft_kv
    hints = []
    if room > 0:
        if (n_fit := int(n_slot * room / slots)) >= 1:
            hints.append(f"-np {n_fit}")
        kv = plan.kv + plan.draft_kv
        if kv and (c := int(n_ctx * (room - plan.state) / kv) // 256 * 256) >= 256:
            hints.append(f"-c {c}")
    if plan.draft_head and plan.total - plan.draft_head <= usable:
        hints.append("--draft-head full")
    if not packed and plan.weights > 0.5 * free:
        hints.append("--weights packed")
    if more:
        hints.append(more)
    advice = (
        f"; this would fit: {' or '.join(hints)}"
        if hints
        else "; a smaller or more quantised file is needed (`pyspec models` shows what fits here)"
    )
    raise DoesNotFit(f"needs {size(plan.total)} ({plan}), {size(free)} are free on {device}{advice}")
