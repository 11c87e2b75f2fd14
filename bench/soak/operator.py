"""A thread that loads, unloads, imports and deletes models from time to time; one of them has a hostile template."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from app.client.page import Failed, Http, Page
from app.client.process import ROOT
from bench.soak.attacker import ATTACK, batch, hostile_model
from bench.soak.score import Score

FORMATS = ("int8", "int8-g32", "int4-g32", "int4-g32-sym", "mxfp4", "iq4_nl")  # they divide the rows of the demo model
LOADED_AS = ("checkpoint", "checkpoint", "int8", "int4-g32")
DEMO = ROOT / "assets" / "demo"
LONGEST_S = 300.0  # for a load, an import, or for answers to end; longer is a hang
LOOK_S = 0.2
SETTLED_S = 2.0  # after which what an unload ends, such as child processes, has ended


class Operator(threading.Thread):
    """Acts every `pause_s` seconds on average. Before loading it clears `calm` so that clients start no action."""

    def __init__(
        self,
        url: str,
        home: Path,
        dice: random.Random,
        score: Score,
        calm: threading.Event,
        ended: threading.Event,
        pause_s: float,
        unloaded: Callable[[], None],
    ) -> None:
        """`unloaded` is called whenever no model is loaded and nothing runs, to sample that state."""
        super().__init__(name="soak-operator", daemon=True)
        self._http, self._home, self._dice, self._score = Http(url), home, dice, score
        self._calm, self._ended, self._pause_s, self._unloaded = calm, ended, pause_s, unloaded
        self._page = Page(self._http, dice)

    def run(self) -> None:
        """Repeats: load the demo model, delete the import, import, load the import, answer a batch, load a model with a
        hostile template."""
        steps: list[Callable[[], object]] = [
            self._load_demo,
            self._delete,
            self._import,
            self._load_pack,
            self._batch,
            self._attack_template,
        ]
        at = 0
        while not self._ended.wait(self._dice.uniform(0.5, 1.5) * self._pause_s):
            try:
                steps[at % len(steps)]()
            except Failed as error:
                if not self._ended.is_set():
                    self._score.error(f"{steps[at % len(steps)].__name__[1:]}: {error}")
            except Exception as error:
                self._score.error(f"operator: unexpected in the bench: {type(error).__name__} {error}")
            finally:
                self._calm.set()
            at += 1

    @property
    def _packs(self) -> list[Path]:
        return sorted(one.parent for one in self._home.glob("packs/*/moestro.json"))

    def _import(self) -> None:
        page = self._page
        page.set("import-source", "demo")
        page.set("import-format", self._dice.choice(FORMATS))
        page.fire("import-start", "click")
        if page.value("import-alert"):
            raise Failed(f"the import was refused: {page.value('import-alert')}")
        if self._dice.random() < 0.3:
            self._ended.wait(self._dice.uniform(0, 2))
            page.fire("import-cancel", "click")
            self._until(lambda: self._http.json("/healthz")["importing"] is None, "a cancelled import to end")
            self._score.did("import cancelled")
            page.fire("import-resume", "click")
        self._until(lambda: self._http.json("/healthz")["importing"] is None, "an import")
        told = self._http.json("/live/state")["import"]
        if told["state"] == "error":
            raise Failed(f"the import failed: {told['text']}")
        self._score.did(f"import {told['state']}")

    def _load_pack(self) -> None:
        if self._packs:
            self._load(str(self._packs[0]), "checkpoint")

    def _load_demo(self) -> None:
        self._load("demo", self._dice.choice(LOADED_AS))

    def _batch(self) -> None:
        """A batch with the model to itself: the attacker's own are refused as long as clients are answered."""
        self._quiet()
        status = batch(self._http, self._dice, lambda: self._ended.wait(self._dice.uniform(0.5, 4)))
        self._score.did("batch") if status == 200 else self._score.refused("batch of the operator")
        self._until(lambda: not self._http.json("/healthz")["busy"], "a batch")

    def _attack_template(self) -> None:
        """Loads a model whose template never ends in one chat: that chat is refused, the next one is answered."""
        folder = hostile_model(DEMO, self._home, self._dice)
        try:
            if not self._load(str(folder), "checkpoint"):
                return self._load_demo()  # at once: with no model, clients could choose what only some models have
            for text, wanted in ((ATTACK, (400,)), ("What does sorted return?", (200, 409, 429))):  # a batch may run
                chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
                status, said = self._http.ask("/v1/chat/completions", chat)
                if status not in wanted:
                    raise Failed(f"a hostile template: {text!r} was answered {status} {said[:200]!r}")
            self._score.did("template stopped")
            return self._load_demo()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _quiet(self) -> None:
        """Clients start nothing from here to the end of the step, and what they had started has ended."""
        self._calm.clear()
        self._until(lambda: not self._http.json("/healthz")["busy"], "answers to end")

    def _load(self, model: str, format: str) -> bool:
        """Whether it was loaded."""
        self._quiet()
        page = self._page
        page.fire("unload", "click")
        if page.value("model-alert"):
            self._score.refused("unload")
        elif not self._ended.wait(SETTLED_S):
            self._unloaded()
            self._score.did("unload")
        page.set("model", model)
        page.set("set-format", format)
        page.fire("load", "click")
        if page.value("model-alert"):
            self._score.refused("load")
            return False
        self._until(lambda: self._http.json("/healthz")["loading"] is None, "a load")
        loaded = self._http.json("/healthz")["model"]
        if str(loaded).partition("@")[0] != Path(model).name:
            self._page = Page(self._http, self._dice)
            self._score.error(f"load: {model} as {format} was not loaded, {loaded} is")
            return False
        self._score.did("load")
        return True

    def _delete(self) -> None:
        page = self._page
        for pack in self._packs:
            page.fire("library-refresh", "click")
            page.fire("models", "select", {"entry": str(pack)})
            page.fire("delete-model", "click")
            page.fire("delete-model-yes", "click")
            (self._score.refused if pack.exists() else self._score.did)("pack deleted")

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        waited = 0.0
        while not is_so():
            if self._ended.wait(LOOK_S):
                raise Failed("the bench has ended")
            waited += LOOK_S
            if waited > LONGEST_S:
                raise Failed(f"waited {LONGEST_S:.0f} s for {what}")
