"""Whose turn it is: owners exclude one another, guests give way."""

from __future__ import annotations

import threading

from core.session.model_lock import Turn

WAIT_S = 20.0


def test_owners_exclude_one_another_and_guests() -> None:
    turn = Turn()
    assert turn.take()
    assert turn.taken
    assert not turn.take()
    assert not turn.visit()
    turn.give()
    assert not turn.taken
    assert turn.visit()
    assert not turn.visit()
    assert not turn.taken
    turn.give()
    assert turn.take()


def test_a_guest_is_asked_to_leave_and_nobody_slips_in_before_the_owner() -> None:
    turn, got = Turn(), list[bool]()
    assert turn.visit()
    owner = threading.Thread(target=lambda: got.append(turn.take()))
    owner.start()
    while not turn.asked:
        assert owner.is_alive()
    assert not turn.visit()
    turn.give()
    assert not turn.visit() or got == [True]
    owner.join(WAIT_S)
    assert got == [True]
    assert turn.taken
    assert not turn.asked


def test_who_comes_while_it_is_had_briefly_waits_and_is_not_refused() -> None:
    turn, got = Turn(), list[bool]()
    assert turn.take(briefly=True)
    assert not turn.taken
    assert not turn.visit()
    owner = threading.Thread(target=lambda: got.append(turn.take()))
    owner.start()
    while not turn.asked:
        assert owner.is_alive()
    turn.give()
    owner.join(WAIT_S)
    assert got == [True]
    assert not turn.take(briefly=True)  # an answer applies what was asked for itself, between two tokens
