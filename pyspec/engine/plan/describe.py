"""The plan of a load, before anything is allocated: files read and checked, every "auto" decided."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pyspec import draft
from pyspec.config import UBATCH, EngineSettings
from pyspec.cuda.collective import may_share_gpu
from pyspec.cuda.machine import CUDA_PACKAGES, has_driver
from pyspec.draft.choice import checked_draft, plan_draft
from pyspec.draft.drafter import DraftPlan, TargetFile, draft_format
from pyspec.draft.head_copy import HeadCopy, plan_head
from pyspec.engine.plan.memory_plan import AssumedGpu, DeviceRoom, pick_dense
from pyspec.engine.plan.placement import NOTHING, AskedPlaces, FeedForward, PlaceFlags, blocks_of, wanted
from pyspec.errors import ConfigError, DeviceError, ModelError, NoDevice
from pyspec.gguf import GGUFFile, TensorInfo, open_gguf
from pyspec.models import read_config
from pyspec.models.checks import check_ranks, check_read, check_tensors
from pyspec.models.cuts import surplus
from pyspec.models.model import ModelSpec
from pyspec.models.part import LoadTypes
from pyspec.models.placement import ON_CARD, Placement
from pyspec.models.rope import RopeFlags, trained_length
from pyspec.models.ropes import flags_of
from pyspec.models.weights import cuts_of
from pyspec.registry import architecture_module
from pyspec.sample.synth import synth_of
from pyspec.slots.kv import KvFormat
from pyspec.slots.parts import CacheSizes, Paged, RingPages
from pyspec.slots.recurrent import late_rows
from pyspec.slots.table import SlotTable, alloc_rows
from pyspec.text.template import ChatTemplate
from pyspec.text.tokenizer import Tokenizer
from pyspec.text.vocab import vocabulary_flaws
from pyspec.vision.pixels import pillow
from pyspec.vision.projector import Projector, read_projector

log = logging.getLogger(__name__)

LEAST_CTX = 1024  # a load with shorter requests is refused, with a suggestion that fits
START_CTX = 8192  # tokens of a request, before it is known how many fit (engine/plan/longest.py)


PARTS_OF_MODELS = {"clip": "a projector for images", "imatrix": "an importance matrix"}


@dataclass(frozen=True, kw_only=True)
class Description:
    """A model with its drafter, on a device.

    n_ctx_train tokens that the model was trained for, or that flags of rope stretch it to
    n_ctx   tokens one request may hold
    n_page  pages of the pool
    dense   the dtype matrices are unpacked to; None: they stay packed
    head    the copy of the target's head that drafts shall read, memory permitting
    assumed a GPU that is not here: nothing can be loaded, but planned
    projector  with which the model sees; None: it does not
    blocks, draft_blocks        feed-forwards of the target and of its drafter, in bytes
    wanted, draft_wanted        those that flags put into host memory
    placement, draft_placement  those that are there: the fit decides about experts (fitted.py)
    """

    path: Path
    settings: EngineSettings
    device: torch.device
    file: GGUFFile
    config: ModelSpec
    n_ctx_train: int
    tokenizer: Tokenizer
    template: ChatTemplate | None
    draft: DraftPlan
    n_ctx: int
    n_page: int
    dense: torch.dtype | None
    head: HeadCopy | None
    assumed: AssumedGpu | None = None
    blocks: tuple[FeedForward, ...] = ()
    draft_blocks: tuple[FeedForward, ...] = ()
    wanted: AskedPlaces = NOTHING
    draft_wanted: AskedPlaces = NOTHING
    placement: Placement = ON_CARD
    draft_placement: Placement = ON_CARD
    projector: Projector | None = None

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def room(self) -> DeviceRoom:
        """Memory of the device for this load."""
        return DeviceRoom.of(self.device, self.settings, self.assumed)

    @property
    def in_host(self) -> list[tuple[FeedForward, int]]:
        """Blocks whose experts are in host memory, the drafter's behind the target's, each with its slots on the card."""
        placed = (self.blocks, self.placement), (self.draft_blocks, self.draft_placement)
        return [(b, n) for blocks, at in placed for b in blocks if (n := at.slots(b.prefix)) is not None]

    @property
    def away(self) -> list[FeedForward]:
        """Blocks whose feed-forwards without experts are in host memory, the drafter's behind the target's."""
        placed = (self.blocks, self.placement), (self.draft_blocks, self.draft_placement)
        return [b for blocks, at in placed for b in blocks if b.prefix in at.dense]

    @property
    def tables_away(self) -> list[TensorInfo]:
        """Tables in host memory."""
        return [self.file.tensors[name] for name in self.placement.tables]

    @property
    def rope(self) -> RopeFlags:
        """Flags of rope."""
        return flags_of(replace(self.settings, ctx=self.n_ctx))

    @property
    def kv(self) -> KvFormat:
        return KvFormat.named(self.settings.kv_type, self.settings.kv_type_v)

    @property
    def on(self) -> LoadTypes:
        """Choices that the target's kernels depend on."""
        return LoadTypes(self.device, self.kv, self.dense, self.rope, self.settings.tp, self.placement)

    @property
    def draft_kv(self) -> KvFormat:
        return draft_format(self.settings)

    @property
    def width(self) -> int:
        """Rows of a slot's largest verify."""
        return self.draft.longest + 1

    @property
    def draft_width(self) -> int:
        """Rows of a slot in a draft's largest forward, where that is not catching up."""
        return max(self.width, self.draft.overhang, self.draft.n_waiting)

    @property
    def n_overhang(self) -> int:
        """Rows of a request beyond its tokens: of a verify, or of a drafter's writes."""
        return overhang_of(self.draft)

    @property
    def own(self) -> ModelSpec:
        """The model of each rank; with one rank the model itself."""
        return self.config.share(self.settings.tp)

    @property
    def batch(self) -> int:
        """Rows of a forward in which no slot decodes. A picture that is seen both ways is in one forward, beside a verify of all slots."""
        n_row = batch_of(self.settings, self.device)
        if self.projector is None or not self.are_whole:
            return n_row
        return max(n_row, self.projector.most_rows + self.settings.np * self.width)

    @property
    def are_whole(self) -> bool:
        """A row of a picture sees all of it in some layer, so a forward has whole pictures."""
        return self.projector is not None and self.config.sees_pictures != ""

    @property
    def encodes_on(self) -> torch.device:
        """The device of the projector."""
        return self.device if self.settings.mmproj_offload else torch.device("cpu")

    @property
    def sizes(self) -> CacheSizes:
        """Sizes of the memory of the target's layers."""
        s = self.settings
        n_row, n_late = alloc_rows(self.n_page, s.page_size), late_rows(self.device)
        sizes = CacheSizes(s.np, n_row, s.page_size, width=self.width, kv=self.kv, n_late=n_late)
        return replace(sizes, n_chunk=0 if s.swa_full else self.batch)

    @property
    def draft_sizes(self) -> CacheSizes:
        """Sizes of the memory of the drafter's layers."""
        return replace(self.sizes, kv=self.draft_kv, n_late=self.draft.n_late, n_chunk=0)

    def table(self) -> SlotTable:
        """The slots, all of them empty."""
        return SlotTable(self.settings.np, self.n_page, self.settings.page_size)


