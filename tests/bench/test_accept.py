"""`accept`: checks run within their limits, what they found is in one file, and what it is read to say."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from app import cli
from bench.accept import checks as given
from bench.accept import read, runner
from bench.accept.causes import causes
from bench.accept.checks import Check
from bench.accept.report import Report

HOME = str(Path.home())
SPAWNS = "import subprocess as s, sys; p = s.Popen([sys.executable, '-c', 'input()'], stdin=s.PIPE, stderr=s.DEVNULL); "
SPAWNS += "print(p.pid, flush=True); p.wait()"

PARTS = """print('{"a": 1, "by": {"x": 1}}'); print('seen'); print('{"by": {"x": 1, "y": 2}}', flush=True)"""


def check(name: str, code: str, limit_s: float = 60, **more: object) -> Check:
    return Check(name, f"does {name}", limit_s, lambda folder: [sys.executable, "-c", code], **more)  # type: ignore[arg-type]


CHECKS = (
    check("good", f'print(\'at\', {HOME!r}); print(\'{{"ms": 2.5, "machine": {{"gpu": "G"}}}}\')'),
    check("bad", f"{PARTS}; raise SystemExit('other bits in {HOME}/x')"),
    check("once", f"import os; {PARTS}; raise SystemExit('async' if 'CUDA_LAUNCH_BLOCKING' not in os.environ else 0)"),
    check("several", "import json; print('a line'); print(json.dumps({'free': 1}, indent=2)); exit(1)", good=(0, 1)),
    check("hangs", f"{PARTS}; {SPAWNS}", limit_s=2),
    check("not_here", "", without=lambda: "it is not installed"),
    check("too_late", "", limit_s=3600),
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    file, said = tmp_path_factory.mktemp("accept") / "new" / "accept.json", list[str]()
    found = runner.run(file, CHECKS, 30, said.append)
    assert json.loads(file.read_text()) == found
    assert "hangs: does hangs, at most 2 s" in said and "  left out: it is not installed" in said
    return {one["name"]: one for one in found["checks"]} | {"whole": found}


def test_each_check_has_its_outcome(result: dict[str, dict[str, object]]) -> None:
    outcomes = {name: one["outcome"] for name, one in result.items() if name != "whole"}
    assert outcomes == {
        "good": runner.PASSED,
        "bad": runner.FAILED,
        "once": runner.FAILED,
        "several": runner.PASSED,
        "hangs": runner.LATE,
        "not_here": runner.LEFT_OUT,
        "too_late": runner.LEFT_OUT,
    }
    assert result["bad"]["why"] == "other bits in ~/x" and result["bad"]["status"] == 1
    assert result["good"]["figures"] == {"ms": 2.5} and result["several"]["figures"] == {"free": 1}
    assert all(result[name]["figures"] == {"a": 1, "by": {"x": 1, "y": 2}} for name in ("bad", "once", "hangs"))
    assert result["whole"]["machine"] == {"gpu": "G"}
    assert "no time" in str(result["too_late"]["why"])


def test_what_failed_is_run_again_with_each_launch_waited_for(result: dict[str, dict[str, dict[str, object]]]) -> None:
    assert result["once"]["why"] == "async" and result["once"]["blocking"]["outcome"] == runner.PASSED
    assert result["bad"]["blocking"]["outcome"] == runner.FAILED
    assert result["bad"]["blocking"]["why"] == "other bits in ~/x"
    assert {name for name, one in result.items() if "blocking" in one} == {"bad", "once"}


def test_it_is_not_run_again_when_no_time_is_left() -> None:
    failed = check("bad", "raise SystemExit(1)", limit_s=100)
    assert runner.again(failed, 60, time.monotonic() + 90, print) == {
        "outcome": runner.LEFT_OUT,
        "why": "no time was left for it",
    }
    assert runner.again(failed, 10, time.monotonic() + 90, print)["limit_s"] <= 90


def test_parts_that_would_be_late(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0, 30, 30, 50, 70, 90, 95))
    monkeypatch.setattr("bench.accept.report.monotonic", lambda: next(clock))
    found = Report(100, "by")
    for name in found.in_time("abcd"):  # a takes 30 s, b 20, c 20, and d could take 30
        found[name] = len(name)
    late = {"left_out": "no time was left for it"}
    assert found == {"a": 1, "b": 1, "c": 1, "d": late}
    lines = capsys.readouterr().out
    assert len(lines.splitlines()) == 4 and runner.figures(lines) == {"by": found}


def ended(pid: int) -> bool:
    """Whether a process that was killed is gone, or waits for its parent to notice."""
    for _ in range(1000):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def test_nothing_goes_on_after_the_limit(result: dict[str, dict[str, str]]) -> None:
    assert ended(int(result["hangs"]["output"].split()[-1]))


def test_the_file_does_not_name_the_user(result: dict[str, object]) -> None:
    assert HOME not in json.dumps(result)


def test_what_is_printed(result: dict[str, dict[str, object]]) -> None:
    text = runner.table(result["whole"])
    assert "bad          failed: other bits in ~/x" in text and "ms: 2.5" in text and "\nG\n" in text


def test_pytest_says_how_many() -> None:
    text = "FAILED tests/gpu/test_cuda.py::test_a\n1 failed, 40 passed, 2 skipped in 9.1s"
    assert runner.figures(text) == {"failed": 1, "passed": 40, "skipped": 2}
    assert runner.figures("Traceback\nValueError: {") == {}


def test_a_subfolder_of_windows_is_anonymous_within_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.Path, "home", lambda: "C:\\Users\\Ada")
    assert runner.anonymous(json.dumps({"at": "C:\\Users\\Ada\\x"})) == '{"at": "~\\\\x"}'


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["accept", "--save", str(tmp_path / "a.json")]) == 2
    assert "There is no GPU here that torch can use" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_with_one_it_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runner, "made", lambda one: {"name": one.name, "outcome": runner.PASSED, "seconds": 1.0})
    file = tmp_path / "a.json"
    assert cli.main(["accept", "--only", "stress", "machine", "--save", str(file)]) == 0
    assert [one["name"] for one in json.loads(file.read_text())["checks"]] == ["machine", "stress"]
    monkeypatch.setattr(runner, "made", lambda one: {"name": one.name, "outcome": runner.LATE, "seconds": 1.0})
    assert cli.main(["accept", "--only", "stress", "--save", str(tmp_path / "b.json")]) == 1
    assert "stress" in capsys.readouterr().out
    assert cli.main(["accept", "--save", str(tmp_path / "none" / "a.json")]) == 2


def test_the_commands_are_ones_that_there_are(tmp_path: Path) -> None:
    """Their options are parsed, their files exist, and each ends within what a run may take."""
    from bench.accept.work import WORK

    for one in given.checks():
        words = one.command(tmp_path)
        if "launch.py" in words:
            cli.parse(words[words.index("launch.py") + 1 :])
        elif "bench.accept.work" in words:
            assert words[words.index("bench.accept.work") + 1] in WORK
        else:
            files = [word for word in words if word.endswith(".py")]
            assert "pytest" in words and all((runner.ROOT / file).is_file() for file in files)
        assert one.limit_s <= 600
    assert len({one.name for one in given.checks()}) == len(given.checks())
    assert {one.name for one in given.checks(small=True)} == {one.name for one in given.checks()}


def test_without_pytest_the_rest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given, "provide_tests", lambda: ["pytest>=8.3,<10", "pytest-timeout>=2.3,<3"])
    without = {check.name: check.without() for check in given.checks()}
    assert (
        without["tests"] == without["bandwidth"] == "this Python has no pytest>=8.3,<10 and no pytest-timeout>=2.3,<3"
    )
    assert without["copies"] == without["stress"] == ""


def test_an_installed_copy_leaves_out_checks_that_are_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(given, "TESTS", tmp_path / "tests")
    without = {check.name for check in given.checks() if "without the tests" in check.without()}
    assert without == {"tests", "bandwidth", "sanitizer"}


REAL = Path(__file__).resolve().parents[2] / "bench" / "results" / "accept-20261127-024700.json"
FAILS = {"outcome": "failed", "status": 1}


def causes_of(*checks: Mapping[str, Any]) -> list[str]:
    return [f"{one.check}: {one.cause} {one.evidence}" for one in causes({"checks": checks})]


def test_a_file_of_a_real_card_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert read.main([str(REAL)]) == 0
    said = capsys.readouterr().out
    assert "attention: torch's attention is planned anew for every length.\n  57 ms" in said
    assert said.count("Look at:") == 1 and "NVIDIA H100" in said
    for content in ("no JSON", "[]", '{"accept": 1}'):
        (tmp_path / "other.json").write_text(content)
        assert read.main([str(tmp_path / "other.json")]) == 2
    assert "was not written by" in capsys.readouterr().err and read.main([]) == 2


@pytest.mark.parametrize(
    ("printed", "cause"),
    [
        ("RuntimeError: CUDA error: no kernel image is available for execution", "no code for this card"),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "outside its slots"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "less room than the memory plan"),
        ("bench.accept.drawn.Wrong: led by the GPU, logits are others from token 3 on", "where an expert lies"),
        ("bench.accept.drawn.Wrong: dense int8: 12 bytes are reserved, and 10 said to be in use", "allocator keeps"),
        (
            "bench.accept.link.Wrong: on the CUDA fast became reference: its logits differ",
            "does not compute this model",
        ),
        ("something that nobody has seen", "Not known to this reader"),
    ],
)
def test_what_failed_is_put_down_to_its_cause(printed: str, cause: str) -> None:
    failed = {"name": "stress", **FAILS, "why": printed, "output": printed}
    (said,) = causes_of(failed)
    assert cause in said and printed in said and "out of order" not in said
    assert "out of order" in causes_of({**failed, "blocking": {"outcome": "passed"}})[0]
    assert "then elsewhere" in causes_of({**failed, "blocking": {"outcome": "failed", "why": "then elsewhere"}})[0]


def test_a_check_that_was_ended_tells_how_far_it_came() -> None:
    late = {"name": "decode", "outcome": "took too long", "figures": {"model": "qwen", "by_budget": {}}, "output": ""}
    assert "model, by_budget" in causes_of(late)[0]


def test_figures_that_stand_out_have_causes_and_good_ones_none() -> None:
    pcie = {"generation": 1, "generation_max": 4, "width": 16, "width_max": 16}
    host, graph = {"ms": 30.0}, {"ms": 9.0}
    good: dict[str, dict[str, Any]] = {
        "doctor": {"problems": [], "gpus": [{"pcie": pcie}]},
        "copies": {"copy_gbps": 25.0, "experts_gbps": 24.0, "demand_copy_alone_us": 60.0, "demand_there_us": 90.0},
        "zerocopy": {"8_of_host_gbps": 22.0},
        "launches": {"driver_us": 27.0, "triton_us": 52.0},
        "attention": {"torch_takes": "FLASH_ATTENTION", "cudnn_plans_anew": True, "cudnn": {"new_us": 56e3}},
        "norms": {"taken": "in_two"},
        "rows": {"mm_9_differs": 0, "beside_others": "the same bits"},
        "fast": {"verdict": {"all": "fast 1.30 times as fast as the reference"}},
        "decode": {"by_budget": {"15%": {"host": [host, host], "graph": graph, "not_captured": ""}}},
        "joined": {"by_budget": {"15%": {"graph": host, "graph_joined": graph}}},
    }
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "doctor": ({"gpus": [{"pcie": {**pcie, "width": 8}}]}, "x8 of x16"),
        "copies": ({"not_pinned_bytes": 4 * 10**9}, "4.0 GB of experts are not pinned"),
        "zerocopy": ({"8_of_host_gbps": 9.0}, "8 experts at 9.0 GB/s, copies at 25.0"),
        "launches": ({"driver_us": 60.0}, "60 and 52 us"),
        "attention": ({"torch_takes": "CUDNN_ATTENTION"}, "56 ms for a length"),
        "norms": ({"taken": "the model's own", "in_two_units_off": 1.0}, "in_two_units_off 1.0"),
        "rows": ({"mm_9_differs": 3}, "mm_9_differs"),
        "fast": ({"verdict": {"prompt_64": "fast 0.40 times as fast as the reference"}}, "prompt_64: fast 0.40"),
        "decode": ({"by_budget": {"15%": {"host": host, "graph": [{"ms": 40.0}]}}}, "graph 40.0, host 30.0"),
        "joined": ({"by_budget": {"15%": {"graph": graph, "graph_joined": host}}}, "30.0, over the link 9.0 ms"),
    }

    def checks(**changed: dict[str, Any]) -> list[dict[str, Any]]:
        figures = {name: {**one, **changed.get(name, {})} for name, one in good.items()}
        return [{"name": name, "outcome": "passed", "figures": one} for name, one in figures.items()]

    assert causes_of(*checks()) == []
    for name, (figures, evidence) in wrong.items():
        (said,) = causes_of(*checks(**{name: figures}))
        assert said.startswith(f"{name}: ") and evidence in said
    slow = causes_of(*checks(copies={"copy_gbps": 11.0, "experts_gbps": 5.0}, zerocopy={"8_of_host_gbps": 10.0}))
    assert len(slow) == 2 and "11.0 of 31.5 GB/s (PCIe 4.0 x16)" in slow[0] and "5.0 of 11.0 GB/s" in slow[1]
