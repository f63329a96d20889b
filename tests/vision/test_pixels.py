"""Pictures' files to pixels: bytes of llama.cpp's resize, what decoders must agree on, and files that are made to harm."""

from __future__ import annotations

import base64
import io
import struct
import sys
import threading
import zlib
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest
from altered import IMAGES, NAMES, PICTURES, mmproj
from PIL import Image

from pyspec.errors import ConfigError, RequestError
from pyspec.vision import pixels
from pyspec.vision.pixels import PictureLimits, fit_into, from_base64, prepared, size_from_header
from pyspec.vision.projector import Projector, read_projector


@pytest.fixture(scope="module")
def qwen() -> Projector:
    return read_projector(mmproj("qwen35"))


def saved(image: Image.Image, form: str = "PNG", **how: object) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **how)
    return out.getvalue()


def scene(width: int, height: int, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(width * 1000 + height)
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats_are_read(qwen: Projector, form: str):
    how = {"lossless": True} if form == "WEBP" else {}
    image = scene(64, 48, "P") if form == "GIF" else scene(64, 48)
    data = saved(image, form, **how)
    assert size_from_header(data) == (64, 48)
    found = prepared(qwen, data)
    assert found.pixels.shape == (48, 64, 3) and found.pixels.dtype == np.uint8
    assert (found.nx, found.ny, found.n_row) == (8, 6, 48)
    if form != "JPEG":
        np.testing.assert_array_equal(found.pixels, np.asarray(image.convert("RGB")))


def _weights(n_in: int, n_out: int, support: float, kernel) -> list[tuple[int, list[int]]]:
    """Pillow's: for each output the first input and the weights, in 22 bits."""
    scale = n_in / n_out
    wide, found = max(scale, 1.0), []
    for i in range(n_out):
        centre, reach = (i + 0.5) * scale, support * wide
        first = max(0, int(centre - reach + 0.5))
        last = min(n_in, int(centre + reach + 0.5))
        w = [kernel((j - centre + 0.5) / wide) for j in range(first, last)]
        total = sum(w)
        found.append((first, [int(np.floor(0.5 + x / total * (1 << 22))) for x in w]))
    return found


def _cubic(x: float) -> float:
    x = abs(x)
    if x < 1:
        return (1.5 * x - 2.5) * x * x + 1
    return ((-0.5 * x + 2.5) * x - 4) * x + 2 if x < 2 else 0.0


def _resized(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """Bicubic in whole numbers, width first, each pass rounded to bytes."""
    for axis, n in ((1, width), (0, height)):
        if image.shape[axis] == n:
            continue
        moved, out = np.moveaxis(image, axis, 0).astype(np.int64), []
        for first, w in _weights(len(moved), n, 2.0, _cubic):
            part = moved[first : first + len(w)]
            total = (part * np.array(w).reshape(-1, 1, 1)).sum(0) + (1 << 21)
            out.append(np.clip(total >> 22, 0, 255))
        image = np.moveaxis(np.array(out, np.uint8), 0, axis)
    return image


@pytest.mark.parametrize(
    ("size", "want"),
    [((45, 37), (60, 40)), ((23, 71), (24, 80)), ((131, 610), (96, 470)), ((9, 50), (50, 270))],
)
def test_bytes_are_those_of_two_passes_width_first(size: tuple[int, int], want: tuple[int, int]):
    image, (width, height) = scene(*size), want
    found = fit_into(image, width, height, "BICUBIC")
    scale = min(np.float32(width) / np.float32(size[0]), np.float32(height) / np.float32(size[1]))
    w, h = (min(int(np.ceil(np.float32(n) * scale)), most) for n, most in zip(size, want, strict=True))
    x, y = (width - w) // 2, (height - h) // 2
    np.testing.assert_array_equal(found[y : y + h, x : x + w], _resized(np.asarray(image), w, h))
    black = found.copy()
    black[y : y + h, x : x + w] = 0
    assert not black.any() and (w, h) != want


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("file", PICTURES)
def test_digests_name_pixels_size_and_projector(name: str, file: str):
    projector = read_projector(mmproj(name))
    data = (IMAGES / file).read_bytes()
    one = prepared(projector, data)
    assert one.digest == prepared(projector, data).digest and len(one.digest) == 32
    assert one.digest != prepared(replace(projector, digest=b"other"), data).digest
    height, width = one.pixels.shape[:2]
    head = projector.digest + struct.pack("<II", width, height)
    assert one.digest == sha256(head + one.pixels.tobytes()).digest()


# ------------------------------------------------------------------------------------------------- what decoders differ in


def test_16_bit_grey_keeps_its_high_byte(qwen: Projector):
    grey = np.arange(48 * 64, dtype=np.uint16).reshape(48, 64) * 21
    data = saved(Image.fromarray(grey))
    want = np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, 2)
    np.testing.assert_array_equal(prepared(qwen, data).pixels, want)


def test_colours_under_transparency_are_kept(qwen: Projector):
    image = scene(64, 48)
    alpha = Image.fromarray(np.tile(np.arange(64, dtype=np.uint8), (48, 1)))
    see_through = image.copy()
    see_through.putalpha(alpha)
    np.testing.assert_array_equal(prepared(qwen, saved(see_through)).pixels, np.asarray(image))
    palette = scene(64, 48, "P")
    for transparency in (3, bytes(range(256))):
        data = saved(palette, transparency=transparency)
        np.testing.assert_array_equal(prepared(qwen, data).pixels, np.asarray(palette.convert("RGB")))


def framed(gif: bytes, background: int, transparent: int | None = None) -> bytes:
    """A GIF whose frame stands at (9, 7) of a canvas of 80 x 64."""
    whole = bytearray(gif)
    whole[6:10], whole[11] = struct.pack("<HH", 80, 64), background
    at = whole.index(b",", 13 + (3 << (whole[10] & 7) + 1))
    whole[at + 1 : at + 5] = struct.pack("<HH", 9, 7)
    if transparent is not None:
        whole[at:at] = bytes((0x21, 0xF9, 4, 1, 0, 0, transparent, 0))
    return bytes(whole)


@pytest.mark.parametrize("grey", [False, True])
def test_transparent_and_missing_pixels_of_a_gif_are_as_in_llama_cpp(qwen: Projector, grey: bool):
    """Black where it is transparent, and its background's colour, red and blue exchanged, where the first frame has none."""
    image = scene(64, 48, "L") if grey else scene(64, 48).quantize(64)
    index, colours = np.asarray(image), np.asarray(image.convert("RGB"))
    number = int(index[5, 5])
    black = np.where((index == number)[..., None], np.uint8(0), colours)
    data = saved(image, "GIF", transparency=number, optimize=False)
    np.testing.assert_array_equal(prepared(qwen, data).pixels, black)
    data = saved(image, "GIF", optimize=False)
    seven = np.full(3, 7) if grey else np.asarray(image.getpalette()[21:24])
    for background, transparent in ((7, None), (7, number), (0, None), (0, number)):
        want = np.tile(np.uint8(seven[::-1] * (background == 7)), (64, 80, 1))
        want[7:55, 9:73] = colours if transparent is None else black
        found = prepared(qwen, framed(data, background, transparent))
        np.testing.assert_array_equal(found.pixels, want)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_images_of_pillow_are_read_as_their_files(qwen: Projector, form: str):
    data = saved(scene(60, 41, "P" if form == "GIF" else "RGB"), form)
    opened = Image.open(io.BytesIO(data))
    opened.info["transparency"] = 3
    assert prepared(qwen, opened).digest == prepared(qwen, opened).digest
    assert opened.info["transparency"] == 3, "the caller's image stays as it was"
    assert prepared(qwen, Image.open(io.BytesIO(data))).digest == prepared(qwen, data).digest
    if form != "WEBP":  # of which Pillow opens no part
        cut = Image.open(io.BytesIO(data[: len(data) * 2 // 3]))
        with pytest.raises(RequestError, match="can not be decoded"):
            prepared(qwen, cut)


def test_images_of_pillow_of_any_mode(qwen: Projector):
    grey = np.arange(48 * 64, dtype=np.uint16).reshape(48, 64) * 21
    want = np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, 2)
    for mode, order in (("I;16", "<u2"), ("I;16B", ">u2"), ("I;16L", "<u2")):
        image = Image.frombytes(mode, (64, 48), grey.astype(order).tobytes())
        np.testing.assert_array_equal(prepared(qwen, image).pixels, want)
    closed = Image.new("RGB", (9, 9))
    closed.close()
    for image, flaw in (
        (closed, "closed"),
        (Image.new("RGB", (0, 5)), "0 x 5 pixels"),
        (Image.new("LA", (9, 9)).convert("La"), "can not be decoded"),
        (b"", "the image is empty"),
    ):
        with pytest.raises(RequestError, match=flaw):
            prepared(qwen, image)


def test_base64_is_read_as_llama_server_reads_it():
    for n in range(1, 9):
        data = bytes(range(n))
        text = base64.b64encode(data).decode()
        for odd in (text, text.rstrip("="), f"{text}==", f" {text[:3]}\r\n{text[3:]}\n"):
            assert from_base64(odd) == data
    for text in ("A", "A===", "????", "-_-_"):
        with pytest.raises(RequestError, match="it is not base64"):
            from_base64(text)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "CMYK"])
def test_modes_become_rgb(qwen: Projector, mode: str):
    image = scene(64, 48, mode)
    data = saved(image, "JPEG" if mode == "CMYK" else "PNG")
    want = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(prepared(qwen, data).pixels, want)


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_the_first_frame_of_an_animation(qwen: Projector, form: str):
    frames = [Image.new("RGB", (64, 48), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    how = {"lossless": True} if form == "WEBP" else {}
    data = saved(frames[0], form, save_all=True, append_images=frames[1:], duration=9, **how)
    assert (prepared(qwen, data).pixels == (255, 0, 0)).all()


def test_exif_does_not_turn_a_picture(qwen: Projector):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    assert prepared(qwen, saved(scene(64, 48), "JPEG", exif=exif)).pixels.shape == (48, 64, 3)


# ------------------------------------------------------------------------------------------------- files that are made to harm


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes, depth: int = 8, colour: int = 2) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def webp(width: int, height: int) -> bytes:
    """A header of a canvas of this size, and nothing behind it."""
    head = b"VP8X" + struct.pack("<I", 10) + bytes(4)
    head += (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", 4 + len(head)) + b"WEBP" + head


HOSTILE = {
    "a bomb of zeros": (png(30_000, 30_000, bytes(30_000)), "30000 x 30000|more than 64000000"),
    "a bomb below Pillow's own limit": (png(10_000, 8_000, bytes(99)), "10000 x 8000"),
    "a bomb between Pillow's two limits": (png(12_000, 10_000, bytes(99)), "12000 x 10000|more than"),
    "a huge header": (png(2**31 - 1, 2**31 - 1, b""), "more than 64000000|2147483647 x 2147483647"),
    "a huge canvas": (webp(16_000_000, 250), "image"),
    "no width": (png(0, 5, b""), "image"),
    "a strip": (png(1, 20_000, bytes(4 * 20_000)), "1 x 20000 pixels.*200 times"),
    "not an image": (b"GET / HTTP/1.1\r\n" * 9, "none of PNG, JPEG"),
    "nothing": (b"", "the image is empty"),
    "too few rows": (png(64, 64, bytes(64)), "can not be decoded"),
    "of another format": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none of PNG"),
    "a vector": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_refused_in_a_sentence(qwen: Projector, what: str):
    data, said = HOSTILE[what]
    with pytest.raises(RequestError, match=said) as error:
        prepared(qwen, data)
    assert error.value.status == 400 and str(error.value).isprintable()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_cut_file_is_refused_or_is_whole(qwen: Projector, form: str):
    """Only bytes behind the last pixel may be missing."""
    whole = saved(scene(64, 48, "P" if form == "GIF" else "RGB"), form)
    want = prepared(qwen, whole).pixels
    n_read = 0
    for end in range(0, len(whole), max(1, len(whole) // 60)):
        try:
            found = prepared(qwen, whole[:end]).pixels
        except RequestError:
            continue
        n_read += 1
        np.testing.assert_array_equal(found, want)
        assert end > 0.95 * len(whole)
    assert n_read <= 3


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_damaged_files_raise_nothing_else(qwen: Projector, form: str):
    whole = saved(scene(40, 24, "P" if form == "GIF" else "RGB"), form)
    rng = np.random.default_rng(11)
    for _ in range(60):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), rng.integers(1, 5)):
            data[at] = rng.integers(0, 256)
        try:
            prepared(qwen, bytes(data))
        except RequestError as error:
            assert str(error).isprintable()


def test_bytes_pixels_and_shapes_have_limits(qwen: Projector):
    data = saved(scene(64, 48))
    for limits, said in (
        (PictureLimits(n_byte=len(data) - 1), f"has {len(data)} bytes"),
        (PictureLimits(n_pixel=64 * 48 - 1), "at most 3071 in all"),
        (PictureLimits(aspect=1), "1 times the other"),
    ):
        with pytest.raises(RequestError, match=said):
            size_from_header(data, limits)
    tight = PictureLimits(n_byte=len(data), n_pixel=64 * 48, aspect=2)
    assert prepared(qwen, data, tight).n_row == 48


def test_one_pixel_and_the_longest_strip_are_pictures(qwen: Projector):
    for size in ((1, 1), (1, 200), (200, 1)):
        found = prepared(qwen, saved(scene(*size)))
        assert found.n_row == found.nx * found.ny <= qwen.most_rows


def test_threads_share_the_decoder(qwen: Projector):
    data = [(IMAGES / file).read_bytes() for file in PICTURES] * 6
    want = [prepared(qwen, each).digest for each in data]
    found: dict[int, bytes] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: prepared(qwen, data[i]).digest}))
        for i in range(len(data))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(data))] == want


def test_without_pillow_the_package_is_named(qwen: Projector, monkeypatch: pytest.MonkeyPatch):
    pixels.pillow.cache_clear()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match="images need Pillow: pip install Pillow"):
        prepared(qwen, b"")
    pixels.pillow.cache_clear()
