"""The bytes of a description: everything that a load will allocate, counted before it does."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from pyspec.cuda.ops.attend import plan as attend_plan
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.cuda.ops.linear import unpacked
from pyspec.cuda.ops.linear.op import partial_bytes
from pyspec.cuda.ops.moe.host import staging_bytes
from pyspec.cuda.ops.moe.lane import JOB_ROWS
from pyspec.cuda.ops.peer_sum.places import Places
from pyspec.draft.drafter import OWN_HEAD
from pyspec.engine.plan.describe import Description, arena_pages, rings_of
from pyspec.engine.plan.memory_plan import (
    NO_COPIES,
    PIECE_BYTES,
    SPARE_BYTES,
    ForwardSizes,
    HostPlan,
    MemoryPlan,
    checkpoint_bytes,
    free_bytes,
    memory_bytes,
    rank_bytes,
    size,
    with_copies,
    with_head,
    workspace_bytes,
)
from pyspec.engine.plan.placement import N_POOL, in_host
from pyspec.models import coarse
from pyspec.models.blocks.gated_part import GatedPart
from pyspec.models.blocks.moe import Experts
from pyspec.models.blocks.together import Together
from pyspec.models.kernels import ForwardNeeds, needs_of_model
from pyspec.models.part import AttentionShape, PartSpec
from pyspec.models.wants import EMBEDDING, HEAD, TOKEN_INPUTS
from pyspec.models.weight_bytes import n_large, repacked_bytes, shares_of, weight_bytes, wide_bytes
from pyspec.slots.arena import BUCKETS, PROMPTS, bucket_of, graph_shapes, most_rows
from pyspec.slots.kv_types import KvFormat
from pyspec.slots.parts import Paged, Recurrent

PACKING_BYTES = 128 << 20  # of the pieces of a matrix that is packed
STREAM_BYTES = 64 << 20  # cuBLAS's workspaces of a stream and of its graphs, on Hopper
MOST_STARTS = 4  # states where short prompts end, which are kept on the device


def plan_memory(d: Description) -> MemoryPlan:
    """Bytes of everything that will be allocated; optional copies only where there is room for them."""
    s = d.settings
    own = d.own.parts()
    kv, state = memory_bytes(own, d.sizes)
    shares = shares_of(d.file, d.config.tensors(d.file), s.tp)
    draft_kv = sum(memory_bytes(d.draft.layers, d.draft_sizes)) - s.np * _share_bytes(d)
    # of a drafter that is not in the target's
    own_file = None if d.draft.file is d.file else d.draft.file
    draft_shares = {} if own_file is None else shares_of(own_file, d.draft.wants, d.draft.n_rank)
    unread, own_unread = _unread(d) | in_host(d.placement, shares), in_host(d.draft_placement, ())
    if own_file is None:
        unread |= own_unread
    read = [t for name, t in shares.items() if name not in unread]
    read += [t for name, t in draft_shares.items() if name not in own_unread]
    weights = weight_bytes(d.file, d.dense, d.is_cuda, unread, shares) + _tied_head(d)
    n_wide = sum(map(wide_bytes, (shares, draft_shares))) if d.dense is None else 0
    if d.in_host or d.away:  # weights on the card are worth more than copies
        n_wide = 0
    needs = _needs(d)
    activations, workspace = _workspace(d, needs)
    workspace += attention_bytes(d)
    if d.is_cuda:
        workspace += rank_bytes(s.tp) if s.tp > 1 else 0
        workspace += d.draft.graph_bytes + PIECE_BYTES * n_large(read)
    arch = unpacked.arch_on(d.device) if d.assumed is None else d.assumed.arch
    if d.dense is None and arch:
        if d.assumed is not None:
            n_sm = d.assumed.n_sm
        else:
            n_sm = torch.cuda.get_device_properties(d.device).multi_processor_count
        workspace += partial_bytes(arch, n_sm)
    plan = MemoryPlan(
        weights=weights,
        kv=kv,
        state=state - s.np * checkpoint_bytes(own, d.sizes) + device_checkpoints(d) + start_bytes(d),
        draft_weights=0
        if own_file is None
        else weight_bytes(own_file, d.dense, d.is_cuda, own_unread.union(d.draft.shared), draft_shares),
        draft_kv=draft_kv,
        expert_cache=cache_bytes(d),
        staging=max(
            [staging_bytes(b.expert, may_move=True) for b, _ in d.in_host]
            + [staging_bytes(b.dense, may_move=False) for b in d.away],
            default=0,
        ),
        draft_head=head_for_drafts(d),
        projector=projector_bytes(d),
        activations=activations + needs.scratch + _ring_tables(d),
        workspace=workspace,
        divides_draft=d.draft.n_rank > 1,
    )
    if d.head is not None:
        plan = with_head(
            plan, coarse.coarse_bytes(d.head.info, d.head.to, d.device), s.draft_head, d.room
        )
    n_wide = 0 if s.exact or arch in NO_COPIES or not n_wide else n_wide + STREAM_BYTES
    plan = with_copies(plan, n_wide, d.device, s.weights, d.room)
    if d.dense is not None or s.exact or plan.wide:
        return plan
    return replace(plan, workspace=plan.workspace + unpacked.scratch_bytes(arch))


def projector_bytes(d: Description) -> int:
    """Of images on the model's device: the encoder's weights, activations of the largest one, and on a GPU what libraries keep for its stream, and
    rows that forwards read: those of one forward, of a graph of prompts, and of two images that are read in part."""
    p = d.projector
    if p is None:
        return 0
    rows = 4 * p.width * (d.batch + 2 * p.most_rows + PROMPTS[-1]) if d.is_cuda else 0
    if d.encodes_on.type != d.device.type:
        return rows
    size = 2 if d.is_cuda else 4
    return rows + (STREAM_BYTES if d.is_cuda else 0) + p.weight_bytes(size) + p.work_bytes(size)


def cache_bytes(d: Description) -> int:
    """Slots of experts on the card, rounded up as the allocator does."""
    return sum(n * block.expert + N_POOL * PIECE_BYTES for block, n in d.in_host if n)


def load_bytes(d: Description) -> int:
    """Memory that a load takes for a while: the largest matrix as in the file, once more because memory for such is not given
    back in between, and pieces of it while they are packed. A table is not packed."""
    away = in_host(d.placement, d.file.tensors) | _unread(d) | {TOKEN_INPUTS}
    return 2 * max(t.n_bytes for name, t in d.file.tensors.items() if name not in away) + PACKING_BYTES


def experts_in(parts: Iterable[PartSpec]) -> Iterator[Experts]:
    """Those among parts, and within them."""
    for part in parts:
        if isinstance(part, Experts):
            yield part
        inner = (
            [part.part]
            if isinstance(part, GatedPart)
            else part.of.specs
            if isinstance(part, Together)
            else ()
        )
        yield from experts_in(inner)


def job_bytes(d: Description) -> int:
    """Rows in f32, their choices, and what each chosen expert makes of them: one job at a time."""
    specs = [spec for block in d.own.blocks for spec in experts_in(block.specs)]
    widths = [(spec.latent or d.own.n_embd, spec.n_used) for spec in specs] or [(d.own.n_embd, 1)]
    return max(JOB_ROWS * (4 * n + n_used * (4 * n + 8)) for n, n_used in widths)


def placed_bytes(d: Description) -> int:
    """Experts and other feed-forwards in host memory, as in the file."""
    return sum(block.dense for block in d.away) + sum(block.experts for block, _ in d.in_host)


def plan_host(d: Description) -> HostPlan | None:
    """Memory of the host where experts, other feed-forwards or tables are there; None where there are none. The prefix cache has what they leave of
    its share."""
    n, free, computed = d.settings.replicas, host_bytes(d), placed_bytes(d)
    weights = n * (computed + sum(t.n_bytes for t in d.tables_away))
    if not weights:
        return None
    jobs = n * job_bytes(d) if computed else 0
    left = max(0, free - weights - jobs - SPARE_BYTES)
    return HostPlan(weights, jobs, min(n * cache_ram(d), left))


def cache_ram(d: Description) -> int:
    """Host memory of one engine's prefix cache, where no experts want it."""
    return min(d.settings.cache_ram << 20, host_bytes(d) // 2) if d.settings.prefix_cache else 0


def host_bytes(d: Description) -> int:
    """Free memory of the host, or of the assumed one."""
    return (d.assumed.ram if d.assumed is not None else 0) or free_bytes(torch.device("cpu"))


def missing_copy(d: Description, plan: MemoryPlan) -> str:
    """The message of a load where a copy of the head has no room; "" where there is one, or none is wanted."""
    if d.head is None or plan.draft_head:
        return ""
    n_bytes = coarse.coarse_bytes(d.head.info, d.head.to, d.device)
    return f"drafts read the target's head as it is: no room for a coarse copy of {size(n_bytes)}"


def ring_note(d: Description) -> str:
    """What layers with a window keep, for the log; "" of models without any."""
    parts = [part for layer in d.own.parts() for part in layer.values()]
    n_window = sum(isinstance(part, Paged) and part.window > 0 for part in parts)
    rings = rings_of(d)
    if not n_window or d.settings.swa_full:
        return ""
    if not rings:
        return f"{n_window} layers with a window keep the whole text: rings would save little"
    n_token = max(ring.n_page(d.sizes) for ring in rings) * d.settings.page_size
    return (
        f"{len(rings)} layers with a window keep {n_token} tokens a slot, and {len(parts) - len(rings)} the whole text; "
        "prompts continue from checkpoints (--swa-full keeps all)"
    )


def _unread(d: Description) -> frozenset[str]:
    """Tensors behind the trunk, which a drafter has where it drafts from them; else they are not read."""
    if d.draft.file is d.file:
        return frozenset()
    behind, n_layer = re.compile(r"blk\.(\d+)\."), d.config.n_layer
    return frozenset(
        name for name in d.file.tensors if (m := behind.match(name)) and int(m[1]) >= n_layer
    )


def _tied_head(d: Description) -> int:
    """Of an embedding that is the head as well: rows are read as they lie in the file, on a GPU or in host memory, and a GPU's product has a form of its
    own; of several ranks each has all of the embedding and its share of the head's rows."""
    on_one = d.settings.tp == 1 and (not d.is_cuda or EMBEDDING in d.placement.tables)
    if HEAD in d.file.tensors or on_one:
        return 0
    return -(-_bytes_of(d, EMBEDDING) // d.settings.tp)


def head_for_drafts(d: Description) -> int:
    """The first of several ranks drafts alone, with a whole head: bytes of it, if the drafter has none of its own, and ranks do not read
    theirs together for it."""
    if d.settings.tp == 1 or d.draft.file is None or d.draft.no_copy == OWN_HEAD or heads_together(d):
        return 0
    return _bytes_of(d, HEAD if HEAD in d.file.tensors else EMBEDDING)


def heads_together(d: Description) -> bool:
    """Whether drafts go through each rank's share of the head, instead of a copy of it."""
    return d.settings.tp > 1 and (d.draft.best_only or d.draft.n_rank > 1) and d.head is None


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
    return d.settings.cache_device << 20 or d.settings.np * (
        checkpoint_bytes(d.own.parts(), d.sizes) + _share_bytes(d)
    )


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


def _workspace(d: Description, needs: ForwardNeeds) -> tuple[int, int]:
    """(activations, workspace): bytes of forwards besides weights and slots."""
    s, c = d.settings, d.own
    most = most_rows(s.np, d.width)
    graphs = graph_shapes(s.np, d.width, singles=d.draft.n_held > 0, most=most) if d.is_cuda else []
    # Of a verify of all slots, of a draft of blocks
    rows, blocks = s.np * d.width, s.np * d.draft.overhang
    in_graphs = d.draft.is_chain and blocks <= BUCKETS[-1]
    large = max(rows if rows > most else 0, 0 if in_graphs else blocks)
    sizes = ForwardSizes(
        n_row=d.batch,
        row=needs.row,
        n_embd=c.n_embd,
        n_hidden=c.n_hidden,
        n_vocab=c.n_vocab,
        n_column=-(-c.n_vocab // s.tp),
        graph_rows=sum(bucket_of(n, most) or n for n, _ in graphs),
        graph_most=max((bucket_of(n, most) or n for n, _ in graphs), default=0),
        prompt_rows=_prompt_rows(d) if needs.holds_prompts else 0,
        large_rows=large,
        shared_rows=(bucket_of(rows, most) or rows) if s.tp > 1 else 0,
        n_tap=len(d.draft.taps),
        n_held=d.draft.n_held,
        key_bytes=d.n_ctx
        * max(_library_bytes(c.attention, d.kv), _library_bytes(d.draft.attention, d.draft_kv)),
    )
    return workspace_bytes(sizes, cuda=d.is_cuda)


def _library_bytes(attention: Iterable[AttentionShape], kv: KvFormat) -> int:
    """Bytes of a token's keys and values of the widest layer, as libraries take them."""
    size = sum(2 if of.is_float else 4 for of in (kv.k, kv.v))
    return size * max((a.n_kv_head * a.head_dim for a in attention), default=0)


def _prompt_rows(d: Description) -> int:
    """Rows of all graphs of prompts."""
    if not d.is_cuda or d.settings.exact:
        return 0
    most, tp = min(d.batch, d.n_ctx), d.settings.tp
    if tp > 1:  # NCCL's sums are in no such graph
        most = min(most, Places(tp).most // d.own.n_embd)
    return sum(n for n in PROMPTS if n <= most)


def _needs(d: Description) -> ForwardNeeds:
    """Those of the largest forward, a graph's padding included."""
    n_row, most = d.settings.np * d.width, most_rows(d.settings.np, d.width)
    n_row = max(d.batch, bucket_of(n_row, most) or n_row)
    return needs_of_model(d.own, d.file, d.on, n_row, d.n_ctx + d.n_overhang)


def _ring_tables(d: Description) -> int:
    """Bytes of the page tables that a forward makes for rings, one for each size of rings."""
    n_size = len({ring.n_page(d.sizes) for ring in rings_of(d)})
    return 8 * n_size * d.settings.np * arena_pages(d)


def attention_bytes(d: Description) -> int:
    """Of partial sums of attention, which target and drafter share."""
    s, n_key = d.settings, d.n_ctx + d.n_overhang + d.settings.page_size
    n_row, most = s.np * d.draft_width, most_rows(s.np, d.draft_width)
    widest = max(d.n_overhang, -(-(bucket_of(n_row, most) or n_row) // s.np))  # with a graph's padding
    shapes = [(a, d.kv) for a in d.own.attention] + [(a, d.draft_kv) for a in d.draft.attention]
    specs = [
        AttendSpec(d.device, a.n_head, a.n_kv_head, a.head_dim, 1.0, kv, n_value=a.n_value)
        for a, kv in dict.fromkeys(shapes)
    ]
    if d.assumed is not None:
        return max(
            (
                attend_plan.bytes_on(d.assumed.arch, d.assumed.n_sm, x, s.np, n_key, widest)
                for x in specs
            ),
            default=0,
        )
    return max((attend_plan.workspace_bytes(spec, s.np, n_key, widest) for spec in specs), default=0)
