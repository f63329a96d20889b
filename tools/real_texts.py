"""Write prompts of real texts for `pyspec bench -f`: `python tools/real_texts.py FOLDER`.

The texts are Python's own, so every machine has them. A file per kind, eight prompts each:

code    the first part of a module; the answer continues it
edit    a module, a comment that asks for a new name, and the module's first lines again
manual  the first part of a chapter of Python's reference
prose   a part of Python's licence
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

MODULES = ("textwrap", "bisect", "heapq", "queue", "shlex", "csv", "fnmatch", "string")
CHAPTERS = ("assert", "class", "exceptions", "for", "import", "operator-summary", "try", "with")
N_CODE, N_MANUAL, N_PROSE, N_EDIT = 3000, 2500, 2500, 4000  # characters of a prompt
HEAD = 240  # characters of the module that an edit repeats


def _source(name: str) -> str:
    return inspect.getsource(importlib.import_module(name))


def code() -> Iterator[str]:
    for name in MODULES:
        yield _source(name)[:N_CODE]


def edit() -> Iterator[str]:
    for name in MODULES:
        text = _source(name)[:N_EDIT]
        yield f"# {name}.py\n{text}\n\n# End of {name}.py.\n# The same file; only the argument self is called this:\n# {name}.py\n{text[:HEAD]}"


def manual() -> Iterator[str]:
    for name in CHAPTERS:
        text = topics[name] if len(topics[name]) >= N_MANUAL else topics["specialnames"]
        yield text[:N_MANUAL]


def prose() -> Iterator[str]:
    path = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    licence = path.read_text(encoding="utf-8")
    for at in range(0, 8 * 1200, 1200):
        yield licence[at : at + N_PROSE]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for kind in (code, edit, manual, prose):
        lines = [json.dumps({"prompt": text}) for text in kind()]
        (folder / f"{kind.__name__}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
