"""From files to a running loop: describe, plan the memory, allocate, bind, warm up."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from pyspec import draft, progress
from pyspec.cache import n_cores
from pyspec.config import UBATCH, EngineSettings
from pyspec.cpu.kernels import missing as missing_on_cpu
from pyspec.cpu.kernels import torch_alone
from pyspec.cuda import checker, prepare, temporary
from pyspec.cuda.context import context_of, gpu_lock
from pyspec.cuda.kernel_context import KernelContext, within
from pyspec.cuda.movable import EMPTIED, KEPT, MovableMemory, movable
from pyspec.cuda.op import run_by_torch, tiers_of, unmet_tiers
from pyspec.cuda.ops.attend import plan as attend_plan
from pyspec.cuda.ops.moe.host import take_layers
from pyspec.cuda.prepare import Preparation
from pyspec.device.capture import hold
from pyspec.device.expert_uploads import ExpertUploads
from pyspec.device.expert_use import ExpertLog
from pyspec.device.lead import TpMemory, TpWorker
from pyspec.device.worker import Worker
from pyspec.draft.drafter import Drafter, DraftOptions
from pyspec.draft.head_copy import make_head
from pyspec.draft.suffix_drafts import SuffixDrafts
from pyspec.engine.load.disk import open_disk
from pyspec.engine.load.learned import LearnedDrafting
from pyspec.engine.load.ranks import Ranks, begin_ranks, lead_ranks
from pyspec.engine.load.threads import usual
from pyspec.engine.load.warmup import check_drafter, warm_up
from pyspec.engine.loop.disk_tier import DiskTier
from pyspec.engine.loop.expert_cache import EXACT, PLACED, ExpertCache
from pyspec.engine.loop.loop import Loop
from pyspec.engine.loop.pictures import Pictures
from pyspec.engine.loop.round import RowLimits
from pyspec.engine.plan.asks import asks_of
from pyspec.engine.plan.describe import Description, arena_pages, describe, pick_device
from pyspec.engine.plan.fitted import check_host, fit_lines, without
from pyspec.engine.plan.longest import here, widened
from pyspec.engine.plan.memory_plan import (
    MemoryPlan,
    cap_memory,
    check_fit,
    growth,
    memory_snapshot,
    size,
)
from pyspec.engine.plan.planned_bytes import (
    attention_bytes,
    cache_ram,
    device_checkpoints,
    head_for_drafts,
    heads_together,
    missing_copy,
    plan_host,
    plan_memory,
    ring_note,
    start_bytes,
)
from pyspec.engine.policy.controller import Controller
from pyspec.engine.policy.costs import Costs, Timer, bucket
from pyspec.engine.policy.plan import PromptRules, no_graph
from pyspec.engine.recommended import recommended
from pyspec.errors import ConfigError, DeviceError, RankLost
from pyspec.gguf import GGUFFile, open_gguf
from pyspec.gguf.types import file_type_words
from pyspec.models.decoder import Decoder
from pyspec.models.gathered import Gathered
from pyspec.models.rope import stretch_words
from pyspec.models.target import Target
from pyspec.models.weights import Weights, cuts_of
from pyspec.ranges import printable
from pyspec.registry import SUFFIX
from pyspec.request import EngineInfo
from pyspec.sample.synth import read_rates, synth_of
from pyspec.slots.arena import Arena, HostArena, bucket_of, most_rows
from pyspec.slots.cache import PrefixCache
from pyspec.slots.memory import Memory, allocate
from pyspec.slots.states import StateStore
from pyspec.slots.table import SlotTable
from pyspec.text.template import ChatTemplate
from pyspec.text.tokenizer import Tokenizer
from pyspec.vision.encoder import Encoder

log = logging.getLogger(__name__)


@dataclass
class Loaded:
    """Everything an engine needs."""

    loop: Loop
    tokenizer: Tokenizer
    template: ChatTemplate | None
    info: EngineInfo
    ranks: Ranks | None = None
    disk: DiskTier | None = None  # of the loop's prefix cache
    learned: LearnedDrafting | None = None  # values for the next start
    kernels: KernelContext = field(default_factory=KernelContext)  # for the thread that runs the loop


def load(
    path: Path, settings: EngineSettings, *, is_isolated: bool = False, file: GGUFFile | None = None
) -> Loaded:
    """Load a model and its drafter into a loop. Every refusal is a PyspecError with its reason, before anything is allocated.

    file         as of `describe`
    is_isolated  as of `describe`; and kernels that passed their check in an earlier process are not checked again
    """
    n_thread = settings.threads if settings.threads > 0 else torch.get_num_threads()
    if settings.threads <= 0 and pick_device(settings.device).type == "cpu":
        n_thread = usual(min(n_thread, n_cores()))
    if settings.threads > n_cores():
        few = f"{n_cores()} processor{'s' * (n_cores() > 1)}"
        log.warning("-t %d: more threads than this process may use (%s) make it slower", n_thread, few)
    tiers, demoted = tiers_of(settings.kernels), frozenset(settings.demoted)
    kernels = KernelContext(
        tiers, settings.exact, demoted, n_thread, is_isolated, settings.cpu_activations
    )
    with within(kernels):
        loaded = _load(path, settings, is_isolated, file)
        # with several ranks each has fewer
        return replace(loaded, kernels=replace(kernels, n_thread=torch.get_num_threads()))


def _load(path: Path, settings: EngineSettings, is_isolated: bool, file: GGUFFile | None) -> Loaded:
    began = time.perf_counter()
    d = widened(describe(path, settings, is_isolated=is_isolated, file=file))
    if d.template is not None and not is_isolated:
        d.template.warm()
    log.info("description: %.1f s", time.perf_counter() - began)
    if rope := stretch_words(d.file, d.rope):
        log.info("rope: %s", rope)
    if not d.is_cuda:
        why = (
            "C++ kernels"
            if (missing := missing_on_cpu()) is None
            else f"torch, slowly: kernels {missing}"
        )
        log.info("on a CPU ops run as %s", why)
    context = context_of(d.device)  # kept alive until kernels hold it
    with context.current():  # a plan asks the device, and takes nothing on another one
        plan = plan_memory(d)
        check_host(d)
        for line in filter(None, (*fit_lines(d), ring_note(d), missing_copy(d, plan))):
            log.info("%s", line)
        check_fit(
            here(d, plan),
            d.device,
            n_slot=settings.np,
            n_ctx=d.n_ctx,
            packed=d.dense is None,
            settings=d.settings,
            more=without(d),
        )
        cap_memory(d.device, d.settings)
        before = memory_snapshot(d.device) if d.is_cuda else None  # before child processes allocate any
        ranks = Ranks(d.settings.tp) if d.settings.tp > 1 else None
        preparation = _prepare(d, plan)
        host = plan_host(d)
        try:
            built = build(
                d, plan, ranks, preparation, before, cache_ram(d) if host is None else host.cache
            )
            d.file.end_ahead()
            return built
        except BaseException as e:
            reason = ranks.error if ranks is not None and isinstance(e, RankLost) else None
            if ranks is not None:
                ranks.close()
            if preparation is not None:
                preparation.close()
            if reason is not None:  # a rank's refusal; this one has only lost it
                raise reason from None
            raise


def _prepare(d: Description, plan: MemoryPlan) -> Preparation | None:
    """Start to compile and check the ops that the load will need."""
    try:
        return prepare.begin(asks_of(d), d.device, plan.total) if d.is_cuda else None
    except Exception:  # it only saves time
        log.exception("kernels are not prepared ahead")
        return None


def build(
    d: Description,
    plan: MemoryPlan,
    ranks: Ranks | None = None,
    preparation: Preparation | None = None,
    before: tuple[int, int, int] | None = None,
    cache: int | None = None,
) -> Loaded:
    """Allocate the planned memory, bind target and drafter, and warm up. preparation: runs beside the load until its results are needed.
    before: the `memory_snapshot` from which the load's use is logged. cache: bytes of the prefix cache on the host; None: as is free then."""
    shared = None if ranks is None else begin_ranks(d, plan, ranks)
    own = _movable(d)
    with _timed("weights", d.device, release=True), _few_threads(d), movable(d.device, KEPT):
        with movable(d.device, EMPTIED):
            table, memory = d.table(), allocate(d.own.parts(), d.sizes, d.device)
        cuts = cuts_of(d.config.tensors(d.file))
        take_layers(d.device)  # of loads that failed
        weights = Weights(
            *(d.file, d.device, d.dense),
            wide=plan.wide > 0,
            ranks=shared,
            cuts=cuts,
            rope=d.rope,
            placement=d.placement,
        )
        target = Decoder(d.config, weights, memory)
        own_layers = take_layers(d.device)
        if ranks is not None:
            memory = lead_ranks(target, memory, ranks.send)
    with _timed("drafter", d.device, release=True), _few_threads(d), movable(d.device, KEPT):
        drafter = _bind_drafter(d, plan, target, table)
        if ranks is not None:
            ranks.wait()
    encoder = None
    if d.projector is not None:
        timed = _timed("projector", d.encodes_on, release=True)
        with timed, movable(d.device, KEPT), open_gguf(d.projector.path) as file:
            encoder = Encoder.load(file, d.projector, d.encodes_on)
    host_bytes = cache_ram(d) if cache is None else cache
    loop = _loop(d, target, memory, table, drafter, host_bytes, encoder)
    loop.movable = own
    if (log_ := ExpertLog.of(own_layers, take_layers(d.device))) is not None:
        loop.worker.experts, loop.worker.uploads = log_, ExpertUploads(log_)
    attend_plan.reserve(d.device, attention_bytes(d))
    late = attend_plan.late(d.device)
    prepare.settle(late)
    if d.settings.warm_up:
        _warm_up(loop, d, plan)
    if loop.worker.uploads is not None:
        frozen = EXACT if d.settings.exact else "" if d.settings.moe_cache_mib > 0 else PLACED
        loop.experts = ExpertCache(loop.worker.uploads, frozen)
    if (learned := LearnedDrafting.of(d, loop.controller, loop.experts)) is not None:
        learned.recall()
    info = info_of(d, plan)
    disk = open_disk(loop, d.settings, info) if d.settings.cache_disk else None
    loop.use_disk(disk)
    if missing := unmet_tiers(d.device):
        log.warning("--kernels %s: %s", d.settings.kernels, missing)
    log_use = partial(_log_use, d.device, plan, before)
    if preparation is not None:
        preparation.finish(late, log_use)
    else:
        checker.close()  # ends the child that checks kernels, with its GPU memory
        log_use()
    return Loaded(loop, d.tokenizer, d.template, info, ranks, disk, learned)


