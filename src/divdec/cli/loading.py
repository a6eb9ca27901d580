"""Loading a bundle for a command."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from cyclopts import Parameter

from divdec.errors import UsageError, first_line
from divdec.options import RARE, ModelLoading, SteeringChoice
from divdec.runs import check_one_process

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from divdec.model.loading import LoadedModels
    from divdec.model.modeling import DivergenceForCausalLM
    from divdec.steering import Steering

Result = TypeVar("Result")


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertDevices:
    """Where the auxiliaries run."""

    expert_devices: Annotated[tuple[str, ...], RARE] = ()
    """Devices of the auxiliaries: one for both, or one for q and one for p, such as cuda:1 cuda:2 (not for adapters of
    one base). The auxiliaries run in parallel with the target."""

    def __post_init__(self) -> None:
        if len(self.expert_devices) > 2:
            raise UsageError(
                f"--expert-devices {' '.join(self.expert_devices)}; accepted: one device, or q's and then p's"
            )


def load(
    bundle: str,
    loading: ModelLoading = ModelLoading(),
    choice: SteeringChoice = SteeringChoice(),
    experts: ExpertDevices = ExpertDevices(),
    loaded: LoadedModels | None = None,
    registry: str | None = None,
) -> tuple[DivergenceForCausalLM, PreTrainedTokenizerBase]:
    """Load model and tokenizer.

    `loaded` shares the weights of bundles that were loaded before; `registry` is a registry of takedown requests to
    follow.

    Raises:
        UsageError: the bundle does not load, or is no bundle; nothing answers unsteered.
    """
    from divdec.checkpoint import dtype_for_passes, load_tokenizer
    from divdec.model.loading import find_bundle, read_config
    from divdec.model.modeling import DivergenceForCausalLM
    from divdec.report.doctor import measured_text
    from divdec.steering import Steering

    quiet()
    check_one_process()
    device: str | dict[str, str] = device_map(loading.device)
    folder = find_bundle(bundle)
    if experts.expert_devices:
        retain, forget = device_map(experts.expert_devices[0]), device_map(experts.expert_devices[-1])
        device = {"target": device, "retain_auxiliary": retain, "forget_auxiliary": forget, "base": retain}
        if retain != forget and read_config(folder).base is not None:
            raise UsageError("--expert-devices: the auxiliaries are adapters of one base; give one device for both")
    if choice.steering is not None:
        Steering.parse(choice.steering)  # before the models are loaded
    model = DivergenceForCausalLM.from_pretrained(
        folder,
        verify=not loading.no_verify,
        steering=choice.steering,
        dtype=dtype_for_passes(loading.dtype, device_map(loading.device)),
        device_map=device,
        loaded=loaded,
        registry=registry,
    )
    warn_if_unsteered(model.steering, model.takedowns)
    if model.config.measured:
        unverified = " (not verified: files may have changed)" if loading.no_verify else ""
        report(f"measured: {measured_text(model.config, model.steering, model.takedowns)}{unverified}")
    return model, load_tokenizer(folder)


def load_in_thread(load_models: Callable[[], Result]) -> Result:
    """Load models in a thread that ends, for processes whose passes run in another than the main thread.

    GNU OpenMP's workers wait actively only while there are no more of them than CPUs, and those of a thread exist until
    it ends: with a 1.5B target and two adapters a token then takes 205 ms instead of 253.
    """
    loaded: Future[Result] = Future()

    def run() -> None:
        try:
            loaded.set_result(load_models())
        except BaseException as error:
            loaded.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    return loaded.result()


def warn_if_unsteered(steering: Steering, takedowns: object) -> None:
    """Warn on standard error that linear:0 leaves the target as it is, unless there are takedown requests."""
    if steering.rule == "linear" and steering.alpha == 0:
        answers = "the target's own" if takedowns is None else "steered by takedown requests alone"
        print(f"warning: linear:0 steers nothing: the answers are {answers}", file=sys.stderr)


def quiet() -> None:
    """Silence transformers' progress bars and warnings."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def report(line: str) -> None:
    """Print a line of progress on standard error."""
    print(line, file=sys.stderr)


def device_map(device: str) -> str:
    """Return the device map that transformers takes for a device that a user names.

    Raises:
        UsageError: there is no such device on this machine.
    """
    import torch

    if device == "spread":
        return "auto"
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = "give cpu, cuda or mps" if "Expected one of" in str(error) else first_line(error)
        raise UsageError(f"device {device!r} cannot be used ({reason}); `divdec doctor` lists the devices") from None
    if device == "meta":
        raise UsageError("device 'meta' holds no weights; `divdec doctor` lists the devices")
    return device


def check_not_bundle(model: str | None, option: str) -> None:
    """Refuse a bundle where the plain model that it steers is wanted; `option` is named in the message."""
    from divdec.model.bundle import is_bundle

    if model is not None and is_bundle(Path(model).expanduser()):
        raise UsageError(f"{option} {model} is a bundle; give the plain model that it steers")
