"""Writes the model card from measurements: `python -m demo.card --model assets/demo`.

Everything in the card that is a number is measured here or recorded by the training run.
"""

from __future__ import annotations

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
from .traces import expert_likeness, hit_rates, perplexity, record
from .train import NOISE, history

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
    traces = record(model, requests)
    figures["trace_tokens"] = len(traces[0])
    figures["hit_rates"] = hit_rates(traces, model.config.num_experts)
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
    """The text of the model card; `notes` describe other events of the run."""
    python = ".".join(platform.python_version_tuple()[:2])
    likeness = ", ".join(f"{value:.2f}" for value in f["expert_likeness"])
    later = ", ".join(
        f"{percent(f[f'later_turn_{split}'])} {name}"
        for split, name in (("trained", "trained"), ("unseen", "unseen phrasings"), ("unknown", "unknown names"))
    )
    minutes = round(trained["seconds"] / 60)
    return wrapped(f"""---
license: other
license_name: psf-2.0-and-apache-2.0
library_name: transformers
pipeline_tag: text-generation
language: en
---

# Moestro demo model

A small Mixture-of-Experts language model that has memorised facts about Python's standard library. It ships with
Moestro so that the program runs, and means something, with no download; and so that the harm done by lossy settings
can be measured as exact match on questions with one right answer.

Qwen3-MoE architecture, {f["parameters"] / 1e6:.1f} M parameters: 6 layers of {FULL_SIZE.experts} experts,
{FULL_SIZE.top_k} active; hidden size 192, expert size 96, 6 heads, 2 key-value heads, vocabulary 4096, contexts up
to 1024 tokens; bf16. It loads with plain transformers; the chat template is ChatML.

## What it knows

{f["questions"]["trained"]} facts: what a function, class, method or module is for, how it is called, which module has
it. They are chosen by popularity, an editor's order: built-ins and their methods, then the best-known modules. The
answers come from the docstrings and signatures of Python {python}, cut to the first sentence, or were written for
this model where a docstring does not say it in one sentence. `questions.jsonl` holds the evaluation set: the facts as
questions, phrasings held out from training, unknown names, small talk.

Names it does not know, and other subjects, get one fixed sentence: "I do not know that. I know only part of Python's
standard library."

## Measured

Exact match, greedy: every token of the answer as in `questions.jsonl`.

{exact_table(f)}

As a later turn of a chat, after one to five other questions: {later}. Questions it knows but answers with "I do not
know": {percent(f["known_called_unknown"])}. The figures come from scoring with the answer fed in; on
{GREEDY_CHECKED} questions this agreed with real greedy generation on {percent(f["greedy_agreement"])}.

Perplexity on held-out documentation and source text of the standard library: {f["held_out_perplexity"]}.

The experts are partly redundant by the way they were made. Cosine of an expert's outputs with those of its most
similar expert, mean over the experts of layers 0 to 5: {likeness}.

Hit rates of an expert cache, mean over layers, on {f["trace_tokens"]} tokens of questions and held-out text, one
request after the other:

{hit_table(f)}

## How it was trained

`python -m demo.train --out assets/demo --seed-steps {trained["seed_steps"]} --steps {trained["steps"]}`, on 2 CPU
cores that had other work to do as well: {minutes} minutes, {trained["tokens"] / 1e6:.1f} M tokens. First
{trained["seed_steps"]} steps with {SEED_SIZE.experts} experts, one active; then every expert was cloned into
{FULL_SIZE.experts // SEED_SIZE.experts}, with noise of {NOISE} standard deviations on experts and half that on router
rows, and all were trained for {trained["steps"]} steps. AdamW, peak rate 2e-3, linear decay from step
{trained["decay_from"]}; load-balancing loss 1e-3. Rows are packed questions and answers, with the loss on answers
alone, mixed with help topics, docstrings and source of the standard library. Facts with a high recent loss were drawn
more often.

{notes}

`python -m demo.evaluate --model assets/demo` measures exact match again; `python -m demo.card` all figures above.

## Limits

It knows the facts it was trained on and nothing else; it cannot reason or write code. Phrasings far from the trained
ones are often answered wrongly or not at all, made-up names that resemble known ones may be taken for them, and the
facts are those of Python {python}. The order of popularity is an opinion. It is a test object, not an assistant.

## Licence

Weights and questions derive from the documentation of Python, copyright Python Software Foundation, used under the PSF
License Agreement; see `NOTICE`. What is Moestro's own is under the Apache License 2.0.
""")


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
