"""pyspec: speculative decoding for GGUF models.

    import pyspec
    with pyspec.Engine.load("demo", np=8) as engine:
        print(engine.chat([{"role": "user", "content": "Count from 1 to 10."}], temperature=0).text)

Names load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module

from pyspec.version import __version__ as __version__

TYPE_CHECKING = False  # without `typing`, half of the time until Ctrl-C is heard
if TYPE_CHECKING:
    from pyspec.engine.api import Engine, Result
    from pyspec.engine.chat_tools import ChatDelta, ChatResult, ToolCall
    from pyspec.errors import PyspecError
    from pyspec.request import Delta, Done, Request, SamplingParams, Timings, TokenLogprob

_HOMES = {
    "pyspec.engine.api": ("Engine", "Result"),
    "pyspec.engine.chat_tools": ("ChatDelta", "ChatResult", "ToolCall"),
    "pyspec.errors": ("PyspecError",),
    "pyspec.request": ("Delta", "Done", "Request", "SamplingParams", "Timings", "TokenLogprob"),
}
__all__ = [
    "ChatDelta", "ChatResult", "Delta", "Done", "Engine", "PyspecError", "Request", "Result", "SamplingParams", "Timings", "TokenLogprob", "ToolCall",
]  # fmt: skip


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'pyspec' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
