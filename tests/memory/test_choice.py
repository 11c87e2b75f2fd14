"""The way of a product is the fastest of those that were timed, and times are kept for the same machine alone."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from core.memory.codec.fast import choice
from core.memory.codec.fast.choice import ROWS, choose, keep_in, known, measure, timed

KIND = "int4-g64 64 x 64 bfloat16"


class Fake:
    """Ways that take a + b * rows seconds on a clock of their own."""

    def __init__(self, **ways: tuple[float, float]) -> None:
        self.now, self.calls = 0.0, list[tuple[str, int]]()
        self.ways: Mapping[str, Callable[[int], None]] = {n: self._way(n, a, b) for n, (a, b) in ways.items()}

    def _way(self, name: str, a: float, b: float) -> Callable[[int], None]:
        def compute(rows: int) -> None:
            self.calls.append((name, rows))
            self.now += a + b * rows

        return compute

    def clock(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(choice, "_timed", {})
    monkeypatch.setattr(choice, "_file", None)
    return


def best(fake: Fake, rows: int) -> str:
    return min(fake.ways, key=lambda name: time_of(fake, name, rows))


def time_of(fake: Fake, name: str, rows: int) -> float:
    before = fake.now
    fake.ways[name](rows)
    took, fake.now = fake.now - before, before
    return took


@pytest.mark.parametrize(
    "ways",
    [
        {"codes": (0.0, 1.0), "tiles": (20.0, 0.5), "torch": (100.0, 5.0)},
        {"codes": (0.0, 1.0), "tiles": (9.0, 2.0), "torch": (15.0, 0.1)},
        {"codes": (5.0, 0.3), "tiles": (1.0, 0.4)},
        {"codes": (0.0, 9.0), "torch": (0.0, 1.0)},
    ],
)
def test_the_fastest_is_taken_for_any_number_of_rows(ways: dict[str, tuple[float, float]]) -> None:
    fake = Fake(**ways)
    timed = measure(fake.ways, fake.clock)
    for rows in (*ROWS, 30, 48, 100, 1000):
        chosen = timed.fastest(rows)
        assert time_of(fake, chosen, rows) <= 1.02 * time_of(fake, best(fake, rows), rows), rows


def test_a_hopeless_way_costs_little() -> None:
    fake = Fake(codes=(0.0, 1.0), torch=(10.0, 20.0))
    timed = measure(fake.ways, fake.clock)
    assert len(timed.seconds["torch"]) < len(timed.seconds["codes"]) == len(ROWS)
    assert max(rows for name, rows in fake.calls if name == "torch") < ROWS[-1]
    assert {timed.fastest(rows) for rows in range(1, 999)} == {"codes"}


def test_what_is_compiled_once_is_no_part_of_a_time() -> None:
    fake, made = Fake(codes=(0.0, 1.0), torch=(0.0, 2.0)), set[int]()

    def compiled_for_many(rows: int) -> None:
        fake.now += 1000.0 * ((rows > ROWS[0]) not in made)
        made.add(rows > ROWS[0])
        fake.ways["codes"](rows)

    timed = measure({"codes": compiled_for_many, "torch": fake.ways["torch"]}, fake.clock)
    assert {timed.fastest(rows) for rows in range(1, 99)} == {"codes"}


def test_a_slow_way_that_catches_up_is_not_given_up() -> None:
    fake = Fake(codes=(0.0, 1.0), tiles=(50.0, 0.1))
    timed = measure(fake.ways, fake.clock)
    assert (timed.fastest(ROWS[0]), timed.fastest(ROWS[-1])) == ("codes", "tiles")


def chosen(fake: Fake, threads: int = 2) -> str:
    choice._timed.clear()
    fake.calls.clear()
    choose(KIND, fake.ways, threads, fake.clock)
    found = timed(KIND)
    assert found is not None
    return found.fastest(100)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    keep_in(tmp_path / "products.json")
    return tmp_path / "products.json"


def test_times_are_kept_for_the_next_process(file: Path) -> None:
    fake, other = Fake(codes=(0.0, 1.0), torch=(0.0, 2.0)), Fake(codes=(0.0, 2.0), torch=(0.0, 1.0))
    assert chosen(fake) == "codes" and fake.calls
    assert chosen(other) == "codes" and not other.calls, "nothing is timed again"
    assert [*known()] == [KIND]
    choose(KIND, other.ways, 2, other.clock)
    assert not other.calls
    file.unlink()
    assert chosen(other) == "torch" and file.exists()


def test_other_threads_are_timed_anew_and_the_old_times_stay(file: Path) -> None:
    fake = Fake(codes=(0.0, 1.0), torch=(0.0, 2.0))
    chosen(fake, 2)
    assert chosen(fake, 4) == "codes" and fake.calls
    for threads in (2, 4):
        assert chosen(fake, threads) == "codes" and not fake.calls


@pytest.mark.parametrize("name", ["processor", "cores", "moestro", "version"])
def test_another_machine_is_timed_anew(file: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(codes=(0.0, 1.0), torch=(0.0, 2.0))
    chosen(fake)
    here = choice.machine()
    monkeypatch.setattr(choice, "machine", lambda: {**here, name: "another"})
    other = Fake(codes=(0.0, 2.0), torch=(0.0, 1.0))
    assert chosen(other) == "torch" and other.calls
    assert chosen(fake) == "torch" and not fake.calls, "the file is the other machine's now"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"codes"', '"cod"'),
        lambda text: json.dumps({**json.loads(text), "products": {f"{KIND}, 2 threads": {"codes": [1.0]}}}),
        lambda text: json.dumps(
            {**json.loads(text), "products": {f"{KIND}, 2 threads": {"codes": [1.0], "torch": [True, -1.0, "x"]}}}
        ),
        lambda text: json.dumps({**json.loads(text), "products": {f"{KIND}, 2 threads": {"codes": [], "torch": []}}}),
        lambda text: json.dumps({**json.loads(text), "products": [1]}),
        lambda text: "\udcff",
    ],
)
def test_a_damaged_file_is_timed_anew(file: Path, damage: Callable[[str], str]) -> None:
    fake = Fake(codes=(0.0, 1.0), torch=(0.0, 2.0))
    chosen(fake)
    file.write_bytes(damage(file.read_text()).encode("utf-8", "surrogateescape"))
    assert chosen(fake) == "codes" and fake.calls
    assert chosen(fake) == "codes" and not fake.calls, "and whole again"


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "none").write_text("a file in its place")
    keep_in(tmp_path / "none" / "products.json")
    fake = Fake(codes=(0.0, 1.0), torch=(0.0, 2.0))
    assert chosen(fake) == "codes" and chosen(fake) == "codes" and fake.calls
