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
from tests.hf.damage import INDEX, Change, Tensors, config, entry, header, index, loop, pipe, reshaped, shards, text
from tests.tiny_tokenizer import save_tokenizer

DEEP = "[" * 5000 + "]" * 5000


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers in two shards, with a tokenizer."""
    return save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("sound"), num_hidden_layers=2))


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


FIRST = "model-00001-of-"
ELSEWHERE = "which is not a safetensors file in its folder"
DIRECTORIES: list[tuple[str, Change, str]] = [  # what is wrong before any weight is read
    ("no folder", shutil.rmtree, "no model at"),
    ("a file", lambda p: (shutil.rmtree(p), p.write_text("x")), "is a file"),
    ("no config", damage.removed("config.json"), "no config.json"),
    ("half a config", text("config.json", "{"), "config.json is damaged: line 1 is not JSON"),
    ("an empty config", text("config.json", "{}"), "names no model_type"),
    ("only pickles", damage.only_pickles, "never read here"),
    ("no weights", damage.removed("*.safetensors*"), "has no weights"),
    ("a shard cut short", damage.cut(1, -100), "00002-of-.*is damaged.*its header says"),
    ("a shard cut in its header", damage.cut(0, 40), "00001-of-.*header is cut short"),
    ("an empty shard", damage.cut(0, 0), "is damaged"),
    ("garbage", lambda p: shards(p)[0].write_bytes(b"\xff" * shards(p)[0].stat().st_size), "is damaged"),
    ("a missing shard", lambda p: shards(p)[1].unlink(), "1 of .* weight files are missing.*00002-of"),
    ("an index of a list", text(INDEX, "[]"), "index.json is damaged: it has no weight_map"),
    ("quantized", config(quantization_config={"quant_method": "gptq"}), "quantized .gptq.*launch.py import"),
    ("its own code", config(model_type="new", auto_map={"AutoConfig": "x.Y"}), "'new'.*auto_map.*never runs"),
    ("an unknown type", config(model_type="brandnew"), "does not know the model type 'brandnew'"),
    ("no text", config(model_type="vit"), "not a text-generating model"),
    ("a width as text", config(hidden_size="wide"), "cannot be used"),
    ("a negative head width", config(head_dim=-16), "head_dim is -16, not a whole"),
]
CONFIGS: list[tuple[str, Change, str]] = [
    ("nested config", text("config.json", '{"model_type": "qwen3_moe", "x": ' + DEEP + "}"), "nested deeper"),
    ("a key twice", text("config.json", '{"model_type": "a", "model_type": "b"}'), "has 'model_type' twice"),
    ("config of a list", text("config.json", "[]"), "names no model_type"),
    ("a type that is a number", config(model_type=3), "names no model_type"),
    ("a million layers", config(num_hidden_layers=10**6), "num_hidden_layers is 1000000, not a whole number from 1"),
    ("no layers", config(num_hidden_layers=0), "num_hidden_layers is 0"),
    ("negative layers", config(num_hidden_layers=-1), "num_hidden_layers is -1"),
    ("layers as text", config(num_hidden_layers="2"), "num_hidden_layers is '2'"),
    ("2 ** 40 experts", config(num_experts=1 << 40), "num_experts is 1099511627776"),
    ("no expert a token", config(num_experts_per_tok=0), "num_experts_per_tok is 0"),
    ("too many experts a token", config(num_experts_per_tok=9), "num_experts_per_tok is 9, but there are only 8"),
    ("no width", config(hidden_size=0), "hidden_size is 0"),
    ("no head width", config(head_dim=0), "other shapes|cannot be built"),
    ("no expert width", config(moe_intermediate_size=0), r"has the shape .* by config.json"),
    ("no heads", config(num_attention_heads=0), "num_attention_heads is 0"),
    ("no vocabulary", config(vocab_size=0), "vocab_size is 0"),
    ("a vocabulary of 2 ** 40", config(vocab_size=1 << 40), "vocab_size is 1099511627776"),
    ("no context", config(max_position_embeddings=0), "max_position_embeddings is 0"),
    ("a context of 1", config(max_position_embeddings=1), "max_position_embeddings is 1"),
    ("an epsilon of nan", config(rms_norm_eps=float("nan")), "rms_norm_eps is not a number"),
    ("a negative epsilon", config(rms_norm_eps=-1e-6), "rms_norm_eps is -1e-06, not a number from 0"),
    ("an endless epsilon", config(rms_norm_eps=float("inf")), "rms_norm_eps is inf"),
    ("a rope base of nan", config(rope_parameters={"rope_theta": float("nan")}), "rope_theta is not a number"),
    ("a negative rope base", config(rope_parameters={"rope_theta": -1e4}), "rope_theta is -10000.0"),
    ("an older rope base of 0", config(rope_theta=0), "rope_theta is 0, not a number above 0"),
    ("a rope factor of nan", config(rope_scaling={"type": "linear", "factor": float("nan")}), "factor is not a number"),
    ("a negative rope factor", config(rope_scaling={"type": "linear", "factor": -2.0}), "rope_scaling.factor is -2.0"),
    ("text config as text", config(text_config="x"), "text_config is 'x', not an object"),
    ("code as a number", config(auto_map=1), "auto_map is 1, not an object"),
    ("fewer layers than weights", config(num_hidden_layers=1, layer_types=None), "weights of layer 1 .* with layer 0"),
    ("more layers than weights", config(num_hidden_layers=3, layer_types=None), "lacks"),
    ("fewer experts than weights", config(num_local_experts=4), "other shapes than config.json says"),
    ("two numbers of experts", config(num_experts=4), "num_experts is 4, but its num_local_experts is 8"),
    ("other layers without experts", config(mlp_only_layers=[1]), "lacks"),
    ("number types in a list", config(dtype=[1, 2, 3]), r"dtype is \[1, 2, 3\], not a number type"),
    ("no number types in a list", config(dtype=[]), r"dtype is \[\], not a number type"),
    ("a number type of nobody's", config(dtype="23taolf", torch_dtype="23taolf"), "not a number type"),
    ("a type with a very long name", config(model_type="x" * 10**6), "does not know the model type 'xxx"),
    ("a flag that is a number", config(norm_topk_prob=-0.5), "Field 'norm_topk_prob' expected bool"),
    ("a width of 2 ** 63", config(intermediate_size=1 << 63), "intermediate_size is 9223372036854775808"),
    ("a token that is a truth", config(bos_token_id=True), r"match any type in \(int, null\)\. Download"),
    ("a padding token that there is not", config(pad_token_id=1 << 31), "cannot be built: Padding_idx"),
    ("groups beyond all bounds", config(n_group=2, topk_group=10**30), "topk_group is 1000"),
    ("config that is a loop", loop("config.json"), "config.json cannot be read"),
    ("config that is a pipe", pipe("config.json"), "config.json is not a file but a pipe"),
    ("a step of 0", config(decoder_sparse_step=0), "cannot be built"),
]
WEIGHTS: list[tuple[str, Change, str]] = [
    ("nested index", text(INDEX, DEEP), "index.json is damaged: .*nested deeper"),
    ("an index of numbers", text(INDEX, '{"weight_map": {"a": 3}}'), "has no weight_map"),
    ("an index with metadata of a number", text(INDEX, '{"metadata": 0, "weight_map": {"a": "b"}}'), "no weight_map"),
    ("an empty index", text(INDEX, '{"weight_map": {}}'), "has no weight_map"),
    ("a file above", index(lambda m: damage.renamed(m, "../model-00001-of-00003.safetensors")), ELSEWHERE),
    ("a file elsewhere", index(lambda m: damage.renamed(m, "/etc/passwd.safetensors")), ELSEWHERE),
    ("a file of Windows' elsewhere", index(lambda m: damage.renamed(m, "..\\x.safetensors")), ELSEWHERE),
    ("a pickle", index(lambda m: damage.renamed(m, "model.bin")), "'model.bin', which is not a safetensors file"),
    ("a tensor in another shard", index(lambda m: damage.renamed(m, sorted(set(m.values()))[1])), "but it is in"),
    ("a tensor in two shards", damage.both_shards, "is in .*model-00001-of-.* and in"),
    ("an index that is a loop", loop(INDEX), "index.json cannot be read"),
    ("a shard that is a pipe", lambda p: pipe(shards(p)[0].name)(p), "is not a file but a pipe"),
    ("nested header", header(lambda content, name: DEEP), "is damaged: .*nested deeper"),
    ("a tensor twice", header(damage.repeated), "is damaged: it has '.*' twice"),
    ("damage.overlapping tensors", header(damage.overlapping), f"{FIRST}.* is damaged"),
    ("a gap", header(lambda content, name: content.pop(name) and None), f"{FIRST}.* is damaged"),
    ("an unknown number type", entry(dtype="F17"), "is damaged"),
    ("another number type", entry(dtype="F16"), "is damaged: .* of shape .* has"),
    ("another shape", entry(shape=[3]), r"of shape \(3,\) has"),
    ("a negative shape", entry(shape=[-1, -64]), "does not say where"),
    ("a shape as text", entry(shape="64"), "does not say where"),
    ("a place backwards", entry(data_offsets=[64, 0]), "does not say where"),
    ("a place that is no pair", entry(data_offsets=[0]), "does not say where"),
    ("a place as text", entry(data_offsets=["0", "4"]), "does not say where"),
    ("a place of 2 ** 70", entry(data_offsets=[0, 1 << 70]), "does not say where"),
    ("an entry that is a list", header(lambda content, name: content.update({name: []})), "does not say where"),
    ("metadata that is a number", header(lambda content, name: content.update(__metadata__=3)), "is damaged"),
    ("a header of 2 ** 60", lambda p: damage.header_length(p, 1 << 60), "header is cut short"),
    ("no dense weight", damage.without("layers.1.self_attn.q_proj"), r"lacks 1 weights.*q_proj"),
    (
        "no expert",
        damage.without("layers.1.mlp.experts.3.up_proj"),
        r"lacks weights of .*layers\.1\.mlp\.experts\.gate_up",
    ),
    ("a larger vocabulary", config(vocab_size=300), "could not be loaded"),
    ("a router of another size", reshaped("mlp.gate.weight", lambda t: t[:4]), "other shapes than"),
    ("an expert of another size", reshaped("experts.3.up_proj", lambda t: t[:32]), "of different shapes"),
    ("experts of another size", reshaped(".up_proj", lambda t: t[:32]), "by config.json"),
    ("experts turned", reshaped(".down_proj", lambda t: t[:, :32]), r"has the shape \(64, 32\) in the checkpoint"),
    ("experts of one dimension", reshaped(".down_proj", torch.flatten), r"has the shape \(4096,\)|fit together"),
]
BESIDE: list[tuple[str, Change, str]] = [
    ("nested generation config", text("generation_config.json", DEEP), "generation_config.json is damaged"),
    ("a generation config of a list", text("generation_config.json", "[]"), "generation_config.json is damaged"),
    ("an end that is no token", text("generation_config.json", '{"eos_token_id": "end"}'), "eos_token_id is 'end'"),
    ("ends that are no tokens", text("generation_config.json", '{"eos_token_id": [1, {}]}'), "is no token"),
    ("a generation config that is a pipe", pipe("generation_config.json"), "is not a file but a pipe"),
    ("nested tokenizer config", text("tokenizer_config.json", DEEP), "tokenizer_config.json is damaged"),
    ("a length that is a text", text("tokenizer_config.json", '{"model_max_length": "x"}'), "max_length is 'x', not"),
    ("a tokenizer that is a loop", loop("tokenizer.json"), "tokenizer.json cannot be read"),
    ("a tokenizer that is a pipe", pipe("tokenizer.json"), "tokenizer.json is not a file but a pipe"),
]
TOKENIZERS: list[tuple[str, Change]] = [
    ("nested", text("tokenizer.json", DEEP)),
    ("a list", text("tokenizer.json", "[]")),
    ("no model", text("tokenizer.json", '{"version": "1.0"}')),
    ("empty", text("tokenizer.json", "")),
    ("no text", lambda p: (p / "tokenizer.json").write_bytes(b"\xff" * 100)),
    ("ids as text", lambda p: damage.vocabulary_entry(p, "x")),
    ("negative ids", lambda p: damage.vocabulary_entry(p, -1)),
    ("a class that is a number", text("tokenizer_config.json", '{"tokenizer_class": 3}')),
    ("added tokens as a list", text("tokenizer_config.json", '{"added_tokens_decoder": [1]}')),
]


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
def test_weights_that_are_not_what_they_seem_are_refused(
    model: Path, change: Callable[[Tensors], Tensors], words: str
) -> None:
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
