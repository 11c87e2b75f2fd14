"""`calibrate` on the command line: what is gathered is printed, kept where the model finds it, and never half done."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import cli
from app.cli import chat
from app.cli.terminal import Bar
from app.services.profiles import stored_profile
from core.engine import Engine
from core.measure.calibrate import gather as gathering
from core.profile import load, profile_path, save
from core.settings.loading import LoadSpec
from tests.checkpoints import make_checkpoint
from tests.interrupted import interrupted
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def loaded(model: Path) -> Iterator[Engine]:
    engine = Engine.load(LoadSpec.checked(str(model), context=128))
    yield engine
    engine.unload()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOESTRO_HOME", str(tmp_path / "home"))
    (tmp_path / "text.txt").write_text("Some words to be read by a very small model.", encoding="utf-8")
    return tmp_path / "home"


@pytest.fixture
def once(loaded: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "load", lambda spec: loaded)
    monkeypatch.setattr(loaded, "unload", lambda: None)


def profile(model: Path, home: Path, *words: object) -> int:
    text = str(home.parent / "text.txt")
    return cli.main(["calibrate", "--model", str(model), "--text", text, "--path-tokens", "120", *map(str, words)])


def result(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    *lines, last = capsys.readouterr().out.splitlines()
    return json.loads(last), "\n".join(lines)


@pytest.mark.usefixtures("once")
def test_a_profile_is_kept_and_completed(model: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile(model, home, "--parts", "counts,times", "--json") == 0
    found, said = result(capsys)
    file = Path(found["profile"])
    assert file == profile_path(home, found["model_hash"]) and found["bytes"] == file.stat().st_size
    assert found["parts"] == ["counts", "times"] and found["tokens"] == 44 and found["source"] == "text.txt"
    assert set(found["times_ms"]) == {"att", "moe", "head", "load"} and found["gate_recall"] is None
    assert "44 tokens of text.txt" in said and "Activations" in said and str(file) in said

    assert profile(model, home, "--parts", "gate_recall", "--tokens", "20", "--json") == 0
    found, said = result(capsys)
    assert found["parts"] == ["counts", "gate_recall", "times"]  # what was there before stays
    assert "Activations" not in said and "Next-layer gate" in said
    assert found["gate_recall"][0] is None and len(found["gate_recall"]) == 3
    kept = stored_profile(found["model_hash"])
    assert kept is not None and kept.counts is not None and kept.counts[0].sum() == 44 * 4


@pytest.mark.usefixtures("once")
def test_an_option_overrides_how_a_preset_trains(model: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a profile it needs nothing yet, though the predictor that it sets does."""
    words = "--parts", "estimator", "--preset", "speculating_estimator", "--json"
    assert profile(model, home, *words) == 0
    found, _ = result(capsys)
    hidden = found["estimator"]["hidden"]
    assert (found["estimator"]["quasi"], found["estimator"]["width"]) == (1, round(hidden * 2400 / 2048))
    assert profile(model, home, *words, "--estimator-width", "8") == 0
    assert result(capsys)[0]["estimator"]["width"] == 8


@pytest.mark.usefixtures("once")
def test_super_experts_are_reported(model: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile(model, home, "--parts", "counts", "--json") == 0
    assert result(capsys)[0]["super_experts"] is None, "nobody looked"
    assert profile(model, home, "--parts", "peaks", "--json") == 0
    found, said = result(capsys)
    assert found["super_experts"] == [], "of random weights none stands out"
    assert "Super experts" in said and "stands out most" in said


def test_a_model_is_loaded_with_its_profile(
    model: Path, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert profile(model, home, "--parts", "counts") == 0
    engines: list[Any] = []
    load_engine: Callable[..., Any] = chat.load

    def keep(spec: Any) -> Any:
        engines.append(load_engine(spec))
        return engines[-1]

    monkeypatch.setattr(chat, "load", keep)
    assert cli.main(["chat", "--model", str(model), "--prompt", "Hi", "--max-new-tokens", "2"]) == 0
    assert engines[0].profile is not None and engines[0].profile.parts() == ("counts",)
    file = profile_path(home, engines[0].model_hash)
    file.write_bytes(file.read_bytes()[:-3])
    assert cli.main(["chat", "--model", str(model), "--prompt", "Hi", "--max-new-tokens", "2"]) == 0
    assert engines[1].profile is None and "is damaged" in capsys.readouterr().err


@pytest.mark.usefixtures("once")
def test_recorded_sessions(model: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = home.parent / "talk.trace"
    assert (
        cli.main(["chat", "--model", str(model), "--prompt", "Hi", "--max-new-tokens", "3", "--record", str(talk)]) == 0
    )
    capsys.readouterr()
    assert cli.main(["calibrate", "--model", str(model), "--trace", str(talk), "--json"]) == 0
    found, said = result(capsys)
    assert found["source"] == "1 recorded session" and {"counts", "pairs", "times"} <= set(found["parts"])
    assert "Not measured" in said and "Default vectors" in said.rpartition("Not measured")[2]
    assert profile(model, home, "--trace", talk, "--parts", "counts", "--json") == 0
    assert result(capsys)[0]["source"] == "text.txt and 1 recorded session"


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("had", [False, True])
def test_ctrl_c_keeps_what_was(
    had: bool, model: Path, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = home.parent / "p.safetensors"
    if had:
        assert profile(model, home, "--parts", "counts", "--out", file) == 0
    before = file.read_bytes() if had else b""
    monkeypatch.setattr(gathering, "calibrate", interrupted(gathering.calibrate))
    assert profile(model, home, "--parts", "counts", "--out", file) == 130
    said = capsys.readouterr().err
    assert ("The profile is unchanged." if had else "Nothing was saved.") in said
    assert (file.read_bytes() == before) if had else not file.exists()


@pytest.mark.usefixtures("once")
def test_another_models_profile_is_not_overwritten(model: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = home.parent / "p.safetensors"
    assert profile(model, home, "--parts", "counts", "--out", file) == 0
    other = replace(load(file), model="other", model_hash="0" * 64)
    save(other, file)
    assert profile(model, home, "--parts", "counts", "--out", file) == 2
    assert "measured on other (000000000000)" in capsys.readouterr().err
    assert load(file).model == "other"
    file.write_bytes(b"damaged")
    assert profile(model, home, "--parts", "counts", "--out", file) == 2
    assert "nothing is ever overwritten" in capsys.readouterr().err and file.read_bytes() == b"damaged"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--parts", "counts,luck"], "'counts,luck' is not understood. Write all, or some of counts"),
        (["--parts", ""], "is not understood"),
        (["--text", "nowhere.txt"], "no file or folder nowhere.txt"),
        (["--trace", "nowhere"], "no file or folder nowhere"),
        (["--tokens", "0"], "whole number above 0"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_errors_in_the_users_words(words: list[str], why: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):  # of argparse, or of ours
        raise SystemExit(cli.main(["calibrate", *words]))
    assert why in capsys.readouterr().err


def test_the_bar_of_a_job_without_bytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = Bar()
    bar.show("Reading 20 tokens", 0.0)
    bar.show("Reading 20 tokens", 1.0)
    bar.end()
    first, second = capsys.readouterr().err.lstrip("\r").split("\r")
    assert first.startswith("[........................]   0%  0:00  Reading 20 tokens")
    assert second.startswith("[########################] 100%  0:00  Reading") and "MB" not in second
