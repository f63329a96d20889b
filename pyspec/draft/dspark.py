"""DSpark drafter: DFlash's blocks, whose logits are corrected by the token before, and which say how sure they are.

Each row's logits get a bias that the token of the row before gives (Markov head), so the rows are chosen in order; the layers run once.
Where the file says so, rows predict the token behind their own, the anchor's row included: a block of n rows drafts n tokens. The
confidence head gives the chance that a token is accepted; `--spec-draft-p-min` cuts drafts by it. Its layers are Qwen3's, or DeepSeek-V4's
(`dspark_streams`). Source: llama.cpp `dflash`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyspec.config import EngineSettings
from pyspec.cuda.ops.embed.op import embed
from pyspec.cuda.ops.embed.ref import EmbedSpec
from pyspec.draft.dflash import DFlash, block_plan, bound
from pyspec.draft.dflash import requests as layer_requests
from pyspec.draft.dflash_file import MARKOV, check_is_dflash, drafter_tensors, read_layers
from pyspec.draft.drafter import DraftOptions, DraftPlan, TargetFile
from pyspec.draft.dspark_heads import BIAS, SURE, SURE_BIAS, DSparkConfig, DSparkNet
from pyspec.draft.dspark_streams import StreamsConfig, StreamsNet, read_streams
from pyspec.errors import ConfigError
from pyspec.gguf import GGUFFile
from pyspec.models.cuts import Cut, Units
from pyspec.models.part import LoadTypes, Request
from pyspec.models.target import Target
from pyspec.models.wants import HEAD, Want
from pyspec.slots.table import SlotTable


def recognises(file: GGUFFile) -> bool:
    return file.architecture == "dflash" and MARKOV in file.tensors


def read_config(file: GGUFFile) -> DSparkConfig:
    """The drafter's configuration; PairError with what is missing, if the file is for another drafter."""
    check_is_dflash(file, "DSpark", (MARKOV,))
    h = file.hparams
    if h.integer("hyper_connection.count", 0) > 0:
        return read_streams(file)
    return DSparkConfig(
        **vars(read_layers(file)),
        rank=file.tensors[MARKOV].shape[-1],
        from_anchor=h.flag("sample_from_anchor", True),
        is_sure=h.flag("has_confidence_head", SURE in file.tensors),
    )


def plan(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    if file is None:
        raise ConfigError("--spec-type dspark needs a draft file (-md)")
    c, n_vocab = read_config(file), target.config.n_vocab
    wants = tensors(c, file, target.config.n_embd, n_vocab)
    return block_plan(c, file, target, settings, wants, "dspark", requests)


def tensors(c: DSparkConfig, file: GGUFFile, n_target: int, n_vocab: int) -> dict[str, Want]:
    """The manifest, for a target of this width and vocabulary."""
    n_head = file.tensors[HEAD].shape[0] if HEAD in file.tensors else n_vocab
    wants = drafter_tensors(c, file, n_target) | {
        MARKOV: Want((n_vocab, c.rank)),
        BIAS: Want((n_head, c.rank), cut=Cut(0, (Units(n_head, "tokens", uneven=True),))),
    }
    if c.is_sure:
        wants[SURE] = Want((1, c.n_embd + c.rank))
        wants[SURE_BIAS] = Want((1,), optional=True)
    return wants


def requests(c: DSparkConfig, file: GGUFFile, on: LoadTypes) -> Iterator[Request]:
    """The ops that layers and heads ask for; products are those of the file."""
    yield from layer_requests(c, file, on)
    yield embed, EmbedSpec(on.device, file.tensors[MARKOV].type, c.rank)


def load(plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> DFlash:
    net = bind(plan, target, table, options)
    return DFlash(net, plan, table, target.device, options.settings.draft_p_min)


def bind(plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> DSparkNet:
    """The layers of this rank on the target's device."""
    assert plan.file is not None
    c = read_config(plan.file)
    kind = StreamsNet if isinstance(c, StreamsConfig) else DSparkNet
    return bound(kind, c, plan, target, table, options)
