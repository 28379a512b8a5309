"""`finessl` and `python -m finessl`."""

from __future__ import annotations

import os
import signal
from types import FrameType


def interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C raises KeyboardInterrupt, SIGTERM raises SystemExit. During an import the process ends at once instead: an
    exception there can abort a C++ library that is being loaded."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"finessl: interrupted.\n" if number == signal.SIGINT else b"finessl: terminated.\n")
            os._exit(128 + number)
        frame = frame.f_back
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def main() -> None:
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    from finessl.cli import main as run

    run()


if __name__ == "__main__":
    main()
