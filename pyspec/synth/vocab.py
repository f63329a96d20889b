"""Vocabularies that encode and decode: byte-level BPE of any size with special tokens at their real ids, and a SentencePiece one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyspec.gguf import ValueType
from pyspec.gguf.write import GGUFWriter
from pyspec.synth.dims import Dims
from pyspec.synth.drafters import mask_id

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

_MERGES = "t h|th e|Ġ the|i n|Ġ a|e r|o n|r e|Ġ t|Ġ s|a n|e n|Ġ w|o r|a t|Ġ in|in g|e s|Ġ o|i s|o u|Ġ an|Ġan d|l l|Ġ 1|1 2|d e|f (|Ã ©|Ċ Ċ"
_PIECES = "▁ e t a o i n s h r d l u c m f w g y p b v k th he in er an re on ▁t ▁a ▁th ▁the ▁s ▁w ▁o and ▁and ing ▁in"
_SPECIALS = ("<think>", "</think>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
_QWEN = {
    151_643: "<|endoftext|>",
    151_644: "<|im_start|>",
    151_645: "<|im_end|>",
    151_657: "<tool_call>",
    151_658: "</tool_call>",
    151_667: "<think>",
    151_668: "</think>",
    151_669: "<|mask|>",
}
_LLAMA = {
    128_000: "<|begin_of_text|>",
    128_001: "<|end_of_text|>",
    128_002: "<|mask|>",
    128_006: "<|start_header_id|>",
    128_007: "<|end_header_id|>",
    128_009: "<|eot_id|>",
    128_010: "<|im_start|>",
    128_011: "<|im_end|>",
}
_NEMOTRON = {
    0: "<unk>",
    1: "<s>",
    2: "</s>",
    10: "<|im_start|>",
    11: "<|im_end|>",
    12: "<think>",
    13: "</think>",
    14: "<|mask|>",
}
_DEEPSEEK = {
    0: "<｜begin▁of▁sentence｜>",
    1: "<｜end▁of▁sentence｜>",
    128_798: "<think>",
    128_799: "</think>",
    128_813: "<|im_start|>",
    128_814: "<|im_end|>",
    128_815: "<|mask|>",
}
_GPT_OSS = {
    199_998: "<|startoftext|>",
    199_999: "<|endoftext|>",
    200_002: "<|return|>",
    200_003: "<|constrain|>",
    200_005: "<|channel|>",
    200_006: "<|start|>",
    200_007: "<|end|>",
    200_008: "<|message|>",
    200_012: "<|call|>",
    200_013: "<|im_start|>",
    200_014: "<|im_end|>",
    200_015: "<|mask|>",
}
_CONTROL = ("<unk>", "<s>", "</s>")  # and texts that start with <|
_QWEN35_SHIFT = 96_401  # Qwen3.5 has Qwen3's special tokens in the same order, at ids higher by this
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Vocab:
    """The values of the `tokenizer.*` keys."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    bos: int
    eos: int
    pad: int
    mask: int
    add_bos: bool
    merges: list[str] | None = None
    scores: np.ndarray | None = None


def make(dims: Dims) -> Vocab:
    """The vocabulary of `dims`: its kind, its size, unique texts."""
    return _sentencepiece(dims) if dims.vocab == "spm" else _bpe(dims)


def add_to(writer: GGUFWriter, vocab: Vocab) -> None:
    prefix = "tokenizer.ggml"
    writer.add(f"{prefix}.model", vocab.model, ValueType.STRING)
    writer.add(f"{prefix}.pre", vocab.pre, ValueType.STRING)
    writer.add(f"{prefix}.tokens", vocab.tokens, ValueType.STRING)
    writer.add(f"{prefix}.token_type", vocab.types, ValueType.INT32)
    if vocab.scores is not None:
        writer.add(f"{prefix}.scores", vocab.scores, ValueType.FLOAT32)
        writer.add(f"{prefix}.unknown_token_id", 0, ValueType.UINT32)
        writer.add(f"{prefix}.add_space_prefix", True, ValueType.BOOL)
    if vocab.merges is not None:
        writer.add(f"{prefix}.merges", vocab.merges, ValueType.STRING)
    ids = {"bos": vocab.bos, "eos": vocab.eos, "padding": vocab.pad}
    for name, token in ids.items():
        writer.add(f"{prefix}.{name}_token_id", token, ValueType.UINT32)
    writer.add(f"{prefix}.add_bos_token", vocab.add_bos, ValueType.BOOL)
    writer.add("tokenizer.chat_template", _TEMPLATE, ValueType.STRING)


def _byte_alphabet() -> list[str]:
    """One printable character per byte: GPT-2's table, printable bytes first."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def _specials(dims: Dims) -> dict[int, str]:
    by_kind = {"llama-bpe": _LLAMA, "qwen2": _QWEN, "joyai-llm": _DEEPSEEK, "pixtral": _NEMOTRON}
    by_kind |= {"gpt-4o": _GPT_OSS, "qwen35": {}}
    if dims.n_vocab <= 1000 or dims.vocab not in by_kind:
        return {dims.n_vocab - len(_SPECIALS) + i: text for i, text in enumerate(_SPECIALS)}
    if found := by_kind[dims.vocab]:
        return found
    moved = {i + _QWEN35_SHIFT: text for i, text in _QWEN.items() if text != "<|mask|>"}
    return moved | {mask_id(dims): "<|mask|>"}


def _bpe(dims: Dims) -> Vocab:
    specials = _specials(dims)
    merges = [str(merge) for merge in _MERGES.split("|")]
    plain = _byte_alphabet() + [merge.replace(" ", "") for merge in merges]
    n_plain = dims.n_vocab - len(specials)
    plain += [f"Ġ{_word(i)}" for i in range(n_plain - len(plain))]
    texts = iter(plain)
    tokens = [specials.get(i) or next(texts) for i in range(dims.n_vocab)]
    types = [NORMAL] * dims.n_vocab
    for i, text in specials.items():
        types[i] = CONTROL if text.startswith(("<|", "<｜")) or text in _CONTROL else USER_DEFINED
    ids = {text: i for i, text in specials.items()}
    end = ids.get("<|endoftext|>", ids.get("<|end_of_text|>", 0))
    return Vocab(
        model="gpt2",
        pre=dims.vocab,
        tokens=tokens,
        types=types,
        bos=ids.get("<|begin_of_text|>", ids.get("<s>", end)),
        eos=ids["<|im_end|>"],
        pad=end,
        mask=ids["<|mask|>"],
        add_bos=dims.vocab == "llama-bpe",
        merges=merges,
    )


def _word(n: int) -> str:
    """A unique word: n in base 26, most significant letter first, in upper case so that no merge produces it."""
    letters = ""
    while True:
        n, digit = divmod(n, 26)
        letters = chr(65 + digit) + letters
        if n == 0:
            return letters.rjust(3, "A")


def _sentencepiece(dims: Dims) -> Vocab:
    pieces = _PIECES.split()
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *([BYTE] * 256), *([NORMAL] * len(pieces))]
    more = dims.n_vocab - len(tokens) - 1
    tokens += [f"▁{_word(i)}" for i in range(more)] + ["<|mask|>"]
    types += [NORMAL] * more + [CONTROL]
    scores = np.zeros(dims.n_vocab, np.float32)
    scores[259:-1] = -np.arange(dims.n_vocab - 260)
    mask = dims.n_vocab - 1
    return Vocab("llama", "default", tokens, types, 1, 2, 0, mask, add_bos=True, scores=scores)
