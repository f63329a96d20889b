"""From files to a running loop: read, check everything, plan the memory, then allocate. All "auto"s end here."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from pyspec.config import EngineSettings
from pyspec.cuda import probe, temporary
from pyspec.cuda.context import context_of, gpu_lock
from pyspec.cuda.ops.attend import cuda as attend_cuda
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.draft import DRAFTERS, dflash, mtp
from pyspec.draft.drafter import Drafter, GraphedDrafter
from pyspec.draft.ngram import NGram
from pyspec.engine.controller import Controller, Timer, bucket
from pyspec.engine.loop import Loop
from pyspec.engine.memory_plan import (
    MemoryPlan,
    check_fit,
    checkpoint_bytes,
    free_bytes,
    memory_bytes,
    pick_dense,
    since,
    size,
    taken,
    with_copies,
    with_head,
    workspace_bytes,
)
from pyspec.engine.warmup import check_taps, graph_shapes, warm_up
from pyspec.errors import BadTemplate, ConfigError, DeviceError, PairError
from pyspec.gguf import GGMLType, GGUFFile, TensorInfo, open_gguf
from pyspec.models import coarse, read_config
from pyspec.models.decoder import Decoder, DecoderConfig, decoder_tensors
from pyspec.models.weights import Matrix, Weights, check_tensors, weight_bytes, wide_bytes
from pyspec.request import EngineInfo
from pyspec.sample.synth import SynthAcceptance
from pyspec.slots.arena import Arena, bucket_of
from pyspec.slots.cache import PrefixCache
from pyspec.slots.kv import KV_DTYPES, row_bytes
from pyspec.slots.memory import allocate
from pyspec.slots.parts import CacheSizes
from pyspec.slots.states import StateStore
from pyspec.slots.table import SlotTable
from pyspec.text.template import ChatTemplate
from pyspec.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

AUTO_CTX = 8192
DEFAULT_DRAFT = {"mtp": 3, "ngram": 8}
AUTO_HEAD = GGMLType.Q4_0


@dataclass
class Loaded:
    """Everything an engine needs."""

    loop: Loop
    tokenizer: Tokenizer
    template: ChatTemplate | None
    info: EngineInfo


@dataclass(frozen=True)
class DraftPlan:
    """Which drafter runs, from which file, with how many tokens; decided before anything is allocated."""

    kind: str  # a key of DRAFTERS, or "none"
    file: GGUFFile | None
    n_draft: int
    overhang: int  # KV rows it writes beyond the committed tokens
    note: str


@dataclass(frozen=True)
class HeadCopy:
    """The target's head, and the type of the copy that drafts read."""

    info: TensorInfo
    to: GGMLType


def pick_device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(wanted)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as e:
        raise DeviceError(f"device '{wanted}' can not be used: {str(e).splitlines()[0]}") from e
    return device


def plan_draft(target: GGUFFile, draft: GGUFFile | None, settings: EngineSettings) -> DraftPlan:
    """Recognise the drafter. One that was given is a request: if it can not run, loading fails with the reason."""
    kind = settings.spec_type
    if draft is not None and kind in ("none", "ngram"):
        raise ConfigError(f"a draft file is given, but --spec-type is {kind}; drop one of them")
    if kind == "auto":
        if draft is not None:
            kind = _kind_of(draft)
        else:
            kind = "mtp" if mtp.has_mtp(target) else "none"
    if kind == "none":
        return DraftPlan(kind, None, 0, 0, "speculation: off (no drafter)")
    if kind == "dflash" and draft is None:
        raise ConfigError("--spec-type dflash needs a draft file (-md)")
    file = draft if draft is not None else target if kind == "mtp" else None
    if kind == "mtp" and not mtp.has_mtp(file if file is not None else target):
        raise PairError("no MTP block in the file: it has no nextn.eh_proj tensor")
    n, note = settings.n_draft_max or DEFAULT_DRAFT.get(kind, 0), ""
    if kind == "dflash" and file is not None:
        block = dflash.read_config(file).block
        most = block - 1
        note = f", n_draft {n} lowered to {most} (block {block})" if n > most else ""
        n = min(n or most, most)
        overhang = block
    else:
        overhang = n + 1
    return DraftPlan(kind, file, n, overhang, f"speculation: {kind}, up to {n} tokens a round{note}")


