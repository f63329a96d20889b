"""Types of projectors: the facts that all files of a type share, and the tensors of each. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pyspec.vision.projector import Projector

Wants = dict[str, tuple[tuple[int, ...], bool]]
"""Shape (torch order) by name, and whether a file must have the tensor."""


@dataclass(frozen=True, slots=True)
class BlockKind:
    """A block of an encoder.

    is_rms        norms are RMS without bias; else LayerNorm with bias
    has_bias      matrices must have biases; else they may
    is_gated      the feed-forward is down(act(gate n) up n); else down(act(up n))
    is_gemma      norms of queries and keys by weights and of values without, behind the products, too; scores are not scaled
    """

    is_rms: bool = False
    has_bias: bool = False
    is_gated: bool = False
    is_gemma: bool = False


@dataclass(frozen=True, slots=True)
class ProjectorKind:
    """The facts that all projectors of a type share.

    archs        architectures of text models that it is made for
    before, after  texts of special tokens around a picture's rows; "": none
    low, high    lowest and highest number of tokens of a picture, unless its file names numbers of pixels and `has_limits`
    merge_key, merge  the key behind "clip.vision." of the patches a side that become one token, and its default
    block        its blocks
    tensors      all but those of blocks
    how          Pillow's name of the filter that scales
    is_square    each picture becomes image_size x image_size
    has_grid     positions of its text model have rows and columns
    has_breaks   a row stands behind each row of tokens but the last
    has_limits   "clip.vision.image_min_pixels" and "image_max_pixels" of a file count, as in llama.cpp
    """

    archs: tuple[str, ...]
    before: str
    after: str
    low: int
    high: int
    merge_key: str
    merge: int
    block: BlockKind
    tensors: Callable[[Projector], Wants]
    how: Literal["BICUBIC", "BILINEAR"] = "BICUBIC"
    is_square: bool = False
    has_grid: bool = False
    has_breaks: bool = False
    has_limits: bool = False


def wants_of(kind: ProjectorKind, p: Projector) -> Wants:
    """All tensors of an encoder and its projector."""
    wants = kind.tensors(p)
    for i in range(p.n_block):
        wants |= _block(kind.block, f"v.blk.{i}", p)
    return wants


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether streams are multiplied with a tensor, in its precision; the others are read in f32."""
    return len(shape) == 2 and name != "v.position_embd.weight"


def _block(kind: BlockKind, at: str, p: Projector) -> Wants:
    """Of one block. Queries, keys and values are in one matrix or in three: a file has either."""
    e, f, a = p.n_embd, p.n_ff, p.n_head * p.head_dim
    wants = _norm(f"{at}.ln1", e, kind.is_rms) | _norm(f"{at}.ln2", e, kind.is_rms)
    heads = dict.fromkeys(("attn_q", "attn_k", "attn_v"), (a, e)) | {"attn_qkv": (3 * a, e)}
    feed = {"ffn_up": (f, e), "ffn_down": (e, f)} | ({"ffn_gate": (f, e)} if kind.is_gated else {})
    for name, shape in (heads | {"attn_out": (e, a)} | feed).items():
        wants |= _matrix(f"{at}.{name}", shape, kind.has_bias)
    if kind.is_gemma:
        for name, n in (
            ("attn_post", e),
            ("ffn_post", e),
            ("attn_q", p.head_dim),
            ("attn_k", p.head_dim),
        ):
            wants[f"{at}.{name}_norm.weight"] = (n,), True
        wants[f"{at}.out_scale.weight"] = (1,), False
    return wants


CLAMPS = ("input_min", "input_max", "output_min", "output_max")
"""Numbers beside a matrix, between which its input and its output are held."""


def _matrix(name: str, shape: tuple[int, ...], has_bias: bool = False) -> Wants:
    beside: Wants = {f"{name}.{limit}": ((1,), False) for limit in CLAMPS}
    return beside | {f"{name}.weight": (shape, True), f"{name}.bias": (shape[:1], has_bias)}


def _norm(name: str, n: int, is_rms: bool = False) -> Wants:
    weight: Wants = {f"{name}.weight": ((n,), True)}
    return weight if is_rms else weight | {f"{name}.bias": ((n,), True)}


def _patches(p: Projector, n_kernel: int = 1) -> Wants:
    names = ("v.patch_embd.weight", "v.patch_embd.weight.1")[:n_kernel]
    return dict.fromkeys(names, ((p.n_embd, 3, p.patch, p.patch), True))


