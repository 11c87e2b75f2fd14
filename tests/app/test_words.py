"""What the page says: of a load's estimate, under an answer, of a copied chat, and by which words."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from gradio import component_meta

from app.server import frames
from app.services.answer_queue import AnswerQueue, Request
from app.services.exports import transcript
from app.services.exports.archive import NothingThere
from app.start.gradio_import import skip_interface_files
from app.store import Message, Store
from app.ui.controls import label
from app.ui.tabs.analysis_views import HEADS
from app.ui.tabs.messages import statistics
from app.ui.text import fit_card, span
from app.wording import describe_change, lossy, name_of, written
from core.settings.budget import Budget
from core.settings.config import Settings, params
from core.settings.loading import LoadSpec
from core.settings.param import declared
from core.settings.sampling import Sampling
from core.system.wording import format_bytes
from core.types import Fit
from tests.app.records import STATS
from tests.fake_models import fake_estimate, fake_pack
from tests.fakes import FakeEngine


def fit(model: str = "demo", budget: str = "50%", **changes: Any) -> Fit:
    return replace(fake_estimate(LoadSpec(model, settings=Settings({"budget": budget}))), **changes)


def test_the_tiers_of_a_pack_and_of_a_checkpoint(tmp_path: Path) -> None:
    pack = fit_card(fit(str(fake_pack(tmp_path / "pack"))))
    assert "<b>3.2 MB</b> of 900 MB free" in pack
    assert "6.4 MB of experts stay there, read when needed" in pack
    assert "not needed once loaded" in fit_card(fit())


def test_the_expected_speed_says_what_it_rests_on() -> None:
    card = fit_card(fit(hit_low=0.62, hit_high=0.9, tok_s_low=3.21, tok_s_high=8.9, basis='copies "over" the link'))
    assert "<b>3.2–8.9</b> tok/s, hit rate <b>62–90&nbsp;%</b>" in card
    assert 'title="copies &quot;over&quot; the link"' in card
    assert "Copies &quot;over&quot; the link.</p>" in card
    assert "Expected" not in fit_card(fit(basis="", problem="Too small."))


@pytest.mark.parametrize(
    ("low", "high", "digits", "text"),
    [(3.2, 8.9, 1, "3.2–8.9"), (100, 100, 0, "100"), (12.4, 12.2, 0, "12"), (9, 21, 0, "9–21")],
)
def test_ranges(low: float, high: float, digits: int, text: str) -> None:
    assert span(low, high, digits) == text


def test_a_card_says_what_differs() -> None:
    assert 'data-budget="62%"' in fit_card(fit(), "50%")
    assert "data-budget" not in fit_card(fit(), "62%")
    assert "data-budget" not in fit_card(fit(suggested=""), "50%")
    said = "Text only: visual of this model is not loaded."
    assert said in fit_card(fit(note=said)) and "Text only" not in fit_card(fit())


def test_a_warning_may_be_overridden_and_a_problem_may_not() -> None:
    tight = fit_card(fit(budget="95%"))
    assert "Tight fit" in tight
    assert "load it anyway" in tight
    bad = fit_card(fit(budget="10%"))
    assert "Does not fit" in bad
    assert "all the same" not in bad


@pytest.mark.parametrize(
    ("stats", "line"),
    [
        ({}, "12.5 tok/s · 7 tokens · TTFT 800 ms · hit rate 75.0 % · stall 30 % · finished · EXACT"),
        (
            {"disk_misses": 1, "disk_bytes": 4096},
            "12.5 tok/s · 7 tokens · TTFT 800 ms · hit rate 75.0 % · 1 miss from disk, "
            "prompt included · 4.1 kB read · stall 30 % · finished · EXACT",
        ),
        (
            {"disk_misses": 0, "disk_bytes": 0},
            "12.5 tok/s · 7 tokens · TTFT 800 ms · hit rate 75.0 % · stall 30 % · finished · EXACT",
        ),
    ],
)
def test_the_line_under_an_answer_names_the_disk_only_where_one_was_read(stats: dict[str, Any], line: str) -> None:
    message = Message(id=1, role="assistant", text="x", state="done", stats=STATS | stats, error="", created=0.0)
    assert statistics(message) == line


def test_names_and_sizes() -> None:
    cached = Path("hub") / "models--org--Big-MoE" / "snapshots" / "abc"
    assert name_of("demo") == "Demo model (bundled)"
    assert name_of(str(Path("models") / "Mixtral")) == "Mixtral"
    assert name_of(str(cached)) == "org/Big-MoE"
    assert name_of(str(cached / "x-Q4_K_M.gguf")) == "org/Big-MoE/x-Q4_K_M.gguf"
    assert [format_bytes(n) for n in (12, 4096, 9_990_000, 123_456_789, 18_500_000_000)] == [
        "12 B",
        "4.1 kB",
        "9.99 MB",
        "123 MB",
        "18.5 GB",
    ]


@pytest.fixture
def chat(store: Store) -> tuple[Store, int]:
    number, answer = store.chats.begin(None, "What is *a* cache?", "demo", system="Be brief.")
    store.chats.append(answer, 0, "<think>\nHm.\n</think>\n\nA store:\n\n```python\nx = 1")
    store.chats.finish(answer, "stopped", {**STATS, "tok_s": float("nan")})
    _, other = store.chats.begin(number, None, "demo", answer)
    store.chats.append(other, 0, "why not</think>Yes.")
    store.chats.finish(other, "done", {**STATS, "opens_reasoning": True})
    store.chats.show(number, answer)
    return store, number


def test_markdown_is_the_branch_that_is_shown(chat: tuple[Store, int]) -> None:
    store, number = chat
    text = transcript.markdown(store, number)
    head, _, rest = text.partition("## System prompt")
    assert head.startswith("# What is *a* cache?\n\ndemo, 20")
    assert rest == (
        "\n\nBe brief.\n\n## You\n\nWhat is *a* cache?\n\n## Model\n\n<details>\n<summary>Reasoning</summary>\n\nHm."
        "\n\n</details>\n\nA store:\n\n```python\nx = 1\n```\n"
    )


def test_json_has_every_branch_with_its_statistics(chat: tuple[Store, int]) -> None:
    store, number = chat
    found = json.loads(transcript.as_json(store, number), parse_constant=lambda name: pytest.fail(name))
    question, first, second = found["messages"]
    assert (found["title"], found["system"], found["model"]) == ("What is *a* cache?", "Be brief.", "demo")
    assert found["shown"] == [question["id"], first["id"]]
    assert [one["parent"] for one in found["messages"]] == [None, question["id"], question["id"]]
    assert question["text"] == "What is *a* cache?" and "statistics" not in question
    assert (first["state"], first["statistics"]["new_tokens"], first["statistics"]["tok_s"]) == ("stopped", 7, None)
    assert second["text"] == "why not</think>Yes."
    with pytest.raises(NothingThere, match="no longer exists"):
        transcript.as_json(store, 99)


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("<think>a</think>\n\nb", False, ("a", "b")),
        ("\n<think>\na\n</think>b</think>", False, ("a", "b</think>")),
        ("a</think>b", False, ("a", "b")),
        ("a, cut off", True, ("a, cut off", "")),
        ("<think>a, cut off", False, ("a, cut off", "")),
        ("a <think> b", False, ("", "a <think> b")),
        ("", True, ("", "")),
    ],
)
def test_reasoning_is_told_from_the_answer(text: str, opened: bool, parts: tuple[str, str]) -> None:
    assert transcript.reasoning_of(text, opened) == parts


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("prefetch_auto off", "Pause when it does not pay off"),
        ("eviction lru → lfu", "Cache policy: LRU → LFU"),
        ("miss wait → substitute_drop", "When an expert is missing: Wait for it (exact) → Use another, else leave out"),
        ("budget 50% → 6.5GB", "Memory budget: 50% → 6.5GB"),
        ("eviction.lcp.omega 32 → 64", "Window: 32 → 64"),
        ("the device ran out of memory: fewer experts", "the device ran out of memory: fewer experts"),
        ("eviction", "eviction"),
    ],
)
def test_a_setting_that_was_turned_has_the_name_of_its_control(said: str, shown: str) -> None:
    assert describe_change(said) == shown


def test_the_deck_is_told_in_these_words() -> None:
    engine = FakeEngine.load(LoadSpec("demo"))
    engine.change({"eviction": "lfu"})
    frame = engine.frame()
    assert frame is not None
    told, _ = frames.decode(frames.encode(frame))
    assert len(told["mark_texts"]) == len(told["marks"])
    assert all(said == describe_change(text) for said, (_, text) in zip(told["mark_texts"], told["marks"], strict=True))


def test_a_queued_answer_knows_how_many_come_before_it() -> None:
    queue, requests = AnswerQueue(), []
    for _ in range(3):
        requests.append(Request(object(), "", object(), object()))  # type: ignore[arg-type]
        queue.put(requests[-1])
    assert [queue.before(one.answer) for one in requests] == [0, 1, 2]
    assert queue.next(0) is requests[0]
    assert [queue.before(one.answer) for one in requests] == [0, 0, 1]


def test_controls_have_the_words_that_were_agreed_on() -> None:
    """Of the table that a trial in the browser led to; what the deck itself says is in the browser's tests."""
    known, length = params(), declared(Sampling)["max_new_tokens"]
    assert (label(known["miss"]), known["miss"].choice_titles) == (
        "When an expert is missing",
        ("Wait for it (exact)", "Use another", "Leave it out", "Use another, else leave out"),
    )
    assert label(length) == "Maximum answer length (tokens)"
    assert length.help == "The answer stops here. Takes effect with the next answer."
    assert label(known["link_gbps"]) == "Emulated bandwidth (GB/s)"
    heads = dict(HEADS)
    assert (heads["tpot"], heads["belady"]) == ("Time per token", "Below best possible (points)")
    assert lossy({"exact": True, "weights": "int8"}) == "EXACT for int8 weights"
    fast = {"exact": True, "arithmetic": "fast", "closeness": 0.1, "distance_kl": None, "distance_tokens": 0}
    assert lossy(fast) == "EXACT, fast arithmetic"
    assert (
        lossy({**fast, "weights": "int8", "distance_kl": 0.0004321, "distance_tokens": 512})
        == "EXACT for int8 weights, fast arithmetic (KL 0.00043 over 512 tokens)"
    )
    assert lossy({**fast, "exact": False}) == "LOSSY"


def test_components_are_made_without_interface_files() -> None:
    assert component_meta.create_or_modify_pyi.__module__ == skip_interface_files.__module__
    assert gr.Slider.EVENTS
    assert gr.Slider(0, 1).get_config()["maximum"] == 1


@pytest.mark.parametrize("text", ["45%", "6.5GB", "300MB", "800MiB", "12GiB", "123456789"])
def test_a_budget_is_written_as_it_was_typed(text: str) -> None:
    assert written(Budget.parse(text)) == text
    assert Budget.parse(written(Budget.parse(text))) == Budget.parse(text)
