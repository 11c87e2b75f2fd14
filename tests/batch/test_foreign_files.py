"""What is not a batch's stays as it is, byte for byte, whatever --in and --out name."""

import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from filelock import lock_descriptor
from hypothesis import given
from hypothesis import strategies as st

from app.cli import main
from app.services.batch import answers_file
from app.services.batch.answers_file import AnswersFile
from app.services.batch.lines import Line
from app.services.batch.records import answered, encoded, failed, refused
from app.services.batch.run import Run
from core.errors import MoestroError
from tests.batch.test_files import CHAT, ids, written

pytestmark = pytest.mark.usefixtures("echo")
POSIX = os.name == "posix"
BODY = {"id": "x", "choices": [{"message": {"content": "ä"}}], "usage": {"completion_tokens": 2}}
RECORDS = [
    answered(Line(1, "a", plain=True), BODY),
    refused(Line(2, "b", plain=True), "no"),
    answered(Line(3, "c"), BODY),
    refused(Line(4, "d"), "no"),
]
OURS = b"".join(map(encoded, RECORDS))
PROMPT = b'{"prompt": "why", "id": 1}\n'
FOREIGN = {
    "a key": b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----\n",
    "a key of one line": b"sk-0123456789abcdef",
    "a text": b"Dear reader,\nhow are you?\n",
    "a binary": bytes(range(256)) * 40,
    "zeros": bytes(5000),
    "white space": b"\n  \n",
    "prompts": PROMPT * 2,
    "a prompt without a newline": PROMPT.strip(),
    "prompts of OpenAI's form": json.dumps({"custom_id": "a", "body": CHAT}).encode() + b"\n",
    "a list": b"[1, 2]\n",
    "ids alone": b'{"id": "a"}\n{"custom_id": "b"}\n',
    "answers of another program": b'{"id": "a", "text": "yes"}\n',
    "answers of OpenAI": encoded({**RECORDS[2], "id": "batch_req_123"}),
    "a cut answer alone": OURS[:20],
    "answers and a text": OURS + b"a note\n",
    "answers and a text without a newline": OURS + b"a note",
    "answers and a prompt": OURS + PROMPT,
    "answers and a prompt without a newline": OURS + b'{"id": "1", "prompt": "why"}',
    "answers and a cut prompt": OURS + b'{"id": "1", "prompt": "wh',
    "a text and answers": b"a note\n" + OURS,
    "answers in other words": OURS.replace(b'", "', b'","'),
    "answers with Windows' newlines": OURS.replace(b"\n", b"\r\n"),
}


