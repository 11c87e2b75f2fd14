"""Questions with one right answer: the demo model's facts, in their trained phrasing and in unseen ones."""

import json
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.engine import Engine
from core.engine.passages import spread
from core.engine.texts import ASSETS, MOST_BYTES, bundled
from core.errors import SettingError
from core.memory.store import Cancelled
from core.settings.sampling import Sampling
from core.system.reading import require_regular
from core.types import StepRecord

SPLITS = {"trained": True, "unseen": False}  # of a questions file: was it trained in this phrasing?


@dataclass(frozen=True, slots=True)
class FactQuestion:
    """`seen`: the model was trained on this phrasing."""

    text: str
    answer: str
    seen: bool


def demo_questions() -> list[FactQuestion]:
    """The demo model's facts, without those whose answers are in the bundled calibration prompts."""
    known = {chat[-1]["content"] for chat in bundled("demo") if not isinstance(chat, str)}
    return [one for one in from_file(ASSETS / "demo" / "questions.jsonl") if one.answer not in known]


def from_file(path: Path) -> list[FactQuestion]:
    """One question per line of a .jsonl: {"question": ..., "answer": ..., "split": "trained" or "unseen"}; without a
    split it counts as trained, with any other it is left out. Raises SettingError."""
    try:
        require_regular(path, MOST_BYTES, SettingError)
        lines = path.read_text("utf-8-sig").splitlines()
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.strip()]
        found = [
            FactQuestion(str(row["question"]), str(row["answer"]), SPLITS[row.get("split", "trained")])
            for row in rows
            if row.get("split", "trained") in SPLITS
        ]
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror}. Name a .jsonl file with questions.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SettingError(
            f'{path} is not understood ({error}). Each line must be {{"question": "...", "answer": '
            '"...", "split": "trained" or "unseen"}.'
        ) from error
    if not found:
        raise SettingError(f"{path} has no question. Name a .jsonl file with questions and answers.")
    return found


def sample(questions: Collection[FactQuestion], number: int) -> list[FactQuestion]:
    """`number` of them, half of each kind as far as available, evenly spread over all; the same ones every time."""
    seen = [one for one in questions if one.seen]
    unseen = [one for one in questions if not one.seen]
    half = min(len(unseen), number // 2)
    return spread(seen, number - half) + spread(unseen, half)


def ask(engine: Engine, question: FactQuestion, cancel: threading.Event, heard: Callable[[StepRecord], None]) -> bool:
    """Whether the model's greedy answer is the right one, token by token, including its end. Stops at the first wrong
    token, which decides. `heard` is called with every forward pass. Raises ContextError, BusyError, Cancelled."""
    right: list[int] = engine.prompt.tokenizer(question.answer, add_special_tokens=False).input_ids
    enough, answered, good = threading.Event(), 0, True
    stop = _Either(cancel, enough)
    for piece in engine.generate(
        [{"role": "user", "content": question.text}], Sampling(max_new_tokens=len(right) + 1), stop
    ):
        if piece.step is not None:
            heard(piece.step)
        if piece.kind == "token":
            if answered >= len(right) or piece.token != right[answered]:
                good = False
                enough.set()
            answered += 1
        elif piece.kind == "end":
            assert piece.stats is not None
            good = good and answered == len(right) and piece.stats.reason == "stop"
    if cancel.is_set():
        raise Cancelled
    return good


class _Either(threading.Event):
    """Set as soon as one of several events is."""

    def __init__(self, *events: threading.Event) -> None:
        super().__init__()
        self._events = events

    def is_set(self) -> bool:
        return any(event.is_set() for event in self._events)
