"""The distance of a loaded model's fast arithmetic from the reference, on as much text as is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager

from core.engine import Engine
from core.engine.arithmetic import Distance
from core.engine.distance import Read, distance_of, read
from core.engine.passages import held_out, windows
from core.errors import SettingError

TOKENS = 512  # by default
NOT_FAST = "The distance is that of the fast arithmetic from the reference, and the reference computes this model{}."
BECAUSE = "The distance of the fast arithmetic is being measured."


def measured(engine: Engine, tokens: int = TOKENS) -> Distance:
    """Measure the distance, keep it for later loads, and show it with this one."""
    distance = measure(engine, tokens)
    engine.keep_distance(distance)
    return distance


def measure(engine: Engine, tokens: int = TOKENS) -> Distance:
    """The distance over `tokens` predicted tokens of the texts that evaluation reads. Raises SettingError where the
    reference computes the model, and BusyError."""
    if not engine.arithmetic.fast:
        raise SettingError(NOT_FAST.format(f": {engine.arithmetic.fallback}" if engine.arithmetic.fallback else ""))
    pieces = windows(engine.prompt.tokenizer, engine.context, held_out(engine.model_name), tokens)
    with readers(engine) as (reference, fast):
        return distance_of(iter(pieces), reference, fast)


@contextmanager
def readers(engine: Engine) -> Iterator[tuple[Read, Read]]:
    """What reads a text in the reference arithmetic, and in that of the load. Raises BusyError."""
    with engine.workbench(BECAUSE) as bench, bench.unpaced():
        reference, chunk = engine.wiring.reference(), bench.chunk if bench.carried else engine.context
        try:
            yield (
                lambda ids: read(reference, bench.kv, ids, chunk),
                lambda ids: read(bench.pipeline, bench.kv, ids, chunk),
            )
        finally:
            reference.end()
