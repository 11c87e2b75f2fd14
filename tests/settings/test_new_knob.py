"""A new live knob is its field and the part that acts: the command line, the page, the reference and exports follow."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import gradio as gr
import pytest

from app.cli import options
from app.cli.parser import CommandParser
from app.cli.settings import reference
from app.services.exports import archive
from app.services.host import Host
from app.ui.sidebar import CacheSection
from core.errors import SettingError
from core.settings import config
from core.settings.config import Settings
from core.settings.link import LinkSettings
from core.settings.param import Param
from tests.app.conftest import WAIT_S, open_host
from tests.app.test_export import read

NAME = "link_jitter_us"


@dataclass(frozen=True, slots=True)
class WithJitter(LinkSettings):
    """The link's settings with one more."""

    kind: Annotated[Literal["auto", "own", "emulated"], Param("Which link.", title="Link", name="link")] = "auto"
    jitter_us: Annotated[
        float,
        Param(
            "By how much the latency of copies varies.",
            title="Jitter",
            low=0.0,
            high=10.0,
            step=0.5,
            unit="us",
            name=NAME,
            advanced=True,
            active_when={"link": ("emulated",)},
        ),
    ] = 2.0


class Jitter:
    """A part that acts."""

    def __init__(self) -> None:
        self.us = 0.0

    def configure(self, old: WithJitter | None, new: WithJitter) -> None:
        self.us = new.jitter_us


@pytest.fixture(autouse=True)
def _knob(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "GROUPS", tuple(WithJitter if g is LinkSettings else g for g in config.GROUPS))
    monkeypatch.setattr(config, "LinkSettings", WithJitter)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = open_host(tmp_path)
    yield host
    host.close()


def test_code_reads_it_by_its_type_and_a_part_is_given_it() -> None:
    settings, jitter = Settings({NAME: "4"}), Jitter()
    assert isinstance(settings.link, WithJitter)
    jitter.configure(None, settings.link)
    assert jitter.us == settings[NAME] == 4.0
    with pytest.raises(SettingError, match=rf"{NAME} must lie between 0 and 10 us, not 11"):
        settings.with_({NAME: 11})


def test_the_command_line_has_an_option() -> None:
    parser = CommandParser()
    options.add_settings(parser)
    assert options.spec(parser.parse_args([])).settings[NAME] == 2.0
    assert options.spec(parser.parse_args(["--link-jitter-us", "3.5"])).settings[NAME] == 3.5
    assert options.spec(parser.parse_args(["--set", f"{NAME}=1"])).settings[NAME] == 1.0
    assert "By how much the latency of copies varies. (default: 2.0 us)" in " ".join(parser.format_all().split())


def test_the_page_has_a_control_while_it_has_an_effect(host: Host) -> None:
    with gr.Blocks():
        controls = CacheSection(host, [gr.Textbox()], gr.HTML(), lambda *form: "").setting_controls
    made = controls.controls[NAME]
    assert isinstance(made, gr.Slider)
    assert (made.label, made.minimum, made.maximum, made.step, made.value) == ("Jitter (us)", 0.0, 10.0, 0.5, 2.0)
    assert made.elem_classes == ["advanced"] and made.elem_id == f"set-{NAME}"
    assert not controls.acts(NAME) and not made.visible
    assert host.models.change("link", "emulated") == ""
    assert controls.acts(NAME)


def test_the_reference_has_a_row() -> None:
    row = f"| `{NAME}` | 2 | 0 to 10 us | Jitter. By how much the latency of copies varies. |"
    assert row in reference().splitlines()


def test_exports_have_its_value_and_its_changes(host: Host, tmp_path: Path) -> None:
    assert host.models.change(NAME, 7.5) == ""
    answer = host.chats.ask(None, "one")
    assert answer.join(WAIT_S)
    tables, manifest = read(archive.write(host.store, tmp_path / "export.zip", chat=answer.chat_id))
    [change] = tables["settings"].to_dict("records")
    assert (change["name"], float(change["old"]), float(change["new"])) == (NAME, 2.0, 7.5)
    assert manifest["loads"][0]["settings_at_load"][NAME] == 2.0