def describe(
    path: Path,
    settings: EngineSettings,
    assumed: AssumedGpu | None = None,
    *,
    is_isolated: bool = False,
    file: GGUFFile | None = None,
) -> Description:
    """Open, check, decide. Every refusal is a PyspecError with the reason.

    file         `path`, if it is open already
    is_isolated  the program's process builds the tokenizer, too, and refuses a vocabulary that can not be used
    """
    device = torch.device("cuda") if assumed is not None else pick_device(settings.device)
    if settings.tp == 0:
        settings = replace(settings, tp=n_device(device))
    if assumed is None:
        rank_devices(device, settings.tp)
        check_cards(device, settings)
    file = open_gguf(path) if file is None else file
    draft_file = open_gguf(settings.draft_path) if settings.draft_path is not None else None
    check_is_target(file, path)
    config = read_config(file)
    check_tensors(file, wants := config.tensors(file))
    check_read(file, wants, config.n_layer)
    config.share(settings.tp)
    check_ranks(file, cuts_of(wants), settings.tp)
    if settings.tp > 1 and (more := surplus(file, cuts_of(wants), settings.tp)) > 0.005:
        log.info(
            "%d ranks hold %.0f %% more of the weights that they divide: copies and zeros, where %d does not divide them",
            settings.tp,
            100 * more,
            settings.tp,
        )
    n_ctx_train = trained_length(file, config.n_ctx_train, flags_of(settings))
    settings = of_one_type(config, settings)
    n_ctx = max_context(settings, n_ctx_train)
    dense = pick_dense(file, device, settings.weights)
    is_streamed = device.type == "cuda" and dense is None
    plan = checked_draft(draft_file, TargetFile(file, config, device), settings)
    head = plan_head(file, plan, settings.draft_head, is_streamed=is_streamed)
    # rates that do not go with the drafter are refused before weights are read
    synth_of(settings, plan.longest)
    tokenizer = Tokenizer.from_metadata(file.metadata, later=is_isolated)
    template = ChatTemplate.from_metadata(file.metadata)
    words = tokenizer.model, tokenizer.pre, tokenizer.n_vocab
    for flaw in vocabulary_flaws(file.fields, *words, has_end=bool(tokenizer.eog)):
        log.warning("%s", flaw)
    settings = replace(settings, ctx=n_ctx if settings.ctx else 0)
    projector = _projector(settings, file)
    blocks = blocks_of(file.tensors, 0, config.n_layer)
    first = config.n_layer if plan.file is file else 0
    draft_blocks = () if plan.file is None else blocks_of(plan.file.tensors, first, _n_block(plan.file))
    places = _wanted(settings, device, dense, (file, blocks), (plan.file, draft_blocks))
    return Description(
        path=path,
        settings=settings,
        device=device,
        file=file,
        config=config,
        n_ctx_train=n_ctx_train,
        tokenizer=tokenizer,
        template=template,
        draft=plan,
        n_ctx=n_ctx,
        n_page=pages_of(settings, n_ctx, overhang_of(plan)),
        dense=dense,
        head=head,
        assumed=assumed,
        blocks=blocks,
        draft_blocks=draft_blocks,
        wanted=places[0],
        draft_wanted=places[1],
        projector=projector,
    )


