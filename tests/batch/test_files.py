"""Prompts and answers of a batch on disk: what is read, what is refused, and that no byte lost loses an answer."""

import errno
import json
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.services.batch.answers_file import AnswersFile
from app.services.batch.lines import Line, read
from app.services.batch.records import answered, refused
from app.services.batch.run import Progress, Run
from core.errors import MoestroError

CHAT = {"model": "any", "messages": [{"role": "user", "content": "why"}]}


class Echo:
    """A backend that answers with the line's own id."""

    def run(self, lines: Iterable[Line], put: Callable[[dict[str, Any]], None]) -> Iterator[int]:
        for line in lines:
            body = {
                "id": "x",
                "choices": [{"message": {"content": f"to {line.id}"}}],
                "usage": {"completion_tokens": 2},
            }
            put(answered(line, body))
            yield 2


def written(folder: Path, *lines: object) -> Path:
    file = folder / "in.jsonl"
    file.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines), "utf-8")
    return file


def ids(file: Path) -> list[str]:
    records = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return [str(one.get("custom_id", one.get("id"))) for one in records]


def test_all_three_forms_are_read(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "once"}},
        "",
        {"prompt": "why", "max_tokens": 3},
        {"messages": CHAT["messages"], "id": 7},
    )
    found = list(read(file))
    assert [(line.number, line.id, line.kind, line.plain) for line in found] == [
        (1, "a", "chat", False),
        (2, "b", "text", False),
        (4, "line-4", "chat", True),
        (5, "7", "chat", True),
    ]
    assert found[2].body == {"messages": [{"role": "user", "content": "why"}], "max_tokens": 3}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"prompt": "\\ud800"}', "surrogate"),
        ("[" * 100_000, "not JSON"),
        ('{"text": "why"}', "has no prompt"),
        ('{"prompt": 3}', "not a text"),
        ('{"custom_id": "x", "url": "/v1/embeddings", "body": {}}', "/v1/embeddings"),
        ('{"custom_id": "x", "body": "why"}', "not a JSON object"),
        ('{"custom_id": null, "body": {}}', "Its id is None"),
        ('{"prompt": "why", "id": "first"}', "was used in line 1"),
    ],
)
def test_a_line_without_a_prompt_says_why_and_the_others_are_read(tmp_path: Path, line: str, said: str) -> None:
    file = written(tmp_path, {"prompt": "a", "id": "first"}, line, {"prompt": "b", "id": "last"})
    bad = list(read(file))[1]
    assert said in bad.problem and "Line 2" in bad.problem and bad.id == "line-2"
    run = Run(file, tmp_path / "out.jsonl", threading.Event())
    progress = run.answer(Echo())
    run.close()
    assert (progress.done, progress.errors, progress.tokens) == (3, 1, 4)
    assert sorted(ids(tmp_path / "out.jsonl")) == ["first", "last", "line-2"]


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    empty, good = tmp_path / "empty.jsonl", written(tmp_path, {"prompt": "a"})
    empty.write_text("\n\n")
    with pytest.raises(MoestroError, match="empty"):
        Run(empty, tmp_path / "out", threading.Event())
    with pytest.raises(MoestroError, match="cannot be read"):
        Run(tmp_path / "none", tmp_path / "out", threading.Event())
    with pytest.raises(MoestroError, match="Name another one"):
        Run(good, good, threading.Event())
    with pytest.raises(MoestroError, match=r"cannot be (written|opened)"):
        Run(good, tmp_path / "no" / "out", threading.Event())
    other = tmp_path / "letter.txt"
    other.write_text("Dear reader,\nhow are you?\n")
    with pytest.raises(MoestroError, match="not the answer of a batch"):
        Run(good, other, threading.Event())
    assert other.read_text() == "Dear reader,\nhow are you?\n"


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    first = AnswersFile(tmp_path / "out")
    with pytest.raises(MoestroError, match="Another run"):
        AnswersFile(tmp_path / "out")
    first.close()
    AnswersFile(tmp_path / "out").close()


