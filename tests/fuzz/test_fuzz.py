"""Random steered models under random options of `generate`, compared step by step with the slow reference.

A case follows from its number. `DIVDEC_FUZZ_CASE=123 pytest tests/fuzz -k one_case` runs one case by itself, and
`DIVDEC_FUZZ_CASES=9000 pytest tests/fuzz -m slow` the first 9,000.
"""

import collections
import os

import pytest
import transformers

from fuzz import options
from fuzz.cases import ANSWERED, NOT_TAKEN, REFUSED, Finding, run
from fuzz.models import ARCHITECTURES

SAMPLE = range(1)  # of each architecture, in the default suite
CASES = int(os.environ.get("DIVDEC_FUZZ_CASES", "2000"))


@pytest.fixture(autouse=True)
def quiet():
    # transformers logs about many of these options; warnings are errors all the same.
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)
    transformers.utils.logging.enable_progress_bar()


def compare(numbers):
    """Run cases, print outcomes by architecture, and return their totals; fail with all findings."""
    outcomes, findings = collections.Counter(), []
    for number in numbers:
        name = list(ARCHITECTURES)[number % len(ARCHITECTURES)]
        try:
            outcomes[name, run(number)[0]] += 1
        except Finding as finding:
            findings.append(f"DIVDEC_FUZZ_CASE={number}\n{finding}")
    columns = (ANSWERED, REFUSED, NOT_TAKEN)
    print(f"\n{'architecture':16}" + "".join(f"{column:>26}" for column in columns))
    for name in ARCHITECTURES:
        print(f"{name:16}" + "".join(f"{outcomes[name, column]:26}" for column in columns))
    totals = [sum(outcomes[name, column] for name in ARCHITECTURES) for column in columns]
    print(f"{'all':16}" + "".join(f"{total:26}" for total in totals))
    assert not findings, "\n\n".join([f"{len(findings)} findings", *findings])
    return dict(zip(columns, totals, strict=True))


def test_every_generation_config_option_is_fuzzed_or_excluded():
    known = set(vars(transformers.GenerationConfig()))
    assert not options.FUZZED & options.LEFT_OUT.keys()
    unknown = known - options.FUZZED - options.LEFT_OUT.keys()
    assert not unknown, f"new in transformers {transformers.__version__}: draw them in fuzz/options.py, or say why not"


@pytest.mark.skipif("DIVDEC_FUZZ_CASE" not in os.environ, reason="one case by itself: set DIVDEC_FUZZ_CASE")
def test_single_fuzz_case():
    print(*run(int(os.environ["DIVDEC_FUZZ_CASE"])))


@pytest.mark.parametrize("part", SAMPLE)
def test_sampled_fuzz_outputs_match_reference(part):
    count = len(ARCHITECTURES)
    totals = compare(range(part * count, (part + 1) * count))
    assert totals[ANSWERED] > count / 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_fuzz_outputs_match_reference(capsys):
    with capsys.disabled():
        totals = compare(range(CASES))
    assert totals[ANSWERED] > 0.55 * CASES  # refusals prove little