def _projector(s: EngineSettings, file: GGUFFile) -> Projector | None:
    """The projector that the settings name, which fits the model. Raises ModelError, PairError."""
    if not s.mmproj:
        return None
    pillow()
    projector = read_projector(Path(s.mmproj), s.image_min_tokens or None, s.image_max_tokens or None)
    projector.check_pair(file)
    return projector


def _n_block(file: GGUFFile) -> int:
    """Blocks of a file by the names of its tensors."""
    found = (re.match(r"blk\.(\d+)\.", name) for name in file.tensors)
    return max((int(m[1]) + 1 for m in found if m), default=0)


def _wanted(
    s: EngineSettings,
    device: torch.device,
    dense: torch.dtype | None,
    *files: tuple[GGUFFile | None, tuple[FeedForward, ...]],
) -> tuple[AskedPlaces, ...]:
    """What flags put into host memory, of the target's file and of the drafter's. Raises ConfigError."""
    flags = PlaceFlags.of(s), PlaceFlags.of_drafter(s)
    if device.type != "cuda":
        for one in flags:
            if one.given:
                log.info("%s: no effect on a CPU, where all weights are in host memory", one.given)
        return NOTHING, NOTHING
    found, gpu = [], f"CUDA{device.index or 0}"
    for one, (file, blocks) in zip(flags, files, strict=True):
        prefixes = {block.prefix for block in blocks}
        names = [] if file is None else file.tensors
        if blocks and one.suffix and file is files[0][0]:  # -ot names the target's tensors
            names = [name for name in names if ".".join(name.split(".")[:2]) in prefixes]
        here = wanted(one, blocks, names, gpu)
        for note in here.notes:
            log.info("%s", note)
        if here and s.tp > 1:
            raise ConfigError(
                f"{here.given} with --tp {s.tp}: weights in host memory go with one GPU; leave one of both out"
            )
        if here and dense is not None:
            raise ConfigError(
                f"{here.given}: weights in host memory stay packed; leave --weights dense out"
            )
        found.append(here)
    return tuple(found)


