"""The memory of a server and its engine on a CPU, process by process, beside the file and what its slots may hold.

    python tools/memory_processes.py T.gguf -np 1 -c 4096
    python tools/memory_processes.py T.gguf -np 4 -c 1024 --fill 900 -- --spec-type none

Three readings, in MiB: ready and at rest, behind one short request, and with --fill N behind a prompt of N tokens in each slot. For each
process: RSS, PSS (a page that n processes share counts 1/n), private pages, and of these what malloc's heap, other anonymous memory and
libraries have. What stands behind -- goes to the server. `pyspec synth` makes T.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REST_S = 3.0  # an idle engine gives freed memory back after one
START_S, ANSWER_S = 120.0, 600.0
N_TOKEN = 24
PURPOSES = ("weights", "kv", "state", "draft_weights", "draft_kv")
"""Purposes of a plan that the file or a slot needs, whatever program runs it."""


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [p for child in children.read_text().split() for p in tree(int(child))]
    return found


def use_of(pid: int) -> Counter[str]:
    """KiB by kind."""
    use: Counter[str] = Counter()
    kind = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if found := re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)", line):
            path = found[1]
            kind = "heap" if path == "[heap]" else "libraries" if path.startswith("/") else "other"
            continue
        name, _, value = line.partition(":")
        if name in ("Rss", "Pss"):
            use[name] += int(value.split()[0])
        elif name in ("Private_Dirty", "Private_Clean"):
            use["private"] += int(value.split()[0])
            use[kind] += int(value.split()[0])
    return use


def show(title: str, pid: int, needed: float) -> None:
    print(
        f"\n{title:44}"
        + "".join(f"{x:>10}" for x in ("RSS", "PSS", "private", "heap", "other", "libraries"))
    )
    total: Counter[str] = Counter()
    for each in tree(pid):
        use = use_of(each)
        total += use
        command = Path(f"/proc/{each}/cmdline").read_text().split("\0")
        name = next((x for x in command if x.startswith("pyspec.")), "pyspec server")
        _line(name, use)
    _line("all", total)
    print(
        f"over the {needed:.0f} MiB of file and slots: RSS {total['Rss'] / 1024 / needed - 1:+.0%}, "
        f"PSS {total['Pss'] / 1024 / needed - 1:+.0%}",
        flush=True,
    )


def _line(name: str, use: Counter[str]) -> None:
    keys = ("Rss", "Pss", "private", "heap", "other", "libraries")
    print(f"{name:44}" + "".join(f"{use[key] / 1024:10.1f}" for key in keys))


def needed_mib(command: list[str]) -> float:
    """MiB of the file's weights and of what the slots may hold, by the plan."""
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    plan = {name: json.loads(done.stdout)["plan"][name] / 2**20 for name in PURPOSES}
    print(", ".join(f"{name} {n:.0f}" for name, n in plan.items() if n), "MiB planned")
    return float(sum(plan.values()))


def ask(url: str, prompt: list[int]) -> None:
    body = json.dumps({"prompt": prompt, "n_predict": N_TOKEN, "ignore_eos": True}).encode()
    with urllib.request.urlopen(f"{url}/completion", body, timeout=ANSWER_S) as answer:
        answer.read()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("-np", type=int, default=1)
    parser.add_argument("-c", type=int, default=4096)
    parser.add_argument("--fill", type=int, default=0, help="tokens of a prompt for each slot")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, others = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sized = [str(args.model), "-np", str(args.np), "-c", str(args.c), *others]
    program = [sys.executable, "-m", "pyspec"]
    needed = needed_mib([*program, "fit", *sized])
    server = subprocess.Popen([*program, "server", *sized, "--port", str(port), "-lv", "0"])
    url, limit = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > limit:
                    sys.exit("the server does not start")
                time.sleep(0.2)
        time.sleep(REST_S)
        show("ready", server.pid, needed)
        ask(url, list(range(100, 107)))
        time.sleep(REST_S)
        show("behind a short request", server.pid, needed)
        if args.fill:
            prompts = [[100 + (7 * i + slot) % 900 for i in range(args.fill)] for slot in range(args.np)]
            with ThreadPoolExecutor(args.np) as pool:
                list(pool.map(lambda prompt: ask(url, prompt), prompts))
            time.sleep(REST_S)
            show(f"behind {args.np} prompts of {args.fill} tokens", server.pid, needed)
    finally:
        server.terminate()
        server.wait(30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
