"""Uploaded files: kept private in the data folder, limited in total size, deleted at the next start."""

import logging
import os
from contextlib import suppress
from pathlib import Path
from tempfile import gettempprefix

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.server.bodies import UPLOAD, InFlight
from app.store.private import clear, private_folder

log = logging.getLogger("moestro.app")
UNREADABLE = (ValueError, TypeError, AttributeError)  # what Gradio's parser fails with, before it responds
MOST_BYTES = 256 << 20  # of all uploads together
HASHED = "[0-9a-f]" * 64  # the folders that Gradio makes in it, named by the sha256 of their file
TEMPORARY = f"{gettempprefix()}????????"  # its names for uploads that have not arrived whole
AGES_S = (3600, 24 * 3600)  # Gradio's check interval, and the age above which it deletes uploads


def prepare(folder: Path) -> Path:
    """Delete the uploads of earlier starts and set the folder for Gradio. Call before Gradio's page is built. Raises
    OSError."""
    clear(folder, HASHED, TEMPORARY)
    private_folder(folder)
    os.environ["GRADIO_TEMP_DIR"] = str(folder.resolve())
    return folder


def bytes_in(folder: Path) -> int:
    """Total size of all files in a folder, without following links."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):  # Gradio has moved or deleted it in this moment
            total += 0 if file.is_dir() else file.lstat().st_size
    return total


class UploadLimit:
    """Refuses an upload for which `folder` has no room (413). The room is reserved before the upload is read: what is
    on the disk and what uploads under way are still to bring stay below the limit together. Expects `Bodies` in front,
    which takes no upload that does not declare its size."""

    def __init__(self, app: ASGIApp, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.app, self._folder, self._expected = app, folder, InFlight(most_bytes)
        self._running = 0
        self._before = {file.name for file in folder.glob("*")}  # the user's, if the folder is

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != UPLOAD:
            await self.app(scope, receive, send)
            return
        size = int(dict(scope["headers"]).get(b"content-length", b"0"))
        with self._expected.share() as share:
            if not share.take(size, bytes_in(self._folder)):
                await PlainTextResponse(
                    f"There is no room for this upload: all files together may have {self._expected.most >> 20} "
                    "MB until Moestro is started again. Start it again, or use its command line, which takes paths.",
                    413,
                )(scope, receive, send)
                return
            arrived = 0

            async def written() -> Message:
                nonlocal arrived
                share.give(arrived)  # a caller that wants more has written what came before
                message = await receive()
                arrived = len(message.get("body", b""))
                return message

            self._running += 1
            try:
                await self.app(scope, written, send)
            except UNREADABLE as error:
                log.warning("an upload could not be read: %s", type(error).__name__)
                await PlainTextResponse("This is no form with files, each with its name.", 400)(scope, receive, send)
            finally:
                self._running -= 1
                if not self._running:
                    self._clear()

    def _clear(self) -> None:
        """Delete what uploads that broke off have left: temporary files. Whole uploads lie in folders of their own."""
        for file in self._folder.glob(TEMPORARY):
            if file.name not in self._before and not file.is_dir():
                with suppress(OSError):  # still open, on Windows: the next one deletes it
                    file.unlink()
