"""What the tabs Analysis and Calibrate draw and say, without a browser."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from html import unescape
from typing import Any

import numpy as np
import pytest

from app.services import probes
from app.services.analysis import analyst, tables_csv
from app.services.analysis.lab import Lab, Run
from app.services.analysis.whatif import Table
from app.ui.tabs import analysis_figures, analysis_views, calibrate_figures, calibrate_views, lab_views
from app.ui.tabs.analysis_answers import measured_on
from core.policy.substitute.list_lengths import ListRule
from core.profile import PARTS, Profile
from core.settings.calibration import CalibrationSettings
from core.simulate.blocks import Block
from core.system.wording import format_bytes
from tests.app.test_whatif import ABOUT, row, table
from tests.fake_models import SHAPE
from tests.fake_profiles import fake_profile
from tests.selection import layered

LAB = Lab(
    ABOUT,
    4,
    (
        Run("none", hit_rate=0.5, tpot_ms=14.0, saved_ms=0.0, prefetch_bytes=0.0, wasted_bytes=0.0),
        Run("recent", "", (0.5, 0.7), (0.6, 0.9), 0.6, 13.0, 1.0, 4e6, 1e6, 0.1),
        Run("transitions", "", (0.4, None), (0.5, None), 0.55, 14.5, -0.5, 8e6, 6e6, 0.2, replayed=True),
        Run("oracle", hit_rate=1.0, tpot_ms=10.0, saved_ms=4.0, prefetch_bytes=9e6, wasted_bytes=0.0),
        Run("gate", "It looks at <hidden> states."),
    ),
)


def test_curves_are_in_percent_and_milliseconds() -> None:
    made = table()
    assert analysis_figures.curves(made, "hit_rate")["lru"] == ([25.0, 37.5, 62.5, 75.0], [10.0, 20.0, 80.0, 85.0])
    x, y = analysis_figures.curves(made, "tpot_ms")["lru"]
    assert (x[0], y[0]) == (25.0, pytest.approx(17.2))
    assert analysis_figures.bound_curve(made, "hit_rate")[1] == pytest.approx([15.0, 25.0, 85.0, 90.0])
    unknown = replace(made, rows=tuple(replace(one, tpot_ms=None) for one in made.rows))
    assert analysis_figures.curves(unknown, "tpot_ms") == {}


@pytest.mark.parametrize("dark", layered([True, False], quick=lambda dark: dark))
def test_the_chosen_policy_stands_out_and_the_cliff_is_marked(dark: bool) -> None:
    for metric in ("hit_rate", "tpot_ms"):
        drawn = analysis_figures.budget_curve(table(), metric, dark)
        widths = {trace.name: trace.line.width for trace in drawn.data}
        assert widths["LRU"] > widths["LFU"]
        assert widths["Belady (forced admission)"] == 2
        assert "Belady with bypass" not in widths, "too few slots for it at every budget"
        texts = {note.text for note in drawn.layout.annotations}
        assert {"LRU cliff", "now"} <= texts
        assert "simulated" in drawn.layout.title.text
        assert "http" not in drawn.to_json().replace("http://www.w3.org", "")
    flat = table({4: 0.25, 8: 0.5, 12: 0.75, 16: 1.0})
    texts = {note.text for note in analysis_figures.budget_curve(flat, "hit_rate", dark).layout.annotations}
    assert "LRU cliff" not in texts


def test_one_budget_is_compared_the_fastest_first() -> None:
    made = replace(table(), rows=(*table().rows, replace(row("lru", 10, 0.9), predictor="recent")))
    policies, predictors, values, timed = analysis_figures.grid(made, 10)
    assert (policies, predictors, timed) == (["lru", "lfu"], ["none", "recent"], True)
    assert values[0][1] == pytest.approx(10.8)
    assert values[1][1] is None
    assert analysis_figures.compared(made, 10, True).data[0].type == "heatmap"
    plain = analysis_figures.compared(table(), 10, True)
    assert plain.data[0].type == "bar"
    assert list(plain.data[0].y) == ["LRU", "LFU"], "drawn from below"
    bare = replace(table(), about=replace(ABOUT, clock=None))
    assert analysis_figures.grid(bare, 10)[2:] == ([[pytest.approx(82.0)], [pytest.approx(80.0)]], False)


def test_the_table_has_bounds_last_and_marks_what_is_in_use() -> None:
    text = analysis_views.listing(table(), 10)
    body = text[text.index("<tbody>") :]
    assert body.index("LFU") < body.index("LRU") < body.index("Belady") < body.index("Everything resident")
    assert text.count("<tr class='chosen'>") == 1
    assert "hit" in text
    everything = analysis_views.listing(table(), 0)
    assert everything.count("<tr") == 1 + 8 + 4 + 4 + 1
    assert analysis_views.nearest(table(), 8) == 6
    assert analysis_views.budgets(table())[-1] == ("All budgets", 0)


def test_names_from_elsewhere_are_text() -> None:
    mean = "<img src=x onerror=alert(1)>"
    about = replace(ABOUT, name=mean, model=mean, link=mean, notes=(mean,))
    for text in (
        analysis_views.summary(replace(table(), about=about)),
        lab_views.summary(replace(LAB, about=about)),
        calibrate_views.summary(fake_profile(mean, source=mean), 10),
        lab_views.listing(LAB),
        calibrate_views.question(fake_profile(mean)),
    ):
        assert "<img" not in text and "<hidden>" not in text


def costing(told: Mapping[str, Sequence[float]]) -> Table:
    """The table with a token's cost by policy in the parts of a trace, ten tokens each."""
    parts = {policy: tuple(Block(10, cost) for cost in costs) for policy, costs in told.items()}
    return replace(table(), rows=tuple(replace(row, blocks=parts[row.policy]) for row in table().rows))


