"""Both sides of a sandbox: a child process that handles untrusted templates or grammars, and answers each line of JSON with a line.

The child has limits of memory and time. It starts with the first question, again after it was killed, and again in a forked process,
because the old child belongs to the parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

START_S = 20.0
SHARE = 0.8  # of its time limit: a process that used less CPU time was not too slow, but waiting
ANSWER_BYTES = 52 << 20  # JSON writes a character in up to 12 bytes
WRITE_BYTES = 1 << 16
OWN_CLOCK_S = 30  # SIGALRM then ends the child, if the parent is gone and can not kill it
STALLED = "stalled"  # key in a failed answer that may not be the question's fault


class SandboxProcess:
    """`python -m MODULE` at the other end of two pipes; it answers one question at a time.

    first    makes the line that is sent before any question; `check` returns the answer to it
    first_s  seconds for that answer; 0: as many as for a question
    died     the error's text if the process ends by itself
    """

    def __init__(
        self,
        module: str,
        first: Callable[[], bytes],
        *,
        first_s: float = 0.0,
        died: str = "made its sandbox process die (too much memory or too deep a recursion)",
    ) -> None:
        self.module, self.first, self.first_s, self.died = module, first, first_s, died
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize | None = None

    def ask(self, line: bytes, seconds: float) -> dict[str, str]:
        """The answer to a line. {"failed": why} also for a process that exceeded its time or memory, with STALLED if it got no CPU time.

        A process from an earlier question may have been stopped or killed from outside; then a new one is asked once.
        """
        with self.lock:
            was = self.process
            started = self._running(seconds)
            if "failed" in started:
                return started
            answer = self._exchange(line, seconds)
            has_ended = was is not None and self.process is was and was.poll() is not None
            if "failed" in answer and has_ended:
                started = self._running(seconds)
                answer = started if "failed" in started else self._exchange(line, seconds)
            return answer

    def check(self, seconds: float) -> dict[str, str]:
        """Start the process if needed. Returns its answer to the first line."""
        with self.lock:
            return self._running(seconds)

    def close(self) -> None:
        """End the process. A later question starts another one."""
        with self.lock:
            if self._end is not None:
                self._end()

    def _running(self, seconds: float) -> dict[str, str]:
        # poll() also finds that, after a fork, the process is the parent's child
        if self.process is not None and self.process.poll() is None:
            return {"text": ""}
        if self._end is not None:
            self._end()
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
        self.process = subprocess.Popen(
            # -P: without modules of the working directory
            [sys.executable, "-P", "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True,  # the parent handles Ctrl-C
        )
        self._end = weakref.finalize(self, _kill, self.process)
        answer = self._exchange(b"", START_S)
        if "failed" not in answer:
            answer = self._exchange(self.first(), self.first_s or seconds)
        if "failed" in answer:
            self._end()
        return answer

    def _exchange(self, line: bytes, seconds: float) -> dict[str, str]:
        """Write a line and read a line within the time, as the pipes allow. CPU time decides: on a busy machine a process that works
        gets more time, and one that does nothing does not."""
        process = self.process
        assert process is not None and process.stdin is not None and process.stdout is not None
        out, inp = process.stdout.fileno(), process.stdin.fileno()
        used = self._cpu_s()
        last, began = used, used
        deadline = time.monotonic() + seconds
        answer = bytearray()
        os.set_blocking(inp, False)
        poller = select.poll()  # select() takes no descriptor above 1023
        poller.register(out, select.POLLIN)
        if line:
            poller.register(inp, select.POLLOUT)
        while not answer.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0:
                last, used = used, self._cpu_s()
                too_slow = f"takes longer than {seconds:g} s"
                if used - began >= SHARE * seconds:
                    return self._lost(too_slow)
                if used <= last:  # the question is not the reason that it waits
                    return self._lost(too_slow) | {STALLED: "its process gets no time"}
                deadline = time.monotonic() + seconds
                continue
            if len(answer) > ANSWER_BYTES:
                return self._lost(f"answers with more than {ANSWER_BYTES} bytes")
            ready = {fd for fd, _ in poller.poll(left * 1e3)}
            try:
                if inp in ready:
                    line = line[os.write(inp, line[:WRITE_BYTES]) :]
                    if not line:
                        poller.unregister(inp)
                chunk = os.read(out, 1 << 20) if out in ready else None
            except BrokenPipeError:
                chunk = b""
            if chunk == b"":
                return self._lost(self.died)
            answer += chunk or b""
        return json.loads(answer)

    def _cpu_s(self) -> float:
        """CPU seconds of the process; 0 on systems that do not report them."""
        assert self.process is not None
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return 0.0

    def _lost(self, why: str) -> dict[str, str]:
        assert self._end is not None
        self._end()
        return {"failed": why}


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()


def serve(answers: Callable[[Iterator[str]], Iterator[dict[str, str]]], memory_bytes: int) -> None:
    """Answer until the parent is gone. answers: yields one for each line; memory_bytes: of address space, the interpreter included."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    except (ImportError, ValueError, OSError):
        pass  # this system has no such limit; the clock still applies
    sys.stdout.write("{}\n")  # started: the parent's shorter clock runs from here on
    sys.stdout.flush()
    for answer in answers(_watched(iter(sys.stdin.readline, ""))):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _watched(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        signal.alarm(OWN_CLOCK_S)
        yield line
        signal.alarm(0)
