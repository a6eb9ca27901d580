"""The fields of vLLM's requests, of which its middleware passes those that were examined."""

import pytest

from divdec.serving.logprobs import FIELDS, find_refused_field

# Of vLLM's imports in this process; the other tests start processes.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
IGNORED = {"store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "modalities"}


def bodies():
    from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.serve.tokenize.protocol import (
        DetokenizeRequest,
        TokenizeChatRequest,
        TokenizeCompletionRequest,
    )

    return {
        "/v1/completions": [CompletionRequest],
        "/v1/chat/completions": [ChatCompletionRequest],
        "/v1/responses": [ResponsesRequest],
        "/v1/messages": [AnthropicMessagesRequest],
        "/v1/messages/count_tokens": [AnthropicCountTokensRequest],
        "/tokenize": [TokenizeCompletionRequest, TokenizeChatRequest],
        "/detokenize": [DetokenizeRequest],
    }


@pytest.mark.parametrize("path", FIELDS)
def test_fields_are_those_of_vllm(path):
    """A name that vLLM does not have would pass unexamined in a version that has it."""
    names = {path: set().union(*(body.model_fields for body in own)) for path, own in bodies().items()}
    assert FIELDS[path] <= IGNORED.union(*names.values())
    for name in names[path] - FIELDS[path]:
        assert find_refused_field(path, {name: ["x"]}) == name
