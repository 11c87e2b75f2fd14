"""The machine code of the canonical product's kernels, made without a GPU: no spills, few registers, wide loads.

`gpu_code.json` has what `python -m core.runtime.program.gpu.check` found for each kind of code and GPU; kernels that
are compiled here, of every format, are held to the same limits."""

import json
import re
from pathlib import Path

import pytest
import torch

from core.memory.codec import FORMATS
from core.memory.codec.bits import PLANES
from core.memory.codec.kernels.blocks import coded
from core.memory.codec.kernels.check import SHAPE, variants
from core.runtime.program.gpu import check, check_layer
from core.runtime.program.gpu.check import (
    CODED,
    HOSTED,
    KINDS,
    OTHERS,
    TARGETS,
    TILED,
    Figures,
    before_the_last,
    figures,
    has_tiles,
    hosted,
    kernels,
    longest_loop,
)
from tests.selection import layered

FOUND = json.loads((Path(__file__).parent / "gpu_code.json").read_text())
FILED = [name for name in FORMATS if FORMATS[name].is_loadable]
REGISTERS = 168
REGISTERS_OF_TILES = 255  # a tile has six numbers of each product, and 128 threads: two are on a multiprocessor at once
LOOPS = {
    8: 100,
    6: 300,
    5: 450,
    4: 400,
    3: 300,
    2: 220,
    16: 160,
}  # instructions that add some 64 to 128 weights of a thread, by bits
LOOKED_UP = 1.6  # times as many where codes of fewer than 4 bits choose from a table
FEW = KINDS[0], OTHERS[1]  # what decodes the most weights, and what prepares their inputs
EVERY = *KINDS, *TILED, *OTHERS
GREW = 1.1  # how much longer a loop may be than it was found to be, with another release of Triton


def wrong(name: str, kind: str, found: Figures) -> list[str]:
    """What of a kernel's figures is beyond the limits."""
    loads = found["loop_loads"]
    assert isinstance(loads, dict)
    faults = [what for what in ("stack", "spills") if found[what]]
    if found["registers"] > (REGISTERS_OF_TILES if kind in TILED else REGISTERS):  # type: ignore[operator]
        faults.append("registers")
    if kind in TILED and not found["tensor_cores"]:
        faults.append("no tensor cores")
    form = FORMATS[name]
    is_short = form.group and form.group * PLANES.get(form.bits, (16,))[0] < 128
    at_once = "64" if is_short else "128"  # bits: a thread has one block at a time
    if not form.is_plain and kind in KINDS and not (loads.get(at_once) or loads.get("128")):
        faults.append("codes are not read as many bytes at a time as a block has")
    longest = LOOPS[16 if form.is_plain else form.bits] * (LOOKED_UP if form.table and form.bits < 4 else 1)
    if kind == "up" and (found["loop_barriers"] or found["loop"] > longest):  # type: ignore[operator]
        faults.append("loop")
    return faults


def names_of_layer(capability: int) -> tuple[str, ...]:
    """What is compiled beside experts."""
    return (*check_layer.NAMES, *(check_layer.IN_TILES if has_tiles("int8", capability) else ()))


def wrong_of_layer(name: str, found: Figures) -> list[str]:
    """The same of what a layer computes beside its experts."""
    loads = found["loop_loads"]
    assert isinstance(loads, dict)
    faults = [what for what in ("stack", "spills") if found[what]]
    tiled = name in check_layer.IN_TILES
    if found["registers"] > (REGISTERS_OF_TILES if tiled else REGISTERS):  # type: ignore[operator]
        faults.append("registers")
    if tiled and not found["tensor_cores"]:
        faults.append("no tensor cores")
    if name.startswith("int") and not loads.get("128"):
        faults.append("codes are not read 16 bytes at a time")
    return faults


@pytest.mark.parametrize("target", [f"sm_{capability}" for capability in TARGETS])
def test_what_was_compiled_is_within_the_limits(target: str) -> None:
    found = FOUND["kernels"][target]
    kinds = {name: (*KINDS, *TILED) if has_tiles(name, int(target[3:])) else KINDS for name in CODED}
    layer = (*names_of_layer(int(target[3:])), *HOSTED)
    assert set(found) == {f"{name} {kind}" for name in CODED for kind in kinds[name]} | {*layer}
    assert not [name for name in layer if wrong_of_layer(name, found[name])]
    faults = {
        f"{target} {name} {kind}"
        for name in CODED
        for kind in kinds[name]
        if wrong(name, kind, found[f"{name} {kind}"])
    }
    assert not faults


