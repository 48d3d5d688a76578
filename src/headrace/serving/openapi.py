"""The OpenAPI document: routes by FastAPI, bodies and answers by msgspec."""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from headrace.serving.responses import Error

_REF = "#/components/schemas/{name}"
_ERRORS = {
    400: "Something is wrong with the request; `param` names the field.",
    401: "No valid API key.",
    404: "There is no such model.",
    408: "The body or the answer took too long.",
    413: "The body is too large.",
    415: "The body is no JSON.",
    429: "Too many requests wait.",
    500: "An error of the server's.",
    503: "The server is starting or shutting down, or its engine has ended.",
}


def describe(
    answer: Any, *, body: Any = None, events: Any = None, errors: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Arguments of a FastAPI route: what it takes and gives. Types are msgspec's; answer may be
    None for no content, or the media type of a text."""
    content: dict[str, Any] = {}
    if isinstance(answer, str):
        content[answer] = {"schema": {"type": "string"}}
    elif answer is not None:
        content["application/json"] = {"schema": _schema(answer)}
    if events is not None:
        content["text/event-stream"] = {"itemSchema": _event(events)}
    described: dict[str, Any] = {"description": "Successful response", "content": content}
    extra: dict[str, Any] = {"responses": {"200": described}}
    error = {"application/json": {"schema": _schema(Error)}}
    for status in errors:
        extra["responses"][str(status)] = {"description": _ERRORS[status], "content": error}
    if body is not None:
        extra["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _schema(body)}},
        }
    return {"openapi_extra": extra}


def openapi(app: FastAPI, types: list[Any], has_keys: bool) -> dict[str, Any]:
    """The document, with the schemas of these types. has_keys: whether a key is needed."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    _, schemas = msgspec.json.schema_components([*types, Error], ref_template=_REF)
    for kind in types:
        # Fields that only have the values which ask for nothing.
        for name, allowed in getattr(kind, "UNSUPPORTED", {}).items():
            schemas[kind.__name__]["properties"][name] = {"enum": list(allowed), "default": None}
    for path in document["paths"].values():
        for operation in path.values():
            # FastAPI's own words for what it believes that a route gives, and that it checks.
            operation["responses"].pop("422", None)
            operation["responses"]["200"]["content"] = {
                kind: media
                for kind, media in operation["responses"]["200"]["content"].items()
                if media.get("schema") != {}
            }
    document.setdefault("components", {})["schemas"] = schemas
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _event(kind: Any) -> dict[str, Any]:
    """An event as OpenAPI 3.2 sees one: an object, the data of which is a text with JSON in it."""
    json = {"contentMediaType": "application/json", "contentSchema": _schema(kind)}
    data = {"anyOf": [{"const": "[DONE]"}, {"type": "string", **json}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _schema(kind: Any) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
    return schema
