"""Exceptions that the command line prints as one line before it exits with code 2."""

NOT_REACHED = 3
"""Exit code of a verb that finished, but measured that its result does not reach its aim."""


class UsageError(ValueError):
    """Invalid user input: a setting, file, checkpoint or folder."""


class FailedClosed(RuntimeError):
    """A model could not be steered; it raises this error instead of answering unsteered."""


class Diverged(RuntimeError):
    """Training stopped because its loss was not finite."""


class Interrupted(Exception):
    """Ctrl-C or a termination signal stopped a run after it had saved its state."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
