"""Optional extras: what each installs, and one line for who lacks it."""

import importlib.util

from divdec.errors import UsageError

EXTRAS = {
    "lora": ("peft",),
    "serve": ("fastapi", "uvicorn", "prometheus_client"),
    "vllm": ("vllm",),
    "ui": ("gradio",),
    "image": ("diffusers", "torchmetrics"),
}


def missing(extra: str) -> list[str]:
    """The libraries of an extra that are not installed."""
    return [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]


def require(extra: str, what: str) -> None:
    """Refuse what an extra is needed for, where it is not installed.

    Args:
        extra: its name.
        what: what needs it, for the message.

    Raises:
        UsageError: says what to install.
    """
    if lacking := missing(extra):
        raise UsageError(f"{what} needs {' and '.join(lacking)}: pip install 'divdec[{extra}]'")
