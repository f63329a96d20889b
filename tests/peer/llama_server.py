#!/usr/bin/env python3
"""Stands in for the executable llama-server in llama.cpp's own server tests: the same flags, answered by `pyspec server`.

Files that those tests fetch are not here, so every model is the one that PYSPEC_PEER_MODEL names. Their `--ctx-size` is shared by all slots, ours
is each request's. Everything else goes through as it is: what pyspec refuses, it refuses.
"""

from __future__ import annotations

import os
import sys

MODELS = {"--hf-repo", "--hf-file", "--model", "--model-url", "--model-draft"}


def translated(args: list[str], model: str) -> list[str]:
    """llama-server's arguments as pyspec's."""
    out, ctx, slots, unified = ["-m", model], 0, 1, False
    i = 0
    while i < len(args):
        flag = args[i]
        value = args[i + 1] if i + 1 < len(args) else ""
        if flag in MODELS:
            i += 2
            continue
        if flag == "--no-jinja":  # the suite's default; here templates are Jinja always
            i += 1
            continue
        if flag == "--ctx-size":
            ctx = int(value)
            i += 2
            continue
        if flag == "--parallel":
            slots = int(value)
        unified = unified or flag == "--kv-unified"
        out.append(flag)
        i += 1
    if ctx:
        out += ["-c", str(ctx if unified else ctx // max(slots, 1))]
        if unified:
            out += ["--kv-pool", str(ctx)]
    return out


if __name__ == "__main__":
    command = [sys.executable, "-m", "pyspec", "server", *translated(sys.argv[1:], os.environ["PYSPEC_PEER_MODEL"])]
    python = os.environ.get("PYSPEC_PEER_PYTHON", sys.executable)
    os.execv(python, [python, *command[1:], "--in-process", "--no-warmup"])
