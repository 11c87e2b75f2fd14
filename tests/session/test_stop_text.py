"""An answer ends before the first of its stop texts, however it is cut into tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.engine.stop_text import StopText

LETTERS = st.text("ab", max_size=12)


def shown(pieces: list[str], stops: list[str]) -> tuple[str, str]:
    """What is shown in the end, and what ended it."""
    stop, text = StopText(stops), ""
    for piece in pieces:
        text += stop.feed(piece)
        if stop.found:
            return text, stop.found
    return text + stop.rest(), ""


@given(st.lists(LETTERS, max_size=8), st.lists(LETTERS, max_size=3))
def test_it_shows_the_text_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    text, stops = "".join(pieces), [one for one in stops if one]
    told, found = shown(pieces, stops)
    assert bool(found) == any(one in text for one in stops)
    assert text.startswith(told + found)
    assert told == text if not found else not any(one in told for one in stops)


@given(LETTERS, st.lists(LETTERS, max_size=3))
def test_what_cannot_begin_a_stop_is_shown_at_once(text: str, stops: list[str]) -> None:
    stop = StopText(stops)
    told = stop.feed(text)
    held = text[len(told) :]
    assert stop.found or not held or any(one.startswith(held) for one in stops)


def test_of_two_that_are_complete_the_earlier_and_then_the_longer_ends_it() -> None:
    assert shown(["one two three"], ["three", "two"]) == ("one ", "two")
    assert shown(["one two"], ["tw", "two"]) == ("one ", "two")
    assert shown(["a</e", "nd>b"], ["</end>"]) == ("a", "</end>")
    assert shown(["a</e", "n"], ["</end>"]) == ("a</en", "")
