"""Writes the model card from measurements: `python -m demo.card --model assets/demo`.

Everything in the card that is a number is measured here or recorded by the training run.
"""

import argparse
import json
import platform
import random
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .corpus import WORK, read_questions
from .evaluate import greedy_agreement, later_turns, load, measure
from .model import FULL_SIZE, SEED_SIZE
from .scoring import encode
from .stages import NOISE, history
from .traces import expert_likeness, hit_rates, perplexity, record

TEMPLATE = Path(__file__).with_name("card.md")
TRACE_QUESTIONS, TRACE_WINDOWS, WINDOW = 300, 24, 256
GREEDY_CHECKED = 100


def measurements(folder: Path, work: Path) -> dict[str, Any]:
    """All figures of the card for the shipped model."""
    model, tokenizer = load(folder)
    rows = read_questions(folder / "questions.jsonl")
    figures, _ = measure(model, tokenizer, rows)
    figures |= later_turns(model, tokenizer, rows)
    figures["greedy_agreement"] = greedy_agreement(model, tokenizer, rows, GREEDY_CHECKED)
    exact, _ = measure(*load(folder, dtype="float32"), rows)
    figures["float32"] = {key: value for key, value in exact.items() if key.startswith("exact_")}
    held = np.load(work / "text-held.npy").tolist()
    figures["held_out_perplexity"] = perplexity(model, held)
    trained = [row for row in rows if row["split"] == "trained"]
    asked = random.Random(5).sample(trained, min(TRACE_QUESTIONS, len(trained)))
    requests = [prompt + answer for prompt, answer in encode(tokenizer, asked)]
    requests += [held[start * WINDOW : (start + 1) * WINDOW] for start in range(TRACE_WINDOWS)]
    random.Random(6).shuffle(requests)
    figures["expert_likeness"] = expert_likeness(model, requests[::8])
    routed = record(model, requests)
    figures["trace_tokens"] = len(routed)
    figures["hit_rates"] = hit_rates(routed, model.config.num_experts)
    figures["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    figures["bytes"] = sum(path.stat().st_size for path in folder.iterdir())
    return figures


def percent(share: float) -> str:
    """A share as text."""
    return f"{100 * share:.1f} %"


def exact_table(f: dict[str, Any]) -> str:
    """Markdown table of exact match."""
    count = f["questions"]
    rows = [
        ("trained questions, one a fact", count["trained"], f["exact_trained"], f["float32"]["exact_trained"]),
        ("the same facts, phrasings never trained", count["unseen"], f["exact_unseen"], f["float32"]["exact_unseen"]),
        ("of these, phrasings held out from the start", count["unseen_first"], f["exact_unseen_first"],
         f["float32"]["exact_unseen_first"]),
        ("of these, phrasings written last", count["unseen_added_later"], f["exact_unseen_added_later"],
         f["float32"]["exact_unseen_added_later"]),
        ("unknown names and other subjects, never trained", count["unknown"], f["exact_unknown"],
         f["float32"]["exact_unknown"]),
        ("small talk", count["chat"], f["exact_chat"], f["float32"]["exact_chat"]),
    ]  # fmt: skip
    lines = ["| questions | count | as shipped, bf16 | computed in float32 |", "|---|---|---|---|"]
    lines += [f"| {name} | {n} | {percent(shipped)} | {percent(exact)} |" for name, n, shipped, exact in rows]
    return "\n".join(lines)


def hit_table(f: dict[str, Any]) -> str:
    """Markdown table of cache hit rates."""
    lines = ["| slots for a layer's experts | " + " | ".join(f["hit_rates"]) + " |", "|---|---|---|---|"]
    for share in ("25%", "50%", "75%"):
        rates = " | ".join(f"{rates[share]:.3f}" for rates in f["hit_rates"].values())
        lines.append(f"| {share.replace('%', ' %')} | {rates} |")
    return "\n".join(lines)


def card(f: dict[str, Any], trained: dict[str, Any], notes: str) -> str:
    """The text of the model card, from card.md; `notes` describe other events of the run."""
    later = ", ".join(
        f"{percent(f[f'later_turn_{split}'])} {name}"
        for split, name in (("trained", "trained"), ("unseen", "unseen phrasings"), ("unknown", "unknown names"))
    )
    text = TEMPLATE.read_text(encoding="utf-8").format(
        f=f,
        trained=trained,
        notes=notes,
        later=later,
        python=".".join(platform.python_version_tuple()[:2]),
        full=FULL_SIZE,
        seed=SEED_SIZE,
        clones=FULL_SIZE.experts // SEED_SIZE.experts,
        noise=NOISE,
        parameters=f["parameters"] / 1e6,
        tokens=trained["tokens"] / 1e6,
        minutes=round(trained["seconds"] / 60),
        known_called_unknown=percent(f["known_called_unknown"]),
        greedy_checked=GREEDY_CHECKED,
        greedy_agreement=percent(f["greedy_agreement"]),
        likeness=", ".join(f"{value:.2f}" for value in f["expert_likeness"]),
        exact_table=exact_table(f),
        hit_table=hit_table(f),
    )
    return wrapped(text)


def wrapped(text: str) -> str:
    """Markdown with its paragraphs rewrapped; headings, tables and the front matter are unchanged."""
    blocks = text.strip().split("\n\n")
    filled = [
        block if block.startswith(("#", "|", "---")) else textwrap.fill(block, 110, break_on_hyphens=False)
        for block in blocks
    ]
    return "\n\n".join(filled) + "\n"


def run_notes(work: Path) -> str:
    """The contents of notes.md in the work folder, written by hand during the training run; "" without one."""
    path = work / "notes.md"
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def write_card(folder: Path, work: Path) -> dict[str, Any]:
    """Measure the shipped model, write its README.md, return the figures."""
    figures = measurements(folder, work)
    (folder / "README.md").write_text(card(figures, history(work), run_notes(work)), encoding="utf-8")
    return figures


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("assets/demo"))
    parser.add_argument("--work", type=Path, default=WORK)
    args = parser.parse_args()
    torch.set_num_threads(2)
    print(json.dumps(write_card(args.model, args.work)))


if __name__ == "__main__":
    main()
