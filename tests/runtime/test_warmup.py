"""The number of decode threads is the fastest one, and more of them must be worth it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from core.runtime.warmup import Threads, choose_threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("times", "best"), [({1: 5.0, 2: 6.0, 4: 9.0}, 1), ({1: 9.0, 2: 5.0, 4: 6.0}, 2),
                                             ({1: 9.0, 2: 7.0, 4: 4.0}, 4), ({1: 5.0, 2: 4.9, 4: 4.86}, 1)])
def test_the_fastest_is_taken_and_torch_left_as_it_was(times: dict[int, float], best: int) -> None:
    threads, pass_ms = choose_threads(CPU, 0, lambda: times[torch.get_num_threads()])
    assert (threads.decode, pass_ms) == (best, times[best])
    assert torch.get_num_threads() == 4


def test_what_is_asked_for_is_taken_and_a_gpu_is_not_timed() -> None:
    threads, pass_ms = choose_threads(CPU, 3, lambda: float(torch.get_num_threads()))
    assert (threads.decode, pass_ms) == (3, 3.0)
    assert choose_threads(torch.device("cuda"), 0, lambda: 1 / 0)[1] == 0.0


def test_a_prompt_is_read_with_all_and_a_token_decoded_with_the_chosen() -> None:
    threads = Threads(2)
    threads.use("decode")
    assert torch.get_num_threads() == 2
    threads.use("prefill")
    assert torch.get_num_threads() == 4
