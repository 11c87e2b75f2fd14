"""HQQ's and torchao's states: damaged ones, zero points that do not fit, bytes stored as floats, groups of outputs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from core.errors import ModelError
from core.hf.checkpoint import CheckpointReader
from core.hf.safetensors_file import TensorFiles
from core.hf.skeleton import meta_skeleton
from core.importing import forecast_import
from core.importing.sources import open_source, torchao
from core.importing.sources.hqq import HqqMatrix
from core.importing.sources.integers import Integers
from tests import quantized_states as states
from tests.checkpoints import make_checkpoint
from tests.hf import damage
from tests.quantized import FEW, LARGE, Tensors
from tests.sources.case import Case, hqq
from tests.sources.case import torchao as torchao_case

HQQ = hqq("4bit", "mixtral", "int4-g64", 4, 64, fields={"num_hidden_layers": 1})
TORCHAO = torchao_case("int4", "mixtral", "int4-g64", "", lambda: states.int4(64))
INT8 = torchao_case("int8", "mixtral", "int8", "", lambda: states.integers(8))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """A checkpoint that opens, written once for each case; copy it."""
    made: dict[str, Path] = {}

    def get(case: Case) -> Path:
        if case.name not in made:
            made[case.name] = case.write(tmp_path_factory.mktemp("whole")).path
            open_source(made[case.name]).close()
        return made[case.name]

    return get


def put(end: str, tensor: torch.Tensor) -> damage.Change:
    """The tensors whose names end so, replaced."""
    return damage.tensors(lambda t: {n: tensor.clone() if n.endswith(end) else v for n, v in t.items()})


def shorter(end: str, dim: int = 0) -> damage.Change:
    return damage.tensors(lambda t: {n: v.narrow(dim, 0, 1).clone() if n.endswith(end) else v for n, v in t.items()})


def of_type(end: str, dtype: torch.dtype) -> damage.Change:
    return damage.tensors(lambda t: {n: v.to(dtype) if n.endswith(end) else v for n, v in t.items()})


def number(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32)


def described(**change: Any) -> damage.Change:
    """Each weight's class or attributes changed in the headers."""

    def changed(said: dict[str, str]) -> dict[str, str]:
        return {
            name: json.dumps(json.loads(text) | change) if '"Int' in text and name != "tensor_names" else text
            for name, text in said.items()
        }

    return damage.headers(changed)


DAMAGED: list[tuple[Case, damage.Change, str]] = [
    (HQQ, damage.without(".scale"), "lacks 'scale'.*download it again"),
    (HQQ, damage.without(".packing"), "lacks 'packing'"),
    (HQQ, put(".group_size", number(0)), "groups of 0 do not fit"),
    (HQQ, put(".group_size", number(-64)), "groups of -64 do not fit"),
    (HQQ, put(".group_size", number(2**31 - 1)), "groups of 2147483647 do not fit"),
    (HQQ, put(".group_size", number(32)), "do not fit a weight"),
    (HQQ, put(".group_size", torch.zeros(1000)), "its group_size is no setting"),
    (HQQ, put(".axis", number(2)), r"along \[2\]"),
    (HQQ, put(".axis", number(0)), "do not fit a weight"),
    (HQQ, put(".shape", torch.tensor([3, 5])), "do not fit a weight"),
    (HQQ, put(".shape", torch.tensor([1 << 40, 1 << 40])), "do not fit a weight"),
    (HQQ, put(".shape", torch.tensor([0, 256])), "do not fit a weight"),
    (HQQ, put(".packing", torch.tensor([*b"5bit_u8"], dtype=torch.uint8)), "packed as '5bit_u8'"),
    (HQQ, put(".packing", torch.tensor([*b"8bit_u8"], dtype=torch.uint8)), "do not fit a weight"),
    (HQQ, shorter(".W_q"), "do not fit a weight"),
    (HQQ, shorter(".zero"), "do not fit a weight"),
    (HQQ, of_type(".scale", torch.int32), "do not fit a weight"),
    (TORCHAO, damage.without("_zero_point"), "lacks '_weight_zero_point'"),
    (TORCHAO, damage.without("_qdata"), "lacks '_weight_qdata'"),
    (TORCHAO, shorter("_scale"), "do not fit packed codes"),
    (TORCHAO, shorter("_qdata", 1), "do not fit packed codes"),
    (TORCHAO, put("_qdata", torch.zeros(0, 5, dtype=torch.int8)), r"codes have the shape \(0, 5\)"),
    (TORCHAO, damage.headers(lambda said: {"format": "pt"}), "do not say what .* is: a tool"),
    (TORCHAO, damage.headers(lambda said: {n: t[:-1] for n, t in said.items()}), "do not say what .* is: a tool"),
    (TORCHAO, of_type("_zero_point", torch.int8), "do not fit packed codes"),
    (TORCHAO, of_type("_qdata", torch.int32), "do not fit packed codes"),
    (TORCHAO, described(_data={"block_size": [1, 32]}), "do not fit packed codes"),
    (TORCHAO, described(_type="Int4TilePackedTo4dTensor"), "torchao's Int4TilePackedTo4dTensor: .*tinygemm.*original"),
    (TORCHAO, described(_type="NewTensor"), "NewTensor: of its classes Int4Tensor, .*Float8Tensor are read.*GGUF"),
    (TORCHAO, described(_type="Int8Tensor", _data=None), "do not fit codes"),
    (INT8, damage.without("_scale"), "lacks '_weight_scale'"),
    (INT8, shorter("_qdata", 0), "do not fit codes"),
    (INT8, shorter("_zero_point"), r"zeros \(1, 1\) do not fit codes"),
    (INT8, put("_scale", torch.zeros(128, 7)), "do not fit codes"),
    (
        INT8,
        described(_type="IntxUnpackedToInt8Tensor", _data={"target_dtype": {"_data": "int9"}}),
        "codes .* of 9 bits",
    ),
]


