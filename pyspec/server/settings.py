"""The server's settings and the limits of a request. Built once, never changed.

A field with a flag is an option of `pyspec server`, whose name and help come from here.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Annotated, Any

from pyspec.config import SERVING
from pyspec.errors import ConfigError
from pyspec.ranges import INT32, SWITCH, Doc, Flag, Many, OneOf, Real, Text, Whole
from pyspec.request import SamplingGiven, SamplingParams
from pyspec.text.markup.dialect import NAMES

PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")
DAY_S = 86400.0
PICTURE_BODY, PICTURE_BODY_S = (
    64 << 20,
    60.0,
)  # bytes of a body with pictures, in base64, and seconds until it is there
LISTENING, CHATS, MODELS = "Listening", "Chats", "Several models"
"""Headings in help."""
Words = Annotated[tuple[str, ...], Many(Text())]
Line = Annotated[str, Text()]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one request. Sizes in bytes, times in seconds."""

    body: int = 8 << 20
    header: int = 32 << 10
    body_read_s: float = 10.0
    reading: int = 256 << 20  # of all bodies that are still arriving
    header_read_s: float = 10.0  # from the first byte, or the connection, to the end of the headers
    connections: int = 1024  # at most, and no more than the file descriptors allow
    json_depth: int = 64
    messages: int = 1 << 16  # of a chat; the body's limit bounds their size
    prompts: int = 64  # prompts of one request
    stops: int = 256
    stop_bytes: int = 256
    all_stop_bytes: int = 8192  # of all stop strings together
    logit_bias: int = 4096  # entries
    tools: int = 4096
    breakers: int = 64  # of dry_sequence_breakers
    pictures: int = 32  # of one request
    pictures_s: float = 30.0  # to read all of a request
    fetch_bytes: int = 10 << 20  # of one from a URL
    fetch_s: float = 10.0
    top_logprobs: int = 50  # alternatives of each token, for an answer of any length
    most_top_logprobs: int = 1024  # allowed while an answer has at most `alternatives` in all
    alternatives: int = 1 << 18
    stream_buffer: int = 1 << 20  # unread events of a slow reader
    # a client that reads none of its waiting data for this long is disconnected
    stalled_s: float = 10.0
    kept_bytes: int = 4 << 20  # of a resumable stream; the oldest bytes are dropped first
    kept_s: float = 300.0  # time that a resumable stream is kept after its end
    kept_streams: int = 64
    # fmt: off
    total_s: Annotated[float, Real(1, 30 * DAY_S), Flag("-to --timeout $TIMEOUT", SERVING), Doc("maximum seconds per request")] = 3600.0
    ping_s: Annotated[float, Real(-1, DAY_S), Flag("--sse-ping-interval $SSE_PING_INTERVAL", SERVING), Doc("seconds of silence before a stream sends a comment. -1: never")] = 30.0
    drain_s: Annotated[float, Real(0, DAY_S), Flag("--drain-timeout", SERVING), Doc("seconds that running requests get at shutdown")] = 30.0
    # fmt: on
    least_ping_s: float = 0.05  # lower bound of the period that a request asks for
    stall_s: float = 60.0  # age of the last round, while busy, at which /ready says no


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where to listen, access control, visible endpoints, and defaults of requests."""

    # fmt: off
    hosts: Annotated[Words, Flag("--host $HOST", LISTENING, "ADDRESS"), Doc("address to listen on, or a path ending in .sock; may be repeated")] = ("127.0.0.1",)
    port: Annotated[int, Whole(0, 65535), Flag("--port $PORT", LISTENING), Doc("port; 0 picks a free one")] = 8080
    reuse_port: Annotated[bool, Flag("--reuse-port $REUSE_PORT", LISTENING), Doc("let other servers listen on the same port")] = False
    api_prefix: Annotated[Line, Flag("--api-prefix $API_PREFIX", LISTENING, "/PREFIX"), Doc("prefix of all paths")] = ""
    api_keys: Annotated[Words, Flag("--api-key $", LISTENING, "KEY,..."), Doc("API keys; clients must send one of them. May be repeated")] = ()
    cache_share: Annotated[bool, Flag("--cache-share", LISTENING), Doc("let clients with different API keys share cached texts: one can find out another's")] = False
    insecure: Annotated[bool, Flag("--insecure", LISTENING), Doc("allow listening beyond this machine without a key")] = False
    ssl_key_file: Annotated[Line, Flag("--ssl-key-file $SSL_KEY_FILE", LISTENING, "FILE"), Doc("TLS: the private key, PEM")] = ""
    ssl_cert_file: Annotated[Line, Flag("--ssl-cert-file $SSL_CERT_FILE", LISTENING, "FILE"), Doc("TLS: the certificate, PEM")] = ""
    cors_origins: Annotated[Words, Flag("--cors-origin --cors-origins $CORS_ORIGINS", LISTENING, "ORIGIN,..."), Doc("origins allowed to call from a browser, besides this machine. *: all")] = ()
    aliases: Annotated[Words, Flag("-a --alias $ALIAS", SERVING, "NAME,..."), Doc("the model's names in answers, the main one first")] = ()
    tags: Annotated[Words, Flag("--tags $TAGS", SERVING, "TAG,..."), Doc("labels of the model in /v1/models")] = ()
    metrics: Annotated[bool, Flag("--metrics $ENDPOINT_METRICS", SERVING), Doc("serve /metrics")] = True
    slots: Annotated[bool, Flag("--slots $ENDPOINT_SLOTS", SERVING), Doc("serve /slots")] = True
    props: Annotated[bool, Flag("--props $ENDPOINT_PROPS", SERVING), Doc("serve /props")] = True
    page: Annotated[bool, Flag("--ui --webui $UI", SERVING), Doc("serve the web page at /")] = True
    slot_save_path: Annotated[Line, Flag("--slot-save-path $", SERVING, "DIR"), Doc("directory of saved slots (POST /slots/ID)")] = ""
    media_path: Annotated[Line, Flag("--media-path $", SERVING, "DIR"), Doc("directory of images that requests may name as file://NAME")] = ""
    media_hosts: Annotated[Words, Flag("--media-hosts", SERVING, "HOST,..."), Doc("hosts of images that requests may name as URLs, if their addresses are public; HOST:PORT for another port")] = ()
    text_threads: Annotated[int, Whole(-1, 256), Flag("--threads-http $THREADS_HTTP", SERVING, help="Threads for text. -1: 2."), Doc("threads for tokenising and rendering")] = 2
    tool_call_parser: Annotated[str, OneOf(("auto", "none", *NAMES)), Flag("--tool-call-parser", CHATS, "NAME"), Doc(f"format of the model's tool calls: auto (the template's, or generic), none, {', '.join(NAMES)}")] = "auto"
    reasoning_format: Annotated[str, OneOf(("none", "auto", "deepseek", "deepseek-legacy")), Flag("--reasoning-format $THINK", CHATS), Doc("field for thoughts: none leaves them in content; the others use reasoning_content")] = "auto"
    reasoning: Annotated[str, OneOf(("on", "off", "auto")), Flag("-rea --reasoning $REASONING", CHATS), Doc("thinking: on, off, or auto for the chat template's default")] = "auto"
    reasoning_budget: Annotated[int, Whole(-1, INT32), Flag("--reasoning-budget $THINK_BUDGET", CHATS), Doc("maximum thinking tokens of a request. -1: no limit")] = -1
    reasoning_budget_message: Annotated[Line, Flag("--reasoning-budget-message $THINK_BUDGET_MESSAGE", CHATS, "TEXT"), Doc("text inserted at the end of the reasoning budget")] = ""
    prefill_assistant: Annotated[bool, Flag("--prefill-assistant $PREFILL_ASSISTANT", CHATS), Doc("continue an assistant message at the end of a chat")] = True
    spm_infill: Annotated[bool, Flag("--spm-infill $", CHATS), Doc("/infill: put the suffix before the prefix")] = False
    # fmt: on
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of the template, by default
    # lines of system prompts that are moved behind the conversation
    volatile_lines: tuple[re.Pattern[str], ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)  # defaults of a request
    sampling_given: frozenset[str] | None = None
    # fields of `sampling` that override the model file's recommendations; None: the fields that differ from llama.cpp's defaults
    max_tokens: int = -1  # -1: until the context is full
    verbose: bool = False  # add `__verbose` to answers: the rendered prompt and the settings
    limits: Limits = field(default_factory=Limits)

    def for_model(self, recommended: SamplingParams) -> ServerSettings:
        """These settings with the model file's recommendations where no value was given."""
        plain = SamplingParams()
        given = self.sampling_given
        if given is None:
            names = (f.name for f in fields(SamplingParams))
            ours = self.sampling
            given = frozenset(name for name in names if getattr(ours, name) != getattr(plain, name))
        return replace(self, sampling=SamplingGiven(self.sampling, given).over(recommended))

    def for_pictures(self) -> ServerSettings:
        """These settings for a model that sees: its bodies are larger."""
        limits = self.limits
        if limits.body == Limits.body:
            limits = replace(
                limits, body=PICTURE_BODY, body_read_s=max(limits.body_read_s, PICTURE_BODY_S)
            )
        return replace(self, limits=limits)

    @property
    def divides(self) -> bool:
        """Each key has cached texts and slots of its own: several may not learn each other's texts."""
        return len(set(self.api_keys)) > 1 and not self.cache_share

    def check(self) -> None:
        """Raise ConfigError if the server must not start with these settings."""
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
            raise ConfigError(
                f"--slot-save-path {self.slot_save_path} is no directory; make it first",
            )
        if self.media_path and not os.path.isdir(self.media_path):
            raise ConfigError(f"--media-path {self.media_path} is no directory")
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("an api key is empty; remove it or give one")
        open_hosts = [host for host in self.hosts if not is_loopback(host)]
        if open_hosts and not (self.api_keys or self.insecure):
            raise ConfigError(
                f"host {open_hosts[0]} is open to the network; set --api-key, or --insecure to serve without one"
            )

    def _check_tls(self) -> None:
        if bool(self.ssl_key_file) != bool(self.ssl_cert_file):
            raise ConfigError("TLS takes both --ssl-key-file and --ssl-cert-file")
        if not self.ssl_key_file:
            return
        try:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self.ssl_cert_file, self.ssl_key_file)
        except (OSError, ValueError) as e:
            files = f"--ssl-cert-file {self.ssl_cert_file} and --ssl-key-file {self.ssl_key_file}"
            raise ConfigError(f"{files} can not be used: {e}") from e


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Several models behind one port: where they come from, and how many are loaded. 0 bytes: as much as is there."""

    # fmt: off
    models_dir: Annotated[Line, Flag("--models-dir $MODELS_DIR", MODELS, "DIR"), Doc("folder of models: GGUF files, and folders with the parts and the drafter of one")] = ""
    models_preset: Annotated[Line, Flag("--models-preset $MODELS_PRESET", MODELS, "FILE"), Doc("INI with a section of flags for each model")] = ""
    models_max: Annotated[int, Whole(0, INT32), Flag("--models-max $MODELS_MAX", MODELS), Doc("models that are loaded at once. 0: no limit but memory")] = 4
    models_autoload: Annotated[bool, SWITCH, Flag("--models-autoload $MODELS_AUTOLOAD", MODELS), Doc("load a model when a request names it")] = True
    sleep_idle: Annotated[int, Whole(-1, INT32), Flag("--sleep-idle-seconds $", MODELS), Doc("seconds without a request after which a model is unloaded, or parked; the next request loads it. -1: never")] = -1
    memory_margin: Annotated[int, Whole(0, INT32), Flag("--models-memory-margin", MODELS), Doc("MiB of each GPU that models leave free")] = 1024
    host_memory: Annotated[int, Whole(0, 1 << 50), Flag("--models-host-memory", MODELS, "SIZE"), Doc("host memory for all models together, as 48G. Default: what is free at the start, less 4 GiB or an eighth")] = 0
    models_queue: Annotated[int, Whole(0, INT32), Flag("--models-queue", MODELS), Doc("requests that may wait for a model to load")] = 64
    models_wait: Annotated[float, Real(1, DAY_S), Flag("--models-wait", MODELS), Doc("seconds that they wait at most")] = 600.0
    # fmt: on


def keys_of(path: str) -> tuple[str, ...]:
    """The keys of a file, one per line; lines that begin with # are comments. Raises ConfigError, also for a file without keys, which would switch access control off."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--api-key-file {path} can not be read: {e}") from e
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file {path} has no key; want one a line")
    return keys


def is_unix(host: str) -> bool:
    """True for the path of a unix socket, in llama-server's spelling."""
    return host.startswith("unix:") or host.endswith(".sock")


def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """The address that a host is, without a zone; None for a name."""
    try:
        return ip_address(host.partition("%")[0])
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`. A name other than localhost counts as open."""
    if host == "localhost" or is_unix(host):
        return True
    address = address_of(host)
    return address is not None and address.is_loopback
