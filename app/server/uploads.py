"""Uploaded files: kept private in the data folder, limited in total size, deleted at the next start."""

from __future__ import annotations

import os
from pathlib import Path

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from app.store.private import clear, private_folder

MOST_BYTES = 256 << 20  # of all uploads together
ROUTE = "/gradio_api/upload"
HASHED = "[0-9a-f]" * 64  # the folders that Gradio makes in it, named by the sha256 of their file
AGES_S = (3600, 24 * 3600)  # Gradio's check interval, and the age above which it deletes uploads


def prepare(folder: Path) -> Path:
    """Delete the uploads of earlier starts and set the folder for Gradio. Call before Gradio's page is built. Raises
    OSError."""
    clear(folder, HASHED)
    private_folder(folder)
    os.environ["GRADIO_TEMP_DIR"] = str(folder.resolve())
    return folder


def bytes_in(folder: Path) -> int:
    """Total size of all files in a folder, without following links."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())


class UploadLimit:
    """Refuses an upload without a declared size (411), or for which `folder` has no room (413)."""

    def __init__(self, app: ASGIApp, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.app, self._folder, self._most = app, folder, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != ROUTE:
            await self.app(scope, receive, send)
            return
        size = dict(scope["headers"]).get(b"content-length", b"")
        if not size.isdigit():
            await PlainTextResponse("An upload has to say how large it is.", 411)(scope, receive, send)
        elif bytes_in(self._folder) + int(size) > self._most:
            await PlainTextResponse(
                f"There is no room for this upload: all files together may have {self._most >> 20} "
                "MB until Moestro is started again. Give the path of the file instead.",
                413,
            )(scope, receive, send)
        else:
            await self.app(scope, receive, send)