def of_one_type(config: ModelSpec, settings: EngineSettings) -> EngineSettings:
    """The settings with one type of keys and values where a model's keys are its values: that of keys."""
    k, v = settings.kv_type, settings.kv_type_v
    kept = (part for layer in config.parts() for part in layer.values())
    if v in (None, k) or not any(isinstance(part, Paged) and part.keys_only for part in kept):
        return settings
    log.warning("keys of this model are its values: both are %s (-ctk), and -ctv %s is not used", k, v)
    return replace(settings, kv_type_v=None)


def check_is_target(file: GGUFFile, path: Path) -> None:
    """Raise ModelError with the right command if the file is a drafter, or a part of another kind, and no model."""
    kind = draft.recognised(file)
    has_trunk = any(name.startswith("blk.0.") for name in file.tensors)
    # an MTP block behind a trunk is part of a model, known or not
    is_own = kind != "mtp" and architecture_module(file.architecture) is None
    if kind and (is_own or not has_trunk):
        raise ModelError(
            f"{path.name} is a drafter ({kind}), no model that answers; type -m TARGET.gguf -md {path}"
        )
    if (what := PARTS_OF_MODELS.get(file.architecture)) is not None:
        its_use = (
            "it goes beside one: --mmproj" if file.architecture == "clip" else "it is not supported"
        )
        raise ModelError(f"{path.name} is {what}, no model that answers; {its_use}")


def resized(d: Description, np: int, n_ctx: int) -> Description:
    """The same with another number of slots, and of tokens that one request may hold."""
    settings = replace(d.settings, np=np, ctx=n_ctx)
    given = None if d.draft.file is d.file else d.draft.file
    draft = plan_draft(given, TargetFile(d.file, d.config, d.device), settings)
    draft = replace(draft, remark=d.draft.remark)  # of its check, which is made once
    n_page = pages_of(settings, n_ctx, overhang_of(draft))
    return replace(d, settings=settings, draft=draft, n_ctx=n_ctx, n_page=n_page)


def pick_device(wanted: str) -> torch.device:
    """The device that a name means, a GPU with its number; DeviceError if it fails, NoDevice if it is not there."""
    if wanted == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError) as e:
        raise (DeviceError if _is_there(wanted) else NoDevice)(
            f"device '{wanted}' can not be used: {str(e).splitlines()[0]}; {_other_devices(wanted)}"
        ) from e
    return device


def _is_there(wanted: str) -> bool:
    """Whether it names a GPU of this machine, which then has failed."""
    if not wanted.startswith("cuda") or not torch.cuda.is_available():
        return False
    return int(wanted.partition(":")[2] or 0) < torch.cuda.device_count()


