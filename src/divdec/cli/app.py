"""The commands in their order, and how their errors become one line of text and an exit code (see `EPILOGUE`).

Modules of commands import torch and transformers inside their functions, so that `divdec --help` starts fast.
"""

from __future__ import annotations

import errno
import io
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from cyclopts import (
    App,
    ArgumentCollection,
    CoercionError,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    RepeatArgumentError,
    Token,
    UnknownOptionError,
)
from cyclopts.config import Dict
from cyclopts.help import DefaultFormatter

from divdec import __version__
from divdec.cli import bundle, chat, evaluation, generate, remote, serving, takedown, training
from divdec.errors import Diverged, FailedClosed, Interrupted, UsageError, first_line

PRODUCT = (
    training.demo, training.train, bundle.bundle, generate.generate, chat.chat, serving.serve, serving.playground,
    remote.remote, training.shrink, training.ngram, takedown.app, bundle.calibrate, training.distill, evaluation.app,
    evaluation.cost, bundle.doctor,
)  # fmt: skip
EPILOGUE = """\
`divdec COMMAND --help` shows the options of a command and an example. `divdec demo` shows the whole method in less
than an hour.

Exit codes: 0 done; 1 failed, or a text is still recited (takedown); 2 unusable input, or a stopped run that can be
resumed; 3 the measured result does not reach its goal (train, calibrate, distill), or the target never recited the
text (takedown); 130 interrupted."""
OPTIONS = Group("Options of every command", sort_key=99)
STEERING, ADDED = Group("Train, decode and serve", sort_key=1), Group("Research", sort_key=2)
# Options that do not exist, and what does the same.
INSTEAD = {
    "--adapters": "no option for adapters, the default, and --merge for checkpoints",
    "--alpha": "--steering linear:ALPHA (such as linear:1.5)",
    "--k": "--steering rank:K (such as rank:20)",
    "--learning-rate": "--lr",
    "--model": "the bundle's path as the first argument",
}
PACKAGES: dict[str, str] = {}  # the package that added a command, by the command's name
# How libraries word a full disk: safetensors passes the system's words on, torch's zip writer does not.
DISK_FULL = ("no space left", "pytorchstreamwriter failed", "inline_container", "iostream error")
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _shown_default(value: Any) -> str | None:
    if value is None or value is False or value in ((), ""):
        return None
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


app = App(
    name="divdec",
    help="Make a language model behave as if it had never seen a set of documents.",
    help_epilogue=EPILOGUE,
    help_format="markdown",
    help_formatter=DefaultFormatter(show_metavar=False),
    version=f"divdec {__version__}",
    default_parameter=Parameter(negative=(), consume_multiple=1, show_default=_shown_default),
)
app.register_install_completion_command(help="Install completion for your shell (bash, zsh or fish).")
for flag in ("--help", "--version", "--install-completion"):
    app[flag].group = OPTIONS
for number, command in enumerate(PRODUCT):
    if isinstance(command, App):
        command.group, command.sort_key, command.help_epilogue = STEERING, number, ""
        app.command(command)
    else:
        app.command(command, group=STEERING, sort_key=number, help_epilogue="")


def _add_commands(entries: Iterable[EntryPoint]) -> None:
    """Add the commands of installed packages. A command's module is imported when the command runs or shows its help.

    Args:
        entries: entry points of the group `divdec.commands`. `eval.tofu` is the command tofu of the group eval.
    """
    for number, entry in enumerate(sorted(entries, key=lambda entry: entry.name)):
        group, _, name = entry.name.rpartition(".")
        command, package = entry.name.replace(".", " "), "another package" if entry.dist is None else entry.dist.name
        if (group and group not in app) or name in (app[group] if group else app):
            problem = "a command of this name exists" if not group or group in app else f"there is no group {group}"
            print(f"divdec: `{command}` of {package} is left out: {problem}", file=sys.stderr)
            continue
        PACKAGES[command] = package
        if group:
            app[group].command(entry.value, name=name, sort_key=number + 2, help_epilogue="")
        else:
            app.command(entry.value, name=name, group=ADDED, sort_key=number)


_add_commands(entry_points(group="divdec.commands"))


def _import_commands(tokens: list[str]) -> None:
    """Import the modules of the commands that a command line shows or runs.

    A command that cannot be imported is replaced by one that names its package and the error.
    """
    completes = tokens[:1] == ["--install-completion"]
    shows_all = completes or tokens[:1] in ([], ["--help"], ["-h"])  # with the first lines of their help
    for name in app if shows_all else [name for name in tokens[:1] if name in app]:
        _import_command(app, name, name)
    if completes or tokens[:1] == ["eval"]:
        for name in app["eval"]:
            _import_command(app["eval"], name, f"eval {name}")


def _import_command(group: App, name: str, command: str) -> None:
    try:
        group[name]
    except Exception as error:
        reason = first_line(error.__cause__ if isinstance(error.__cause__, Exception) else error)
        message = f"{PACKAGES[command]} cannot be imported ({reason}); install it again or remove it"

        def fail(*tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]) -> None:
            raise UsageError(message)

        del group[name]
        group.command(fail, name=name, help=message, group=ADDED if group is app else None)