def _movable(d: Description) -> MovableMemory | None:
    """The memory of a model that may be parked, which the load allocates from now on."""
    if not d.is_cuda:
        return None
    found = None
    if d.settings.parks:
        try:
            found = MovableMemory(d.device)
        except DeviceError as e:
            log.warning("this model can not be parked: %s", e)
    context_of(d.device).movable = found
    return found


def _warm_up(loop: Loop, d: Description, plan: MemoryPlan) -> None:
    with _timed("graphs and warm-up", d.device), gpu_lock(d.device):
        with torch.inference_mode():
            attend_plan.warm(d.device, d.n_ctx)
        if d.is_cuda:
            warmed = plan.activations + device_checkpoints(d) + start_bytes(d)
            warm_up(loop, d.tokenizer, d.n_overhang, warmed)
            temporary.release(d.device)  # pieces of the sizes of captures; rounds have theirs,
            hold(d.device, warmed)  # of this, which was given back with them
            loop.pictures.warm_up()
        if d.settings.check_tap_shift:
            round_ms = loop.controller.costs.verify(1)
            check_drafter(loop.worker, round_ms, d.tokenizer, d.template, d.n_overhang)


def _few_threads(d: Description) -> AbstractContextManager[None]:
    """Weights that stay packed are read and checked, and nothing large runs."""
    return nullcontext() if d.is_cuda or d.dense is not None else torch_alone()