def _kind_of(file: GGUFFile) -> str:
    if file.architecture in dflash.ARCHS:
        return "dflash"
    if mtp.has_mtp(file):
        return "mtp"
    raise PairError(
        f"the draft file ({file.architecture}) is neither a DFlash drafter nor an MTP block; drafters: "
        + ", ".join(DRAFTERS)
    )


def plan_head(
    target: GGUFFile, d: DraftPlan, wanted: str, dense: torch.dtype | None, device: torch.device
) -> HeadCopy | None:
    """The copy of the head that drafts go through; None for the target's own.

    "auto" makes one where kernels read a large head once a draft (MTP): a block's drafts (DFlash) go through it together,
    and what that saves is no more than what is accepted less (docs/log.md). A CPU would read as many bytes as before.
    """
    if wanted == "full" or (wanted == "auto" and d.kind != "mtp"):
        return None
    info = target.tensors["output.weight" if "output.weight" in target.tensors else "token_embd.weight"]
    to = AUTO_HEAD if wanted == "auto" else GGMLType[wanted.upper()]
    if d.kind in ("none", "ngram"):
        why: str | None = "nothing drafts" if d.kind == "none" else "n-grams need no head"
    elif d.file is not None and (mtp if d.kind == "mtp" else dflash).has_head(d.file):
        why = "the drafter has a head of its own"
    else:
        why = coarse.refusal(info, to)
        why = why and f"{info.name} stays as it is: {why}"
    if wanted == "auto":
        streams = device.type == "cuda" and dense is None and coarse.is_worth(info)
        return HeadCopy(info, to) if streams and why is None else None
    if why is not None:
        raise ConfigError(f"--draft-head {wanted} makes no sense here: {why}")
    return HeadCopy(info, to)


def _copied(target: Decoder, head: HeadCopy) -> Matrix | None:
    copy, to = coarse.coarse(target.output, head.info, head.to, target.device), head.to.name
    if copy is None:
        log.warning("drafts read the target's head as it is: no kernel here takes a copy in %s", to)
    else:
        log.info("drafts read a copy of the head in %s (%s in the file)", to, head.info.type.name)
    return copy


def check_vocabulary(target: GGUFFile, draft: GGUFFile) -> None:
    """Both files must mean the same token by the same id."""
    key = "tokenizer.ggml.tokens"
    ours, theirs = target.metadata.get(key), draft.metadata.get(key)
    if ours is None or theirs is None or ours == theirs:
        return
    a, b = list(ours), list(theirs)  # type: ignore[call-overload]
    if len(a) != len(b):
        raise PairError(f"the drafter has {len(b)} tokens, the target {len(a)}: they do not share a vocabulary")
    i = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    raise PairError(f"token {i} is {b[i]!r} in the drafter and {a[i]!r} in the target: not the same vocabulary")


def _sizes(s: EngineSettings, d: DraftPlan, n_row: int) -> CacheSizes:
    return CacheSizes(s.np, n_row, s.page_size, width=d.n_draft + 1, kv_dtype=KV_DTYPES[s.kv_type])


