"""Opens the prefix cache's tier on disk for a loop."""

from __future__ import annotations

import logging
from pathlib import Path

from pyspec.config import EngineSettings
from pyspec.engine.loop.disk_tier import DiskTier
from pyspec.engine.loop.loop import Loop
from pyspec.engine.loop.slot_actions import models_of
from pyspec.engine.policy.queue import worth_on
from pyspec.request import EngineInfo
from pyspec.slots.disk_folder import DiskFolder

log = logging.getLogger(__name__)


def open_disk(loop: Loop, s: EngineSettings, info: EngineInfo) -> DiskTier | None:
    """The tier of `--cache-disk`. Call it behind the warm-up, whose texts are not worth keeping."""
    if not s.prefix_cache:
        log.warning("--cache-disk is ignored: the prefix cache is off")
        return None
    assert s.cache_disk is not None
    path, limit = Path(s.cache_disk).absolute(), s.cache_disk_size << 20
    device, layout = loop.worker.device.type, loop.imager().codec.layout()

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
            **({"ranks": s.tp} if s.tp > 1 else {}),
        }
        return DiskFolder(path, identity, limit, loop.table.handles)

    return DiskTier(open_folder, loop.worker, loop.cache, worth_on(device))
