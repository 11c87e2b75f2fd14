"""What a file of `launch.py accept` is read to say: the causes of what failed, and of figures that stand out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.accept import read
from bench.accept.causes import causes

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
        "decode": {"by_budget": {"15%": {"host": [host, host], "graph": graph, "not_captured": ""}}},
    }
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "doctor": ({"gpus": [{"pcie": {**pcie, "width": 8}}]}, "x8 of x16"),
        "copies": ({"not_pinned_bytes": 4 * 10**9}, "4.0 GB of experts are not pinned"),
        "zerocopy": ({"8_of_host_gbps": 9.0}, "8 experts at 9.0 GB/s, copies at 25.0"),
        "launches": ({"driver_us": 60.0}, "60 and 52 us"),
        "attention": ({"torch_takes": "CUDNN_ATTENTION"}, "56 ms for a length"),
        "norms": ({"taken": "the model's own", "in_two_units_off": 1.0}, "in_two_units_off 1.0"),
        "rows": ({"mm_9_differs": 3}, "mm_9_differs"),
        "decode": ({"by_budget": {"15%": {"host": host, "graph": [{"ms": 40.0}]}}}, "graph 40.0, host 30.0"),
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