def _memory_plan(
    file: GGUFFile,
    c: DecoderConfig,
    d: DraftPlan,
    s: EngineSettings,
    n_row: int,
    n_ctx: int,
    dense: torch.dtype | None,
    device: torch.device,
) -> MemoryPlan:
    kv_dtype = KV_DTYPES[s.kv_type]
    kv, state = memory_bytes(c.parts(), _sizes(s, d, n_row))
    draft_weights = draft_kv = 0
    if d.kind == "mtp":
        draft_kv = n_row * row_bytes(c.attention.n_kv_head, c.attention.head_dim, kv_dtype)
    if d.kind == "dflash" and d.file is not None:
        a = dflash.read_config(d.file)
        draft_kv = n_row * row_bytes(a.attention.n_kv_head, a.attention.head_dim, kv_dtype) * len(a.windows)
    if d.file is not None and d.file is not file:
        draft_weights = weight_bytes(d.file, dense, device.type == "cuda")
    activations, workspace = _workspace(c, d, s, n_ctx, device)
    plan = MemoryPlan(
        weight_bytes(file, dense, device.type == "cuda"),
        kv,
        state,
        draft_weights,
        draft_kv,
        activations=activations,
        workspace=workspace + _attention_bytes(c, d, s, n_ctx, device),
    )
    head = plan_head(file, d, s.draft_head, dense, device)
    return (
        plan if head is None else with_head(plan, coarse.coarse_bytes(head.info, head.to, device), device, s.draft_head)
    )


def _batch(s: EngineSettings, device: torch.device) -> int:
    """Rows of a forward in which nobody decodes."""
    return s.batch or max(s.ubatch, 2048 if device.type == "cuda" else 0)


def _workspace(c: DecoderConfig, d: DraftPlan, s: EngineSettings, n_ctx: int, device: torch.device) -> tuple[int, int]:
    cuda = device.type == "cuda"
    n_tap = n_held = 0
    if d.kind == "dflash" and d.file is not None:
        n_tap, n_held = len(dflash.read_config(d.file).taps), dflash.held_rows(s.np)
    graphs = graph_shapes(s.np, d.n_draft + 1, late=n_held > 0) if cuda else []
    return workspace_bytes(
        n_row=_batch(s, device),
        n_embd=c.n_embd,
        n_ff=c.n_ff,
        n_vocab=c.n_vocab,
        graph_rows=sum(bucket_of(n) or n for n, _ in graphs),
        n_tap=n_tap,
        n_held=n_held,
        key_bytes=(8 if s.kv_type in ("q8_0", "f8_e4m3") else 4) * n_ctx * c.attention.n_kv_head * c.attention.head_dim,
        cuda=cuda,
    )


