"""Completion, in a real bash."""

import shutil
import subprocess

import pytest

from divdec.cli import main

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
_divdec 2>/dev/null; printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        assert main(["--install-completion", "--shell", "bash", "--output", str(home / "divdec.bash")]) == 0
    return home / "divdec.bash"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "completion"),
    [
        (["divdec", "se"], "serve"),
        (["divdec", "takedown", "a"], "add"),
        (["divdec", "serve", "--logp"], "--logprobs"),
        (["divdec", "serve", "my-bundle", "--on-suppressed", "re"], "refuse"),
    ],
)
def test_bash_completes_commands_options_and_values(script, words, completion):
    result = subprocess.run(["bash", "-c", ASK, "bash", script, *words], capture_output=True, text=True, check=True)
    assert completion in result.stdout.split()