@pytest.mark.parametrize(
    ("name", "capability", "kinds"),
    layered(
        [("int4-g64", 89, FEW), *((name, capability, EVERY) for name in FILED for capability in TARGETS)],
        quick=lambda case: case[2] is FEW,
        minutes=0.3,
    ),
)
def test_what_is_compiled_here_is_within_the_limits(
    name: str, capability: int, kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no operation is approximate, flushes small numbers to 0, or may be contracted with another."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tried = []
    for kind, made in kernels(name, torch.bfloat16, capability, kinds):
        tried.append(kind)
        got, was = figures(made), FOUND["kernels"][f"sm_{capability}"].get(f"{name} {kind}")
        assert not wrong(name, kind, got), (kind, got)
        if was is not None:  # a loop may be unrolled by one release, and not by another
            assert got["loop"] <= GREW * (was["loop"] or was["instructions"]), (kind, got, was)
        assert not re.findall(r"\.ftz|\.approx|div\.full", made.asm["ptx"]) and not made.metadata.enable_fp_fusion
    lacks = {*OTHERS[1:]} if FORMATS[name].is_plain else set[str]()
    assert {*tried} == {*kinds} - lacks - (set() if has_tiles(name, capability) else {*TILED})


@pytest.mark.parametrize(
    ("capability", "names"),
    layered(
        [(89, ("attend",)), *((capability, (*check_layer.LAYER, *check_layer.DENSE)) for capability in TARGETS)],
        quick=lambda case: len(case[1]) == 1,
        minutes=0.2,
    ),
)
def test_what_a_layer_computes_is_compiled_within_the_limits(
    capability: int, names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tried = set[str]()
    for name, made in check_layer.kernels(capability, names):
        tried.add(name)
        got, was = figures(made), FOUND["kernels"][f"sm_{capability}"][name]
        assert not wrong_of_layer(name, got), (name, got)
        assert got["loop"] <= GREW * (was["loop"] or was["instructions"]), (name, got, was)
        assert not re.findall(r"\.ftz|\.approx|div\.full", made.asm["ptx"]) and not made.metadata.enable_fp_fusion
    assert tried == {one for one in names_of_layer(capability) if one.split()[0] in names}


def test_the_references_product_is_compiled_as_its_tile_sizes_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """core.memory.codec.kernels.blocks: instructions a weight, barriers, loads."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    _, made = next(variants(["int4-g64"], SHAPE, torch.bfloat16, 89))
    got, tile = figures(made), coded(4, SHAPE[1] // 8)
    assert not got["spills"] and not got["stack"] and got["loop_loads"]["128"] == tile.outputs * tile.across // 128  # type: ignore[index]
    assert 4 < got["loop"] / (tile.outputs * tile.across * 8 / (32 * tile.warps)) < 6 and got["loop_barriers"] == 10  # type: ignore[operator]


def ordered(ptx: str) -> list[str]:
    """What touches memory that others see, and what orders it, in the order of the program."""
    kinds = r"ld\.acquire\.sys|st\.release\.sys|fence\.acq_rel\.sys|bar\.sync|ld\.global|st\.global|globaltimer"
    return re.findall(kinds, ptx)


def test_the_last_program_sees_what_all_have_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every store of the product comes before a barrier, this before the addition, which releases and acquires, and a
    barrier before what is read of it."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ((_, made),) = check_layer.kernels(75, ("router",))
    kinds = r"atom\.global\.gpu\.acq_rel|bar\.sync|ld\.global(?:\.nc)?|st\.global"
    found = re.findall(kinds, made.asm["ptx"])
    at = found.index("atom.global.gpu.acq_rel")
    assert {*found[:at]} == {"ld.global", "st.global", "bar.sync"} and found[at - 1] == "bar.sync"
    assert found[at + 1 : at + 5] == ["bar.sync", "st.global", "bar.sync", "ld.global"]  # the counter is 0 again
    assert "ld.global.nc" not in found


@pytest.mark.parametrize("capability", layered(list(TARGETS), quick=lambda capability: capability == 75, minutes=0.1))
def test_what_the_gpu_and_the_host_tell_each_other_is_ordered(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag is released at system scope, after a fence of each thread and a barrier of all, behind every store that
    the host reads; and it is acquired at system scope before anything that the host has written is read."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = dict(hosted(capability))
    assert {*made} == {*HOSTED}
    for name, one in made.items():
        assert not wrong_of_layer(name, figures(one)), name
    tells = ordered(made["publish"].asm["ptx"])
    at = tells.index("fence.acq_rel.sys")
    assert tells[at : at + 3] == ["fence.acq_rel.sys", "bar.sync", "st.release.sys"]
    assert tells[:at].count("st.global") > 16 and tells[at + 3 :] == ["st.global"]  # the latter on the device
    waits = ordered(made["join"].asm["ptx"])
    first, last = waits.index("ld.acquire.sys"), len(waits) - 1 - waits[::-1].index("ld.acquire.sys")
    assert waits[:first].count("ld.global") == 3 and waits[last:].count("ld.global") > 3
    assert "globaltimer" in waits and not {"bar.sync", "fence.acq_rel.sys"} & {*waits}  # no thread waits for another


def test_the_longest_innermost_loop_is_found() -> None:
    code = ["MOV", "LDG.E R1, [R2.64]", "IADD", "BRA `(.L_x_1)", "FADD", "BRA `(.L_x_0)", "BRA `(.L_x_2)", "EXIT"]
    assert longest_loop(code, {".L_x_0": 0, ".L_x_1": 1, ".L_x_2": 6}) == code[1:4]
    assert before_the_last([*code, "ATOMG.E.ADD.STRONG.GPU PT, R1, [R2.64], R3", "BRA `(.L_x_0)"]) == code
    assert before_the_last(code) == code
    assert check.width_of("LDG.E R1, [R2.64]") == 32
    assert check.width_of("LDG.E.U16.CONSTANT R1, [R2.64]") == 16