def _attention_bytes(c: DecoderConfig, d: DraftPlan, s: EngineSettings, n_ctx: int, device: torch.device) -> int:
    """Of partial sums of attention, which target and drafter share."""
    shapes = [c.attention]
    if d.kind == "dflash" and d.file is not None:
        shapes.append(dflash.read_config(d.file).attention)
    extra, n_row = max(d.overhang, d.n_draft + 1), s.np * (d.n_draft + 1)
    if d.kind == "mtp":
        n_row = max(n_row, s.np * mtp.most_waiting(s.np))
    widest = max(extra, -(-(bucket_of(n_row) or n_row) // s.np))  # with a graph's padding
    specs = [AttendSpec(device, a.n_head, a.n_kv_head, a.head_dim, 1.0, KV_DTYPES[s.kv_type]) for a in shapes]
    return max(attend_cuda.workspace_bytes(spec, s.np, n_ctx + extra + s.page_size, widest) for spec in specs)


def _take_for_attention(n_bytes: int, device: torch.device) -> None:
    """Now, so that contexts may grow later without a request to the driver in the midst of a round."""
    if n_bytes:
        attend_cuda.workspace(device).take(n_bytes // 4)


def _tell_memory(before: tuple[int, int, int], plan: MemoryPlan, device: torch.device) -> None:
    if device.type == "cuda":
        log.info("memory in use: %s, planned %s", since(before, device), size(plan.total))


def _state_budgets(c: DecoderConfig, s: EngineSettings, sizes: CacheSizes) -> tuple[int, int]:
    """Bytes for checkpoints on the device and in host memory."""
    if not s.prefix_cache:
        return 0, 0
    device = s.cache_device << 20 or s.np * checkpoint_bytes(c.parts(), sizes)
    return device, min(s.cache_ram << 20, free_bytes(torch.device("cpu")) // 2)


def _drafter(
    d: DraftPlan,
    target: Decoder,
    table: SlotTable,
    s: EngineSettings,
    dense: torch.dtype | None,
    wide: bool,
    head: HeadCopy | None,
) -> Drafter | None:
    """head: the copy that drafts read, if they do not read the target's."""
    if d.kind == "none":
        return None
    if d.kind == "ngram":
        return NGram(s.np, d.n_draft, s.ngram_match)
    assert d.file is not None
    build = import_module(DRAFTERS[d.kind]).load
    options = {"n_draft": d.n_draft, "p_min": s.draft_p_min, "kv_dtype": KV_DTYPES[s.kv_type]}
    copy = None if head is None else _copied(target, head)
    return build(d.file, target, table, **options, dense=dense, wide=wide, head=copy)


def load(path: Path, settings: EngineSettings) -> Loaded:
    """Open, check, plan, allocate, warm up. Every refusal is a PyspecError with the reason."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = pick_device(settings.device)
    context = context_of(device)
    with context.current():
        return _load(path, settings, device)


def _load(path: Path, settings: EngineSettings, device: torch.device) -> Loaded:
    file = open_gguf(path)
    draft_file = open_gguf(settings.draft_path) if settings.draft_path is not None else None
    config = read_config(file)
    check_tensors(file, decoder_tensors(config, file))
    tokenizer, template = Tokenizer.from_metadata(file.metadata), ChatTemplate.from_metadata(file.metadata)
    if draft_file is not None:
        check_vocabulary(file, draft_file)
    _check_template(template)
    d = plan_draft(file, draft_file, settings)

    n_ctx = min(settings.ctx or AUTO_CTX, config.n_ctx_train) if not settings.ctx else settings.ctx
    if n_ctx > config.n_ctx_train:
        log.warning("-c %d is more than the model was trained for (%d)", n_ctx, config.n_ctx_train)
    extra = max(d.overhang, d.n_draft + 1)
    table = _table(settings, n_ctx, extra)
    dense = pick_dense(file, device, settings.weights)
    plan = _memory_plan(file, config, d, settings, table.n_alloc_row, n_ctx, dense, device)
    files = [f for f in {file, d.file} if f is not None]
    plan = with_copies(plan, sum(wide_bytes(f) for f in files) if dense is None else 0, device, settings.weights)
    sizes = _sizes(settings, d, table.n_alloc_row)
    states = StateStore(*_state_budgets(config, settings, sizes))
    plan = replace(plan, state=plan.state - settings.np * checkpoint_bytes(config.parts(), sizes) + states.limits[0])
    before = taken(device) if device.type == "cuda" else (0, 0, 0)
    check_fit(plan, device, n_slot=settings.np, n_ctx=n_ctx, packed=dense is None)

    memory = allocate(config.parts(), sizes, device)
    with _timed("weights", device, release=True):
        target = Decoder(config, Weights(file, device, dense, wide=plan.wide > 0), memory)
    with _timed("drafter", device, release=True):
        head = plan_head(file, d, settings.draft_head, dense, device) if plan.draft_head else None
        drafter = _drafter(d, target, table, settings, dense, plan.wide > 0, head)
    make_arena = partial(_arena, target, table, n_ctx + extra)
    arena = None if settings.plain_loop else make_arena()
    controller = Controller(
        settings.np,
        d.n_draft,
        chained=drafter is not None and drafter.needs.chained,
        fixed=settings.n_draft_fixed,
        # graphs pad their batches, so what takes the same time is a bucket of theirs
        verify_ms=Timer() if arena is None else Timer(lambda n_row: bucket_of(n_row) or bucket(n_row)),
    )
    synth = (
        SynthAcceptance(settings.synth_len, d.n_draft, max(settings.seed, 0))
        if settings.synth_len and d.n_draft
        else None
    )
    loop = Loop(
        target,
        memory,
        table,
        drafter,
        controller,
        ubatch=settings.ubatch,
        batch=_batch(settings, device),
        queue_limit=settings.queue_limit,
        synth=synth,
        arena=arena,
        plain=settings.plain_loop,
        cache=PrefixCache(table, memory, states, on=settings.prefix_cache, every=settings.checkpoint_every),
    )
    if arena is not None and isinstance(drafter, GraphedDrafter):
        drafter.use_graphs(make_arena)
    log.info("%s", d.note)
    _take_for_attention(_attention_bytes(config, d, settings, n_ctx, device), device)
    if settings.warm_up:
        with _timed("graphs and warm-up", device), gpu_lock(device):
            warm_up(loop, tokenizer, extra, plan.activations + states.limits[0])
            if settings.check_tap_shift:
                check_taps(loop, tokenizer, template, extra)
    probe.close()  # the child that checked kernels, and its memory on the GPU
    _tell_memory(before, plan, device)
    info = _info(path, file, config, d, settings, n_ctx, extra, device, tokenizer)
    return Loaded(loop, tokenizer, template, info)


@contextmanager
def _timed(what: str, device: torch.device, release: bool = False) -> Iterator[None]:
    """Says how long a part of loading took; `release`: what it allocated and freed is the device's again."""
    began = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if release:
            temporary.release(device)
    log.info("%s: %.1f s", what, time.perf_counter() - began)


def _check_template(template: ChatTemplate | None) -> None:
    """Start the template's sandbox now. A template that is broken costs the chats, not the model."""
    try:
        if template is not None:
            template.check()
    except BadTemplate as e:
        log.warning("%s; chats will be refused", e)


def _arena(target: Decoder, table: SlotTable, n_row: int) -> Arena | None:
    """Static batches for CUDA graphs, where every op of the model can be captured."""
    if target.device.type != "cuda" or not target.capturable:
        return None
    return Arena(len(table.slots), min(table.pages_for(n_row), table.n_page), target.device)


def _table(s: EngineSettings, n_ctx: int, extra: int) -> SlotTable:
    per_slot = -(-(n_ctx + extra) // s.page_size)
    pool = -(-s.kv_pool // s.page_size) if s.kv_pool else per_slot * s.np
    if pool < -(-(extra + 2) // s.page_size):
        raise ConfigError(f"--kv-pool {s.kv_pool} holds not even one request of {extra + 2} rows")
    return SlotTable(s.np, pool, s.page_size)


def _info(
    path: Path,
    file: GGUFFile,
    c: DecoderConfig,
    d: DraftPlan,
    s: EngineSettings,
    n_ctx: int,
    extra: int,
    device: torch.device,
    tokenizer: Tokenizer,
) -> EngineInfo:
    template = file.metadata.get("tokenizer.chat_template")
    piece = lambda i: "" if i is None else tokenizer.piece(i)  # noqa: E731
    return EngineInfo(
        model_name=str(file.metadata.get("general.name") or path.stem),
        model_path=str(path),
        arch=c.arch,
        n_vocab=c.n_vocab,
        n_ctx=n_ctx,
        n_ctx_train=c.n_ctx_train,
        n_slot=s.np,
        n_embd=c.n_embd,
        n_params=sum(t.n_elements for t in file.tensors.values()),
        n_bytes=sum(t.n_bytes for t in file.tensors.values()),
        file_type=str(file.metadata.get("general.file_type", "")),
        device=str(device),
        drafter=d.kind,
        draft_path=str(s.draft_path or ""),
        n_draft_max=d.n_draft,
        draft_note=d.note,
        synthetic_len=s.synth_len,
        chat_template=template if isinstance(template, str) else "",
        bos_token=piece(tokenizer.bos_id),
        eos_token=piece(tokenizer.eos_id),
        eog_ids=tuple(sorted(tokenizer.eog)),
        n_overhang=extra,
    )
