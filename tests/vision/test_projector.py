"""What a projector file is, the sizes that it gives, and the files and pairs that are refused."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from altered import IMAGES, NAMES, altered, mmproj, values

from pyspec.errors import (
    BadGGUF,
    BadTensors,
    ConfigError,
    ModelError,
    PairError,
    PyspecError,
    RequestError,
    UnknownArchitecture,
)
from pyspec.gguf import open_gguf
from pyspec.hub.names import choose_projector
from pyspec.models import read_config
from pyspec.vision.projector import ASPECT, Projector, fitted, read_projector


def test_a_projector_says_what_stands_around_its_rows():
    found = {name: read_projector(mmproj(name)) for name in NAMES}
    assert {name: (p.before, p.after) for name, p in found.items()} == {
        "qwen35": ("<|vision_start|>", "<|vision_end|>"),
        "qwen3vl": ("<|vision_start|>", "<|vision_end|>"),
        "gemma3": ("<start_of_image>", "<end_of_image>"),
        "gemma4": ("<|image>", "<image|>"),
        "gemma4-e": ("<|image>", "<image|>"),
        "mistral3": ("", "[IMG_END]"),
    }
    assert {name: (p.width, p.n_deepstack) for name, p in found.items() if p.width != 32} == {
        "qwen3vl": (96, 2)
    }
    assert len({p.digest for p in found.values()}) == len(NAMES)


def _near(x: Fraction, step: int) -> int:
    return max(step, (x / step + Fraction(1, 2)).__floor__() * step)


def test_sizes_of_3200_pictures_follow_the_formula():
    """Against exact numbers: f32 decides otherwise only where a quotient is a whole number but for its rounding."""
    rng, n_other = random.Random(3), 0
    for _ in range(3200):
        step, low = rng.choice([28, 32, 42, 48]), rng.choice([4, 8, 70])
        high = low * rng.choice([1, 3, 16, 512])
        width, height = (round(math.exp(rng.uniform(0, 9))) for _ in range(2))
        size = fitted(width, height, step, low * step * step, high * step * step)
        want = [_near(Fraction(n), step) for n in (width, height)]
        if want[0] * want[1] > high * step * step:
            scale = math.sqrt(width * height / (high * step * step))
            want = [max(step, math.floor(n / scale / step) * step) for n in (width, height)]
        elif want[0] * want[1] < low * step * step:
            scale = math.sqrt(low * step * step / (width * height))
            want = [math.ceil(n * scale / step) * step for n in (width, height)]
        if list(size) != want:
            assert all(abs(a - b) in (0, step) for a, b in zip(size, want, strict=True))
            n_other += 1
    assert n_other <= 40


@pytest.mark.parametrize(
    ("width", "height", "size"),
    [
        (45, 37, (128, 96)),  # below the lowest number of tokens
        (1024, 1024, (1024, 1024)),
        (1040, 1008, (1056, 1024)),  # halves go up
        (8000, 6000, (2336, 1760)),  # above the highest
        (1, 200, (32, 1280)),
        (640, 480, (640, 480)),
    ],
)
def test_sizes_of_qwen(width: int, height: int, size: tuple[int, int]):
    assert fitted(width, height, 32, 8 * 1024, 4096 * 1024) == size


@pytest.mark.parametrize("name", NAMES)
def test_no_picture_has_more_rows_than_the_plan(name: str):
    rng = random.Random(7)
    for low, high in ((None, None), (1, 3), (40, 40), (None, 100)):
        projector = read_projector(mmproj(name), low, high)
        for _ in range(800):
            short = rng.randint(1, 3000)
            long = min(short * rng.randint(1, ASPECT), 64_000_000 // short)
            sides = rng.sample((short, max(short, long)), 2)
            try:
                size = projector.size_of(*sides)
            except RequestError as error:
                assert "positions for 384 pixels a side" in str(error)
                continue
            assert not any(n % projector.step for n in size)
            assert projector.n_row(*size) <= projector.most_rows < 1 << 16
            nx, ny = projector.grid(*size)
            assert projector.n_row(*size) == nx * ny


def test_limits_of_tokens():
    projector = read_projector(mmproj("qwen35"))
    assert (projector.low, projector.high) == (8, 4096)
    assert (projector.limited(high=5).low, projector.limited(high=5).high) == (5, 5)
    assert (projector.limited(low=5000).low, projector.limited(low=5000).high) == (5000, 5000)
    size = read_projector(mmproj("qwen35"), 40, 40).size_of(45, 37)
    assert 40 <= projector.n_row(*size) <= 60
    for low, high in ((0, None), (None, 0), (9, 7), (None, 1 << 20)):
        with pytest.raises(ConfigError, match="--image-m"):
            projector.limited(low, high)
    square = replace(read_projector(mmproj("gemma3")), n_embd=1152, n_ff=4304)
    assert square.limited(3, 4) == square


@pytest.mark.parametrize(
    ("low", "high", "rows"),
    [
        (20000, None, [340, 338, 324, 950]),
        (None, 1000, [12, 10, 9, 12]),
        (20000, 40000, [340, 338, 324, 600]),
        (500, 2000, [30, 24, 9, 24]),
    ],
)
def test_numbers_of_pixels_that_a_file_names(
    tmp_path: Path, low: int | None, high: int | None, rows: list[int]
):
    """Rows as llama.cpp's of October 2026 gives them, which reads these fields in Qwen's files only."""
    fields = {"clip.vision.image_min_pixels": low, "clip.vision.image_max_pixels": high}
    sizes = ((45, 37), (131, 61), (10, 10), (300, 200))
    projector = read_projector(altered(tmp_path / "x.gguf", "qwen35", fields))
    assert [projector.n_row(*projector.size_of(*size)) for size in sizes] == rows
    assert max(rows) <= projector.most_rows and projector.low <= projector.high
    few = projector.limited(100, 100)
    assert few.n_row(*few.size_of(131, 61)) <= 100 <= few.most_rows, "flags go before the file"
    pixtral = read_projector(altered(tmp_path / "y.gguf", "mistral3", fields))
    plain = read_projector(mmproj("mistral3"))
    assert [pixtral.size_of(*size) for size in sizes] == [plain.size_of(*size) for size in sizes]


@pytest.mark.parametrize("name", NAMES)
def test_a_projector_fits_its_own_model(name: str):
    projector = read_projector(mmproj(name))
    with open_gguf(IMAGES / f"{name}.gguf") as target:
        projector.check_pair(target)


def test_a_projector_of_another_model_is_refused(tmp_path: Path):
    with open_gguf(IMAGES / "qwen35.gguf") as target:
        with pytest.raises(PairError, match="type gemma3 for gemma3; the model is of qwen35"):
            read_projector(mmproj("gemma3")).check_pair(target)
        with pytest.raises(PairError, match=r"32 numbers with 2 parts of deepstack; .* has 32"):
            read_projector(mmproj("qwen3vl")).check_pair(target)
        fields = {"clip.vision.projection_dim": 40}
        wide = {"mm.2.weight": np.zeros((40, 64)), "mm.2.bias": np.zeros(40)}
        other = read_projector(altered(tmp_path / "x.gguf", "qwen35", fields, wide))
        with pytest.raises(PairError, match="rows of 40 numbers; the model's embedding has 32"):
            other.check_pair(target)
    with open_gguf(IMAGES.parent / "gemma4-dense.gguf") as target:
        if target.hparams.integer("embedding_length") == 32:
            with pytest.raises(PairError, match="vocabulary does not have"):
                read_projector(mmproj("gemma4")).check_pair(target)


def test_a_text_model_is_no_projector_and_a_projector_no_model():
    with pytest.raises(ModelError, match="architecture qwen35, no projector"):
        read_projector(IMAGES / "qwen35.gguf")
    with open_gguf(mmproj("qwen35")) as file, pytest.raises(UnknownArchitecture, match="--mmproj"):
        read_config(file)


@pytest.mark.parametrize("kind", ["internvl", "lfm2", "kimik25", "\x1b[31m", "x" * 60])
def test_a_type_that_is_not_run_is_named(tmp_path: Path, kind: str):
    path = altered(tmp_path / "x.gguf", "qwen35", {"clip.projector_type": kind})
    with pytest.raises(UnknownArchitecture, match="it runs qwen3vl_merger") as error:
        read_projector(path)
    assert str(error.value).isprintable() and kind[:3].strip("\x1b") in str(error.value)


def test_a_file_that_only_hears_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match="reads no images"):
        read_projector(altered(tmp_path / "x.gguf", "qwen35", {"clip.has_vision_encoder": False}))


def test_tensors_of_sound_are_left_unread(tmp_path: Path):
    sound = {"a.blk.0.ln1.weight": np.ones(3), "mm.a.fc.weight": np.ones((2, 2))}
    fields = {"clip.has_audio_encoder": True}
    path = altered(tmp_path / "x.gguf", "gemma4", fields, sound)
    assert read_projector(path).n_matrix == read_projector(mmproj("gemma4")).n_matrix


WRONG = {
    "clip.vision.patch_size": (0, 257, "x", 4.5),
    "clip.vision.image_size": (8193, -1),
    "clip.vision.embedding_length": (0, 1 << 20),
    "clip.vision.feed_forward_length": (0,),
    "clip.vision.block_count": (129, -1),
    "clip.vision.attention.head_count": (0, 5, 16),
    "clip.vision.attention.layer_norm_epsilon": (0.0, math.nan, 2.0),
    "clip.vision.projection_dim": (0, 1 << 30),
    "clip.vision.image_mean": ([0.5, 0.5], [math.inf] * 3, 0.5),
    "clip.vision.image_std": ([0.0] * 3, [0.5] * 4),
    "clip.vision.spatial_merge_size": (0, 17),
    "clip.vision.image_min_pixels": (0, 1 << 30),
    "clip.vision.image_max_pixels": (0, -1),
    "clip.projector_type": (7, "x" * 70),
    "clip.use_gelu": (3, "yes"),
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, some in WRONG.items() for v in some])
def test_a_wrong_field_is_named(tmp_path: Path, key: str, value: object):
    with pytest.raises(BadGGUF, match=key.replace(".", r"\.")):
        read_projector(altered(tmp_path / "x.gguf", "qwen35", {key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clip.vision.block_count", 1),
        ("clip.vision.block_count", 3),
        ("clip.vision.embedding_length", 32),
        ("clip.vision.feed_forward_length", 25),
        ("clip.vision.patch_size", 5),
        ("clip.vision.projection_dim", 33),
        ("clip.vision.spatial_merge_size", 3),
    ],
)
def test_a_field_that_its_tensors_contradict_is_refused(tmp_path: Path, key: str, value: int):
    with pytest.raises(BadTensors, match=r"does not|do not"):
        read_projector(altered(tmp_path / "x.gguf", "qwen35", {key: value}))


@pytest.mark.parametrize("name", NAMES)
def test_any_tensor_that_is_missing_or_misshaped_is_refused_or_not_needed(tmp_path: Path, name: str):
    """Never another error, and never a file that can be read and not loaded."""
    import torch

    from pyspec.vision.encoder import Encoder

    free = ("_min", "_max", "out_scale.weight", "std_bias", "std_scale", ".fc1.weight")
    path, every = tmp_path / "x.gguf", values(name)
    for key, value in every.items():
        for wrong in (None, np.ones((*value.shape[:-1], value.shape[-1] + 1)), np.ones(7)):
            altered(path, name, tensors={key: wrong})
            try:
                with open_gguf(path) as file:
                    Encoder.load(file, read_projector(file), torch.device("cpu"))
            except BadTensors as error:
                assert key in str(error) or "attn_q" in key
            else:
                assert wrong is None and key.endswith(free), key


def test_a_tensor_that_nothing_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """In a block it makes another encoder; elsewhere the log names it."""
    path = tmp_path / "x.gguf"
    altered(path, "qwen35", tensors={"v.blk.0.attn_q_norm.weight": np.ones(8)})
    with pytest.raises(BadTensors, match=r"attn_q_norm.weight': nothing reads it"):
        read_projector(path)
    read_projector(altered(path, "qwen35", tensors={"v.class_embd": np.ones(16)}))
    assert "nothing reads 1 of its tensors: 'v.class_embd'" in caplog.text


def test_a_file_that_is_cut_short_or_damaged_is_a_bad_file(tmp_path: Path):
    whole, path = mmproj("qwen35").read_bytes(), tmp_path / "x.gguf"
    rng = random.Random(1)
    for _ in range(120):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(2600)] = rng.randrange(256)
        path.write_bytes(data[: rng.choice([len(data), len(data), rng.randrange(len(data))])])
        try:
            read_projector(path)
        except PyspecError as error:
            assert "\n" not in str(error)


def test_bytes_of_the_plan():
    projector = read_projector(mmproj("qwen3vl"))
    with open_gguf(mmproj("qwen3vl")) as file:
        assert projector.weight_bytes(4) == 4 * file.n_params
    assert projector.weight_bytes(2) < projector.weight_bytes(4)
    square = replace(read_projector(mmproj("gemma3")), n_embd=1152, n_ff=4304)
    assert square.work_bytes(2) < square.work_bytes(4) == square.work_bytes(4, square.most_tokens)
    assert projector.work_bytes(4, 100) < projector.work_bytes(4, 200) < projector.work_bytes(4)


FILES = ["m-Q4_K_M.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf", "mmproj-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("target", "names", "chosen"),
    [
        ("m-Q4_K_M.gguf", FILES, "mmproj-Q8_0.gguf"),
        ("m-Q4_K_M.gguf", FILES[:4], "mmproj-BF16.gguf"),
        ("m-Q4_K_M.gguf", [*FILES[3:0:-1]], "mmproj-F16.gguf"),
        ("m-F32.gguf", FILES, "mmproj-F32.gguf"),
        ("a/m-Q8_0.gguf", ["mmproj-Q8_0.gguf", "a/mmproj-F32.gguf"], "a/mmproj-F32.gguf"),
        ("a/b/m-Q8_0.gguf", ["mmproj-Q8_0.gguf", "a/c/mmproj-F16.gguf"], "mmproj-Q8_0.gguf"),
        ("m-Q8_0.gguf", ["other/mmproj-F16.gguf", "mmproj-F16.safetensors", "m-Q8_0.gguf"], ""),
        ("M-Q8_0.gguf", ["M-MMPROJ-F16.GGUF"], "M-MMPROJ-F16.GGUF"),
    ],
)
def test_the_projector_beside_a_model(target: str, names: list[str], chosen: str):
    assert choose_projector(target, names) == chosen


def test_descriptions_travel_between_processes():
    import pickle

    projector = read_projector(mmproj("mistral3"))
    assert pickle.loads(pickle.dumps(projector)) == projector and isinstance(projector, Projector)
