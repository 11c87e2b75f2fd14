"""Plans the cache again while no answer is written, from the session's own tokens and what was predicted for them,
and uses a plan that is better."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from app.services.model_manager import ModelManager
from app.services.plan_basis import RoutedTokens
from app.services.planner import Planner, Proposal
from app.services.remembered import Remembered
from app.wording import count
from core.errors import BusyError, MoestroError

log = logging.getLogger("moestro.app")
AGAIN = 5000  # further decoded tokens after which it plans: MoEpic's number (section 4.1)
MARGIN = 0.05  # of the predicted waiting that a plan must save to be used
KEY = "plan_when_idle"


@dataclass(frozen=True, slots=True)
class Renewal:
    """What was done last with a load, in the user's words, and when: seconds since the epoch."""

    load: int | None
    text: str
    at_s: float


class Replanner:
    """The thread starts with the first plan that is due and sleeps in between: it is woken by the end of an answer. An
    answer that begins while it plans ends that, to be begun again when the answer has ended."""

    def __init__(
        self,
        models: ModelManager,
        planner: Planner,
        routed: RoutedTokens,
        remembered: Remembered,
        busy: Callable[[], bool],
        on: bool = False,
    ) -> None:
        """`busy`: whether an answer is written or waits, or a job has the model. `on`: as of the last start."""
        self._models, self._planner, self._routed = models, planner, routed
        self._remembered, self._busy, self._on = remembered, busy, on
        self._news = threading.Condition()
        self._planned: tuple[int | None, int] = (None, 0)  # load, and tokens of it at the last plan
        self._due = self._closing = self._working = False
        self._thread: threading.Thread | None = None
        self._last: Renewal | None = None

    @property
    def on(self) -> bool:
        """Whether it plans by itself."""
        return self._on

    @property
    def last(self) -> Renewal | None:
        """What was done with the loaded model; None = nothing yet."""
        last = self._last
        return last if last is not None and last.load == self._models.load_id else None

    @property
    def stamp(self) -> str:
        """Changes with what the panel shows of it."""
        last = self.last
        return f"{self._on} {last.at_s if last is not None else ''}"

    def switch(self, on: bool) -> None:
        """Switch on or off, for the next start as well."""
        self._on = on
        self._remembered.put(KEY, {"on": on})
        self.look()

    def look(self) -> None:
        """An answer has ended, or the switch was turned: wake the thread if a plan is due. Returns at once."""
        with self._news:
            if self._closing or not self._on or not self._is_due():
                return
            self._due = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="moestro-plan", daemon=True)
                self._thread.start()
            self._news.notify_all()

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being planned; returns whether that is so within `timeout` seconds."""
        with self._news:
            return self._news.wait_for(lambda: not self._due and not self._working, timeout)

    def close(self, timeout: float = 30.0) -> None:
        """End the thread."""
        with self._news:
            self._closing = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)

    def _is_due(self) -> bool:
        load = self._models.load_id
        since = self._planned[1] if self._planned[0] == load else 0
        return self._routed.tokens(load) - since >= AGAIN

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._due or self._closing)
                if self._closing:
                    return
                self._due, self._working = False, True
            try:
                if self._is_due():  # it may have been planned since
                    self._plan()
            except Exception:
                log.exception("the cache could not be planned while idle")
            finally:
                with self._news:
                    self._working = False
                    self._news.notify_all()

    def _plan(self) -> None:
        load = self._models.load_id
        tokens = self._routed.tokens(load)

        def wanted() -> bool:
            return self._on and not self._closing and not self._busy() and self._models.load_id == load

        try:
            proposal = self._planner.propose_while(wanted)
            if proposal is None or not wanted():
                return  # still due: the answer's end begins it again
            text = self._weigh(proposal)
        except BusyError:
            return
        except MoestroError as error:
            text = f"The cache was not planned again: {error}"
        self._planned = load, tokens
        self._last = Renewal(load, f"After {count(tokens)} tokens: {text}", time.time())

    def _weigh(self, proposal: Proposal) -> str:
        """Use the plan if it is better; returns what was done."""
        now_ms, then_ms = (sum(plan.exposed_ms) for plan in (proposal.now, proposal.plan))
        compared = f"{then_ms:.3g} ms of predicted waiting a token in place of {now_ms:.3g} ms"
        if then_ms >= (1 - MARGIN) * now_ms:
            return f"the plan was left as it was, because {compared} is not {MARGIN:.0%} less."
        self._planner.use(proposal, idle=True)
        return f"a new plan was put into use, for {compared}. Undo takes it back."
