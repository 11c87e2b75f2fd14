"""bench path: ExpertFlow's routing-path predictor, trained on answers that the model wrote itself, and what it names.

The paper's data are 10,000 prompts answered three times each (section 5.1); a small model has fewer prompts and answers
each more often. Answers are kept on disk part by part, and the training keeps its state, so that an interrupted bench
continues with the same command, and a later one adds to the answers; `minutes` bounds both, and the result says how
many runs and steps fitted. What the network names is then compared with TLP and SLP over batches of answers to
questions that it has not seen, one sequence included, and its recall by layer is counted in the engine: waited for, and
in time."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from bench.harness.engines import question_of
from bench.harness.report import headline
from bench.harness.run import RESIDENT, Result, Run, Suite
from bench.routing.estimator import divided, every_text
from bench.routing.path_accuracy import measure as accuracies
from bench.routing.probe import listen
from core.engine import Engine
from core.engine.batch_request import BatchRequest
from core.errors import MoestroError
from core.measure.calibrate.gather import calibrate
from core.policy.predict.nets import path
from core.policy.predict.nets.path import Passage
from core.profile import save
from core.settings.sampling import Sampling
from core.system.wording import grid
from core.types import Ids, StepRecord

RUNS = 30_000  # of the paper
PART, SEQUENCES = 256, 32  # runs of a file; answers at a time
ANSWER = 64  # most tokens of an answer
EPOCHS, BATCH = 10, 16  # the paper's batch; its epochs are not stated
SIZES = (1, 4, 8, 16, 32)
WRITING = 0.4  # of the minutes
JUDGED = 96  # prompts of each batch size
TRIED = 20  # steps that the time of a step is taken from


def measure(run: Run, model: str = "demo", minutes: int = 15, tokens: int = 512) -> Result:
    """`minutes` = for writing and training; `tokens` = decoded tokens that recall in the engine is counted over."""
    engine = run.engine(model, RESIDENT, sequences=SEQUENCES)
    held_out, known = divided(every_text(model))
    prompts = [engine.prompt.tokens(question_of(text)) for text in known[: 8 if run.small else None]]
    files = Files(run.folder() / "path" / f"{engine.model_hash[:16]}{'-small' if run.small else ''}")
    runs = 16 if run.small else RUNS
    written_s = 0.0 if files.state else write(run, engine, prompts, files, runs, 60 * minutes * WRITING)
    data = files.passages()
    if not data:
        raise MoestroError("No answer was written in that time. Give more minutes.")
    run.say(f"{len(data):,} runs of {sum(len(one.ids) for one in data):,} tokens")
    net, about = trained(run, engine, data, files, 60 * minutes * (1 - WRITING))
    engine.use_profile(profile := with_net(engine, known, net))
    save(profile, files.profile)
    run.say(f"the profile with the network is {files.profile}")
    asked = [engine.prompt.tokens(question_of(text)) for text in held_out[: 8 if run.small else JUDGED]]
    engine.change({"predictor": "none", "telemetry": "on"})
    sizes = SIZES[:2] if run.small else SIZES
    found = {str(size): accuracies(engine, asked, ANSWER, size) for size in sizes}
    shape, in_engine = engine.shape, dict[str, list[float]]()
    for name, patient in (("waited_for", True), ("in_time", False)):
        run.say(f"recall in the engine, {name.replace('_', ' ')}")
        probe = listen(engine, "routing_path", {}, held_out, tokens, ANSWER, patient=patient)
        in_engine[name] = probe.recall(shape.layers, shape.top_k)
    engine.change({"predictor": "none"})
    return {
        **about,
        "prompts": len(prompts),
        "runs": len(data),
        "runs_of_paper": RUNS,
        "trained_tokens": sum(len(one.ids) for one in data),
        "written_s": written_s,
        "accuracy": found,
        "recall_by_layer": in_engine,
    }


class StateFile:
    """A core.policy.predict.nets.training.TrainingState in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self) -> Mapping[str, torch.Tensor] | None:
        return load_file(self._file) if self._file.exists() else None

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        part = self._file.with_name(f"{self._file.name}.part")
        save_file(dict(tensors), part)
        part.replace(self._file)

    def drop(self) -> None:
        self._file.unlink(missing_ok=True)


