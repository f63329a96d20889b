"""The server's settings and the limits a request must keep. Built once, never changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from pyspec.errors import ConfigError
from pyspec.request import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may cost before it is refused. Sizes in bytes, times in seconds."""

    body: int = 8 << 20
    header: int = 32 << 10
    body_read_s: float = 10.0
    json_depth: int = 64
    messages: int = 4096
    parts: int = 64  # content parts of one message
    prompts: int = 64  # prompts of one request
    stops: int = 16
    stop_bytes: int = 256
    logit_bias: int = 4096  # entries
    tools: int = 256
    top_logprobs: int = 50
    stream_buffer: int = 1 << 20  # events a slow reader may leave unread
    kept_bytes: int = 4 << 20  # of a stream that can be resumed; the oldest go first
    kept_s: float = 300.0  # for which one is kept behind its end
    kept_streams: int = 64
    total_s: float = 3600.0  # from the first byte to the last
    ping_s: float = 30.0  # silence on a stream before a comment line
    drain_s: float = 30.0  # how long a shutdown waits for running requests
    stall_s: float = 60.0  # age of the last round, while busy, at which /ready says no


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where to listen, who may ask, what is shown and what a request gets that does not say."""

    host: str = "127.0.0.1"
    port: int = 8080  # 0: the system picks one
    api_keys: tuple[str, ...] = ()  # empty: no key needed
    insecure: bool = False  # listen beyond this machine without a key
    alias: str = ""  # the model's name in answers; "" takes the engine's
    metrics: bool = True  # serve /metrics
    slots: bool = True  # serve /slots
    slot_save_path: str = ""  # directory that slots are saved in and restored from; "": they are not
    props: bool = True  # serve /props
    cors_origins: tuple[str, ...] = ()  # besides this machine's; "*" allows all
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = -1  # -1: until the context is full
    volatile_lines: tuple[re.Pattern[str], ...] = ()  # lines of system prompts that are moved behind the conversation
    tool_call_parser: str = "auto"  # how the model writes calls; auto: as its template does; none: calls are not parsed
    reasoning_format: str = "auto"  # where a body does not say
    reasoning: str = "auto"  # on, off; auto: as the template has it
    reasoning_budget: int = -1  # tokens a request may think where its body does not say; -1: as many as it likes
    reasoning_budget_message: str = ""  # said at the end of the budget
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prefill_assistant: bool = True  # an assistant's message at the end is continued
    text_threads: int = 2  # tokenise and render off the event loop
    limits: Limits = field(default_factory=Limits)

    def check(self) -> None:
        """Raise ConfigError if this must not be served."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is outside 0..65535")
        if not 0 <= self.limits.drain_s <= 86400:
            raise ConfigError(f"--drain-timeout is {self.limits.drain_s:g} s; want 0 to 86400")
        if self.slot_save_path and not Path(self.slot_save_path).is_dir():
            raise ConfigError(f"--slot-save-path {self.slot_save_path} is no directory; make it first")
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("an api key is empty; remove it or give one")
        if not (self.api_keys or self.insecure or is_loopback(self.host)):
            raise ConfigError(f"host {self.host} is open to the network; give --api-key, or --insecure to serve anyone")


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`. A name other than localhost counts as open."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
