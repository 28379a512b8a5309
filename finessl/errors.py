"""The one exception for what a user can mend: the command line prints its message, without a traceback."""


class FinesslError(Exception):
    """Says what was wrong, where, and what to do about it."""

    status = 1  # of the command


class Stopped(FinesslError):
    """A signal ended the run at a point from which it resumes."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.status = 128 + signal  # as a shell reports a process that the signal ended
