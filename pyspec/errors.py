"""Every error pyspec raises on purpose, as one tree.

PyspecError                        exit 1   500 server_error
    ConfigError                    exit 2   400 invalid_request_error      a flag, setting or catalogue entry
    ModelError                     exit 3   500 server_error               a file cannot be used
        BadGGUF                                                            malformed container
        UnknownArchitecture
        BadTensors                                                         missing or misshaped: how many, and the first few
        BadTokenizer
        BadTemplate
    PairError                      exit 4   500 server_error               target and drafter do not fit together
    DoesNotFit                     exit 5   500 server_error               memory plan larger than the machine
    DeviceError                    exit 6   500 server_error               GPU, driver or compiler; the engine stops
    DownloadError                  exit 7   500 server_error
    EngineBug                      exit 1   500 server_error               a bug of pyspec, not of the device or a file
    RequestError                   exit 1   400 invalid_request_error      this request is refused
        PromptTooLong                       400 exceed_context_size_error
        BadSlotFile                                                        a slot's file cannot be written or restored
    NotFound                                404 not_found_error
    NotSupported                            400 not_supported_error        a feature pyspec lacks; clients would retry a 5xx
    StorageFull                             507 server_error               a disk is full
    SwitchedOff                             501 not_supported_error        an endpoint that is switched off: llama-server's answer
    QueueFull                               429 rate_limit_error
    Unavailable                             503 unavailable_error          loading, draining or dead
    TimedOut                                504 timeout_error              a call took longer than its `timeout`
    SlotError                               500 server_error               one slot's round failed; the others continue
        NoTokenLeft                         400 invalid_request_error      the request bans every token, or all tokens of its grammar
        GrammarTooLarge                     400 invalid_request_error      its grammar exceeds its limits during generation
        OutOfBounds

A message is one lower-case line: the fault with its numbers, then the remedy if there is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class PyspecError(Exception):
    """Base of all errors that a user can act on. Any other escaping exception is a bug of pyspec."""

    exit_code = 1
    status = 500
    kind = "server_error"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle support: Python would call the class with the message alone, even if it has other arguments."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(
    kind: type[PyspecError], args: tuple[object, ...], state: dict[str, object]
) -> PyspecError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ConfigError(PyspecError):
    """A flag, a setting or a catalogue entry is invalid."""

    exit_code, status, kind = 2, 400, "invalid_request_error"


def cannot_write(path: Path, error: OSError) -> ConfigError:
    """The error for a file that a user asked for."""
    if isinstance(error, FileNotFoundError) and not path.parent.is_dir():
        return ConfigError(f"cannot write {path}: there is no folder {path.parent}")
    return ConfigError(f"cannot write {path}: {(error.strerror or str(error)).lower()}")


class ModelError(PyspecError):
    """A model file cannot be used."""

    exit_code = 3


class BadGGUF(ModelError):
    """The container is malformed: wrong magic, a count or an offset outside the file, and the like."""


class UnknownArchitecture(ModelError):
    """This version does not run the file's architecture."""


class BadTensors(ModelError):
    """Tensors of the architecture are missing or have another shape; the message has their number and the first names."""


class BadTokenizer(ModelError):
    """The file's vocabulary is damaged, or of an unknown kind."""


class BadTemplate(ModelError):
    """The chat template is missing, broken or refuses these messages."""


class PairError(PyspecError):
    """Target and drafter do not fit each other."""

    exit_code = 4


class DoesNotFit(PyspecError):
    """The memory plan is larger than the machine."""

    exit_code = 5


class DeviceError(PyspecError):
    """The GPU, its driver or its compiler failed; the engine stops."""

    exit_code = 6


class NoDevice(DeviceError):
    """The device does not exist here; a retry would not find it either."""


class RankLost(DeviceError):
    """One of the processes that share a model has ended, and the others cannot continue without it."""


class HostLost(DeviceError):
    """The host did not compute its part of a layer in time, and the device cannot continue without it; no kernel failed."""


class EngineBug(PyspecError):
    """The engine failed because of a bug of pyspec: it would fail again in the same way."""


class DownloadError(PyspecError):
    """A file could not be downloaded."""

    exit_code = 7


class RequestError(PyspecError):
    """This request is invalid and can never run."""

    status, kind = 400, "invalid_request_error"


class PromptTooLong(RequestError):
    """The prompt has more tokens than the context size per request."""

    kind = "exceed_context_size_error"

    def __init__(
        self, n_prompt: int, n_ctx: int, *, is_pool: bool = False, is_trained: bool = False
    ) -> None:
        """n_ctx: tokens that a request holds; is_pool: because --kv-pool has no room for more; is_trained: because the model was trained for no more."""
        flag = "--kv-pool" if is_pool else "-c"
        more = f"{flag} raises it up to the length that the model was trained for"
        if is_trained and not is_pool:
            more = "the model was trained for no more; --rope-scaling yarn with --rope-scale and -c goes further"
        super().__init__(
            f"the request exceeds the available context size: the maximum context length is {n_ctx} tokens, its prompt has"
            f" {n_prompt} tokens, and a request holds {n_ctx} ({more})"
        )
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


class BadSlotFile(RequestError):
    """A slot's file is damaged, of another model or missing; or it cannot be written."""


class NotFound(PyspecError):
    """The name or address does not exist."""

    status, kind = 404, "not_found_error"


class NotSupported(PyspecError):
    """The request asks for a feature that would change the text and is not supported."""

    status, kind = 400, "not_supported_error"


class StorageFull(PyspecError):
    """The disk for a file is full."""

    status, kind = 507, "server_error"


class SwitchedOff(PyspecError):
    """An endpoint that is switched off on this server."""

    status, kind = 501, "not_supported_error"


class QueueFull(PyspecError):
    """The queue is full."""

    status, kind = 429, "rate_limit_error"

    def __init__(self, n_queued: int, retry_after_s: int = 1) -> None:
        super().__init__(f"{n_queued} requests are waiting already; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Unavailable(PyspecError):
    """The model is loading, the server is draining, or the engine has stopped."""

    status, kind = 503, "unavailable_error"


class TimedOut(PyspecError, TimeoutError):
    """A call took longer than its `timeout`. Its request ends at the next round."""

    status, kind = 504, "timeout_error"


class SlotError(PyspecError):
    """One slot's round failed. `slot` is its number, if known."""

    slot: int | None = None


class NoTokenLeft(SlotError):
    """The request bans all tokens, so no choice is left. The request is at fault."""

    status, kind = 400, "invalid_request_error"


class GrammarTooLarge(SlotError):
    """The request's grammar exceeds its limits during generation. The request is at fault."""

    status, kind = 400, "invalid_request_error"


class OutOfBounds(SlotError):
    """An index is out of range. Raised on the host before a launch, or read from a kernel's fault record."""

    def __init__(self, what: str, index: int, limit: int, slot: int | None = None) -> None:
        super().__init__(f"{what} {index} is outside 0..{limit - 1}")
        self.what, self.index, self.limit, self.slot = what, index, limit, slot
