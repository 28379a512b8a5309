"""`finessl` and `python -m finessl`."""

from __future__ import annotations

import _signal  # not signal, whose imports take a moment in which Ctrl-C would end in a traceback
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType


def interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C raises KeyboardInterrupt, SIGTERM raises SystemExit. During an import the process ends at once instead: an
    exception there can abort a C++ library that is being loaded."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"finessl: interrupted.\n" if number == _signal.SIGINT else b"finessl: terminated.\n")
            os._exit(128 + number)
        frame = frame.f_back
    if number == _signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def main() -> None:
    _signal.signal(_signal.SIGINT, interrupt)
    _signal.signal(_signal.SIGTERM, interrupt)
    from finessl.cli import main as run

    run()


if __name__ == "__main__":
    main()
