"""Ways in which a model directory can be wrong: (what, how it is made so, what the refusal says)."""

import shutil

import torch

from tests.hf import damage
from tests.hf.damage import INDEX, Change, config, entry, header, index, loop, pipe, reshaped, shards, text

DEEP = "[" * 5000 + "]" * 5000


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
