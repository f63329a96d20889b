"""pyspec: speculative decoding for GGUF models.

    import pyspec
    with pyspec.Engine.load("demo", np=8) as engine:
        print(engine.chat([{"role": "user", "content": "Count from 1 to 10."}], temperature=0).text)

Names load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pyspec.version import __version__ as __version__

if TYPE_CHECKING:
    from pyspec.engine.api import Engine, Result
    from pyspec.engine.chat_tools import ChatDelta, ChatResult, ToolCall
    from pyspec.errors import PyspecError
    from pyspec.request import Delta, Done, Request, SamplingParams, Timings, TokenLogprob

_HOMES = {
    "ChatDelta": "pyspec.engine.chat_tools",
    "ChatResult": "pyspec.engine.chat_tools",
    "Delta": "pyspec.request",
    "Done": "pyspec.request",
    "Engine": "pyspec.engine.api",
    "PyspecError": "pyspec.errors",
    "Request": "pyspec.request",
    "Result": "pyspec.engine.api",
    "SamplingParams": "pyspec.request",
    "Timings": "pyspec.request",
    "TokenLogprob": "pyspec.request",
    "ToolCall": "pyspec.engine.chat_tools",
}
__all__ = [
    "ChatDelta", "ChatResult", "Delta", "Done", "Engine", "PyspecError", "Request", "Result", "SamplingParams", "Timings", "TokenLogprob", "ToolCall",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'pyspec' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
