"""What cannot be imported is refused by name, in words that say what to do, with no file left open."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.capacity.plan import plan
from core.errors import ModelError
from core.hf.checkpoint import CheckpointReader
from core.hf.files import check_model
from core.hf.skeleton import meta_skeleton
from core.importing.sources import open_source
from core.settings.loading import LoadSpec
from tests import quantized, quantized_layouts
from tests.conftest import Checkpoint
from tests.gguf_writer.write import make_gguf
from tests.hf import damage
from tests.selection import layered

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPTQ checkpoint; copy it to spoil it."""
    return quantized.write(
        "qwen3_moe", tmp_path_factory.mktemp("gptq"), quantized.gptq(group=64), GPTQ, num_hidden_layers=1
    ).path


@pytest.fixture
def model(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "model"))


def settings(path: Path, **changes: Any) -> None:
    """Change the quantization_config."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"quantization_config": config["quantization_config"] | changes}))


def _wrong_shape(path: Path) -> None:
    file = damage.shards(path)[0]
    raw = file.read_bytes()
    assert b'"shape":[256,256]' in raw
    file.write_bytes(raw.replace(b'"shape":[256,256]', b'"shape":[256,255]'))


def _no_settings(path: Path) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "quantization_config"}))


def _other_mlx(path: Path) -> None:
    settings(path, quant_method="mlx", bits=4)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "qwen3_next"}))


def _bad_file_beside(path: Path) -> None:
    _no_settings(path)
    (path / "quantize_config.json").write_text("[")


def _misfit(path: Path) -> None:
    damage.tensors(lambda t: {n: v[:1].clone() if n.endswith("scales") else v for n, v in t.items()})(path)


def _bare_fp8(path: Path) -> None:
    damage.reshaped("norm.weight", lambda tensor: tensor.to(torch.float8_e4m3fn))(path)
    settings(path, quant_method="fp8")


CASES: list[tuple[Callable[[Path], None], str]] = [
    (shutil.rmtree, "no model at"),
    (damage.only_pickles, "never read here"),
    (damage.cut(0, -100), "00001.safetensors is damaged.*its header says"),
    (_wrong_shape, r"00001.safetensors is damaged: .*shape \(256, 255\) has 131,072 bytes"),
    (_no_settings, r"stores codes .*no quantization_config.*Download config.json"),
    (_bad_file_beside, "quantize_config.json is damaged"),
    (lambda p: settings(p, bits=3), "GPTQ checkpoint of 3 bits.*4 and with 8"),
    (lambda p: settings(p, checkpoint_format="marlin"), "'marlin' format"),
    (damage.without("qzeros"), "down_proj.*lacks 'qzeros'.*download it again"),
    (damage.without("scales"), "lacks 'scales'"),
    (damage.without("qweight"), "says gptq, but no weight is stored that way"),
    (_misfit, r"do not fit qweight"),
    (lambda p: settings(p, quant_method="awq"), "do not fit qweight"),
    (lambda p: settings(p, quant_method="awq", version="gemv_fast"), "'gemv_fast' layout.*gemm"),
    (lambda p: settings(p, quant_method="fbgemm_fp8"), "quantized with fbgemm-fp8, which is not read.*original one"),
    (lambda p: settings(p, quant_method="hqq"), "says hqq, but no weight is stored that way"),
    (lambda p: settings(p, quant_method="torchao"), "says torchao, but no weight is stored that way"),
    (lambda p: settings(p, quant_method="exl3"), "with exl3: .*trellis.*GGUF"),
    (lambda p: settings(p, quant_method="mlx", bits=None), "lacks 'weight'"),
    (_other_mlx, "an MLX checkpoint of the type 'qwen3_next'.*undone only for .*qwen3_moe"),
    (lambda p: settings(p, quant_method=""), "an unnamed method"),
    (lambda p: settings(p, quant_method="auto-round", packing_format="auto_round:new"), "auto-round"),
    (lambda p: settings(p, quant_method="compressed-tensors", format="mxfp6-pack-quantized"), "'mxfp6-pack-quantized'"),
    (
        lambda p: settings(p, quant_method="compressed-tensors", sparsity_config={"format": "sparse-24-bitmask"}),
        "'sparse-24-bitmask'",
    ),
    (
        lambda p: settings(p, quant_method="compressed-tensors", transform_config={"config_groups": {"R1": {}}}),
        "'transformed'",
    ),
    (lambda p: settings(p, quant_method="bitsandbytes", load_in_8bit=True), "8-bit checkpoint.*format int8"),
    (_bare_fp8, "norm.weight' has no scale"),
]


@pytest.mark.parametrize(("spoil", "words"), CASES, ids=[w for _, w in CASES])
def test_refused(model: Path, spoil: Callable[[Path], None], words: str) -> None:
    spoil(model)
    with pytest.raises(ModelError, match=words):
        open_source(model)
    shutil.rmtree(model, ignore_errors=True)


def test_settings_beside_config_json_are_found(model: Path) -> None:
    _no_settings(model)
    (model / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 64, "sym": True}))
    with open_source(model) as source:
        assert (source.kind, source.exact_format) == ("gptq", "int4-g64-sym")


def test_settings_of_a_text_model_are_found_and_dropped(model: Path, tmp_path: Path) -> None:
    file = model / "config.json"
    config = json.loads(file.read_text())
    text = {"quantization_config": config.pop("quantization_config"), "dtype": "bfloat16"}
    file.write_text(json.dumps(config | {"text_config": text, "dtype": None}))
    with pytest.raises(ModelError, match=r"quantized \(gptq\)"):
        check_model(model)
    with open_source(model) as source:
        assert (source.kind, source.dense_dtype) == ("gptq", torch.bfloat16)
        assert source.config["text_config"] == {"dtype": "bfloat16"}


def test_remote_code_is_refused_by_the_model_type(model: Path) -> None:
    file = model / "config.json"
    changed = {"model_type": "brandnew", "auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    (model / "evil.py").write_text("raise SystemExit('ran')")
    shell = model / "shell"
    shell.mkdir()
    with open_source(model) as source, pytest.raises(ModelError, match=r"auto_map.*never runs"):
        meta_skeleton(source.write_shell(shell))
    assert not (shell / "evil.py").exists()


def test_running_a_quantized_directory_says_to_import_it(model: Path) -> None:
    with pytest.raises(ModelError, match=r"quantized \(gptq\), so it is imported once.*: python launch.py import "):
        check_model(model)


LOADED: list[tuple[Callable[[Path], None], str]] = [
    (lambda p: None, "imported once before it is used: python launch.py import"),
    (lambda p: settings(p, bits=3), "GPTQ checkpoint of 3 bits.*4 and with 8"),
    (lambda p: settings(p, quant_method="exl2"), "quantized with exl2: .*original model"),
    (damage.without("qzeros"), "down_proj.*lacks 'qzeros'.*download it again"),
    (lambda p: _mlx(p, {"quantization": {"bits": 4, "group_size": 64}}), "lacks 'weight'"),
    (lambda p: _mlx(p, {"quantization": {"bits": 4, "group_size": "many"}}), "does not know: groups of 'many'"),
    (
        lambda p: _mlx(
            p,
            {"model_type": "mixtral"}
            | {key: {"bits": 8, "group_size": 64} for key in ("quantization", "quantization_config")},
        ),
        "an MLX checkpoint of the type 'mixtral'.*Use the original model.*or a GGUF",
    ),
]


def _mlx(path: Path, config: dict[str, Any]) -> None:
    _no_settings(path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


@pytest.mark.parametrize(("change", "words"), LOADED, ids=[words for _, words in LOADED])
def test_loading_names_an_import_only_where_one_would_begin(
    model: Path, change: Callable[[Path], None], words: str
) -> None:
    change(model)
    with pytest.raises(ModelError, match=words) as refused:
        plan(LoadSpec.checked(str(model)))
    assert ("launch.py import" in str(refused.value)) is ("launch.py import" in words)


def test_loading_a_gguf_file_names_an_import_only_where_one_would_begin(tmp_path: Path) -> None:
    _, file = make_gguf("mixtral", tmp_path)
    spec = LoadSpec.checked(str(file))
    with pytest.raises(ModelError, match=r"A GGUF file is imported: python launch.py import .*\.gguf\."):
        plan(spec)
    with pytest.raises(ModelError, match="GGUF files are imported"):
        plan(LoadSpec.checked(str(file.parent)))
    file.write_bytes(file.read_bytes().replace(b"llama", b"flama"))
    with pytest.raises(ModelError, match="flama") as refused:
        plan(spec)
    assert "launch.py import" not in str(refused.value)


def test_a_missing_expert_is_found_before_anything_is_imported(model: Path, tmp_path: Path) -> None:
    damage.without("experts.3.up_proj")(model)
    (tmp_path / "shell").mkdir()
    with open_source(model) as source, pytest.raises(ModelError, match=r"lacks weights of .*gate_up_proj"):
        CheckpointReader(meta_skeleton(source.write_shell(tmp_path / "shell")), source.tensors)


def test_gguf_is_pointed_at_import(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(ModelError, match=r"GGUF.*launch.py import"):
            check_model(path)


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 64}}},
}
DAMAGED: list[tuple[Callable[[], quantized.Writer], dict[str, Any], Callable[[Path], None], str]] = [
    (quantized.bnb, {"quant_method": "bitsandbytes"}, damage.without(".quant_map"), "w1.weight' lacks 'quant_m"),
    (quantized.bnb, {"quant_method": "bitsandbytes"}, damage.without("__nf4"), "lacks its quant_state"),
    (
        quantized.bnb,
        {"quant_method": "bitsandbytes"},
        damage.tensors(lambda t: {n: v[:-1].clone() if n.endswith("__nf4") else v for n, v in t.items()}),
        "quant_state cannot be read",
    ),
    (
        lambda: quantized_layouts.packed_by_compressed_tensors(4, 64, True),
        COMPRESSED,
        damage.without("weight_scale"),
        "lacks 'weight_scale'",
    ),
    (
        lambda: quantized_layouts.packed_by_compressed_tensors(4, 64, True),
        COMPRESSED,
        lambda p: settings(p, config_groups={"group_0": {"weights": {"num_bits": 3, "type": "int"}}}),
        "3 bits is not read, only of 4 and of 8",
    ),
    (
        quantized.fp8,
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        damage.tensors(lambda t: {n: torch.ones(3, 5) if n.endswith("_scale_inv") else v for n, v in t.items()}),
        "3 scales do not fit",
    ),
    (quantized.fp8, {"quant_method": "fp8"}, damage.without("_scale_inv"), "w1.weight' has no scale"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[], quantized.Writer], dict[str, Any]], Path]:
    """A checkpoint of one layer that opens, written once for each configuration; copy it."""
    made: dict[str, Path] = {}

    def get(writer: Callable[[], quantized.Writer], config: dict[str, Any]) -> Path:
        if (kind := json.dumps(config)) not in made:
            folder = tmp_path_factory.mktemp("whole")
            made[kind] = quantized.write("mixtral", folder, writer(), config, num_hidden_layers=1).path
            open_source(made[kind]).close()
        return made[kind]

    return get


@pytest.mark.parametrize(
    ("writer", "config", "spoil", "words"),
    layered(DAMAGED, quick=lambda case: DAMAGED.index(case) % 3 == 0),
    ids=[case[-1] for case in DAMAGED],
)
def test_weights_whose_parts_do_not_fit_are_refused(
    writer: Callable[[], quantized.Writer],
    config: dict[str, Any],
    spoil: Callable[[Path], None],
    words: str,
    whole: Callable[[Callable[[], quantized.Writer], dict[str, Any]], Path],
    tmp_path: Path,
) -> None:
    path = tmp_path / "model"
    shutil.copytree(whole(writer, config), path)
    spoil(path)
    with pytest.raises(ModelError, match=words):
        open_source(path)