def _log_use(device: torch.device, plan: MemoryPlan, before: tuple[int, int, int] | None) -> None:
    """Log the memory in use. Call it after children that check kernels have ended: four of them had 6.5 GiB."""
    if before is not None:
        log.info("memory in use: %s, planned %s", growth(before, device), size(plan.total))


def _bind_drafter(d: Description, plan: MemoryPlan, target: Target, table: SlotTable) -> Drafter | None:
    log.info("%s", d.draft.note)
    if d.draft.kind in ("none", SUFFIX):
        return None
    output = target.output if d.settings.tp == 1 and d.head is not None else None
    if head_for_drafts(d):
        output = Weights(d.file, d.device, d.dense, wide=plan.wide > 0).head()
    head = output if d.settings.tp > 1 else None
    if d.head is not None and plan.draft_head and output is not None:
        head = make_head(output, d.head, d.device) or head
    best = None
    if heads_together(d):
        assert isinstance(target.memory, TpMemory) and isinstance(target.output, Gathered)
        best = partial(target.memory.leader.best, target.output)
    options = DraftOptions(
        settings=d.settings,
        dense=d.dense,
        wide=plan.wide > 0,
        head=head,
        best=best,
        placement=d.draft_placement,
    )
    drafter = draft.find(d.draft.kind).load(d.draft, target, table, options)
    if not isinstance(drafter, Drafter):  # of another package
        raise ConfigError(
            f"drafter '{d.draft.kind}' can not be had: it loads no pyspec.draft.drafter.Drafter"
        )
    return drafter


