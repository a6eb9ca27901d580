"""The command line: finds the verb, runs it, and turns errors into a line of text and an exit code.

Exit codes: 0 done, 1 a failed run, 2 something given cannot be used or a run was stopped and can be resumed, 3 the
result was measured and does not do what it is for (`train`, `calibrate`, `distill`).
Nothing heavy is imported before a verb is known: `divdec --help` is instant.
"""

from __future__ import annotations

import errno
import importlib
import sys
import warnings
from collections.abc import Sequence

from divdec.errors import Diverged, FailedClosed, UsageError

# Name, module, one line of help; in the order in which a newcomer meets them.
VERBS = (
    ("demo", "divdec.cli.demo", "train a small world, make its model forget some of it, and show the result"),
    ("train", "divdec.cli.train", "train the two auxiliaries from a forget set and a retain set"),
    ("bundle", "divdec.cli.bundle", "join target, auxiliaries and rule into one loadable model"),
    ("generate", "divdec.cli.generate", "answer prompts with a bundle, as text or JSON lines"),
    ("chat", "divdec.cli.chat", "talk to a bundle in the terminal and see what the experts push down"),
    ("serve", "divdec.cli.serve", "serve bundles over HTTP as the OpenAI API does"),
    ("playground", "divdec.cli.playground", "see it in a browser: tokens coloured by what the experts did to them"),
    ("remote", "divdec.cli.remote", "steer a model that is reached only through an API"),
    ("ngram", "divdec.cli.ngram", "count n-grams as experts that cost nothing, for verbatim text"),
    ("forget", "divdec.cli.forget", "take texts down from running models: a registry of requests"),
    ("calibrate", "divdec.cli.calibrate", "choose a bundle's rule and strength without a retrained model"),
    ("distill", "divdec.cli.distill", "put a bundle's behaviour into the weights of one ordinary model"),
    ("depth", "divdec.cli.depth", "which layers distillation would change: its gradient, layer by layer"),
    ("baseline", "divdec.cli.baseline", "apply another unlearning method to the same target and data"),
    ("compare", "divdec.cli.compare", "every method on the same models and data: the paper's main table"),
    ("eval", "divdec.cli.eval", "measure models on TOFU, MUSE or for leaks, item by item"),
    ("score", "divdec.cli.score", "aggregate results of TOFU or MUSE, with intervals"),
    ("image", "divdec.cli.image", "the same for image models: train, draw, measure, convert"),
    ("cost", "divdec.cli.cost", "what steering will cost, and whether to steer, speculate, distil or count n-grams"),
    ("bench", "divdec.cli.bench", "measure what steering costs in compute and latency on this machine"),
    ("report", "divdec.cli.report", "put results on one HTML page: tables, plots, answers side by side"),
    ("plot", "divdec.cli.plot", "draw the paper's figures from runs or published result files"),
    ("doctor", "divdec.cli.doctor", "show versions, devices and extras, and whether a bundle loads"),
)
# How libraries word a full disk: safetensors passes the system's words on, torch's zip writer does not.
DISK_FULL = ("no space left", "pytorchstreamwriter failed", "inline_container", "iostream error")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        argv: what follows the program's name; the process's own arguments by default.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from divdec import __version__

        print(f"divdec {__version__}")
        return 0
    modules = {name: module for name, module, _ in VERBS}
    verb, *rest = arguments
    if verb not in modules:
        return _fail(f"{verb}: no such verb; there are: {', '.join(modules)}")

    from divdec.cli.parsing import parse

    # Libraries' notes to their own developers are noise to a user; errors reach the user as errors.
    warnings.simplefilter("ignore")
    try:
        module = importlib.import_module(modules[verb])
        settings = parse(module, verb, rest)
        return module.run(settings) or 0
    except (UsageError, FailedClosed) as error:
        return _fail(f"{verb}: {error}")
    except Diverged as error:
        return _fail(f"{verb}: {error}", code=1)
    except SystemExit as error:  # argparse has printed its help or its line
        return error.code if isinstance(error.code, int) else 2
    except KeyboardInterrupt:
        return _fail(f"{verb}: interrupted", code=130)
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except Exception as error:
        if message := _stopped(error):
            return _fail(f"{verb}: {message}")
        raise


def _stopped(error: Exception) -> str | None:
    """What to say of a run that was stopped from outside, or None where the program itself has failed."""
    # Known by its name: the class lives beside torch, which an error of another verb need not load.
    if type(error).__name__ == "Interrupted":
        return f"{error}; the same command goes on from there"
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    if full or any(words in str(error).lower() for words in DISK_FULL):
        return "the disk is full; make room and give the same command again: finished parts are kept"
    return None


def _help() -> str:
    width = max(len(name) for name, _, _ in VERBS)
    verbs = "\n".join(f"  {name:<{width}}  {text}" for name, _, text in VERBS)
    return (
        "divdec: make a language model behave as if it had never seen a set of documents\n\n"
        f"usage: divdec VERB [options]\n\nverbs:\n{verbs}\n\n"
        "`divdec VERB --help` shows a verb's options and an example. `divdec demo` shows it all in a few minutes.\n\n"
        "exit codes: 0 done; 1 failed; 2 something given cannot be used, or the run was stopped and can be resumed;\n"
        "3 the result was measured and does not do what it is for (train, calibrate, distill)"
    )


def _fail(message: str, code: int = 2) -> int:
    print(f"divdec {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
