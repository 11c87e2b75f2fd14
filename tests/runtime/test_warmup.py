"""The number of decode threads is the fastest one, and more of them must be worth it."""

from collections.abc import Iterator

import pytest
import torch

from core.memory.codec.native import threads as native
from core.runtime.warmup import Split, Threads, choose_threads
from tests.threads import torch_threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    with torch_threads(4):
        yield


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({1: 5.0, 2: 6.0, 4: 9.0}, 1),
        ({1: 9.0, 2: 5.0, 4: 6.0}, 2),
        ({1: 9.0, 2: 7.0, 4: 4.0}, 4),
        ({1: 5.0, 2: 4.9, 4: 4.86}, 1),
    ],
)
def test_the_fastest_is_taken_and_torch_left_as_it_was(times: dict[int, float], best: int) -> None:
    threads, pass_ms = choose_threads(CPU, 0, lambda: times[torch.get_num_threads()])
    assert (threads.token, pass_ms) == ((best, native.TORCHS), times[best])
    assert torch.get_num_threads() == 4


def test_what_is_asked_for_is_taken_and_a_gpu_is_not_timed() -> None:
    threads, pass_ms = choose_threads(CPU, 3, lambda: float(torch.get_num_threads()))
    assert (threads.token, pass_ms) == ((3, native.TORCHS), 3.0)
    assert choose_threads(torch.device("cuda"), 0, lambda: 1 / 0)[1] == 0.0


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({(1, 0): 9.0, (2, 0): 8.0, (1, 2): 6.0, (4, 0): 7.0, (1, 4): 5.0}, (1, 4)),
        ({(1, 0): 9.0, (2, 0): 6.0, (1, 2): 7.0, (4, 0): 9.0, (1, 4): 9.0}, (2, 0)),
        ({(1, 0): 9.0, (2, 0): 8.0, (1, 2): 7.9, (4, 0): 9.0, (1, 4): 7.8}, (1, 2)),
    ],
)
def test_where_steps_of_our_own_compute_these_may_have_the_threads(
    times: dict[tuple[int, int], float], best: tuple[int, int]
) -> None:
    threads, pass_ms = choose_threads(CPU, 0, lambda: times[torch.get_num_threads(), native.shared_by()], ours=True)
    assert (threads.token, threads.token.most, pass_ms) == (best, max(best), times[best])
    assert (torch.get_num_threads(), native.shared_by()) == (4, 1)
    assert choose_threads(CPU, 4, lambda: times[torch.get_num_threads(), native.shared_by()], ours=True)[0].token in (
        (4, 0),
        (1, 4),
    )


def test_a_prompt_is_read_with_all_and_a_token_decoded_with_the_chosen() -> None:
    threads = Threads(Split(2))
    threads.use("decode")
    assert (torch.get_num_threads(), native.shared_by()) == (2, native.TORCHS)
    threads.use("prefill")
    assert (torch.get_num_threads(), native.shared_by()) == (4, native.TORCHS)
    threads.use("prefill", tokens=3)
    assert (torch.get_num_threads(), native.shared_by()) == (4, native.TORCHS)
