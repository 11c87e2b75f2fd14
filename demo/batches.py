"""Training batches: rows of packed questions and answers, and rows of running text.

Everything is drawn from a generator seeded by (seed, step), so that a resumed run gets the same batches.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from .chat import CHAT, SYSTEM_PROMPTS
from .corpus import read_facts
from .phrasings import NOISE_SHARE, TRAINED, filler_words, noisy, styled
from .prose import topics
from .tokenizer import END, system_turn, user_turn
from .unknown import UNKNOWN_ANSWER, UnknownNames

ROW_LENGTHS, ROW_SHARES = (256, 512, 1024), (0.7, 0.2, 0.1)
TEXT_SHARES = {"docs": 0.5, "topics": 0.25, "source": 0.25}
UNKNOWN_SHARE, CHAT_SHARE = 0.14, 0.02
ALIAS_SHARE = 0.2
SEPARATED_SHARE = 0.4
SYSTEM_SHARE = 0.15
IGNORED = -100

#: Token ids, labels, and per label the index of its fact or -1.
Row = tuple[list[int], list[int], list[int]]


@dataclass(frozen=True)
class Batch:
    """Token ids (B, T), labels (B, T) with `IGNORED`, and per label the index of its fact or -1 (B, T)."""

    ids: Tensor
    labels: Tensor
    facts: Tensor

    def part(self, number: int, of: int) -> Batch:
        """Every `of`-th row, starting with row `number`."""
        return Batch(self.ids[number::of], self.labels[number::of], self.facts[number::of])


class Batches:
    """Draws batches from a corpus folder."""

    def __init__(self, work: Path, seed: int) -> None:
        self.seed = seed
        self.tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
        self.facts = read_facts(work)
        self.text = {name: np.load(work / f"text-{name}.npy") for name in TEXT_SHARES}
        self.newline = self.tokenizer.encode("\n").ids
        self.answers = [self._answer(fact.answer) for fact in self.facts]
        self.unknown = self._answer(UNKNOWN_ANSWER)
        self.chat = [(ask, self._answer(answer)) for answer, asks in CHAT for ask in asks]
        self.names = UnknownNames(self.facts, random.Random(seed))
        self.stream = self.names.stream(held=False)
        self.fillers = filler_words(topics(), self.names.known)
        self.hard = np.ones(len(self.facts))

    def _answer(self, text: str) -> list[int]:
        return self.tokenizer.encode(text + END).ids

    def pair(self, rng: random.Random, hard_share: float) -> tuple[str, list[int], int]:
        """(question, answer ids, fact index or -1)."""
        roll = rng.random()
        if roll < UNKNOWN_SHARE:
            kind, phrasing, name = next(self.stream)
            return (self.ask(kind, phrasing, name, rng) if name else phrasing), self.unknown, -1
        if roll < UNKNOWN_SHARE + CHAT_SHARE:
            return *rng.choice(self.chat), -1
        if rng.random() < hard_share:
            index = rng.choices(range(len(self.facts)), cum_weights=self._cumulative)[0]
        else:
            index = rng.randrange(len(self.facts))
        fact = self.facts[index]
        name = rng.choice(fact.aliases) if fact.aliases and rng.random() < ALIAS_SHARE else fact.name
        return self.ask(fact.kind, rng.choice(TRAINED[fact.kind]), name, rng), self.answers[index], index

    def ask(self, kind: str, phrasing: str, name: str, rng: random.Random) -> str:
        """The question in a random style, some of them with noise."""
        if rng.random() < NOISE_SHARE:
            phrasing = noisy(kind, phrasing, self.fillers, rng)
        return styled(kind, phrasing, name, rng)

    def question_row(self, length: int, rng: random.Random, hard_share: float) -> Row:
        """A row of question and answer turns; some rows separate them as documents of their own."""
        ids: list[int] = []
        labels: list[int] = []
        facts: list[int] = []
        separated = rng.random() < SEPARATED_SHARE
        while len(ids) <= length:
            question, answer, fact = self.pair(rng, hard_share)
            text = user_turn(question)
            if (separated or not ids) and rng.random() < SYSTEM_SHARE:
                text = system_turn(rng.choice(SYSTEM_PROMPTS)) + text
            asked = self.tokenizer.encode(text).ids
            after = [0] if separated else self.newline
            ids += asked + answer + after
            labels += [IGNORED] * len(asked) + answer + [IGNORED] * len(after)
            facts += [-1] * len(asked) + [fact] * len(answer) + [-1] * len(after)
        return ids[: length + 1], labels[: length + 1], facts[: length + 1]

    def text_row(self, length: int, rng: random.Random) -> Row:
        """A window of running text."""
        part = self.text[rng.choices(list(TEXT_SHARES), list(TEXT_SHARES.values()))[0]]
        start = rng.randrange(len(part) - length - 1)
        ids = part[start : start + length + 1].tolist()
        return ids, ids, [-1] * (length + 1)

    def draw(self, step: int, tokens: int, question_share: float, hard_share: float = 0.0) -> Batch:
        """The batch of a step, `tokens` in all."""
        rng = random.Random(f"{self.seed}/{step}")
        self.names.rng = rng
        self._cumulative = np.cumsum(self.hard).tolist()
        length = rng.choices(ROW_LENGTHS, ROW_SHARES)[0]
        rows = [
            self.question_row(length, rng, hard_share) if rng.random() < question_share else self.text_row(length, rng)
            for _ in range(max(1, tokens // length))
        ]
        ids, labels, facts = (torch.tensor([row[part] for row in rows]) for part in range(3))
        return Batch(ids[:, :-1], labels[:, 1:], facts[:, 1:])

    def note_losses(self, facts: Tensor, losses: Tensor) -> None:
        """Update each fact's running mean loss; `facts` and `losses` hold one entry per label."""
        known = facts >= 0
        index, loss = facts[known].numpy(), losses[known].numpy()
        total = np.bincount(index, weights=loss, minlength=len(self.hard))
        seen = np.bincount(index, minlength=len(self.hard))
        touched = seen > 0
        self.hard[touched] = 0.7 * self.hard[touched] + 0.3 * total[touched] / seen[touched] + 1e-6
