"""Opens the prefix cache's tier on disk for a loop."""

from __future__ import annotations

import logging
from pathlib import Path

from pyspec.config import EngineSettings
from pyspec.device.lead import TpMemory
from pyspec.engine.load.ranks import Ranks
from pyspec.engine.loop.disk_share import OtherShares
from pyspec.engine.loop.disk_tier import DiskTier
from pyspec.engine.loop.loop import Loop
from pyspec.engine.loop.slot_actions import models_of
from pyspec.engine.policy.queue import worth_on
from pyspec.request import EngineInfo
from pyspec.slots.disk_folder import DiskFolder

log = logging.getLogger(__name__)


def open_disk(
    loop: Loop, s: EngineSettings, info: EngineInfo, ranks: Ranks | None = None
) -> DiskTier | None:
    """The tier of `--cache-disk`. Call it behind the warm-up, whose texts are not worth keeping."""
    if not s.prefix_cache:
        log.warning("--cache-disk is ignored: the prefix cache is off")
        return None
    assert s.cache_disk is not None
    others = None
    if ranks is not None:
        assert isinstance(loop.memory, TpMemory)
        others = OtherShares(loop.memory.leader)
        ranks.when_heard(others.hear)
    path, limit = Path(s.cache_disk).absolute(), s.cache_disk_size << 20
    device, layout = loop.worker.device.type, loop.imager().layout()

    def open_folder() -> DiskFolder:
        """On the tier's thread: it reads parts of the models' files."""
        identity = {
            "device": device,
            "exact": s.exact,
            "kernels": s.kernels,
            "cpu_activations": info.cpu_activations,
            "weights": s.weights,
            "draft_kv": [s.draft_kv_type, s.draft_kv_type_v],
            **models_of(info),
            **layout,
            **({"ranks": ranks.n} if ranks is not None else {}),
        }
        return DiskFolder(path, identity, limit, n_share=1 if ranks is None else ranks.n)

    return DiskTier(open_folder, loop.worker, loop.cache, worth_on(device), others)
