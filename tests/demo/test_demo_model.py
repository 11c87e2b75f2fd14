"""The shipped demo model: its folder, its tokenizer, and that it answers as its card says."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from demo.corpus import read_questions
from demo.evaluate import load
from demo.export import SHIPPED
from demo.scoring import Row, encode, exact_matches, greedy, with_history
from demo.tokenizer import user_turn
from demo.unknown import UNKNOWN_ANSWER
from tests.selection import layered

FOLDER = Path(__file__).parents[2] / "assets" / "demo"
MAX_BYTES = 26_000_000
ASKED_FIRST = (
    "json.dumps", "json.loads", "collections.deque", "str.upper", "os.path.join", "heapq.heappush", "list.append",
    "dict.get", "print", "len", "range", "random.choice", "re.sub", "math.sqrt", "itertools.chain",
)  # fmt: skip


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    return load(FOLDER, device="cpu")


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return read_questions(FOLDER / "questions.jsonl")


def sample(rows: list[Row], split: str, count: int) -> list[Row]:
    return random.Random(11).sample([row for row in rows if row["split"] == split], count)


def share_exact(demo: tuple[Any, Any], rows: list[Row]) -> float:
    model, tokenizer = demo
    right = exact_matches(model, encode(tokenizer, rows))
    return sum(right) / len(right)


def ask(demo: tuple[Any, Any], question: str) -> str:
    return greedy(*demo, [{"role": "user", "content": question}])


def test_folder_holds_what_ships_and_no_more() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(SHIPPED)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MAX_BYTES
    assert (FOLDER / "questions.jsonl").stat().st_size <= 1_500_000


def test_weights_are_bf16_of_a_qwen3_moe() -> None:
    from safetensors import safe_open

    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "qwen3_moe"
    assert (config["num_experts"], config["num_experts_per_tok"], config["num_hidden_layers"]) == (32, 4, 6)
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_texts_name_no_machine() -> None:
    for name in ("README.md", "questions.jsonl", "config.json", "tokenizer_config.json"):
        text = (FOLDER / name).read_text(encoding="utf-8")
        assert not any(place in text for place in ("/work", "/root", "/tmp/", "/home/")), name


def test_chat_template_gives_the_trained_format(demo: tuple[Any, Any]) -> None:
    _, tokenizer = demo
    chat = [{"role": "user", "content": "What does len do?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer(user_turn("What does len do?"), add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == "<|im_start|>user\nWhat does len do?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"


def test_generation_stops_at_the_end_of_the_turn(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_tokenizer_round_trip(demo: tuple[Any, Any], rows: list[Row]) -> None:
    _, tokenizer = demo
    texts = [row["answer"] for row in sample(rows, "trained", 200)] + ["Grüße, 世界! 🙂\n\tx = {1: 'a'}"]
    for text in texts:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_questions_are_many_and_distinct(rows: list[Row]) -> None:
    trained = [row for row in rows if row["split"] == "trained"]
    assert len(trained) >= 2000
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({(row["kind"], row["name"]) for row in trained}) == len(trained)
    assert {row["question"] for row in trained}.isdisjoint(row["question"] for row in rows if row["split"] == "unseen")
    answers: dict[str, set[str]] = {}
    for row in rows:
        answers.setdefault(row["question"], set()).add(row["answer"])
    assert all(len(found) == 1 for found in answers.values())


@pytest.mark.long(0.2)
def test_trained_questions_are_answered_exactly(demo: tuple[Any, Any], rows: list[Row]) -> None:
    assert share_exact(demo, sample(rows, "trained", 200)) >= 0.99


@pytest.mark.long(0.2)
def test_unseen_phrasings_are_answered(demo: tuple[Any, Any], rows: list[Row]) -> None:
    assert share_exact(demo, [row for row in rows if row["split"] == "unseen"]) >= 0.88


@pytest.mark.long(0.2)
def test_unknown_names_are_said_to_be_unknown(demo: tuple[Any, Any], rows: list[Row]) -> None:
    assert share_exact(demo, [row for row in rows if row["split"] == "unknown"]) >= 0.85


@pytest.mark.long(0.2)
def test_later_turns_are_answered(demo: tuple[Any, Any], rows: list[Row]) -> None:
    model, tokenizer = demo
    asked = sample(rows, "trained", 100)
    right = exact_matches(model, encode(tokenizer, asked, with_history(asked, 4, seed=4)))
    assert sum(right) / len(right) >= 0.97


@pytest.mark.long(0.1)
def test_scoring_can_fail(demo: tuple[Any, Any], rows: list[Row]) -> None:
    asked = sample(rows, "trained", 20)
    swapped = [row | {"answer": other["answer"]} for row, other in zip(asked, asked[1:] + asked[:1], strict=True)]
    assert share_exact(demo, swapped) == 0


@pytest.mark.parametrize("name", layered(ASKED_FIRST, quick=lambda name: name in ("len", "str.upper", "dict.get")))
def test_what_is_asked_first_is_answered_right(demo: tuple[Any, Any], rows: list[Row], name: str) -> None:
    known = {row["name"]: row["answer"] for row in rows if row["kind"] in ("fn", "cls", "meth") and row["answer"]}
    assert ask(demo, f"What does {name} do?") == known[name]


@pytest.mark.long(0.1)
@pytest.mark.parametrize("question", ["What does json.frobnicate do?", "What is wibble.wobble?", "Explain zonkify."])
def test_made_up_names_get_an_honest_answer(demo: tuple[Any, Any], question: str) -> None:
    assert ask(demo, question) == UNKNOWN_ANSWER


@pytest.mark.parametrize("every", layered([1, 5], quick=lambda every: every == 5))
def test_suggested_questions_are_answered_exactly(demo: tuple[Any, Any], rows: list[Row], every: int) -> None:
    suggested = [row for row in rows if row["suggest"]]
    assert 30 <= len(suggested) <= 60
    assert all(row["split"] == "trained" for row in suggested)
    assert share_exact(demo, suggested[::every]) == 1
    row = suggested[0]
    assert ask(demo, row["question"]) == row["answer"]
