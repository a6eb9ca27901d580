"""The FastAPI application: its routes, and their description as OpenAPI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import Response

from divdec import __version__
from divdec.serving.api.completions import ChatCompletion, TextCompletion
from divdec.serving.api.errors import server_closing
from divdec.serving.api.generation import Limits, ServedModel, Server
from divdec.serving.api.middleware import AccessLog, Metrics, RequestMiddleware
from divdec.serving.api.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ErrorBody,
    TokenizeRequest,
)
from divdec.serving.engine.engine import Engine

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be used, or the queue is full (429)."},
    "5XX": {"model": ErrorBody, "description": "Not steered (500), shutting down (503), or too slow (504)."},
}
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def create_app(
    engines: Mapping[str, Engine],
    *,
    api_key: str | None = None,
    limits: Limits = Limits(),  # noqa: B008
    log: AccessLog | None = None,
    closing: Callable[[], bool] = lambda: False,
) -> FastAPI:
    """Create the application for started engines.

    Args:
        engines: engines by model name.
        api_key: key that clients must send; None admits everyone.
        limits: limits of one request.
        log: access log; standard error by default.
        closing: whether the server shuts down and refuses requests.
    """
    server = Server({name: ServedModel(engine) for name, engine in engines.items()}, limits, Metrics(engines))
    app = FastAPI(
        title="divdec", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False, responses=ERRORS
    )
    app.add_middleware(
        RequestMiddleware,
        metrics=server.metrics,
        log=log or AccessLog(),
        api_key=api_key,
        max_body_bytes=limits.max_body_bytes,
        closing=closing,
    )
    for kind in (HTTPException, RequestValidationError):  # the middleware answers all other exceptions
        app.add_exception_handler(kind, _handle_error)

    @app.post("/v1/completions", responses=STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        call = TextCompletion(body, server, server.find_model(body.model), request.state.record)
        await call.prepare()
        return await call.respond(request)

    @app.post("/v1/chat/completions", responses=STREAMED)
    async def chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation."""
        call = ChatCompletion(body, server, server.find_model(body.model), request.state.record)
        await call.prepare()
        return await call.respond(request)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
        """Tokenize a text or a conversation, in vLLM's format."""
        model = server.find_model(body.model)
        request.state.record.model = model.engine.name
        if body.messages is not None:
            ids = await model.encode_chat(body.messages, generation_prompt=body.add_generation_prompt)
        else:
            ids = await model.encode_text(body.prompt or "", body.add_special_tokens)
        request.state.record.prompt_tokens = len(ids)
        names = list(map(str, model.tokenizer.convert_ids_to_tokens(ids))) if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": model.engine.max_model_len, "tokens": ids, "token_strs": names}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
        """Return the text of tokens, in vLLM's format."""
        model = server.find_model(body.model)
        request.state.record.model = model.engine.name
        model.check_ids(body.tokens, "tokens")
        return {"prompt": (await model.decode(body.tokens))[0]}

    def card(name: str) -> dict[str, Any]:
        engine = server.find_model(name).engine
        return {
            "id": name, "object": "model", "created": engine.created, "owned_by": "divdec",
            "max_model_len": engine.max_model_len,
        }  # fmt: skip

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the served models."""
        return {"object": "list", "data": [card(name) for name in server.models]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """Describe a served model."""
        return card(model)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Say whether requests are accepted."""
        if closing() or not all(model.engine.is_open for model in server.models.values()):
            raise server_closing()
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Metrics in the format of Prometheus."""
        page = await asyncio.to_thread(generate_latest, server.metrics.registry)  # may read the registry's folder
        return Response(page, headers={"Content-Type": METRICS_TYPE})

    return app


async def _handle_error(request: Request, error: Exception) -> Response:
    return request.state.record.set_error(error).response()
