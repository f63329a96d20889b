"""The copy of the target's head for drafts: whether to make one, its type, and making it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from pyspec.draft.drafter import DraftPlan
from pyspec.errors import ConfigError
from pyspec.gguf import GGMLType, GGUFFile, TensorInfo
from pyspec.models import coarse
from pyspec.models.target import Matrix

log = logging.getLogger(__name__)

AUTO_HEAD = GGMLType.Q4_0


@dataclass(frozen=True)
class HeadCopy:
    """The target's head, and the type of its copy."""

    info: TensorInfo
    to: GGMLType


def plan_head(target: GGUFFile, draft: DraftPlan, wanted: str, *, is_streamed: bool) -> HeadCopy | None:
    """Plan the copy of the head that drafts go through; None to use the target's own.

    "auto" makes one if kernels read a large head once per drafted token (a chain). The drafts of a block share one read: a copy saves no
    more there than it costs in acceptance (docs/log.md).

    is_streamed  kernels read the packed head: on a CPU a copy has as many bytes to read
    """
    if wanted == "full" or (wanted == "auto" and not draft.is_chain):
        return None
    info = target.tensors["output.weight" if "output.weight" in target.tensors else "token_embd.weight"]
    to = AUTO_HEAD if wanted == "auto" else GGMLType[wanted.upper()]
    why = draft.no_copy
    if not why and (reason := coarse.refusal(info, to)):
        why = f"{info.name} stays as it is: {reason}"
    if wanted == "auto":
        return HeadCopy(info, to) if is_streamed and not why and coarse.is_worth(info) else None
    if why:
        raise ConfigError(f"--draft-head {wanted} makes no sense here: {why}")
    return HeadCopy(info, to)


def make_head(output: Matrix, head: HeadCopy, device: torch.device) -> Matrix | None:
    """Make the copy of `output`; None if no kernel takes it."""
    copy, to = coarse.coarse(output, head.info, head.to, device), head.to.name
    if copy is None:
        log.warning("drafts read the target's head as it is: no kernel here takes a copy in %s", to)
    else:
        log.info("drafts read a copy of the head in %s (%s in the file)", to, head.info.type.name)
    return copy
