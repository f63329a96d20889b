"""A process with everything imported that becomes a server when asked: llama.cpp's tests start one for each of theirs.

It forks for every connection. The child has the caller's output and serves until the caller's end of the connection closes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path


def imported() -> None:
    """What a server imports, before anybody waits for it."""
    import pyspec.cli
    import pyspec.cli.server
    import pyspec.engine.load.load
    import pyspec.engine.process.core
    import pyspec.models.arch.qwen35
    import pyspec.server.app
    import pyspec.server.http.serve  # noqa: F401


def serve(path: Path) -> None:
    """Accept until the process is killed."""
    imported()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are nobody's to wait for
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(8)
        while True:
            connection, _ = listener.accept()
            message, fds, _, _ = socket.recv_fds(connection, 1 << 20, 2)
            if os.fork() == 0:
                listener.close()
                become(connection, json.loads(message), fds)
            connection.close()
            for fd in fds:
                os.close(fd)


def become(connection: socket.socket, asked: dict, fds: list[int]) -> None:
    """The child: `pyspec` with the caller's arguments, environment and output."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd, own in zip(fds, (1, 2), strict=True):
        os.dup2(fd, own)
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])

    def watch() -> None:
        connection.recv(1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    code = 1
    try:
        from pyspec.cli import main

        main(asked["args"], prog_name="pyspec")
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(bytes([code]))
        os._exit(code)


def ask(path: str, args: list[str]) -> int:
    """What the shim does: have a server started, and live as long as it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        # told to end: the server goes first, or the next one would find its port taken
        signal.signal(signal.SIGTERM, lambda *_: connection.shutdown(socket.SHUT_WR))
        asked = {"args": args, "env": dict(os.environ), "cwd": os.getcwd()}
        socket.send_fds(connection, [json.dumps(asked).encode()], [1, 2])
        code = connection.recv(1)
    return code[0] if code else 1


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
