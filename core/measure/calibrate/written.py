"""Training texts that the model writes itself: it continues each prompt as in a chat, and its routing is kept.

Source: ExpertFlow section 3.1.2: "the MoE model autoregressively generates an output sequence", of a predefined maximum
length, and the routing paths of input and output are the data. How tokens are chosen is left open there. Here the first
answer to a prompt is the likeliest one, as a chat's is by default; further ones are drawn at temperature 1."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from core.engine.sampler import Sampler
from core.engine.texts import Tokens
from core.measure.calibrate.paths import Paths
from core.runtime.measurement import LayerRun, MeasurementSession
from core.settings.sampling import Sampling

PROMPT = 2048  # most tokens of a prompt; of a longer one the last
ANSWERS = 8  # most answers to a prompt


class Writer:
    """Has the model of a measurement session continue texts. `ends`: the tokens that end one; `most`: the most tokens
    of an output."""

    def __init__(self, bench: MeasurementSession, paths: Paths, ends: Collection[int], most: int) -> None:
        self._bench, self._paths, self._ends, self._most = bench, paths, frozenset(ends), most
        self._chosen: list[npt.NDArray[Any]] = []  # [T, k] of each layer of the pass
        self.tokens = 0  # so far: those of prompts and of outputs

    def layer(self, run: LayerRun) -> None:
        """Keep the experts of the pass's next layer; for `MeasurementSession.watched`."""
        self._chosen.append(run.ids.cpu().numpy())

    def write(self, texts: Sequence[Tokens], limit: int) -> Iterator[None]:
        """Continue the prompts of `texts` in order, the likeliest way first and then with draws, until there are
        `limit` tokens or ANSWERS to each. Yields after every pass; the session must be watched by `layer`."""
        prompts = [text.ids[: text.prompt or None].tolist() for text in texts]
        for number in range(ANSWERS * len(prompts)):
            if self.tokens >= limit:
                break
            sampling = Sampling(temperature=0.0 if number < len(prompts) else 1.0, seed=number)
            yield from self._continue(prompts[number % len(prompts)], limit - self.tokens, sampling)

    def _continue(self, prompt: list[int], limit: int, sampling: Sampling) -> Iterator[None]:
        bench = self._bench
        ids = prompt[-min(PROMPT, bench.context - min(self._most, bench.context // 2)) :][:limit]
        most = min(self._most, limit - len(ids), bench.context - len(ids))
        given, kv, draw = len(ids), bench.kv.fresh(), Sampler(sampling, bench.device)
        routes: list[npt.NDArray[Any]] = []
        at = 0
        while at < len(ids):
            part = ids[at : at + bench.chunk]
            self._chosen.clear()
            logits = bench.run(part, kv, "prefill" if at < given else "decode")
            at += len(part)
            routes.append(np.stack(self._chosen, 1))
            yield
            if at == len(ids) and at - given < most and (token := draw(ids, logits)) not in self._ends:
                ids.append(token)
        self._paths.add(np.array(ids, np.int32), np.concatenate(routes), given)
        self.tokens += len(ids)
