"""Whose turn it is: owners exclude one another, guests give way."""

from __future__ import annotations

import threading

from core.engine.model_access import ModelLock

WAIT_S = 20.0


def test_owners_exclude_one_another_and_guests() -> None:
    turn = ModelLock()
    assert turn.acquire()
    assert turn.taken
    assert not turn.acquire()
    assert not turn.try_acquire_idle()
    turn.release()
    assert not turn.taken
    assert turn.try_acquire_idle()
    assert not turn.try_acquire_idle()
    assert not turn.taken
    turn.release()
    assert turn.acquire()


def test_a_guest_is_asked_to_leave_and_nobody_slips_in_before_the_owner() -> None:
    turn, got = ModelLock(), list[bool]()
    assert turn.try_acquire_idle()
    owner = threading.Thread(target=lambda: got.append(turn.acquire()))
    owner.start()
    while not turn.asked:
        assert owner.is_alive()
    assert not turn.try_acquire_idle()
    turn.release()
    assert not turn.try_acquire_idle() or got == [True]
    owner.join(WAIT_S)
    assert got == [True]
    assert turn.taken
    assert not turn.asked


def test_who_comes_while_it_is_had_briefly_waits_and_is_not_refused() -> None:
    turn, got = ModelLock(), list[bool]()
    assert turn.acquire(briefly=True)
    assert not turn.taken
    assert not turn.try_acquire_idle()
    owner = threading.Thread(target=lambda: got.append(turn.acquire()))
    owner.start()
    while not turn.asked:
        assert owner.is_alive()
    turn.release()
    owner.join(WAIT_S)
    assert got == [True]
    assert not turn.acquire(briefly=True)  # an answer applies what was asked for itself, between two tokens
