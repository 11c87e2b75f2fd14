"""Models that benches write."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bench.gpu_model import Card, Model, expected, table
from bench.models.generate import checkpoint
from bench.models.gguf_file import write_bf16
from bench.models.sizes import SMALL

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


def test_what_does_not_fit_has_no_speed() -> None:
    assert expected(CARD._replace(memory=3.05), MODEL) is None  # 25 slots; a token takes 40
    assert expected(CARD._replace(memory=3.081), MODEL) is not None


def test_the_page_has_it() -> None:
    assert table() in (DOCS / "gpu.md").read_text("utf-8")