def test_errors_are_asked_again_when_that_is_wanted(tmp_path: Path) -> None:
    file, out = written(tmp_path, {"prompt": "a", "id": "a"}, {"prompt": "b", "id": "b"}), tmp_path / "out"
    answers = AnswersFile(out)
    answers.append(refused(Line(1, "a", plain=True), "no"))
    answers.append(answered(Line(2, "b", plain=True), {"choices": [{"message": {"content": "yes"}}]}))
    answers.close()
    run = Run(file, out, threading.Event())
    assert run.left == 0 and (run.progress.before, run.progress.failed_before) == (2, 1), "the error is not forgotten"
    run.close()
    run = Run(file, out, threading.Event(), retry_errors=True)
    assert run.left == 1 and ids(out) == ["b"] and run.progress.failed_before == 0
    run.answer(Echo())
    run.close()
    assert ids(out) == ["b", "a"] and "error" not in json.loads(out.read_text().splitlines()[1])


@pytest.mark.parametrize("id", [{}, {"id": "b"}])
def test_a_line_that_was_mended_is_answered_and_its_error_is_gone(tmp_path: Path, id: dict[str, str]) -> None:
    good, mended = json.dumps({"prompt": "a", "id": "a"}), json.dumps({"prompt": "b", **id})
    out = tmp_path / "out"

    def ran(*lines: str) -> Progress:
        (tmp_path / "in").write_text("\n".join(lines))
        run = Run(tmp_path / "in", out, threading.Event())
        run.answer(Echo())
        run.close()
        return run.progress

    assert ran(good, mended[:-1], mended[:-2]).errors == 2
    assert ran(good, mended[:-1], mended[:-2]).failed_before == 2, "as they are, they are not read again"
    now = ran(good, mended, mended[:-2])
    assert (now.before, now.failed_before, now.done, now.errors) == (2, 1, 1, 0)
    assert ids(out) == ["a", "line-3", id.get("id", "line-2")]
    assert ["error" in json.loads(line) for line in out.read_text().splitlines()] == [False, True, False]


def test_nothing_is_begun_after_the_first_interruption(tmp_path: Path) -> None:
    file, drain = written(tmp_path, *({"prompt": "a"} for _ in range(5))), threading.Event()
    run = Run(file, tmp_path / "out", drain)
    progress = run.answer(Echo(), lambda progress: drain.set())
    run.close()
    assert progress.done == 1 and run.left == 4


class Full:
    """A file on a disk that takes `room` more bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: bytes) -> int:
        if not self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = min(len(data), self._room)
        self._room -= count
        return int(self._file.write(data[:count]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("room", [0, 5, 60, 75, 120])
def test_a_full_disk_keeps_what_was_answered(tmp_path: Path, room: int) -> None:
    file, out = written(tmp_path, *({"prompt": "a", "id": n} for n in range(6))), tmp_path / "out"
    run = Run(file, out, threading.Event())
    run._file._out = Full(run._file._out, room)  # type: ignore[assignment]
    with pytest.raises(MoestroError, match="no space left"):
        run.answer(Echo())
    run.close()
    kept = ids(out)
    assert kept == [str(n) for n in range(len(kept))] and out.read_bytes()[-1:] in (b"", b"\n")
    run = Run(file, out, threading.Event())
    run.answer(Echo())
    run.close()
    assert sorted(ids(out)) == [str(n) for n in range(6)]


@given(cut=st.integers(0, 1200), forms=st.lists(st.booleans(), min_size=1, max_size=8))
def test_any_part_of_a_file_of_answers_can_be_gone_on_from(cut: int, forms: list[bool]) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder, prompts = Path(made), []
        for n, plain in enumerate(forms):
            prompts.append({"prompt": "ä", "id": n} if plain else {"custom_id": f"c{n}", "body": CHAT})
        file, out = written(folder, *prompts), folder / "out"
        run = Run(file, out, threading.Event())
        run.answer(Echo())
        run.close()
        whole = out.read_bytes()
        out.write_bytes(whole[:cut])
        if 0 < cut < whole.index(b"\n"):
            with pytest.raises(MoestroError, match="a part of an answer"):
                Run(file, out, threading.Event())
            assert out.read_bytes() == whole[:cut], "nothing before it says that it is a batch's"
            return
        run = Run(file, out, threading.Event())
        run.answer(Echo())
        run.close()
        assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())