@pytest.mark.parametrize(("case", "spoil", "words"), DAMAGED, ids=[f"{one[0].kind}-{one[2]}" for one in DAMAGED])
def test_damaged_states_are_refused(
    case: Case, spoil: damage.Change, words: str, whole: Callable[[Case], Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(whole(case), tmp_path / "model"))
    spoil(path)
    with pytest.raises(ModelError, match=words):
        open_source(path)


def test_pickles_stay_refused(whole: Callable[[Case], Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(whole(TORCHAO), tmp_path / "model"))
    damage.only_pickles(path)
    with pytest.raises(ModelError, match=r"only as Python pickles.*never read here"):
        open_source(path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_zeros_of_any_size_keep_their_codes(dtype: torch.dtype) -> None:
    """(8 - zero) * scale is exact in fp32 for 16-bit numbers from 1 on; others are rounded once more."""
    random = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (64, 128), dtype=torch.uint8, generator=random)
    scale = (torch.rand(64, 2, generator=random) / 64).to(dtype)
    for low, high in ((1, 15), (-3, 1), (0, 2**-12)):
        zero = (torch.rand(64, 2, generator=random) * (high - low) + low).to(dtype)
        integers = Integers(4, codes, scale, zero, None)
        wide, steps = (codes.double().view(64, 2, 64) - zero.double()[..., None]), scale.double()[..., None]
        coded = integers.coded(False, False)
        assert coded is not None and coded.format == "int4-g64" and torch.equal(coded.codes, codes)
        exact = (wide * steps).view(64, 128)
        if low == 1 and dtype != torch.float32:
            assert torch.equal(coded.dequantized(), exact.float())
            assert torch.equal(integers.dequantize(), exact.float())
        off = (coded.dequantized().double() - exact).abs().view(64, 2, 64) / steps
        assert float(off.max()) <= 3 * 16 * 2.0**-24  # three roundings of what is below 16 steps


@pytest.mark.parametrize(
    ("bits", "dtype"), [(4, torch.float16), (3, torch.float32), (2, torch.bfloat16), (1, torch.float16)]
)
def test_codes_stored_as_floats_of_the_same_bytes(bits: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """HQQ's `view_as_float`."""
    state, meant = states.hqq(bits, 64)(torch.randn(96, 256, generator=torch.Generator().manual_seed(1)).half())
    state = {**state, "W_q": state["W_q"].view(dtype), "view_as_float": torch.tensor(1, dtype=torch.uint8)}
    [matrix] = opened(state, tmp_path, HqqMatrix)
    assert torch.equal(matrix.read(None), meant)


@pytest.mark.parametrize(("shape", "group"), [((96, 80), 64), ((30, 64), 96)])
def test_groups_that_span_rows_are_left_to_weights(shape: tuple[int, int], group: int, tmp_path: Path) -> None:
    state, meant = states.hqq(4, group)(torch.randn(shape, generator=torch.Generator().manual_seed(1)).half())
    [matrix] = opened(state, tmp_path, HqqMatrix)
    assert torch.equal(matrix.read(None), meant) and matrix.coded(None) is None


def opened(state: Tensors, folder: Path, make: Callable[[TensorFiles, str], HqqMatrix]) -> list[HqqMatrix]:
    save_file({f"m.{name}": tensor for name, tensor in state.items()}, folder / "one.safetensors")
    return [make(TensorFiles((folder / "one.safetensors",)), "m")]


def test_a_bias_and_factors_of_inputs(tmp_path: Path) -> None:
    """What transformers' defaults and torchao's AWQ store besides: both are dequantised."""
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    state, meant = states.integers(8)(weight)
    factors = torch.linspace(0.5, 2, 64).bfloat16()
    tensors = {f"a.{name}": tensor for name, tensor in (state | states.flattened(act_pre_scale=factors)).items()}
    tensors |= {f"a.{n.replace('weight', 'bias')}": t[0].clone() for n, t in state.items()}
    save_file(tensors, tmp_path / "one.safetensors", states.described(tensors, 8))
    files = TensorFiles((tmp_path / "one.safetensors",))
    found, taken, _ = torchao.matrices(files, torch.bfloat16)
    assert set(tensors) <= set(taken)
    assert torch.equal(found["a.weight"].read(None), meant * factors.float())
    assert torch.equal(found["a.bias"].read(None), meant[0]) and found["a.bias"].shape == (64,)
    assert found["a.weight"].coded(None) is None and found["a.bias"].coded(None) is None
    files.close()


def test_groups_of_outputs_are_left_to_weights(tmp_path: Path) -> None:
    """gpt_oss stores its experts [in, out], which torchao groups along the output; a square one hides it."""
    square = {**LARGE, **FEW["gpt_oss"], "intermediate_size": 256}
    plain = make_checkpoint("gpt_oss", tmp_path / "plain", dtype=torch.bfloat16, max_shard_size="1GB", **square)
    file = plain / "model.safetensors"
    stored = damage.load_file(file)
    tensors, meant = dict(stored), {}
    for name in [n for n in stored if n.endswith(("gate_up_proj", "down_proj"))]:
        packed = [states.int4(64)(expert) for expert in tensors.pop(name)]
        meant[name] = torch.stack([one.weight for one in packed])
        module, _, last = name.rpartition(".")
        for part in packed[0].tensors:
            parts = torch.stack([one.tensors[part] for one in packed])
            tensors[f"{module}.{part.replace('weight', last)}"] = parts
    save_file(tensors, file, states.described(tensors, 8))
    damage.config(quantization_config={"quant_method": "torchao"})(plain)
    shell = tmp_path / "shell"
    shell.mkdir()
    with open_source(plain) as source:
        reader = CheckpointReader(meta_skeleton(source.write_shell(shell)), source.tensors)
        for part, found in reader.read_coded(1, 2).items():
            if part in ("gate_up_proj", "down_proj"):
                assert isinstance(found, torch.Tensor)
                assert torch.equal(found, meant[f"model.layers.1.mlp.experts.{part}"][2])
    found = forecast_import(str(plain))
    assert found is not None and all(one.how == "requantised" and one.error > 0.01 for one in found.conversions)


@pytest.mark.parametrize(
    ("case", "how", "most"),
    [
        (HQQ, "exact codes", 0.0),
        (hqq("8bit", "mixtral", None, 8, 128, fields={"num_hidden_layers": 1}), "requantised", 0.01),
        (hqq("axis0", "mixtral", None, 4, 64, axis=0, fields={"num_hidden_layers": 1}), "requantised", 0.2),
    ],
    ids=["as it is", "zeros of bytes", "groups across rows"],
)
def test_what_is_lost_is_said_before_the_import(
    case: Case, how: str, most: float, whole: Callable[[Case], Path], tmp_path: Path
) -> None:
    found = forecast_import(str(whole(case)))
    assert found is not None
    [one] = found.conversions
    assert (one.stored, one.how) == (case.label, how)
    assert one.error == 0 if most == 0 else 0 < one.error < most
