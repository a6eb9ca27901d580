"""Keys and values of other columns: the tokens of each row moved, dropped or put together."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor


def columns_of(
    states: Float[Tensor, "batch heads tokens width"], columns: Int[Tensor, "batch columns"]
) -> Float[Tensor, "batch heads columns width"]:
    """The states of these columns, by row."""
    index = columns.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, index)