def _loop(
    d: Description,
    target: Target,
    memory: Memory,
    table: SlotTable,
    drafter: Drafter | None,
    host_bytes: int,
    encoder: Encoder | None = None,
) -> Loop:
    s = d.settings
    make_arena = partial(_arena, target, table, arena_pages(d))
    arena = None if s.plain_loop else make_arena(d.width)
    if arena is None and d.is_cuda and not s.plain_loop:
        log.warning(
            "rounds are launched kernel by kernel, because graphs can not hold %s", run_by_torch()
        )
    if arena is not None and arena.pads and encoder is not None and memory.is_whole:
        arena.see(encoder.projector.width)
    # graphs pad batches to a bucket, so all sizes of a bucket take the same time
    most = most_rows(s.np, d.width)
    pads = arena is not None and arena.pads
    costs = Costs(verify=Timer(lambda n: bucket_of(n, most) or bucket(n)) if pads else Timer())
    controller = Controller(
        *(s.np, d.draft.longest),
        n_own=d.draft.n_draft,
        chained=d.draft.is_chain,
        block=d.draft.block,
        fixed=s.n_draft_fixed,
        costs=costs,
    )
    rules = PromptRules(
        min(s.ubatch or UBATCH, s.ubatch or d.batch),
        s.ubatch or d.batch,
        *(s.tpot, s.ttft, s.prompt_weight),
        n_free=d.batch,
        graph_of=no_graph if arena is None else arena.prompt_bucket,
        graphs_see=arena is not None and arena.shown is not None,
    )
    if arena is not None and drafter is not None:
        drafter.use_graphs(partial(make_arena, d.draft_width))
    kind = Worker if memory.is_whole else TpWorker
    worker = kind(target, memory, table, drafter, arena, d.draft.n_suffix)
    states = StateStore(device_checkpoints(d), host_bytes, start_bytes(d))
    return Loop(
        worker,
        controller,
        PrefixCache(table, memory, states, on=s.prefix_cache, every=s.checkpoint_every),
        RowLimits(decoding=s.ubatch or d.batch, prompts=d.batch),
        s.queue_limit,
        synth=synth_of(s, d.draft.longest),
        plain=s.plain_loop,
        rules=rules,
        suffixes=_suffixes(s),
        pictures=Pictures(worker, encoder, d.encodes_on, are_whole=d.are_whole),
    )


