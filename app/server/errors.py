"""Errors as HTTP responses: JSON in the OpenAI API's form, with messages for the user."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exception_handlers import http_exception_handler, request_validation_exception_handler
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.services.answer_times import QueueFullError
from app.services.crash import log_crash
from core.errors import (
    BusyError,
    ContextError,
    DeviceError,
    DeviceFullError,
    ModelError,
    MoestroError,
    PromptError,
)

log = logging.getLogger("moestro.app")
API = "/v1"
SHOWN_CHARS = 200  # of a field name that comes from the request
TOO_LONG = "context_length_exceeded"


class ApiError(MoestroError):
    """A request to the API that cannot be taken. `param`: the field, as its client knows it; `code` as in `form`."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def add_handlers(app: FastAPI) -> None:
    """Register the handlers below for errors in the routes of `app`."""
    app.add_exception_handler(MoestroError, moestro_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, refused)


def problem(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """An error in the API's form: 4xx are the client's fault, 5xx the server's."""
    return JSONResponse({"error": form(status, message, param, code)}, status, headers)


def form(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The object under "error"."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    plain = message.encode("utf-8", "replace").decode()  # lone surrogates cannot be sent
    return {"message": plain, "type": kind, "param": param, "code": code}


def moestro_error(request: Request, error: Exception) -> JSONResponse:
    """Response to a MoestroError, with its own message."""
    if isinstance(error, QueueFullError):
        return problem(429, str(error), code="queue_full", headers={"retry-after": str(error.retry_s)})
    if isinstance(error, ApiError):
        return problem(error.status, str(error), param=error.param, code=error.code)
    status = 409 if isinstance(error, (BusyError, ModelError)) and not isinstance(error, PromptError) else 400
    if isinstance(error, (DeviceError, DeviceFullError)):
        status = 503
    too_long = isinstance(error, ContextError)
    return problem(
        status,
        str(error),
        code=TOO_LONG if too_long else None,
        param="messages" if too_long and request.url.path.startswith(API) else None,
    )


async def invalid(request: Request, error: Exception) -> Response:
    """Response to a request that fails validation. Its values are not repeated: they may be long or private."""
    assert isinstance(error, RequestValidationError)
    if not request.url.path.startswith(API):
        plain = [{name: one[name] for name in ("type", "loc", "msg")} for one in error.errors()]
        return await request_validation_exception_handler(request, RequestValidationError(plain))
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return problem(400, "The body is not JSON.", code="invalid_json")
    where = ".".join(str(part) for part in first["loc"][1:])[:SHOWN_CHARS].encode("utf-8", "replace").decode()
    return problem(400, f"{where or 'The body'}: {first['msg']}.", param=where or None)


async def refused(request: Request, error: Exception) -> Response:
    """Response to an HTTPException, also one of FastAPI's own."""
    assert isinstance(error, HTTPException)
    if not request.url.path.startswith(API):
        return await http_exception_handler(request, error)
    return problem(error.status_code, str(error.detail), headers=dict(error.headers or {}))


class Unforeseen:
    """Middleware: logs an unexpected error without text of the request, and responds with 500."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = False

        async def moestro_error(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, moestro_error)
            return
        except ClientDisconnect:
            return
        except asyncio.CancelledError:  # only the end of the server cancels a request as a whole
            return
        except Exception as error:
            log_crash(log, error, "unexpected error in %s %s", scope["method"], scope["path"])
        if begun:  # part of the response has been sent: the server closes the connection
            raise RuntimeError("A response broke off. The reason is in the log.")
        await problem(
            500, "This failed because of an error inside Moestro. Its details are in the log; you can ask again."
        )(scope, receive, send)
