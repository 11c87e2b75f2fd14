"""Every way a model directory can be wrong, its files damaged or at odds: refused by name, nothing changed or kept."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from core.capacity.plan import plan
from core.engine.loading import load_tokenizer
from core.errors import ModelError
from core.hf.bounds import wrong
from core.hf.checkpoint import CheckpointReader
from core.hf.files import check_model
from core.hf.skeleton import load_skeleton, meta_skeleton
from core.settings.loading import LoadSpec
from tests.checkpoints import make_checkpoint
from tests.hf import damage
from tests.hf.damage import Change, Tensors, config, shards
from tests.hf.damaged import BESIDE, CONFIGS, DIRECTORIES, TOKENIZERS, WEIGHTS
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("sound"), num_hidden_layers=2))


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def state(path: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "special"
        for file in path.iterdir()
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [case[1:] for case in CONFIGS + WEIGHTS + BESIDE],
    ids=[case[0] for case in CONFIGS + WEIGHTS + BESIDE],
)
def test_damaged_checkpoints_are_refused(model: Path, change: Change, words: str) -> None:
    change(model)
    before = state(model)
    with pytest.raises(ModelError, match=f"(?s){words}") as caught:
        CheckpointReader(load_skeleton(model), model).close()
    assert str(caught.value).endswith(".") and len(str(caught.value)) < 2000
    assert state(model) == before


@pytest.mark.parametrize(("change", "words"), [case[1:] for case in DIRECTORIES], ids=[case[0] for case in DIRECTORIES])
def test_it_is_refused_before_any_weight_is_read(model: Path, change: Change, words: str) -> None:
    change(model)
    for look in (load_skeleton, meta_skeleton):
        with pytest.raises(ModelError, match=words):
            look(model)


@pytest.mark.parametrize("change", [case[1] for case in TOKENIZERS], ids=[case[0] for case in TOKENIZERS])
def test_damaged_tokenizers_are_refused(model: Path, change: Change) -> None:
    change(model)
    before = state(model)
    with pytest.raises(ModelError, match=r"(?s)model has no usable tokenizer: .*Put the model's tokenizer files"):
        load_tokenizer(model)
    assert state(model) == before


def test_a_sound_checkpoint_is_sound(model: Path) -> None:
    with CheckpointReader(load_skeleton(model), model) as reader:
        assert reader.read(1, 7)["down_proj"].shape == (64, 64)
    assert load_tokenizer(model)("a").input_ids


def test_layers_that_predict_further_tokens_may_be_left_over(model: Path) -> None:
    """As DeepSeek's and GLM's checkpoints have them, behind the last layer."""
    file = shards(model)[0]
    tensors = load_file(file)
    whole = {n: t for shard in shards(model) for n, t in load_file(shard).items()}
    extra = {n.replace("layers.1.", "layers.2."): t for n, t in whole.items() if "layers.1." in n}
    save_file(tensors | extra, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="weights of layer 2"):
        CheckpointReader(load_skeleton(model), model)
    save_file(tensors | extra | {"model.layers.2.eh_proj.weight": torch.zeros(64, 128)}, file, {"format": "pt"})
    CheckpointReader(load_skeleton(model), model).close()


@pytest.mark.parametrize(
    "config",
    [
        {"time_step_limit": [0.0, float("inf")], "model_type": "x"},
        {"sliding_window": None, "num_experts": None},
        {"rope_scaling": None, "rope_theta": 5e6},
        {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0}},
        {"vision_config": {"num_experts": 0, "hidden_size": 0}, "text_config": {"num_hidden_layers": 94}},
        {"moe_num_experts": [64, 64], "moe_intermediate_size": [1536, 512], "moe_k": 6},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        {"layer_rope_theta": [0, 1e4, 0.0, 1e4], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"n_group": 1, "topk_group": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "norm_eps": 0},
    ],
)
def test_what_real_configs_say_is_allowed(config: dict[str, Any]) -> None:
    assert wrong(config) == ""


def test_a_quantized_text_model_is_still_named(model: Path) -> None:
    config(text_config={"quantization_config": {"quant_method": "fp8"}})(model)
    with pytest.raises(ModelError, match=r"quantized \(fp8\)"):
        check_model(model)


def test_remote_code_beside_a_known_architecture_is_ignored(model: Path) -> None:
    config(auto_map={"AutoModelForCausalLM": "evil.Model"})(model)
    (model / "evil.py").write_text("raise SystemExit('ran')")
    assert type(load_skeleton(model)).__name__ == "Qwen3MoeForCausalLM"


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    llama = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(llama).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="'llama' is not a Mixture-of-Experts model"):
        load_skeleton(tmp_path)


E4M3 = torch.float8_e4m3fn
GATE = "model.layers.1.mlp.experts.3.gate_proj"


def _eight_bits(tensors: Tensors) -> Tensors:
    """As ModelOpt stores a checkpoint: 8-bit floats, and a scale of each matrix."""
    coded = {n: t.to(E4M3) if n.endswith("_proj.weight") else t for n, t in tensors.items()}
    return coded | {f"{n}_scale": torch.tensor(2.0) for n in coded if n.endswith("_proj.weight")}


def _codes_beside(ending: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {f"{GATE}{ending}": torch.ones(1) for n in tensors if n == f"{GATE}.weight"}


def _renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n.replace(old, new): t for n, t in tensors.items()}


CODED: list[tuple[Callable[[Tensors], Tensors], str]] = [
    (_eight_bits, r"_proj\.weight' as float8_e4m3fn, codes for which its settings name no quantization"),
    (lambda t: {n: v.view(torch.int32) if GATE in n else v for n, v in t.items()}, "gate_proj.weight' as int32, codes"),
    (
        lambda t: {n: v.view(torch.int32) if n == "model.norm.weight" else v for n, v in t.items()},
        "model.norm.weight' as int32, codes",
    ),
    *(
        (_codes_beside(ending), f"holds '{GATE}{ending}', so '{GATE}.weight' is stored as codes".replace(".", r"\."))
        for ending in (".weight_scale", ".weight_scale_inv", ".weight.absmax", ".scales", ".biases", ".qzeros")
    ),
    (_renamed("experts.0.", "experts.-1."), "not numbered one by one from 0 on"),
    (_renamed("experts.7.", "experts.8."), "not numbered one by one from 0 on"),
]


@pytest.mark.parametrize(("change", "words"), CODED, ids=[words for _, words in CODED])
def test_weights_that_are_wrong_are_refused(model: Path, change: Callable[[Tensors], Tensors], words: str) -> None:
    damage.tensors(change)(model)
    damage.joined(model)
    with pytest.raises(ModelError, match=words):
        CheckpointReader(meta_skeleton(model), str(model))


def test_scales_of_the_kv_cache_and_of_inputs_change_no_weight(model: Path) -> None:
    own = ("model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.k_proj.input_scale")
    damage.tensors(lambda t: t | {name: torch.ones(1) for name in own if "model.norm.weight" in t})(model)
    damage.joined(model)
    with CheckpointReader(meta_skeleton(model), str(model)) as reader:
        assert not {*reader.dense_names()} & {*own}


def test_a_quantization_beside_config_json_is_named(model: Path) -> None:
    stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    (model / "hf_quant_config.json").write_text(json.dumps(stated))
    with pytest.raises(ModelError, match=r"is quantized \(modelopt FP8\)"):
        check_model(model)
    with pytest.raises(ModelError, match="says modelopt, but no weight is stored that way"):
        plan(LoadSpec.checked(str(model)))
    stated["quantization"] = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (model / "hf_quant_config.json").write_text(json.dumps(stated))
    plan(LoadSpec.checked(str(model)))


def test_closing_releases_the_files(model: Path) -> None:
    reader = CheckpointReader(meta_skeleton(model), str(model))
    reader.close()
    reader.close()
    with pytest.raises(ValueError, match="closed file"):
        reader.read(0, 0)
    shutil.rmtree(model)
