"""The part of `bench lossy` that is like figures 3, 4, 7 and 8 of Speculating Experts.

Similarity of the quasi-hidden state to the next layer's true one, and recall of each way of predicting, layer by layer;
and time per token on demand, with prefetching, and with executing predictions, at several context lengths over the same
link, with the largest possible gain."""

import statistics
import threading
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch

from bench.harness.paired import stretches
from bench.harness.run import Run
from bench.routing.probe import listen
from core.engine import Engine
from core.engine.passages import held_out
from core.engine.texts import Text, tokenize
from core.errors import SettingError
from core.measure.evaluate.follow import follow
from core.measure.evaluate.modes import PREDICTORS, modes_of
from core.measure.evaluate.questions import FactQuestion
from core.measure.evaluate.run import restored, start_mode
from core.runtime.measurement import LayerRun
from core.settings.param import Value
from core.settings.presets import preset
from core.system.wording import cell, grid
from core.types import StepRecord

MODES = tuple(mode for mode in modes_of() if mode.name.startswith("execute_"))  # modes that the profile must support
CONTEXTS = (64, 256, 768)  # tokens before the timed ones; and as many as the model's context has room for
PARTS = ("total_ms", "compute_ms", "stall_ms", "idle_ms", "copy_ms")  # of a token; copying overlaps the others
NEVER = threading.Event()
DECODED, PROBED, READ = 48, 256, 512  # tokens: timed per context, predicted for recall, and read for cosines
RESIDENCY = "50%"  # slots; but no expert is kept beyond its use
SYSTEMS: dict[str, dict[str, Value]] = {
    "on demand": preset("on_demand").values,
    "prefetch, gate": {**preset("speculating").values, "predictor": "gate"},
    "prefetch, default vectors": preset("speculating").values,
    "execute, gate": {**preset("speculating_execute").values, "predictor": "gate"},
    "execute, default vectors": preset("speculating_execute").values,
}


def measure(run: Run, engine: Engine, questions: Sequence[FactQuestion], rounds: int) -> dict[str, Any]:
    """All of it, on a loaded engine whose profile has not seen the questions; the engine's settings are restored
    afterwards."""
    decoded, probed, read = (3, 4, 12) if run.small else (DECODED, PROBED, READ)
    contexts = [4, 8] if run.small else lengths(engine.context, decoded)
    ids = [
        token for text in held_out(engine.model_name) for token in tokenize(engine.prompt.tokenizer, text).ids.tolist()
    ]
    run.say("cosines")
    alike = cosines(engine, ids[: min(read, engine.context - 1)])
    found: dict[str, Any] = {
        "cosine": {name: [statistics.fmean(row) if row else None for row in rows] for name, rows in alike.items()},
        "cosine_blocks": {name: by_token(rows) for name, rows in alike.items()},
    }
    with restored(engine):
        run.say("recall")
        asked = [[{"role": "user", "content": one.text}] for one in questions]
        found["recall"], found["recall_blocks"] = recalls(engine, asked, probed)
        long = list(islice(cycle(ids), max(contexts) + decoded))
        found["tpot"] = {str(length): _timed(run, engine, long, length, decoded, rounds) for length in contexts}
    return {
        **found,
        "top_k": engine.shape.top_k,
        "emulated": bool(engine.transfers.pace),
        "claimed": "gain is bounded by sum over layers of min(compute, copy) on demand",
    }


def lengths(context: int, decoded: int) -> list[int]:
    """Tokens to time behind, ascending: CONTEXTS as far as a context of that many leaves room to decode, and the most
    that it does."""
    longest = context - decoded
    return [*(one for one in CONTEXTS if one < longest), longest]


def by_token(rows: Sequence[Sequence[float]]) -> list[float]:
    """[L - 1][T] -> the mean over the layers that have any, by stretches of tokens."""
    known = [row for row in rows if row]
    return stretches([statistics.fmean(token) for token in zip(*known, strict=True)]) if known else []


def cosines(engine: Engine, ids: Sequence[int]) -> dict[str, list[list[float]]]:
    """ "before" [L - 1][T]: cosine of h_l and h_{l+1} of each token; "quasi" [L - 1][T]: of q_{l+1} and h_{l+1}, q =
    Norm(r_l + D_l). Empty where the layers have another structure, or there are no default vectors."""
    layers = engine.shape.layers
    before: list[list[float]] = [[] for _ in range(layers)]
    quasi: list[list[float]] = [[] for _ in range(layers)]
    kept: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def seen(run: LayerRun) -> None:
        layer, states = run.seen.layer, run.seen.hidden.float()
        if layer and kept:
            last, prediction = kept.pop()
            before[layer] += torch.cosine_similarity(last, states, dim=-1).tolist()
            if prediction is not None:
                quasi[layer] += torch.cosine_similarity(prediction.float(), states, dim=-1).tolist()
        if layer + 1 < layers:
            has = engine.profile is not None and engine.profile.has("defaults")
            prediction = (
                engine.predictor_host.default(layer, layer + 1, run.ids.tolist(), run.weights, run.seen)
                if has
                else None
            )
            kept[:] = [(states.clone(), prediction)]

    with (
        engine.workbench("The model is being measured.") as bench,
        bench.unpaced(),
        bench.watched(seen, lambda output: None),
    ):
        cache = bench.kv.fresh()
        for at in range(0, len(ids), bench.chunk):
            bench.run(ids[at : at + bench.chunk], cache)
    return {"before": before[1:], "quasi": quasi[1:]}


