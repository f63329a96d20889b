"""Compile the C++ kernels to one shared library per instruction set.

    python -m pyspec.cpu.build            this machine's, into the package (`make demo` does it)
    python -m pyspec.cpu.build FOLDER     all of this architecture, for a wheel

A package may bring libraries (`built/`); without them an engine's load compiles once, in about half a minute, if there is a C++ compiler.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from pyspec.cache import cache_root, wanted_root
from pyspec.progress import report

log = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("native")
BUILT = Path(__file__).with_name("built")
OPTIONS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wno-psabi",
    "-pthread",
)
SETS: dict[str, dict[str, tuple[str, set[str]]]] = {}
"""Instruction sets by architecture, best first: compiler's options, and the flags of /proc/cpuinfo that each needs."""
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma", "f16c"}
SETS["x86_64"] = SETS["amd64"] = {
    "avx512": ("-march=x86-64-v4 -mavx512vnni", _AVX512),
    "avxvnni": ("-march=x86-64-v3 -mavxvnni", {"avx2", "fma", "f16c", "bmi2", "avx_vnni"}),
    "avx2": ("-march=x86-64-v3", {"avx2", "fma", "f16c", "bmi2"}),
    "plain": ("", set()),
}
SETS["aarch64"] = SETS["arm64"] = {
    "neon": ("-march=armv8.2-a+dotprod", {"asimddp"}),
    "plain": ("", set()),
}
ELSEWHERE: dict[str, tuple[str, set[str]]] = {"plain": ("", set())}  # the compiler's own vectors
# Of a source, behind those of all: its numbers equal Python's
OWN_OPTIONS = {"suffix": ("-ffp-contract=off",)}
LIMIT_S = 900
KEPT_DAYS = 14  # of libraries of other sources


NO_COMPILER = "there is no C++ compiler (c++, g++ or clang++)"


class CannotBuild(Exception):
    """The reason, in one sentence."""


def sets() -> dict[str, tuple[str, set[str]]]:
    """The instruction sets of this architecture that kernels are built for."""
    return SETS.get(platform.machine().lower(), ELSEWHERE)


@cache
def isas() -> tuple[str, ...]:
    """The instruction sets that this process runs, best first."""
    have = _cpu_flags()
    return tuple(name for name, (_, wants) in sets().items() if wants <= have)


def _cpu_flags() -> set[str]:
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return {"asimddp"}  # every Apple CPU has it
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    names = ("flags", "Features")  # x86, arm64
    return set(next((line.partition(":")[2] for line in lines if line.startswith(names)), "").split())


def compiler() -> str | None:
    """$CXX, or the first of the usual names that is on the path."""
    named = os.environ.get("CXX", "")
    return (
        shutil.which(named)
        if named
        else next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    )


@cache
def _digest() -> str:
    own = (option for options in OWN_OPTIONS.values() for option in options)
    text = hashlib.sha256("\0".join((*OPTIONS, *own, *(flags for flags, _ in sets().values()))).encode())
    for path in sorted(SOURCES.iterdir()):
        text.update(path.name.encode() + path.read_bytes())
    return text.hexdigest()[:16]


def file_name(isa: str) -> str:
    return f"libpyspec-{platform.machine().lower()}-{isa}-{_digest()}.so"


def find(isa: str) -> Path | None:
    """A library of today's sources, of the package or of the cache, which may be read-only."""
    places = (BUILT, wanted_root() / "cpu", cache_root() / "cpu")
    return next((path for place in places if os.path.isfile(path := place / file_name(isa))), None)


def built_alone(source: str) -> Path:
    """A library with this source: that of all kernels, or one of its own, compiled if it has to be. Raises CannotBuild.

    For sources that need no other, where waiting for all kernels is not worth it.
    """
    if (found := find(isas()[0])) is not None:
        return found
    path = cache_root() / "cpu" / f"libpyspec-{platform.machine().lower()}-{source}-{_digest()}.so"
    if not path.is_file():
        _build_to(path, "plain", (), SOURCES / f"{source}.cpp")
    return path


