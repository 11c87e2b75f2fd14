"""Calibration: runs texts through a loaded model, exactly, and gathers the parts of its profile."""

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from core.engine import Engine
from core.engine.texts import Text, Tokens, shortened, tokenize
from core.errors import ProfileError, SettingError
from core.measure.calibrate.hit_curves import POLICY
from core.measure.calibrate.nets import NETS
from core.measure.calibrate.observe import Observer
from core.measure.calibrate.paths import Paths
from core.measure.calibrate.states import States
from core.measure.calibrate.times import FEWEST_TOKENS, PASSES, PROMPT, measure
from core.measure.calibrate.written import Writer
from core.memory.store import Cancelled
from core.policy.allocation.slot_allocation import AHEAD
from core.policy.predict.nets.training import Progress
from core.profile.profile import PARTS, Profile
from core.profile.trace import Trace
from core.runtime.measurement import MeasurementSession
from core.settings.calibration import CalibrationSettings

ROUTING = frozenset({"counts", "pairs", "tae", "path"})  # parts that a trace can provide
SHARES = {"read": 2.0, "write": 4.0, "likeness": 0.5, "times": 0.2, "estimator": 1.0, "path": 2.0}  # of the progress


def calibrate(
    engine: Engine,
    texts: Sequence[Text],
    *,
    parts: Collection[str] = frozenset(PARTS),
    traces: Sequence[Trace] = (),
    source: str = "",
    limit: int = 0,
    warmup: int = 0,
    settings: CalibrationSettings | None = None,
    folder: Path | None = None,
    progress: Progress = lambda text, share: None,
    cancel: threading.Event | None = None,
) -> Profile:
    """Gathers `parts` (names of PARTS) of the loaded model's profile, in one pass over the texts. Each is read as a
    prompt, in windows of at most 2048 tokens, with the true router deciding; at most `limit` tokens, 0 = no limit.
    Routing from `traces` is added. `warmup`: in co-activations the n-th token of a text counts n / warmup up to that
    one, and 1 after it (BuddyMoE section 3.3 (iii), where the weights are left open); 0 = every token counts 1.
    `folder`: where training data are meanwhile, in files without a name; None = the system's folder for temporary
    files. The estimator's quasi-hidden states need default vectors, which are then measured as well. The routing path
    learns from answers that the model writes to the texts' prompts, unless `settings` say otherwise.

    The engine answers no requests meanwhile (BusyError). Afterwards, also when this raises, its settings and hooks are
    restored, and it gives the same logits. Which experts are resident changes, as with any prompt.

    Host memory, L layers of E experts, k active, width H: 24 L E^2 + 655360 L (entropies) + 4 L E H (default vectors) +
    4000 (L E + H) (maps) + 8 L E^2 + 3000 L E (curves) + 128 MiB (estimator) + 256 (4 L + 2 E) H (likeness) bytes, 4
    bytes per token of text, and 4 per token that the path net learns from; training that net takes about 50 kB * L E
    more. Device memory: that of a prompt, and 4 (2 T k + E) H bytes for a chunk of T tokens.

    Raises SettingError for unknown parts or when there is nothing to read, ProfileError for a trace of another model or
    a disk without room for the training data, BusyError, Cancelled."""
    cancel, wanted, settings = cancel or threading.Event(), set(parts), settings or CalibrationSettings()
    _check_parts(engine, wanted)
    for trace in traces:
        check_trace(trace, engine)
    read = [tokens for text in texts if len((tokens := tokenize(engine.prompt.tokenizer, text)).ids)]
    read = shortened(read, limit) if limit else read
    if not read:
        wanted &= (ROUTING if traces else frozenset()) | {"times"}
    if not wanted:
        raise SettingError("There is nothing to calibrate on. Name a text, a folder of texts or a recorded trace.")
    if "estimator" in wanted and settings.estimator_input == "quasi":
        wanted.add("defaults")
    total, shape = sum(len(text.ids) for text in read), engine.shape
    with engine.workbench("The model is being calibrated.") as bench, ExitStack() as stack:
        to = paths = None
        if "estimator" in wanted:
            to = stack.enter_context(closing(States(bench.shape, bench.sites, bench.device, total, settings, folder)))
        if "path" in wanted:
            writes = bool(read) and settings.path_texts == "generated"
            there = total + sum(trace.tokens for trace in traces)
            most = settings.path_most(limit) if writes else min(settings.path_tokens, there)
            paths = stack.enter_context(closing(Paths(shape.layers, shape.experts, shape.top_k, most, folder)))
        seen = Observer(bench, wanted, warmup, to, paths, settings.path_texts == "read")
        return _gather(engine, bench, seen, read, traces, wanted, source, warmup, settings, progress, cancel)