class Files:
    """The runs, the state of a training, and the profile with its network, in a folder that stays."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.profile = folder, folder / "profile"

    @property
    def state(self) -> Path | None:
        """What a training that was interrupted has learnt: it goes on with the runs that it began with."""
        return next(self.folder.glob("net-*.state"), None)

    def part(self, number: int) -> Path:
        return self.folder / f"runs-{number:05d}.safetensors"

    def write(self, number: int, rows: Sequence[Passage]) -> None:
        """Keep a part: it is complete when its file is there."""
        tensors = {
            "ids": torch.tensor([*chain.from_iterable(one.ids for one in rows)], dtype=torch.int32),
            "lengths": torch.tensor([[len(one.prompt), len(one.ids)] for one in rows]),
            "routes": torch.cat([one.routes for one in rows]),
        }
        part = self.part(number).with_suffix(".part")
        save_file(tensors, part)
        part.replace(self.part(number))

    def passages(self) -> list[Passage]:
        """All runs that are kept."""
        found = []
        for file in sorted(self.folder.glob("runs-*.safetensors")):
            one, at = load_file(file), 0
            ids, routes = one["ids"].tolist(), one["routes"]
            for prompt, length in one["lengths"].tolist():
                found.append(Passage(ids[at : at + prompt], ids[at : at + length], routes[at : at + length]))
                at += length
        return found


def write(run: Run, engine: Engine, prompts: Sequence[Sequence[int]], files: Files, runs: int, seconds: float) -> float:
    """Has the model answer the prompts again and again, the likeliest way first and then with draws, until there are
    `runs` runs or the time is up; what is kept is not written again. The seconds that it took."""
    began_s, parts = time.perf_counter(), -(-runs // PART)
    for number in range(parts):
        if files.part(number).exists():
            continue
        if time.perf_counter() - began_s > seconds:
            break
        first = number * PART
        files.write(number, list(answered(engine, prompts, first, min(PART, runs - first))))
        run.say(f"writing: {min(first + PART, runs):,} of {runs:,} runs")
    return time.perf_counter() - began_s


def answered(engine: Engine, prompts: Sequence[Sequence[int]], first: int, count: int) -> Iterator[Passage]:
    """Runs `first` to `first + count`: the n-th goes over prompt n modulo their number."""
    numbers = range(first, first + count)
    requests = [
        BatchRequest(
            number,
            Ids(prompts[number % len(prompts)]),
            Sampling(temperature=0.0 if number < len(prompts) else 1.0, seed=number, max_new_tokens=ANSWER),
        )
        for number in numbers
    ]
    steps: dict[int, StepRecord] = {}
    drawn: dict[int, list[int]] = {number: [] for number in numbers}
    for one in engine.generate_many(requests, SEQUENCES):
        if one.piece is not None and one.piece.step is not None:
            steps[one.piece.step.index] = one.piece.step
        if one.piece is not None and one.piece.kind == "token":
            drawn[int(str(one.key))].append(int(one.piece.token or 0))
    routes: dict[int, list[Any]] = {}  # by the engine's own number of a request: prompts are begun in their order
    for step in steps.values():
        at = 0
        for request, rows in step.rows:
            routes.setdefault(request, []).append(step.ids[:, at : at + rows].transpose(1, 0, 2))
            at += rows
    for number, parts in zip(numbers, routes.values(), strict=True):
        prompt, chosen = prompts[number % len(prompts)], np.concatenate(parts)
        ids = [*prompt, *drawn[number]][: len(chosen)]
        yield Passage(
            prompt, ids, torch.from_numpy(chosen.astype(np.uint8 if engine.shape.experts <= 256 else np.int16))
        )


def trained(
    run: Run, engine: Engine, data: Sequence[Passage], files: Files, seconds: float
) -> tuple[path.RoutingPathNet, dict[str, Any]]:
    """The network, and how it was trained: EPOCHS over the data, or as many as the time allows by its first steps. The
    epochs are kept with the state, so that a training that goes on has the schedule that it began with."""
    each = -(-len(data) // BATCH)
    if files.state:
        epochs = int(files.state.stem.split("-")[1])
    else:
        began_s = time.perf_counter()
        path.train(data[: BATCH * TRIED], experts=engine.shape.experts, epochs=1, batch=BATCH)
        step_s = (time.perf_counter() - began_s) / min(TRIED, each)
        epochs = max(1, min(EPOCHS, math.floor(seconds / step_s / each)))
        run.say(f"{1e3 * step_s:.0f} ms a step of {BATCH} runs: {epochs} epochs of {each} steps")
    said = -1

    def progress(text: str, share: float) -> None:
        nonlocal said
        if int(20 * share) > said:
            said = int(20 * share)
            run.say(f"training, {share:.0%}")

    began_s = time.perf_counter()
    state = StateFile(files.folder / f"net-{epochs}.state")
    net = path.train(data, experts=engine.shape.experts, epochs=epochs, batch=BATCH, progress=progress, state=state)
    assert net is not None
    about = {"epochs": epochs, "steps": epochs * each, "training_s": time.perf_counter() - began_s}
    return net, about


def with_net(engine: Engine, texts: Sequence[Any], net: path.RoutingPathNet) -> Any:
    """A profile of the model that has this network."""
    tensors, settings = path.to_tensors(net)
    profile = calibrate(engine, texts, parts={"counts"}, limit=400)
    return replace(profile, nets=tensors, settings={**profile.settings, **settings})


def table(r: Result) -> list[str]:
    rows = [
        (f"{size}: {name}", *(f"{row[figure]:.1%}" for figure in ("accuracy", "precision")), f"{row['named']:.1f}")
        for size, of in r["accuracy"].items()
        for name, row in of.items()
    ]
    layers = [(name.replace("_", " "), *(f"{one:.0%}" for one in of)) for name, of in r["recall_by_layer"].items()]
    return [
        f"{headline(r)}; trained on {r['runs']:,} runs ({r['runs_of_paper']:,} in the paper) of {r['prompts']:,} "
        f"prompts, {r['trained_tokens']:,} tokens, {r['epochs']} epochs",
        "Sequences at a time: what is named before a pass",
        *grid(("", "recall", "precision", "experts named a layer"), rows),
        f"Recall@{r['top_k']} in the engine, one sequence, by layer:",
        *grid(("", *[""] * r["layers"]), layers),
    ]


SUITE = Suite(measure, table, small={"minutes": 1, "tokens": 6})
