"""Exact match of the demo model on questions, batched, and plain greedy answers.

Answers are scored with the right answer fed in: every next-token argmax must agree, the end-of-turn token included.
That equals exact match of greedy decoding, since the first disagreement is where greedy decoding leaves the answer.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]
Pair = tuple[list[int], list[int]]
TOKENS_PER_BATCH = 8192


def prompt_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Ids of a chat up to where the next answer begins."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def encode(tokenizer: Any, rows: Sequence[Row], history: Sequence[Sequence[Row]] = ()) -> list[Pair]:
    """(prompt ids, answer ids) of each row, after the turns of its history where given."""
    pairs = []
    for number, row in enumerate(rows):
        messages = []
        for turn in (*(history[number] if history else ()), row):
            messages += [
                {"role": "user", "content": turn["question"]},
                {"role": "assistant", "content": turn["answer"]},
            ]
        answer = tokenizer(row["answer"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        pairs.append((prompt_ids(tokenizer, messages[:-1]), answer))
    return pairs


def batches_of(pairs: Sequence[Pair]) -> list[list[int]]:
    """Indices of pairs in batches of similar length."""
    order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]))
    batches: list[list[int]] = [[]]
    for index in order:
        length = len(pairs[index][0]) + len(pairs[index][1])
        if batches[-1] and (len(batches[-1]) + 1) * length > TOKENS_PER_BATCH:
            batches.append([])
        batches[-1].append(index)
    return batches


@torch.inference_mode()
def exact_matches(model: Any, pairs: Sequence[Pair]) -> list[bool]:
    """Whether greedy decoding gives each answer exactly."""
    right = [False] * len(pairs)
    for batch in batches_of(pairs) if pairs else []:
        ids, predicted = predictions(model, [pairs[i] for i in batch])
        for row, index in enumerate(batch):
            start, end = len(pairs[index][0]), len(pairs[index][0]) + len(pairs[index][1])
            right[index] = bool((predicted[row, start - 1 : end - 1] == ids[row, start:end]).all())
    return right


def predictions(model: Any, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    """(ids, next-token argmax), both (B, T), rows padded on the right, which causal attention never sees."""
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.zeros(len(pairs), longest, dtype=torch.long)
    for row, (prompt, answer) in enumerate(pairs):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
    logits = model(input_ids=ids.to(model.device), use_cache=False).logits
    return ids, logits.argmax(-1).cpu()


@torch.inference_mode()
def greedy(model: Any, tokenizer: Any, messages: list[dict[str, str]], max_new_tokens: int = 96) -> str:
    """The model's answer by real greedy generation."""
    ids = torch.tensor([prompt_ids(tokenizer, messages)], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
    text: str = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return text


def with_history(rows: Sequence[Row], turns: int, seed: int) -> list[list[Row]]:
    """For each row up to `turns` earlier turns, at least one, drawn from the same rows."""
    rng = random.Random(seed)
    return [rng.choices(rows, k=rng.randint(1, turns)) for _ in rows]
