"""Random actions of one client: chats on the dashboard and through the API, changed settings, exports."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from urllib.parse import urlencode

from app.client.page import Failed, Http, Page
from bench.soak.score import Score
from bench.soak.values import value
from core.settings.config import params
from core.settings.param import declared
from core.settings.sampling import Sampling
from core.types import ModelShape

QUESTIONS = (
    "What does heapq.heappush do?",
    "What does sorted return?",
    "Where is os.path.join defined?",
    "What does json.dumps take?",
    "Which exception does int raise?",
    "What does pathlib.Path.glob do?",
)
LOOK_S = 0.25  # interval at which a page polls an answer
TURNS = 4  # of one chat, before the page begins another
REOPENED = 40  # actions after which a page is loaded anew
CHAT, STREAM, WHOLE, TURN, EXPORT = "dashboard chat", "/v1 streamed", "/v1 whole", "setting", "export"
OFTEN = {CHAT: 4, STREAM: 2, WHOLE: 2, TURN: 6, EXPORT: 1}
EXPORTS = (
    "/export/session.zip",
    "/export/whatif.csv",
    "/export/predictors.csv",
    "/export/quality.csv",
    "/export/session.trace",
)


class Client(threading.Thread):
    """One of several concurrent clients. It ends when `ended` is set; while `calm` is not set it starts no action, so
    that a model can be loaded and unloaded."""

    def __init__(
        self,
        url: str,
        dice: random.Random,
        shape: ModelShape,
        score: Score,
        calm: threading.Event,
        ended: threading.Event,
    ) -> None:
        super().__init__(name="soak-client", daemon=True)
        self._http, self._dice, self._shape, self._score = Http(url), dice, shape, score
        self._calm, self._ended = calm, ended
        self._page: Page | None = None
        self._left = self._turns = 0
        self._knobs = {f"set-{name.replace('.', '-')}": param for name, param in params().items() if name != "budget"}
        self._knobs["set-budget-text"] = params()["budget"]

    def run(self) -> None:
        """Acts until `ended` is set."""
        do: dict[str, Callable[[], None]] = {
            CHAT: self._chat,
            STREAM: self._stream,
            WHOLE: self._whole,
            TURN: self._turn,
            EXPORT: self._export,
        }
        while not self._ended.is_set():
            if not self._calm.wait(0.5):
                continue
            what = self._dice.choices(list(OFTEN), list(OFTEN.values()))[0]
            try:
                do[what]()
            except Failed as error:
                if not self._ended.is_set():
                    self._score.error(f"{what}: {error}")
            except Exception as error:
                self._score.error(f"{what}: unexpected in the bench: {type(error).__name__} {error}")
            self._ended.wait(self._dice.uniform(0.0, 1.0))

    # -- the dashboard -----------------------------------------------------------------------------------------------

    def _open(self) -> Page:
        if self._page is None or self._left <= 0:
            self._page, self._left, self._turns = Page(self._http, self._dice), REOPENED, 0
            self._score.did("page opened")
        self._left -= 1
        return self._page

    def _chat(self) -> None:
        """Asks, regenerates or edits; watches to the end, stops in the middle, or stops polling."""
        page = self._open()
        chat = (page.value("tail") or {}).get("chat")
        if chat is None or self._turns >= TURNS:
            page.fire("new-chat", "click")
            chat, self._turns = None, 0
        how = self._dice.choices(("asked", "regenerated", "edited"), (6, 2 if chat else 0, 1 if chat else 0))[0]
        question = self._dice.choice(QUESTIONS)
        if how == "asked":
            page.set("message", question)
            page.fire("message", "submit")
        elif how == "regenerated":
            page.fire("chat", "select", {"do": "regenerate"})
        else:
            page.fire("chat", "select", {"do": "edit", "id": page.value("chat")["messages"][0]["id"], "text": question})
        if page.value("chat-alert"):
            page.set("chat-alert", "")
            self._turns = TURNS  # for example a full context: the next one is another chat
            return self._score.refused(how)
        self._turns += 1
        self._score.did(how)
        self._watch(page)
        return None

    def _watch(self, page: Page) -> None:
        chat = page.value("tail")["chat"]
        fate = self._dice.choices(("watched to the end", "stopped", "left alone"), (3, 3, 1))[0]
        far = self._dice.randrange(1, 200)
        known, text, at = None, "", 0
        while not self._ended.is_set():
            asked = {"chat": chat, "since": len(text)} | ({} if known is None else {"answer": known})
            told = self._http.json(f"/live/state?{urlencode(asked)}")["answer"]
            if told is None:
                break
            known, at = told["id"], told["from"]
            text = text[:at] + told["text"]
            if fate == "left alone" and len(text) > far:
                break
            if fate == "stopped" and (len(text) > far or (told["state"] == "queued" and far < 40)):
                page.fire("stop", "click")
                far = 10**9
            self._ended.wait(LOOK_S)
        self._score.did(f"answer {fate}")
        page.fire("tail", "end")

    def _turn(self) -> None:
        """Changes one live setting or one sampling setting."""
        page = self._open()
        if self._dice.random() < 0.15:
            param = self._dice.choice([one for one in declared(Sampling).values() if one.name != "max_new_tokens"])
            element, alert = f"set-sampling-{param.name}", "sampling-alert"
        else:
            element = self._dice.choice(
                [name for name in self._knobs if page.has(name, "input") or page.has(name, "submit")]
            )
            param, alert = self._knobs[element], "cache-alert"
        if param.name == "telemetry":
            return page.turn(element, self._dice.random() < 0.9)  # without it little is measured
        page.turn(element, value(param, self._shape, self._dice))
        alerts = [alert] if alert != "cache-alert" else [alert, "substitution-alert"]
        refused = any(page.value(one) for one in alerts)
        for one in alerts:
            page.set(one, "")
        (self._score.refused if refused else self._score.did)(TURN)
        return None

    # -- the API -----------------------------------------------------------------------------------------------------

    def _request(self, stream: bool) -> dict[str, object]:
        said = [{"role": "user", "content": self._dice.choice(QUESTIONS)}]
        return {
            "messages": said,
            "stream": stream,
            "max_tokens": self._dice.randint(1, 60),
            "temperature": round(self._dice.uniform(0, 1.5), 2),
            "seed": self._dice.randrange(1000),
        }

    def _whole(self) -> None:
        """An answer in one piece, or a client that disconnects before it."""
        if self._dice.random() < 0.25:
            connection = self._http.send("/v1/chat/completions", self._request(False))
            self._ended.wait(self._dice.uniform(0.0, 2.0))
            connection.close()
            return self._score.did("/v1 hung up")
        status, _ = self._http.ask("/v1/chat/completions", self._request(False))
        (self._score.did if status == 200 else self._score.refused)(WHOLE)
        return None

    def _stream(self) -> None:
        """Events to the end, or a client that disconnects in the middle."""
        pieces = self._dice.randint(1, 30) if self._dice.random() < 0.4 else 10**9
        connection = self._http.send("/v1/chat/completions", self._request(True))
        try:
            reply = connection.getresponse()
            if reply.status >= 500:
                raise Failed(f"/v1/chat/completions: {reply.status}")
            if reply.status != 200:
                return self._score.refused(STREAM)
            seen = 0
            while (line := reply.readline()) and seen < pieces:
                seen += line.startswith(b"data:")
                if b'"error"' in line:
                    self._score.error(f"{STREAM}: {line[:300].decode(errors='replace')}")
            return self._score.did("/v1 hung up" if line else STREAM)
        except OSError as error:
            raise Failed(f"{type(error).__name__} {error}") from error
        finally:
            connection.close()

    def _export(self) -> None:
        """Downloads a session, a chat or a table; there may be nothing yet."""
        path = self._dice.choice(EXPORTS)
        shown = (self._page.value("tail") or {}).get("chat") if self._page else None
        if shown is not None and self._dice.random() < 0.6:
            path = f"/export/{shown}.{self._dice.choice(('zip', 'trace'))}"
        status, _ = self._http.ask(path)
        (self._score.did if status == 200 else self._score.refused)(EXPORT)
