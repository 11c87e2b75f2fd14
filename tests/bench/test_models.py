"""Models that benches write, and other programs beside them: their answers, and what comes of one that ends."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bench.gpu_model import Card, Model, expected, table
from bench.harness.process import Session
from bench.harness.run import Result
from bench.models import peers as programs
from bench.models.generate import checkpoint
from bench.models.gguf_file import write_bf16
from bench.models.sizes import SMALL
from bench.speed import peer_worker, peers
from core.errors import MoestroError

TINY = replace(SMALL, name="tiny", hidden=64, layers=2, experts=4, width=32, heads=2, kv_heads=1, head_dim=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("generated"), TINY, seed=7)


def weights(model: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_seed_gives_the_same_weights(model: Path, tmp_path: Path) -> None:
    again, other = checkpoint(tmp_path, TINY, seed=7), checkpoint(tmp_path, TINY, seed=8)
    assert again != other
    ours, others = weights(model), weights(other)
    assert all(torch.equal(ours[name], tensor) for name, tensor in weights(again).items())
    assert not torch.equal(ours["lm_head.weight"], others["lm_head.weight"])
    assert {t.dtype for t in ours.values()} == {torch.bfloat16}


def test_it_is_written_once_and_what_was_stopped_is_written_anew(model: Path, tmp_path: Path) -> None:
    stopped = tmp_path / f"{model.name}.partial"
    stopped.mkdir()
    (stopped / "model-00001-of-00003.safetensors").write_bytes(b"half")
    said: list[str] = []
    found = checkpoint(tmp_path, TINY, seed=7, say=said.append)
    assert checkpoint(tmp_path, TINY, seed=7, say=said.append) == found
    assert len(said) == 1 and not stopped.exists()
    index = json.loads((found / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    assert set(index) == set(weights(found))


def test_the_gguf_file_holds_the_same_weights(model: Path, tmp_path: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(write_bf16(model, tmp_path / "model.gguf"))
    found = {tensor.name: tensor for tensor in reader.tensors}
    names = {
        gguf.TENSOR_NAMES[kind].format(bid=layer) + ".weight"
        for layer in range(TINY.layers)
        for kind in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.QWEN3MOE]
    }
    assert set(found) == names
    ours = weights(model)
    stacked = torch.stack([ours[f"model.layers.1.mlp.experts.{e}.down_proj.weight"] for e in range(TINY.experts)])
    theirs = found["blk.1.ffn_down_exps.weight"]
    assert theirs.tensor_type == gguf.GGMLQuantizationType.BF16
    assert [int(n) for n in theirs.shape] == [TINY.width, TINY.hidden, TINY.experts]  # the fastest dimension first
    assert theirs.data.tobytes() == stacked.view(torch.uint16).numpy().tobytes()
    router = found["blk.0.ffn_gate_inp.weight"]
    assert router.tensor_type == gguf.GGMLQuantizationType.F32
    np.testing.assert_array_equal(router.data, ours["model.layers.0.mlp.gate.weight"].float().numpy())
    tokens = reader.fields["tokenizer.ggml.tokens"]
    assert len(tokens.data) == TINY.vocab and bytes(tokens.parts[tokens.data[2]]).decode() == "<|im_end|>"


DOCS = Path(__file__).parents[2] / "docs"
CARD = Card("", memory=5.0, memory_gbps=100, link_gbps=10)
MODEL = Model("", layers=10, experts=100, top_k=4, expert=16 / 4.5, dense=900, embedding=100)  # 2 MB an expert; 2 GB


def test_the_arithmetic() -> None:
    found = expected(CARD, MODEL)
    assert found is not None and found.share == pytest.approx(1.0)  # (5 - 1 - 2) GB / 2 MB = 1,000 slots
    assert found.hit == (1.0, 1.0)
    assert found.host == (pytest.approx(1 / 0.0188), pytest.approx(1 / 0.0188))  # 1.88 GB at 100 GB/s; host 3.8 ms
    assert found.graph == (pytest.approx(1 / 0.01983), pytest.approx(1 / 0.01983))  # and 103 us a layer
    half = expected(CARD._replace(memory=4.0), MODEL)
    assert half is not None and half.share == pytest.approx(0.5, abs=0.002)
    assert half.hit == (pytest.approx(0.5, abs=0.002), pytest.approx(0.96, abs=0.001))
    assert half.host[0] == pytest.approx(1 / (0.0188 + 0.004), rel=0.01)  # 40 of 80 MB at 10 GB/s
    assert half.host[1] == pytest.approx(1 / 0.0188)
    assert half.graph[0] == pytest.approx(1 / (0.01983 + 0.008), rel=0.01)  # twice over the link
    assert half.graph[1] == pytest.approx(1 / (0.01983 + 0.00032), rel=0.01)


def test_the_arithmetic_of_the_fast_path() -> None:
    """9 kernels of 103 / 47 us a layer, 10 with dense layers in int8, which leave room for more slots."""
    half = expected(CARD._replace(memory=4.0), MODEL)
    assert half is not None
    least, most = half.hit
    own = 10 * 9 * 103 / 47 / 1e6
    for hit, got in zip(half.hit, half.fast, strict=True):  # 1.8 GB and hits at 100 GB/s, misses at 10
        assert got == pytest.approx(1 / (0.018 + 0.0008 * hit + 0.008 * (1 - hit) + own), rel=1e-3)
    assert 0 < least < most
    whole = expected(CARD._replace(memory=4.2), MODEL)
    own = 10 * 10 * 103 / 47 / 1e6
    assert whole is not None and whole.share < 1  # with dense layers in int8 all experts fit
    assert whole.fast_int8 == whole.fast_beside == (pytest.approx(1 / (0.009 + 0.0008 + own)),) * 2
    few = expected(CARD._replace(memory=3.5), MODEL._replace(dense=1100.0))
    assert (
        few is not None and few.fast_beside[0] > few.fast_int8[0]
    )  # a link of 10 GB/s copies longer than a host takes


def test_what_does_not_fit_has_no_speed() -> None:
    assert expected(CARD._replace(memory=3.05), MODEL) is None  # 25 slots; a token takes 40
    assert expected(CARD._replace(memory=3.081), MODEL) is not None


def test_the_page_has_it() -> None:
    assert table() in (DOCS / "gpu.md").read_text("utf-8")


THREADS = 3  # of torch before anything is loaded


@pytest.mark.long(0.2)  # below, a program that fails and what is timed; tests/bench/test_speed.py has the intervals
@pytest.mark.usefixtures("other_programs")
def test_each_round_has_every_system_and_ratios_have_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: THREADS)
    jobs: list[dict[str, Any]] = []

    def seen(module: str, job: dict[str, Any], python: str) -> Session:
        jobs.append(job)
        return Session(module, job, python)

    monkeypatch.setattr(programs, "Session", seen)
    monkeypatch.setattr(programs, "CONFIGURATIONS", [(False, True), (True, False), (True, True)])
    found: Result = peers.SUITE.run(
        small=True,
        keep=tmp_path,
        formats="int4",
        lengths="16",
        rounds=3,
        peers="ik",
        coded="int4-g64,iq4_nl",
        arithmetics="fast",
    )
    assert {job["threads"] for job in jobs} == {THREADS} and {job["peer"] for job in jobs} == {"ik"}
    assert len(jobs) == 1 + len(programs.CONFIGURATIONS) + 1, "for its quality, to try, to measure"
    speeds = found["found"]["int4"]["speeds"]
    assert speeds.keys() == {"fast", "fast iq4_nl", "ik"}
    assert speeds["ik"]["16"]["decode"] == pytest.approx([1e4] * 3)
    about = found["found"]["int4"]["about"]
    assert 4 < about["fast"]["bits"] < 8 and about["fast"]["kl"] < 1 < about["ik"]["kl"]
    assert about["fast iq4_nl"]["file"] == "iq4_nl"
    assert (about["ik"]["repack"], about["ik"]["flash"]) == (True, True)
    ratio = found["ratios"]["int4 decode 16 fast/ik"]
    assert 0 < ratio["low"] <= ratio["ratio"] <= ratio["high"]
    [decode] = [one for one in found["goals"] if one["goal"].startswith("int4 decode, fast over ik")]
    assert decode["found"] == ratio["ratio"]
    assert [line for line in peers.table(found) if line.split()[:2] == ["ik_llama.cpp", "Q4_0"]]


class Program:
    def __init__(self) -> None:
        self.fed: list[list[int]] = []

    def forget(self) -> None:
        self.fed.clear()

    def feed(self, ids: list[int]) -> float:
        self.fed.append(ids)
        return float(len(ids))


def test_given_tokens_follow_the_prompt_one_at_a_time_until_the_cap() -> None:
    program = Program()
    found = peer_worker.timed(program, [1, 2, 3], [4, 5])
    assert program.fed == [[1, 2, 3], [4], [5]] and (found["prompt_s"], found["token_s"]) == (3.0, [1.0, 1.0])
    assert peer_worker.timed(program, [1], [4, 5], cap_s=1e-9)["token_s"] == [1.0]
    assert peer_worker.timed(program, [1], [])["token_s"] == []


def test_a_program_that_ends_is_an_error_with_its_last_words() -> None:
    with pytest.raises(MoestroError, match="KeyError: 'nothing'"):
        Session(programs.WORKER, {"peer": "nothing"})


@pytest.mark.usefixtures("other_programs")
def test_one_that_runs_in_no_configuration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "CONFIGURATIONS", [(True, False)])
    said: list[str] = []
    with pytest.raises(MoestroError, match=r"Q4_0 runs in no configuration here.*--peers llama"):
        programs.Peer("ik", "Q4_0", tmp_path, Path(sys.executable), 1).fastest(said.append)
    assert "only with flash attention" in said[-1]


@pytest.mark.parametrize(("choice", "names"), [("all", ["ik", "llama"]), ("ik", ["ik"]), ("none", []), ("", [])])
def test_nothing_is_installed(choice: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # nobody can answer
    assert programs.agreed(choice, programs.interpreter(tmp_path)) == names


def test_what_is_installed_is_used_unless_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "installed", lambda python: True)
    assert programs.agreed("", Path("python")) == ["ik", "llama"] and programs.agreed("none", Path("python")) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"formats": "int5"}, "no format int5"), ({"lengths": "many"}, "many is not a whole"), ({"lengths": "0"}, "0 is")],
)
def test_an_unknown_choice_is_refused(options: dict[str, str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(MoestroError, match=reason):
        peers.SUITE.run(small=True, keep=tmp_path, **options)
