"""`import` and `doctor --pack` on the command line: what is printed where, exit codes, Ctrl-C."""

import io
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from app import cli
from app.cli import import_, terminal
from core import importing
from core.importing.download import Remote
from core.memory.pack import check
from tests.conftest import Checkpoint


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def source(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOESTRO_HOME", str(tmp_path / "home"))
    return checkpoint("olmoe")


def test_it_imports_into_the_data_directory(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["import", str(source), "--format", "int8", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    pack = tmp_path / "home" / "packs" / "olmoe-int8"
    assert result["pack"] == str(pack) and result["experts"] == 24 and result["bytes"] == check(pack).bytes
    assert result["exact"] == {"gate_up_proj": "quantised from float32", "down_proj": "quantised from float32"}
    assert "Writing experts, layer 3 of 3" in err and "\r" not in err
    assert cli.main(["import", str(source), "--format", "int8"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert cli.main(["import", str(source)]) == 0
    text = capsys.readouterr().out
    assert "olmoe-checkpoint\n24 experts as checkpoint" in text and "down_proj: as stored" in text


def test_size_and_loss_stand_before_the_import_starts(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["import", str(source), "--format", "int4-g32", "--json"]) == 0
    out, err = capsys.readouterr()
    first, second, third, *_ = err.splitlines()
    assert first.startswith("The pack takes ") and "; the source has " in first
    assert second.startswith("float32, all of the experts' weights: quantised, off by ")
    assert "Writing dense weights" in third
    [one] = json.loads(out)["conversions"]
    assert (one["stored"], one["share"]) == ("float32", 1.0) and 0.02 < one["error"] < 0.2


def test_what_is_wrong_is_said(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (["import", "some/model"], "only when you add --download"),
        (["import", "./nowhere"], "no model at"),
    ):
        assert cli.main(words) == 2
        assert says in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["import", str(source), "--format", "int5"])
    assert "int8-g32" in capsys.readouterr().err


def test_experts_are_imported_whole(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["import", str(source), "--split", "0.5"])
    assert "There is no option --split" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_ctrl_c_says_how_to_go_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = terminal.Bar.show

    def interrupt(self: terminal.Bar, text: str, share: float, done: int, total: int) -> None:
        real(self, text, share, done, total)
        if share > 0.8:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(terminal.Bar, "show", interrupt)
        assert cli.main(["import", str(source)]) == 130
    partial = tmp_path / "home" / "packs" / "olmoe-checkpoint.partial"
    assert f"finished is kept in {partial}. Run the same command to continue." in capsys.readouterr().err
    assert partial.is_dir() and cli.main(["import", str(source)]) == 0
    assert not partial.exists()


def test_a_terminal_is_asked_before_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    model = importing.parse("some/model")
    screen = Terminal()
    monkeypatch.setattr(importing, "missing", lambda source: model if "/" in source else None)
    monkeypatch.setattr(importing, "look", lambda model: [Remote("a", 2 * 10**9, ""), Remote("b", 10**9, "")])
    monkeypatch.setattr(sys, "stderr", screen)
    for answer, agreed in (("y\n", True), ("Yes\n", True), ("\n", False), ("n\n", False), ("", False)):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        assert import_.agreed("some/model") is agreed
    assert "some/model is not on this machine. Download 3.00 GB? [y/N]" in screen.getvalue()
    assert import_.agreed("demo") is False
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))  # nobody is there
    assert import_.agreed("some/model") is False


def test_the_bar_shows_speed_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now, screen = [0.0], Terminal()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "100")
    shown = terminal.Bar()
    for at, text, done in (
        (1.0, "Reading", 0),
        (3.0, "Reading", 100_000_000),
        (3.01, "Reading", 110_000_000),
        (5.0, "On", 200_000_000),
        (9.0, "On", 400_000_000),
    ):
        now[0] = at
        shown.show(text, done / 400_000_000, done, 400_000_000)
    shown.end()
    lines = screen.getvalue().split("\r")[1:]
    assert len(lines) == 4  # the third came too soon to be drawn
    assert lines[1].strip() == "[######..................]  25%  100 of 400 MB, 50 MB/s, 0:06 left  Reading"
    assert lines[3].strip().endswith("100%  400 of 400 MB, 50 MB/s  On")
    monkeypatch.setenv("COLUMNS", "40")
    shown.show("On", 1.0, 400_000_000, 400_000_000)
    assert len(screen.getvalue().split("\r")[-1].rstrip()) <= 39
    assert [terminal.clock(s) for s in (0.4, 61, 3725)] == ["0:00", "1:01", "1:02:05"]


def test_doctor_reads_a_pack_to_its_last_byte(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def examined(folder: Path) -> dict[str, Any]:
        raise AssertionError("only the pack was asked for")

    monkeypatch.setattr("app.cli.doctor.examine", examined)
    pack = importing.import_model(str(source), tmp_path / "pack")
    assert cli.main(["doctor", "--pack", str(pack)]) == 0
    out, err = capsys.readouterr()
    assert f"{pack} is whole" in out and "experts-00002.bin" in err
    raw = bytearray((pack / "experts-00001.bin").read_bytes())
    raw[-1] ^= 1
    (pack / "experts-00001.bin").write_bytes(raw)
    os.truncate(pack / "model.safetensors", 99)
    assert cli.main(["doctor", "--pack", str(pack), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [p.partition(" is damaged")[0] for p in found["problems"]] == [
        str(pack / "experts-00001.bin"),
        str(pack / "model.safetensors"),
    ]
    assert found["experts"] == 24 and "delete" in found["problems"][0].lower()
    shutil.rmtree(pack)
    assert cli.main(["doctor", "--pack", str(pack), "--json"]) == 1
    assert "no pack at" in json.loads(capsys.readouterr().out)["problems"][0]
