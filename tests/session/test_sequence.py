"""What ends a sequence, and which tokens of it are computed next."""

from __future__ import annotations

import threading
from typing import Any

from core.engine.quality.sample import Sample
from core.engine.sequence import Sequence, Start, Stop
from core.runtime.batch import Batch, Share
from core.runtime.kv_cache import SequenceKV

END = 0


def sequence(limit: int = 3, *, limited_by_context: bool = False, request: int = 1) -> Sequence:
    cache: Any = object()  # what transformers would append to
    stop = Stop({END}, limit, limited_by_context, threading.Event())
    return Sequence(request, [5, 6, 7, 8], Start(SequenceKV(cache)), lambda ids, logits: END, stop, Sample())


def test_an_end_token_ends_it_and_is_no_part_of_it() -> None:
    one = sequence()
    assert one.take(9) and not one.over and not one.take(END)
    assert (one.ids, one.drawn, one.over, one.reason) == ([5, 6, 7, 8, 9], 1, True, "stop")


def test_its_limit_ends_it_whether_it_is_the_reader_s_or_the_context_s() -> None:
    for limited_by_context, reason in ((False, "length"), (True, "context")):
        one = sequence(2, limited_by_context=limited_by_context)
        assert one.take(9) and not one.over
        assert one.take(9) and one.over and one.reason == reason


def test_who_cancels_it_ends_it_and_no_other() -> None:
    one, other = sequence(), sequence()
    one.stop.cancel.set()
    assert (one.over, one.reason) == (True, "cancelled")
    assert not other.over


def test_its_share_of_a_pass_is_what_follows_its_kv() -> None:
    one, other = sequence(request=3), sequence(request=4)
    one.kv.length = 2
    batch = Batch("prefill", (one.share(9), other.share(1)))
    assert batch.shares == (Share([7, 8], one.kv, 3), Share([5], other.kv, 4))
    assert (batch.tokens, batch.size, batch.rows) == ([7, 8, 5], 3, ((3, 2), (4, 1)))
    one.start_over(SequenceKV(object()))  # type: ignore[arg-type]
    assert one.share(9).tokens == [5, 6, 7, 8]
