"""bench turns: does the next turn of a growing chat cost what its new tokens cost, and are its logits the right bits?

A turn is requested as token ids: all of the text so far, and new tokens. Its TTFT is compared with that of a prompt of
the new tokens alone, read before the chat begins (`ratio`) or between its turns, so that the chat's KV has to wait in
host memory (`moved_ratio`). The logits that its tokens were drawn from are compared bit by bit with those of one
continuous run of the same passes, and in size with those of reading each prompt anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

import torch

from bench.harness.engines import stats_of, token_stream
from bench.harness.report import grid
from bench.harness.run import RESIDENT, Result, Run, Suite
from core.engine import Engine
from core.settings.config import Settings
from core.settings.sampling import Sampling
from core.types import AnswerStats, Ids

GOAL = 1.3  # for TTFT of a turn over that of its new tokens alone
FIRST, NEW, ANSWER = 256, 35, 16  # tokens of the first prompt, of each later turn, and of an answer


@dataclass(slots=True)
class Chat:
    """A growing chat: its text, and of every turn its statistics and the logits [V] that its tokens were drawn from."""

    ids: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)  # length of each turn's prompt
    stats: list[AnswerStats] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


def measure(run: Run, model: str = "demo", rounds: int = 5, turns: int = 10) -> Result:
    engine = run.engine(model, RESIDENT, endless=True, context=FIRST + turns * (NEW + ANSWER))
    stream = token_stream(engine)
    parts = [list(islice(stream, NEW if turn else FIRST)) for turn in range(turns)]
    ratios: dict[str, list[list[float]]] = {"ratio": [], "moved_ratio": []}
    alone: list[list[float]] = []
    for number in run.rounds(rounds):
        _forget(engine)
        before = [_alone_ms(engine, part) for part in parts[1:]]
        chat, _ = _chat(engine, parts, between=False)
        moved, between = _chat(engine, parts, between=True)
        if number:
            alone.append(before)
            ratios["ratio"].append(_ratios(chat, before))
            ratios["moved_ratio"].append(_ratios(moved, between))
    run.say("comparing logits")
    return {
        **{name: median(one for each in found for one in each) for name, found in ratios.items()},
        "goal": GOAL,
        "by_turn": {name: [median(one) for one in zip(*of, strict=True)] for name, of in ratios.items()},
        "alone_ms": [median(one) for one in zip(*alone, strict=True)],
        "reused": [stats.cached_tokens for stats in chat.stats],
        "read": [stats.prompt_tokens - stats.cached_tokens for stats in chat.stats],
        "kept_bytes": moved.stats[-1].kept_bytes,
        "same_bits": _same(chat.logits, _continuous(engine, chat)) and _same(chat.logits, moved.logits),
        **_anew(engine, chat),
    }


def _forget(engine: Engine) -> None:
    """Drops the KV of all texts."""
    engine.change({"kv_chats": 0})
    engine.change({"kv_chats": Settings().kv.chats})


def _alone_ms(engine: Engine, part: Sequence[int]) -> float:
    """TTFT of a prompt of these tokens and one more, the last of an answer: as many as the turn computes."""
    return stats_of(engine, [part[0], *part], 1).ttft_ms


def _chat(engine: Engine, parts: Sequence[Sequence[int]], *, between: bool) -> tuple[Chat, list[float]]:
    """A chat from its beginning. `between`: before each turn but the first its new tokens are read alone; returns
    their TTFTs."""
    _forget(engine)
    chat, alone = Chat(), list[float]()

    def draw(ids: Sequence[int], logits: torch.Tensor) -> int:
        chat.logits.append(logits[0].clone())
        return int(logits[0].argmax())

    for turn, part in enumerate(parts):
        if between and turn:
            engine.fresh_cache()  # moves the chat's KV to host memory, outside what is timed
            alone.append(_alone_ms(engine, part))
        chat.ids += part
        chat.prompts.append(len(chat.ids))
        for piece in engine.generate(Ids(chat.ids), Sampling(max_new_tokens=ANSWER), draw=draw, reuse=True):
            if piece.token is not None:
                chat.ids.append(piece.token)
            if piece.stats is not None:
                chat.stats.append(piece.stats)
    return chat, alone


def _ratios(chat: Chat, alone: Sequence[float]) -> list[float]:
    return [stats.ttft_ms / ms for stats, ms in zip(chat.stats[1:], alone, strict=True)]


def _continuous(engine: Engine, chat: Chat) -> list[torch.Tensor]:
    """The logits that follow the same tokens in one KV: each prompt's new part, then the answer token by token."""
    found: list[torch.Tensor] = []
    with engine.workbench("bench turns") as bench:
        kv = bench.kv.fresh()
        for length in chat.prompts:
            while kv.length < length:
                logits = bench.run(chat.ids[kv.length : min(length, kv.length + bench.chunk)], kv)
            found.append(logits[-1].clone())
            decoded = [chat.ids[at : at + 1] for at in range(length, length + ANSWER - 1)]
            found += [bench.run(token, kv, "decode")[-1].clone() for token in decoded]
    return found


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _anew(engine: Engine, chat: Chat) -> dict[str, float]:
    """How far the logits of each turn's first token are from those of its whole prompt read anew: the largest
    difference as a share of the largest logit, and the share of turns with the same likeliest token."""
    most, same = 0.0, 0
    with engine.workbench("bench turns") as bench:
        for turn, length in enumerate(chat.prompts):
            kv = bench.kv.fresh()
            while kv.length < length:
                logits = bench.run(chat.ids[kv.length : min(length, kv.length + bench.chunk)], kv)
            ours, theirs = chat.logits[turn * ANSWER].float(), logits[-1].float()
            most = max(most, float((ours - theirs).abs().max() / theirs.abs().max()))
            same += int(ours.argmax() == theirs.argmax())
    return {"anew_difference": most, "anew_same_likeliest": same / len(chat.prompts)}


def table(r: Result) -> list[str]:
    columns = r["by_turn"]["ratio"], r["by_turn"]["moved_ratio"], r["alone_ms"], r["reused"][1:], r["read"][1:]
    rows = [
        (str(turn), str(reused), str(read), f"{ms:.1f}", f"{ratio:.2f}", f"{moved:.2f}")
        for turn, (ratio, moved, ms, reused, read) in enumerate(zip(*columns, strict=True), 2)
    ]
    return [
        f"{r['model']}: {r['turns']} turns, medians of {r['rounds']} rounds; TTFT over that of new tokens alone:",
        *grid(("turn", "reused", "read", "alone ms", "ratio", "from host memory"), rows),
        f"  ratio {r['ratio']:.2f}, goal <= {r['goal']}; where the KV waited in host memory {r['moved_ratio']:.2f}",
        f"  logits of one continuous run: {'the same bits' if r['same_bits'] else 'DIFFERENT'}; of prompts read "
        "anew: at "
        f"most {r['anew_difference']:.1e} of the largest away, {r['anew_same_likeliest']:.0%} with the same "
        "likeliest token",
    ]


SUITE = Suite(measure, table, small={"rounds": 1, "turns": 3})
