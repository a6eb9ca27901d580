"""The application: which path leads where, and its description as OpenAPI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from divdec import __version__
from divdec.serving.api import chat, completions, tokens
from divdec.serving.api.errors import ApiError, closed
from divdec.serving.api.generation import Limits, Served, Server
from divdec.serving.api.metrics import CONTENT_TYPE, Metrics
from divdec.serving.api.middleware import Surroundings
from divdec.serving.api.record import Log, record_of
from divdec.serving.api.responses import (
    ChatCompletion,
    Completion,
    ErrorBody,
    Health,
    ModelCard,
    ModelList,
    Text,
    Tokens,
)
from divdec.serving.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from divdec.serving.engine.engine import Engine

BODIES = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "Something in the request cannot be used.",
        401: "The API key is missing or wrong.",
        404: "There is no such model or path.",
        408: "The body did not arrive in time.",
        413: "The body is too large.",
        415: "The body is not JSON.",
        429: "The queue is full.",
        500: "The model could not be steered.",
        503: "The server is shutting down.",
        504: "The answer took too long.",
    }.items()
}
_OF_BODIES = (400, 401, 404, 408, 413, 415, 503)
_OF_ANSWERS = (*_OF_BODIES, 429, 500, 504)
_OF_MODELS = (401, 404, 503)


def create_app(
    engines: Mapping[str, Engine],
    *,
    api_key: str | None = None,
    limits: Limits = Limits(),  # noqa: B008
    log: Log | None = None,
    closing: Callable[[], bool] = lambda: False,
) -> FastAPI:
    """Serve engines that have been started.

    Args:
        engines: by the name that clients give.
        api_key: what clients must send; None lets everybody in.
        limits: what one request may take.
        log: where requests are written down; standard error by default.
        closing: whether requests are refused because the server shuts down.

    Returns:
        The application, for any ASGI server.
    """
    server = Server({name: Served(engine) for name, engine in engines.items()}, limits, Metrics(engines))
    app = FastAPI(title="divdec", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False
    app.add_middleware(
        Surroundings,
        metrics=server.metrics,
        log=log or Log(),
        api_key=api_key,
        closing=closing,
    )
    app.add_exception_handler(HTTPException, _refused)
    _add_answers(app, server)
    _add_descriptions(app, server, closing)
    return app


def _add_answers(app: FastAPI, server: Server) -> None:
    @app.post("/v1/completions", response_model=Completion, **_described(CompletionRequest, _OF_ANSWERS, stream=True))
    async def complete(request: Request) -> Response:
        """Continue prompts."""
        return await completions.complete(request, server)

    @app.post(
        "/v1/chat/completions", response_model=ChatCompletion, **_described(ChatRequest, _OF_ANSWERS, stream=True)
    )
    async def converse(request: Request) -> Response:
        """Answer a conversation."""
        return await chat.converse(request, server)

    @app.post("/tokenize", **_described(TokenizeRequest, _OF_BODIES))
    async def tokenize(request: Request) -> Tokens:
        """The tokens of a text or conversation."""
        return await tokens.tokenize(request, server)

    @app.post("/detokenize", **_described(DetokenizeRequest, _OF_BODIES))
    async def detokenize(request: Request) -> Text:
        """The text of tokens."""
        return await tokens.detokenize(request, server)


def _add_descriptions(app: FastAPI, server: Server, closing: Callable[[], bool]) -> None:
    def card(name: str) -> ModelCard:
        engine = server.find(name).engine
        return ModelCard(id=name, created=engine.created, max_model_len=engine.max_model_len)

    @app.get("/v1/models", responses=_errors(_OF_MODELS))
    async def models() -> ModelList:
        """The models that are served."""
        return ModelList(data=[card(name) for name in server.models])

    @app.get("/v1/models/{model:path}", responses=_errors(_OF_MODELS))
    async def model(model: str) -> ModelCard:
        """One of them."""
        return card(model)

    @app.get("/health", responses=_errors((503,)))
    async def health() -> Health:
        """Whether requests are accepted."""
        if closing() or not all(server.find(name).engine.is_open for name in server.models):
            raise closed()
        return Health()

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Figures for Prometheus."""
        page = await asyncio.to_thread(server.metrics.page)  # it may read a registry's folder
        return Response(page, headers={"Content-Type": CONTENT_TYPE})

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> dict[str, Any]:
        """This description."""
        return app.openapi()

    app.openapi = lambda: _openapi(app)  # pyright: ignore[reportAttributeAccessIssue]


async def _refused(request: Request, error: Exception) -> Response:
    # Only the router raises these; all else rises to the middleware.
    assert isinstance(error, HTTPException)
    text = {404: "there is no such path here", 405: "this path does not take this method"}
    told = ApiError(error.status_code, text.get(error.status_code, str(error.detail)), headers=error.headers)
    record_of(request).failed(told, error)
    return told.response()


def _described(kind: type[BaseModel], errors: tuple[int, ...], *, stream: bool = False) -> dict[str, Any]:
    # The body is read by our own hand, so that its size is bounded and JSON is strict.
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    responses = _errors(errors)
    if stream:
        responses[200] = {"content": {"text/event-stream": {}}}
    return {"openapi_extra": {"requestBody": body}, "responses": responses}


def _errors(statuses: tuple[int, ...]) -> dict[int | str, dict[str, Any]]:
    return {status: _ERRORS[status] for status in statuses}


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        described = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, schemas = models_json_schema(
            [(kind, "validation") for kind in BODIES.values()], ref_template="#/components/schemas/{model}"
        )
        described["components"]["schemas"] |= schemas["$defs"]
        for path in described["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # FastAPI's own refusals, which never happen here
        app.openapi_schema = described
    return app.openapi_schema
