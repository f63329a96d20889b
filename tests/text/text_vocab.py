"""Hand-made vocabularies as GGUF metadata."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pyspec.text.tokenizer import Tokenizer
from pyspec.text.vocab import BYTE, BYTE_CHARS, CONTROL, NORMAL, UNKNOWN, USER_DEFINED

SPM = json.loads((Path(__file__).parent / "llama_cpp_spm.json").read_text())
"""llama.cpp's ids (vocab-only file of the same vocabulary) for three settings of the file."""

SPM_FILES: dict[str, dict[str, object]] = {
    "default": {},
    "noprefix": {"add_space_prefix": False},
    "eos": {"add_bos_token": False, "add_eos_token": True},
}


def bpe(
    pre: str = "qwen2",
    words: Sequence[str] = (),
    control: Sequence[str] = (),
    user: Sequence[str] = (),
    keys: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Byte b is token b; then the tokens and merges of some ASCII words (left to right), then the matched tokens."""
    tokens, merges = [BYTE_CHARS[b] for b in range(256)], []
    for word in words:
        spelt = "".join(BYTE_CHARS[b] for b in word.encode())
        for n in range(2, len(spelt) + 1):
            if spelt[:n] not in tokens:
                tokens.append(spelt[:n])
                merges.append(f"{spelt[: n - 1]} {spelt[n - 1]}")
    types = [NORMAL] * len(tokens) + [CONTROL] * len(control) + [USER_DEFINED] * len(user)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *control, *user],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        **{f"tokenizer.ggml.{k}": v for k, v in (keys or {}).items()},
    }


def spm(file: str = "default") -> dict[str, object]:
    head = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": head + SPM["tokens"],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + SPM["types"],
        "tokenizer.ggml.scores": [0.0] * 259 + SPM["scores"],
        **{f"tokenizer.ggml.{k}": v for k, v in SPM_FILES[file].items()},
    }


def texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer.piece(i) for i in ids]
