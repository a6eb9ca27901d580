"""Options of `divdec bench`, and the shapes of its models. Free of torch.

The shapes are those of Hoffmann et al. (2022), table A9, and of Llama 3. The paper measures compute on table A9 and
"several models in the range of 19-70B parameters following the Llama 3 architecture" (appendix Compute Requirements)
without giving their shapes; those between 8B and 70B are ours, in the proportions of the published ones.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from divdec.errors import UsageError
from divdec_research.ranges import CheckedSettings, Count

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclasses.dataclass(frozen=True)
class DecoderShape:
    """Size of a decoder, apart from its vocabulary."""

    name: str
    hidden: int
    mlp: int
    """Width of the feed-forward layers."""
    head: int
    """Width of a head."""
    heads: int
    key_value_heads: int
    layers: int

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layers have three matrices, as Llama's do."""
        return self.name.startswith("llama")

    def config(self, vocabulary: int, positions: int = 4096) -> PreTrainedConfig:
        """A transformers configuration: Llama's, or Starcoder2's, which has table A9's feed-forward of two matrices.

        Table A9's models (Chinchilla's) have another matrix per layer for relative positions; these use rotary
        positions and are a tenth smaller than their name says. N is always counted.
        """
        from transformers import LlamaConfig, Starcoder2Config

        common = {
            "vocab_size": vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head,
            "max_position_embeddings": positions,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        if self.gated:
            return LlamaConfig(**common, tie_word_embeddings=self.hidden < 4096)
        return Starcoder2Config(**common, tie_word_embeddings=True, use_bias=False, sliding_window=None)


def _chinchilla(millions: int, hidden: int, heads: int, layers: int) -> DecoderShape:
    # Feed-forward layers are four times as wide; heads are 64 wide up to 306M and 128 from 425M.
    return DecoderShape(
        f"chinchilla-{millions}M", hidden, 4 * hidden, 64 if millions < 400 else 128, heads, heads, layers
    )


# Hoffmann et al. 2022, table A9: parameters in millions, d_model, n_heads, n_layers.
TABLE_A9 = (
    (44, 512, 8, 8), (57, 576, 9, 9), (74, 640, 10, 10), (90, 640, 10, 13), (106, 640, 10, 16), (117, 768, 12, 12),
    (140, 768, 12, 15), (163, 768, 12, 18), (175, 896, 14, 14), (196, 896, 14, 16), (217, 896, 14, 18),
    (251, 1024, 16, 16), (278, 1024, 16, 18), (306, 1024, 16, 20), (425, 1280, 10, 18), (489, 1280, 10, 21),
    (509, 1408, 11, 18), (552, 1280, 10, 24), (587, 1408, 11, 21), (632, 1536, 12, 19), (664, 1408, 11, 24),
    (724, 1536, 12, 22), (816, 1536, 12, 25), (893, 1792, 14, 20), (1018, 1792, 14, 23), (1143, 1792, 14, 26),
    (1266, 2048, 16, 22), (1424, 2176, 17, 22), (1429, 2048, 16, 25), (1593, 2048, 16, 28), (1609, 2176, 17, 25),
    (1731, 2304, 18, 24), (1794, 2176, 17, 28), (2007, 2304, 18, 28), (2283, 2304, 18, 32), (2298, 2560, 20, 26),
    (2639, 2560, 20, 30), (2980, 2560, 20, 34), (3530, 2688, 22, 36), (3802, 2816, 22, 36), (4084, 2944, 22, 36),
    (4516, 3072, 24, 36), (6796, 3584, 28, 40), (9293, 4096, 32, 42), (11452, 4352, 32, 47), (12295, 4608, 36, 44),
    (12569, 4608, 32, 47), (13735, 4864, 32, 47), (14940, 4992, 32, 49), (16183, 5120, 40, 47),
)  # fmt: skip
LLAMA_3 = (
    DecoderShape("llama-1B", 2048, 8192, 64, 32, 8, 16),  # Llama 3.2
    DecoderShape("llama-3B", 3072, 8192, 128, 24, 8, 28),  # Llama 3.2
    DecoderShape("llama-8B", 4096, 14336, 128, 32, 8, 32),  # Llama 3.1
    DecoderShape("llama-19B", 6144, 21504, 128, 48, 8, 38),  # ours
    DecoderShape("llama-31B", 7168, 25088, 128, 56, 8, 46),  # ours
    DecoderShape("llama-48B", 8192, 28672, 128, 64, 8, 56),  # ours
    DecoderShape("llama-70B", 8192, 28672, 128, 64, 8, 80),  # Llama 3.1
)
SHAPES = {shape.name: shape for shape in (*(_chinchilla(*row) for row in TABLE_A9), *LLAMA_3)}


def find_shape(name: str) -> DecoderShape:
    """Look a shape up by its name.

    Raises:
        UsageError: there is none.
    """
    if name not in SHAPES:
        raise UsageError(
            f"shape {name!r} is not known; accepted: chinchilla-44M to chinchilla-16183M (table A9), "
            f"{', '.join(shape.name for shape in LLAMA_3)}"
        )
    return SHAPES[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchSettings(CheckedSettings):
    """Options of `divdec bench compute`."""

    output: str
    """Folder for results.jsonl (one line per combination), table, plot and run.json. Combinations that were already
    measured with the same settings are skipped."""
    targets: tuple[str, ...] = ()
    """Model shapes of the target, such as chinchilla-306M or llama-8B; an unknown name lists them. The default depends
    on the device."""
    auxiliaries: tuple[str, ...] = ()
    """Model shapes of the auxiliaries. Combinations with 2n > N are skipped."""
    vocabularies: tuple[int, ...] = ()
    """Vocabulary sizes. The default on a GPU is 32768, 65536, 131072 and 262144 (as in the paper), on a CPU two of
    these."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of all three models. 'auto' uses a GPU if one is available."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights; 'auto' is bfloat16 on a GPU and float32 on a CPU."""
    batch: Count = 1
    """Batch size."""
    prompt: Count = 64
    """Length of the prompt in tokens."""
    tokens: Count = 8
    """Number of decoded tokens."""
    rounds: Count = 5
    """Number of measurement rounds. The models take turns in each round; results are medians over rounds."""
    seed: int = 0
    """Seed of the random weights and tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for vocabulary in self.vocabularies:
            if vocabulary < 256:
                raise UsageError(f"vocabularies holds {vocabulary}; accepted: numbers of tokens of at least 256")
