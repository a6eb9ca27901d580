"""The command line."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `divdec`; see `divdec.cli.app.main`."""
    from divdec.cli.app import main as run

    return run(argv)
