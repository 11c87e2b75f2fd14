"""Stored messages as displayed by the chat: the text, the line of statistics, and its other branches."""

from __future__ import annotations

from typing import Any

from app.services.exports.transcript import opened
from app.store import Message
from app.wording import lossy, scored
from core.system.wording import format_bytes

REASONS = {
    "stop": "finished",
    "length": "length limit reached",
    "context": "context full",
    "cancelled": "stopped by you",
}
STATES = {
    "stopped": "stopped by you",
    "edited": "edited by you",
    "interrupted": "interrupted: Moestro ended while it was being written",
}


def shown(messages: list[Message]) -> dict[str, Any]:
    """The value of the chat, drawn by assets/ui/chat/view.js: its finished messages in order; the one being written is
    in the tail. `line` = the statistics of an answer, `opened` = it starts in the middle of its reasoning, `cut` = it
    can be continued.
    """
    return {
        "messages": [
            {
                "id": m.id,
                "role": m.role,
                "text": m.text,
                "line": "" if m.role == "user" else statistics(m),
                "opened": opened(m),
                "cut": m is messages[-1] and is_cut(m),
                "branches": list(m.branches),
            }
            for m in messages
            if m.state != "writing"
        ]
    }


def is_cut(message: Message) -> bool:
    """Whether an answer ended before the model ended it, or was edited."""
    if message.role == "user" or message.state == "writing" or message.unsaved:
        return False
    return message.state != "done" or (message.stats or {}).get("reason") in ("length", "context")


def statistics(message: Message) -> str:
    """One line with the answer's statistics. Prefill and decode hit rates are never mixed."""
    if message.unsaved:
        return (
            f"Not saved: {message.unsaved} This answer stays here and is saved as soon as possible, unless "
            f"Moestro is closed before."
        )
    if message.error:
        return f"Ended early: {message.error}"
    if (stats := message.stats) is None:
        return STATES.get(message.state, "no statistics")
    spent = stats["compute_ms"] + stats["stall_ms"] + stats["idle_ms"]
    tokens = f"{stats['new_tokens']} tokens"
    if begun := stats.get("begun_tokens"):
        tokens += f" more, after {begun}"
    parts = [f"{stats['tok_s']:.1f} tok/s", tokens, f"TTFT {duration(stats['ttft_ms'])}"]
    if stats.get("cached_tokens"):
        read = stats["prompt_tokens"] - stats["cached_tokens"]
        parts.append(f"prompt: reused {stats['cached_tokens']}, read {read}")
    if stats["hit_rate"] is not None:
        parts.append(f"hit rate {100 * stats['hit_rate']:.1f} %")
    if stats.get("drafted"):
        parts.append(f"{stats['accepted']} of {stats['drafted']} guessed tokens were right")
    if stats.get("disk_bytes"):
        missed = stats["disk_misses"]
        parts.append(f"{missed} {'miss' if missed == 1 else 'misses'} from disk, prompt included")
        parts.append(f"{format_bytes(stats['disk_bytes'])} read")
    if spent:
        parts.append(f"stall {100 * stats['stall_ms'] / spent:.0f} %")
    if stats.get("queued_ms", 0) >= 1000:
        parts.append(f"queued {duration(stats['queued_ms'])}")
    parts += [REASONS.get(stats["reason"], str(stats["reason"])), lossy(stats), *scored(message.quality)]
    if stats.get("sampling", {}).get("temperature"):
        parts.append(f"seed {stats['sampling']['seed']}")
    if stats.get("unrecorded"):
        parts.append(f"{stats['unrecorded']} passes not recorded, because the disk was full")
    if stats["emulated"]:
        parts.append("emulated link")
    return " · ".join(parts)


def duration(ms: float) -> str:
    """Milliseconds, or seconds from one second on."""
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"


def used_tokens(messages: list[Message]) -> int:
    """Context tokens in use when the last answer ended, as counted by the engine."""
    for message in reversed(messages):
        if message.stats is not None:
            return int(message.stats["prompt_tokens"]) + int(message.stats["new_tokens"])
    return 0