def _suffixes(s: EngineSettings) -> SuffixDrafts | None:
    for flag in s.idle_flags:
        log.warning(
            "%s has no effect: there are no suffix drafts (--spec-type suffix, or TYPE,suffix)", flag
        )
    if not s.n_suffix:
        return None
    return SuffixDrafts(
        s.n_suffix, least=s.suffix_min_prob, answer_bytes=s.suffix_cache << 20, shared=s.suffix_share
    )


def _arena(target: Target, table: SlotTable, n_page: int, width: int) -> Arena | None:
    """Static batches for CUDA graphs and recorded forwards, if every op of the model can be captured."""
    if not target.capturable:
        return None
    if target.device.type == "cpu":
        return HostArena(len(table.slots), n_page)
    if target.device.type != "cuda":
        return None
    return Arena(len(table.slots), n_page, target.device, width)


@contextmanager
def _timed(stage: str, device: torch.device, release: bool = False) -> Iterator[None]:
    """Log how long a part of the load took. release: return freed memory to the device."""
    began = time.perf_counter()
    progress.report(stage)
    outer = progress.part.set(stage)
    yield
    progress.part.reset(outer)
    progress.report(stage, 1.0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if release:
            temporary.release(device)
    seconds = time.perf_counter() - began
    fields = {"event": "loaded", "stage": stage, "seconds": round(seconds, 2)}
    log.info("%s: %.1f s", stage, seconds, extra={"fields": fields})


def info_of(d: Description, plan: MemoryPlan) -> EngineInfo:
    """Describe the loaded model for programs and people."""
    fields, c, tokenizer, rates = d.file.fields, d.config, d.tokenizer, d.settings.synth_rates
    piece = lambda i: "" if i is None else tokenizer.piece(i)  # noqa: E731
    return EngineInfo(
        sampling=recommended(fields),
        # As llama-server's; `general.name` is for people
        model_name="-".join(printable(d.path.name).split()),
        model_path=str(d.path),
        arch=c.arch,
        n_vocab=c.n_vocab,
        n_ctx=d.n_ctx,
        n_ctx_train=d.n_ctx_train,
        n_slot=d.settings.np,
        page_size=d.settings.page_size,
        n_queue=d.settings.queue_limit,
        n_embd=c.n_embd,
        n_params=sum(t.n_elements for t in d.file.tensors.values()),
        n_bytes=sum(t.n_bytes for t in d.file.tensors.values()),
        file_type=file_type_words(d.file.file_type_number),
        device=str(d.device),
        cpu_activations="" if d.is_cuda else d.settings.cpu_activations,
        draft_sampling=d.settings.draft_sampling,
        drafter=d.draft.kind,
        has_suffixes=d.draft.n_suffix > 0,
        draft_path=str(d.settings.draft_path or ""),
        n_draft_max=d.draft.longest,
        draft_note=d.draft.note,
        synthetic_len=d.settings.synth_len or (1.0 + sum(read_rates(rates)) if rates else 0.0),
        chat_template="" if d.template is None else d.template.source,
        bos_token=piece(tokenizer.bos_id),
        eos_token=piece(tokenizer.eos_id),
        eog_ids=tuple(sorted(tokenizer.eog)),
        n_overhang=d.n_overhang,
        memory=plan.by_purpose,
        rope=stretch_words(d.file, d.rope),
        mmproj=str(d.settings.mmproj or ""),
        image_min_tokens=d.settings.image_min_tokens,
        image_max_tokens=d.settings.image_max_tokens,
    )