def test_the_cards_show_what_is_in_use_and_the_best() -> None:
    text = analysis_views.summary(table())
    assert "LRU, in use" in text
    assert "LFU, first of these, but not clearly ahead of the one in use" in text, "how sure it is, is not known"
    same = [1.0, 2.0, 1.5, 2.5, 2.0]  # what a token costs in five parts of the trace
    told = {"lru": same, "lfu": [cost - 0.2 for cost in same]}
    assert "LFU, best of these" in analysis_views.summary(costing(told)), "as much less in every part"
    told["lfu"] = [same[0] - 1.0, *same[1:]]
    assert "not clearly ahead" in analysis_views.summary(costing(told)), "as much less, all in one part"
    assert "62.5 %" in text, "the cliff"
    unnamed = analysis_views.summary(replace(table(), about=replace(ABOUT, chosen=("gone", "none", 8))))
    assert "in use" not in unnamed


def test_the_lab_s_figures() -> None:
    assert [run.predictor for run in lab_views.tested(LAB)] == ["recent", "transitions"]
    drawn = lab_views.recall_map(LAB, True)
    assert [list(line) for line in drawn.data[0].z] == [[40.0, None], [50.0, 70.0]]
    assert "Recall@4" in lab_views.recall_map(LAB, True, most=True).layout.title.text
    points = {trace.text[0]: (trace.x[0], trace.y[0]) for trace in lab_views.worth(LAB, False).data}
    assert points == {"Recently used (TLP)": (1.0, 1.0), "Transition counts (SLP)": (6.0, -0.5)}
    untimed = replace(LAB, runs=tuple(replace(run, saved_ms=None) for run in LAB.runs))
    assert lab_views.worth(untimed, True) is None
    assert lab_views.bars(LAB, True).data[1].x[1] == pytest.approx(60.0)
    nothing = replace(LAB, runs=LAB.runs[-1:])
    assert (lab_views.recall_map(nothing, True), lab_views.bars(nothing, True)) == (None, None)
    text = lab_views.listing(LAB)
    assert "Not run on this routing" in text and "as recorded" in text


def test_the_lab_survives_being_kept_and_has_a_csv() -> None:
    assert analyst.LAB.validate_python(json.loads(json.dumps(asdict(LAB)))) == LAB
    lines = [line for line in tables_csv.lab(LAB).splitlines() if not line.startswith("#")]
    assert len(lines) == 1 + 5 + 2 + 2
    assert "recent,all,0.6,0.75,4" in lines[2]
    assert "gate,all,,,4" in lines[-1]


def drawn_of(profile: Profile, layer: int, dark: bool) -> list[Any]:
    given = calibrate_figures
    return [
        given.counts(profile, dark),
        given.pairs(profile, layer, dark),
        given.entropy(profile, dark),
        given.recall(profile, dark),
    ]


def test_a_profile_s_figures() -> None:
    profile = replace(
        fake_profile(parts=("counts", "pairs", "gate_recall", "tae", "times")),
        counts=np.array([[30, 10, 0, 0], [10, 10, 10, 10]]),
        layers=2,
        experts=4,
        top_k=2,
    )
    assert calibrate_figures.shares(profile).tolist() == [[150.0, 50.0, 0.0, 0.0], [50.0] * 4]
    profile = fake_profile(parts=tuple(PARTS))
    pairs = calibrate_figures.together(profile, 1)
    assert pairs[0, 1] == pytest.approx(np.log10(1 + profile.pairs[1, 0, 1]))
    for dark in (True, False):
        drawn = drawn_of(profile, 99, dark)
        assert all("http" not in one.to_json() for one in drawn)
    assert f"layer {SHAPE.layers - 1}" in drawn[1].layout.title.text, "a layer there is not is the last one"
    assert drawn[3].data[0].y[0] is None, "nothing comes before layer 0"
    assert drawn_of(fake_profile(parts=()), 0, True) == [None] * 4


