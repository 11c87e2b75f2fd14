"""Which prefetch goes first and which would come too late: formulas against examples worked out by hand."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.cache.prefetch_priority import Rhythm, Schedule
from core.memory.slot import Slot
from core.memory.ticket import Link, Ticket
from core.policy.predict import LayerMap, Prediction
from core.settings.registry import variant
from core.simulate.virtual_clock import VirtualLink
from core.types import Segment

LAYERS, EXPERTS = 4, 8
NOTHING: Any = None


def queued(eid: int, score: float) -> Ticket:
    ticket = Ticket(Segment(eid, range(1)), [Slot(eid, NOTHING)], 1, False, "decode")
    ticket.score = score
    return ticket


def rhythm(layer_s: float, wrap_s: float) -> Rhythm:
    """Of two tokens, each layer after `layer_s`, the first one of the next token `wrap_s` after the last."""
    noted, now_s = Rhythm(LAYERS), 10.0
    for token in range(2):
        for layer in range(LAYERS):
            now_s += wrap_s if layer == 0 and token else layer_s
            noted.note("decode", layer, now_s)
    return noted


def test_layers_are_counted_on_into_the_next_token() -> None:
    schedule = Schedule(LAYERS, EXPERTS)
    assert [schedule.distance(1, layer) for layer in range(LAYERS)] == [3, 4, 1, 2]
    assert [schedule.distance(-1, layer) for layer in range(LAYERS)] == [1, 2, 3, 4]
    assert schedule.distance(3, 0) == 1


def test_by_default_priority_is_probability_over_distance() -> None:
    # Made in layer 1: .9 for layer 3 is .9 / 2 = .45, .5 for layer 2 is .5, .96 for layer 0 of the next token .96 / 3.
    predictions = [Prediction(3, 0, 0.9), Prediction(2, 1, 0.5), Prediction(0, 2, 0.96), Prediction(2, 3, 0.45)]
    best = Schedule(LAYERS, EXPERTS).sort(predictions, 1)
    assert [(g.layer, g.expert) for g in best] == [(2, 1), (3, 0), (2, 3), (0, 2)]


def test_an_order_is_its_predictor_s() -> None:
    """FineMoE section 4.5: by p of the map over the distance; ExpertFlow section 3.2: layer by layer, as they are used.
    The same predictions of layer 1: p = .9 and .1 in layer 3, .4 in layer 2; k T = 4 experts are drawn by it."""
    p = {(3, 0): 0.9, (2, 1): 0.4, (3, 2): 0.1}
    predictions = [Prediction(layer, expert, 1 - (1 - share) ** 4) for (layer, expert), share in p.items()]
    maps = [LayerMap(layer, np.zeros(EXPERTS, np.float32)) for layer in (2, 3)]
    for (layer, expert), share in p.items():
        maps[layer - 2].distribution[expert] = share

    def order(name: str) -> list[tuple[tuple[int, int], float]]:
        schedule = Schedule(LAYERS, EXPERTS)
        schedule.use(variant("predictor", name).make.priority, maps)
        ranked = schedule.rank(predictions, 1, [], lambda eid: True, VirtualLink(0.5), 1).issue
        assert [one.eid for one in ranked] == [g.layer * EXPERTS + g.expert for g in schedule.sort(predictions, 1)]
        return [(divmod(one.eid, EXPERTS), one.priority) for one in ranked]

    assert order("expert_map") == [
        ((3, 0), pytest.approx(0.45)),
        ((2, 1), pytest.approx(0.4)),
        ((3, 2), pytest.approx(0.05)),
    ]
    assert order("routing_path") == [
        ((2, 1), pytest.approx(-0.1296)),
        ((3, 0), pytest.approx(-1.0001)),
        ((3, 2), pytest.approx(-1.6561)),
    ]
    assert [at for at, _ in order("gate")] == [(2, 1), (3, 0), (3, 2)]
    predictions = [Prediction(0, 0, 0.2), Prediction(1, 1, 0.9), Prediction(2, 2, 0.9)]
    assert [eid // EXPERTS for eid in submitted("routing_path", predictions)] == [0, 1, 2]
    assert [eid // EXPERTS for eid in submitted("gate", predictions)] == [1, 2, 0]


def submitted(name: str, predictions: list[Prediction]) -> list[int]:
    schedule = Schedule(LAYERS, EXPERTS)
    schedule.use(variant("predictor", name).make.priority, ())
    return [g.layer * EXPERTS + g.expert for g in schedule.sort(predictions, -1)]


def test_a_queued_prefetch_takes_the_order_of_newer_maps() -> None:
    schedule, ticket = Schedule(LAYERS, EXPERTS), queued(17, 0.9)
    for distribution, priority in ((0.5, 0.25), (0.25, 0.125)):
        schedule.use(
            variant("predictor", "expert_map").make.priority, [LayerMap(2, np.full(EXPERTS, distribution, np.float32))]
        )
        ranked = schedule.rank([], 0, [ticket], lambda eid: False, VirtualLink(0.5), 1)
        assert ranked.priorities == [(ticket, priority)]


@given(
    st.lists(
        st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1), st.floats(0, 1)),
        max_size=20,
        unique_by=lambda g: g[:2],
    ),
    st.dictionaries(st.integers(0, LAYERS * EXPERTS - 1), st.floats(0, 1), max_size=8),
    st.integers(-1, LAYERS - 1),
)
def test_new_and_queued_ordered(predicted: list[tuple[int, int, float]], waiting: dict[int, float], at: int) -> None:
    schedule, predictions = Schedule(LAYERS, EXPERTS), [Prediction(*one) for one in predicted]
    tickets = [queued(eid, score) for eid, score in waiting.items()]
    ranked = schedule.rank(predictions, at, tickets, lambda eid: eid not in waiting, VirtualLink(0.5), 1)
    scores = {layer * EXPERTS + expert: score for layer, expert, score in predicted}

    def priority(eid: int, score: float) -> float:
        return score / schedule.distance(at, eid // EXPERTS)

    assert not ranked.drop  # without a deadline nothing is too late
    assert {t.eid: p for t, p in ranked.priorities} == {e: priority(e, scores.get(e, s)) for e, s in waiting.items()}
    assert {(e, s, p) for e, s, p in ranked.issue} == {
        (e, s, priority(e, s)) for e, s in scores.items() if e not in waiting
    }
    order = [p for _, _, p in ranked.issue]
    assert order == sorted(order, reverse=True)


def test_the_rhythm_is_the_moving_median_of_each_kind_of_step() -> None:
    noted = Rhythm(LAYERS)
    assert noted.until(0, 1) == math.inf
    noted = rhythm(layer_s=2.0, wrap_s=5.0)
    assert [noted.until(1, d) for d in (1, 2, 3, 4)] == [2.0, 4.0, 9.0, 11.0]  # past layer 3 the way to the next token
    assert noted.until(-1, 1) == 2.0 and noted.until(-1, 4) == 8.0
    noted.note("decode", 0, 1000.0)  # one slow step does not move a median
    assert noted.until(1, 1) == 2.0


def test_layers_that_made_no_predictions_took_as_long_each() -> None:
    noted, wrapped = Rhythm(LAYERS), Rhythm(LAYERS)
    for layer, now_s in ((0, 1.0), (3, 10.0), (2, 100.0), (3, 105.0)):  # no time is known of a way past layer 0
        noted.note("decode", layer, now_s)
    assert noted.until(0, 2) == 8.0  # the median of 3 and 5 is 4
    for layer, now_s in ((3, 1.0), (0, 8.0), (1, 9.0)):
        wrapped.note("decode", layer, now_s)
    assert wrapped.until(3, 1) == 7.0


def test_prompts_have_a_rhythm_of_their_own_and_only_the_present_one() -> None:
    noted = rhythm(layer_s=2.0, wrap_s=5.0)
    noted.note("prefill", 0, 100.0)
    assert noted.until(0, 1) == math.inf
    noted.note("prefill", 1, 130.0)
    assert noted.until(1, 2) == 60.0
    noted.note("prefill", 0, 140.0)  # the next chunk has another length
    assert noted.until(0, 1) == math.inf
    noted.note("decode", 0, 150.0)  # the step from a prompt to a token is not one of either
    assert noted.until(0, 1) == 2.0


@pytest.mark.parametrize(("deadline", "issued", "dropped"), [(True, [17, 24], [18]), (False, [17, 19, 24], [])])
def test_what_cannot_arrive_in_time_is_not_fetched(deadline: bool, issued: list[int], dropped: list[int]) -> None:
    # In layer 1, layers 2 s apart, copies 0.9 s, 0.3 s of one still to go. By priority: eid 17 (layer 2) .9, over at
    # 1.2; eid 18 (queued, layer 2) .8 at 2.1 > 2 is too late, so is 19; eid 24 (layer 3, 4 s away) .2 is over at 2.1.
    link = VirtualLink(0.9)
    link.submit(queued(31, 1.0))
    link.advance(0.6)
    schedule = Schedule(LAYERS, EXPERTS)
    schedule.deadline, schedule.rhythm = deadline, rhythm(2.0, 2.0)
    predictions = [Prediction(2, 1, 0.9), Prediction(2, 3, 0.7), Prediction(3, 0, 0.4)]
    ranked = schedule.rank(predictions, 1, [queued(18, 0.8)], lambda eid: True, link, 1)
    assert ([eid for eid, _, _ in ranked.issue], [t.eid for t in ranked.drop]) == (issued, dropped)


def test_the_buffer_gets_copies_that_can_start_in_time() -> None:
    # In layer 1, layers 2 s apart, copies 0.9 s, 0.3 s of one still to go. By priority: eid 17 (layer 2) .9 starts at
    # 0.3, eid 19 .7, of which half is to be copied, at 1.2, eid 20 .6 at 1.65, eid 21 .5 at 2.55 > 2 is too late, and
    # ends the plan: eid 24 (layer 3, 4 s away) .2 would start in time. 22 is not to be copied; 18 is queued already.
    link = VirtualLink(0.9)
    link.submit(queued(31, 1.0))
    link.advance(0.6)
    schedule, ticket = Schedule(LAYERS, EXPERTS), queued(18, 0.1)
    schedule.rhythm = rhythm(2.0, 2.0)
    scores = {17: 0.9, 22: 0.8, 19: 0.7, 20: 0.6, 21: 0.5, 24: 0.4, 18: 0.05}
    share = {17: 1.0, 22: 0.0, 19: 0.5, 20: 1.0, 21: 1.0, 24: 1.0, 18: 0.0}
    predictions = [Prediction(eid // EXPERTS, eid % EXPERTS, score) for eid, score in scores.items()]
    changes = schedule.plan_buffer(predictions, 1, [ticket], share.__getitem__, link, 1)
    assert changes.issue == [(17, 0.9, 0.9), (19, 0.7, 0.7), (20, 0.6, 0.6)] and not changes.drop
    assert changes.priorities == [(ticket, 0.05)] and ticket.score == 0.05


def test_a_link_of_which_nothing_is_known_is_never_too_slow() -> None:
    schedule, link = Schedule(LAYERS, EXPERTS), VirtualLink(0.0)
    schedule.deadline, schedule.rhythm = True, rhythm(1e-9, 1e-9)
    as_link: Link = link
    assert len(schedule.rank([Prediction(2, 1, 0.9)], 1, [], lambda eid: True, as_link, 1).issue) == 1