@app.meta.default
def _run(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Annotated[Path | None, Parameter(group=OPTIONS, help="YAML file of options.")] = None,
) -> Any:
    """Read options from `config`, then run the command."""
    file = () if config is None else (_read_yaml(config, app.parse_commands(tokens)[0]),)
    before, app.config = app.config, (*file, _check_whole_numbers)
    try:
        return app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    finally:
        app.config = before


def _read_yaml(config: Path, commands: Sequence[str]) -> Dict:
    """Read the options of one command; null leaves an option at its default."""
    import yaml

    if not config.is_file():
        raise UsageError(f"--config is {config}, which does not exist; accepted: a YAML file of options")
    try:
        content = yaml.safe_load(config.read_bytes())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {config} is no readable YAML: {' '.join(str(error).split())}") from None
    content = {} if content is None else content
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise UsageError(f"--config {config} holds no options; accepted: lines such as 'batch-size: 8'")
    content = {name: value for name, value in content.items() if value is not None}
    # Below the command's name: cyclopts drops options on the first level that are called like a command, as --ngram is.
    for name in reversed(commands):
        content = {name: content}
    return Dict(content, source=str(config.absolute()))


def _check_whole_numbers(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse 1.5 where a whole number is accepted, which cyclopts would round."""
    for argument in arguments:
        kinds = {argument.hint, *get_args(argument.hint)}
        for token in argument.tokens if int in kinds and float not in kinds else ():
            if not token.value.lstrip("+-").isdecimal():
                raise UsageError(f"{argument.name} is {token.value!r}; accepted: a whole number")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: what follows the program's name; the process's own arguments by default.

    Returns:
        The exit code.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An answer or a path may hold what the terminal's encoding lacks; printing it must not end a finished run.
        sys.stdout.reconfigure(errors="backslashreplace")
    _import_commands(tokens)
    chain, apps, unused = app.parse_commands(tokens)
    name = " ".join(("divdec", *chain))
    # Libraries' notes to their own developers are noise to a user; errors reach the user as errors.
    warnings.simplefilter("ignore")
    try:
        if apps[-1].default_command is None and not unused:
            app.meta([*chain, "--help"], exit_on_error=False, result_action="return_value")
            return 2
        return app.meta(tokens, exit_on_error=False, print_error=False, result_action="return_value") or 0
    except CycloptsError as error:
        return _fail(f"{name}: {_describe(_unknown_option(error) or error)} (`{name} --help` shows the options)")
    except (UsageError, FailedClosed) as error:
        return _fail(f"{name}: {error}")
    except Diverged as error:
        return _fail(f"{name}: {error}", code=1)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 2
    except KeyboardInterrupt:
        return _fail(f"{name}: interrupted", code=130)
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except Exception as error:
        if message := _resumable(error):
            return _fail(f"{name}: {message}")
        if isinstance(error, PermissionError):
            return _fail(f"{name}: {error}")
        raise


def _unknown_option(error: CycloptsError) -> UnknownOptionError | None:
    """Return the error of the first unknown option, a probable cause of `error`: `--bse` leaves `--base` missing."""
    if error.app is None or error.app.default_command is None:
        return None
    arguments = error.app.assemble_argument_collection(default_parameter=app.default_parameter)
    known = {name for argument in arguments for name in argument.names}
    for token in error.unused_tokens or ():
        name = token.split("=")[0]
        if name.startswith("--") and name not in known:
            return UnknownOptionError(token=Token(keyword=name, source="cli"), argument_collection=arguments)
    return None


def _describe(error: CycloptsError) -> str:
    """Say in one line what was given and what is accepted, with the option as it is typed."""
    error.verbose = False
    if isinstance(error, UnknownOptionError) and error.token.keyword in INSTEAD:
        return f"there is no option {error.token.keyword}; use {INSTEAD[error.token.keyword]}"
    if isinstance(error, RepeatArgumentError):
        return f"{error.token.keyword} is given more than once"
    if type(error) is MissingArgumentError and error.argument is not None:
        name = error.argument.name
        missing = name.removeprefix("--") if error.argument.index is not None else name
        return f"{error.keyword} needs a value" if error.keyword else f"{missing} is required"
    if isinstance(error, CoercionError) and error.token is not None and error.argument is not None:
        accepted = _accepted(error.argument.hint)
        if accepted is not None:
            given = "" if error.token.source in ("", "cli") else f" in {error.token.source}"
            name = error.argument.name if error.argument.index is None else error.argument.name.removeprefix("--")
            return f"{name} is {error.token.value!r}{given}; accepted: {accepted}"
    return " ".join(str(error).split())


def _accepted(hint: Any) -> str | None:
    """Say which values a type accepts; None for a type without a name among users."""
    if get_origin(hint) is Literal:
        return ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (tuple, list):
        return _accepted(get_args(hint)[0])
    if members := [member for member in get_args(hint) if member not in (type(None), ...)]:
        words = [_accepted(member) for member in members if not isinstance(member, Parameter)]
        return None if None in words else " or ".join(dict.fromkeys(word for word in words if word))
    return KINDS.get(hint)


def _resumable(error: Exception) -> str | None:
    """Say how to resume a run that was stopped from outside; None where the program itself has failed."""
    if isinstance(error, Interrupted):
        return f"{error}; the same command resumes it"
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    if full or any(words in str(error).lower() for words in DISK_FULL):
        return "the disk is full; make room and run the same command again (all but shrink go on where they stopped)"
    return None


def _fail(message: str, code: int = 2) -> int:
    print(message, file=sys.stderr)
    return code
