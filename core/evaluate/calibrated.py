"""What modes need to know of a model, gathered where it is not there yet, from texts that are not asked about."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from core.calibrate.gather import calibrate
from core.calibrate.texts import bundled
from core.engine import Engine
from core.errors import SettingError
from core.evaluate.modes import Mode, needs
from core.evaluate.run import Progress
from core.profile import PARTS, Profile
from core.settings.config import Settings

READ = 20_000  # tokens of the bundled prompts, at most
FILLS = frozenset({"counts"})  # a fresh cache begins with the experts used most


def missing(engine: Engine, modes: Sequence[Mode], base: Settings) -> set[str]:
    """Parts of a profile that these modes need and the engine's does not have."""
    wanted = set(FILLS)
    for mode in modes:
        try:
            wanted |= set(needs(mode.over(base)))
        except SettingError:
            pass  # it cannot run, and will say why
    return {part for part in wanted & PARTS.keys() if engine.profile is None or not engine.profile.has(part)}


def calibrated(
    engine: Engine,
    modes: Sequence[Mode],
    progress: Progress = lambda text, share: None,
    cancel: threading.Event | None = None,
    limit: int = 0,
) -> Profile | None:
    """Give the engine a profile that has what the modes need: its own, if that does, else one made now from the bundled
    chats and completed by its own. Nothing is written to disk. None: there was nothing to gather.

    At most `limit` tokens are read, 0 = READ; `core.evaluate.questions.demo_questions` asks about none of them. Raises
    BusyError, Cancelled.
    """
    wanted = missing(engine, modes, engine.settings)
    if not wanted:
        return engine.profile
    texts = [text for text in bundled(engine.model_name) if not isinstance(text, str)]  # those are read for perplexity
    fresh = calibrate(
        engine, texts, parts=wanted, source="the bundled prompts", limit=limit or READ, progress=progress, cancel=cancel
    )
    engine.use_profile(fresh if engine.profile is None else fresh.over(engine.profile))
    return engine.profile
