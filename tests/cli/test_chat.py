"""`chat` on a fake engine: one JSON line with the figures, a conversation with its commands, and Ctrl-C."""

import dataclasses
import io
import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app import cli
from app.cli import chat
from core.engine.quality.report import Quality
from core.errors import ContextError
from core.profile.trace import FileTrace
from core.settings.loading import LoadSpec
from core.types import AnswerStats, Piece
from tests.fakes import FakeEngine

WORDS = "the cache keeps what the router asks for and fetches what it lacks . "


class Engine(FakeEngine):
    """Remembers what it was asked; a prompt of "too long" is refused, and `on_token` is called at every token."""

    def __init__(self, spec: LoadSpec) -> None:
        super().__init__(spec, token_s=0)
        self.asked: list[list[Mapping[str, str]]] = []
        self.unloaded = False
        self.on_token: Callable[[int], None] = lambda n: None

    def generate(self, messages: Any, sampling: Any, cancel: Any = None, **how: Any) -> Iterator[Piece]:
        assert not isinstance(messages, str)
        if messages[-1]["content"] == "too long":
            raise ContextError("The prompt has 999 tokens; 512 fit.")
        self.asked.append(list(messages))
        for piece in super().generate(messages, sampling, cancel):
            yield piece
            if piece.token is not None:
                self.on_token(piece.token)

    def unload(self) -> None:
        self.unloaded = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The engine that `chat` will load; its spec is set when it does."""
    made = Engine(LoadSpec())

    def load(spec: LoadSpec) -> Engine:
        made.spec, made.settings = spec, spec.settings
        return made

    monkeypatch.setattr(chat, "load", load)
    return made


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str, options: Sequence[str] = ()) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return cli.main(["chat", "--max-new-tokens", "4", *options])


def test_one_prompt_streams_and_ends_with_one_json_line(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    words = "chat --model demo --budget 25% --temperature 0 --max-new-tokens 14 --json --prompt".split()
    assert cli.main([*words, "What does heapq.heappush do?"]) == 0
    answer, line = capsys.readouterr().out.splitlines()
    assert answer == WORDS
    found = json.loads(line)
    assert {f.name for f in dataclasses.fields(AnswerStats)} - {"more"} <= found.keys()
    assert (found["text"], found["model"], found["new_tokens"], found["exact"]) == (WORDS, "demo", 14, True)
    assert found["settings"] == dict(engine.settings) and found["settings"]["budget"] == "25%"
    assert found["sampling"]["max_new_tokens"] == 14
    assert engine.unloaded


@pytest.mark.parametrize(
    ("words", "policy", "predictor", "budget"),
    [
        ([], "lfru", "gate", "100%"),  # Auto; the demo model fits whole
        (["--eviction", "lru", "--budget", "40%"], "lru", "gate", "40%"),
        (["--preset", "se_moe"], "none", "all_next", "50%"),
    ],
)
def test_it_begins_on_auto(engine: Engine, words: list[str], policy: str, predictor: str, budget: str) -> None:
    assert cli.main(["chat", "--prompt", "Hi", "--max-new-tokens", "2", *words]) == 0
    found = [str(engine.spec.settings[name]) for name in ("eviction", "predictor", "budget")]
    assert found == [policy, predictor, budget]


def test_a_refused_prompt_is_one_line_and_frees_the_model(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--prompt", "too long"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "The prompt has 999 tokens; 512 fit.\n")
    assert engine.unloaded


def test_a_conversation_keeps_its_history_and_forgets_on_reset(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(monkeypatch, "one", "too long", "two", "/reset", "three") == 0
    assert [[m["content"] for m in messages] for messages in engine.asked] == [
        ["one"],
        ["one", "the cache keeps what ", "two"],
        ["three"],
    ]
    assert [m["role"] for m in engine.asked[1]] == ["user", "assistant", "user"]
    assert engine.unloaded


def test_a_conversation_is_recorded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "session.trace"
    lines = ("one", "too long", "two", "/set telemetry off", "/quit")
    assert talk(monkeypatch, *lines, options=["--record", str(path)]) == 0
    trace, steps = FileTrace(path), engine._steps
    chunks = list(trace.chunks())
    assert (trace.layers, trace.experts, trace.model) == (engine.shape.layers, engine.shape.experts, "demo")
    assert trace.tokens == sum(step.tokens for step in steps) > 0
    assert (
        np.concatenate([c.ids for c in chunks]).tolist()
        == np.concatenate([step.ids for step in steps], 1).transpose(1, 0, 2).tolist()
    )
    assert [d for c in chunks for d in c.decode.tolist()] == [step.phase == "decode" for step in steps]
    assert {r for c in chunks for r in c.rid.tolist()} == {1, 2}
    capsys.readouterr()
    assert cli.main(["simulate", "--trace", str(path), "--policies", "lru", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["prefill_hit_rate"]["lru"]["50%"] is not None


def test_what_else_is_recorded_is_asked_of_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--record", str(tmp_path / "t"), "--record-ranks", "--record-probs", "--predictor", "recent"]
    assert talk(monkeypatch, "one", "/set predictor none", "/set predictor.width 3", "/quit", options=words) == 0
    assert engine.kept == {"probs": True, "ranks": True, "tokens": False}
    err = capsys.readouterr().err
    assert err.count("are being recorded, so it cannot be changed") == 2 and engine.settings["predictor"] == "recent"
    name, params = FileTrace(tmp_path / "t").predictor or ("", {})
    assert name == "recent" and params["width"] == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--record", "{}/there"], "exists already"),
        (["--record", "{}/no/where"], "There is no folder"),
        (["--record", "{}/new", "--telemetry", "off"], "telemetry is off"),
        (["--record-ranks"], "--record-ranks needs --record FILE."),
    ],
)
def test_what_cannot_be_recorded_is_said_before_the_load(
    words: list[str], why: str, engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").touch()
    assert cli.main(["chat", "--prompt", "one", *[word.format(tmp_path) for word in words]]) == 2
    assert why in capsys.readouterr().err
    assert not engine.asked


def test_settings_change_while_talking(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(
        monkeypatch,
        "/set budget 25%",
        "/set eviction.lcp.omega=9",
        "/set max_new_tokens 2",
        "/set format int8",
        "/set budget 200%",
        "/set nonsense 1",
        "/stats",
        "hello",
        "/stats",
        "/what",
        "/quit",
        "never asked",
    )
    out, err = capsys.readouterr()
    assert (engine.settings["budget"], engine.settings["eviction.lcp.omega"]) == ("25%", 9)
    assert out == "the cache \n"
    for expected in (
        "budget = 25%",
        "restart with --format int8",
        "between 0 % and 100 %",
        "no setting called 'nonsense'",
        "Nothing has been answered yet",
        "new_tokens         2",
        "2 tokens · ",
        "/reset starts over",
    ):
        assert expected in err
    assert len(engine.asked) == 1


def test_json_per_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    talk(monkeypatch, "one", "two", options=["--json"])
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["new_tokens"] for line in lines[1::2]] == [4, 4]


def interrupt_at(token: int) -> Callable[[int], None]:
    return lambda n: signal.raise_signal(signal.SIGINT) if n == token else None


def test_ctrl_c_stops_it(engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    engine.on_token = interrupt_at(2)
    assert talk(monkeypatch, "one", "two", options=["--max-new-tokens", "100"]) == 0
    assert [len(messages) for messages in engine.asked] == [1, 1]  # a stopped answer is not remembered
    assert "cancelled" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_during_one_prompt_still_reports(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.on_token = interrupt_at(3)
    assert cli.main(["chat", "--prompt", "hello", "--json"]) == 130
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["reason"] == "cancelled"


def test_a_second_ctrl_c_leaves(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    def twice(n: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    engine.on_token = twice
    assert cli.main(["chat", "--prompt", "hello"]) == 130
    assert "Stopped." in capsys.readouterr().err
    assert engine.unloaded


def test_progress_says_each_step_once(capsys: pytest.CaptureFixture[str]) -> None:
    progress = chat.ProgressLine()
    for text, share in (("Reading", 0.1), ("Reading", 0.9), ("Ready", 1.0)):
        progress(text, share)
    assert capsys.readouterr().err == "Reading\nReady\n"


def test_a_lossy_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told = Quality(
        answer=2,
        tokens=4,
        scored=1,
        kl=0.25,
        kl_most=0.25,
        agreement=1.0,
        perplexity=2.0,
        saved_ms=1.5,
        changed=5,
        assignments=100,
    )
    engine.waiting = [dataclasses.replace(told, answer=1, kl=9.0), told]  # an earlier answer's comes first
    generate = engine.generate

    def lossy(*asked: object, **how: object) -> Iterator[Piece]:
        for piece in generate(*asked, **how):  # type: ignore[arg-type]
            if piece.stats is not None:
                piece = dataclasses.replace(
                    piece, stats=dataclasses.replace(piece.stats, exact=False, changed=5, assignments=100, audit=2)
                )
            yield piece

    monkeypatch.setattr(engine, "generate", lossy)
    assert talk(monkeypatch, "one", "/stats", options=["--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["quality"] == dataclasses.asdict(told)
    assert "quality.kl         0.25" in err
    engine.waiting = [told]
    assert talk(monkeypatch, "one") == 0
    err = capsys.readouterr().err
    assert "LOSSY 5.0 % · KL 0.25 · agrees 100 % (1 of 1 tokens, 95 % interval 21–100 %): too few tokens to tell" in err
    assert "· perplexity 2 · saved ~1.5 ms/token]" in err
    assert talk(monkeypatch, "one") == 0
    assert "LOSSY 5.0 %]" in capsys.readouterr().err, "there was nothing to be had"
