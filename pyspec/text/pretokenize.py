"""Pre-tokenizers: the patterns that split text before byte-pair merges, by the name in `tokenizer.ggml.pre`.

Patterns are those of the models' own tokenizers, or of llama.cpp for a name without a model ("default"). An unknown name is an error,
because a wrong split gives wrong ids silently.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer as HFPreTokenizer

_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD, _SIGNS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS}|{_TAIL}"
_QWEN35 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
    rf"|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}"
_MINICPM = rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SIGNS}|{_TAIL}"
_NOT_HAN = tuple(f"[{of[1:-1]}&&[^\\p{{Han}}]]" for of in (_UPPER, _LOWER))
_KIMI = (
    r"\p{Han}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN[0]}*{_NOT_HAN[1]}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN[0]}+{_NOT_HAN[1]}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{_SIGNS}|{_TAIL}"
)
_EXAONE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
# numbers in threes from their end: what \d{1,3}(?=(?:\d{3})*\b) says, in time that grows with their length alone
_FROM_THE_RIGHT = (r"(?<!\d)\d++\b", r"\A\d{1,3}(?=(?:\d{3})*+\z)")
_ASCII_PUNCT = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"{_ASCII_PUNCT}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}",
)


@dataclass(frozen=True)
class PreTokenizer:
    """Patterns that apply one after the other; text between matches stays whole.

    ignore_merges  a piece that is a token is used without merging
    add_bos        the default, if the file has no such field
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    def cuts(self) -> list[HFPreTokenizer]:
        return [pre_tokenizers.Split(Regex(p), "isolated") for p in self.patterns]


LINES = PreTokenizer((r"[^\n]+|\n+",), add_bos=True)
"""For the tokenizer model `gemma4`, whose files name none."""
DEFAULT = "default"
"""For files without a name."""
_GROUPS = {
    "qwen2 deepseek-r1-qwen megrez kormo f2llmv2 stablelm2 hunyuan solar-open grok-2": PreTokenizer(
        (_QWEN2,)
    ),
    "qwen35": PreTokenizer((_QWEN35,)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 lfm2 pixtral midm-2.0 jina-v5-nano": PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "glm4 glm5": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "smaug-bpe dbrx chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "deepseek-v3 joyai-llm hunyuan-dense hy_v4": PreTokenizer(_DEEPSEEK3),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT4O,)),
    "gpt-2 mpt olmo phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert exaone4 jais trillion"
    " granite-docling": PreTokenizer((_GPT2,)),
    "starcoder command-r smollm refact codeshell exaone minerva-7b mellum2": PreTokenizer(
        (r"\p{N}", _GPT2)
    ),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((_BAILING,)),
    "seed-coder": PreTokenizer((_SEED,)),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "exaone-moe": PreTokenizer((_EXAONE,)),
    "laguna": PreTokenizer((r"[^\n]+|\n+", _QWEN2)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _MINICPM), ignore_merges=True),
    "tiny_aya cohere2moe": PreTokenizer((*_FROM_THE_RIGHT, _GPT4O)),
    DEFAULT: PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
PRE = {name: pre for names, pre in _GROUPS.items() for name in names.split()}
"""By llama.cpp's names. Names with the same patterns share a PreTokenizer."""
KINDS = tuple(names.split()[0] for names in _GROUPS)
"""One name for each PreTokenizer."""
