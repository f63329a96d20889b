"""Rows of pictures: of every fixture against the formulas in f64, and of types without a fixture against plain sums."""

from __future__ import annotations

import json
import weakref
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from altered import IMAGES, NAMES, altered, mmproj, values, write
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyspec.gguf import GGMLType, open_gguf
from pyspec.vision.encoder import Encoder
from pyspec.vision.pixels import prepared
from pyspec.vision.projector import read_projector

CPU = torch.device("cpu")


def encoder(path: Path, dtype: torch.dtype | None = None) -> Encoder:
    with open_gguf(path) as file:
        return Encoder.load(file, read_projector(file), CPU, dtype)


@cache
def said(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    arrays = np.load(IMAGES / f"{name}.npz")
    return json.loads((IMAGES / f"{name}.json").read_text())["prompts"], dict(arrays)


def pictures(name: str) -> list[tuple[str, str, dict]]:
    """(key of the rows in the npz, file, what llama.cpp said) of each picture in a prompt."""
    found = []
    for key, prompt in said(name)[0].items():
        files = [part["image"] for part in prompt["parts"] if isinstance(part, dict)]
        chunks = [chunk for chunk in prompt["chunks"] if "ids" not in chunk]
        found += [(f"{key}.exact{i}", *each) for i, each in enumerate(zip(files, chunks, strict=True))]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_every_picture_are_those_of_the_formulas(name: str):
    own, (_, arrays) = encoder(mmproj(name)), said(name)
    for key, file, chunk in pictures(name):
        picture = prepared(own.projector, (IMAGES / file).read_bytes())
        assert (picture.nx, picture.ny) == (chunk["nx"], chunk["ny"])
        assert picture.n_row == chunk["image_tokens"]
        rows = own.encode(picture)
        assert rows.dtype == torch.float32 and rows.shape == (picture.n_row, own.projector.width)
        np.testing.assert_allclose(rows.numpy(), arrays[key], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(name: str, dtype: torch.dtype):
    """As on GPUs: products in 16 bits, and a stream in f32."""
    own, (_, arrays) = encoder(mmproj(name), dtype), said(name)
    key, file, _ = pictures(name)[0]
    rows = own.encode(prepared(own.projector, (IMAGES / file).read_bytes())).numpy()
    error = np.abs(rows - arrays[key]).max() / arrays[key].std()
    assert error < (0.3 if dtype == torch.bfloat16 else 0.04)


@pytest.mark.parametrize("name", ["qwen3vl", "gemma4", "mistral3"])
@pytest.mark.parametrize("n_block", [1, 2, 7])
def test_slices_give_the_rows_of_the_whole(name: str, n_block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pyspec.vision.encoder.PIECE", 10_000)
    own = encoder(mmproj(name))
    picture = prepared(own.projector, (IMAGES / "odd.png").read_bytes())
    *pauses, rows = own.slices(picture, n_block)
    assert pauses == [None] * ((own.projector.n_block - 1) // n_block)
    assert torch.equal(rows, own.encode(picture))


@pytest.mark.parametrize("name", NAMES)
def test_a_large_picture_is_encoded_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch):
    """Behind each piece of a block others may have the CPU. Rows are those of whole blocks."""
    own = encoder(mmproj(name))
    picture = prepared(own.projector, (IMAGES / "wide.jpg").read_bytes())
    whole = own.encode(picture)
    n_patch = picture.pixels.size // 3 // own.projector.patch**2
    monkeypatch.setattr("pyspec.vision.encoder.PIECE", 23)
    *pauses, rows = own.slices(picture, 1)
    n_block, n_piece = own.projector.n_block, -(-n_patch // 23)
    assert n_piece > 5 and len(pauses) == n_block * (2 * n_piece - 1) + max(0, n_block - 1)
    torch.testing.assert_close(rows, whole, rtol=0, atol=3e-5)


def test_a_slice_leaves_room_for_other_pictures():
    """Two encodings that take turns do not touch each other."""
    own = encoder(mmproj("qwen3vl"))
    both = [prepared(own.projector, (IMAGES / file).read_bytes()) for file in ("odd.png", "wide.jpg")]
    one, other = (own.slices(picture, 1) for picture in both)
    assert next(one) is None and next(other) is None
    for picture, rest in zip(both, (one, other), strict=True):
        assert torch.equal(list(rest)[-1], own.encode(picture))


class Live(TorchDispatchMode):
    """Counts bytes of tensors that are made, and the most that lived at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: weakref.WeakSet = weakref.WeakSet()

    def _left(self, n_byte: int) -> None:
        self.now -= n_byte

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for each in tree_leaves(args):  # weights were there before
            if isinstance(each, torch.Tensor):
                self._seen.add(each.untyped_storage())
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            storage = each.untyped_storage() if isinstance(each, torch.Tensor) else None
            if storage is not None and storage not in self._seen:
                self._seen.add(storage)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._left, storage.nbytes())
        return out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_picture_takes_no_more_than_the_plan(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """Beside a constant that is for small ones, and never more for each pair of patches."""
    monkeypatch.setattr("pyspec.vision.projector.WORK", 20_000)
    own = encoder(mmproj(name), dtype)
    for file in ("grey.png", "wide.jpg"):
        picture = prepared(own.projector, (IMAGES / file).read_bytes())
        with Live() as live:
            own.encode(picture)
        n_token = picture.pixels.size // 3 // own.projector.step**2
        plan = own.projector.work_bytes(dtype.itemsize, n_token)
        assert plan / 3 < live.most < plan


def test_old_files_with_exchanged_feed_forwards(tmp_path: Path):
    tensors: dict[str, np.ndarray] = {}
    for name, value in values("gemma3").items():
        other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
        part = name.split(".")[-2]
        tensors[name.replace(part, other.get(part, part))] = value
    old = encoder(altered(tmp_path / "old.gguf", "gemma3", tensors=tensors))
    picture = prepared(old.projector, (IMAGES / "odd.png").read_bytes())
    assert torch.equal(old.encode(picture), encoder(mmproj("gemma3")).encode(picture))


def test_queries_keys_and_values_may_stand_in_three_tensors(tmp_path: Path):
    tensors: dict[str, np.ndarray | None] = {}
    for name, value in values("qwen35").items():
        if "attn_qkv" in name:
            tensors[name] = None
            for part, each in zip("qkv", np.split(value, 3), strict=True):
                tensors[name.replace("qkv", part)] = each
    apart = encoder(altered(tmp_path / "apart.gguf", "qwen35", tensors=tensors))
    picture = prepared(apart.projector, (IMAGES / "odd.png").read_bytes())
    torch.testing.assert_close(
        apart.encode(picture), encoder(mmproj("qwen35")).encode(picture), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("kind", "atol"), [(GGMLType.F16, 2e-2), (GGMLType.BF16, 1e-1), (GGMLType.Q8_0, 1e-1)]
)
def test_matrices_of_other_types_are_read(tmp_path: Path, kind: GGMLType, atol: float):
    every = values("qwen3vl")
    rows = [name for name, t in every.items() if t.ndim > 1 and not t.shape[-1] % kind.block_size]
    other = encoder(altered(tmp_path / "x.gguf", "qwen3vl", types=dict.fromkeys(rows, kind)))
    assert len(rows) > 4 and other.projector.is_half == (kind is GGMLType.F16)
    picture = prepared(other.projector, (IMAGES / "odd.png").read_bytes())
    want = encoder(mmproj("qwen3vl")).encode(picture)
    torch.testing.assert_close(other.encode(picture), want, rtol=0, atol=atol)
    assert not torch.equal(other.encode(picture), want)


def test_windows_hide_the_rest_of_a_picture(tmp_path: Path):
    """Qwen2.5-VL: plain sums over a mask of the whole picture agree, at sizes that windows do not divide."""
    rng, n, f, patch = np.random.default_rng(5), 16, 24, 14

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    tensors = {"v.patch_embd.weight": normal(n, 3, patch, patch), "v.post_ln.weight": 1 + normal(n)}
    tensors["v.patch_embd.weight.1"] = normal(n, 3, patch, patch)
    for i in range(2):
        shapes = {f"attn_{k}": (n, n) for k in ("q", "k", "v", "out")}
        shapes |= {"ffn_gate": (f, n), "ffn_up": (f, n), "ffn_down": (n, f)}
        for name, shape in shapes.items():
            tensors[f"v.blk.{i}.{name}.weight"] = 2 * normal(*shape)
            tensors[f"v.blk.{i}.{name}.bias"] = normal(shape[0])
        for name in ("ln1", "ln2"):
            tensors[f"v.blk.{i}.{name}.weight"] = 1 + normal(n)
    for name, shape in {"mm.0": (4 * n, 4 * n), "mm.2": (20, 4 * n)}.items():
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = normal(*shape), normal(shape[0])
    fields = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": "qwen2.5vl_merger",
        "clip.use_silu": True,
        "clip.vision.image_size": 560,
        "clip.vision.patch_size": patch,
        "clip.vision.embedding_length": n,
        "clip.vision.feed_forward_length": f,
        "clip.vision.block_count": 2,
        "clip.vision.attention.head_count": 2,
        "clip.vision.projection_dim": 20,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_mean": [0.5] * 3,
        "clip.vision.image_std": [0.5] * 3,
        "clip.vision.n_wa_pattern": 2,
    }
    own = encoder(write(tmp_path / "windows.gguf", fields, tensors))
    side = rng.integers(0, 256, (14 * 2 * 9, 14 * 2 * 5, 3), dtype=np.uint8)
    from PIL import Image

    from pyspec.vision.pixels import fit_into

    image = Image.fromarray(side)
    assert own.projector.size_of(*image.size) == image.size
    picture = prepared(own.projector, _png(image))
    np.testing.assert_array_equal(picture.pixels, fit_into(image, *image.size, "BICUBIC"))
    rows = own.encode(picture).double().numpy()
    want = _windowed(picture.pixels, {k: v.astype(np.float64) for k, v in tensors.items()}, n)
    np.testing.assert_allclose(rows, want, rtol=0, atol=1e-4)


def _png(image) -> bytes:
    import io

    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _windowed(pixels: np.ndarray, t: dict[str, np.ndarray], n: int) -> np.ndarray:
    """The rows, with [n, n] scores and a mask; patches row by row until the end."""
    x = (pixels / 255 - 0.5) / 0.5
    rows, columns = x.shape[0] // 14, x.shape[1] // 14
    cut = x.reshape(rows, 14, columns, 14, 3).transpose(0, 2, 4, 1, 3).reshape(rows * columns, -1)
    kernel = (t["v.patch_embd.weight"] + t["v.patch_embd.weight.1"]).reshape(n, -1)
    z = cut @ kernel.T
    py, px = (g.reshape(-1) for g in np.mgrid[0:rows, 0:columns])
    window = (py // 8) * 100 + px // 8
    inside = window[:, None] == window

    def rms(y: np.ndarray, name: str) -> np.ndarray:
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6) * t[f"{name}.weight"]

    def product(y: np.ndarray, name: str) -> np.ndarray:
        return y @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    d = n // 2  # of a head
    turn = 10000.0 ** (-np.arange(d // 4) * 4 / d)
    angle = np.concatenate([py[:, None] * turn, px[:, None] * turn], -1)

    def roped(y: np.ndarray) -> np.ndarray:
        a, b, c, s = y[:, : d // 2], y[:, d // 2 :], np.cos(angle), np.sin(angle)
        return np.concatenate([a * c - b * s, a * s + b * c], -1)

    for i in range(2):
        y, heads = rms(z, f"v.blk.{i}.ln1"), []
        for h in range(2):
            q, k, v = (product(y, f"v.blk.{i}.attn_{m}")[:, h * d : (h + 1) * d] for m in "qkv")
            score = roped(q) @ roped(k).T / np.sqrt(d)
            score = np.where(inside, score, -np.inf) if i == 0 else score
            weight = np.exp(score - score.max(-1, keepdims=True))
            heads.append(weight / weight.sum(-1, keepdims=True) @ v)
        z = z + product(np.concatenate(heads, -1), f"v.blk.{i}.attn_out")
        y = rms(z, f"v.blk.{i}.ln2")
        gate = product(y, f"v.blk.{i}.ffn_gate")
        z = z + product(
            gate / (1 + np.exp(-gate)) * product(y, f"v.blk.{i}.ffn_up"), f"v.blk.{i}.ffn_down"
        )
    z = rms(z, "v.post_ln").reshape(rows // 2, 2, columns // 2, 2, n).transpose(0, 2, 1, 3, 4)
    y = product(z.reshape(-1, 4 * n), "mm.0")
    y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    return product(y, "mm.2")