def everything(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Each file with its bytes, mode and time."""
    found = {}
    for file in folder.iterdir():
        about = file.lstat()
        found[file.name] = (file.read_bytes() if file.is_file() else b"", about.st_mode, about.st_mtime_ns)
    return found


def run(source: Path, out: Path, *more: str) -> int:
    return main(["batch", "--in", str(source), "--out", str(out), *more])


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("retry_errors", [False, True])
def test_a_file_that_is_not_of_a_batch_is_refused_and_untouched(tmp_path: Path, kind: str, retry_errors: bool) -> None:
    source, out = written(tmp_path, {"prompt": "a", "id": "e"}), tmp_path / "out"
    out.write_bytes(FOREIGN[kind])
    before = everything(tmp_path)
    with pytest.raises(MoestroError, match=rf"{out}.*another file"):
        Run(source, out, threading.Event(), retry_errors)
    assert everything(tmp_path) == before


def test_the_command_ends_with_2_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = written(tmp_path, {"prompt": "a", "id": "e"}), tmp_path / "out"
    out.write_bytes(FOREIGN["a key"])
    before = everything(tmp_path)
    assert run(source, out) == 2
    assert everything(tmp_path) == before and "Name another file for the answers" in capsys.readouterr().err


def test_an_answer_that_lost_only_its_newline_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_bytes(OURS.rstrip(b"\n"))
    assert run(written(tmp_path, {"prompt": "a", "id": "e"}), out) == 0
    assert out.read_bytes().startswith(OURS) and ids(out) == ["a", "b", "c", "d", "e"]


def test_an_empty_file_is_answered_into(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    assert run(written(tmp_path, {"prompt": "a", "id": "e"}), tmp_path / "out") == 0
    assert ids(tmp_path / "out") == ["e"]


@pytest.mark.parametrize("more", [(), ("--retry-errors",)])
def test_files_with_the_names_of_locks_and_temporary_files_are_untouched(tmp_path: Path, more: tuple[str, ...]) -> None:
    out = tmp_path / "out"
    out.write_bytes(OURS)
    for name in ("out.lock", "out.new", "out.tmp"):
        (tmp_path / name).write_bytes(b"4711\n")
    source = written(tmp_path, {"prompt": "a", "id": "b"}, {"prompt": "a", "id": "e"})
    before = everything(tmp_path)
    assert run(source, out, *more) == 0
    after = everything(tmp_path)
    assert sorted(ids(out)) == ["a", "b", "c", *([] if more else ["d"]), "e"]
    assert {**after, "out": before["out"]} == before, "and nothing is left beside them"


@pytest.mark.skipif(not POSIX, reason="links take a right on Windows")
@pytest.mark.parametrize("how", ["hard link", "symbolic link"])
def test_the_prompts_are_not_answered_into_by_another_name(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_bytes(OURS)  # which could be continued, if they were not the prompts as well
    if how == "hard link":
        os.link(source, out)
    else:
        out.symlink_to(source)
    assert run(source, out) == 2
    assert source.read_bytes() == OURS and "Name another" in capsys.readouterr().err


@pytest.mark.skipif(not POSIX, reason="links take a right on Windows")
def test_a_link_to_answers_stays_a_link(tmp_path: Path) -> None:
    real, out = tmp_path / "real", tmp_path / "out"
    real.write_bytes(OURS)
    out.symlink_to(real)
    source = written(tmp_path, {"prompt": "a", "id": "b"})
    assert run(source, out, "--retry-errors") == 0
    assert out.is_symlink() and sorted(ids(real)) == ["a", "b", "c"]


def odd(folder: Path, kind: str) -> Path:
    path = folder / "odd"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "a file as a folder":
        path.write_text("x")
        return path / "x"
    elif kind == "a long name":
        return folder / ("x" * 300)
    else:
        return Path(kind)
    return path


@pytest.mark.skipif(not POSIX, reason="Windows has no such files")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("option", ["--in", "--out"])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("pipe", "a pipe"),
        ("folder", "a folder"),
        ("loop", "symbolic links"),
        ("/dev/null", "a device"),
        ("/dev/zero", "a device"),
        ("link to a device", "a device"),
        ("/proc/self/no-such-file", "No such file"),
        ("/proc/self/mem", "odd"),
        ("/proc/version", "odd"),
        ("a file as a folder", "Not a directory"),
        ("a long name", "too long"),
    ],
)
def test_what_is_no_file_is_named_at_once(
    tmp_path: Path, option: str, kind: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, path = written(tmp_path, {"prompt": "a", "id": "e"}), odd(tmp_path, kind)
    if option == "--in":
        code = run(path, tmp_path / "out")
        if kind == "/proc/version":
            assert code == 1 and "not JSON" in (tmp_path / "out").read_text()
            return
    else:
        code = run(source, path)
    words = capsys.readouterr().err
    assert code == 2 and str(path) in words and "Unexpected" not in words
    assert said == "odd" or said in words, words


def test_a_file_that_may_not_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only file's owner may be refused; root is not, so the system's answer stands in for it."""
    out, real = tmp_path / "out", os.open

    def refusing(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if os.fspath(path) == str(out) and flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *more, **named)

    out.write_bytes(OURS)
    monkeypatch.setattr(os, "open", refusing)
    assert run(written(tmp_path, {"prompt": "a", "id": "e"}), out) == 2
    said = capsys.readouterr().err
    assert "Permission denied" in said and str(out) in said and out.read_bytes() == OURS


def test_where_no_open_file_is_replaced_errors_are_still_taken_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows' order of steps: closed first, then replaced."""
    monkeypatch.setattr(answers_file, "REPLACES_OPEN", False)
    out = tmp_path / "out"
    out.write_bytes(OURS)
    answers = AnswersFile(out, retry_errors=True)
    with pytest.raises(MoestroError, match="Another run"):
        AnswersFile(out)
    answers.append(RECORDS[1])
    answers.close()
    assert ids(out) == ["a", "c", "b"]


def test_a_file_that_was_replaced_before_it_was_locked_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run takes errors out between this one's opening and locking."""
    out, times = tmp_path / "out", 0
    out.write_bytes(OURS)

    def late(fd: int, *, blocking: bool) -> bool:
        nonlocal times
        times += 1
        if times == 1:
            AnswersFile(out, retry_errors=True).close()
        return lock_descriptor(fd, blocking=blocking)

    monkeypatch.setattr(answers_file, "lock_descriptor", late)
    answers = AnswersFile(out)
    answers.append(answered(Line(5, "e", plain=True), BODY))
    answers.close()
    assert ids(out) == ["a", "c", "e"]


def test_a_file_that_never_stays_the_same_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that gives a file another number each time."""
    out = tmp_path / "out"

    def replaced(fd: int, *, blocking: bool) -> bool:
        out.unlink()
        out.write_bytes(OURS)
        return lock_descriptor(fd, blocking=blocking)

    monkeypatch.setattr(answers_file, "lock_descriptor", replaced)
    with pytest.raises(MoestroError, match="keeps replacing"):
        AnswersFile(out)
    assert out.read_bytes() == OURS


pieces = st.one_of(
    st.sampled_from([encoded(one) for one in RECORDS]),
    st.sampled_from(RECORDS).map(lambda one: encoded(one).rstrip(b"\n")),
    st.sampled_from(RECORDS).flatmap(lambda one: st.integers(0, 60).map(lambda cut: encoded(one)[:cut])),
    st.sampled_from([b"\n", PROMPT, PROMPT.strip(), b'{"id": "a"}\n', b"\0" * 9, b"x"]),
    st.binary(max_size=12),
)


@given(content=st.lists(pieces, max_size=5).map(b"".join), retry=st.booleans())
def test_no_byte_changes_that_is_not_a_batchs(content: bytes, retry: bool) -> None:
    """Refused: everything stays. Continued: every whole line was a record, and what went is an error that is asked
    again, or the beginning of a record behind a whole one."""
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "out"
        file.write_bytes(content)
        try:
            AnswersFile(file, retry).close()
        except MoestroError:
            assert file.read_bytes() == content
            assert os.listdir(made) == ["out"]
            return
        known = {encoded(one): failed(one) for one in RECORDS}
        *whole, tail = content.split(b"\n")
        lines = [line + b"\n" for line in whole] + ([tail + b"\n"] if tail + b"\n" in known else [])
        assert all(line in known for line in lines), "another line was there"
        assert file.read_bytes() == b"".join(line for line in lines if not (retry and known[line]))
        if tail and tail + b"\n" not in known:
            assert whole and (not tail.strip(b"\0") or b'{"id": "'.startswith(tail) or tail.startswith(b'{"id": "'))
        assert os.listdir(made) == ["out"]
