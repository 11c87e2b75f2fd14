"""The routes under /v1."""

import time

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from app.server.errors import API, ApiError
from app.server.v1 import chat, completion, messages, responses
from app.server.v1.fields import names, require_model
from app.services.host import Host
from app.wording import model_id

ROUTES = (
    f"GET {API}/models",
    f"POST {API}/chat/completions",
    f"{API}/completions",
    f"{API}/responses",
    f"{API}/messages",
    f"{API}/messages/count_tokens",
)


def router(host: Host) -> APIRouter:
    """The routes over a host. Answers share the queue with those of the dashboard."""
    routes = APIRouter(prefix=API)
    began_s = int(time.time())

    @routes.get("/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": described(host, began_s)}

    @routes.get("/models/{name:path}")
    async def model(name: str) -> dict[str, object]:
        require_model(host, name)
        if not (found := described(host, began_s)):
            raise ApiError("No model is loaded.", "model", "model_not_found", 404)
        return found[0]

    @routes.post("/chat/completions")
    async def chat_completion(body: chat.ChatBody) -> Response:
        return await to_thread.run_sync(chat.reply, host, body)

    @routes.post("/completions")
    async def text_completion(body: completion.CompletionBody) -> Response:
        return await to_thread.run_sync(completion.reply, host, body)

    @routes.post("/responses")
    async def response(body: responses.ResponsesBody) -> Response:
        return await to_thread.run_sync(responses.reply, host, body)

    @routes.post("/messages")
    async def message(body: messages.MessagesBody) -> Response:
        return await to_thread.run_sync(messages.reply, host, body)

    @routes.post("/messages/count_tokens")
    async def count_tokens(body: messages.MessagesBody) -> dict[str, int]:
        return await to_thread.run_sync(messages.count, host, body)

    @routes.post("/embeddings")
    async def embeddings() -> Response:
        raise ApiError(
            "Embeddings are not served: the loaded model writes text. Ask a server with an embedding model for them.",
            code="unsupported_endpoint",
        )

    @routes.api_route("/{rest:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
    async def unknown(request: Request, rest: str) -> Response:
        raise ApiError(f"There is no {request.method} {API}/{rest[:80]}. There are {', '.join(ROUTES)}.", status=404)

    return routes


def described(host: Host, began_s: int) -> list[dict[str, object]]:
    """The loaded model, if there is one."""
    loaded = host.models.loaded
    if loaded is None:
        return []
    context = loaded.engine.context
    return [
        {
            "id": model_id(loaded.spec.model),
            "object": "model",
            "created": began_s,
            "owned_by": "local",
            "context_length": context,
            "max_model_len": context,
            "aliases": names(host)[1:],
        }
    ]
