"""Run llama.cpp's server tests against pyspec: make peer LLAMA_CPP=path/to/llama.cpp

The tests are copied to a temporary folder, where fixtures that fetch models are switched off; nothing of them is kept. Every item passes or stands
in known.toml with its reason; what does neither is printed, and the exit status is 1. Items that ask for what their model says are run a second time
with one of its shape and random weights (stand_in.py): all that they ask but the words has to hold. Servers of several models find such ones under
the names of theirs, in a cache of downloads and on a hub on this machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import stand_in
from huggingface_hub import hf_hub_download

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

from hub_server import FakeHub, serving  # noqa: E402  (tests is no package)

# Behind their utils.py: nothing is downloaded; names of headers have no case, as in HTTP.
PATCH = """
ServerPreset.load_all = staticmethod(lambda: None)
_made = ServerProcess.make_request


def _with_headers(self, *args, **options):
    response = _made(self, *args, **options)
    response.headers = requests.structures.CaseInsensitiveDict(response.headers)
    return response


ServerProcess.make_request = _with_headers
if "PYSPEC_PEER_ANY_TEXT" in os.environ:
    match_regex = lambda regex, text: isinstance(text, str)
"""
WEIGHTS = "weights"  # of known.toml: tried again with models that stand in for theirs, and any text
STOOD_IN = "passed, any text taken, with a model that stands in for theirs"
TESTS = Path("tools") / "server" / "tests"  # in their repository
DRAFT = "stories15M-q4_0.gguf"  # their drafter: it only has to be there
CHAT, STORIES, GAPS = "tinygemma3-GGUF", "test-model-stories260K", "test-model-stories260K-infill"
TO_COME = "test-model-router-download"  # on the hub, not in the cache


def copied(source: Path, to: Path) -> Path:
    """The tests, with their downloads switched off and the shim where they look for llama-server."""
    tests = to / TESTS  # some name templates by their place in the repository
    shutil.copytree(source / TESTS, tests)
    with (tests / "utils.py").open("a") as file:
        file.write(PATCH)
    (tests / "tmp").mkdir(exist_ok=True)
    (tests / "tmp" / DRAFT).touch()
    if (source / "models").is_dir():
        (to / "models").symlink_to((source / "models").resolve())
    return tests


def results(report: Path) -> dict[str, str]:
    """passed, failed or skipped, by item."""
    out = {}
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}"
        kinds = {child.tag for child in case}
        out[name] = (
            "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument(
        "--python", default=sys.executable, help="the Python that has the tests' requirements"
    )
    parser.add_argument("--model", type=Path, default=ROOT / "pyspec" / "demo" / "pyspec-demo.gguf")
    parser.add_argument("-k", default="", help="of the items only these")
    parser.add_argument("-n", default="2", help="workers")
    parser.add_argument("--files", nargs="*", default=[], help="names of test files")
    args = parser.parse_args()
    python = shutil.which(args.python)
    if python is None:
        parser.error(f"--python {args.python} is no program")
    if not (args.llama_cpp / TESTS / "utils.py").is_file():
        parser.error(f"{args.llama_cpp} is no source of llama.cpp: it has no {TESTS}/utils.py")
    known = tomllib.loads((HERE / "known.toml").read_text())
    with tempfile.TemporaryDirectory(prefix="pyspec-peer-") as name:
        folder = Path(name)
        # a path as it was typed means something else where the tests run; a link stays one, for it is a venv's
        suite = Suite(os.path.abspath(python), args.n, copied(args.llama_cpp, folder), folder)
        skipped = known.get("files", {})
        chosen = [f"unit/{file}" for file in args.files] or sorted(
            f"unit/{p.name}" for p in (suite.tests / "unit").glob("test_*.py") if p.name not in skipped
        )
        models = folder / "stories260K.gguf", folder / "stories15M.gguf"
        stand_in.write(models[0], stand_in.PIECES)
        stand_in.write(models[1], f"{stand_in.PIECES} {stand_in.HELLO}")
        server = suite.zygote()
        try:
            with serving(hub_of(args.model, models[0])) as hub:
                suite.fill_caches(hub)
                found = suite.run(
                    args.model,
                    [*(["-k", args.k] if args.k else []), *chosen],
                    HF_ENDPOINT=hub.url,
                    PYSPEC_PEER_CACHES=str(suite.caches),
                )
            again = [
                item
                for item, outcome in found.items()
                if outcome == "failed" and reason(item, known) == WEIGHTS
            ]
            if again:
                ids = [f"unit/{item.replace('::', '.py::', 1)}" for item in again]
                later = suite.run(
                    models[0], ids, PYSPEC_PEER_SECOND=str(models[1]), PYSPEC_PEER_ANY_TEXT="1"
                )
                found |= {item: STOOD_IN for item in again if later.get(item) == "passed"}
        finally:
            server.kill()
        return report(found, known)


def hub_of(chat: Path, stories: Path) -> FakeHub:
    """A hub with the repositories of their tests of several models."""
    files = {
        CHAT: {"tinygemma3-Q8_0.gguf": chat},
        STORIES: {"stories260K-f32.gguf": stories},
        GAPS: {"stories260K-infill-f32.gguf": stories},
        TO_COME: {"stories260K-f16.gguf": stories},
    }
    read = {repo: {name: path.read_bytes() for name, path in of.items()} for repo, of in files.items()}
    return FakeHub({}, more={f"ggml-org/{repo}": of for repo, of in read.items()})


@dataclass
class Suite:
    """Their tests in a folder, and how they are run."""

    python: str
    n_worker: str
    tests: Path
    folder: Path

    @property
    def socket(self) -> Path:
        return self.folder / "zygote"

    @property
    def caches(self) -> Path:
        return self.folder / "caches"

    def fill_caches(self, hub: FakeHub) -> None:
        """A cache of downloads for each worker, and for a run without workers: their tests delete from it."""
        first, *others = (
            self.caches / name / "hub"
            for name in ("master", *(f"gw{i}" for i in range(int(self.n_worker))))
        )
        for repo in (CHAT, STORIES, GAPS):
            for file in hub.more[f"ggml-org/{repo}"]:
                hf_hub_download(f"ggml-org/{repo}", file, cache_dir=first, endpoint=hub.url)
        for other in others:
            shutil.copytree(first, other, symlinks=True)

    def zygote(self) -> subprocess.Popen[bytes]:
        """The process that servers are forked from."""
        server = subprocess.Popen(
            [sys.executable, HERE / "zygote.py", self.socket], env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        while not self.socket.exists() and server.poll() is None:
            time.sleep(0.05)
        return server

    def run(self, model: Path, chosen: Sequence[str], **env: str) -> dict[str, str]:
        """What came of items, with a model in place of theirs."""
        shim, out = self.folder / "llama-server", self.folder / "report.xml"
        shim.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "llama_server.py"} "$@"\n')
        shim.chmod(0o755)
        command = [
            self.python,
            "-m",
            "pytest",
            "-q",
            "-n",
            self.n_worker,
            "--timeout",
            "180",
            "-m",
            "not slow",
        ]
        command += ["-p", "no:cacheprovider", f"--junitxml={out}", *chosen]
        env |= {"LLAMA_SERVER_BIN_PATH": str(shim), "PYSPEC_PEER_MODEL": str(model.resolve())}
        env |= {
            "PYSPEC_PEER_ZYGOTE": str(self.socket),
            "LLAMA_CACHE": str(self.folder),
            "OMP_NUM_THREADS": "1",
        }
        out.unlink(missing_ok=True)
        status = subprocess.run(
            command, cwd=self.tests, env={**os.environ, **env}, check=False
        ).returncode
        if not out.exists():
            raise SystemExit(
                f"their tests did not run: {' '.join(command[:3])} ended with status {status}"
            )
        return results(out)


def reason(item: str, known: dict) -> str:
    """Why an item is known to fail, "" if it is not."""
    return next(
        (kind for kind, rows in known.get("items", {}).items() for row in rows if fnmatch(item, row)), ""
    )


def report(found: dict[str, str], known: dict) -> int:
    """Print what came out; 1 if something neither passed nor is known."""
    counts, unexpected, late = Counter[str](), [], []
    for name, outcome in sorted(found.items()):
        why = reason(name, known)
        counts[outcome if outcome in ("passed", STOOD_IN) else why or outcome] += 1
        if outcome == "failed" and (not why or why == WEIGHTS):
            unexpected.append(name)
        if outcome == "passed" and why:
            late.append(name)
    print("\n".join(f"{n:5} {kind}" for kind, n in counts.most_common()))
    for name in unexpected:
        print("not expected to fail:", name)
    for name in late:
        print("passes, and stands in the table:", name)
    return int(bool(unexpected))


if __name__ == "__main__":
    sys.exit(main())
