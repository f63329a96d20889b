"""GGUF files: an own reader over plain bytes, and a writer (`write.py`). Knows nothing of torch or of models."""

from pyspec.gguf.reader import GGUFFile, open_gguf
from pyspec.gguf.shard import TensorInfo, has_head
from pyspec.gguf.strings import Strings
from pyspec.gguf.types import GGMLType, LlamaFileType, ValueType

open = open_gguf  # `gguf.open(path)` reads well where the module is imported as a whole

__all__ = [
    "GGMLType",
    "GGUFFile",
    "LlamaFileType",
    "Strings",
    "TensorInfo",
    "ValueType",
    "has_head",
    "open",
    "open_gguf",
]
