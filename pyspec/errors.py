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
    EngineBug                      exit 1   500 server_error               a mistake of ours: not the device's, nor a file's
    RequestError                   exit 1   400 invalid_request_error      this request is refused
        PromptTooLong                       400 exceed_context_size_error
        BadSlotFile                                                        what a slot is saved in can not be written or restored
    NotFound                                404 not_found_error
    NotSupported                            400 not_supported_error        what can not be done; 5xx would be sent again
    StorageFull                             507 server_error               a disk takes no more
    SwitchedOff                             501 not_supported_error        a view this server does not show: llama-server's answer
    QueueFull                               429 rate_limit_error
    Unavailable                             503 unavailable_error          loading, draining or dead
    SlotError                               500 server_error               one slot's round failed; the others go on
        NoTokenLeft                         400 invalid_request_error      the request bans every token, or all that its grammar allows
        GrammarTooLarge                     400 invalid_request_error      its grammar goes over its limits on the way
        OutOfBounds

A message is one lower-case line: what happened, with the numbers, then what to do if that is known.
"""

from __future__ import annotations


class PyspecError(Exception):
    """Base of all errors a user can act on. Anything else that escapes is a bug of ours."""

    exit_code = 1
    status = 500
    kind = "server_error"

    def __reduce__(self) -> tuple[object, ...]:
        """Errors cross processes. Python would call a class with the message alone, whatever its arguments are."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[PyspecError], args: tuple[object, ...], state: dict[str, object]) -> PyspecError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ConfigError(PyspecError):
    """A flag, a setting or an entry of the catalogue can not be what it is."""

    exit_code, status, kind = 2, 400, "invalid_request_error"


class ModelError(PyspecError):
    """A model file can not be used."""

    exit_code = 3


class BadGGUF(ModelError):
    """The container is malformed: wrong magic, a count or an offset outside the file, and the like."""


class UnknownArchitecture(ModelError):
    """The file's architecture is none that this version runs."""


class BadTensors(ModelError):
    """Tensors the architecture needs are missing or have another shape; the message says how many and names the first few."""


class BadTokenizer(ModelError):
    """The file's vocabulary is damaged, or of a kind that is not known."""


class BadTemplate(ModelError):
    """The chat template is missing, broken or refuses these messages."""


class PairError(PyspecError):
    """Target and drafter do not fit together."""

    exit_code = 4


class DoesNotFit(PyspecError):
    """The memory plan is larger than the machine."""

    exit_code = 5


class DeviceError(PyspecError):
    """The GPU, its driver or its compiler failed; the engine stops."""

    exit_code = 6


class NoDevice(DeviceError):
    """There is no such device here, and a second try finds none either."""


class RankLost(DeviceError):
    """One of the processes that share a model is gone: the others can do nothing without it."""


class EngineBug(PyspecError):
    """The engine failed by a mistake of ours: it would fail again in the same way."""


class DownloadError(PyspecError):
    """A file can not be had from where it should come from."""

    exit_code = 7


class RequestError(PyspecError):
    """This request can never run as it is."""

    status, kind = 400, "invalid_request_error"


class PromptTooLong(RequestError):
    """The prompt has more tokens than one request may hold."""

    kind = "exceed_context_size_error"

    def __init__(self, n_prompt: int, n_ctx: int) -> None:
        super().__init__(
            f"the request exceeds the available context size: its prompt has {n_prompt} tokens, and a request holds {n_ctx}"
            " (raise it with -c)"
        )
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


class BadSlotFile(RequestError):
    """A file that a slot was saved in is damaged, of another model, or not there; or none can be where one should be written."""


class NotFound(PyspecError):
    """Nothing has that name or address."""

    status, kind = 404, "not_found_error"


class NotSupported(PyspecError):
    """What was asked for would change the text and can not be done."""

    status, kind = 400, "not_supported_error"


class StorageFull(PyspecError):
    """A disk takes no more of what should be kept on it."""

    status, kind = 507, "server_error"


class SwitchedOff(PyspecError):
    """A view that this server was started without."""

    status, kind = 501, "not_supported_error"


class QueueFull(PyspecError):
    """As many requests wait as may."""

    status, kind = 429, "rate_limit_error"

    def __init__(self, n_queued: int, retry_after_s: int = 1) -> None:
        super().__init__(f"{n_queued} requests are waiting already; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Unavailable(PyspecError):
    """Nothing is served: the model is loading, the server is draining, or the engine has stopped."""

    status, kind = 503, "unavailable_error"


class SlotError(PyspecError):
    """One slot's round failed. `slot` names it, if it is known."""

    slot: int | None = None


class NoTokenLeft(SlotError):
    """What the request bans leaves nothing to choose: its own doing."""

    status, kind = 400, "invalid_request_error"


class GrammarTooLarge(SlotError):
    """At a place that only generating shows, the request's grammar takes more than is allowed: its own doing."""

    status, kind = 400, "invalid_request_error"


class OutOfBounds(SlotError):
    """An index left its range. Raised on the host before a launch, or read back from a kernel's fault record."""

    def __init__(self, what: str, index: int, limit: int, slot: int | None = None) -> None:
        super().__init__(f"{what} {index} is outside 0..{limit - 1}")
        self.what, self.index, self.limit, self.slot = what, index, limit, slot
