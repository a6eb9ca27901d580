"""Import costs, and the registration of the model type with transformers."""

import subprocess
import sys

import pytest


def run(code, *arguments):
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_divdec_imports_neither_torch_nor_transformers():
    code = "import sys, divdec; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    assert run(code) == "[]"


def test_unknown_names_raise_attribute_error():
    import divdec

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        divdec.nonsense  # noqa: B018
    assert set(divdec.__all__) <= set(dir(divdec))
    assert all(getattr(divdec, name) is not None for name in divdec.__all__)


def test_importing_the_model_registers_it_with_transformers(bundle):
    code = (
        "from transformers import AutoConfig, AutoModelForCausalLM; from divdec import DivergenceForCausalLM; "
        "import sys; "
        "print(AutoConfig.from_pretrained(sys.argv[1]).model_type, "
        "type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)"
    )
    assert run(code, str(bundle)) == "divergence DivergenceForCausalLM"
