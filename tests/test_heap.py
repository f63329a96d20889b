"""Libraries' pages that a process gives up, and texts of files as one piece of memory."""

from __future__ import annotations

import copy
import ctypes
import mmap
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyspec.cuda import pinned
from pyspec.cuda.pinned import take_memory
from pyspec.gguf import GGMLType, Strings, ValueType, open_gguf
from pyspec.gguf.write import GGUFWriter
from pyspec.heap import LEAST_KIB, _unwritten, pages_of
from pyspec.slots.mapped import empty, mapped

LINES = """\
7f0000000000-7f0000400000 r-xp 00100000 fe:00 77   {path}
Size:               4096 kB
Rss:                {rss} kB
Anonymous:          {own} kB
7f0000400000-7f0000500000 rw-p 00500000 fe:00 77   {path}
Size:               1024 kB
Rss:                1024 kB
Anonymous:             0 kB
7f0000500000-7f0000600000 rw-p 00000000 00:00 0
Rss:                1024 kB
Anonymous:             0 kB
"""


@pytest.mark.parametrize(
    ("path", "rss", "own", "is_taken"),
    [
        ("/a/lib one.so.2.13", 3000, 0, True),
        ("/a/libone.so", LEAST_KIB, 0, True),
        ("/a/libone.so", LEAST_KIB - 1, 0, False),  # perhaps just being loaded
        ("/a/libone.so", 3000, 4, False),  # a page that was written would be lost
        ("/a/weights.gguf", 3000, 0, False),
        ("/a/libone.so (deleted)", 3000, 0, False),
    ],
)
def test_only_unwritten_pages_of_libraries_are_unmapped(
    path: str, rss: int, own: int, is_taken: bool
) -> None:
    found = list(_unwritten(LINES.format(path=path, rss=rss, own=own)))
    assert found == ([(0x7F0000000000, 0x7F0000400000, rss)] if is_taken else [])


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="wants /proc")
def test_a_process_goes_on_without_its_idle_pages() -> None:
    program = (
        "import numpy as np, ssl, sqlite3\n"
        "from pyspec.heap import unmap_idle_pages\n"
        "rss = lambda: int(open('/proc/self/statm').read().split()[1]) * 4\n"
        "before = rss(); n = unmap_idle_pages(); after = rss()\n"
        "x = np.arange(63.0).reshape(7, 9); print(n, before - after, (x @ x.T).sum())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    n, less, total = done.stdout.split()
    assert int(n) > LEAST_KIB
    assert int(less) > LEAST_KIB
    assert float(total) == sum((189 + 7 * j) ** 2 for j in range(9))


TEXTS = ["", "a", "é\u2581", "\udcff\udc80x", "", "word" * 99, "z"]


def test_packed_texts_are_those_that_were_packed(tmp_path: Path) -> None:
    packed = Strings.of(TEXTS)
    assert list(packed) == TEXTS == [packed[i] for i in range(7)] == [packed[i - 7] for i in range(7)]
    assert packed[2:5] == TEXTS[2:5] and len(packed) == 7 and TEXTS[3] in packed
    assert packed == TEXTS and packed != TEXTS[:-1] and packed != [*TEXTS[:-1], "y"]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for each in (packed, Strings.of([])):
            again = pickle.loads(pickle.dumps(each, protocol))
            assert isinstance(again, Strings) and again == each
    assert copy.deepcopy(packed) == copy.copy(packed) == packed
    assert Strings.of([]) == []
    assert not Strings.of([])
    for bad in (7, -8):
        with pytest.raises(IndexError):
            packed[bad]


def test_texts_of_a_file_are_packed_and_can_be_written_again(tmp_path: Path) -> None:
    path = tmp_path / "texts.gguf"
    for texts in (TEXTS, Strings.of(TEXTS)):
        writer = GGUFWriter(path, "llama")
        writer.add("some.texts", texts, ValueType.STRING)
        writer.add_tensor_info("w", GGMLType.F32, (3,))
        writer.write(lambda info: [bytes(info.n_bytes)])
        with open_gguf(path) as file:
            found = file.metadata["some.texts"]
        assert isinstance(found, Strings) and found == TEXTS and re.fullmatch("<.*7 texts>", repr(found))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep the pages")
def test_an_emptied_tensor_reads_as_zeros_and_takes_no_pages() -> None:
    whole = mapped(9 << 20)
    whole.fill_(7)
    part = whole[1000:-1000]
    before = resident()
    empty(part)
    assert before - resident() > 8 << 20
    assert not part.any() and bool((whole[:1000] == 7).all()) and bool((whole[-1000:] == 7).all())
    small = torch.ones(3, 5)
    empty(small)
    empty(small.t())
    assert not small.any()


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_memory_is_there_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = 3 * mmap.PAGESIZE, (9 << 20) + mmap.PAGESIZE, 31 << 20
    monkeypatch.setattr(pinned, "PART", 8 << 20)
    held = [pages_of(mmap.mmap, n, huge=True) for n in sizes]
    areas = [(ctypes.addressof(ctypes.c_char.from_buffer(pages)), len(pages)) for pages in held]
    with monkeypatch.context() as patch:
        patch.setattr(pinned, "POPULATE", 9999)  # an older Linux
        before = resident()
        take_memory(areas, 3)
        assert resident() - before < 8 << 20
    take_memory(areas, 3)
    assert resident() - before > 38 << 20
    assert all(pages[0] == pages[-1] == 0 for pages in held)
    take_memory([], 3)
    with pytest.raises(MemoryError, match="no memory"):
        take_memory([(1 << 46, 1 << 20)], 3)  # pages that nobody has: the same error
