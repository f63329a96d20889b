"""The command `pyspec`, and `python -m pyspec`. Until a command begins, Ctrl-C ends the process at once: it would interrupt imports."""

import os
import signal


def leave(*_: object) -> None:
    """End with the exit status that a shell reports for Ctrl-C."""
    os._exit(130)


def main() -> None:
    """Run the command line, on the main thread."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it may be ignored
        signal.signal(signal.SIGINT, leave)
    from pyspec.cli import main as command

    command(obj=leave)


if __name__ == "__main__":
    main()
