"""Hands the changes of the prefix cache to the publisher of KV events, round by round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from pyspec.slots.blocks import CLEARED, BlockChange, BlockLog
from pyspec.slots.cache import PrefixCache

log = logging.getLogger(__name__)

Send = Callable[[Sequence[BlockChange]], None]


class BlockFeed:
    """The changes of one engine's cache. Used on the engine's thread. A failure here ends the events, and no request."""

    def __init__(self, cache: PrefixCache, send: Send) -> None:
        self._cache, self._send = cache, send
        self._log: BlockLog | None = cache.log_blocks()

    def send_news(self) -> None:
        """Send the changes since the last call, if there are any."""
        if self._log is None:
            return
        try:
            if changes := self._log.take(self._cache.growing()):
                self._send(changes)
        except Exception:
            log.exception("KV events end: the cache's changes could not be collected")
            self.end()

    def end(self) -> None:
        """The cache is gone, or is followed no longer: routers forget its blocks."""
        if self._log is not None:
            self._log = None
            self._cache.log_no_blocks()
            self._send(CLEARED)
