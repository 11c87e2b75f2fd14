"""Writes what ships: bf16 weights, tokenizer with chat template, configuration, questions, notice, model card.

`python -m demo.export --out assets/demo` exports the checkpoint of the work folder again.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from .corpus import SEED, WORK, numbered, questions, read_facts, read_questions, write_questions
from .evaluate import load
from .scoring import Row, encode, exact_matches
from .stages import finished_model
from .tokenizer import save_tokenizer

NOTICE = Path(__file__).with_name("NOTICE.txt")
SUGGESTED = {"about": 24, "mod": 6, "sig": 6, "where": 6}
SHIPPED = (
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja", "questions.jsonl", "held_out.txt", "NOTICE", "README.md",
)  # fmt: skip


def suggest(rows: list[Row], right: list[bool]) -> list[Row]:
    """The rows, with the most popular correctly answered trained ones of each kind marked as suggestions.

    Questions about where a built-in name is defined are left out.
    """
    left = dict(SUGGESTED)
    marked = []
    for row, ok in zip(rows, right, strict=True):
        group = row["kind"] if row["kind"] in left else "about"
        fit = row["split"] == "trained" and not row["answer"].endswith(" is built in.")
        take = ok and fit and left[group] > 0
        left[group] -= take
        marked.append(row | {"suggest": take})
    return marked


def export(model: Any, work: Path, out: Path, seed: int) -> None:
    """Write the shipped folder from a trained model and its corpus; the model becomes bf16 in place."""
    out.mkdir(parents=True, exist_ok=True)
    if foreign := sorted(path.name for path in out.iterdir() if path.name not in SHIPPED):
        raise SystemExit(f"{out} has what does not ship: {', '.join(foreign)}. Move it away, or choose another folder.")
    model = model.to(torch.bfloat16).cpu().eval()
    model.generation_config = generation_config()
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    name_experts_as_published(out / "config.json")
    save_tokenizer(Tokenizer.from_file(str(work / "tokenizer.json")), out)
    shutil.copyfile(NOTICE, out / "NOTICE")
    rows = numbered(questions(read_facts(work), seed))
    write_questions(rows, out / "questions.jsonl")
    mark_suggestions(out)


def name_experts_as_published(path: Path) -> None:
    """Name the config's number of experts as published Qwen3-MoE checkpoints do."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["num_experts"] = config.pop("num_local_experts", config.get("num_experts"))
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def generation_config() -> Any:
    """Greedy decoding that stops at the end of the turn."""
    from transformers import GenerationConfig

    return GenerationConfig(do_sample=False, eos_token_id=2, pad_token_id=0, max_new_tokens=128)


def mark_suggestions(folder: Path) -> None:
    """Mark as suggestions those questions which the exported model, reloaded, answers exactly."""
    model, tokenizer = load(folder)
    path = folder / "questions.jsonl"
    rows = read_questions(path)
    trained = [row["split"] == "trained" for row in rows]
    right = iter(exact_matches(model, encode(tokenizer, [row for row, t in zip(rows, trained, strict=True) if t])))
    write_questions(suggest(rows, [t and next(right) for t in trained]), path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    torch.set_num_threads(2)
    export(finished_model(args.work), args.work, args.out, args.seed)


if __name__ == "__main__":
    main()
