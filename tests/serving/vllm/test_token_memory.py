"""Codes of tokens: exact in every dtype, and nothing is read from what is no code."""

import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from divdec.errors import FailedClosed
from divdec.serving.vllm.token_memory import (
    GENUINE,
    TRIAL,
    ContextReader,
    TokenMemory,
    bits_for,
    encode,
    read_contexts,
)

SIZES = st.sampled_from([2, 3, 512, 513, 50257, 151936, 262144])


def remembered(rows, size, dtype=torch.bfloat16):
    """Codes of contexts, oldest first, −1 where there is no token."""
    tokens = torch.tensor(rows).flip(1)
    exists = torch.where(tokens[:, 1:] >= 0, 1.0, -1.0).to(dtype)
    noise = torch.full((len(rows), 1), GENUINE, dtype=dtype)
    return torch.cat([noise, exists, encode(tokens.clamp(min=0), bits_for(size), dtype).flatten(1)], dim=1)


@given(st.data(), SIZES, st.integers(1, 5), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_token_contexts_round_trip(data, size, length, dtype):
    rows = []
    for missing in data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=4)):
        known = data.draw(st.lists(st.integers(0, size - 1), min_size=length - missing, max_size=length - missing))
        rows.append([-1] * missing + known)
    codes = remembered(rows, size, dtype)
    assert read_contexts(codes, length).tolist() == rows
    nudged = codes.float() * (1 + 0.05 * torch.rand(codes.shape, generator=torch.Generator().manual_seed(0)))
    nudged[:, 0] = GENUINE
    assert read_contexts(nudged, length).tolist() == rows


@pytest.mark.parametrize("value", [0.0, 0.5, -0.7, 1.5, float("nan"), float("inf")])
@pytest.mark.parametrize("column", [4, 20, 30])
def test_invalid_token_code_fails_closed(value, column):
    codes = remembered([[5, 6, 7, 8], [1, 2, 3, 4]], 512)
    codes[1, column] = value
    with pytest.raises(FailedClosed, match="cannot be read"):
        read_contexts(codes, 4)


def test_codes_of_missing_tokens_are_ignored():
    codes = remembered([[-1, -1, 7, 8]], 512)
    codes[0, 4 + 2 * 9 :] = 0.3
    assert read_contexts(codes, 4).tolist() == [[-1, -1, 7, 8]]


@pytest.mark.parametrize("mark", [-1.0, 1.5, 3.0, float("nan")])
def test_rows_without_marker_fail_closed(mark):
    codes = remembered([[5, 6, 7, 8]], 512)
    codes[0, 0] = mark
    with pytest.raises(FailedClosed):
        read_contexts(codes, 4)


def test_dummy_runs_are_accepted_only_before_first_real_token():
    read, real = ContextReader(4), remembered([[5, 6, 7, 8], [-1, 6, 7, 8]], 512)
    trial = torch.full_like(real, TRIAL)
    assert read(trial).tolist() == [[-1] * 4] * 2
    assert read(trial).tolist() == [[-1] * 4] * 2
    assert read(real).tolist() == read_contexts(real, 4).tolist()
    with pytest.raises(FailedClosed, match="was not written"):
        read(trial)
    with pytest.raises(FailedClosed, match="was not written"):
        ContextReader(4)(torch.cat([real, trial[:1]]))
    assert read(real).tolist() == read_contexts(real, 4).tolist()


def test_vllm_dummy_runs_have_empty_context():
    generator = torch.Generator().manual_seed(0)
    random = torch.rand(6, 4 + 4 * 9, generator=generator).bfloat16()
    random[0] = TRIAL
    random[1, 0] = 1.0  # what rounding makes of a number close to it
    assert read_contexts(random, 4).tolist() == [[-1] * 4] * 6


class OnGpu(torch.Tensor):
    """Token ids that say they are on a GPU."""

    is_cuda = True


def test_graph_without_attention_fails_closed(monkeypatch):
    """Replayed, its rows would be dummies, and the first answers would lack n-grams and takedown requests."""
    memory = TokenMemory.__new__(TokenMemory)
    torch.nn.Module.__init__(memory)
    memory.width, memory.dtype = 4 + 4 * 9, torch.float32
    memory._forward_context = lambda: types.SimpleNamespace(attn_metadata=None)
    ids, positions = torch.tensor([5, 6]).as_subclass(OnGpu), torch.tensor([0, 1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(FailedClosed, match="set VLLM_USE_BREAKABLE_CUDAGRAPH=0"):
        memory(ids, positions)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert (memory(ids, positions) == TRIAL).all()
