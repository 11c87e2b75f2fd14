"""What the screen shows of lossy options, without a browser: the section's controls, the frame's bytes, the badge."""

from collections.abc import Iterator
from pathlib import Path

import gradio as gr
import numpy as np
import pytest

from app.server import frames
from app.server.live_state import host_state
from app.services.host import Host
from app.ui.sidebar import SubstitutionSection
from app.ui.text import notice
from core.settings.presets import preset
from tests.app.conftest import ended, open_host, page
from tests.fake_profiles import fake_profile


@pytest.fixture
def section(tmp_path: Path) -> Iterator[SubstitutionSection]:
    host = open_host(tmp_path)
    with page():
        section = SubstitutionSection(host)
    yield section
    host.close()


def acting(section: SubstitutionSection) -> set[str]:
    shown = dict(zip(section.outputs, section.values(), strict=True))
    return {
        name for name, part in section.setting_controls.controls.items() if "." not in name and shown[part]["visible"]
    }


LOSSY = "rho rho_order gate gate_margin batch_gate protect protect_super quality_rate"


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, "substitute"),
        ({"miss": "substitute"}, f"substitute {LOSSY}"),
        ({"miss": "drop"}, f"{LOSSY} drop_share drop_renormalise"),
        (
            {"miss": "drop", "gate": "tau", "batch_gate": "fixed"},
            f"{LOSSY} drop_share drop_renormalise gate_tau gate_temperature beta",
        ),
        ({"gate": "tau", "batch_gate": "adaptive"}, "substitute"),
        (
            {"predictor": "gate", "execute": "verify"},
            "substitute execute_weights execute_share execute_prefill quality_rate",
        ),
        ({"predictor": "gate", "execute": "always"}, "substitute execute_weights execute_prefill quality_rate"),
    ],
)
def test_a_control_shows_where_it_acts(section: SubstitutionSection, changes: dict[str, object], shown: str) -> None:
    assert section.host.models.change_many({"substitute": "random", **changes}) == ""
    assert acting(section) == {"miss", "execute", *shown.split()}


def test_a_variants_own_parameters_show_while_it_substitutes(section: SubstitutionSection) -> None:
    def groups() -> set[str]:
        shown = dict(zip(section.outputs, section.values(), strict=True))
        return {name for (_, name), part in section.setting_controls.groups.items() if shown[part]["visible"]}

    assert section.host.models.change("substitute", "cache_prior") == ""
    assert groups() == set()
    assert section.host.models.change("miss", "substitute_drop") == ""
    assert groups() == {"cache_prior"}
    assert section.host.models.change("miss", "drop") == ""
    assert groups() == set()


def test_a_refusal_stays_until_something_changes_and_offers_the_way(section: SubstitutionSection) -> None:
    assert section.host.models.change_many({"miss": "substitute", "substitute": "router_ranked"}) == ""
    shown, told, *_ = section.setting_controls.turn("substitute")("buddy")
    assert shown == "router_ranked" and "“Buddies” needs a profile" in told and 'data-open="tab-calibrate"' in told
    assert section.values()[0] == gr.skip()
    section.host.models.loaded.engine.use_profile(fake_profile())  # type: ignore[union-attr]
    assert section.values()[0] == ""
    assert section.setting_controls.turn("substitute")("buddy")[1] == ""
    assert section.host.models.settings["substitute"] == "buddy"
    assert "button" not in notice("protect 'x' is not understood.")


def test_substituting_without_a_profile_takes_what_needs_none_and_says_so(section: SubstitutionSection) -> None:
    models = section.host.models
    shown, told, *_ = section.setting_controls.turn("miss")("substitute")
    assert (models.settings["miss"], models.settings["substitute"]) == ("substitute", "router_ranked")
    assert shown == gr.skip() and "“Router&#x27;s next best” is used" in told.replace("’", "&#x27;")
    assert "notice info" in told and 'data-open="tab-calibrate"' in told
    assert section.setting_controls.turn("rho")(2)[1] == ""
    section._exact()
    models.loaded.engine.use_profile(fake_profile())  # type: ignore[union-attr]
    assert models.change("substitute", "buddy") == ""
    assert section.setting_controls.turn("miss")("substitute_drop")[1] == ""
    assert models.settings["substitute"] == "buddy", "what the profile serves stays"


def test_exact_again_is_one_click_and_a_preset_turns_the_section(section: SubstitutionSection) -> None:
    host = section.host
    host.models.loaded.engine.use_profile(fake_profile())  # type: ignore[union-attr]
    assert host.models.change_many(preset("buddymoe").values) == ""
    assert host_state(host)["lossy"] and "gate_percentile" in acting(section)
    section._exact()
    assert (host.models.settings["miss"], host.models.settings["execute"], host.models.settings["gate"]) == (
        "wait",
        "off",
        "percentile",
    )
    assert not host_state(host)["lossy"] and "gate_percentile" not in acting(section)


def test_the_look_at_what_is_changed_survives_the_wire(host: Host) -> None:
    def sent() -> tuple[dict[str, object], dict[str, frames.Array]]:
        ended(host.chats.ask(None, "go"))
        return frames.decode(frames.encode(host.models.frame(1)))

    head, arrays = sent()
    assert head["lossy"] is None and head["exact"] and not any(name.startswith("lossy.") for name in arrays)
    host.models.loaded.engine.use_profile(fake_profile())  # type: ignore[union-attr]
    assert host.models.change_many({"miss": "substitute", "gate": "tau", "gate_tau": 0.25}) == ""
    head, arrays = sent()
    look = host.models.frame(1).lossy  # type: ignore[union-attr]
    assert look is not None and look.buddies is not None
    said = {"rate": look.rate, "assignments": look.assignments, "buddies_max": pytest.approx(0.62)}
    assert head["lossy"] == said and look.rate > 0 and look.assignments > 0
    for name in ("per_layer", "tae", "threshold", "delta", "beta"):
        np.testing.assert_array_equal(arrays[f"lossy.{name}"], getattr(look, name))
    assert arrays["lossy.threshold"].tolist() == [0.25] * 4 and np.isnan(arrays["lossy.beta"]).all()
    quality = arrays["lossy.buddies"] / 255 * 0.62
    assert quality[5, 7] == pytest.approx(0.62) and quality[5, 2] == pytest.approx(0.31, abs=0.62 / 255)
    assert host.models.change("substitute", "random") == ""
    head, arrays = sent()
    assert head["lossy"]["buddies_max"] is None and "lossy.buddies" not in arrays  # type: ignore[index]


def test_shares_are_sent_in_255ths_of_the_largest_and_only_nothing_is_nothing() -> None:
    top, sent = frames.share_scale(np.array([[0.0, 1e-9], [0.25, 0.5]], np.float32))
    assert (top, sent.tolist()) == (0.5, [[0, 1], [127, 255]])  # 127.5 goes down
    assert frames.share_scale(np.zeros((2, 2), np.float32))[1].tolist() == [[0, 0], [0, 0]]
