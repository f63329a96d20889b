"""The plan of a load, before anything is allocated: files read and checked, every "auto" decided, bytes counted."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pyspec import draft
from pyspec.config import EngineSettings
from pyspec.cuda.collective import may_share_gpu
from pyspec.cuda.machine import CUDA_PACKAGES, has_driver
from pyspec.cuda.ops.attend import plan as attend_plan
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.draft.drafter import NO_DRAFTER, ONLY_SUFFIXES, OWN_HEAD, DraftPlan, TargetFile, refuse_file
from pyspec.engine.plan.draft_head import HeadCopy, plan_head
from pyspec.engine.plan.memory_plan import (
    PIECE_BYTES,
    AssumedGpu,
    ForwardSizes,
    MemoryPlan,
    checkpoint_bytes,
    memory_bytes,
    pick_dense,
    rank_bytes,
    size,
    with_copies,
    with_head,
    workspace_bytes,
)
from pyspec.errors import ConfigError, DeviceError, ModelError, NoDevice, PairError, PyspecError
from pyspec.gguf import GGUFFile, open_gguf
from pyspec.models import coarse, read_config
from pyspec.models.cuts import check_ranks
from pyspec.models.target import ModelConfig
from pyspec.models.wants import check_read, check_tensors
from pyspec.models.weight_bytes import n_large, repacked_bytes, shares_of, weight_bytes, wide_bytes
from pyspec.models.weights import HEAD, cuts_of
from pyspec.ranges import quoted
from pyspec.registry import FAMILIES, architecture_module, drafters
from pyspec.sample.synth import SynthAcceptance
from pyspec.slots.arena import BUCKETS, PROMPTS, bucket_of, graph_shapes, most_rows
from pyspec.slots.kv import KvFormat
from pyspec.slots.parts import CacheSizes, Recurrent
from pyspec.slots.recurrent import late_rows
from pyspec.slots.table import SlotTable
from pyspec.text.template import ChatTemplate
from pyspec.text.tokenizer import Tokenizer
from pyspec.text.vocab import stray_ids

log = logging.getLogger(__name__)

START_CTX = 8192  # tokens of a request, before it is known how many fit (engine/plan/longest.py)
MOST_STARTS = 4  # states where short prompts end, which are kept on the device


PARTS_OF_MODELS = {"clip": "a projector for images", "imatrix": "an importance matrix"}


@dataclass(frozen=True, kw_only=True)
class Description:
    """A model with its drafter, on a device.

    n_ctx   tokens one request may hold
    n_page  pages of the pool
    dense   the dtype matrices are unpacked to; None: they stay packed
    head    the copy of the target's head that drafts shall read, memory permitting
    assumed a GPU that is not here: nothing can be loaded, but planned
    """

    path: Path
    settings: EngineSettings
    device: torch.device
    file: GGUFFile
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    draft: DraftPlan
    n_ctx: int
    n_page: int
    dense: torch.dtype | None
    head: HeadCopy | None
    assumed: AssumedGpu | None = None

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def kv(self) -> KvFormat:
        return KvFormat.named(self.settings.kv_type, self.settings.kv_type_v)

    @property
    def width(self) -> int:
        """Rows of a slot's largest verify."""
        return self.draft.n_draft + 1

    @property
    def draft_width(self) -> int:
        """Rows of a slot in a draft's largest forward, where that is not catching up."""
        return max(self.width, self.draft.needs.overhang, self.draft.n_waiting)

    @property
    def n_overhang(self) -> int:
        """Rows of a request beyond its tokens: of a verify, or of a drafter's writes."""
        return overhang_of(self.draft)

    @property
    def own(self) -> ModelConfig:
        """The model of each rank; with one rank the model itself."""
        return self.config.share(self.settings.tp)

    @property
    def batch(self) -> int:
        """Rows of a forward in which no slot decodes."""
        return self.settings.batch or max(self.settings.ubatch, 2048 if self.is_cuda else 0)

    @property
    def sizes(self) -> CacheSizes:
        """Sizes of the memory of the target's layers."""
        s = self.settings
        n_row, n_late = self.table().n_alloc_row, late_rows(self.device)
        return CacheSizes(s.np, n_row, s.page_size, width=self.width, kv=self.kv, n_late=n_late)

    @property
    def draft_sizes(self) -> CacheSizes:
        """Sizes of the memory of the drafter's layers."""
        return replace(self.sizes, n_late=self.draft.n_late)

    def table(self) -> SlotTable:
        """The slots, all of them empty."""
        return SlotTable(self.settings.np, self.n_page, self.settings.page_size)


