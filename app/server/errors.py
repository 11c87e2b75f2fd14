"""Errors as HTTP responses: JSON in the form of the API that was called, with messages for the user."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exception_handlers import http_exception_handler, request_validation_exception_handler
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.services.answer_queue import QueueFullError
from app.services.crash import log_crash
from core.errors import (
    BusyError,
    ClosingError,
    ContextError,
    DeviceError,
    DeviceFullError,
    ModelError,
    MoestroError,
    PromptError,
)

log = logging.getLogger("moestro.app")
API = "/v1"
MESSAGES = f"{API}/messages"  # this and what is below it is Anthropic's
GRADIO = "/gradio_api/"
SHOWN_CHARS = 200  # of a field name that comes from the request
TOO_LONG = "context_length_exceeded"
NO_OBJECT = {"dict_type", "model_type", "model_attributes_type"}  # pydantic's errors of this kind
ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors, but for `invalid_request_error` and `api_error`: https://docs.anthropic.com/en/api/errors."""


class ApiError(MoestroError):
    """An error as the APIs have it. `param`: the field, as its client knows it; `code`: what programs look for;
    `retry_s`: seconds after which the same request may succeed."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message.encode("utf-8", "replace").decode())  # lone surrogates cannot be sent
        self.param, self.code, self.status, self.retry_s = param, code, status, retry_s

    def openai(self) -> dict[str, Any]:
        """The object under "error": 4xx are the client's fault, 5xx the server's."""
        return self._fields("invalid_request_error" if self.status < 500 else "server_error")

    def anthropic(self) -> dict[str, Any]:
        """The whole object."""
        other = "invalid_request_error" if self.status < 500 else "api_error"
        return {"type": "error", "error": self._fields(ANTHROPIC.get(self.status, other))}

    def _fields(self, kind: str) -> dict[str, Any]:
        return {"type": kind, "message": str(self), "param": self.param, "code": self.code}


def refusal(
    scope: Scope, error: ApiError, headers: Mapping[str, str] | None = None, *, plain: bool = False
) -> Response:
    """The response to a request that failed, in its API's form; Gradio's page shows a plain text. `plain`: a text, not
    JSON, outside of the API."""
    path, more = scope["path"], {} if error.retry_s is None else {"retry-after": str(error.retry_s)}
    if plain and not of_api(scope):
        return PlainTextResponse(str(error), error.status, headers)
    if path.startswith(GRADIO):
        body: dict[str, Any] = {"error": str(error)}
    elif path == MESSAGES or path.startswith(f"{MESSAGES}/"):
        body = error.anthropic()
    else:
        body = {"error": error.openai()}
    return JSONResponse(body, error.status, {**more, **(headers or {})})


def of_api(scope: Scope) -> bool:
    """Whether the request is to the API."""
    return bool(scope["type"] == "http" and scope["path"].startswith(API))


def add_handlers(app: FastAPI) -> None:
    """Register the handlers below for errors in the routes of `app`."""
    app.add_exception_handler(MoestroError, moestro_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, refused)


def moestro_error(request: Request, error: Exception) -> Response:
    """Response to a MoestroError, with its own message."""
    return refusal(request.scope, _described(error, request.url.path))


def _described(error: Exception, path: str) -> ApiError:
    if isinstance(error, ApiError):
        return error
    text = str(error)
    if isinstance(error, QueueFullError):
        return ApiError(text, code="queue_full", status=429, retry_s=error.retry_s)
    if isinstance(error, ContextError):
        return ApiError(text, "messages" if path.startswith(API) else None, TOO_LONG)
    if isinstance(error, ClosingError | DeviceError | DeviceFullError):
        return ApiError(text, status=503)
    busy = isinstance(error, BusyError | ModelError) and not isinstance(error, PromptError)
    return ApiError(text, status=409 if busy else 400)


async def invalid(request: Request, error: Exception) -> Response:
    """Response to a request that fails validation. Its values are not repeated: they may be long or private."""
    assert isinstance(error, RequestValidationError)
    if not request.url.path.startswith(API):
        plain = [{name: one[name] for name in ("type", "loc", "msg")} for one in error.errors()]
        return await request_validation_exception_handler(request, RequestValidationError(plain))
    return refusal(request.scope, _invalid(error))


def _invalid(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason, at = first["ctx"]["error"], first["loc"][-1]
        return ApiError(f"The body is not JSON: {reason} at character {at}.", code="invalid_json")
    if isinstance(error.body, bytes):  # FastAPI left it unread
        return ApiError("The body is read as JSON only with the header Content-Type: application/json.", status=415)
    return field_error(first, first["loc"][1:])


def field_error(wrong: Mapping[str, Any], where: Sequence[str | int]) -> ApiError:
    """One of pydantic's errors about the field at `where`: which it is, and what is wrong with it."""
    field = ".".join(map(str, where))[:SHOWN_CHARS].encode("utf-8", "replace").decode()
    what = "Give an object" if wrong["type"] in NO_OBJECT else wrong["msg"]
    return ApiError(f"{field or 'The body'}: {what}.", field or None)


async def refused(request: Request, error: Exception) -> Response:
    """Response to an HTTPException, also one of FastAPI's own."""
    assert isinstance(error, HTTPException)
    if not request.url.path.startswith(API):
        return await http_exception_handler(request, error)
    return refusal(request.scope, ApiError(str(error.detail), status=error.status_code), error.headers)


class Unforeseen:
    """Middleware: logs an unexpected error without text of the request, and responds with 500."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, noting)
            return
        except ClientDisconnect:
            return
        except asyncio.CancelledError:  # only the end of the server cancels a request as a whole
            return
        except Exception as error:
            log_crash(log, error, "unexpected error in %s %s", scope["method"], scope["path"])
        if begun:  # part of the response has been sent: the server closes the connection
            raise RuntimeError("A response broke off. The reason is in the log.")
        failure = ApiError(
            "This failed because of an error inside Moestro. Its details are in the log; you can ask again.", status=500
        )
        await refusal(scope, failure)(scope, receive, send)