def _other_devices(wanted: str) -> str:
    """Advice where a device is missing."""
    if wanted.startswith("cuda") and torch.version.cuda is None and torch.version.hip is None:
        if not has_driver():
            return (
                "there is no NVIDIA driver on this machine, and this torch was built for CPUs: -dev cpu"
            )
        return (
            "this torch was built for CPUs; install one with CUDA (pip uninstall torch, then pip install "
            f"'torch>=2.11' {CUDA_PACKAGES}), or -dev cpu"
        )
    n = torch.cuda.device_count()
    return f"here are {', '.join(['cpu', *(f'cuda:{i}' for i in range(n))])} (--list-devices)"


def n_device(first: torch.device) -> int:
    """GPUs from this one on; 1 on a CPU."""
    return max(1, torch.cuda.device_count() - (first.index or 0)) if first.type == "cuda" else 1


def rank_devices(first: torch.device, n: int) -> list[torch.device]:
    """The device of each rank; NoDevice if there are too few."""
    if first.type != "cuda":
        return [first] * n
    at, there = first.index or 0, torch.cuda.device_count()
    if n > 1 and may_share_gpu():
        return [torch.device("cuda", at + i % (there - at)) for i in range(n)]
    if n > 1 and at + n > there:
        raise NoDevice(f"--tp {n} wants {n} GPUs from {first} on; {there} are here")
    return [torch.device("cuda", at + i) for i in range(n)] if n > 1 else [first]


def rings_of(d: Description) -> list[RingPages]:
    """The target's layers whose windows stand in rings."""
    found = (part.kept(d.sizes) for layer in d.own.parts() for part in layer.values())
    return [part for part in found if isinstance(part, RingPages)]


def batch_of(s: EngineSettings, device: torch.device) -> int:
    """Rows of a forward in which no slot decodes."""
    return s.batch or max(s.ubatch or UBATCH, 2048 if device.type == "cuda" else 0)


def check_cards(first: torch.device, settings: EngineSettings) -> None:
    """NoDevice if there are too few GPUs for all replicas."""
    n, there = settings.replicas * settings.tp, torch.cuda.device_count()
    if settings.replicas > 1 and first.type == "cuda" and (first.index or 0) + n > there:
        flags = f"--replicas {settings.replicas}" + (
            f" with --tp {settings.tp}" if settings.tp > 1 else ""
        )
        raise NoDevice(f"{flags} wants {n} GPUs from {first} on; {there} are here")


def arena_pages(d: Description) -> int:
    """Pages of one sequence in a graph, at most."""
    return min(-(-(d.n_ctx + d.n_overhang) // d.settings.page_size), d.n_page)


def max_context(s: EngineSettings, n_ctx_train: int) -> int:
    """Tokens one request may hold; START_CTX unless settings have a number. As in llama-server, no more than the model was trained for;
    with another base, that is not known."""
    if not s.ctx:
        return min(START_CTX, n_ctx_train)
    if s.ctx <= n_ctx_train:
        return s.ctx
    if s.rope_freq_base:
        log.warning("-c %d is more than the model was trained for (%d)", s.ctx, n_ctx_train)
        return s.ctx
    log.warning(
        "-c %d is more than the model was trained for: -c %d is used, as in llama-server; --rope-scaling yarn --rope-scale N stretches it",
        s.ctx,
        n_ctx_train,
    )
    return n_ctx_train


def overhang_of(plan: DraftPlan) -> int:
    """Rows beyond a request's committed tokens that a round may write."""
    return max(plan.overhang, plan.longest + 1)


def pages_of(s: EngineSettings, n_ctx: int, n_overhang: int) -> int:
    """Pages of the pool: all slots' contexts, or the number in the settings."""
    per_slot = -(-(n_ctx + n_overhang) // s.page_size)
    n_page = -(-s.kv_pool // s.page_size) if s.kv_pool else per_slot * s.np
    if n_page < -(-(n_overhang + 2) // s.page_size):
        raise ConfigError(f"--kv-pool {s.kv_pool} holds not even one request of {n_overhang + 2} rows")
    return n_page
