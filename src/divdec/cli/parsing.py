"""From a verb's dataclass to its options: flags, help from field docstrings, `--config` and `--print_config`.

jsonargparse does the work; this module only lets options be written with dashes and switches without a value.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import jsonargparse

from divdec.cli.complaints import complaint
from divdec.errors import UsageError

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)


@dataclasses.dataclass(frozen=True)
class Options:
    """What a command line may hold."""

    settings: type
    """A dataclass: a field is an option."""
    summary: str
    """What is done, for the help."""
    example: str
    positional: tuple[str, ...] = ()
    """Names of fields given without an option's name; the last may be a tuple, which takes one or more."""
    named: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Option by field, where it is not called as its field."""

    def spelt(self, field: str) -> str:
        """How a field is given on the command line."""
        return field if field in self.positional else f"--{self.named.get(field, field).replace('_', '-')}"

    @classmethod
    def of(cls, module: ModuleType) -> Options:
        """A verb's, as its module says them."""
        summary = (module.__doc__ or "").strip().splitlines()[0]
        return cls(module.Settings, summary, module.EXAMPLE, module.POSITIONAL, getattr(module, "NAMED", {}))


class _Parser(jsonargparse.ArgumentParser):
    """Says what is wrong in one line, and where help is."""

    options: Options

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        cause = ex.__cause__ if ex is not None else None
        text = str(cause) if isinstance(cause, UsageError) else message
        text = " ".join(line.strip() for line in text.strip().splitlines() if line.strip())
        text = complaint(text, get_type_hints(self.options.settings), self.options.spelt)
        raise UsageError(f"{text} (`{self.prog} --help` shows the options)")


def parse(module: ModuleType, verb: str, arguments: Sequence[str]) -> Any:
    """Read a verb's command line into its settings.

    Args:
        module: has `Settings` (a dataclass), `POSITIONAL` (names of fields given without an option's name; the last
            may be a tuple, which takes one or more), `EXAMPLE` and a docstring whose first line says what the verb
            does; where an option is not called as its field, `NAMED` (option by field). Where its options depend on
            what is given, `choose` instead: it takes the arguments, and gives `Options`, what to call them in
            messages, and the arguments that are left.
        verb: its name.
        arguments: what follows the verb.

    Raises:
        UsageError: an option is unknown, missing or holds a value of another type.
    """
    options = Options.of(module)
    if hasattr(module, "choose"):
        options, verb, arguments = module.choose(arguments)
    parser = build(options, verb)
    hints = get_type_hints(options.settings)
    fields = {option: field for field, option in options.named.items()}
    spelt = _spelt_out(arguments, {**hints, "config": str}, fields)
    if any(get_origin(hints[name]) is tuple for name in options.positional):
        # argparse takes what a list holds in one piece only; options may stand within it.
        spelt.sort(key=_is_option)
    found = parser.parse_args(spelt)
    values = {field.name: found[field.name] for field in dataclasses.fields(options.settings)}
    values |= {name: tuple(values[name]) for name in options.positional if isinstance(values[name], list)}
    return options.settings(**values)


def build(options: Options, verb: str) -> jsonargparse.ArgumentParser:
    """The parser of a verb."""
    parser = _Parser(
        prog=f"divdec {verb}",
        description=f"{options.summary}\n\nexample:\n  {options.example}",
        formatter_class=_formatter(),
        allow_abbrev=False,
    )
    parser.options = options
    parser.add_argument("--config", action="config", help="YAML file with any of these options.")
    hints = get_type_hints(options.settings)
    texts = _field_docs(options.settings)
    for name in options.positional:
        if get_origin(hints[name]) is tuple:
            parser.add_argument(name, nargs="+", type=get_args(hints[name])[0], help=texts[name])
        else:
            parser.add_argument(name, type=hints[name], help=texts[name])
    parser.add_class_arguments(options.settings, skip=set(options.positional), as_group=False)
    for action in parser._actions:
        named = options.named.get(action.dest)
        spelt = [f"--{named}"] if named else action.option_strings
        dashed = [option.replace("_", "-") for option in spelt if option.startswith("--")]
        for option in dashed:
            parser._option_string_actions.setdefault(option, action)
        action.option_strings = dashed + [option for option in spelt if not option.startswith("--")]
    return parser


def _spelt_out(arguments: Sequence[str], hints: dict[str, Any], fields: dict[str, str]) -> list[str]:
    """The arguments as jsonargparse wants them.

    Options get underscores and their value behind an equals sign, so that it may begin with a dash; switches the value
    true where none follows; options that take a list all the values that follow, word for word and in one place.
    """
    spelt: list[str] = []
    lists: dict[str, list[str]] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        name = fields.get(name, name)
        kind = hints.get(name)
        if not argument.startswith("--") or kind is None:
            spelt.append(f"--{name}{equals}{value}" if argument.startswith("--") and name else argument)
            continue
        if get_origin(kind) is tuple:
            values = lists.setdefault(name, [])
            values += [value] if equals else []
            while not equals and rest and not _is_option(rest[0]):
                values.append(rest.pop(0))
            continue
        if kind in (bool, bool | None) and not equals:
            follows = rest and rest[0].lower() in ("true", "false")
            equals, value = "=", rest.pop(0) if follows else "true"
        elif not equals and rest and not _is_option(rest[0]):
            equals, value = "=", rest.pop(0)
        spelt.append(f"--{name}{equals}{value}")
    return [*spelt, *(f"--{name}={json.dumps(values)}" for name, values in lists.items())]


def _is_option(argument: str) -> bool:
    return argument.startswith("--") or argument == "-h"


def _field_docs(settings: type) -> dict[str, str]:
    import docstring_parser

    texts: dict[str, str] = {}
    for ancestor in reversed(settings.__mro__[:-1]):
        parsed = docstring_parser.parse_from_object(ancestor)
        texts |= {param.arg_name: param.description or "" for param in parsed.params}
    return texts


def _formatter() -> type:
    from jsonargparse import DefaultHelpFormatter

    class Formatter(DefaultHelpFormatter):
        """Keeps the line breaks of the description, so that the example can be copied."""

        def _fill_text(self, text: str, width: int, indent: str) -> str:
            return "\n".join(indent + line for line in text.splitlines())

    return Formatter
