"""What suites ask of a loaded engine, and what with."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.run import LATENCY_US, Run
from bench.models.generate import checkpoint
from bench.models.sizes import FULL, GENERATED, SMALL, Sizes
from core.engine import Engine
from core.engine.texts import Text, bundled, tokenize
from core.errors import MoestroError
from core.importing import import_model
from core.memory.link import Pace, scaled_gbps
from core.memory.pack import pack_at
from core.policy.predict import Predictor
from core.settings.sampling import Sampling
from core.types import AnswerStats, Ids, StepRecord

QUESTION = [{"role": "user", "content": "What does heapq.heappush do?"}]
HELD_OUT = 64  # most texts that are asked and that no profile has seen; so many that few come up twice, since a
# predictor that learns knows a second answer from the first
READ = 20_000  # tokens of a profile
READY_S = 60.0


def model_of(run: Run, name: str, large: Sizes = FULL) -> str:
    """A model by its name or folder; "generated" is written where it stays, small in a smoke test."""
    if name != GENERATED:
        return name
    return str(checkpoint(run.folder(), SMALL if run.small else large, say=run.say))


def blocks_of(model: str, small: bool) -> int:
    """Into how many blocks the experts of a model are split."""
    return 3 if model == "demo" else 2 if small else 4


def pack_of(run: Run, model: str, name: str, **options: Any) -> Path:
    """The model as a pack, imported unless it is there; that of the demo model does not stay."""
    pack = run.folder(stays=model != "demo") / f"{Path(model).name}.{name}.pack"
    if not pack_at(pack):
        run.say(f"importing {pack.name}")
        import_model(model, pack, **options)
    return pack


def emulated_link(layer_ms: float, blob_bytes: int) -> dict[str, Any]:
    """Settings of a link on which copying an expert takes as many layers of this machine as on the reference machine,
    where a layer takes `layer_ms` here."""
    gbps = scaled_gbps(layer_ms, blob_bytes, LATENCY_US)
    return {"link": "emulated", "link_gbps": gbps, "link_latency_us": LATENCY_US}


def token_stream(engine: Engine) -> Iterator[int]:
    """Tokens of the bundled texts, one text after the other."""
    for text in bundled(engine.model_name):
        yield from tokenize(engine.prompt.tokenizer, text).ids.tolist()


def random_tokens(length: int, *seed: int) -> list[int]:
    """A prompt that no cache has seen."""
    ids: list[int] = np.random.default_rng(seed).integers(3, 4000, length).tolist()
    return ids


def divided(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """(texts for the profile, texts that it does not see, evenly spread over all: HELD_OUT, or a quarter of few)."""
    every = max(4, len(texts) // HELD_OUT)
    asked = list(texts[every // 2 :: every][:HELD_OUT])
    return [text for at, text in enumerate(texts) if at % every != every // 2], asked


def question_of(text: Text) -> Any:
    """What the engine is asked: a text, or the first message of a chat."""
    return text if isinstance(text, str) else text[:1]


def pace_of(engine: Engine) -> Pace:
    """The link in force, emulated or the machine's own."""
    return engine.transfers.pace or Pace(engine.parts.memory.link_gbps, 0.0)


def decode_steps(engine: Engine, tokens: int) -> list[StepRecord]:
    """The decode passes of an answer to QUESTION."""
    pieces = engine.generate(QUESTION, Sampling(max_new_tokens=tokens + 1))
    return [piece.step for piece in pieces if piece.step is not None and piece.step.phase == "decode"]


def stats_of(engine: Engine, ids: Sequence[int], tokens: int) -> AnswerStats:
    """The statistics of a greedy answer."""
    *_, end = engine.generate(Ids(ids), Sampling(temperature=0.0, max_new_tokens=tokens))
    assert end.stats is not None
    return end.stats


def until_ready(predictor: Predictor) -> None:
    """Waits until the predictor's background work has started. Raises MoestroError when it does not start."""
    until_s = time.perf_counter() + READY_S
    while predictor.worker is not None and not predictor.worker.ready:
        if time.perf_counter() > until_s:
            raise MoestroError("The predictor's process did not start. The reason is above, or in the log.")
        time.sleep(0.01)
