"""Times the compute of a decode pass on this machine, without copies.

The result selects the number of CPU threads and scales an emulated link.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from core.memory.codec.native.threads import TORCHS, share
from core.runtime.batch import Batch, Share
from core.runtime.recorder import Recorder
from core.runtime.sequence_kv import SequenceKV
from core.system.native.contention import watch
from core.types import Phase

PASSES = 9
LONGEST_S = 0.5  # time limit per thread count; a slow model is timed over fewer passes
WORTH_IT = 0.97  # more threads must be this much faster: the time excludes what they cost the rest of the machine


class Split(NamedTuple):
    """CPU threads for torch's operations and for steps of our own: torch's for both (`ours` = TORCHS), where they can
    be had. Both kinds spin while they wait for work, and within a token they alternate within microseconds, so of
    threads of both kinds only one can be several."""

    plain: int
    ours: int = TORCHS

    @property
    def most(self) -> int:
        return max(self)


class Threads:
    """CPU threads: `token` to decode, all of them for a prompt."""

    def __init__(self, token: Split | None = None, *, own: bool = False) -> None:
        """`own`: all of a pass is computed by threads of our own."""
        self._most = most = torch.get_num_threads()
        self.token, self._prompt = token or Split(most), Split(1, most) if own else Split(most)

    def use(self, phase: Phase, tokens: int = 0) -> None:
        """Set the calling thread's thread counts for a pass over `tokens` tokens, by default for one token or a long
        prompt. Tokens of several sequences are computed as those of a prompt are."""
        watch.computing()
        wanted = self.token if phase == "decode" and tokens <= 1 else self._prompt
        if torch.get_num_threads() != wanted.plain:
            torch.set_num_threads(wanted.plain)
        share(wanted.ours)

    def rest(self) -> None:
        """Give torch back the threads that it had: between answers they are those of whatever else this process
        computes, above all of the next model's load, which chooses among them."""
        torch.set_num_threads(self._most)
        share(1)


def choose_threads(
    device: torch.device,
    asked: int,
    time_pass_ms: Callable[[], float],
    *,
    ours: bool = False,
    own: bool = False,
) -> tuple[Threads, float]:
    """Threads for a model, and the milliseconds of a decode pass with them (0 on a GPU, where nothing is timed).

    `asked` = 0 picks the fastest of 1, 2, 4 ... all; `ours`: some of a pass is computed by threads of our own, `own`:
    all of it.
    """
    if device.type != "cpu":
        return Threads(), 0.0
    most = torch.get_num_threads()
    best, best_ms = Split(most), float("inf")
    counts = [asked] if asked else sorted({min(2**i, most) for i in range(most.bit_length() + 1)})
    ways = [[Split(1, n)] if own else [Split(n), Split(1, n)] if ours and n > 1 else [Split(n)] for n in counts]
    for split in [way for some in ways for way in some]:
        torch.set_num_threads(split.plain)
        share(split.ours)
        pass_ms = time_pass_ms()
        if pass_ms < (WORTH_IT if split.most > best.most else 1.0) * best_ms:
            best, best_ms = split, pass_ms
    torch.set_num_threads(most)
    share(1)
    return Threads(best, own=own), best_ms


def time_pass(
    compute: Callable[[Batch], object], device: torch.device, kv: SequenceKV, recorder: Recorder, context: int
) -> float:
    """Milliseconds of one decode pass without this thread's waits for copies: the least of a few, as other programs
    only ever add to it. No more passes than `kv`, which is empty, has room for: a `context` of at least 2 tokens.
    Discards what these passes recorded."""
    batch, passes = Batch("decode", (Share([0], kv),)), list[float]()
    watch.computing()
    while len(passes) < min(PASSES, context) and (len(passes) < 2 or sum(passes) < LONGEST_S):
        recorder.begin(batch)
        began_s = time.perf_counter()
        compute(batch)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        passes.append(time.perf_counter() - began_s - recorder.stall_s)
    recorder.forget()
    return min(passes) * 1e3
