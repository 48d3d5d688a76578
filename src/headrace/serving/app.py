"""The routes of the server, and how errors become answers."""

from collections.abc import Mapping
from functools import cache

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

import headrace
from headrace.errors import HeadraceError
from headrace.serving.access import KeyCheck
from headrace.serving.answers import ClientGone, LastResponse, unless_gone
from headrace.serving.api_errors import INTERNAL, ApiError, as_api_error
from headrace.serving.body import Bodies
from headrace.serving.chat_completions import answer_chat
from headrace.serving.completions import complete
from headrace.serving.openapi import describe, openapi
from headrace.serving.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from headrace.serving.responses import (
    Chat,
    ChatChunk,
    Completion,
    Detokenized,
    Health,
    Model,
    ModelList,
    Tokenized,
    Version,
)
from headrace.serving.service import Service
from headrace.serving.tokens import detokenize, tokenize

_BODY_ERRORS = (400, 401, 404, 408, 413, 415, 503)
_GENERATION_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503)
_TYPES = [
    CompletionBody, Completion, ChatBody, Chat, ChatChunk, TokenizeBody, Tokenized, DetokenizeBody,
    Detokenized, Health, Model, ModelList, Version,
]  # fmt: skip


def make_app(service: Service) -> FastAPI:
    """The application that answers for this service."""
    app = FastAPI(
        title="Headrace",
        version=headrace.__version__,
        description="OpenAI's API for text, with vLLM's extras.",
        redirect_slashes=False,
    )
    _add_routes(app, service)
    _add_error_answers(app, service)
    settings = service.settings
    if settings.api_keys:
        app.add_middleware(
            KeyCheck,
            keys=settings.api_keys,
            shared_cache=settings.shared_prefix_cache,
            on_refusal=service.metrics.refused,
        )
    # Outermost, so that browsers may read errors too.
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
    )
    # Made once: it takes tens of milliseconds.
    app.openapi = cache(lambda: openapi(app, _TYPES, has_keys=bool(settings.api_keys)))  # type: ignore[method-assign]
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    settings = service.settings
    bodies = Bodies(settings)

    @app.get("/health", **describe(Health, errors=(503,)))
    async def health() -> Response:
        """200 once requests are taken, and no longer when the server drains. Also while stages are
        started anew: what comes then is answered when they are there."""
        cause = service.ready().recovery.cause
        return _json(Health("ok") if cause is None else Health("recovering", cause))

    @app.get("/version", **describe(Version))
    async def version() -> Response:
        """Headrace's version."""
        return _json(Version(headrace.__version__))

    @app.get("/metrics", **describe("text/plain"))
    async def metrics() -> Response:
        """What Prometheus scrapes."""
        data, media_type = service.metrics.render()
        return Response(data, media_type=media_type)

    @app.get("/v1/models", **describe(ModelList, errors=(401, 503)))
    async def models() -> Response:
        """The names that requests may call the model."""
        names = settings.served_model_names
        return _json(ModelList("list", [_model(service, name) for name in names]))

    @app.get("/v1/models/{name:path}", **describe(Model, errors=(401, 404, 503)))
    async def model(name: str) -> Response:
        """One of them."""
        if not name:
            raise HTTPException(404, "Not Found")
        service.check_model(name)
        return _json(_model(service, name))

    @app.post(
        "/v1/completions",
        **describe(Completion, body=CompletionBody, events=Completion, errors=_GENERATION_ERRORS),
    )
    async def completions(request: Request) -> Response:
        """Continue prompts."""
        async with bodies.of(request, CompletionBody) as body:
            return await unless_gone(request.receive, complete(service, body))

    @app.post(
        "/v1/chat/completions",
        **describe(Chat, body=ChatBody, events=ChatChunk, errors=_GENERATION_ERRORS),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        async with bodies.of(request, ChatBody) as body:
            return await unless_gone(request.receive, answer_chat(service, body))

    @app.post("/tokenize", **describe(Tokenized, body=TokenizeBody, errors=_BODY_ERRORS))
    async def tokens_of(request: Request) -> Response:
        """The tokens of a text or of a conversation."""
        async with bodies.of(request, TokenizeBody) as body:
            return _json(await unless_gone(request.receive, tokenize(service, body)))

    @app.post("/detokenize", **describe(Detokenized, body=DetokenizeBody, errors=_BODY_ERRORS))
    async def text_of(request: Request) -> Response:
        """The text of tokens."""
        async with bodies.of(request, DetokenizeBody) as body:
            return _json(await unless_gone(request.receive, detokenize(service, body)))


def _add_error_answers(app: FastAPI, service: Service) -> None:
    def answer(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
        service.metrics.refused(error.status)
        kind = LastResponse if error.unread else Response
        headers = {**(headers or {}), **error.headers()}
        return kind(error.as_json(), error.status, headers, "application/json")

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return answer(error)

    @app.exception_handler(HeadraceError)
    async def headrace_error(request: Request, error: HeadraceError) -> Response:
        return answer(as_api_error(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {request.method} {request.url.path[:100]}"
        if error.status_code == 404:
            message += " (OpenAI's paths are below /v1: clients want http://HOST:PORT/v1)"
        # Its body, if there is one, was not read.
        unread = request.headers.get("content-length", "0") != "0"
        unread |= "transfer-encoding" in request.headers
        return answer(ApiError(error.status_code, message, unread=unread), error.headers)

    @app.exception_handler(ClientGone)
    async def client_gone(request: Request, error: ClientGone) -> Response:
        # Nobody reads it; nginx's status for that.
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        return answer(INTERNAL)


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _model(service: Service, name: str) -> Model:
    card = service.ready().card
    return Model(
        name,
        "model",
        service.started_at,
        "headrace",
        card.max_model_len,
        card.architecture,
        card.dtype,
        len(card.stages),
    )
