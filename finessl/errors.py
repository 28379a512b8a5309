"""The one exception for what a user can fix: the command line prints its message, without a traceback."""


class FinesslError(Exception):
    """Says what was wrong, where, and what to do about it."""

    status = 1  # of the command


class Stopped(FinesslError):
    """A signal ended the run at a point from which it resumes."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.status = 128 + signal  # as a shell reports a process that the signal ended


class Mistakes:
    """Collects the sentences of several errors, each once.

    mistakes = Mistakes()
    for cell in cells:
        with mistakes:
            check(cell)
    mistakes.report()
    """

    def __init__(self) -> None:
        self.sentences: dict[str, None] = {}

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, FinesslError) or isinstance(error, Stopped):
            return False
        self.sentences |= dict.fromkeys(str(error).splitlines())
        return True

    def report(self) -> None:
        """Raise what was collected as one error."""
        if self.sentences:
            raise FinesslError("\n".join(self.sentences))
