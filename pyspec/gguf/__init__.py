"""GGUF files: an own reader and writer over plain bytes. Knows nothing of torch or of models."""

from pyspec.gguf.reader import GGUFFile, open_gguf
from pyspec.gguf.shard import TensorInfo
from pyspec.gguf.types import GGMLType, LlamaFileType, ValueType

__all__ = ["GGMLType", "GGUFFile", "LlamaFileType", "TensorInfo", "ValueType", "open_gguf"]
