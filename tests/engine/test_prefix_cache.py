"""Which kept text a request continues from, what is dropped, and that its memory then holds its own tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.engine.prefix_cache import MARGIN
from core.settings.config import Settings
from core.settings.kv import KVSettings
from tests.engine.fake_kv import Asked, Kept
from tests.logged import Logged

A, B, C, D = ([n * 100 + i for i in range(8)] for n in range(1, 5))


def test_a_text_that_a_full_gpu_cannot_take_back_is_read_anew(caplog: Logged) -> None:
    kept = Kept()
    kept.ask(A, [1, 2, 3])
    kept.ask(B, [4, 5])  # A's text is in host memory now
    kept.memory.full = True
    assert kept.ask([*A, 1, 2, 3, 6], [7]) == 0 and kept.memory.content == [*A, 1, 2, 3, 6]
    assert "read anew" in caplog.text
    kept.memory.full = False
    assert kept.ask([*A, 1, 2, 3, 6, 7, 8], [9]) == len(A) + 4, "and kept from then on"


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
    kept.ask([*A, 1, 2, 3], [4, 5], lossy_key="lossy")  # from len(A) + 1 on
    text = [*A, 1, 2, 3, 4, 9]
    assert kept.ask(text, lossy_key="other") == len(A) + 1
    kept.ask([*A, 1, 2, 3], [4, 5], lossy_key="lossy")
    if cuts:
        assert kept.ask(text, lossy_key="lossy") == len(text) - 1
    assert kept.ask(text) <= len(text) - 1


def test_an_exact_request_never_takes_over_a_lossy_token() -> None:
    kept = Kept()
    kept.ask(A, [1, 2], lossy_key="lossy")
    assert kept.ask([*A, 1, 2, 3]) == 0
    assert kept.memory.holder is not None and kept.memory.holder.exact


def test_a_manner_names_the_lossy_settings_and_ends_with_what_was_kept() -> None:
    kept, exact, lossy = Kept(), Settings(), Settings({"miss": "drop"})
    name = kept.kvs.lossy_key(lossy)
    assert kept.kvs.lossy_key(exact) == "" != name == kept.kvs.lossy_key(lossy.with_({"link_gbps": 3}))
    assert kept.kvs.lossy_key(lossy.with_({"rho": 1})) != name != kept.kvs.lossy_key(lossy.with_({"predictor": "gate"}))
    kept.ask(A, [1, 2])
    kept.kvs.clear()
    assert kept.kvs.lossy_key(lossy) != name and kept.ask([*A, 1, 2]) == 0


def test_a_model_that_reads_prompts_whole_keeps_nothing() -> None:
    kept = Kept(carried=False)
    assert kept.ask(A, [1, 2]) == kept.ask([*A, 1, 2]) == 0 and len(kept.kvs) == 0


@pytest.mark.parametrize("cuts", [True, False])
def test_chats_beside_each_other_are_each_continued(cuts: bool) -> None:
    kept = Kept(cuts=cuts)
    texts = [[*A], [*B], [*C]]
    for turn in range(3):
        asked = [Asked(kept, text, beside=at != turn) for at, text in enumerate(texts)]  # by turns in the first memory
        assert [one.cached for one in asked] == [len(text) - 2 if turn else 0 for text in texts]
        for one in asked:
            one.answered([1, 2])
        assert len(kept.kvs) == 3 and sum(text.kv is not None for text in kept.kvs._texts) == 1
        for text in texts:
            text += [1, 2, 3]


def test_beside_others_a_text_is_copied_or_there_is_no_room_and_it_is_read_anew() -> None:
    kept = Kept()
    kept.ask(A, [1, 2])
    beside = Asked(kept, [*A[:5], 9, 9], beside=True)
    assert beside.cached == 5 and kept.memory.stashes == 1, "the edit; what it left is still there"
    assert kept.ask([*A, 1, 9], [1, 2]) == len(A) + 1
    kept.free = MARGIN - 1
    nothing = Asked(kept, [*A, 1, 9, 1, 7], beside=True)
    assert nothing.cached == 0 and nothing.memory.holder is nothing.kv
    nothing.answered([1, 2])
    assert kept.kvs.bytes == 0, "nor is its text kept"


STEP = st.tuples(
    st.sampled_from("next again edit other fail lossy short".split()),
    st.integers(0, 30),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)


@settings(deadline=None)
@given(st.lists(STEP, max_size=24), st.booleans(), st.integers(0, 4))
def test_the_memory_holds_its_own_tokens(steps: list[tuple[str, int, int, bool, bool]], cuts: bool, chats: int) -> None:
    """Each in the KV cache's own memory or beside it; some end only when all others have begun."""
    kept = Kept(chats, cuts=cuts)
    texts: list[list[int]] = [[1, 2, 3]]
    running: list[tuple[Asked, list[int], bool]] = []
    for kind, at, more, beside, later in steps:
        text = texts[at % len(texts)]
        said = [5 + i % 2 for i in range(more)]
        kept.free = MARGIN + 5 if kind == "short" else 4 * MARGIN
        if kind == "edit":
            text = [*text[: 1 + at % len(text)], 7]
        elif kind == "other":
            text = [8, *text[1:]]
        beside = beside or any(one.memory is kept.memory for one, *_ in running)
        asked = Asked(kept, text, "lossy" if kind == "lossy" else "", beside=beside)
        if later:
            running.append((asked, said, kind == "fail"))
        else:
            asked.answered(said, kind == "fail")
        if kind != "again":
            texts.append([*text, *said, 9])
        assert len(kept.kvs) <= chats and kept.kvs.bytes >= 0
    for asked, said, fail in running:
        asked.answered(said, fail)
        assert len(kept.kvs) <= chats
