"""MTP drafter: the model's own next-token block, chained to any depth (`chain.py`).

The block pairs a token with the target's hidden state of the position before it; chaining feeds its own, or goes on to the next of several
blocks (`models/mtp.py`). It stands in the target's file behind the trunk, or in a file of its own. The model describes it (`models.mtp.MtpOfBlock`).
"""

from __future__ import annotations

from functools import partial

from pyspec.config import EngineSettings
from pyspec.draft.chain import Chain, graph_bytes, most_waiting
from pyspec.draft.drafter import OWN_HEAD, DraftOptions, DraftPlan, TargetFile, own_memory
from pyspec.draft.draws import draw_bytes
from pyspec.errors import PairError
from pyspec.gguf import GGUFFile
from pyspec.models.checks import check_tensors
from pyspec.models.kernels import of_mtp
from pyspec.models.model import ModelSpec
from pyspec.models.mtp import MtpOfBlock
from pyspec.models.mtp_block import bound
from pyspec.models.ropes import flags_of
from pyspec.models.target import Target
from pyspec.models.weights import Weights
from pyspec.slots.table import SlotTable

N_DRAFT = 3  # tokens a round, unless a number is asked for
OWN = "nextn.shared_head_head.weight"


def recognises(file: GGUFFile) -> bool:
    """True if the file carries the block itself; the metadata key alone proves nothing."""
    return file.has_mtp


def plan(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    file, c = target.file if file is None else file, target.config
    if not recognises(file):
        raise PairError("no MTP block in the file: it has no nextn.eh_proj tensor")
    check_pair(file, c)
    n_draft, n_waiting = settings.n_draft_max or N_DRAFT, most_waiting(settings.np)
    mtp = mtp_of(c).in_file(file, n_draft)
    check_tensors(file, wants := mtp.tensors(file, target.file))
    return DraftPlan(
        kind="mtp",
        n_draft=n_draft,
        observes="hidden",
        draws=settings.draft_sampling,
        file=file,
        layers=mtp.layers(),
        shared=mtp.shared(file, target.file),
        attention=mtp.attention,
        wants=wants,
        requests=partial(of_mtp, mtp, file),
        n_waiting=n_waiting,
        graph_bytes=graph_bytes(settings.np, max(n_draft + 1, n_waiting), c, settings.draft_p_min)
        + draw_bytes(settings, n_draft, c.n_vocab),
        no_copy=OWN_HEAD if all(one.place(file).has(OWN) for one in mtp.each) else "",
    )


def mtp_of(c: ModelSpec) -> MtpOfBlock:
    """The MTP block of an architecture. Raises PairError if it has none."""
    if c.mtp is None:
        raise PairError(f"{c.arch} has no MTP block that pyspec can run")
    return c.mtp


def check_pair(file: GGUFFile, c: ModelSpec) -> None:
    """Refuse a block of another model, with the numbers that differ."""
    a = file.architecture
    if a != c.arch:
        raise PairError(f"the MTP file is {a}, the target is {c.arch}")
    h = file.hparams
    n_layer = h.integer("block_count") - h.integer("nextn_predict_layers", 0)
    n_embd = h.integer("embedding_length")
    if n_layer != c.n_layer or n_embd != c.n_embd:
        raise PairError(
            f"the MTP block follows layer {n_layer} of width {n_embd}; "
            f"the target has {c.n_layer} layers of width {c.n_embd}"
        )


def load(plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> Chain:
    assert plan.file is not None
    rope = flags_of(options.settings)
    weights = Weights(plan.file, target.device, rope=rope, **options.of_weights)
    memory = own_memory(plan, table, options, target.device)
    mtp = mtp_of(target.config).in_file(plan.file, plan.n_draft)
    block, *later = bound(mtp, weights, memory, target, options.head, plan.shared)
    p_min, n_vocab = options.settings.draft_p_min, target.n_vocab
    return Chain(block, plan, table, target.device, p_min, n_vocab, later)
