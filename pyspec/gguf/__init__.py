"""GGUF files: an own reader and writer over plain bytes. Knows nothing of torch or of models."""

from pyspec.gguf.reader import GGUFFile, open_gguf
from pyspec.gguf.shard import TensorInfo, has_head
from pyspec.gguf.strings import Strings
from pyspec.gguf.types import GGMLType, LlamaFileType, ValueType
from pyspec.gguf.write import GGUFWriter

open = open_gguf  # `gguf.open(path)` reads well where the module is imported as a whole

__all__ = [
    "GGMLType",
    "GGUFFile",
    "GGUFWriter",
    "LlamaFileType",
    "Strings",
    "TensorInfo",
    "ValueType",
    "has_head",
    "open",
    "open_gguf",
]