RULE = ListRule(False, 0.0)


@pytest.mark.long(0.1)
@pytest.mark.parametrize("dark", layered([True, False], quick=lambda dark: dark))
def test_similarity_is_of_the_measure_chosen_or_of_the_one_there_is(dark: bool) -> None:
    both, pairs = fake_profile(parts=("pairs", "likeness")), fake_profile(parts=("pairs",))
    apart = ~np.eye(SHAPE.experts, dtype=bool)
    for profile, measure, expected in (
        (both, "cosine", both.likeness[2].astype(float)),
        (both, "share", 100 * both.pairs[2] / both.pairs[2].sum(1, keepdims=True)),
        (pairs, "cosine", 100 * both.pairs[2] / both.pairs[2].sum(1, keepdims=True)),
        (fake_profile(parts=("likeness",)), "share", both.likeness[2].astype(float)),
    ):
        drawn = calibrate_figures.similarity(profile, 2, measure, RULE, dark)
        found = np.array(drawn.data[0].z, float)
        np.testing.assert_allclose(found[apart], expected[apart], rtol=1e-6)
        assert np.isnan(found[~apart]).all(), "an expert is no buddy of its own"
        assert "expert %{y}, buddy %{x}" in drawn.data[0].hovertemplate
        assert "layer 2" in drawn.layout.title.text and "http" not in drawn.to_json()
    weighted = calibrate_figures.similarity(both, 2, "share", RULE._replace(weighted=True, smoothing=5.0), dark)
    plain = calibrate_figures.similarity(both, 2, "share", RULE, dark)
    assert np.nanmax(weighted.data[0].z) < np.nanmax(plain.data[0].z), "smoothing makes peers more alike"
    assert "layer 3" in calibrate_figures.similarity(both, 99, "share", RULE, dark).layout.title.text
    assert calibrate_figures.similarity(fake_profile(parts=()), 0, "cosine", RULE, dark) is None
    assert not np.isnan(both.likeness.astype(float)).any(), "the profile itself is unchanged"


def test_a_profile_in_words() -> None:
    text = calibrate_views.summary(fake_profile(), 12_345)
    assert all(part in text for part in ("Profile of Demo model", "12.3 kB", "Not measured: Default vectors"))
    assert {part for _, part in calibrate_views.part_choices()} == set(PARTS) == set(calibrate_views.HELP)
    kinds = [("Chats on this machine (3)", "chats"), ("Recorded routing (1\u202f200 tokens)", "traces")]
    assert calibrate_views.kind_choices(3, 1200)[1:3] == kinds
    assert "Estimator" in calibrate_views.needed_by("estimator")


def test_super_experts_are_named_with_how_far_they_stand_out() -> None:
    profile = fake_profile(parts=("counts", "peaks"))
    assert "None; " in calibrate_views.summary(profile, 1) and "stands out most" in calibrate_views.summary(profile, 1)
    profile.peaks[:] = 2
    profile.peaks[1, 3] = 500
    text = unescape(calibrate_views.summary(profile, 1))
    assert "1, protected by default" in text and "1:3 (output up to 500, 250 times its layer's median)" in text


def test_a_result_says_whether_it_is_of_this_machine() -> None:
    assert measured_on(probes.machine()).startswith("Measured on this machine: ")
    assert "on another machine: A &lt;64&gt;." in measured_on("A <64>") and "bench systems" in measured_on("A <64>")
    assert "perhaps on another machine" in measured_on(None)


def test_the_time_it_may_take() -> None:
    """3600 characters are about a thousand tokens; at 100 a second, read and watched, that is 20 s."""
    assert "1\u202f000 tokens" in calibrate_views.rough(3600, 0, 100.0, ["counts"])
    assert "roughly 20 s," in calibrate_views.rough(3600, 0, 100.0, ["counts"])
    assert "roughly 10 s, and 5 s to train" in calibrate_views.rough(3600, 500, 100.0, ["estimator"])
    training = CalibrationSettings.checked(estimator_tokens=500)
    said = calibrate_views.rough(3600, 0, 100.0, ["estimator"], training, SHAPE)
    assert f"{format_bytes(training.training_bytes(SHAPE, 500))} of disk" in said
    assert "roughly 20 s, and 10 s to train" in said
    assert "once it has begun" in calibrate_views.rough(3600, 0, None, [])
    assert calibrate_views.spoken(150) == "2 min"
    assert calibrate_views.spoken(3 * 3600 + 60) == "3 h 1 min"
