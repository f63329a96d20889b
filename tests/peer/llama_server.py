#!/usr/bin/env python3
"""Stands in for the executable llama-server in llama.cpp's own server tests: the same flags, answered by `pyspec server`.

Files that those tests fetch are not here, so every model is the one that PYSPEC_PEER_MODEL names, or PYSPEC_PEER_SECOND in place of their stories15M. Their `--ctx-size` is shared by all slots, ours
is each request's. Made-up acceptance goes with --spec-fixed. Everything else goes through as it is: what pyspec refuses, it refuses.

Without a model it is a server of several, over a cache of downloads of each worker's own below PYSPEC_PEER_CACHES and the hub that HF_ENDPOINT names. Its
`--offline` is left out: theirs downloads all the same, ours does not.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from zygote import ask

MODELS = {"--hf-repo", "--hf-file", "--model", "--model-url", "--model-draft"}
BUSY_S = 4.0  # that a request of several models takes longer where their LLAMA_SERVER_DEBUG_FAKE_TIMING is set; a model stays 2 s after its load here


def translated(args: list[str], model: str) -> list[str]:
    """llama-server's arguments as pyspec's. model: "" for several"""
    out, ctx, slots, unified = ["-m", model] if model else [], 0, 1, False
    i = 0
    while i < len(args):
        flag = args[i]
        value = args[i + 1] if i + 1 < len(args) else ""
        if flag in MODELS:
            if flag != "--model-draft" and "stories15M" in value:
                out[1] = os.environ.get("PYSPEC_PEER_SECOND", model)
            i += 2
            continue
        if flag == "--no-jinja" or (
            flag == "--offline" and not model
        ):  # the suite's defaults; here templates are Jinja always
            i += 1
            continue
        if flag == "--ctx-size":
            ctx = int(value)
            i += 2
            continue
        if flag == "--spec-type":  # a drafter of another kind does: the model's own
            out += ["--spec-type", "auto"]
            i += 2
            continue
        if (
            flag == "--spec-synth-rates"
        ):  # theirs drafts as much as it may; ours what pays, unless it is told
            out.append("--spec-fixed")
        if flag == "--parallel":
            slots = int(value)
        unified = unified or flag == "--kv-unified"
        out.append(flag)
        i += 1
    if "--cors-origins" not in out:
        out += ["--cors-origins", "*"]  # their default; ours is this machine
    if "--metrics" not in out:
        out.append("--no-metrics")
    if "--spec-type" not in out and model:
        out += ["--spec-type", "none"]
    if ctx:
        out += ["-c", str(ctx if unified else ctx // max(slots, 1))]
        if unified:
            out += ["--kv-pool", str(ctx)]
    return out


def serve_several(args: list[str]) -> None:
    """A process of its own, whose engines are processes, too."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "master")
    os.environ["HF_HOME"] = str(Path(os.environ["PYSPEC_PEER_CACHES"]) / worker)
    from dataclasses import replace

    from pyspec.cli import main
    from pyspec.server.api import models

    if "LLAMA_SERVER_DEBUG_FAKE_TIMING" in os.environ:
        import asyncio

        routed = models.routed

        async def busy(router, request, *, one):
            async def late(service, again):
                await asyncio.sleep(BUSY_S)
                return await one.handler(service, again)

            return await routed(router, request, one=replace(one, handler=late))

        models.routed = busy
    main(["server", *translated(args, ""), "--no-warmup"], prog_name="pyspec")


if __name__ == "__main__":
    if not MODELS & {*sys.argv}:
        serve_several(sys.argv[1:])
    command = [
        "server",
        *translated(sys.argv[1:], os.environ["PYSPEC_PEER_MODEL"]),
        "--in-process",
        "--no-warmup",
    ]
    sys.exit(ask(os.environ["PYSPEC_PEER_ZYGOTE"], command))
