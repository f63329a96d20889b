"""The server's settings and the limits a request must keep. Built once, never changed."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from pyspec.errors import ConfigError
from pyspec.request import SamplingGiven, SamplingParams

PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may cost before it is refused. Sizes in bytes, times in seconds."""

    body: int = 8 << 20
    header: int = 32 << 10
    body_read_s: float = 10.0
    reading: int = 256 << 20  # of all bodies that have not arrived as a whole
    header_read_s: float = 10.0  # from the first byte, or the connection, to the end of the headers
    connections: int = 1024  # at most, and as many as there are file descriptors for
    json_depth: int = 64
    messages: int = 1 << 16  # of a chat; what they hold is bounded by the body
    prompts: int = 64  # prompts of one request
    stops: int = 256
    stop_bytes: int = 256
    all_stop_bytes: int = 8192  # of all of them
    logit_bias: int = 4096  # entries
    tools: int = 4096
    breakers: int = 64  # of dry_sequence_breakers
    top_logprobs: int = 50  # alternatives of each token, whatever the length of an answer is
    most_top_logprobs: int = 1024  # as long as the answer has no more than `alternatives` in all
    alternatives: int = 1 << 18
    stream_buffer: int = 1 << 20  # events a slow reader may leave unread
    stalled_s: float = 10.0  # after which a client that reads nothing of what waits for it is given up
    kept_bytes: int = 4 << 20  # of a stream that can be resumed; the oldest go first
    kept_s: float = 300.0  # for which one is kept behind its end
    kept_streams: int = 64
    total_s: float = 3600.0  # from the first byte to the last
    ping_s: float = 30.0  # silence on a stream before a comment line
    least_ping_s: float = 0.05  # however little a request asks for
    drain_s: float = 30.0  # how long a shutdown waits for running requests
    stall_s: float = 60.0  # age of the last round, while busy, at which /ready says no


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where to listen, who may ask, what is shown and what a request gets that does not say."""

    hosts: tuple[str, ...] = ("127.0.0.1",)  # addresses, and paths of unix sockets
    port: int = 8080  # 0: the system picks one
    reuse_port: bool = False  # others may listen on it, too
    api_prefix: str = ""  # "/llm": where all paths begin
    api_keys: tuple[str, ...] = ()  # empty: no key needed
    insecure: bool = False  # listen beyond this machine without a key
    ssl_key_file: str = ""  # with ssl_cert_file: TLS
    ssl_cert_file: str = ""
    aliases: tuple[str, ...] = ()  # the model's names in answers, the first first; () takes the engine's
    tags: tuple[str, ...] = ()  # words about it in /v1/models
    page: bool = True  # serve the page at /
    metrics: bool = True  # serve /metrics
    slots: bool = True  # serve /slots
    slot_save_path: str = ""  # directory that slots are saved in and restored from; "": they are not
    props: bool = True  # serve /props
    cors_origins: tuple[str, ...] = ()  # besides this machine's; "*" allows all
    sampling: SamplingParams = field(default_factory=SamplingParams)  # of a request that does not say
    sampling_given: frozenset[str] | None = None
    # its fields that go before what the model's file recommends; None: those that are not llama.cpp's
    max_tokens: int = -1  # -1: until the context is full
    volatile_lines: tuple[re.Pattern[str], ...] = ()  # lines of system prompts that are moved behind the conversation
    tool_call_parser: str = "auto"  # how the model writes calls; auto: as its template does; none: calls are not parsed
    reasoning_format: str = "auto"  # where a body does not say
    reasoning: str = "auto"  # on, off; auto: as the template has it
    reasoning_budget: int = -1  # tokens a request may think where its body does not say; -1: as many as it likes
    reasoning_budget_message: str = ""  # said at the end of the budget
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    spm_infill: bool = False  # /infill: what stands behind the gap goes first
    prefill_assistant: bool = True  # an assistant's message at the end is continued
    verbose: bool = False  # answers have `__verbose`: the prompt as the model reads it, and the settings
    text_threads: int = 2  # tokenise and render off the event loop
    limits: Limits = field(default_factory=Limits)

    def for_model(self, recommended: SamplingParams) -> ServerSettings:
        """The same with what the model's file recommends where nothing was given."""
        plain = SamplingParams()
        given = self.sampling_given
        if given is None:
            names = (f.name for f in fields(SamplingParams))
            given = frozenset(name for name in names if getattr(self.sampling, name) != getattr(plain, name))
        return replace(self, sampling=SamplingGiven(self.sampling, given).over(recommended))

    def check(self) -> None:
        """Raise ConfigError if this must not be served."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is outside 0..65535")
        if not 0 <= self.limits.drain_s <= 86400:
            raise ConfigError(f"--drain-timeout is {self.limits.drain_s:g} s; want 0 to 86400")
        self._check_tls()
        if self.api_prefix and not PREFIX.fullmatch(self.api_prefix):
            raise ConfigError(
                f"--api-prefix is {self.api_prefix!r}; want a path such as /llm, without a slash at its end"
            )
        if self.slot_save_path and not os.path.isdir(self.slot_save_path):
            raise ConfigError(f"--slot-save-path {self.slot_save_path} is no directory; make it first")
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("an api key is empty; remove it or give one")
        open_hosts = [host for host in self.hosts if not is_loopback(host)]
        if open_hosts and not (self.api_keys or self.insecure):
            raise ConfigError(
                f"host {open_hosts[0]} is open to the network; give --api-key, or --insecure to serve anyone"
            )

    def _check_tls(self) -> None:
        if bool(self.ssl_key_file) != bool(self.ssl_cert_file):
            raise ConfigError("TLS takes both --ssl-key-file and --ssl-cert-file")
        if not self.ssl_key_file:
            return
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.ssl_cert_file, self.ssl_key_file)
        except (OSError, ValueError) as e:
            files = f"--ssl-cert-file {self.ssl_cert_file} and --ssl-key-file {self.ssl_key_file}"
            raise ConfigError(f"{files} can not be used: {e}") from e


def keys_of(path: str) -> tuple[str, ...]:
    """The keys of a file, one a line; # begins a comment. Raises ConfigError: a file without any would leave the door open."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--api-key-file {path} can not be read: {e}") from e
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file {path} has no key; want one a line")
    return keys


def is_unix(host: str) -> bool:
    """True for the path of a unix socket, as llama-server spells it."""
    return host.startswith("unix:") or host.endswith(".sock")


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`. A name other than localhost counts as open."""
    if host == "localhost" or is_unix(host):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
