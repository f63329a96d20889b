"""pyspec: speculative decoding for GGUF models."""

__version__ = "0.1.0"
