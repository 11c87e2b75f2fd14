"""A hub on this machine: enough of its HTTP interface for huggingface_hub to list and fetch a model."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 50_000  # bytes from which a file is kept as large files are: known by its sha256


class FakeHub:
    """Serves one directory as `repo`. `cut` = break every connection after so many bytes of a large file; `down` =
    answer 503; `spoil` = what large files are filled with instead; `asked` = what was fetched: (file, first byte)."""

    def __init__(self, directory: Path, repo: str) -> None:
        self.directory, self.repo = directory, repo
        self.cut: int | None = None
        self.down = False
        self.spoil = b""
        self.asked: list[tuple[str, int]] = []
        handler = type("Bound", (Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def listing(self) -> list[dict[str, Any]]:
        found = []
        for file in sorted(p for p in self.directory.rglob("*") if p.is_file()):
            raw = file.read_bytes()
            entry: dict[str, Any] = {
                "rfilename": file.relative_to(self.directory).as_posix(),
                "size": len(raw),
                "blobId": hashlib.sha1(raw).hexdigest(),
            }
            if len(raw) >= LARGE:
                entry["lfs"] = {"sha256": hashlib.sha256(raw).hexdigest(), "size": len(raw), "pointerSize": 130}
            found.append(entry)
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Handler(BaseHTTPRequestHandler):
    hub: ClassVar[FakeHub]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(head=True)

    def do_GET(self) -> None:
        self.answer(head=False)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, head: bool) -> None:
        hub, path = self.hub, unquote(self.path.partition("?")[0])
        if hub.down:
            return self.send(503, b"", {})
        if path in (f"/api/models/{hub.repo}", f"/api/models/{hub.repo}/revision/main"):
            body = json.dumps({"id": hub.repo, "sha": COMMIT, "siblings": hub.listing()}).encode()
            return self.send(200, body, {"Content-Type": "application/json"})
        for revision in ("main", COMMIT):
            if path.startswith(prefix := f"/{hub.repo}/resolve/{revision}/"):
                return self.file(path.removeprefix(prefix), head)
        return self.send(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "none"})

    def file(self, name: str, head: bool) -> None:
        hub = self.hub
        raw = (hub.directory / name).read_bytes()
        sha = hashlib.sha256(raw).hexdigest() if len(raw) >= LARGE else hashlib.sha1(raw).hexdigest()
        headers = {
            "ETag": f'"{sha}"',
            "X-Linked-ETag": f'"{sha}"',
            "X-Linked-Size": str(len(raw)),
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if head:
            return self.send(200, b"", headers | {"Content-Length": str(len(raw))})
        first = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        hub.asked.append((name, first))
        if hub.spoil and len(raw) >= LARGE:
            raw = hub.spoil * (len(raw) // len(hub.spoil) + 1)
            raw = raw[: (hub.directory / name).stat().st_size]
        body = raw[first:]
        headers["Content-Length"] = str(len(body))
        if "Range" in self.headers:
            headers["Content-Range"] = f"bytes {first}-{len(raw) - 1}/{len(raw)}"
        if hub.cut is not None and len(raw) >= LARGE and len(body) > hub.cut:
            self.send(206 if "Range" in self.headers else 200, body[: hub.cut], headers)
            self.close_connection = True
            return None
        return self.send(206 if "Range" in self.headers else 200, body, headers)

    def send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