def _qwen2vl(p: Projector) -> Wants:
    n = p.merge**2 * p.n_embd
    wants = _patches(p, 2) | _norm("v.post_ln", p.n_embd, p.kind.block.is_rms)
    return wants | _matrix("mm.0", (n, n), True) | _matrix("mm.2", (p.n_out, n), True)


def _qwen3vl(p: Projector) -> Wants:
    n = p.merge**2 * p.n_embd
    wants = _qwen2vl(p) | {"v.patch_embd.bias": ((p.n_embd,), True)}
    wants["v.position_embd.weight"] = (p.n_position, p.n_embd), True
    for i in p.deepstack:
        at = f"v.deepstack.{i}"
        wants |= _norm(f"{at}.norm", n) | _matrix(f"{at}.fc1", (n, n), True)
        wants |= _matrix(f"{at}.fc2", (p.n_out, n), True)
    return wants


def _gemma3(p: Projector) -> Wants:
    own: Wants = {
        "v.patch_embd.bias": ((p.n_embd,), True),
        "v.position_embd.weight": ((p.n_position, p.n_embd), True),
        "mm.soft_emb_norm.weight": ((p.n_embd,), True),
        "mm.input_projection.weight": ((p.n_embd, p.n_out), True),
    }
    return _patches(p) | _norm("v.post_ln", p.n_embd) | own


def _gemma4(p: Projector) -> Wants:
    return {
        "v.position_embd.weight": ((2, p.n_position, p.n_embd), True),
        **_matrix("mm.input_projection", (p.n_out, p.n_embd)),
    }


def _gemma4v(p: Projector) -> Wants:
    n = (p.n_embd,)
    beside = dict.fromkeys(("v.std_bias", "v.std_scale", "v.std_scale.weight"), (n, False))
    return _patches(p) | _gemma4(p) | beside


def _gemma4uv(p: Projector) -> Wants:
    n = 3 * p.patch**2
    return (
        _gemma4(p)
        | {"v.patch_embd.weight": ((p.n_embd, n), True), "v.patch_embd.bias": ((p.n_embd,), True)}
        | _norm("v.patch_norm.1", n)
        | _norm("v.patch_norm.2", p.n_embd)
        | _norm("v.patch_norm.3", p.n_embd)
    )


def _pixtral(p: Projector) -> Wants:
    wants = _patches(p) | _norm("v.pre_ln", p.n_embd, True)
    if p.merge > 1:
        wants |= _norm("mm.input_norm", p.n_embd, True)
        wants |= _matrix("mm.patch_merger", (p.n_embd, p.merge**2 * p.n_embd))
    wants |= _matrix("mm.1", (p.n_out, p.n_embd)) | _matrix("mm.2", (p.n_out, p.n_out))
    return wants | {"v.token_embd.img_break": ((p.n_out,), True)}


_QWEN = ("<|vision_start|>", "<|vision_end|>", 8, 4096, "spatial_merge_size", 2)
_GEMMA4 = ("<|image>", "<image|>", 70, 1120, "projector.scale_factor", 3)
_PLAIN = BlockKind(has_bias=True)

KINDS: dict[str, ProjectorKind] = {
    "qwen3vl_merger": ProjectorKind(
        ("qwen35", "qwen35moe", "qwen4exp", "qwen3vl", "qwen3vlmoe"),
        *_QWEN,
        _PLAIN,
        _qwen3vl,
        has_grid=True,
        has_limits=True,
    ),
    "gemma3": ProjectorKind(
        ("gemma3",),
        *("<start_of_image>", "<end_of_image>", 1, 1 << 14),
        *("projector.scale_factor", 4),
        _PLAIN,
        _gemma3,
        how="BILINEAR",
        is_square=True,
    ),
    "gemma4v": ProjectorKind(
        ("gemma4",), *_GEMMA4, BlockKind(True, is_gated=True, is_gemma=True), _gemma4v
    ),
    "gemma4uv": ProjectorKind(("gemma4",), *_GEMMA4, BlockKind(), _gemma4uv),
    "pixtral": ProjectorKind(
        ("mistral3", "llama"),
        *("", "[IMG_END]", 8, 1024, "spatial_merge_size", 1),
        BlockKind(True, is_gated=True),
        _pixtral,
        has_breaks=True,
    ),
    "qwen2vl_merger": ProjectorKind(
        ("qwen2vl",), *_QWEN, _PLAIN, _qwen2vl, has_grid=True, has_limits=True
    ),
    "qwen2.5vl_merger": ProjectorKind(
        ("qwen2vl",), *_QWEN, BlockKind(True, True, True), _qwen2vl, has_grid=True, has_limits=True
    ),
}
"""By the name in `clip.projector_type`."""
