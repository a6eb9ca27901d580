"""POST /tokenize and POST /detokenize, in vLLM's shapes."""

from __future__ import annotations

from starlette.requests import Request

from divdec.serving.api import body
from divdec.serving.api.generation import Server
from divdec.serving.api.record import record_of
from divdec.serving.api.responses import Text, Tokens
from divdec.serving.api.schemas import DetokenizeRequest, TokenizeRequest


async def tokenize(request: Request, server: Server) -> Tokens:
    """The tokens of a text, or of a conversation."""
    wanted = await body.read(request, TokenizeRequest, server.limits.max_body_bytes)
    served = server.find(wanted.model)
    record = record_of(request)
    record.model = served.engine.name
    vocabulary = served.vocabulary
    if wanted.messages is not None:
        ids = await vocabulary.of_turns(wanted.messages, open_end=wanted.add_generation_prompt)
    else:
        ids = await vocabulary.raw(wanted.prompt or "", special=wanted.add_special_tokens)
    record.prompt_tokens = len(ids)
    texts = [str(text) for text in vocabulary.tokenizer.convert_ids_to_tokens(ids)]
    return Tokens(
        count=len(ids),
        max_model_len=served.engine.max_model_len,
        tokens=ids,
        token_strs=texts if wanted.return_token_strs else None,
    )


async def detokenize(request: Request, server: Server) -> Text:
    """The text of tokens."""
    wanted = await body.read(request, DetokenizeRequest, server.limits.max_body_bytes)
    served = server.find(wanted.model)
    record_of(request).model = served.engine.name
    served.vocabulary.check(wanted.tokens, "tokens")
    text, _ = await served.vocabulary.written(wanted.tokens)
    return Text(prompt=text)
