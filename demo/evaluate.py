"""Measures the demo model: `python -m demo.evaluate --model assets/demo`.

Prints exact match on trained questions, unseen phrasings, unknown names, small talk and later turns of a chat, then
one line of JSON. `--check-greedy N` compares the scoring with real greedy generation on N questions.
"""

import argparse
import json
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from .corpus import read_questions
from .model import sorted_experts, use_experts
from .phrasings import ADDED_LATER
from .scoring import Row, encode, exact_matches, greedy, with_history
from .unknown import UNKNOWN_ANSWER

LATER_TURN_ROWS, EARLIER_TURNS = 800, 5
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load(folder: Path, device: str = "", dtype: str = "bfloat16") -> tuple[Any, Any]:
    """(model, tokenizer) of a folder, on the GPU where there is one, with the fast CPU experts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).to(device).eval()
    if device == "cpu":
        use_experts(model, sorted_experts)
    return model, AutoTokenizer.from_pretrained(folder)


def mean(values: list[bool]) -> float:
    """The share of true values; 0 of none."""
    return round(sum(values) / len(values), 4) if values else 0.0


def measure(model: Any, tokenizer: Any, rows: list[Row]) -> tuple[dict[str, Any], list[Row]]:
    """The figures of an evaluation set, and the rows answered incorrectly."""
    right = exact_matches(model, encode(tokenizer, rows))
    by_split: dict[str, list[bool]] = defaultdict(list)
    by_kind: dict[str, list[bool]] = defaultdict(list)
    for row, ok in zip(rows, right, strict=True):
        by_split[row["split"]].append(ok)
        if row["split"] == "unseen":
            added = any(row["question"] == phrasing.format(q=row["name"]) for phrasing in ADDED_LATER)
            by_split["unseen_added_later" if added else "unseen_first"].append(ok)
        by_kind[f"{row['split']} {row['kind']}"].append(ok)
    wrong = [row for row, ok in zip(rows, right, strict=True) if not ok]
    denied = exact_matches(model, encode(tokenizer, [row | {"answer": UNKNOWN_ANSWER} for row in wrong]))
    known = [ok and row["split"] in ("trained", "unseen") for row, ok in zip(wrong, denied, strict=True)]
    asked = len(by_split["trained"]) + len(by_split["unseen"])
    result: dict[str, Any] = {f"exact_{split}": mean(values) for split, values in sorted(by_split.items())}
    result["questions"] = {split: len(values) for split, values in sorted(by_split.items())}
    result["known_called_unknown"] = round(sum(known) / max(1, asked), 4)
    result["by_kind"] = {kind: mean(values) for kind, values in sorted(by_kind.items()) if "unknown" not in kind}
    return result, wrong


def later_turns(model: Any, tokenizer: Any, rows: list[Row], seed: int = 1) -> dict[str, float]:
    """Exact match of questions asked as a later turn, after 1 to `EARLIER_TURNS` others."""
    rows = random.Random(seed).sample(rows, min(LATER_TURN_ROWS, len(rows)))
    right = exact_matches(model, encode(tokenizer, rows, with_history(rows, EARLIER_TURNS, seed)))
    by_split: dict[str, list[bool]] = defaultdict(list)
    for row, ok in zip(rows, right, strict=True):
        by_split[row["split"]].append(ok)
    return {f"later_turn_{split}": mean(values) for split, values in sorted(by_split.items())}


def greedy_agreement(model: Any, tokenizer: Any, rows: list[Row], count: int) -> float:
    """The share of `count` questions on which scoring and real greedy generation agree."""
    rows = random.Random(2).sample(rows, count)
    scored = exact_matches(model, encode(tokenizer, rows))
    asked = ([{"role": "user", "content": row["question"]}] for row in rows)
    generated = [greedy(model, tokenizer, chat) == row["answer"] for chat, row in zip(asked, rows, strict=True)]
    return mean([a == b for a, b in zip(scored, generated, strict=True)])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("assets/demo"))
    parser.add_argument("--questions", type=Path, help="default: questions.jsonl of the model's folder")
    parser.add_argument("--device", default="")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--check-greedy", type=int, default=0, metavar="N")
    parser.add_argument("--show-wrong", type=int, default=0, metavar="N")
    args = parser.parse_args()
    torch.set_num_threads(2)
    began = time.perf_counter()
    model, tokenizer = load(args.model, args.device, args.dtype)
    rows = read_questions(args.questions or args.model / "questions.jsonl")
    result, wrong = measure(model, tokenizer, rows)
    result |= later_turns(model, tokenizer, rows)
    if args.check_greedy:
        result["greedy_agreement"] = greedy_agreement(model, tokenizer, rows, args.check_greedy)
    result |= {"dtype": args.dtype, "seconds": round(time.perf_counter() - began, 1)}
    for row in wrong[: args.show_wrong]:
        answer = greedy(model, tokenizer, [{"role": "user", "content": row["question"]}])
        print(f"wrong: {row['question']!r} -> {answer!r}, not {row['answer']!r}")
    for name, value in result.items():
        print(f"{name}: {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
