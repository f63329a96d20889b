"""A tokenizer from GGUF metadata, run by Hugging Face `tokenizers`, giving llama.cpp's ids.

Differences to a model's own tokenizer.json follow llama.cpp: no Unicode normalisation, and end-of-generation is a set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HF

from pyspec.errors import BadTokenizer
from pyspec.text.pretokenize import PRE, PreTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"

# llama.cpp knows one end id from the file and finds the others by their text
EOG_TEXTS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> "
    "[e~[ <|fim_pad|> <|repo_name|> <|file_sep|> <fim-pad> <fim_pad> <PAD> <|fim_repo|> <repo> <reponame> <|file_separator|>".split()
)


def _byte_chars() -> dict[int, str]:
    """GPT-2's printable character for every byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


BYTE_CHARS = _byte_chars()
CHAR_BYTES = {c: b for b, c in BYTE_CHARS.items()}


def _strings(meta: Mapping[str, object], key: str, optional: bool = False) -> list[str]:
    value = meta.get(key)
    if value is None and optional:
        return []
    if not isinstance(value, list):
        raise BadTokenizer(f"the file has no list of strings '{key}'")
    return value


class Tokenizer:
    """Text to ids and back.

    `parse_special` decides whether the text of control tokens becomes those tokens; user text should be encoded without.
    """

    def __init__(
        self,
        tokens: list[str],
        types: Sequence[int],
        make: Mapping[bool, HF],
        *,
        model: str,
        pre: str,
        add_bos: bool,
        add_eos: bool,
        add_space_prefix: bool,
        ids: Mapping[str, int | None],
    ) -> None:
        self.model, self.pre, self.add_bos, self.add_eos = model, pre, add_bos, add_eos
        self.add_space_prefix = add_space_prefix
        self.n_vocab = len(tokens)
        self._tokens, self._types, self._make = tokens, types, make
        self.bos_id, self.eos_id = ids.get("bos"), ids.get("eos")
        self.pad_id, self.mask_id = ids.get("padding"), ids.get("mask")
        self.eog = self._end_ids(ids)
        self.special = frozenset(i for i, t in enumerate(types) if t in (CONTROL, UNKNOWN))

    @classmethod
    def from_metadata(cls, meta: Mapping[str, object], *, norm: Literal["none", "nfc"] = "none") -> Tokenizer:
        """Build from `tokenizer.ggml.*`. BadTokenizer names what is missing, unknown or inconsistent."""
        model = meta.get("tokenizer.ggml.model")
        tokens = _strings(meta, "tokenizer.ggml.tokens")
        tokens = [t or f"[EMPTY_{i}]" for i, t in enumerate(tokens)]
        types = _types(meta, len(tokens))
        table = {t: i for i, t in enumerate(tokens)}
        if len(table) != len(tokens):
            twice = next(t for i, t in enumerate(tokens) if table[t] != i)
            raise BadTokenizer(f"token {twice!r} occurs twice among {len(tokens)} tokens")
        pre = str(meta.get("tokenizer.ggml.pre", ""))
        if model == "gpt2":
            if pre not in PRE:
                raise BadTokenizer(f"pre-tokenizer '{pre}' is unknown; known: {', '.join(PRE)}")
            default_bos = PRE[pre].add_bos
            build = lambda: _bpe(table, _merges(meta, table), PRE[pre])  # noqa: E731
        elif model == "llama":
            default_bos = True
            build = lambda: _spm(tokens, types, table, meta)  # noqa: E731
        else:
            raise BadTokenizer(f"tokenizer model '{model}' is unknown; known: gpt2, llama")
        make = {special: _with_added(build(), tokens, types, norm, special) for special in (True, False)}
        ids = {name: _id(meta, name, len(tokens)) for name in ("bos", "eos", "eot", "eom", "padding", "mask")}
        ids |= {f"fim_{x}": _id(meta, f"fim_{x}", len(tokens)) for x in ("pad", "rep", "sep")}
        return cls(
            tokens,
            types,
            make,
            model=str(model),
            pre=pre,
            add_bos=bool(meta.get("tokenizer.ggml.add_bos_token", default_bos)),
            add_eos=bool(meta.get("tokenizer.ggml.add_eos_token", False)),
            add_space_prefix=bool(meta.get("tokenizer.ggml.add_space_prefix", True)),
            ids=ids,
        )

    def _end_ids(self, ids: Mapping[str, int | None]) -> frozenset[int]:
        named = {ids.get(k) for k in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")}
        by_text = {i for i, t in enumerate(self._tokens) if t in EOG_TEXTS}
        texts = {self._tokens[i]: i for i in by_text}
        if {"<|return|>", "<|call|>"} <= texts.keys() or {"<|calls|>", "<|flush|>"} <= texts.keys():
            by_text.discard(texts.get("<|end|>", -1))
        return frozenset(i for i in named | by_text if i is not None)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of `text`; `add_special` puts the begin and end ids the file asks for around them."""
        return self.encode_batch([text], add_special=add_special, parse_special=parse_special)[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_special: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        """Many texts. Even one goes this way: the single call of `tokenizers` holds the interpreter's lock."""
        clean = [t.encode("utf-8", "replace").decode() for t in texts]
        rows = [e.ids for e in self._make[parse_special].encode_batch_fast(clean, add_special_tokens=False)]
        return [self._framed(ids) for ids in rows] if add_special else rows

    def _framed(self, ids: list[int]) -> list[int]:
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return [*ids, self.eos_id] if self.add_eos and self.eos_id is not None else ids

    def has_special(self, text: str) -> bool:
        """True if the text of a control token occurs in `text`."""
        return any(t in text for t in self._special_texts)

    @cached_property
    def _special_texts(self) -> list[str]:
        return [self._tokens[i] for i in self.special]

    @cached_property
    def _bytes(self) -> list[bytes]:
        return [self._bytes_of(t, k) for t, k in zip(self._tokens, self._types, strict=True)]

    def _bytes_of(self, text: str, kind: int) -> bytes:
        if kind == BYTE:
            return bytes([_byte_value(text)])
        raw = text.encode("utf-8", "surrogateescape")
        if kind != NORMAL:
            return raw
        if self.model == "llama":
            return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")
        try:
            return bytes(CHAR_BYTES[c] for c in text)
        except KeyError:
            return raw  # a normal token that is not in the byte alphabet stands for itself

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for, control tokens as their text."""
        return self._bytes[token]

    def piece(self, token: int) -> str:
        """The text of one token; bytes that are no UTF-8 on their own become U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of ids; control tokens only if `special`."""
        kept = (i for i in ids if special or i not in self.special)
        raw = b"".join(self._bytes[i] for i in kept)
        text = raw.decode("utf-8", "replace")
        return text[1:] if self.model == "llama" and self.add_space_prefix and text.startswith(" ") else text

    @cached_property
    def vocab_hash(self) -> str:
        """Equal for vocabularies that mean the same by the same ids."""
        digest = hashlib.sha256()
        for text, kind in zip(self._tokens, self._types, strict=True):
            digest.update(text.encode("utf-8", "surrogateescape") + bytes([0, int(kind)]))
        return digest.hexdigest()


def _byte_value(text: str) -> int:
    """The value of a byte token, written <0xNN>."""
    try:
        return int(text[3:5], 16) if text.startswith("<0x") else CHAR_BYTES[text]
    except (ValueError, KeyError) as e:
        raise BadTokenizer(f"byte token {text!r} is not of the form <0xNN>") from e


def _types(meta: Mapping[str, object], n: int) -> list[int]:
    value = meta.get("tokenizer.ggml.token_type")
    if value is None:
        return [NORMAL] * n
    types = [int(x) for x in value]  # type: ignore[attr-defined]
    if len(types) != n:
        raise BadTokenizer(f"{len(types)} token types for {n} tokens")
    return types


def _id(meta: Mapping[str, object], name: str, n: int) -> int | None:
    """A special id; one outside the vocabulary is treated as absent, as llama.cpp does."""
    value = meta.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) and 0 <= value < n else None


def _merges(meta: Mapping[str, object], table: Mapping[str, int]) -> list[tuple[str, str]]:
    """Merges in order of rank. One whose parts or result are no tokens can never give an id and is left out."""
    merges = []
    for line in _strings(meta, "tokenizer.ggml.merges"):
        at = line.find(" ", 1)  # a piece may itself begin with a space-like character
        if at < 0:
            raise BadTokenizer(f"merge {line!r} has no two parts")
        left, right = line[:at], line[at + 1 :]
        if left in table and right in table and left + right in table:
            merges.append((left, right))
    return merges


def _bpe(table: dict[str, int], merges: list[tuple[str, str]], pre: PreTokenizer) -> HF:
    try:
        model = models.BPE(vocab=table, merges=merges, ignore_merges=pre.ignore_merges, fuse_unk=False)
    except Exception as e:  # noqa: BLE001 - the Rust side raises plain Exception
        raise BadTokenizer(f"the merges do not fit the tokens: {str(e).splitlines()[0]}") from e
    hf = HF(model)
    cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in pre.patterns]
    hf.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    hf.decoder = decoders.ByteLevel()
    return hf


def _spm(tokens: list[str], types: Sequence[int], table: dict[str, int], meta: Mapping[str, object]) -> HF:
    """SentencePiece as BPE: of all neighbours whose join is a token, the best-scored join merges first."""
    scores = meta.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):  # type: ignore[arg-type]
        raise BadTokenizer(f"an SPM vocabulary needs a score for each of its {len(tokens)} tokens")
    score = [float(x) for x in scores]  # type: ignore[attr-defined]
    joins = []
    for i, t in enumerate(tokens):
        if types[i] in (NORMAL, USER_DEFINED, UNUSED):
            for cut in range(1, len(t)):
                left, right = table.get(t[:cut]), table.get(t[cut:])
                if left is not None and right is not None:
                    joins.append((-score[i], i, left, right))
    joins.sort(key=lambda j: (j[0], j[1]))
    merges = [(tokens[a], tokens[b]) for _, _, a, b in joins]
    unk = next((t for i, t in enumerate(tokens) if types[i] == UNKNOWN), None)
    hf = HF(models.BPE(vocab=table, merges=merges, unk_token=unk, fuse_unk=False, byte_fallback=True))
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if prefix else []
    hf.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    return hf


def _with_added(hf: HF, tokens: Sequence[str], types: Sequence[int], norm: str, parse_special: bool) -> HF:
    """Tokens that are matched in the text before anything else; control tokens only when they are to be parsed."""
    if norm == "nfc":
        own = hf.normalizer
        hf.normalizer = normalizers.Sequence([normalizers.NFC(), *([own] if own is not None else [])])
    wanted = {USER_DEFINED: False} | ({CONTROL: True, UNKNOWN: True} if parse_special else {})
    added = [
        AddedToken(t, special=wanted[k], normalized=False) for t, k in zip(tokens, types, strict=True) if k in wanted
    ]
    hf.add_tokens(added)
    return hf
