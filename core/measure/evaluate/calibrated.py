"""Gathers the profile parts that modes need and the engine lacks, from texts that the evaluation does not ask about."""

import threading
from collections.abc import Sequence
from pathlib import Path

from core.engine import Engine
from core.engine.texts import bundled
from core.errors import SettingError
from core.measure.calibrate.gather import calibrate
from core.measure.evaluate.modes import Mode, needs
from core.measure.evaluate.run import Progress
from core.policy.allocation.slot_allocation import AHEAD
from core.profile import PARTS, Profile
from core.settings.config import Settings

READ = 20_000  # most tokens of the bundled prompts
FILLS = frozenset({"counts"})  # a fresh cache is filled with the experts used most


def missing(engine: Engine, modes: Sequence[Mode], base: Settings) -> set[str]:
    """Parts of a profile that these modes need and the engine's profile lacks."""
    wanted = set(FILLS)
    for mode in modes:
        try:
            wanted |= set(needs(mode.over(base)))
        except SettingError:
            pass  # cannot run; its row reports why
    if engine.shape.layers < 2:
        wanted -= AHEAD  # the rows of modes that need them say why these cannot run
    return {part for part in wanted & PARTS.keys() if engine.profile is None or not engine.profile.has(part)}


def calibrated(
    engine: Engine,
    modes: Sequence[Mode],
    progress: Progress = lambda text, share: None,
    cancel: threading.Event | None = None,
    limit: int = 0,
    folder: Path | None = None,
) -> Profile | None:
    """Gives the engine a profile with the parts that the modes need: its own if that has them, else one gathered now
    from the bundled chats and completed by its own. Keeps nothing on disk; `folder` is where training data are
    meanwhile, as for `calibrate`. None: there was nothing to gather.

    Reads at most `limit` tokens, 0 = READ; none of the texts is in `core.measure.evaluate.questions.demo_questions`.
    Raises BusyError, Cancelled."""
    wanted = missing(engine, modes, engine.settings)
    if not wanted:
        return engine.profile
    texts = [text for text in bundled(engine.model_name) if not isinstance(text, str)]  # plain texts are for perplexity
    fresh = calibrate(
        engine,
        texts,
        parts=wanted,
        source="the bundled prompts",
        limit=limit or READ,
        folder=folder,
        progress=progress,
        cancel=cancel,
    )
    engine.use_profile(fresh if engine.profile is None else fresh.over(engine.profile))
    return engine.profile
