"""The version, for files that record it."""

__version__ = "0.1.0"
