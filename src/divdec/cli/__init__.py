"""The command line."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `divdec`.

    Args:
        argv: the arguments after the program's name; those of the process by default.

    Returns:
        The exit code.
    """
    from divdec.cli.app import main as run

    return run(argv)