def describe(
    path: Path, settings: EngineSettings, assumed: AssumedGpu | None = None, *, is_isolated: bool = False
) -> Description:
    """Open, check, decide. Every refusal is a PyspecError with the reason.

    is_isolated  the program's process builds the tokenizer, too, and refuses a vocabulary that can not be used
    """
    device = torch.device("cuda") if assumed is not None else pick_device(settings.device)
    file = open_gguf(path)
    draft_file = open_gguf(settings.draft_path) if settings.draft_path is not None else None
    check_is_target(file, path)
    config = read_config(file)
    check_tensors(file, wants := config.tensors(file))
    check_read(file, wants, config.n_layer)
    if settings.tp == 0:
        settings = replace(settings, tp=n_device(device))
    config.share(settings.tp)
    check_ranks(file, cuts_of(wants), settings.tp)
    if assumed is None:
        rank_devices(device, settings.tp)
    tokenizer = Tokenizer.from_metadata(file.metadata, later=is_isolated)
    template = ChatTemplate.from_metadata(file.metadata)
    _warn_of_vocabulary(file, tokenizer)
    plan = _checked_draft(draft_file, TargetFile(file, config, device), settings)
    synth_of(settings, plan.n_draft)  # rates that do not go with the drafter are refused before weights are read
    n_ctx = max_context(settings, config)
    dense = pick_dense(file, device, settings.weights)
    return Description(
        path=path,
        settings=settings,
        device=device,
        file=file,
        config=config,
        tokenizer=tokenizer,
        template=template,
        draft=plan,
        n_ctx=n_ctx,
        n_page=pages_of(settings, n_ctx, overhang_of(plan)),
        dense=dense,
        head=plan_head(file, plan, settings.draft_head, is_streamed=device.type == "cuda" and dense is None),
        assumed=assumed,
    )


