"""Metadata fields: the legal type and range of each field that pyspec reads, and the one way to read them.

A file may be wrong in any field, by accident or on purpose. A value read here has the type asked for, is finite and lies in its
range, so a reader only checks how fields go together. The reader gives a default for an absent field, or requires the field.
Writers differ in the widths of numbers, so every width is accepted. Nothing else is converted, except an integer where a number
is wanted, 0 or 1 where a bool is, and of an architecture's fields an array of equal entries where one value is: some writers
repeat a number for each block, as llama.cpp's `get_key_or_arr` accepts.

Fields that only label a file (`title`, `file_type`) never refuse it: a value that can not be shown counts as absent.

A drafter or an architecture of another package reads its own keys with a range of its own: `legal=Whole(2, 64)`, `max_chars=64`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar, overload

import numpy as np

from pyspec.errors import BadGGUF, ModelError
from pyspec.gguf.strings import Strings
from pyspec.ranges import OneOf, Real, Whole, printable, shown

T = TypeVar("T")
L = TypeVar("L", Whole, Real, int)
_SURROGATE = re.compile("[\ud800-\udfff]")

# files write -1 for none; the reader checks ids against its vocabulary
TOKEN_ID = Whole(-(2**31), 2**32 - 1)
SIZE, COUNT = Whole(1, 1 << 20), Whole(0, 1 << 16)
INNER = Whole(0, 1 << 24)  # width of a feed-forward; 0: the block has no feed-forward
FLAG = OneOf((True, False, 0, 1))
TITLE_CHARS = 256

GENERAL: Mapping[str, Whole | Real | OneOf | int] = {  # for a text, its maximal length
    "general.alignment": Whole(8, 65_536),
    "general.architecture": 64,
    "split.count": Whole(0, 4_096),
    "split.no": Whole(0, 65_535),
    "split.tensors.count": Whole(0, 2**31 - 1),
    "tokenizer.chat_template": 16 << 20,  # ChatTemplate has a lower limit of its own
    "tokenizer.chat_template.tool_use": 16 << 20,
    "tokenizer.ggml.model": 64,
    "tokenizer.ggml.pre": 64,
    "tokenizer.ggml.tokens": 0,
    "tokenizer.ggml.merges": 0,
    "tokenizer.ggml.token_type": Whole(
        -(2**31), 2**32 - 1
    ),  # those that are not known count as undefined
    "tokenizer.ggml.add_bos_token": FLAG,
    "tokenizer.ggml.add_eos_token": FLAG,
    "tokenizer.ggml.add_space_prefix": FLAG,
    "tokenizer.ggml.suppress_tokens": TOKEN_ID,
    **{
        f"tokenizer.ggml.{name}_token_id": TOKEN_ID
        for name in (
            *("bos", "eos", "eot", "eom", "padding", "mask"),
            *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
            *("prefix", "suffix", "middle"),
        )
    },
}
"""Fields with the same name in all files."""

HPARAMS: Mapping[str, Whole | Real | OneOf | int] = {
    "block_count": Whole(1, 1 << 20),
    "context_length": Whole(1, 2**31 - 1),
    "embedding_length": SIZE,
    "feed_forward_length": INNER,
    "nextn_predict_layers": COUNT,
    "attention.head_count": COUNT,
    "attention.head_count_kv": COUNT,
    "attention.key_length": SIZE,
    "attention.value_length": SIZE,
    "attention.key_length_swa": SIZE,
    "attention.value_length_swa": SIZE,
    "attention.shared_kv_layers": COUNT,
    "attention.scale": Real(0, 1e6),  # 0: 1 / sqrt(head width)
    "attention.temperature_scale": Real(0, 10),
    "attention.temperature_length": Whole(0, 2**31 - 1),
    "attention.layer_norm_rms_epsilon": Real(0, 1, above=True),
    "attention.layer_norm_epsilon": Real(0, 1, above=True),
    "attention.causal": FLAG,
    "attention.recurrent_layers": FLAG,
    "attention.sliding_window": Whole(0, 2**31 - 1),
    "attention.sliding_window_pattern": FLAG,
    "attention.q_lora_rank": SIZE,
    "attention.kv_lora_rank": SIZE,
    "attention.key_length_mla": SIZE,
    "attention.value_length_mla": SIZE,
    "attention.output_group_count": Whole(1, 1 << 10),
    "attention.output_lora_rank": SIZE,
    "attention.compress_ratios": Whole(0, 1 << 16),
    "attention.compress_rope_freq_base": Real(1, 1e15),
    "attention.indexer.head_count": Whole(1, 1 << 12),
    "attention.indexer.key_length": SIZE,
    "attention.indexer.top_k": Whole(1, 1 << 20),
    "attention.indexer.types": Whole(0, 1),
    "attention.indexer.kpool": Whole(2, 1 << 16),
    "attention.indexer.kpool_select_tail": FLAG,
    "attention.value_expert_count": Whole(1, 1 << 12),
    "attention.value_expert_used_count": Whole(1, 1 << 12),
    "full_attention_interval": Whole(1, 1 << 20),
    "rope.dimension_count": SIZE,
    "rope.dimension_count_swa": SIZE,
    "rope.dimension_sections": COUNT,
    "n_deepstack_layers": COUNT,
    "rope.freq_base": Real(1, 1e15),
    "rope.freq_base_swa": Real(1, 1e15),
    "rope.scaling.type": 64,
    "rope.scaling.factor": Real(1e-3, 1e6, also=(0.0,)),  # 0: no scaling
    "rope.scaling.original_context_length": Whole(1, 2**31 - 1),
    "rope.scale_linear": Real(1e-3, 1e6, also=(0.0,)),  # the factor's old name
    "rope.scaling.attn_factor": Real(1e-6, 1e6),
    "rope.scaling.yarn_attn_factor": Real(1e-6, 1e6),
    "rope.scaling.yarn_ext_factor": Real(-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": Real(0, 100),
    "rope.scaling.yarn_beta_fast": Real(1e-3, 1e6),
    "rope.scaling.yarn_beta_slow": Real(1e-3, 1e6),
    "rope.scaling.finetuned": FLAG,
    "ssm.state_size": SIZE,
    "ssm.group_count": SIZE,
    "ssm.time_step_rank": SIZE,
    "ssm.inner_size": SIZE,
    "ssm.conv_kernel": Whole(2, 64),
    "attn_res.block_size": Whole(0, 1 << 16),
    "activation.situ_beta": Real(1e-6, 1e6),
    "activation.situ_linear_beta": Real(-1e6, 1e6),
    "expert_latent_length": Whole(0, 1 << 20),
    "kda.head_dim": SIZE,
    "kda.gate_lower_bound": Real(-100, -1e-6),
    "embedding_length_per_layer_input": COUNT,  # 0: none
    "embedding_scale": Real(0, 1e6),  # 0: 1
    "final_logit_softcapping": Real(0, 1e6),  # 0: none
    "residual_scale": Real(0, 1e6),
    "logit_scale": Real(0, 1e6, above=True),
    "shortconv.l_cache": Whole(2, 64),
    "leading_dense_block_count": COUNT,
    "expert_count": COUNT,
    "expert_used_count": COUNT,
    "expert_group_count": COUNT,
    "expert_group_used_count": COUNT,
    "expert_feed_forward_length": INNER,
    "expert_shared_feed_forward_length": INNER,
    "expert_weights_norm": FLAG,
    "expert_weights_scale": Real(0, 1e6),  # 0 means 1
    "expert_shared_count": Whole(0, 256),
    "expert_gating_func": Whole(0, 16),
    "swiglu_clamp_exp": Real(0, 1e6),  # 0: no clamp
    "swiglu_clamp_shexp": Real(0, 1e6),
    "hyper_connection.count": Whole(1, 64),
    "hyper_connection.low_rank": SIZE,
    "hyper_connection.sinkhorn_iterations": Whole(1, 1000),
    "hyper_connection.epsilon": Real(0, 1),
    "hash_layer_count": COUNT,
    "ple.layers": COUNT,
    "ple.ngram_size": Whole(2, 8),
    "ple.heads_per_ngram": Whole(1, 64),
    "ple.conv_kernel": Whole(2, 64),
    "ple.eos_token_id": Whole(0, 2**31 - 1),
    "ple.layer_multipliers": Whole(0, 2**64 - 1),
    "ple.head_offsets": Whole(0, 2**40),
    "ple.head_vocab_sizes": Whole(1, 2**40),
    "moe_latent_size": Whole(0, 1 << 20),
    "block_size": Whole(2, 256),
    "conv_kernel_size": Whole(1, 64),
    "conv_group_size": SIZE,
    "selector_rank": SIZE,
    "selector_top_k": Whole(1, 256),
    "target_layers": Whole(0, 1 << 20),
    "dflash.block_size": Whole(2, 256),
    "dflash.mask_token_id": TOKEN_ID,
    "dflash.target_layer_ids": Whole(0, 1 << 20),
}
"""Fields whose names begin with the file's architecture."""


