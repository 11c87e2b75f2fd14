"""An answer that was cut and is continued is the one that it would have been, token by token: the demo model's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.engine import Engine
from core.engine.prompt import Prompt
from core.errors import PromptError
from core.settings.sampling import Sampling
from core.types import AnswerStats, Asked, Begun
from tests.loaded import loaded

DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo"
ASKED = [{"role": "user", "content": "Write a long story about a cache of experts."}]
GREEDY = {"temperature": 0.0}
DRAWN = {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "seed": 7}


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with loaded(DEMO, {"budget": "50%"}, context=512) as engine:
        yield engine


def answer(
    engine: Engine, asked: Asked, most: int, sampling: dict[str, float], *, reuse: bool = True
) -> tuple[list[int], str, AnswerStats]:
    """Tokens, text and statistics."""
    pieces = list(engine.generate(asked, Sampling.checked(**sampling, max_new_tokens=most), reuse=reuse))
    stats = pieces[-1].stats
    assert stats is not None
    return [p.token for p in pieces if p.token is not None], "".join(p.text for p in pieces), stats


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("reuse", [True, pytest.param(False, marks=pytest.mark.long(0.1))])
def test_a_cut_answer_goes_on_as_if_it_had_not_been_cut(demo: Engine, sampling: dict[str, float], reuse: bool) -> None:
    whole, text, stats = answer(demo, ASKED, 24, sampling, reuse=False)
    assert len(whole) > 12, "it is long enough to be cut"
    for cut in (1, len(whole) // 2):
        ids, begun, _ = answer(demo, ASKED, cut, sampling, reuse=reuse)
        assert ids == whole[:cut]
        rest, more, after = answer(demo, Begun(ASKED, begun, ids), 24 - cut, sampling, reuse=reuse)
        assert [*ids, *rest] == whole and begun + more == text
        assert after.begun_tokens == cut and after.prompt_tokens == stats.prompt_tokens + cut
        assert after.new_tokens + cut == stats.new_tokens
        assert not reuse or after.cached_tokens >= after.prompt_tokens - 2, "nothing is read again but the last token"


def test_one_that_was_stopped_in_the_middle_goes_on(demo: Engine) -> None:
    whole, text, _ = answer(demo, ASKED, 24, DRAWN, reuse=False)
    cancel, pieces = threading.Event(), []
    for piece in demo.generate(ASKED, Sampling.checked(**DRAWN, max_new_tokens=24), cancel, reuse=True):
        pieces.append(piece)
        if sum(p.token is not None for p in pieces) == 5:
            cancel.set()
    ids, begun = [p.token for p in pieces if p.token is not None], "".join(p.text for p in pieces)
    rest, more, _ = answer(demo, Begun(ASKED, begun, ids), 24 - len(ids), DRAWN)
    assert [*ids, *rest] == whole and begun + more == text


def test_a_text_without_tokens_and_a_foreign_one_are_tokenised(demo: Engine) -> None:
    """What a client sends back, or a user wrote; tokens that have another text are another model's."""
    whole, text, _ = answer(demo, ASKED, 24, GREEDY, reuse=False)
    begun = text[: text.index(" ", len(text) // 2)]
    for ids in ((), tuple(whole[:3]), (10**9,)):
        _, more, stats = answer(demo, Begun(ASKED, begun, ids), 24, GREEDY)
        assert (begun + more).startswith(text) and stats.begun_tokens > 3
    assert answer(demo, Begun("", "Once upon a time", ()), 3, GREEDY)[2].begun_tokens > 0, "of a plain text"


def test_answers_that_are_written_together_go_on(demo: Engine) -> None:
    from core.engine.batch_request import BatchRequest

    whole, _, _ = answer(demo, ASKED, 24, DRAWN, reuse=False)
    ids = whole[:9]
    begun = "".join(p.text for p in list(demo.generate(ASKED, Sampling.checked(**DRAWN, max_new_tokens=9))))
    sampling = Sampling.checked(**DRAWN, max_new_tokens=15)
    pieces = list(demo.generate_many([BatchRequest(0, Begun(ASKED, begun, ids), sampling)]))
    assert [one.piece.token for one in pieces if one.piece and one.piece.token is not None] == whole[9:]


def test_a_character_that_was_cut_in_two_is_whole_in_the_end(demo: Engine) -> None:
    """The tokens of an answer hold more than its text, where it was cut within a character."""
    prompt: Prompt = demo.prompt
    ids = prompt.tokenizer("né", add_special_tokens=False).input_ids
    assert prompt.begun(Begun(ASKED, "n", ids[:2]), [1, *ids[:2]]) == 2


def test_a_template_that_drops_the_answer_is_told(demo: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    without = "{% for m in messages %}{{ m.content if m.role == 'user' else '' }}{% endfor %}"
    monkeypatch.setattr(demo.prompt.tokenizer, "chat_template", without)
    with pytest.raises(PromptError, match="cannot be continued"):
        list(demo.generate(Begun(ASKED, "Once")))


@pytest.mark.parametrize("begun", ["Once", "Once ", "Once\n\n", " Once"])
def test_the_template_ends_with_what_was_begun(demo: Engine, begun: str) -> None:
    text = demo.prompt.text(ASKED, begun)
    assert text.endswith(begun.lstrip()) and text.startswith(demo.prompt.text(ASKED).rstrip()), text