def build(isa: str, folder: Path | None = None, extra: tuple[str, ...] = ()) -> Path:
    """The library's path. Raises CannotBuild. extra: options behind the usual ones, such as sanitizers."""
    path = (folder or cache_root() / "cpu") / file_name(isa)
    _build_to(path, isa, extra, *sorted(SOURCES.glob("*.cpp")))
    return path


def _build_to(path: Path, isa: str, extra: tuple[str, ...], *sources: Path) -> None:
    cxx = compiler()
    if cxx is None:
        raise CannotBuild(NO_COMPILER)
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone_in(folder):
            if path.is_file():  # another process has made it meanwhile
                return
            if len(sources) > 1:
                log.warning(
                    "compiling the CPU kernels (%s), once: half a minute on a few cores ...", isa
                )
            began = time.monotonic()
            with _scratch(folder) as (scratch, group):
                made = _compile((cxx, *sets()[isa][0].split(), *OPTIONS), scratch, group, extra, sources)
                _drop_old(path, KEPT_DAYS)
                made.replace(path)
            if len(sources) > 1:
                log.warning("the CPU kernels are compiled, after %.0f s", time.monotonic() - began)
    except OSError as e:
        raise CannotBuild(f"{folder}: {e.strerror or e}") from e


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One process at a time compiles into a folder; the others wait for its libraries."""
    import fcntl

    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("another process compiles the CPU kernels: waiting for it ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


WATCHER = 'trap "" HUP INT TERM; read _; kill -TERM 0; sleep 0.2; kill -TERM 0; rm -rf -- "$1"'
"""Reads until its input ends, with the block or with this process, whatever ends that; then ends the compilers, which are of its group,
and once more those that a thread was about to start."""


@contextmanager
def _scratch(folder: Path) -> Iterator[tuple[Path, int]]:
    """A folder that is gone after the block, even if this process is killed in it, and the group of processes that end with it."""
    path = Path(tempfile.mkdtemp(dir=folder))
    watcher = subprocess.Popen(
        ["/bin/sh", "-c", WATCHER, "sh", path], stdin=subprocess.PIPE, process_group=0
    )
    try:
        yield path, watcher.pid
    finally:
        watcher.communicate()


def _compile(
    command: tuple[str, ...],
    scratch: Path,
    group: int,
    extra: tuple[str, ...],
    sources: tuple[Path, ...],
) -> Path:
    def one(source: Path) -> Path:
        to = scratch / f"{source.stem}.o"
        own = OWN_OPTIONS.get(source.stem, ())
        _call([*command, *own, *extra, "-c", str(source), "-o", str(to)], group)
        return to

    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        objects = [pool.submit(one, source) for source in sources]
        for n_made, made in enumerate(as_completed(objects), start=1):
            made.result()
            report("compiling the CPU kernels", n_made / (len(sources) + 1))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    library = scratch / "library.so"
    _call(
        [*command, *extra, "-shared", *(str(made.result()) for made in objects), "-o", str(library)],
        group,
    )
    return library


def _call(command: list[str], group: int) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False, process_group=group
        )
    except subprocess.TimeoutExpired:
        raise CannotBuild(f"{command[0]} took more than {LIMIT_S} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise CannotBuild(
            f"{command[0]} failed: {next((x for x in lines if 'error' in x), (lines or ['?'])[-1])}"
        )


def drop_old(folder: Path, isa: str, days: float) -> None:
    """Delete libraries of other sources in a folder that are older than that."""
    _drop_old(folder / file_name(isa), days)


def _drop_old(library: Path, days: float) -> None:
    for path in library.parent.glob(f"{library.name.rpartition('-')[0]}-*.so"):
        with suppress(OSError):
            if path.name != library.name and time.time() - path.stat().st_mtime > days * 86400:
                path.unlink()


def main() -> None:
    """Build where they are missing, and say where they are."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else BUILT
    for isa in tuple(sets()) if len(sys.argv) > 1 else isas()[:1]:
        if not (folder / file_name(isa)).is_file():
            drop_old(folder, isa, 0)
            print(build(isa, folder))  # noqa: T201


if __name__ == "__main__":
    try:
        main()
    except CannotBuild as e:
        sys.exit(f"the CPU kernels cannot be built: {e}; everything runs without them, slower")