class _Required:
    """Marks a field that the file must have."""


REQUIRED = _Required()


class _Array:
    """An array as an error shows it."""

    def __init__(self, n: int, of: str) -> None:
        self.text = f"an array of {n} {of}"

    def __repr__(self) -> str:
        return self.text


class Fields:
    """Metadata, read field by field.

    where   the start of each error: the file
    prefix  precedes every name; "" reads whole names, those of GENERAL
    error   the class raised for a field of a wrong type or value

    A name in GENERAL or HPARAMS has a range there. A reader of any other name passes the range: `legal` for numbers,
    `max_chars` for text. A range that is passed goes before the table's. Without any range a read raises LookupError.
    """

    def __init__(
        self,
        metadata: Mapping[str, object],
        where: str = "",
        prefix: str = "",
        error: type[ModelError] = BadGGUF,
    ) -> None:
        self.metadata = metadata
        self.where, self.prefix, self.error = where, prefix, error
        self.known = HPARAMS if prefix else GENERAL

    def key(self, name: str) -> str:
        """The field's whole name."""
        return self.prefix + name

    def __contains__(self, name: str) -> bool:
        return self.metadata.get(self.key(name)) is not None

    def bad(self, name: str, flaw: str) -> ModelError:
        return self.error(f"{self.where}{self.key(name)} {flaw}")

    def _bad_entry(self, name: str, at: int, flaw: str) -> ModelError:
        return self.error(f"{self.where}entry {at} of {self.key(name)} {flaw}")

    def _is_given(self, name: str, default: object) -> bool:
        if name in self:
            return True
        if isinstance(default, _Required):
            raise self.error(f"{self.where}the metadata has no {self.key(name)}")
        return False

    def _legal(self, name: str, given: L | None, kind: type[L]) -> L:
        """The range passed for a read, else the table's range."""
        legal = self.known.get(name) if given is None else given
        if legal is None:
            raise LookupError(f"no range for {self.key(name)}; pass one of type {kind.__name__}")
        if not isinstance(legal, kind):
            found = type(legal).__name__
            raise TypeError(f"range of {self.key(name)} is of type {found}, not {kind.__name__}")
        return legal

    def _scalar(self, name: str, legal: Whole | Real | OneOf) -> object:
        """The field's value, checked."""
        value = self.metadata[self.key(name)]
        if self.prefix and isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        if flaw := legal.flaw(_described(value)):
            raise self.bad(name, flaw)
        return value

    @overload
    def integer(self, name: str, *, legal: Whole | None = None) -> int: ...
    @overload
    def integer(self, name: str, default: T, *, legal: Whole | None = None) -> int | T: ...
    def integer(self, name: str, default: object = REQUIRED, *, legal: Whole | None = None) -> object:
        legal = self._legal(name, legal, Whole)
        return self._scalar(name, legal) if self._is_given(name, default) else default

    @overload
    def number(self, name: str, *, legal: Real | None = None) -> float: ...
    @overload
    def number(self, name: str, default: T, *, legal: Real | None = None) -> float | T: ...
    def number(self, name: str, default: object = REQUIRED, *, legal: Real | None = None) -> object:
        legal = self._legal(name, legal, Real)
        if not self._is_given(name, default):
            return default
        value = self._scalar(name, legal)
        assert isinstance(value, int | float)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A bool, or 0 or 1. Any name may be read: a flag has no range."""
        return bool(self._scalar(name, FLAG)) if self._is_given(name, default) else default

    @overload
    def text(self, name: str, *, max_chars: int | None = None) -> str: ...
    @overload
    def text(self, name: str, default: T, *, max_chars: int | None = None) -> str | T: ...
    def text(self, name: str, default: object = REQUIRED, *, max_chars: int | None = None) -> object:
        """Text that can be encoded: bytes that are not UTF-8 become U+FFFD."""
        max_chars = self._legal(name, max_chars, int)
        if not self._is_given(name, default):
            return default
        value = self.metadata[self.key(name)]
        if not isinstance(value, str):
            raise self.bad(name, f"is {shown(_described(value))}; want text")
        if len(value) > max_chars:
            raise self.bad(name, f"has {len(value)} characters; want at most {max_chars}")
        return encodable(value)

    def title(self, name: str) -> str:
        """Text that names the file for people, cut to a line; "" if the field is absent or no text."""
        value = self.metadata.get(self.key(name))
        return printable(encodable(value), TITLE_CHARS).strip() if isinstance(value, str) else ""

    def label(
        self, name: str, default: str | _Required = REQUIRED, *, max_chars: int | None = None
    ) -> str:
        """Text for one line of a terminal: characters that can not be printed become U+FFFD."""
        text = self.text(name, default, max_chars=max_chars)
        assert isinstance(text, str)
        return printable(text)

    def integers(
        self, name: str, n: int | None = None, *, or_more: bool = False, legal: Whole | None = None
    ) -> list[int]:
        """An array of integers, `n` of them if given. With `or_more` the entries beyond `n` are not used. The file must have it."""
        legal = self._legal(name, legal, Whole)
        values = self._array(name, n, "biu", "integers", or_more=or_more)
        outside = (values < legal.low) | (values > legal.high)
        if outside.any():
            at = int(outside.argmax())
            raise self._bad_entry(name, at, legal.flaw(int(values[at])))
        whole: list[int] = values.tolist()
        return whole

    def one_or_more(self, name: str, *, legal: Whole | None = None) -> list[int]:
        """One integer, or an array of integers. The file must have it."""
        self._is_given(name, REQUIRED)
        is_array = isinstance(self.metadata[self.key(name)], np.ndarray)
        return self.integers(name, legal=legal) if is_array else [self.integer(name, legal=legal)]

    def each(self, name: str, n: int, *, legal: Whole | None = None) -> list[int]:
        """An integer for each of `n` blocks. A single one counts for all blocks. Entries beyond `n` are not used, as in llama.cpp."""
        values = self.one_or_more(name, legal=legal)
        if not isinstance(self.metadata[self.key(name)], np.ndarray):
            return values * n
        if len(values) < n:
            raise self.bad(name, f"has {len(values)} entries; want one for each of {n} blocks")
        return values[:n]

    def numbers(
        self, name: str, n: int, *, or_more: bool = False, legal: Real | None = None
    ) -> list[float]:
        """An array of `n` finite numbers; `or_more` as in `integers`. The file must have it."""
        legal = self._legal(name, legal, Real)
        values = self._array(name, n, "iuf", "numbers", or_more=or_more)
        outside = ~((values >= legal.low) & (values <= legal.high))  # true of NaN
        if outside.any():
            at = int(outside.argmax())
            raise self._bad_entry(name, at, legal.flaw(float(values[at])))
        real: list[float] = values.astype(np.float64).tolist()
        return real

    def flags(self, name: str, n: int, *, or_more: bool = False) -> list[bool]:
        """An array of `n` bools, or of 0 and 1; `or_more` as in `integers`. The file must have it."""
        values = self._array(name, n, "biu", "bools", or_more=or_more)
        wrong = (values != 0) & (values != 1)
        if wrong.any():
            at = int(wrong.argmax())
            raise self._bad_entry(name, at, f"is {int(values[at])}; want true or false")
        return [bool(x) for x in values]

    def _array(
        self, name: str, n: int | None, kinds: str, wanted: str, *, or_more: bool = False
    ) -> np.ndarray:
        self._is_given(name, REQUIRED)
        value = self.metadata[self.key(name)]
        if n is not None and isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
            found = len(value)  # checked before a long list is converted
            if found < n or (found > n and not or_more):
                raise self.bad(name, f"has {found} entries; want {n}")
        is_plain = isinstance(value, list | tuple) or (isinstance(value, Strings) and not value)
        array = np.asarray(value or []) if is_plain else value
        if not isinstance(array, np.ndarray) or array.ndim != 1 or not _holds(array, kinds):
            raise self.bad(name, f"is {shown(_described(value))}; want an array of {wanted}")
        return array[:n]

    def strings(self, name: str) -> Sequence[str]:
        """An array of texts, unchanged: bytes that are not UTF-8 are lone surrogates. The file must have it."""
        self._is_given(name, REQUIRED)
        value = self.metadata[self.key(name)]
        if isinstance(value, Strings) or (isinstance(value, list) and set(map(type, value)) <= {str}):
            return value
        raise self.bad(name, f"is {shown(_described(value))}; want an array of texts")


def _holds(array: np.ndarray, kinds: str) -> bool:
    return not len(array) or array.dtype.kind in kinds


def encodable(text: str) -> str:
    """Text with U+FFFD for each lone surrogate (a byte that is not UTF-8)."""
    return _SURROGATE.sub("\ufffd", text)


def _described(value: object) -> object:
    """The value, or for an array its length and type."""
    if isinstance(value, np.ndarray):
        return _Array(len(value), str(value.dtype))
    if isinstance(value, list | tuple | Strings):
        return _Array(len(value), "texts" if value and isinstance(value[0], str) else "values")
    return value