def _check_parts(engine: Engine, wanted: set[str]) -> None:
    """Raises SettingError for parts that there are not, or not of this load; leaves out those that a model of one layer
    does not have."""
    if not wanted or not wanted <= PARTS.keys():
        asked = ", ".join(sorted(wanted - PARTS.keys())) or "without a name"
        raise SettingError(f"A profile has no part {asked}. Its parts: {', '.join(PARTS)}.")
    if engine.text_to_text:
        raise SettingError(
            "A text-to-text model cannot be calibrated. Choose prefetchers and substitutes that need no profile; they "
            "work as with any other model."
        )
    if "times" in wanted and engine.context < FEWEST_TOKENS:
        raise SettingError(
            f"A context of {engine.context} tokens is too short to measure times in. Load the model with a longer one, "
            "or leave times out."
        )
    if engine.shape.layers < 2:
        if wanted <= AHEAD:
            raise SettingError(
                f"{' and '.join(sorted(wanted))}: of a model with a single MoE layer there is no such part."
            )
        wanted -= AHEAD


def check_trace(trace: Trace, engine: Engine) -> None:
    """Raises ProfileError when the trace's head shows that it was recorded with another model."""
    ours = engine.shape.layers, engine.shape.experts, engine.shape.top_k
    name, hashed = trace.model or "another model", str(getattr(trace, "model_hash", ""))
    if hashed and hashed != engine.model_hash:
        raise ProfileError(
            f"This trace was recorded with {name} ({hashed[:12]}), not with {engine.model_name} "
            f"({engine.model_hash[:12]}). Give traces of the model that is calibrated."
        )
    if (trace.layers, trace.experts, trace.top_k) != ours:
        raise ProfileError(
            f"This trace is of a model with {trace.layers} layers of {trace.experts} experts, "
            f"{trace.top_k} active; {engine.model_name} has {ours[0]} of {ours[1]}, {ours[2]} active."
        )


def _gather(
    engine: Engine,
    bench: MeasurementSession,
    seen: Observer,
    read: Sequence[Tokens],
    traces: Sequence[Trace],
    wanted: set[str],
    source: str,
    warmup: int,
    training: CalibrationSettings,
    progress: Progress,
    cancel: threading.Event,
) -> Profile:
    written = read if seen.paths is not None and training.path_texts == "generated" else []
    known = [] if written and wanted <= {"times", "path"} else read  # nothing is learnt from reading them
    settings, stage = dict[str, object](), _stages(wanted, bool(known or traces), bool(written), progress)
    if known or traces:
        with bench.unpaced(), bench.watched(seen.layer, seen.embedding):
            _read(seen, known, traces, stage("read"), cancel)
    if seen.paths is not None and written:
        _write(bench, seen.paths, written, engine.prompt.ends, training.path_answer, stage("write"), cancel)
    found, about, shape = _results(seen, wanted), engine.manifest(), engine.shape
    if seen.likeness is not None:
        report = stage("likeness")
        with bench.unpaced():
            found["likeness"] = seen.likeness.measure(bench, report, cancel)
    if "times" in wanted:
        stage("times")("Measuring times", 0.0)
        found["times"], measured = measure(bench, _some(read), cancel)
        settings["times"] = measured | {name: value for name, value in about.items() if name.startswith("link")}
    nets, recall = dict[str, torch.Tensor](), dict[str, list[float | None]]()
    for name, train in NETS.items():
        if name in wanted and (trained := train(seen, training, stage(name), cancel)) is not None:
            nets |= trained[0]
            settings |= trained[1]
            recall[name] = trained[2]
    if cancel.is_set():  # within the last step of a training
        raise Cancelled
    settings |= {name: about[name] for name in ("format", "dtype", "device", "device_name", "versions")}
    settings |= {"recall": recall} if recall else {}
    settings |= {"pairs": {"warmup": warmup}} if warmup and "pairs" in wanted else {}
    if seen.hits is not None:
        settings["curves"] = {"tokens": seen.hits.tokens, "eviction": POLICY}
    profile = Profile(
        engine.model_name,
        engine.model_hash,
        shape.layers,
        shape.experts,
        shape.top_k,
        shape.hidden,
        seen.tokens or (seen.paths.tokens if seen.paths is not None else 0),
        source or f"{len(read)} texts",
        datetime.now().astimezone().isoformat(timespec="seconds"),
        **found,
        nets=nets,
        settings=settings,
    )
    if seen.paths is not None:
        settings["path_texts"] = "generated" if written else "read"
    settings["gathered"] = _origins(profile, seen)
    progress("Calibrated", 1.0)
    return profile


