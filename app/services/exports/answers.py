"""The answers table of an export: each answer's statistics, lossy choices, and their quality loss."""

import sqlite3
from typing import Any

import pandas as pd

from app.store.row_checks import FLAG, LATER_STATS, QUALITY, STATS, TEXT, WHOLE, quality_of, stats_of
from core.settings.param import declared
from core.settings.sampling import Sampling

DEFINITIONS: dict[str, str] = {
    "load": "The loading of a model the row belongs to; see manifest.json.",
    "chat": "The chat it is in.",
    "answer": "Its number, as in tokens.csv.",
    "state": "How it ended: done, stopped, error or interrupted.",
    "prompt_tokens": "Tokens of the prompt.",
    "cached_tokens": "Of the prompt's, those taken over from an earlier answer's KV cache, which were not computed.",
    "begun_tokens": "Of the prompt's, those of the answer's own beginning, where it was cut and continued.",
    "new_tokens": "Tokens of the answer, since it was continued.",
    "ttft_ms": "From its turn to its first token, in milliseconds.",
    "tpot_ms": "Mean over the tokens after the first, in milliseconds.",
    "hit_rate": "Of its decoded tokens: hits / requests.",
    "exact": "No lossy option changed the result: in the fast arithmetic, it has the bits of everything resident.",
    "arithmetic": "What computed it: reference = transformers' own modules and products, fast = Moestro's own.",
    "closeness": "How far logits may be from transformers' own even so, as a share of the largest, found in fp32 with "
    "a tiny random model of its type, or of the fast arithmetic as measured with this one; 0: no bit differs, empty: "
    "not measured.",
    "distance_kl": "KL(reference || fast) of the model on a text, in nats per token; empty: not measured.",
    "distance_tokens": "Tokens of that text.",
    "changed": "(token, layer, expert) assignments that were not the router's.",
    "assignments": "All assignments of its prompt and its tokens.",
    "rate": "changed / assignments.",
    "scored": "Tokens whose next-token distribution was compared with the exact model's; empty: it was not scored.",
    "kl": "Mean over those of KL(exact || lossy), in nats. Distributions are softmax of the model's own logits.",
    "kl_most": "The largest of them.",
    "agreement": "Share of those whose likeliest token is the exact model's.",
    "perplexity": "Of the exact model on the answer's tokens.",
    "saved_ms": "Estimate of the waiting for copies that was saved, in milliseconds a decoded token: missing experts "
    "for which nothing was fetched, times what a miss has cost in the session.",
    "note": "Why it was not scored.",
    "seed": "With which its tokens were drawn; with it and the next five columns the answer can be repeated.",
    **{
        p.name: f"How its tokens were drawn: {p.title.lower()}."
        for p in declared(Sampling).values()
        if p.name not in ("seed", "max_new_tokens")
    },
}
_SAMPLING = tuple(name for name in declared(Sampling) if name != "max_new_tokens")
_STATS = (
    *(
        "prompt_tokens cached_tokens begun_tokens new_tokens ttft_ms tpot_ms hit_rate exact closeness distance_kl "
        "distance_tokens changed assignments"
    ).split(),
)
_QUALITY = ("scored", "kl", "kl_most", "agreement", "perplexity", "saved_ms", "note")

_KINDS: dict[str, tuple[str, ...]] = {**STATS, **LATER_STATS, **QUALITY}
_KIND_TYPES: dict[tuple[str, ...], str] = {WHOLE: "Int64", FLAG: "boolean", TEXT: "object"}
_DTYPES = {
    **{name: _KIND_TYPES.get(_KINDS.get(name, ()), "float64") for name in DEFINITIONS},
    **dict.fromkeys(("load", "chat", "answer", "seed", "top_k"), "Int64"),
    "state": "object",
}


def answers(db: sqlite3.Connection, load: int, chat: int | None) -> pd.DataFrame:
    """One row for each ended answer of a load in a chat, or in all chats; replaced answers included."""
    where, values = ("AND m.chat = ?", (load, chat)) if chat is not None else ("", (load,))
    own = "CASE WHEN json_valid(m.stats) THEN json_extract(m.stats, '$.load') END"
    under = f"coalesce({own} = ?, m.id IN (SELECT answer FROM steps WHERE load = ?))"
    found = db.execute(  # an answer of a batch may have no pass of its own: each is recorded once
        f"SELECT m.* FROM messages m WHERE {under} {where} ORDER BY m.id",
        (load, *values),
    )
    rows = [_row(load, row) for row in found]
    return pd.DataFrame(rows, columns=list(DEFINITIONS)).astype(_DTYPES)


def _row(load: int, row: sqlite3.Row) -> dict[str, Any]:
    stats, quality = stats_of(row["stats"]) or {}, quality_of(row["quality"]) or {}
    changed, assignments = stats.get("changed"), stats.get("assignments")
    return {
        "load": load,
        "chat": row["chat"],
        "answer": row["id"],
        "state": row["state"],
        **{name: stats.get(name) for name in _STATS},
        "arithmetic": stats.get("arithmetic", "reference") if stats else None,  # earlier versions had no other
        "rate": changed / assignments if assignments else None,
        **{name: quality.get(name) for name in _QUALITY},
        **{name: stats.get("sampling", {}).get(name) for name in _SAMPLING},
    }
