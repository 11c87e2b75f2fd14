"""Which kept text a request continues from, what is dropped, and that the memory then holds the request's own tokens.

The memory is a fake whose content is the tokens themselves, so that a wrong prefix shows at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.runtime.kv_cache import Moment, SequenceKV, Stash
from core.session.kept import MARGIN, KeptKVs, Start
from core.settings.config import Settings
from core.settings.kv import KVSettings


@dataclass
class FakeMemory:
    """Has the tokens where the real one has keys and values: `cuts`: they can be cut; else they are a state."""

    cuts: bool = True
    holder: SequenceKV | None = None
    content: list[int] = field(default_factory=list)
    before_taken: Any = None
    stashes: int = 0

    def compute(self, kv: SequenceKV, tokens: list[int]) -> None:
        assert kv is self.holder and kv.held
        self.content = [*self.content[: kv.length], *tokens]
        kv.length += len(tokens)

    def fresh(self) -> SequenceKV:
        if self.holder is not None:
            self.before_taken(self.holder)
            self.holder.give_up()
        self.content, self.holder = [], SequenceKV(object())  # type: ignore[arg-type]
        return self.holder

    def cuttable(self, kv: SequenceKV) -> bool:
        return self.cuts

    def cut(self, kv: SequenceKV, length: int, moment: Any = None) -> SequenceKV:
        assert kv is self.holder and (self.cuts or moment is not None or (kv.whole and length == kv.length))
        self.content = (self.content if moment is None else moment.layers[0].tolist())[:length]
        after = SequenceKV(object())  # type: ignore[arg-type]
        after.length, after.lossy_from, after.manners = kv.length, kv.lossy_from, kv.manners
        after.cut_to(length)
        kv.give_up()
        self.holder = after
        return after

    def moment(self, kv: SequenceKV) -> Any:
        return None if self.cuts or not kv.whole else self._moment(kv)

    def _moment(self, kv: SequenceKV) -> Any:
        layers: Any = (torch.tensor(self.content),)
        return Moment(kv.length, layers)

    def stash_bytes(self, kv: SequenceKV) -> int:
        return kv.length

    def stash(self, kv: SequenceKV) -> Any:
        self.stashes += 1
        layers: Any = (torch.tensor(self.content),)
        return Stash(kv.length, layers, self._moment(kv) if kv.whole else None, self.cuts, kv.lossy_from, kv.manners)

    def put_back(self, stash: Any, length: int, moment: Any = None) -> SequenceKV:
        kv = self.fresh()
        assert stash.cuttable or moment is not None or length == stash.length
        self.content = (moment or stash).layers[0].tolist()[:length]
        kv.length, kv.lossy_from, kv.manners = stash.length, stash.lossy_from, stash.manners
        kv.cut_to(length)
        return kv


class Kept:
    """Requests against the fake memory. Every text has host bytes, so that memory can run short."""

    def __init__(self, chats: int = 4, *, cuts: bool = True, carried: bool = True) -> None:
        self.memory, self.free = FakeMemory(cuts), 4 * MARGIN
        memory: Any = self.memory
        self.kvs = KeptKVs(memory, KVSettings(chats), carried, lambda: self.free)

    def ask(self, ids: list[int], said: list[int] = [], manner: str = "", fail: bool = False) -> int:  # noqa: B006
        """The tokens that were taken over. `said` is drawn and computed but for its last token."""
        start: Start = self.kvs.begin(ids, manner)
        kv, cached = start.kv, start.kv.length
        assert self.memory.content[:cached] == ids[:cached] and cached < len(ids)
        moments = [start.moment] if start.moment is not None else []
        assert self.memory.cuts or not cached or [one.length for one in moments] == [cached]
        self.memory.compute(kv, ids[cached:])
        if (moment := self.memory.moment(kv)) is not None:
            moments.append(moment)
        self.memory.compute(kv, said[:-1])
        if manner:
            kv.mark_lossy(cached, manner)
        if fail:
            kv.whole = False
            self.memory.content += [999]  # what the pass that broke off left
        self.kvs.end([*ids, *said], len(ids), kv, moments)
        return cached


A, B, C, D = ([n * 100 + i for i in range(8)] for n in range(1, 5))


def test_the_next_turn_takes_over_all_that_was_computed() -> None:
    kept = Kept()
    assert kept.ask(A, [1, 2, 3]) == 0
    assert kept.ask([*A, 1, 2, 3, 4, 5], [6]) == len(A) + 2  # the last token was drawn and not computed
    assert len(kept.kvs) == 1


def test_an_answer_written_again_reads_the_last_token_and_replaces_it() -> None:
    kept = Kept()
    kept.ask(A, [1, 2, 3])
    assert kept.ask(A, [4, 5]) == len(A) - 1
    assert len(kept.kvs) == 1 and kept.ask([*A, 4, 9]) == len(A) + 1


def test_an_edit_takes_over_what_is_common_and_leaves_the_old_text() -> None:
    kept = Kept()
    kept.ask(A, [1, 2, 3])
    assert kept.ask([*A[:5], 7, 7, 7, 7, 7, 7, 7]) == 5
    assert kept.ask([*A, 1, 2, 3, 4]) == len(A) + 2, "the old version"


def test_chats_that_alternate_are_each_continued() -> None:
    kept = Kept()
    texts = [[*A], [*B], [*C]]
    for text in texts:
        kept.ask(text, [1, 2])
    for _ in range(3):
        for text in texts:
            text += [1, 2, 3]
            assert kept.ask(text, [1, 2]) == len(text) - 2
    assert len(kept.kvs) == 3


def test_beyond_the_limit_old_versions_go_first_then_the_oldest() -> None:
    kept = Kept(3)
    kept.ask(A, [1, 2])
    kept.ask(B, [1, 2])
    kept.ask([*B[:6], 5, 5, 5], [1, 2])  # an edit of B
    kept.ask(C, [1, 2])  # drops the old version of B
    assert kept.ask([*A, 1, 9]) == len(A) + 1
    assert kept.ask([*B, 1, 9]) == 6
    kept = Kept(2)
    for text in (A, B, C):
        kept.ask(text, [1, 2])
    assert kept.ask([*A, 1, 9]) == 0 and kept.ask([*C, 1, 9]) == len(C) + 1


def test_off_keeps_nothing_and_one_needs_no_host_memory() -> None:
    kept = Kept(0)
    assert kept.ask(A, [1, 2]) == kept.ask([*A, 1, 2]) == 0 and len(kept.kvs) == 0
    kept = Kept(1)
    kept.ask(A, [1, 2])
    assert kept.ask([*A[:4], 3, 3]) == 4 and kept.memory.stashes == 0
    kept = Kept(3)
    for text in (A, B, C):
        kept.ask(text, [1, 2])
    kept.kvs.configure(KVSettings(3), KVSettings(1))
    assert len(kept.kvs) == 1 and kept.ask([*C, 1, 9]) == len(C) + 1
    kept.kvs.configure(KVSettings(1), KVSettings(0))
    assert len(kept.kvs) == 0 and kept.kvs.bytes == 0


def test_when_host_memory_runs_short_the_oldest_go() -> None:
    kept = Kept(4, cuts=False)
    for text in (A, B, C):
        kept.ask(text, [1, 2])
    kept.free = MARGIN - 1  # for good: all copies go, and none is made
    assert kept.ask(D, [1, 2]) == 0
    assert len(kept.kvs) == 1 and kept.memory.holder is not None and kept.memory.holder.held


def test_what_a_failing_pass_left_is_cut_away_or_not_used() -> None:
    kept = Kept()
    kept.ask(A, [1, 2], fail=True)
    assert kept.ask([*A, 1, 9]) == len(A) + 1
    kept = Kept(cuts=False)
    kept.ask(A, [1, 2, 3], fail=True)
    kept.ask(B)  # it moves to host memory
    assert kept.ask([*A, 1, 2, 9]) == len(A), "where its prompt ended"


def test_a_state_goes_on_from_its_end_from_its_prompt_or_from_the_turn_before() -> None:
    kept = Kept(cuts=False)
    kept.ask(A, [1, 2, 3])
    assert kept.ask([*A, 1, 2, 3, 4], [5, 6]) == len(A) + 2
    assert kept.ask([*A, 1, 2, 3, 4], [7, 8]) == len(A) + 2, "written again: from where the turn began"
    assert kept.ask([*A, 1, 2, 3, 4, 9]) == len(A) + 4, "another answer: from where the prompt ended"
    assert kept.ask([*A[:3], 5, 5]) == 0


@pytest.mark.parametrize("cuts", [True, False])
def test_lossy_tokens_are_continued_in_the_same_manner_only(cuts: bool) -> None:
    kept = Kept(cuts=cuts)
    kept.ask(A, [1, 2])
    kept.ask([*A, 1, 2, 3], [4, 5], manner="lossy")  # from len(A) + 1 on
    text = [*A, 1, 2, 3, 4, 9]
    assert kept.ask(text, manner="other") == len(A) + 1
    kept.ask([*A, 1, 2, 3], [4, 5], manner="lossy")
    if cuts:
        assert kept.ask(text, manner="lossy") == len(text) - 1
    assert kept.ask(text) <= len(text) - 1


def test_an_exact_request_never_takes_over_a_lossy_token() -> None:
    kept = Kept()
    kept.ask(A, [1, 2], manner="lossy")
    assert kept.ask([*A, 1, 2, 3]) == 0
    assert kept.memory.holder is not None and kept.memory.holder.exact


def test_a_manner_names_the_lossy_settings_and_ends_with_what_was_kept() -> None:
    kept, exact, lossy = Kept(), Settings(), Settings({"miss": "drop"})
    name = kept.kvs.manner(lossy)
    assert kept.kvs.manner(exact) == "" != name == kept.kvs.manner(lossy.with_({"link_gbps": 3}))
    assert kept.kvs.manner(lossy.with_({"rho": 1})) != name != kept.kvs.manner(lossy.with_({"predictor": "gate"}))
    kept.ask(A, [1, 2])
    kept.kvs.clear()
    assert kept.kvs.manner(lossy) != name and kept.ask([*A, 1, 2]) == 0


def test_a_model_that_reads_prompts_whole_keeps_nothing() -> None:
    kept = Kept(carried=False)
    assert kept.ask(A, [1, 2]) == kept.ask([*A, 1, 2]) == 0 and len(kept.kvs) == 0


STEP = st.tuples(
    st.sampled_from("next again edit other fail lossy short".split()), st.integers(0, 30), st.integers(0, 3)
)


@settings(deadline=None)
@given(st.lists(STEP, max_size=24), st.booleans(), st.integers(0, 4))
def test_whatever_is_asked_the_memory_holds_its_own_tokens(
    steps: list[tuple[str, int, int]], cuts: bool, chats: int
) -> None:
    kept = Kept(chats, cuts=cuts)
    texts: list[list[int]] = [[1, 2, 3]]
    for kind, at, more in steps:
        text = texts[at % len(texts)]
        said = [5 + i % 2 for i in range(more)]
        kept.free = MARGIN + 5 if kind == "short" else 4 * MARGIN
        if kind == "edit":
            text = [*text[: 1 + at % len(text)], 7]
        elif kind == "other":
            text = [8, *text[1:]]
        kept.ask(text, said, manner="lossy" if kind == "lossy" else "", fail=kind == "fail")
        if kind != "again":
            texts.append([*text, *said, 9])
        assert len(kept.kvs) <= chats and kept.kvs.bytes >= 0
