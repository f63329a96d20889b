"""Reading the keys of experts."""

from __future__ import annotations

from pyspec.cuda.ops.moe.ref import Router
from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile

ROUTERS: dict[int, Router] = {1: "softmax", 2: "sigmoid", 4: "sqrtsoftplus"}


def read_groups(file: GGUFFile) -> tuple[int, int]:
    """Groups of experts and the number of them that a row uses; (1, 1) where there are none."""
    h = file.hparams
    n = h.integer("expert_group_count", 0)
    return (n, h.integer("expert_group_used_count", n)) if n > 1 else (1, 1)


def read_router(file: GGUFFile, default: Router) -> Router:
    """How experts are scored; `default` where the file does not say."""
    h = file.hparams
    kind = h.integer("expert_gating_func", 0)
    if kind and kind not in ROUTERS:
        raise ModelError(
            f"{h.key('expert_gating_func')} is {kind}; {', '.join(map(str, ROUTERS))} are supported"
        )
    return ROUTERS.get(kind, default)
