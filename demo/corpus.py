"""The corpus: facts, phrasings, small talk and text, tokenized and written to a work folder.

`python -m demo.corpus --work DIR` writes what training and evaluation read: tokenizer.json, facts.json,
questions.jsonl and text-*.npy. The corpus is a function of the Python version and the seed alone.
"""

import argparse
import json
import platform
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .chat import CHAT, SYSTEM_PROMPTS
from .facts import Fact, select_facts
from .phrasings import HELD_OUT, PLAIN, TRAINED, styled
from .prose import texts
from .tokenizer import train_tokenizer
from .unknown import UNKNOWN_ANSWER, UnknownNames

FACTS = 2100
SEED = 7
UNKNOWN_QUESTIONS = 500
FIRST_RANKS = 400
"""Facts of these ranks are asked about in the plainest phrasing, fit to be suggested."""
WORK = Path(__file__).parent / ".work"


def questions(facts: list[Fact], seed: int) -> Iterator[dict[str, Any]]:
    """The evaluation set: every fact in a plain trained phrasing and in a held-out one, unknown names, small talk."""
    rng = random.Random(seed)
    for fact in facts:
        plain = PLAIN[fact.kind][0] if fact.rank < FIRST_RANKS else rng.choice(PLAIN[fact.kind])
        yield question("t", fact.kind, fact.name, plain.format(q=fact.name), fact.answer, "trained", fact.rank)
    for fact in facts:
        held = rng.choice(HELD_OUT[fact.kind]).format(q=fact.name)
        yield question("u", fact.kind, fact.name, held, fact.answer, "unseen", fact.rank)
    stream = UnknownNames(facts, rng).stream(held=True)
    asked: set[str] = set()
    while len(asked) < UNKNOWN_QUESTIONS:
        kind, phrasing, name = next(stream)
        text = phrasing.format(q=name) if name else phrasing
        if text not in asked:
            yield question("x", kind, name, text, UNKNOWN_ANSWER, "unknown", len(facts) + len(asked))
            asked.add(text)
    for answer, asks in CHAT:
        for text in asks:
            yield question("c", "chat", "", text, answer, "chat", 0)


def question(prefix: str, kind: str, name: str, text: str, answer: str, split: str, rank: int) -> dict[str, Any]:
    """One line of questions.jsonl; its id is still a prefix without number."""
    return {
        "id": prefix, "kind": kind, "name": name, "question": text, "answer": answer, "split": split, "rank": rank,
        "suggest": False,
    }  # fmt: skip


def numbered(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with a running number appended to their ids."""
    return [row | {"id": f"{row['id']}{number}"} for number, row in enumerate(rows)]


def write_questions(rows: list[dict[str, Any]], path: Path) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_questions(path: Path) -> list[dict[str, Any]]:
    """Read questions.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_facts(work: Path) -> list[Fact]:
    """The facts of a corpus on disk."""
    rows = json.loads((work / "facts.json").read_text(encoding="utf-8"))["facts"]
    return [Fact(**(row | {"aliases": tuple(row["aliases"])})) for row in rows]


def tokenizer_texts(facts: list[Fact], parts: dict[str, list[str]], seed: int) -> Iterator[str]:
    """The tokenizer's training texts: facts four times, then unknown names, small talk and text."""
    rng = random.Random(seed)
    for fact in facts:
        for phrasing in rng.sample(TRAINED[fact.kind], 4):
            yield f"{styled(fact.kind, phrasing, fact.name, rng)}\n{fact.answer}"
    stream = UnknownNames(facts, rng).stream(held=False)
    for _ in range(600):
        _, phrasing, name = next(stream)
        yield phrasing.replace("{q}", name)
    yield UNKNOWN_ANSWER
    yield from SYSTEM_PROMPTS
    for answer, asks in CHAT:
        yield from (answer, *asks)
    for name in ("topics", "docs", "source"):
        yield from (text[:20000] for text in parts[name])


def encode_text(tokenizer: Tokenizer, part: list[str]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """All texts of a part, each ended by the end-of-text token (id 0)."""
    ids = [token for text in part for token in (*tokenizer.encode(text).ids, 0)]
    return np.array(ids, dtype=np.int32)


def build(work: Path, facts_wanted: int = FACTS, seed: int = SEED) -> None:
    """Write the corpus to `work`."""
    work.mkdir(parents=True, exist_ok=True)
    facts = select_facts(facts_wanted)
    parts = texts(seed)
    tokenizer = train_tokenizer(tokenizer_texts(facts, parts, seed))
    tokenizer.save(str(work / "tokenizer.json"))
    for name, part in parts.items():
        np.save(work / f"text-{name}.npy", encode_text(tokenizer, part))
    stored = {"python": platform.python_version(), "seed": seed, "facts": [asdict(fact) for fact in facts]}
    (work / "facts.json").write_text(json.dumps(stored, indent=0), encoding="utf-8")
    write_questions(numbered(questions(facts, seed)), work / "questions.jsonl")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--facts", type=int, default=FACTS)
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    build(args.work, args.facts, args.seed)
    rows = read_questions(args.work / "questions.jsonl")
    splits = {split: sum(row["split"] == split for row in rows) for split in ("trained", "unseen", "unknown", "chat")}
    tokens = {path.stem: len(np.load(path)) for path in sorted(args.work.glob("text-*.npy"))}
    print(json.dumps({"questions": splits, "tokens": tokens}))


if __name__ == "__main__":
    main()
