"""A projector file (`--mmproj`): its description, the sizes that it gives pictures, and their rows. No torch."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Literal

import numpy as np

from pyspec.errors import (
    BadTensors,
    ConfigError,
    ModelError,
    PairError,
    RequestError,
    UnknownArchitecture,
)
from pyspec.gguf import GGMLType, GGUFFile, TensorInfo, open_gguf
from pyspec.gguf.fields import Fields
from pyspec.gguf.reader import fingerprint
from pyspec.ranges import Real, Whole, quoted
from pyspec.vision.kinds import KINDS, ProjectorKind, is_matrix, wants_of

log = logging.getLogger(__name__)

ARCHITECTURE = "clip"
ASPECT = 200  # longest side over shortest: a longer strip becomes one of many tokens
MOST_TOKENS = Whole(1, 1 << 14)  # of a picture, breaks left out: ids of its rows are 2^16
SAID = 6  # flaws of tensors that one error lists
WORK = 16 << 20  # bytes that any picture takes
SOUND = ("a.", "mm.a.")  # tensors of audio encoders
WHOLE_NUMBERS = (GGMLType.I8, GGMLType.I16, GGMLType.I32, GGMLType.I64)
_UNIT = Whole(1, 1 << 14)


@dataclass(frozen=True, slots=True)
class Projector:
    """An encoder of pictures, as its file describes it. Its tensors have been checked.

    path       of the file
    type       the name of its type, a key of KINDS
    digest     16 bytes of the file's contents
    patch      pixels a side of a patch
    merge      patches a side that become one token
    image_size pixels a side of a picture of a square type, and of the table of positions
    n_embd, n_ff, n_head, head_dim, n_block  of the encoder
    n_out      width of the text model
    deepstack  blocks behind which more rows are made, which are added behind the text model's first layers
    n_position rows of the table of positions (of each axis for gemma4); 0: none
    eps        of its norms
    act        activation: "gelu" (tanh), "silu", "quick" (x sigmoid(1.702 x))
    mean, std  of pixels / 255, by channel
    pattern    of qwen2.5vl: each pattern-th block sees the whole picture, the others windows; 0: all see it
    least, most  fewest and most pixels of a picture (`limited`)
    n_matrix, n_vector  weights that are multiplied with in the file's precision, and in f32
    is_half    most of its matrices are F16
    """

    path: Path
    type: str
    digest: bytes
    patch: int
    merge: int
    image_size: int
    n_embd: int
    n_ff: int
    n_head: int
    head_dim: int
    n_block: int
    n_out: int
    deepstack: tuple[int, ...]
    n_position: int
    eps: float
    act: Literal["gelu", "silu", "quick"]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pattern: int
    least: int
    most: int
    n_matrix: int = 0
    n_vector: int = 0
    is_half: bool = False

    @property
    def kind(self) -> ProjectorKind:
        """The facts that all of its type share."""
        return KINDS[self.type]

    @property
    def step(self) -> int:
        """Pixels a side of a token."""
        return self.patch * self.merge

    @property
    def low(self) -> int:
        """Lowest number of tokens of a picture."""
        return -(-self.least // self.step**2)

    @property
    def high(self) -> int:
        """Highest number of tokens of a picture: strips may pass it."""
        return max(1, self.most // self.step**2)

    @property
    def width(self) -> int:
        """Numbers of a row: the text model's width, and as many for each part of deepstack."""
        return self.n_out * (1 + len(self.deepstack))

    @property
    def n_deepstack(self) -> int:
        """Parts of a row behind its first `n_out` numbers: part k is added behind layer k of the text model, for rows of pictures only."""
        return len(self.deepstack)

    @property
    def before(self) -> str:
        """Text of special tokens before a picture's rows; "" if there are none."""
        return self.kind.before

    @property
    def after(self) -> str:
        """Text of special tokens behind a picture's rows."""
        return self.kind.after

    def sees_all(self, block: int) -> bool:
        """Whether a block of the encoder has no windows."""
        return not self.pattern or (block + 1) % self.pattern == 0

    def limited(self, low: int | None = None, high: int | None = None) -> Projector:
        """The same with other numbers of tokens a picture (--image-min-tokens, --image-max-tokens); None keeps its own. A square type has no
        choice. Raises ConfigError."""
        if self.kind.is_square:
            return self
        for flag, n in (("--image-min-tokens", low), ("--image-max-tokens", high)):
            if n is not None and (flaw := MOST_TOKENS.flaw(n)):
                raise ConfigError(f"{flag} {flaw}")
        if low is not None and high is not None and low > high:
            raise ConfigError(f"--image-min-tokens {low} is more than --image-max-tokens {high}")
        area = self.step**2
        most = max(self.most, area * (low or 0)) if high is None else area * high
        least = min(self.least, most) if low is None else area * low
        return replace(self, least=least, most=most)

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) in pixels that a picture of this width and height is scaled and padded to. RequestError if the projector has no
        positions for its shape."""
        if self.kind.is_square:
            return self.image_size, self.image_size
        size = fitted(width, height, self.step, self.least, self.most)
        if self.type.startswith("gemma4") and max(size) > self.n_position * self.patch:
            raise RequestError(
                f"the image of {width} x {height} pixels becomes one of {size[0]} x {size[1]}; the projector has positions for"
                f" {self.n_position * self.patch} pixels a side"
            )
        return size

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(nx, ny): columns and rows of tokens of a picture of `size_of`'s width and height. Where positions have one axis, all in one row."""
        columns, rows = width // self.step, height // self.step
        return (columns, rows) if self.kind.has_grid else (self._n_row(columns, rows), 1)

    def n_row(self, width: int, height: int) -> int:
        """Rows of a picture of `size_of`'s width and height."""
        return self._n_row(width // self.step, height // self.step)

    def _n_row(self, columns: int, rows: int) -> int:
        return rows * (columns + 1) - 1 if self.kind.has_breaks else rows * columns

    @property
    def most_tokens(self) -> int:
        """No picture has more tokens, breaks left out: strips may pass `high`."""
        if self.kind.is_square:
            return (self.image_size // self.step) ** 2
        wide, narrow = isqrt(ASPECT * self.high) + 1, isqrt(ASPECT * self.low) + 1
        return max(self.high, wide, self.low + narrow + 2)

    @property
    def most_rows(self) -> int:
        """No picture has more rows."""
        breaks = isqrt(ASPECT * max(self.high, self.low)) + self.high + 1
        return self.most_tokens + (breaks if self.kind.has_breaks else 0)

    def weight_bytes(self, n_byte: int) -> int:
        """Bytes of its weights on a device. n_byte: of a number of a matrix, 2 on GPUs and 4 on CPUs; vectors have 4."""
        return self.n_matrix * n_byte + self.n_vector * 4

    def work_bytes(self, n_byte: int, n_token: int | None = None) -> int:
        """Most bytes of activations while a picture is encoded. n_token: of its tokens; None: the largest picture"""
        n = (self.most_tokens if n_token is None else n_token) * self.merge**2
        e, heads = self.n_embd, self.n_head * self.head_dim
        attention = n_byte * 5 * heads + 18 * heads  # one of queries and keys is turned in f32 at a time
        feed = n_byte * (e + self.n_ff * (4 if self.kind.block.is_gated else 3))
        rows = 4 * e + n_byte * 3 * e + (8 + n_byte) * self.width // self.merge**2
        pixels = 4 * 4 * 3 * self.patch**2
        kept = 4 * (self.width - self.n_out) // self.merge**2
        return WORK + n * (kept + 12 * e + max(pixels, attention, feed, rows))

    def block_flop(self, n_token: int) -> int:
        """Floating-point operations of one block over a picture of `n_token` tokens."""
        n, e, f = n_token * self.merge**2, self.n_embd, self.n_ff
        feed = (6 if self.kind.block.is_gated else 4) * e * f
        return n * (8 * e * e + feed + 4 * n * e)

    def check_pair(self, target: GGUFFile) -> None:
        """Raise PairError if its rows can not stand in a text of this model."""
        arch, name = target.architecture, self.path.name
        if arch not in self.kind.archs:
            made_for = " or ".join(self.kind.archs)
            raise PairError(
                f"{name} is a projector of type {self.type} for {made_for}; the model is of {arch}"
            )
        n_embd = target.hparams.integer("embedding_length")
        n_deep = target.hparams.integer("n_deepstack_layers", 0, legal=Whole(0, 128))
        if (n_embd, n_deep) != (self.n_out, self.n_deepstack):
            parts = f" with {self.n_deepstack} parts of deepstack" if self.n_deepstack else ""
            wants = f" with {n_deep}" if n_deep else ""
            raise PairError(
                f"{name} gives rows of {self.n_out} numbers{parts}; the model's embedding has {n_embd}{wants}: it is another model's projector"
            )
        if "tokenizer.ggml.tokens" in target.fields:
            marks = {mark for mark in (self.before, self.after) if mark}
            if missing := marks.difference(target.fields.strings("tokenizer.ggml.tokens")):
                raise PairError(
                    f"{name} wants {' and '.join(sorted(missing))} around images, which the model's vocabulary does not have"
                )


def fitted(width: int, height: int, step: int, low: int, high: int) -> tuple[int, int]:
    """The multiples of `step` near a width and a height whose product is between `low` and `high`, of about the same shape. As llama.cpp: in
    f32, halves go up."""
    f32 = np.float32
    w, h, unit = f32(width), f32(height), f32(step)
    near = [max(step, math.floor(float(x / unit) + 0.5) * step) for x in (w, h)]
    area = near[0] * near[1]
    if area > high:
        shrink = np.sqrt(w * h / f32(high))
        near = [max(step, math.floor(x / shrink / unit) * step) for x in (w, h)]
    elif area < low:
        grow = np.sqrt(f32(low) / (w * h))
        near = [math.ceil(x * grow / unit) * step for x in (w, h)]
    return near[0], near[1]


def read_projector(
    source: GGUFFile | Path | str, low: int | None = None, high: int | None = None
) -> Projector:
    """The description of a projector file. low, high: as in `limited`.

    Errors: ModelError for a text model's file or one without a vision encoder, UnknownArchitecture for a type that pyspec does not run, BadGGUF
    for a wrong field, BadTensors for missing and misshaped tensors.
    """
    with _opened(source) as file:
        return _read(file).limited(low, high)


@contextmanager
def _opened(source: GGUFFile | Path | str) -> Iterator[GGUFFile]:
    if isinstance(source, GGUFFile):
        yield source
        return
    with open_gguf(source) as file:
        yield file


def _read(file: GGUFFile) -> Projector:
    name = file.path.name
    if file.architecture != ARCHITECTURE:
        raise ModelError(
            f"{name} is a model of the architecture {file.architecture}, no projector: --mmproj wants a file of the architecture {ARCHITECTURE}"
        )
    clip = Fields(file.metadata, file.fields.where, "clip.")
    if not clip.flag("has_vision_encoder", True):
        raise ModelError(f"{name} reads no images (clip.has_vision_encoder is false)")
    v = Fields(file.metadata, file.fields.where, "clip.vision.")
    key = clip if "projector_type" in clip else v
    type = key.label("projector_type", max_chars=64)
    if type not in KINDS:
        raise UnknownArchitecture(
            f"{name} is a projector of the type {quoted(type)}, which pyspec does not run; it runs {', '.join(KINDS)}"
        )
    return _checked(file, _described(file, clip, v, type))


def _described(file: GGUFFile, clip: Fields, v: Fields, type: str) -> Projector:
    """From the fields; the number of positions and the deepstack from the tensors."""
    kind = KINDS[type]
    has_blocks = type != "gemma4uv"
    n_embd = v.integer("embedding_length", legal=_UNIT)
    n_head = v.integer("attention.head_count", legal=_UNIT) if has_blocks else 1
    n_block = v.integer("block_count", legal=Whole(0, 128)) if has_blocks else 0
    head_dim = v.integer("attention.head_dim", n_embd // n_head, legal=_UNIT)
    if head_dim < 4 or head_dim % 4:
        raise v.bad(
            "attention.head_count",
            f"is {n_head}, which makes heads of {head_dim} of {n_embd}; want a multiple of 4",
        )
    patch = v.integer("patch_size", legal=Whole(1, 256))
    merge = v.integer(kind.merge_key, kind.merge, legal=Whole(1, 16))
    image_size = v.integer("image_size", 0, legal=Whole(0, 8192))
    if kind.is_square and (not image_size or image_size % (patch * merge)):
        raise v.bad("image_size", f"is {image_size}; want a multiple of {patch * merge}")
    act: Literal["gelu", "silu", "quick"] = "quick"
    if clip.flag("use_gelu", False):
        act = "gelu"
    elif clip.flag("use_silu", False):
        act = "silu"
    if type == "gemma4uv":  # its patches are as large as tokens
        patch, merge = patch * merge, 1
    area, pixels = (patch * merge) ** 2, Whole(1, 1 << 31)
    least, most = kind.low * area, kind.high * area
    if kind.has_limits:
        least = v.integer("image_min_pixels", least, legal=pixels)
        most = min(v.integer("image_max_pixels", most, legal=pixels), area << 14)
    if least > most:
        raise v.bad("image_min_pixels", f"is {least}; want {most} at most")
    deepstack = tuple(i for i in range(n_block) if f"v.deepstack.{i}.fc1.weight" in file.tensors)
    colour = Real(-100, 100)
    return Projector(
        path=file.path,
        type=type,
        digest=bytes.fromhex(fingerprint(file.path)),
        patch=patch,
        merge=merge,
        image_size=image_size,
        n_embd=n_embd,
        n_ff=v.integer("feed_forward_length", legal=Whole(1, 1 << 18)) if has_blocks else 0,
        n_head=n_head,
        head_dim=head_dim,
        n_block=n_block,
        n_out=v.integer("projection_dim", legal=_UNIT),
        deepstack=deepstack if type == "qwen3vl_merger" else (),
        n_position=_positions(file, v, kind, image_size // patch),
        eps=v.number("attention.layer_norm_epsilon", legal=Real(0, 1, above=True)),
        act=act,
        mean=tuple(v.numbers("image_mean", 3, legal=colour)),
        std=tuple(v.numbers("image_std", 3, legal=Real(1e-6, 100))),
        pattern=v.integer("n_wa_pattern", legal=Whole(1, 128)) if type == "qwen2.5vl_merger" else 0,
        least=least,
        most=most,
    )


def _positions(file: GGUFFile, v: Fields, kind: ProjectorKind, n_side: int) -> int:
    """Rows of the table of positions: a square's, which is scaled to a picture's, or of each axis."""
    table = file.tensors.get("v.position_embd.weight")
    if table is None:
        return 0
    n = table.shape[-2] if len(table.shape) > 1 else 0
    if kind.is_square:
        return n_side * n_side
    if len(table.shape) == 2 and isqrt(n) ** 2 != n:
        raise BadTensors(
            f"{file.path.name}: v.position_embd.weight has {n} rows; want those of a square"
        )
    return n


def _checked(file: GGUFFile, projector: Projector) -> Projector:
    """With the sizes of its tensors. Raises BadTensors with the number of missing, misshaped and unknown ones, and the flaws of the first."""
    is_fused = "v.blk.0.attn_qkv.weight" in file.tensors
    apart = re.compile(r"v\.blk\.\d+\.attn_" + ("[qkv]" if is_fused else "qkv") + r"\.")
    wants = {k: want for k, want in wants_of(projector.kind, projector).items() if not apart.match(k)}
    bad, read, n_matrix, n_vector, n_half = [], set(), 0, 0, 0
    for name, (shape, must) in wants.items():
        own = stored(file, projector, name)
        info = file.tensors.get(own)
        if info is None:
            bad += [f"{name}: missing, want {list(shape)}"] * must
            continue
        read.add(own)
        if flaw := _flaw(info, shape):
            bad.append(f"{name}: {flaw}")
        in_matrix = info.n_elements * is_matrix(name, shape)
        n_matrix += in_matrix
        n_vector += info.n_elements - in_matrix
        n_half += in_matrix * (info.type is GGMLType.F16)
    rest = [name for name in file.tensors if name not in read and not name.startswith(SOUND)]
    bad += [f"{quoted(name)}: nothing reads it" for name in rest if name.startswith("v.blk.")]
    if bad:
        more = f"; and {len(bad) - SAID} more" if len(bad) > SAID else ""
        what = "1 tensor does" if len(bad) == 1 else f"{len(bad)} tensors do"
        said = "; ".join(bad[:SAID]) + more
        raise BadTensors(
            f"{file.path.name}: {what} not fit a projector of type {projector.type}: {said}"
        )
    if rest:
        names = ", ".join(map(quoted, rest[:SAID]))
        log.warning("%s: nothing reads %d of its tensors: %s", file.path, len(rest), names)
    return replace(projector, n_matrix=n_matrix, n_vector=n_vector, is_half=2 * n_half > n_matrix)


def _flaw(info: TensorInfo, shape: tuple[int, ...]) -> str:
    sides = [[n for n in each if n != 1] for each in (info.shape, shape)]
    is_flat = "patch_embd" in info.name and info.n_elements == math.prod(shape)  # a kernel or a matrix
    if sides[0] != sides[1] and not is_flat:
        return f"want {list(shape)}, file has {list(info.shape)}"
    if info.type.layout is None or info.type in WHOLE_NUMBERS:
        return f"type {info.type.name} is not supported"
    return ""


def stored(file: GGUFFile, projector: Projector, name: str) -> str:
    """The name under which a file has a tensor: old files have those of a feed-forward's two matrices exchanged."""
    found = re.fullmatch(r"(v\.blk\.\d+\.)ffn_(up|down)\.(.*)", name)
    if found is None or projector.n_embd == projector.n_ff:
        return name
    down = file.tensors.get(f"{found[1]}ffn_down.weight")
    if down is None or down.shape != (projector.n_ff, projector.n_embd):
        return name
    other = "down" if found[2] == "up" else "up"
    return f"{found[1]}ffn_{other}.{found[3]}"
