"""Events of the dashboard: what a browser sends to Gradio, with other values for every input."""

import json
import traceback
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import gradio as gr
import gradio.utils
from fastapi import FastAPI

from app.services.host import Host
from app.ui.serve import build
from tests.fuzz.changes import Change
from tests.fuzz.draw import byte_change, drawn, json_change
from tests.fuzz.mutant import Mutant
from tests.fuzz.oracle import ROOT
from tests.fuzz.request import Refused, Requests

BODY, SENT = "body.json", "sent.json"
KINDS = ("Application/JSON", "application/json; charset=utf-16", "application/x+json", "text/plain", "", "\xff/json")
ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-be", "utf-32-le")
OURS = (f"{ROOT}/app/", f"{ROOT}/core/")
FILE = {"path": "/etc/hostname", "url": None, "orig_name": "x.trace", "meta": {"_type": "gradio.FileData"}}


class Pages(Requests):
    """Every event may be asked for with anything at all, by whoever may talk to the server."""

    name = "page"
    samples = ("event",)

    def __init__(self) -> None:
        super().__init__()
        self._errors: list[BaseException] = []

    def app(self, host: Host) -> FastAPI:
        """Gradio answers 500 without a word whatever happened in an event; what it was is noted on the way."""
        said = gradio.utils.error_payload

        def noted(error: BaseException | None, show_error: bool) -> Any:
            self._errors += [error] if error is not None else []
            return said(error, show_error)

        gradio.utils.error_payload = noted
        return build(host)

    def make(self, sample: str, folder: Path) -> None:
        """What the page would send for each of its events."""
        config = self.client().get("/config").json()
        components = {c["id"]: c for c in config["components"]}
        bodies = [
            {
                "data": [components[i]["props"].get("value") for i in event["inputs"]],
                "event_data": None,
                "fn_index": event["id"],
                "trigger_id": None,
                "session_hash": "me",
            }
            for event in config["dependencies"]
            if event.get("backend_fn", True)
        ]
        (folder / "events.json").write_text(json.dumps(bodies))
        (folder / BODY).write_text(json.dumps(bodies[0]))
        (folder / SENT).write_text(json.dumps({"kind": "application/json", "encoding": "utf-8"}))

    def draw(self, rng: Random, sample: str, folder: Path) -> list[Change]:
        event = rng.choice(json.loads((folder / "events.json").read_text()))
        changes: list[Change] = [{"do": "text", "file": BODY, "text": json.dumps(event)}]

        def set_to(file: str, at: list[Any], values: Sequence[Any]) -> Change:
            return {"do": "set", "file": file, "at": at, "raw": json.dumps(rng.choice(values))}

        old = (folder / BODY).read_text()
        (folder / BODY).write_text(json.dumps(event))
        try:
            at = [["data", n] for n in range(len(event["data"]))]
            upload = (FILE, [FILE])
            changes += drawn(
                rng,
                (0.04, lambda: set_to(SENT, *rng.choice(((["kind"], KINDS), (["encoding"], ENCODINGS))))),
                (0.04, lambda: byte_change(rng, folder, BODY)),
                (0.12 * bool(at), lambda: set_to(BODY, rng.choice(at), upload)),
                (0.65 * bool(at), lambda: json_change(rng, folder, BODY, ["data"])),
                (0.15, lambda: json_change(rng, folder, BODY)),
            )
        finally:
            (folder / BODY).write_text(old)
        return changes

    def use(self, folder: Path, mutant: Mutant) -> dict[str, Any]:
        client, sent, body = self.client(), json.loads((folder / SENT).read_text()), (folder / BODY).read_bytes()
        self._errors.clear()
        if sent["encoding"] != "utf-8":
            body = body.decode("utf-8", "replace").encode(sent["encoding"])
        with client.stream(
            "POST", "/gradio_api/run/predict", content=body, headers={"content-type": sent["kind"].encode("latin-1")}
        ) as reply:
            told = reply.read()
        self._settle()
        assert client.get("/healthz").status_code == 200
        for error in self._errors:
            if any(
                frame.filename.startswith(OURS) and "/uploads.py" not in frame.filename
                for frame in traceback.extract_tb(error.__traceback__)
            ):
                raise Refused(error.message) if isinstance(error, gr.Error) else error
            raise Refused("Gradio does not take this value for this input.")
        if reply.status_code >= 400:
            return self.told(reply.status_code, told, reply.headers.get("content-type", ""))
        return {"status": reply.status_code}

    def _settle(self) -> None:
        """End what the event began, so that mutants do not depend on one another."""
        for answer in list(self.host.chats._answers.values()):
            self.host.chats.stop_answer(answer)
