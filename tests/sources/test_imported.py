"""The whole way: a checkpoint in each source format is imported, the pack loaded, and the logits are those of the
dequantised weights in plain transformers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import DynamicCache

from core.engine import Engine
from core.hf.checkpoint import CheckpointReader
from core.hf.skeleton import meta_skeleton
from core.importing import import_model
from core.importing.sources import open_source
from core.memory.pack import Manifest
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.system.native.compile import supported
from tests.architectures.trial import transformers_own
from tests.checkpoints import ARCHITECTURES, EXTRA, make_checkpoint
from tests.equality.fast import distance, logits
from tests.equality.passes import PROMPT, run
from tests.gguf_writer.write import experts_in, make_gguf
from tests.loaded import unloading
from tests.selection import layered
from tests.sources.case import Case
from tests.sources.cases import CASES
from tests.tiny_tokenizer import save_tokenizer

STEPS = 6
PLAIN = (*ARCHITECTURES, *EXTRA, "ernie4_5_moe", "dots1", "lfm2_moe", "qwen3_next")
WIDE = dict(hidden_size=256, moe_intermediate_size=256, intermediate_size=256, num_hidden_layers=2)
GGUF = {  # type -> our format, whether every weight is the same bit for bit, and the most that logits may differ
    "BF16": ("checkpoint", True, 0.0),
    "Q8_0": ("int8-g32", True, 0.0),
    "Q4_0": ("int4-g32-sym", True, 0.0),
    "MXFP4": ("mxfp4", True, 0.0),
    "NVFP4": ("nvfp4", True, 0.0),
    "IQ4_NL": ("iq4_nl", True, 0.0),
    **{
        kind: (kind.lower(), True, 0.0) for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ2_S", "TQ2_0")
    },
    "Q4_1": ("int4-g32", False, 2e-3),  # scales and zeros rounded to fp16: weights within 2^-11 of (8 scale + zero)
    "Q5_1": ("int8-g32", False, 6e-2),
}  # rounded anew: weights within half a step, 1/254 of a group's largest
MORE_GGUF = (  # whose weights the converter changes in ways of their own
    "qwen3_5_moe_text",
    "qwen3_next",
    "gemma4_26b",
    "gemma4_text",
    "llama4_text",
    "hunyuan_v1_moe",
    "sarvam_moe",
    "exaone_moe",
    "phimoe_long",
    "afmoe",
    "dbrx",
)
ROUNDED = ("llama4_text", "dbrx")  # models that the engine computes in products of another size than transformers
# what else differs among the cases, test_matrix.py compares weight by weight, and gpt_oss is below as it comes
QUICK = {("qwen3_moe", "gptq-act-order")}


def ours(pack: Path, dtype: str = "float32") -> torch.Tensor:
    """Logits of a prompt and some decoded tokens, with half of the experts in memory and half on disk."""
    if not (pack / "tokenizer.json").exists():
        save_tokenizer(pack)
    engine = Engine.load(LoadSpec.checked(str(pack), Settings({"budget": "50%"}), dtype=dtype, context=64, threads=1))

    def before(step: int) -> None:
        engine.expert_cache.core.now += 1

    logits, _ = run(engine.model, engine.fresh_cache(), before, STEPS)
    assert engine.parts.recorder.enabled
    engine.unload()
    return logits


def theirs(path: Path, directory: Path) -> torch.Tensor:
    """The same from plain transformers, over every tensor of the source dequantised."""
    directory.mkdir()
    with open_source(path) as source:
        reader = CheckpointReader(meta_skeleton(source.write_shell(directory)), source.tensors)
        dense = {n: source.tensors.tensors[n].dtype for n in reader.dense_names()}
        weights = {n: source.tensors.read(n).to(dense.get(n, torch.float32)).float() for n in source.tensors.tensors}
    save_file(
        {n: (t.flatten(0, 1) if ".experts.mlp." in n else t).contiguous().clone() for n, t in weights.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    return plainly(directory, torch.float32)


def plainly(path: Path, dtype: torch.dtype) -> torch.Tensor:
    model = transformers_own(path, dtype)
    logits, _ = run(model, DynamicCache(config=model.config), lambda step: None, STEPS)
    return logits


@pytest.mark.parametrize(
    "case",
    layered(CASES, quick=lambda case: (case.arch, case.name) in QUICK),
    ids=lambda case: f"{case.name}-{case.arch}",
)
def test_a_quantized_checkpoint_imported_has_the_logits_of_its_dequantised_weights(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path).path
    save_tokenizer(path)
    pack = import_model(str(path), tmp_path / "pack")
    manifest = Manifest.load(pack)
    assert manifest.formats == case.held(manifest.layers)
    got, wanted = ours(pack), theirs(path, tmp_path / "reference")
    if case.is_kept:
        # gpt_oss keeps [in, out] and its codes are kept [out, in]: the same weights, in products of another order
        assert torch.equal(got, wanted) if case.arch != "gpt_oss" else difference(got, wanted) < 1e-6
        how = set(manifest.exact.values())
        if case.layers:
            assert not any(word in one for one in how for word in ("requantised", "cast"))
        else:
            kept = f"dequantised from {case.label}" if case.exact == "checkpoint" else "exact codes"
            assert how <= {"as stored", kept}
    else:  # rounded anew, as the manifest says
        assert "requantised" in " ".join(manifest.exact.values())
        assert difference(got, wanted) < (0.04 if "int8" in manifest.format else 0.5)


@pytest.mark.parametrize(
    ("arch", "kind"),
    layered(
        [
            *(("qwen3_moe", kind) for kind in GGUF),
            *(("mixtral", kind) for kind in ("BF16", "MXFP4", "Q4_K")),
            *((arch, "Q8_0") for arch in MORE_GGUF),
        ],
        quick=lambda case: case == ("qwen3_moe", "Q6_K"),
    ),
)
def test_a_gguf_imported_has_the_logits_of_its_dequantised_weights(arch: str, kind: str, tmp_path: Path) -> None:
    _, path = make_gguf(arch, tmp_path, experts_in(kind), **({} if arch in MORE_GGUF else WIDE))
    pack, (format, exact, most) = import_model(str(path), tmp_path / "pack"), GGUF[kind]
    assert Manifest.load(pack).format == format
    got, wanted = ours(pack), theirs(path, tmp_path / "reference")
    exact, most = exact and arch not in ROUNDED, most or 1e-5
    assert torch.equal(got, wanted) if exact else difference(got, wanted) < most


@pytest.mark.long(0.2)
@pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_K", "IQ4_XS", "Q2_K"])
def test_integer_scales_in_the_fast_arithmetic(kind: str, tmp_path: Path) -> None:
    """Near the reference, and of the same bits however a prompt is cut and whatever is resident."""
    _, path = make_gguf("qwen3_moe", tmp_path, experts_in(kind), **WIDE)
    pack = save_tokenizer(import_model(str(path), tmp_path / "pack"))
    assert Manifest.load(pack).format == kind.lower()
    assert distance(pack) < 0.05  # states are rounded to 8 bits
    found = []
    for budget, cuts in (("100%", [len(PROMPT)]), ("75%", [10, 1, 8, 5]), ("50%", [1] * len(PROMPT))):
        assert sum(cuts) == len(PROMPT)
        settings = Settings({"budget": budget, "predictor": "none"})
        with unloading(Engine.load(LoadSpec.checked(str(pack), settings, arithmetic="fast", context=64))) as engine:
            assert engine.wiring.answering.hooked.program is not None
            found.append(logits(engine, PROMPT, cuts))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.long(0.2)
@pytest.mark.parametrize("arch", MORE_GGUF)
def test_a_gguf_in_16_bits_has_the_logits_of_the_checkpoint(arch: str, tmp_path: Path) -> None:
    """Routers in 32 bits, as the converter writes them."""
    checkpoint, path = make_gguf(
        arch, tmp_path, lambda name: "F32" if "ffn_gate_inp" in name else "BF16", dtype=torch.bfloat16
    )
    pack = import_model(str(path), tmp_path / "pack")
    assert torch.equal(ours(pack, "auto"), plainly(checkpoint, torch.bfloat16))


@pytest.mark.long(0.1)
@pytest.mark.parametrize("arch", layered(PLAIN, quick=lambda arch: arch == "gpt_oss"))
def test_a_plain_checkpoint_imported_has_its_own_logits(arch: str, tmp_path: Path) -> None:
    """In bf16, as they come; a pack in two blocks has them, too."""
    path = save_tokenizer(make_checkpoint(arch, tmp_path / "model", dtype=torch.bfloat16))
    wanted = plainly(path, torch.bfloat16)
    blocks = 2 if arch in ("qwen3_moe", "gpt_oss", "granitemoe") else 1
    pack = import_model(str(path), tmp_path / "pack", blocks=blocks)
    assert torch.equal(ours(pack, "auto"), wanted)
    assert bool(Manifest.load(pack).segments) == (blocks > 1)


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, in the mean square, over the prompt: what is decoded after it may be other tokens."""
    got, wanted = got[: len(PROMPT)], wanted[: len(PROMPT)]
    return float((got - wanted).norm() / wanted.norm())
