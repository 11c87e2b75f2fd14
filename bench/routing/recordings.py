"""Recordings of bench methods: the same questions with every predictor, as it worked in the engine.

A trace holds each prediction in the layer in which it arrived: with results of a worker used as they come, as in every
answer of the engine, or waited for. Everything is kept until the bench is done, so that an interrupted one continues.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.engines import question_of, until_ready
from bench.harness.paired import token_ratios
from core.engine import Engine
from core.engine.texts import Text
from core.measure.evaluate.run import start_mode
from core.profile import Profile, load, save
from core.profile.trace import FileTrace
from core.profile.trace.file import TraceHead, TraceWriter
from core.settings.param import Value
from core.settings.registry import variant
from core.settings.sampling import Sampling
from core.types import Outcome, StepRecord

ANSWER = 64  # most tokens of an answer
LIVED = ("hit_rate", "tpot_ms", "busy_ms", "misses", "predict_ms")  # figures of the engine while it was recorded


class Recordings:
    """In a folder of its own: an index, the profile, a trace for each recording. Those of anything other than
    `measured` are discarded. `texts` are answered, one after the other, until `tokens` were decoded."""

    def __init__(
        self,
        folder: Path,
        measured: Mapping[str, Any],
        engine: Engine,
        texts: Sequence[Text],
        tokens: int,
        say: Callable[[str], None],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._engine, self._texts, self._tokens, self._say = engine, texts, tokens, say
        self._index, self._profile = folder / "recordings.json", folder / "profile.safetensors"
        measured = {**measured, "figures": [*LIVED, "hit_blocks"]}
        self._found: dict[str, Any] = {"measured": measured, "lived": {}}
        if self._index.exists():
            before = json.loads(self._index.read_text("utf-8"))
            if before["measured"] == json.loads(json.dumps(measured)):
                self._found = before
            else:
                self.done()

    def profile(self, make: Callable[[], Profile]) -> Profile:
        """The kept profile, or else `make()`, which is then kept."""
        if self._index.exists() and self._profile.exists():
            return load(self._profile, model_hash=self._engine.model_hash)
        profile = make()
        save(profile, self._profile)
        self._write()
        return profile

    def of(
        self, name: str, params: Mapping[str, Value], settings: Mapping[str, object], *, waited_for: bool = False
    ) -> FileTrace:
        """The recording of a predictor under other `settings`, made now unless it was kept."""
        path = self._path(name, params, settings, waited_for)
        if path.name not in self._found["lived"]:
            self._say(f"recording {path.stem}")
            steps = self._record(path, name, params, settings, waited_for)
            self._found["lived"][path.name] = {**lived(steps), "hit_blocks": hit_blocks(steps)}
            self._write()
        return FileTrace(path)

    def lived(self, trace: FileTrace) -> dict[str, Any]:
        """What the engine itself did while it was recorded: see `lived`, and the hit rate by stretches of tokens."""
        figures: dict[str, Any] = self._found["lived"][trace.path.name]
        return figures

    def done(self) -> None:
        """Everything was measured: the next run starts anew."""
        for file in (self._index, self._profile, *(self.folder / name for name in self._found["lived"])):
            file.unlink(missing_ok=True)

    def _path(self, name: str, params: Mapping[str, Value], settings: Mapping[str, object], waited_for: bool) -> Path:
        of = [*params.values(), *settings.values(), *(["waited for"] if waited_for else [])]
        words = "-".join(str(one).replace("/", "_").replace(" ", "_") for one in (name, *of))
        return self.folder / f"{words}.trace"

    def _write(self) -> None:
        part = self._index.with_suffix(".part")
        part.write_text(json.dumps(self._found), "utf-8")
        part.replace(self._index)

    def _record(
        self, path: Path, name: str, params: Mapping[str, Value], settings: Mapping[str, object], waited_for: bool
    ) -> list[StepRecord]:
        """Asks the questions, from a cache as after a load; its predictions go into the trace."""
        engine, shape = self._engine, self._engine.shape
        own = variant("predictor", name).full_names(params)
        start_mode(engine, engine.settings.with_({**settings, "predictor": name, **own}))
        until_ready(engine.predictor_host.predictor)
        engine.predictor_host.predictor.patient = waited_for
        engine.keep(probs=False, ranks=True, tokens=True)
        steps: list[StepRecord] = []
        left, asked = self._tokens, 0
        with TraceWriter(
            path,
            TraceHead(
                shape.layers,
                shape.experts,
                shape.top_k,
                model=engine.model_name,
                model_hash=engine.model_hash,
                predictor=(name, params),
            ),
        ) as trace:
            while left > 0:
                question = question_of(self._texts[asked % len(self._texts)])
                sampling = Sampling(temperature=0.7, seed=asked, max_new_tokens=min(left, ANSWER) + 1)
                asked += 1
                for piece in engine.generate(question, sampling):
                    if piece.step is not None:  # also the last one, which ended the answer without a token
                        trace.add(piece.step)
                        steps.append(piece.step)
                        left -= piece.step.phase == "decode"
        engine.keep(probs=False, ranks=False, tokens=False)
        return steps


def hit_blocks(steps: Sequence[StepRecord]) -> list[float]:
    """The hit rate of decoded tokens, by stretches."""
    decoded = [step for step in steps if step.phase == "decode"]
    return token_ratios([step.hits for step in decoded], [step.requests for step in decoded])


def lived(steps: Sequence[StepRecord]) -> dict[str, float]:
    """LIVED, of the decoded tokens as the engine counted them: hit rate, and of a token the milliseconds, those without
    waiting for copies, the experts that were copied on demand, and the milliseconds that predicting took."""
    decoded = [step for step in steps if step.phase == "decode"]
    requests, tokens = sum(step.requests for step in decoded), max(1, len(decoded))
    return {
        "hit_rate": sum(step.hits for step in decoded) / max(1, requests),
        "tpot_ms": sum(step.total_ms for step in decoded) / tokens,
        "busy_ms": sum(step.total_ms - step.stall_ms for step in decoded) / tokens,
        "misses": sum(int((step.outcome == Outcome.MISS).sum()) for step in decoded) / tokens,
        "predict_ms": sum(step.predict_ms for step in decoded) / tokens,
    }
