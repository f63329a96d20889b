"""Run llama.cpp's server tests against pyspec: make peer LLAMA_CPP=path/to/llama.cpp

The tests are copied to a temporary folder, where fixtures that fetch models are switched off; nothing of them is kept. Every item passes or stands
in known.toml with its reason; what does neither is printed, and the exit status is 1.
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
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Behind their utils.py: nothing is downloaded; names of headers have no case, as in HTTP.
PATCH = """
ServerPreset.load_all = staticmethod(lambda: None)
_made = ServerProcess.make_request


def _with_headers(self, *args, **options):
    response = _made(self, *args, **options)
    response.headers = requests.structures.CaseInsensitiveDict(response.headers)
    return response


ServerProcess.make_request = _with_headers
"""
DRAFT = "stories15M-q4_0.gguf"  # their drafter: it only has to be there


def copied(source: Path, to: Path) -> Path:
    """The tests, with their downloads switched off and the shim where they look for llama-server."""
    tests = to / "tools" / "server" / "tests"  # some name templates by their place in the repository
    shutil.copytree(source / "tools" / "server" / "tests", tests)
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
        out[name] = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("--python", default=sys.executable, help="the Python that has the tests' requirements")
    parser.add_argument("--model", type=Path, default=ROOT / "pyspec" / "demo" / "pyspec-demo.gguf")
    parser.add_argument("-k", default="", help="of the items only these")
    parser.add_argument("-n", default="2", help="workers")
    parser.add_argument("--files", nargs="*", default=[], help="names of test files")
    args = parser.parse_args()
    known = tomllib.loads((HERE / "known.toml").read_text())
    with tempfile.TemporaryDirectory(prefix="pyspec-peer-") as folder:
        tests = copied(args.llama_cpp, Path(folder))
        shim = Path(folder) / "llama-server"
        shim.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "llama_server.py"} "$@"\n')
        shim.chmod(0o755)
        report = Path(folder) / "report.xml"
        skipped = [f"unit/{name}" for name in known.get("files", {})]
        chosen = [f"unit/{name}" for name in args.files] or sorted(
            f"unit/{p.name}" for p in (tests / "unit").glob("test_*.py") if f"unit/{p.name}" not in skipped
        )
        command = [
            args.python,
            "-m",
            "pytest",
            "-q",
            "-n",
            args.n,
            "--timeout",
            "180",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
        ]
        command += [f"--junitxml={report}", *(["-k", args.k] if args.k else []), *chosen]
        env = {**os.environ, "LLAMA_SERVER_BIN_PATH": str(shim), "PYSPEC_PEER_MODEL": str(args.model.resolve())}
        zygote = Path(folder) / "zygote"
        env |= {"PYSPEC_PEER_ZYGOTE": str(zygote), "LLAMA_CACHE": folder, "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen([sys.executable, HERE / "zygote.py", zygote], env=env)
        try:
            while not zygote.exists() and server.poll() is None:
                time.sleep(0.05)
            subprocess.run(command, cwd=tests, env=env, check=False)
        finally:
            server.kill()
        return told(results(report), known)


def told(found: dict[str, str], known: dict) -> int:
    """Print what came out; 1 if something neither passed nor is known."""
    counts, unexpected, late = Counter[str](), [], []
    for name, outcome in sorted(found.items()):
        why = next((kind for kind, rows in known.get("items", {}).items() for row in rows if fnmatch(name, row)), "")
        counts["passed" if outcome == "passed" else why or outcome] += 1
        if outcome == "failed" and not why:
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