def _checked_draft(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    """The drafter's plan. A file of another vocabulary is refused first, unless the plan maps it."""
    try:
        plan = plan_draft(file, target, settings)
    except PyspecError:
        if file is not None:
            check_vocabulary(target.file, file)
        raise
    if file is not None and not plan.maps_tokens:
        check_vocabulary(target.file, file)
    plan.check()
    return plan


def check_is_target(file: GGUFFile, path: Path) -> None:
    """Raise ModelError with the right command if the file is a drafter, or a part of another kind, and no model."""
    kind = draft.recognised(file)
    has_trunk = any(name.startswith("blk.0.") for name in file.tensors)
    # an MTP block behind a trunk is part of a model, known or not
    is_own = kind != "mtp" and architecture_module(file.architecture) is None
    if kind and (is_own or not has_trunk):
        raise ModelError(f"{path.name} is a drafter ({kind}), no model that answers; type -m TARGET.gguf -md {path}")
    if (what := PARTS_OF_MODELS.get(file.architecture)) is not None:
        raise ModelError(f"{path.name} is {what}, no model that answers; it is not supported")


def resized(d: Description, np: int, n_ctx: int) -> Description:
    """The same with another number of slots, and of tokens that one request may hold."""
    settings = replace(d.settings, np=np, ctx=n_ctx)
    given = None if d.draft.file is d.file else d.draft.file
    draft = plan_draft(given, TargetFile(d.file, d.config, d.device), settings)
    n_page = pages_of(settings, n_ctx, overhang_of(draft))
    return replace(d, settings=settings, draft=draft, n_ctx=n_ctx, n_page=n_page)


def pick_device(wanted: str) -> torch.device:
    """The device that a name means; DeviceError if it fails, NoDevice if it is not there."""
    if wanted == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(wanted)
        torch.empty(0, device=device)
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
            return "there is no NVIDIA driver on this machine, and this torch was built for CPUs: -dev cpu"
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


def arena_pages(d: Description, table: SlotTable) -> int:
    """Pages of one sequence in a graph, at most."""
    return min(table.pages_for(d.n_ctx + d.n_overhang), table.n_page)


def _warn_of_vocabulary(file: GGUFFile, tokenizer: Tokenizer) -> None:
    """Warn of fields of the vocabulary that are not used, and of missing ones."""
    if tokenizer.model == "gpt2" and not file.fields.label("tokenizer.ggml.pre", ""):
        log.warning(
            "tokenizer.ggml.pre names no pre-tokenizer: %r is taken, as llama.cpp does; the model may have learnt another",
            tokenizer.pre,
        )
    for sentence in stray_ids(file.fields, tokenizer.n_vocab):
        log.warning("%s", sentence)
    if not tokenizer.eog:
        log.warning("no token ends a generation: texts end at their limit, and no grammar can be kept")


def plan_draft(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    """What drafts: the drafter's plan, with suffix drafts beside it if they are on."""
    plan = _plan_drafter(file, target, settings)
    if settings.n_suffix:
        plan = ONLY_SUFFIXES if plan.kind == "none" else plan
        plan = replace(plan, n_suffix=settings.n_suffix)
    return plan


def _plan_drafter(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    """Which drafter runs, and how. One that was given is a request: if it can not run, loading fails with the reason."""
    kind: str | None = settings.drafter
    if kind == "auto":
        kind = draft.recognised(target.file) if file is None else draft.given(file, target)
        if kind is None and file is not None:
            known = ", ".join(drafters())
            raise PairError(
                f"the draft file ({file.architecture}) is for none of the drafters there are ({known}), and no model that pyspec "
                f"runs: {FAMILIES}. --spec-type ngram needs no file"
            )
    if kind is None or kind == "none":
        refuse_file(settings.spec_type if settings.n_suffix else "none", file)
        return NO_DRAFTER
    return draft.find(kind).plan(file, target, settings)


def synth_of(settings: EngineSettings, n_draft: int) -> SynthAcceptance | None:
    """Synthetic acceptance, if settings ask for it and there is a drafter."""
    seed = max(settings.seed, 0)
    if not n_draft or not (settings.synth_len or settings.synth_rates):
        return None
    if settings.synth_rates:
        return SynthAcceptance.of_rates(settings.synth_rates, n_draft, seed)
    return SynthAcceptance.of_length(settings.synth_len, n_draft, seed)


def check_vocabulary(target: GGUFFile, drafter: GGUFFile) -> None:
    """Both files must mean the same token by the same id."""
    key = "tokenizer.ggml.tokens"
    if key not in target.fields or key not in drafter.fields:
        return
    a, b = target.fields.strings(key), drafter.fields.strings(key)
    if a == b:
        return
    if len(a) != len(b):
        raise PairError(f"the drafter has {len(b)} tokens, the target {len(a)}: they do not share a vocabulary")
    i = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    raise PairError(
        f"token {i} is {quoted(b[i])} in the drafter and {quoted(a[i])} in the target: not the same vocabulary"
    )


def max_context(s: EngineSettings, c: ModelConfig) -> int:
    """Tokens one request may hold; START_CTX unless settings have a number."""
    if not s.ctx:
        return min(START_CTX, c.n_ctx_train)
    if s.ctx > c.n_ctx_train:
        log.warning("-c %d is more than the model was trained for (%d)", s.ctx, c.n_ctx_train)
    return s.ctx


def overhang_of(plan: DraftPlan) -> int:
    """Rows beyond a request's committed tokens that a round may write."""
    return max(plan.needs.overhang, plan.n_draft + 1)


def pages_of(s: EngineSettings, n_ctx: int, n_overhang: int) -> int:
    """Pages of the pool: all slots' contexts, or the number in the settings."""
    per_slot = -(-(n_ctx + n_overhang) // s.page_size)
    n_page = -(-s.kv_pool // s.page_size) if s.kv_pool else per_slot * s.np
    if n_page < -(-(n_overhang + 2) // s.page_size):
        raise ConfigError(f"--kv-pool {s.kv_pool} holds not even one request of {n_overhang + 2} rows")
    return n_page


# -- bytes -----------------------------------------------------------------------------------------------------------


def plan_memory(d: Description) -> MemoryPlan:
    """Bytes of everything that will be allocated; optional copies only where there is room for them."""
    s = d.settings
    own = d.own.parts()
    kv, state = memory_bytes(own, d.sizes)
    shares = shares_of(d.file, d.config.tensors(d.file), s.tp)
    draft_kv = sum(memory_bytes(d.draft.layers, d.draft_sizes)) - s.np * _share_bytes(d)
    own_file = None if d.draft.file is d.file else d.draft.file  # of a drafter that is not in the target's
    unread = _unread(d)
    read = [t for name, t in shares.items() if name not in unread]
    read += own_file.tensors.values() if own_file else ()
    activations, workspace = _workspace(d)
    workspace += rank_bytes(s.tp) if d.is_cuda and s.tp > 1 else 0
    plan = MemoryPlan(
        weights=weight_bytes(d.file, d.dense, d.is_cuda, unread, shares) + _tied_share(d),
        kv=kv,
        state=state - s.np * checkpoint_bytes(own, d.sizes) + device_checkpoints(d) + start_bytes(d),
        draft_weights=0 if own_file is None else weight_bytes(own_file, d.dense, d.is_cuda, d.draft.shared),
        draft_kv=draft_kv,
        draft_head=head_for_drafts(d),
        activations=activations + _scratch(d),
        workspace=workspace
        + attention_bytes(d)
        + (d.draft.graph_bytes + PIECE_BYTES * n_large(read) if d.is_cuda else 0),
    )
    if d.head is not None:
        plan = with_head(plan, coarse.coarse_bytes(d.head.info, d.head.to, d.device), d.device, s.draft_head, d.assumed)
    copied = [shares, *([] if own_file is None else [own_file.tensors])]
    n_wide = sum(map(wide_bytes, copied)) if d.dense is None else 0
    return with_copies(plan, 0 if s.exact else n_wide, d.device, s.weights, d.assumed)


def missing_copy(d: Description, plan: MemoryPlan) -> str:
    """The message of a load where a copy of the head has no room; "" where there is one, or none is wanted."""
    if d.head is None or plan.draft_head:
        return ""
    n_bytes = coarse.coarse_bytes(d.head.info, d.head.to, d.device)
    return f"drafts read the target's head as it is: no room for a coarse copy of {size(n_bytes)}"


def _unread(d: Description) -> frozenset[str]:
    """Tensors behind the trunk, which a drafter has where it drafts from them; else they are not read."""
    if d.draft.file is d.file:
        return frozenset()
    behind, n_layer = re.compile(r"blk\.(\d+)\."), d.config.n_layer
    return frozenset(name for name in d.file.tensors if (m := behind.match(name)) and int(m[1]) >= n_layer)


def _tied_share(d: Description) -> int:
    """Of several ranks each has all of the embedding and, where that is the head as well, its rows of that."""
    if d.settings.tp == 1 or HEAD in d.file.tensors:
        return 0
    return -(-_bytes_of(d, "token_embd.weight") // d.settings.tp)


def head_for_drafts(d: Description) -> int:
    """The first of several ranks drafts alone, with a whole head: bytes of it, if the drafter has none of its own, and ranks do not read
    theirs together for it."""
    if d.settings.tp == 1 or d.draft.file is None or d.draft.no_copy == OWN_HEAD or heads_together(d):
        return 0
    return _bytes_of(d, HEAD if HEAD in d.file.tensors else "token_embd.weight")


def heads_together(d: Description) -> bool:
    """Whether drafts go through each rank's share of the head, instead of a copy of it."""
    return d.settings.tp > 1 and d.draft.best_only and d.head is None


def _bytes_of(d: Description, name: str) -> int:
    """A matrix, as it stands on the device."""
    info = d.file.tensors[name]
    if d.dense is not None:
        return info.n_elements * d.dense.itemsize
    return repacked_bytes(info) if d.is_cuda else info.n_bytes


def device_checkpoints(d: Description) -> int:
    """Bytes of recurrent checkpoints that may stand on the device."""
    if not d.settings.prefix_cache:
        return 0
    return d.settings.cache_device << 20 or d.settings.np * (checkpoint_bytes(d.own.parts(), d.sizes) + _share_bytes(d))


def _share_bytes(d: Description) -> int:
    """Bytes of the drafter's share of a checkpoint: the state of its recurrent layers."""
    parts = [part for layer in d.draft.layers for part in layer.values() if isinstance(part, Recurrent)]
    return sum(part.saved_bytes(d.draft_sizes) for part in parts)


def start_bytes(d: Description) -> int:
    """Bytes of states where short prompts end, with their logits: a few are enough for prompts that come again."""
    own = checkpoint_bytes(d.own.parts(), d.sizes)
    if not d.settings.prefix_cache or not own:
        return 0
    return min(MOST_STARTS, max(1, d.settings.np // 4)) * (own + _share_bytes(d) + 4 * d.own.n_vocab)


def _workspace(d: Description) -> tuple[int, int]:
    """(activations, workspace): bytes of forwards besides weights and slots."""
    s, c = d.settings, d.own
    most = most_rows(s.np, d.width)
    graphs = graph_shapes(s.np, d.width, singles=d.draft.needs.late, most=most) if d.is_cuda else []
    # of a dim of a key and of its value, as libraries take them
    key_size = sum(4 if dtype.itemsize == 1 else 2 for dtype in (d.kv.k, d.kv.v))
    rows, blocks = s.np * d.width, s.np * d.draft.needs.overhang  # of a verify of all slots, of a draft of blocks
    in_graphs = d.draft.needs.chained and blocks <= BUCKETS[-1]
    large = max(rows if rows > most else 0, 0 if in_graphs else blocks)
    sizes = ForwardSizes(
        n_row=d.batch,
        n_embd=c.n_embd,
        n_hidden=c.n_hidden,
        n_ff=c.n_ff,
        n_vocab=c.n_vocab,
        n_column=-(-c.n_vocab // s.tp),
        graph_rows=sum(bucket_of(n, most) or n for n, _ in graphs),
        graph_most=max((bucket_of(n, most) or n for n, _ in graphs), default=0),
        prompt_rows=_prompt_rows(d),
        large_rows=large,
        shared_rows=(bucket_of(rows, most) or rows) if s.tp > 1 else 0,
        n_tap=len(d.draft.needs.taps),
        n_held=d.draft.n_held,
        key_bytes=key_size
        * d.n_ctx
        * max((a.n_kv_head * a.head_dim for a in (*c.attention, *d.draft.attention)), default=0),
    )
    return workspace_bytes(sizes, cuda=d.is_cuda)


def _prompt_rows(d: Description) -> int:
    """Rows of all graphs of prompts, if the model has any."""
    if not d.is_cuda or d.settings.tp > 1 or d.settings.exact or not d.own.captures_prompts:
        return 0
    return sum(n for n in PROMPTS if n <= min(d.batch, d.n_ctx))


def _scratch(d: Description) -> int:
    """Bytes of an architecture's mixers while a forward runs."""
    n_row, most = d.settings.np * d.width, most_rows(d.settings.np, d.width)
    return d.own.scratch_bytes(max(d.batch, bucket_of(n_row, most) or n_row), d.n_ctx + d.n_overhang, d.kv.k, d.device)


def attention_bytes(d: Description) -> int:
    """Of partial sums of attention, which target and drafter share."""
    s, n_key = d.settings, d.n_ctx + d.n_overhang + d.settings.page_size
    n_row, most = s.np * d.draft_width, most_rows(s.np, d.draft_width)
    widest = max(d.n_overhang, -(-(bucket_of(n_row, most) or n_row) // s.np))  # with a graph's padding
    shapes = dict.fromkeys((*d.own.attention, *d.draft.attention))
    specs = [AttendSpec(d.device, a.n_head, a.n_kv_head, a.head_dim, 1.0, d.kv) for a in shapes]
    if d.assumed is not None:
        return max(
            (attend_plan.bytes_on(d.assumed.arch, d.assumed.n_sm, x, s.np, n_key, widest) for x in specs), default=0
        )
    return max((attend_plan.workspace_bytes(spec, s.np, n_key, widest) for spec in specs), default=0)
