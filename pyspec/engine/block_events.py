"""KV events: the changes of the prefix cache over ZeroMQ, in the format that vLLM's routers read (docs/routers.md).

`publish` numbers a batch and queues it; a thread of its own packs and sends it. Nothing here waits for a reader. A batch that finds the
queue full is dropped, and its number is missing from the stream. All blocks follow as soon as the queue is empty, so readers know the cache
again. They also answer a replay from a number that is not kept any more.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyspec.config import EngineSettings
from pyspec.errors import ConfigError
from pyspec.repeats import limited
from pyspec.slots.blocks import BlockChange, BlockMirror, BlocksRemoved, BlocksStored, anew

log = limited(__name__)

MEDIUM = "GPU"  # routers' name of the memory that forwards read, on CPUs, too
QUEUE = 10_000  # batches that wait for the thread
READER = 10_000  # batches that wait for a slow reader, each
REPLAY_BYTES = 256 << 20  # of batches kept for replays, besides their number
MOST_PEERS = 64  # connections to one address; further ones are closed
MOST_REPLAYS = 8  # that their readers have not read: further ones are not answered
END = (-1).to_bytes(8, "big", signed=True)  # the number behind the last batch of a replay
CLOSE_S = 2.0
HERE = ("*", "0.0.0.0", "[::]", "127.0.0.1", "[::1]", "localhost")

# vLLM's fields in its order, behind the tag; `token_ids` and `block_size` are those of the blocks, LoRA is never used
STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
)  # fmt: skip
REMOVED = ("block_hashes", "medium")


def event_of(change: BlockChange, form: str) -> Any:
    """A change as vLLM writes it: a map with a `type` ("map"), or the values in order behind the tag ("array")."""
    names: tuple[str, ...]
    if isinstance(change, BlocksStored):
        tag, names = "BlockStored", STORED
        values: tuple[Any, ...] = (
            *(change.hashes.tolist(), change.parent, change.tokens.tolist()),
            *(change.block_size, None, MEDIUM, None),
        )
    elif isinstance(change, BlocksRemoved):
        tag, names, values = "BlockRemoved", REMOVED, (change.hashes.tolist(), MEDIUM)
    else:
        tag, names, values = "AllBlocksCleared", (), ()
    return [tag, *values] if form == "array" else {"type": tag, **dict(zip(names, values, strict=True))}


def of_rank(endpoint: str, rank: int) -> str:
    """The address of a replica, as vLLM numbers those of a data-parallel group: the port plus its rank, or a suffix where there is no port.
    Port 0 or * picks one for each. "" stays ""."""
    base, _, port = endpoint.rpartition(":")
    if not rank or not endpoint:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    return f"{base}:{int(port) + rank if port.isdigit() and int(port) else port}"


def _taken(path: Path) -> str:
    """Why a socket can not be made at this path, although ZeroMQ would put one in its place; "" if it can. "@name" is no path."""
    if str(path).startswith("@") or not path.exists():
        return ""
    if not path.is_socket():
        return "is a file, and no socket"
    with socket.socket(socket.AF_UNIX) as other, suppress(OSError):
        other.connect(str(path))
        return "another program listens there"
    return ""  # of a program that has ended


def is_here(endpoint: str) -> bool:
    """An address of this machine, at which readers connect; else the publisher connects to a reader."""
    scheme, _, rest = endpoint.partition("://")
    return scheme != "tcp" or rest.rpartition(":")[0] in HERE


class BlockPublisher:
    """Publishes batches of changes. Safe to call from any thread.

    endpoint   the address in use, with its port
    replay     that of replays; "" without
    rank       number of the replica whose cache it publishes
    n_batch    batches numbered so far; n_dropped: those of them that found the queue full
    """

    def __init__(
        self, settings: EngineSettings, clock: Callable[[], float] = time.time, *, rank: int = 0
    ) -> None:
        """Listen at the settings' addresses. Raises ConfigError if a package is missing or an address can not be used."""
        try:
            import msgpack
            import zmq
        except ImportError:
            raise ConfigError("--kv-events needs two packages: pip install pyzmq msgpack") from None
        self._zmq, self._pack, self._clock, self.rank = zmq, msgpack.packb, clock, rank
        events, replay = (of_rank(e, rank) for e in (settings.kv_events, settings.kv_events_replay))
        self._form, self._topic = settings.kv_events_format, settings.kv_events_topic.encode()
        self._context = zmq.Context()
        self._context.linger = 0
        self._pub, self._router = self._context.socket(zmq.PUB), None
        self._pub.sndhwm = READER
        self._peers: dict[Any, set[int]] = {}  # by a socket's monitor: its connections' file descriptors
        try:
            self.endpoint, self.replay = self._attach(self._pub, events, "--kv-events"), ""
            if replay:
                self._router = self._context.socket(zmq.ROUTER)
                self._router.sndhwm = settings.kv_events_buffer + 1
                self._router.copy_threshold = 0  # replays share the bytes of the batches that are kept
                self.replay = self._attach(self._router, replay, "--kv-events-replay")
        except ConfigError:
            self._context.destroy(0)
            raise
        self.n_batch = self.n_dropped = 0
        self._numbers = itertools.count()
        self._waiting: deque[tuple[int, float, Sequence[BlockChange]]] = deque()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._most_kept, self._n_kept_byte = settings.kv_events_buffer, 0
        self._replays: list[
            Any
        ] = []  # zmq.MessageTracker of the last message of each, which may be unread
        self._mirror, self._is_due = BlockMirror(), False  # due: all blocks, after a drop
        self._lock = threading.Lock()
        self._is_closing = False
        self._bell_out, self._bell = os.pipe()
        for end in (self._bell_out, self._bell):
            os.set_blocking(end, False)
        self._thread = threading.Thread(target=self._run, name="pyspec-kv-events", daemon=True)
        self._thread.start()
        label = f" of replica {rank}" * (settings.replicas > 1)
        replays = f", replays at {self.replay}" * bool(self.replay)
        log.info("KV events%s at %s%s", label, self.endpoint, replays)
        if self.endpoint.startswith(("tcp://0.0.0.0", "tcp://[::]")):
            log.warning(
                "KV events: any machine that reaches %s reads the prompts' tokens", self.endpoint
            )

    def _attach(self, sock: Any, endpoint: str, flag: str) -> str:
        """Bind or connect. Returns the address in use."""
        try:
            if not is_here(endpoint) and sock is self._pub:
                sock.connect(endpoint)
                return endpoint
            if endpoint.startswith("ipc://") and (why := _taken(Path(endpoint.removeprefix("ipc://")))):
                raise ConfigError(f"{flag} {endpoint}: {why}; use another path")
            self._peers[sock.get_monitor_socket()] = set()
            sock.bind(endpoint)
        except self._zmq.ZMQError as e:
            raise ConfigError(
                f"{flag} {endpoint}: {self._zmq.strerror(e.errno or 0)}; use another address"
            ) from None
        return str(sock.last_endpoint.rstrip(b"\0").decode())

    def publish(self, changes: Sequence[BlockChange]) -> None:
        """Queue one batch. Never waits."""
        with self._lock:
            if self._is_closing:
                return
            number = next(self._numbers)
            self.n_batch = number + 1
            self._mirror.take(changes)
            if len(self._waiting) >= QUEUE:
                self.n_dropped += 1
                self._is_due = True
                log.warning("KV events: batch %d is dropped, because %d wait", number, QUEUE)
                return
            self._waiting.append((number, self._clock(), changes))
            self._ring()

    def close(self) -> None:
        """Send what waits, within CLOSE_S, and free the addresses."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # it rings already
            os.write(self._bell, b"\0")

    # -- on its thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._bell_out, self._zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, self._zmq.POLLIN)
        for monitor in self._peers:
            poller.register(monitor, self._zmq.POLLIN)
        try:
            while True:
                for source, _ in poller.poll():
                    if source is self._router:
                        self._replay_to_one()
                    elif source in self._peers:
                        self._bound(source)
                    else:
                        os.read(self._bell_out, 1 << 16)
                is_last = self._is_closing
                self._send_all()
                if is_last:
                    return
        except Exception:
            log.exception("KV events end: their thread failed")
            self._is_closing = True
        finally:
            self._context.destroy(int(1e3 * CLOSE_S / 2))
            with self._lock:
                os.close(self._bell_out)
                os.close(self._bell)
                self._bell = -1

    def _bound(self, monitor: Any) -> None:
        """Count a connection that has come or gone, and close one beyond MOST_PEERS: each has a queue and a file descriptor."""
        kind, fd = struct.unpack("=hi", monitor.recv_multipart()[0])
        peers = self._peers[monitor]
        if kind in (self._zmq.EVENT_DISCONNECTED, self._zmq.EVENT_CLOSED):
            peers.discard(fd)
        elif kind == self._zmq.EVENT_ACCEPTED:
            peers.add(fd)
            if len(peers) > MOST_PEERS:
                log.warning("KV events: %d readers are connected: closing a new one", MOST_PEERS)
                with suppress(OSError), socket.socket(fileno=os.dup(fd)) as peer:
                    name = peer.getsockname()  # another file may have its number by now
                    where = f":{name[1]}" if isinstance(name, tuple) else str(name)
                    if any(each.endswith(where) for each in (self.endpoint, self.replay)):
                        peer.shutdown(socket.SHUT_RDWR)

    def _send_all(self) -> None:
        """Send the batches that wait, and behind them all blocks if some were dropped."""
        while True:
            while self._waiting:
                number, at, changes = self._waiting.popleft()
                self._send(number, self._packed(at, changes))
            with self._lock:
                if self._waiting:
                    continue
                if not self._is_due:
                    return
                self._is_due, number = False, next(self._numbers)
                self.n_batch, blocks = number + 1, self._mirror.blocks()
            self._send(number, self._packed(self._clock(), anew(blocks)))

    def _packed(self, at: float, changes: Sequence[BlockChange]) -> bytes:
        return bytes(self._pack([at, [event_of(change, self._form) for change in changes], self.rank]))

    def _send(self, number: int, body: bytes) -> None:
        """Send a batch, and keep it for replays."""
        self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), body])
        if self._router is None:
            return
        self._kept.append((number, body))
        self._n_kept_byte += len(body)
        while len(self._kept) > self._most_kept or self._n_kept_byte > REPLAY_BYTES:
            self._n_kept_byte -= len(self._kept.popleft()[1])

    def _replay_to_one(self) -> None:
        """Answer a request for the batches from a number on: each kept one, or all blocks if the first ones are gone; then END with nothing."""
        assert self._router is not None
        reader, *frames = self._router.recv_multipart()
        if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
            log.warning(
                "KV events: a replay was asked for with %d frames; want one of 8 bytes", len(frames)
            )
            return
        self._replays = [last for last in self._replays if not last.done]
        if len(self._replays) >= MOST_REPLAYS:
            log.warning("KV events: a replay is not sent, because %d are not read yet", MOST_REPLAYS)
            return
        first = int.from_bytes(frames[1], "big")
        batches = [(number, body) for number, body in self._kept if number >= first]
        if first < (self._kept[0][0] if self._kept else self.n_batch):
            with self._lock:
                last, blocks = self.n_batch - 1, self._mirror.blocks()
            batches = [(last, self._packed(self._clock(), anew(blocks)))]
        for number, body in batches:
            self._router.send_multipart([reader, b"", number.to_bytes(8, "big"), body], copy=False)
        self._replays.append(
            self._router.send_multipart([reader, b"", END, b""], copy=False, track=True)
        )


def publishers_of(settings: EngineSettings) -> tuple[BlockPublisher, ...]:
    """One publisher for each replica, or none, as the settings ask. Raises ConfigError."""
    made: list[BlockPublisher] = []
    try:
        for rank in range(settings.replicas if settings.kv_events else 0):
            made.append(BlockPublisher(settings, rank=rank))
    except BaseException:
        for publisher in made:
            publisher.close()
        raise
    return tuple(made)