def _origins(profile: Profile, seen: Observer) -> dict[str, dict[str, object]]:
    """What each part of a profile was gathered from."""
    trained_on = {} if seen.states is None else {"estimator": seen.states.trained}
    trained_on |= {} if seen.paths is None else {"path": seen.paths.tokens}
    return {
        part: {"tokens": trained_on.get(part, seen.tokens), "source": profile.source, "created": profile.created}
        for part in profile.parts()
    }


def _stages(wanted: set[str], reads: bool, writes: bool, progress: Progress) -> Callable[[str], Progress]:
    """Returns a function that gives each stage its own `progress`, which fills that stage's share of the whole."""
    names = wanted | ({"read"} if reads else set()) | ({"write"} if writes else set())
    shares = {name: share for name, share in SHARES.items() if name in names}
    done, whole = 0.0, sum(shares.values())

    def stage(name: str) -> Progress:
        nonlocal done
        before, size = done, shares[name] / whole
        done += size
        return lambda text, share: progress(text, before + size * share)

    return stage


def _read(
    seen: Observer, read: Sequence[Tokens], traces: Sequence[Trace], progress: Progress, cancel: threading.Event
) -> None:
    total = sum(len(text.ids) for text in read) + sum(trace.tokens for trace in traces)
    passes = chain.from_iterable([*map(seen.read, read), *map(seen.replay, traces)])
    for _ in chain((None,), passes):
        if cancel.is_set():
            raise Cancelled
        progress(f"Reading {total:,} tokens", seen.tokens / max(1, total))


def _write(
    bench: MeasurementSession,
    paths: Paths,
    texts: Sequence[Tokens],
    ends: Collection[int],
    most: int,
    progress: Progress,
    cancel: threading.Event,
) -> None:
    """Has the model answer the texts' prompts until `paths` is full."""
    writer, limit = Writer(bench, paths, ends, most), paths.left
    with bench.unpaced(), bench.watched(writer.layer, lambda embedded: None):
        for _ in chain((None,), writer.write(texts, limit)):
            if cancel.is_set():
                raise Cancelled
            progress(f"Writing {limit:,} tokens to learn from", writer.tokens / max(1, limit))


def _results(seen: Observer, wanted: set[str]) -> dict[str, Any]:
    """The arrays of a Profile by name."""
    found: dict[str, Any] = {}
    if seen.activations is not None:
        found |= {"counts": seen.activations.counts} if "counts" in wanted else {}
        if "pairs" in wanted:
            found |= {"pairs": seen.activations.pairs(), "pairs_weighted": seen.activations.pairs_weighted()}
    if seen.entropies is not None:
        found |= {"tae": seen.entropies.percentiles(), "tae_tempered": seen.entropies.tempered()}
    if seen.outputs is not None:
        found["defaults"] = seen.outputs.means()
    if seen.norms is not None:
        found["norms"] = seen.norms.means()
    if seen.peaks is not None:
        found["peaks"] = seen.peaks.most()
    if seen.ahead is not None:
        found |= {"gate_recall": seen.ahead.recall(), "similarity": seen.ahead.similarity()}
        found["default_recall"] = seen.ahead.default_recall()
    if seen.hits is not None:
        found |= seen.hits.arrays()
    if seen.maps is not None:
        found |= {"maps": seen.maps.maps(), "map_keys": seen.maps.keys()}
    return found


def _some(read: Sequence[Tokens]) -> list[int]:
    """A few tokens of the texts for timing; arbitrary ones if there are no texts."""
    found: list[int] = []
    for text in read:
        found += text.ids.tolist()
        if len(found) > PROMPT + PASSES:
            break
    return found if len(found) > 3 else (found or [1]) * 4
