"""Starts the server, its clients and an attacker, samples its resources, and ends on time, by Ctrl-C, or when the
server has died."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.client.process import ROOT
from bench.soak.attacker import Attacker
from bench.soak.clients import Client
from bench.soak.operator import Operator
from bench.soak.result import Seen, result
from bench.soak.score import Score
from bench.soak.server import MeasuredServer
from core.types import ModelShape

CLIENTS = 10
SMALL_MINUTES = 0.2
SAMPLE_S, PROBE_S, WRITTEN_S = 5.0, 0.5, 30.0
OPERATOR_S = 40.0


def run(
    minutes: float = 60.0,
    seed: int = 1,
    small: bool = False,
    so_far: Callable[[dict[str, Any]], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """`so_far` is called with the result every half minute, to be saved. Raises MoestroError when no server starts."""
    minutes = SMALL_MINUTES if small else minutes
    with tempfile.TemporaryDirectory(prefix="moestro-soak-") as folder, MeasuredServer(Path(folder)) as server:
        seen, score = Seen(minutes, seed, CLIENTS), Score()
        say(f"{CLIENTS} clients at {server.url} for {minutes:g} minutes; Ctrl-C ends it with the result so far")
        calm, ended = threading.Event(), threading.Event()
        calm.set()
        dice = random.Random(seed)
        shape = _shape(server.http.ask("/live/frame")[1])
        everybody: list[threading.Thread] = [
            Client(server.url, random.Random(dice.random()), shape, score, calm, ended) for _ in range(CLIENTS)
        ]
        everybody.append(Attacker(server.url, random.Random(dice.random()), score, calm, ended))

        def unloaded() -> None:
            if (use := server.held()) is not None and not use.model:
                seen.unloaded.append(use)

        operator_dice, pause_s = random.Random(dice.random()), 1.0 if small else OPERATOR_S
        everybody.append(Operator(server.url, server.home, operator_dice, score, calm, ended, pause_s, unloaded))
        probe = subprocess.Popen(
            [sys.executable, "-m", "bench.soak.probe", server.url, str(PROBE_S)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        reader = threading.Thread(target=_listen, args=(probe, seen, score), daemon=True)
        for one in (*everybody, reader):
            one.start()
        try:
            _watch(server, seen, score, minutes * 60, SAMPLE_S if not small else 0.5, so_far, say)
        except KeyboardInterrupt:
            say("Stopped; this is the result so far")
            seen.stopped = True
        ended.set()
        _end_probe(probe)
        reader.join(10)
        for one in everybody:
            one.join(20)
        if problem := server.end():
            score.error(problem)
        seen.recorded = server.recorded()
        return result(seen, score, server.complaints(), finished=True)


def _shape(frame: bytes) -> ModelShape:
    """Reads the model shape from a frame's header, whose length is in the first four bytes."""
    return ModelShape(**json.loads(frame[4 : 4 + int.from_bytes(frame[:4], "little")])["shape"])


def _watch(
    server: MeasuredServer,
    seen: Seen,
    score: Score,
    seconds: float,
    pause_s: float,
    so_far: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
) -> None:
    began = written = time.monotonic()
    while (now := time.monotonic()) - began < seconds:
        held = server.held()
        if held is None or server.process.poll() is not None:
            score.error(f"the server died: {server.complaints()[-5:]}")
            return
        seen.held.append(held)
        if now - written >= WRITTEN_S:
            written = now
            seen.recorded = server.recorded()
            so_far(result(seen, score, server.complaints(), finished=False))
            use = held.server
            say(
                f"{(now - began) / 60:5.1f} min  {use.own / 1e6:6.0f} MB  {use.handles} handles  {use.threads} "
                f"threads  {len(held.children)} child processes  {seen.recorded[0]} tokens  {score.errors} errors"
            )
        time.sleep(min(pause_s, max(0.0, seconds - (now - began))))


def _listen(probe: subprocess.Popen[str], seen: Seen, score: Score) -> None:
    assert probe.stdout is not None
    for line in probe.stdout:
        path, status, took = line.split()
        seen.took_ms.setdefault(path, []).append(float(took))
        if status not in ("200", "204"):
            score.error(f"{path}: status {status} for the probe")


def _end_probe(probe: subprocess.Popen[str]) -> None:
    assert probe.stdin is not None
    probe.stdin.close()
    try:
        probe.wait(30)
    except subprocess.TimeoutExpired:
        probe.kill()
