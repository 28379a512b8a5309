"""The one exception for what a user can mend: the command line prints its message, without a traceback."""


class FinesslError(Exception):
    """Says what was wrong, where, and what to do about it."""
