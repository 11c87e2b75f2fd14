"""The kernels under Triton's interpreter: products, launches through a driver, rotary embeddings, attention, and the
canonical product.

One process tries some of all of them: each takes longer to begin than to try a few cases. The long tests try the rest.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.memory.codec import FORMATS
from tests.hf.rotary_cases import DTYPES, FUNCTIONS
from tests.kernel_cases import CODED
from tests.memory.fast.cases import PLAIN
from tests.memory.interpreted import DRAWN
from tests.memory.interpreted_fast import APART
from tests.memory.interpreted_fast import SOME as FAST
from tests.memory.interpreted_program import CASES as PROGRAMS

ROOT = Path(__file__).parents[2]


def interpreted(*asked: str) -> list[Any]:
    """What tests.memory.interpret prints. In a process of its own, so that no other test meets interpreted kernels."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    run = subprocess.run(
        [sys.executable, "-m", "tests.memory.interpret", *asked],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return list(json.loads(run.stdout.splitlines()[-1]))


SOME = (
    "interpreted:drawn",
    "interpreted:2",
    "interpreted_attention",
    "interpreted_fast",
    "interpreted_layer",
    "interpreted_mixers",
    "interpreted_join",
)


@pytest.fixture(scope="module")
def some() -> dict[str, Any]:
    return dict(zip(SOME, interpreted(*SOME), strict=True))


def wrong(errors: dict[str, float]) -> dict[str, float]:
    return {case: error for case, error in errors.items() if not error < 1}


def test_drawn_shapes(some: dict[str, Any]) -> None:
    errors = some["interpreted:drawn"]
    for name in DRAWN:
        tried = [case for case in errors if case.startswith(f"{name} ")]
        assert len([case for case in tried if not case.endswith("dequantized")]) >= 2, name
        assert name not in CODED or any(case.endswith("dequantized") for case in tried)
    assert not wrong(errors)


@pytest.mark.long(1)
def test_every_format() -> None:
    (errors,) = interpreted("interpreted")
    for name in FORMATS:
        for way in ("transposed", "bias"):
            for value in (False, True):
                assert any(case.startswith(f"{name} ") and f"{way}={value}" in case for case in errors)
    assert {f"{name} dequantized" for name in CODED} <= set(errors)
    assert not wrong(errors)


def test_kernels_that_find_experts_by_their_ids_have_the_bits_of_those_told_addresses(some: dict[str, Any]) -> None:
    """Whole experts of one token, drawn: shapes, formats, number types, biases, who is in a slot."""
    assert len(some["interpreted:2"]) > 1


@pytest.mark.long(1)
def test_the_same_for_every_format() -> None:
    (formats,) = interpreted("interpreted:30")
    assert set(formats) == set(FORMATS)


@pytest.mark.long(2.5)
def test_every_format_through_the_driver() -> None:
    """Also that two arguments which changed places are found, and a number wrongly said to be a multiple of 16."""
    (found,) = interpreted("driven")
    for name in FORMATS:
        tried = [case for case in found["errors"] if case.startswith(f"{name} ")]
        assert len(tried) == 6 + (name in CODED)
    assert not wrong(found["errors"])
    assert found["not_multiples"] > 0  # the compiler is told so, or the driver would have refused
    assert found["planted"]["swapped"] > 1
    assert "stride = 45 was said to be a multiple of 16" in found["planted"]["multiples"]


def test_the_canonical_product_has_the_bits_that_a_cpu_has(some: dict[str, Any]) -> None:
    """Products, odd numbers, an expert, its activation, and the weighted sum."""
    differ = some["interpreted_fast"]
    for name in (*FAST, *APART, "int8-g32 odd", "turned", "rounded once", "expert int4-g32", "gate", "combine"):
        assert any(case.startswith(f"{name} ") or case == name for case in differ), name
    for name in (FAST[0], *APART):  # many rows by tensor cores, with the bits of one at a time
        assert any(case.startswith(f"{name} ") and case.endswith(" tiled") for case in differ), name
    assert not {case: count for case, count in differ.items() if count}


@pytest.mark.long(7)
def test_the_same_for_every_format_and_drawn_shapes() -> None:
    (differ,) = interpreted("interpreted_fast:all")
    for name in (*CODED, *PLAIN):
        assert len([case for case in differ if case.startswith(f"{name} ")]) >= 12, name
    assert not {case: count for case, count in differ.items() if count}


def test_a_layer_has_the_bits_that_a_cpu_has(some: dict[str, Any]) -> None:
    kinds = "norm", "rotate", "route", "attend", "product", "activation", "gated", "cap", "then norm", "then route"
    assert some["interpreted_layer"] == dict.fromkeys(kinds, 0)


def test_delta_nets_and_latents_have_the_bits_that_a_cpu_has(some: dict[str, Any]) -> None:
    kinds = "convolve", "delta inputs", "delta rule", "latents", "absorbed", "attention"
    assert some["interpreted_mixers"] == dict.fromkeys(kinds, 0)


@pytest.mark.long(0.5)
def test_the_same_for_every_kind_of_layer_and_odd_numbers() -> None:
    layers, mixers = interpreted("interpreted_layer:all", "interpreted_mixers:all")
    assert len(layers) > 80 and len(mixers) > 60
    assert not {case: count for case, count in (layers | mixers).items() if count}