def recalls(
    engine: Engine, asked: Sequence[Text], tokens: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Predictor -> [L - 1] recall@k of the layers after the first, on `tokens` decoded tokens of answers; and its mean
    over them by stretches of tokens."""
    found, blocks = {}, {}
    for name in PREDICTORS:
        try:
            probe = listen(engine, name, {}, list(asked), tokens, DECODED, patient=True)
        except SettingError:
            continue  # its profile lacks what it needs
        found[name] = probe.recall(engine.shape.layers, engine.shape.top_k)[1:]
        blocks[name] = probe.blocks(engine.shape.layers, engine.shape.top_k)["mean"]
    return found, blocks


def _timed(run: Run, engine: Engine, ids: Sequence[int], length: int, decoded: int, rounds: int) -> dict[str, Any]:
    """System -> the parts of a token's time behind the first `length` of `ids`, from the round with the median time of
    `rounds`. And the bound."""

    def one(name: str, number: int) -> dict[str, float]:
        steps: list[StepRecord] = []
        start_mode(engine, engine.settings.with_({**SYSTEMS[name], "budget": RESIDENCY, "quality_rate": 0.0}))
        for _seen in follow(engine, ids[: length + decoded], length, NEVER, steps.append):
            pass
        steps = [step for step in steps if step.phase == "decode"]
        parts = {part: statistics.fmean(getattr(step, part) for step in steps) for part in PARTS}
        return {**parts, "bound_ms": bound_ms(steps, engine.shape.layers)}

    rows = run.by_turns([*SYSTEMS], one, rounds, warm=False, what=f"times behind {length} tokens")
    found = {name: sorted(of, key=lambda row: row["total_ms"])[len(of) // 2] for name, of in rows.items()}
    demand = found["on demand"]["total_ms"]
    return {
        "tokens_before": length,
        "bound_ms": statistics.median(row["bound_ms"] for row in rows["on demand"]),
        "systems": {
            name: {
                "tpot_ms": row["total_ms"],
                **{part: row[part] for part in PARTS[1:]},
                "gained_ms": demand - row["total_ms"],
                "tpot_rounds_ms": [one["total_ms"] for one in rows[name]],
                "copy_shares": [one["copy_ms"] / one["total_ms"] for one in rows[name]],
                "gained_over_bound": [
                    (whole["total_ms"] - one["total_ms"]) / whole["bound_ms"] if whole["bound_ms"] else 0.0
                    for one, whole in zip(rows[name], rows["on demand"], strict=True)
                ],
                "gain_shares": [
                    1 - one["total_ms"] / whole["total_ms"]
                    for one, whole in zip(rows[name], rows["on demand"], strict=True)
                ],
            }
            for name, row in found.items()
        },
    }


def bound_ms(steps: Sequence[StepRecord], layers: int) -> float:
    """Most milliseconds per token that overlapping can gain: sum over layers of min(T_compute, T_copy), where a layer
    computes its share of the pass, and copies for as long as its demand copies took."""
    copying = [0.0] * layers
    for step in steps:
        for copy in step.transfers:
            copying[copy.layer] += (copy.ended_s - copy.started_s) * 1e3
    computing = statistics.fmean(step.compute_ms for step in steps) / layers
    return sum(min(computing, one / len(steps)) for one in copying)


def table(found: Mapping[str, Any]) -> list[str]:
    """The result as lines of text."""
    titles = {"before": "state before", "quasi": "quasi-hidden state"}
    layers = [""] * len(found["cosine"]["before"])
    cosines = [(title, *(cell(c, ".3f") for c in found["cosine"][name])) for name, title in titles.items()]
    recalls = [(name, *(f"{rate:.1%}" for rate in rates)) for name, rates in found["recall"].items()]
    lines = [
        "Cosine with the next layer's state, by layer (figure 3):",
        *grid(("", *layers), cosines),
        f"Recall@{found['top_k']}, by layer from the second on (figure 4):",
        *grid(("", *layers), recalls),
    ]
    for row in found["tpot"].values():
        emulated = " (link emulated)" if found["emulated"] else ""
        figures = ("tpot_ms", *PARTS[1:], "gained_ms")
        rows = [(name, *(cell(one[figure]) for figure in figures)) for name, one in row["systems"].items()]
        lines += [
            f"ms per token behind {row['tokens_before']} tokens, at most {row['bound_ms']:.2f} ms to be "
            f"gained{emulated}:",
            *grid(("", *(figure.removesuffix("_ms") for figure in figures)), rows),
        ]
    return lines
