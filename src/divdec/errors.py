"""The exceptions that the command line turns into a line of text and exit code 2.

It knows nothing of what went wrong; whoever raises them says what was given, what is accepted and what to do.
"""

NOT_REACHED = 3
"""Exit code of a verb that has done its work, but measured that the result does not do what it is for."""


class UsageError(ValueError):
    """Something the user gave cannot be used: a bad setting, file, checkpoint or folder."""


class FailedClosed(RuntimeError):
    """A model could not be steered while it answered; it gave an error instead of the target's own answer."""


class Diverged(RuntimeError):
    """A training loss was not finite, so that training cannot go on."""


def first_line(error: Exception) -> str:
    """What another library's error says, in one line; the error's kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
