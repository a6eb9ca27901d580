"""The command line; `main` is the command `divdec`."""

from divdec.cli.app import main

__all__ = ["main"]
