"""`finessl` and `python -m finessl`."""

from __future__ import annotations

import _signal  # not signal, whose imports take a moment in which Ctrl-C would end in a traceback
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType


def interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C raises KeyboardInterrupt, SIGTERM raises SystemExit. During an import the process ends at once instead: an
    exception there can abort a C++ library that is being loaded."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            try:
                os.write(2, b"finessl: interrupted.\n" if number == _signal.SIGINT else b"finessl: terminated.\n")
            finally:  # nobody may be reading, and an import takes a BrokenPipeError for a file that is not there
                os._exit(128 + number)
        frame = frame.f_back
    if number == _signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Python drops an exception that is raised inside a destructor or a C callback, prints a traceback and goes on. An
    interrupt that is dropped there is repeated 10 ms later, when the destructor has returned."""
    if not issubclass(unraisable.exc_type, (KeyboardInterrupt, SystemExit)) or not hasattr(_signal, "setitimer"):
        sys.__unraisablehook__(unraisable)
        return
    number = _signal.SIGINT if issubclass(unraisable.exc_type, KeyboardInterrupt) else _signal.SIGTERM
    _signal.signal(_signal.SIGALRM, lambda _, frame: interrupt(number, frame))
    _signal.setitimer(_signal.ITIMER_REAL, 0.01)


def main() -> None:
    sys.unraisablehook = interrupt_again
    _signal.signal(_signal.SIGINT, interrupt)
    _signal.signal(_signal.SIGTERM, interrupt)
    from finessl.cli import main as run

    run()


if __name__ == "__main__":
    main()