SILENT = "the GPU waited 0.2 seconds for what it was to compute"


def test_the_host_joins_what_it_computes_in_a_layer(some: dict[str, Any]) -> None:
    """The bits of layers with every expert in a slot; a host that never answers is an error; nothing races, and planted
    faults are found."""
    told = some["interpreted_join"]
    assert told["bits"] == 0 and SILENT in told["says nothing"] and not told["says nothing: stuck"]
    races = {case: count for case, count in told.items() if case.startswith("races, ")}
    assert len(races) == 4 and [case for case, count in races.items() if not count] == ["races, none"]


@pytest.mark.long(0.7)
def test_threads_that_end_or_never_do() -> None:
    """Before a layer or within one; what they might still write to is kept then. An error between two layers does no
    harm to the next ones. Every pattern of missing experts has the bits of none, of codes and of plain numbers."""
    (told,) = interpreted("interpreted_join:all")
    assert told["bits"] == told["codes"] == told["broken off"] == 0
    assert "it has ended" in told["never begins"] and told["never begins: stuck"]
    assert SILENT in told["ends at once"] and not told["ends at once: stuck"]
    assert "it did not end within 0.2 seconds" in told["is stuck"] and told["is stuck: stuck"]


@pytest.mark.long(2)
def test_tokens_that_the_host_joins() -> None:
    """Of a whole model: the bits and counters, as a graph, too; stopped and broken off within a token, unloaded after
    that; settings that change; a silent host; experts that are not pinned."""
    (left,) = interpreted("interpreted_join_engine")
    assert left > 0


@pytest.mark.long(1)
def test_a_model_has_the_bits_that_a_cpu_has() -> None:
    """With half of its experts in slots, of some tokens of a prompt and a decoded one: missing experts are copied, or
    computed by the host, or the GPU finds all of them by itself, also as a graph."""
    (differ,) = interpreted("interpreted_program")
    ways = [f"[2, 1, 1, 1, 1] {way}" for way in ("on the host", "by ids", "as a graph")]
    assert differ == dict.fromkeys((f"50% {way}" for way in ("[3, 1]", *ways)), 0)


@pytest.mark.long(3)
@pytest.mark.parametrize("arch", PROGRAMS)
def test_the_same_for_every_kind_of_model(arch: str) -> None:
    """With all experts in slots and half of them, the text in one piece, in several, token by token, with a guess that
    is taken back, and along with another text."""
    (differ,) = interpreted(f"interpreted_program:{arch}")
    assert len(differ) == 4
    assert not {case: count for case, count in differ.items() if count}


@pytest.mark.long(0.5)
def test_a_prompts_next_layer_arrives_while_one_computes() -> None:
    """No prefetch waits for what a layer computes, and the next layer finds its experts there or on their way."""
    (found,) = interpreted("interpreted_streaming")
    assert found["overlapping"] == found["copied"] >= 4 and found["used"] >= 4 and not found["differ"]


@pytest.mark.long(1.5)
@pytest.mark.parametrize("way", ["glm4_moe_lite/as a graph", "qwen3_next/by ids"])
def test_some_of_them_without_the_host(way: str) -> None:
    """Attention to latents as a graph, and delta nets beside experts that the GPU finds by itself."""
    (differ,) = interpreted(f"interpreted_program:{way}")
    assert len(differ) == 1 and not any(differ.values())


@pytest.mark.long(3)
@pytest.mark.timeout(1200)
def test_no_bit_depends_on_where_and_how_widely_it_is_computed() -> None:
    """`bench invariance` on the emulated GPU: who leads, who computes misses, budgets, pieces, and texts of a pass."""
    (found,) = interpreted("interpreted_invariance")
    assert found["runs"] == 18 and found["logits"] > 30_000 and not found["differing"]
    assert all(found["calls"].values()) and all(of and not off for of, off in found["of"].values())


@pytest.mark.long(0.2)
def test_every_bit_of_rotary_embeddings() -> None:
    """Each function in one number type, and each number type with two functions or more."""
    (found,) = interpreted("interpreted_rotary")
    assert set(found) == set(FUNCTIONS)
    assert all(list(calls.values()) == [1] for calls in found.values())
    types = [dtype for calls in found.values() for dtype in calls]
    assert all(types.count(str(dtype)) >= 2 for dtype in DTYPES)


@pytest.mark.long(0.5)
def test_every_bit_of_rotary_embeddings_of_drawn_sizes_in_every_number_type() -> None:
    (found,) = interpreted("interpreted_rotary:12")
    assert set(found) == set(FUNCTIONS)
    assert all(calls == dict.fromkeys(map(str, DTYPES), 12) for calls in found.values())


def test_attention_is_close_to_the_formula(some: dict[str, Any]) -> None:
    """Every shape in two number types, every number of positions in one of them."""
    errors = some["interpreted_attention"]
    assert len(errors) == 7 and len({case.rpartition(" ")[0] for case in errors}) == 4 and not wrong(errors)


@pytest.mark.long(0.5)
def test_attention_of_many_parts() -> None:
    (errors,) = interpreted("interpreted_attention:all")
    assert len(errors) == 24 and not wrong(errors)
