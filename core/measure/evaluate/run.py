"""Evaluation: one loaded model under modes x residencies, on the same questions and the same text.

Every run of questions and every run of the text starts with the cache as after a load, and with predictors without
history; so a figure does not depend on earlier runs."""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from core.engine import Engine
from core.engine.passages import held_out, windows
from core.engine.texts import Text
from core.errors import BusyError, MoestroError, SettingError
from core.measure.evaluate.modes import BASE, Mode
from core.measure.evaluate.others import Others
from core.measure.evaluate.passages import listen, reference
from core.measure.evaluate.questions import FactQuestion, ask, demo_questions, sample
from core.measure.evaluate.rows import EvaluationRow, row
from core.measure.evaluate.tally import ModeTotals
from core.settings.config import Settings

Progress = Callable[[str, float], None]
QUESTIONS, TOKENS = 24, 192  # defaults
ANSWER = 20  # approximate tokens per answer, for the progress
NO_TEMPLATE = (
    "{} has no chat template, so it continues texts and answers no questions: exact match is not measured. "
    "To measure it, load a version that was made to chat."
)
BECAUSE = "The model is being evaluated."


@dataclass(frozen=True, slots=True)
class Material:
    """What modes are measured on: the same for all of them."""

    questions: Sequence[FactQuestion]
    pieces: Sequence[Sequence[int]]  # of a text, as token ids; all but the first of each are predicted
    note: str = ""  # why existing questions are not asked

    @property
    def tokens(self) -> int:
        """Tokens to be predicted."""
        return sum(len(piece) - 1 for piece in self.pieces)


def gather(
    engine: Engine,
    questions: int = QUESTIONS,
    tokens: int = TOKENS,
    asked: Sequence[FactQuestion] | None = None,
    texts: Sequence[Text] | None = None,
) -> Material:
    """Chooses `questions` questions and `tokens` tokens of text for a loaded model. Without `asked` the demo model gets
    its own questions, any other none; without `texts` the bundled text is used. A model without a chat template is
    asked nothing, and `note` says so: it continues texts, so its answers would not end where the right ones do. Raises
    SettingError."""
    if questions < 0 or tokens < 0 or not questions + tokens:
        raise SettingError("Ask for at least one question or one token of text.")
    if asked is None:
        asked = demo_questions() if engine.model_name == "demo" else []
    texts = held_out(engine.model_name) if texts is None else texts
    note = ""
    if tokens and engine.text_to_text:
        raise SettingError(
            "A text-to-text model goes on with no text, so tokens of text cannot be scored. Ask it questions alone."
        )
    if asked and questions and not engine.takes_chats:
        asked, note = [], NO_TEMPLATE.format(engine.model_name)
        if not tokens:
            raise SettingError(f"{note} Ask for tokens of text instead.")
    found = Material(
        sample(asked, questions),
        windows(engine.prompt.tokenizer, engine.context, texts, tokens) if tokens else [],
        note,
    )
    if not found.questions and not found.pieces:
        raise SettingError(
            f"There are no questions for {engine.model_name}. Name a file of them, or ask for tokens of text."
        )
    return found


def evaluate(
    engine: Engine,
    modes: Sequence[Mode],
    residencies: Sequence[float],
    material: Material,
    *,
    progress: Progress = lambda text, share: None,
    cancel: threading.Event | None = None,
    on_row: Callable[[EvaluationRow], None] = lambda row: None,
    done: Collection[tuple[str, float]] = (),
) -> list[EvaluationRow]:
    """Rows in the order of residencies and modes. `on_row` is called with each when it is complete; (mode, residency)
    pairs in `done` are left out. Settings that a mode leaves open are the engine's.

    The engine must have the profile that modes need: a mode that cannot run has a row that says why. The caller must
    have the engine to itself; its settings are restored in any case. Raises BusyError, Cancelled, SettingError for
    residencies outside (0, 1]."""
    if bad := [share for share in residencies if not 0 < share <= 1]:
        raise SettingError(
            f"A residency of {bad[0]:g} is not possible: it is a share of the experts above 0 and up to 1."
        )
    cancel = cancel or threading.Event()
    todo = [(share, mode) for share in residencies for mode in modes if (mode.name, share) not in done]
    rows: list[EvaluationRow] = []
    if not todo:
        return rows
    with restored(engine) as base:
        progress("The exact model reads the text", 0.0)
        engine.change({**base, **BASE, "predictor": "none"})
        exact = reference(engine, material.pieces, cancel)
        for at, (share, mode) in enumerate(todo):

            def report(done: float, name: str = f"{mode.title} at {share:.4g} of the experts", at: int = at) -> None:
                progress(name, (at + done) / len(todo))

            rows.append(_measure(engine, base, mode, share, material, exact, report, cancel))
            on_row(rows[-1])
    progress("Evaluated", 1.0)
    return rows


@contextmanager
def restored(engine: Engine) -> Iterator[Settings]:
    """Inside, modes may change settings freely; yields the settings in force, and restores them at the end. The live
    figures leave it out."""
    before = engine.settings
    with engine.parts.telemetry.resting():
        try:
            yield before.with_({"telemetry": "on"})
        finally:
            engine.change(dict(before))


def _measure(
    engine: Engine,
    base: Settings,
    mode: Mode,
    share: float,
    material: Material,
    exact: Sequence[torch.Tensor],
    report: Callable[[float], None],
    cancel: threading.Event,
) -> EvaluationRow:
    """Measures one row. Errors of the mode, or of too few slots, are reported in it."""
    tally, verdicts, others = ModeTotals(), list[tuple[bool, bool]](), Others()
    whole, mode = len(material.questions) * ANSWER + material.tokens, mode.fitted(engine.shape.top_k)
    try:
        settings = mode.over(base.with_({"budget": f"{share * 100:g}%"}))
        start_mode(engine, settings)
        for question in material.questions:
            report(len(verdicts) * ANSWER / whole)
            verdicts.append((question.seen, ask(engine, question, cancel, tally)))
        if verdicts and material.pieces:
            start_mode(engine, settings)
        heard = listen(
            engine,
            material.pieces,
            exact,
            cancel,
            tally,
            lambda tokens: report((len(verdicts) * ANSWER + tokens) / whole),
        )
    except BusyError:
        raise
    except MoestroError as error:
        return EvaluationRow(mode.name, mode.title, share, problem=str(error), settings=dict(mode.settings))
    return row(
        mode.name,
        mode.title,
        share,
        engine.expert_cache.capacity,
        mode.settings,
        verdicts,
        heard,
        tally,
        others.cores(),
    )


def start_mode(engine: Engine, settings: Settings) -> None:
    """Applies the settings, with the cache as after a load and a predictor without history. Raises MoestroError when
    they are not possible."""
    engine.change({**settings, **BASE, "predictor": "none"})
    with engine.workbench(BECAUSE) as bench:
        bench.start_over()
    engine.change(dict(settings))
