"""lm-eval's view of a bundle: `lm_eval --model divdec --model_args pretrained=BUNDLE,steering=linear:1.5`.

Log-likelihoods are those of `divdec.evaluation.scoring`, for both read the steered logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval.models.huggingface import HFLM

from divdec.errors import UsageError
from divdec.model.checkpoint import load_tokenizer
from divdec.model.loading import find_bundle, read_config
from divdec.model.modeling import DivergenceForCausalLM


class DivdecLM(HFLM):
    """A steered model in lm-eval; a folder that is no bundle is refused, never evaluated unsteered."""

    def __init__(
        self,
        pretrained: str,
        steering: str | None = None,
        verify: bool = True,
        device: str | None = None,
        dtype: str = "auto",
        revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Load the bundle.

        Args:
            pretrained: its folder or hub id.
            steering: another rule than the bundle's.
            verify: compare weights with the bundle's digests.
            device: where all three models run.
            dtype: of all three.
            revision: of a hub id.
            **kwargs: what lm-eval's `hf` model takes (`batch_size`, `max_length`, …).

        Raises:
            UsageError: it is no bundle, or does not load.
        """
        for name in ("peft", "delta", "autogptq", "gptqmodel", "gguf_file", "subfolder"):
            if kwargs.get(name):
                raise UsageError(f"{name} has no meaning for a bundle, which names three checkpoints; leave it out")
        folder: Path = find_bundle(pretrained, revision)
        read_config(folder)
        model = DivergenceForCausalLM.from_pretrained(
            folder, steering=steering, verify=verify, dtype=dtype, device_map=device
        )
        super().__init__(
            pretrained=model,
            tokenizer=load_tokenizer(folder),  # pyright: ignore[reportArgumentType]
            backend="causal",
            **kwargs,
        )
