"""Ray's `KVAwareRouter` before the replicas of `pyspec.serve.ray`. It knows their prefix caches, answers included, by their KV events.

Ray's tracker subscribes to each replica at the addresses that `routing_stats` names, and chooses by Dynamo's index: by the part of the
prompt that is cached there, and by the tokens that wait and run there. It runs in the HTTP server's process and needs no vLLM.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.llm._internal.serve.routing_policies.kv_aware.constants import REQUEST_TOKEN_IDS_KWARG
from ray.llm._internal.serve.routing_policies.kv_aware.kv_aware_router import KVAwareRouter
from ray.llm._internal.serve.routing_policies.kv_aware.kv_token_tracker import (
    KVTokenTracker,
    get_kv_token_tracker,
    set_kv_token_tracker,
)

from pyspec.engine.served import ServedEngine
from pyspec.errors import ConfigError
from pyspec.repeats import limited
from pyspec.serve.remote_core import Call, Packed
from pyspec.slots.images import routed

log = limited(__name__)

BATCH = 2048  # prompt tokens of a round: the unit in which waiting prompts count as load
EVENTS: Mapping[str, str] = {"kv_events": "tcp://*:0", "kv_events_replay": "tcp://*:0"}
"""Settings of a replica's engine: each picks its own ports, so several fit on a machine."""


def routing_stats(engine: ServedEngine) -> dict[str, Any]:
    """Where a replica publishes its KV events, as Ray's tracker reads it; empty without `kv_events`."""
    if not engine.publishers:
        return {}
    publisher, here = engine.publishers[0], ray.util.get_node_ip_address()
    at = {
        name: f"tcp://{here}:{urlsplit(address).port}"
        for name, address in (("endpoint", publisher.endpoint), ("replay_endpoint", publisher.replay))
        if address
    }
    return {
        "kv_event_metadata": {
            **at,
            "block_size": engine.info.page_size,
            "max_num_batched_tokens": BATCH,
            "dp_rank": 0,
        }
    }


def follower(engines: Any) -> Callable[[Any], TrackedRun]:
    """Start the tracker of the replicas behind a deployment's handle, before its first call and on the event loop that stays. Returns what
    lets the tracker hear of a call's progress. Raises ConfigError."""
    try:
        from dynamo.llm import SelectionService  # noqa: F401
    except ImportError as e:
        raise ConfigError(
            f"router=kv wants Dynamo's index: pip install ai-dynamo-runtime ({e})"
        ) from None
    tracker = KVTokenTracker(serve_deployment_id=engines.deployment_id)
    set_kv_token_tracker(tracker)
    return lambda running: TrackedRun(running, tracker)


class KVRouter(KVAwareRouter):
    """Ray's router, for calls that carry their tokens. Without a known replica it chooses at random."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        call = next(iter(pending_request.args), None) if pending_request is not None else None
        tracker = get_kv_token_tracker()
        if isinstance(call, Call) and tracker is not None and candidate_replicas:
            request = call.request
            asked = SimpleNamespace(
                args=[SimpleNamespace(max_tokens=request.max_tokens)],
                kwargs={
                    REQUEST_TOKEN_IDS_KWARG: [
                        *routed(request.prompt, request.images),
                        *request.resumed,
                    ]
                },
                metadata=pending_request.metadata,
            )
            try:
                # Ray asks again while the chosen replica is full
                await tracker.on_request_completed(pending_request.metadata.request_id)
                return list(await super().choose_replicas(candidate_replicas, asked))
            except Exception as e:  # noqa: BLE001 - the index is never the reason that a request fails
                log.warning("KV router: %s; a replica is chosen at random", e)
        return list(await super().choose_replicas(candidate_replicas))


class TrackedRun:
    """The answer to a call, whose progress the tracker hears."""

    def __init__(self, running: Any, tracker: KVTokenTracker) -> None:
        self._running, self._tracker = running, tracker

    async def __aiter__(self) -> AsyncIterator[Packed]:
        name, is_read = self._running.request_id, False
        try:
            async for packed in self._running:
                if not is_read and any(event[0] == "d" for event in packed):
                    is_read = True
                    await _heard(self._tracker.on_prefill_complete(name))
                yield packed
        finally:
            await _heard(self._tracker.on_request_completed(name))

    def cancel(self) -> None:
        self._running.cancel()


async def _heard(report: Awaitable[None]) -> None:
    """The index is never the reason that an answer ends."""
    try:
        await report
    except Exception as e:  # noqa: BLE001 - as above
        log.warning("KV router: %s", e)
