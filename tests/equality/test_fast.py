"""The fast arithmetic: near transformers' logits, and the same bits however a prompt is cut, whatever goes along,
whatever is resident, and however many threads compute."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, DynamicCache

from core.engine import Engine
from core.engine.batch_request import BatchRequest
from core.engine.draft_lookup import Guess, Lookup
from core.memory.codec.native.threads import share
from core.runtime.moe_step import MoEStep
from core.runtime.pipeline import Stopped
from core.runtime.program import row_steps
from core.settings.config import Settings
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from core.types import Ids
from tests.architectures.tiny import tiny
from tests.architectures.trial import random_model as any_random_model
from tests.architectures.trial import save, transformers_own
from tests.checkpoints import make_checkpoint, random_model
from tests.equality.fast import CLOSE, OTHERS, distance, load, logits, read
from tests.equality.passes import PROMPT, plain_transformers, run
from tests.loaded import unloading
from tests.mtp_checkpoint import MIMO_CONFIG
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")

YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.0
)
KNOWN: dict[str, dict[str, object]] = {  # what the program computes
    "qwen3_moe": {},
    "mixtral": {},
    "qwen2_moe": dict(mlp_only_layers=[1]),
    "olmoe": dict(norm_topk_prob=True, attention_bias=True),
    "glm4_moe": dict(n_group=2, use_qk_norm=True, attention_bias=True, routed_scaling_factor=1.5),
    "dots1": {},
    "ernie4_5_moe": {},
    "hunyuan_v1_moe": dict(attention_bias=True),
    "minimax_m2": {},
    "hy_v3": dict(router_scaling_factor=1.5),
    "sarvam_mla": {},
    "flex_olmo": {},
    "granitemoe": dict(
        embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=6.0, attention_multiplier=0.3
    ),
    "granitemoeshared": dict(residual_multiplier=0.22),
    "afmoe": dict(route_scale=1.5),
    "laguna": dict(moe_routed_scaling_factor=1.5),
    "gemma4_text": dict(
        hidden_size_per_layer_input=0, attention_k_eq_v=True, global_head_dim=32, final_logit_softcapping=30.0
    ),
    "deepseek_v2": {},
    "deepseek_v3": dict(attention_bias=True, rope_parameters=YARN),
    "glm4_moe_lite": dict(rope_interleave=False),
    "mimo_v2_flash": dict(MIMO_CONFIG, attention_value_scale=0.612),
}
WHOLE = (
    "qwen3_vl_moe",
    "glm4v_moe",
    "kimi_k25",
    "mistral3",
    "qwen3_omni_moe_thinker",
    "minimax_m3_vl",
)  # their text part
LATENT = "deepseek_v2", "deepseek_v3", "glm4_moe_lite"
QUICK = ("qwen2_moe",)  # shared experts, and a layer without any
WINDOWS: dict[str, dict[str, object]] = {
    "gpt_oss": {},
    "exaone_moe": {},
    "flint": {},
    "gemma4_text": KNOWN["gemma4_text"],
    "mimo_v2_flash": KNOWN["mimo_v2_flash"],
    "mellum": dict(layer_types=["sliding_attention", "full_attention"] * 2),  # each with angles of its own
}
ROUNDED = 0.05  # of a row of logits, where states are rounded to 8 bits: .006 to .029


@pytest.fixture(scope="module", params=layered(KNOWN, quick=QUICK.__contains__))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, model = (tmp_path_factory.mktemp(request.param), random_model(request.param, **KNOWN[request.param]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "bias" not in name:
                parameter.uniform_(0.5, 1.5)  # of norms
            if "q_norm" in name and model.config.model_type == "gemma4_text":
                parameter.mul_(0.25)  # scores are not scaled otherwise
        for name, buffer in model.named_buffers():
            if "scalar" in name:
                buffer.uniform_(0.5, 1.5)  # of layers
    model.save_pretrained(path)
    return save_tokenizer(path)


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    engine = load("demo", sequences=4)
    assert engine.wiring.answering.hooked.program is not None
    yield engine
    engine.unload()


def test_logits_are_near_transformers(path: Path) -> None:
    plain = plain_transformers(path, torch.float32)
    with unloading(load(path, dtype="float32")) as engine:
        assert engine.wiring.answering.hooked.program is not None
        with torch.inference_mode():
            wanted, _ = run(plain, DynamicCache(config=plain.config), lambda step: None, 0)
        found = logits(engine, PROMPT, [len(PROMPT)])
        assert (found - wanted[-1]).abs().max() < CLOSE * wanted[-1].abs().max()
        for cuts in ([1] * len(PROMPT), [10, 9, 5]):
            assert torch.equal(logits(engine, PROMPT, cuts), found), cuts


@pytest.mark.parametrize("arch", layered(WHOLE, quick=lambda arch: False))
def test_models_of_text_and_images(arch: str, tmp_path: Path) -> None:
    path, found = save(any_random_model(arch), tmp_path), []
    for arithmetic in ("fast", "reference"):
        with unloading(load(path, dtype="float32", arithmetic=arithmetic)) as engine:
            assert (engine.wiring.answering.hooked.program is not None) == (arithmetic == "fast")
            found.append(logits(engine, PROMPT, [10, 9, 5]))
    assert (found[0] - found[1]).abs().max() < CLOSE * found[1].abs().max()


def test_limits_of_some_layers(tmp_path: Path) -> None:
    """Step 3.7 Flash limits what its last layers' activations multiply, of experts and of the shared one."""
    tight: dict[str, object] = {"swiglu_limits": [0, 0, 0, 0.02], "swiglu_limits_shared": [0, 0, 0.01, 0]}
    config = AutoConfig.for_model("step3p7", **tiny("step3p7")).text_config.to_dict()
    path = save(
        any_random_model("step3p7", text_config={**config, **tight, "moe_router_scaling_factor": 1.5}), tmp_path
    )
    plain = transformers_own(path, torch.float32)
    with unloading(load(path, dtype="float32")) as engine:
        assert engine.wiring.answering.hooked.program is not None
        with torch.inference_mode():
            wanted, _ = run(plain, DynamicCache(config=plain.config), lambda step: None, 0)
        found = logits(engine, PROMPT, [len(PROMPT)])
        assert (found - wanted[-1]).abs().max() < CLOSE * wanted[-1].abs().max()


@pytest.mark.parametrize("arch", layered(["afmoe", "minimax_m2"], quick=lambda arch: arch == "afmoe"))
def test_routers_that_are_asked_get_what_they_take(arch: str, tmp_path: Path) -> None:
    """States of three dimensions, or more than states."""
    path, answers = save_tokenizer(make_checkpoint(arch, tmp_path)), list[list[int]]()
    with unloading(load(path, dtype="float32")) as engine:
        for predictor in ("none", "gate"):
            engine.change({"budget": "50%", "predictor": predictor})
            pieces = engine.generate(Ids(PROMPT), Sampling(max_new_tokens=9))
            answers.append([piece.token for piece in pieces if piece.token is not None])
    assert answers[0] == answers[1]


@pytest.mark.long(0.1)  # test_biases_of_experts_and_sinks has it of one model
@pytest.mark.parametrize(("path", "dense"), itertools.product(KNOWN, ("checkpoint", "int4-g32")), indirect=["path"])
def test_rounded_weights(path: Path, dense: str) -> None:
    assert distance(path, format="int4-g32-sym", dense=dense) < ROUNDED


def test_biases_of_experts_and_sinks(tmp_path: Path) -> None:
    model = random_model("gpt_oss", attention_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "sinks" in name:
                parameter.normal_()
    model.save_pretrained(tmp_path)
    assert distance(save_tokenizer(tmp_path), format="int8") < ROUNDED


SPLITS: list[dict[str, object]] = [
    {"budget": "all", "split": "uniform"},
    {"budget": "50%", "split": "uniform", "split.uniform.theta": 0.5},
    {"budget": "50%", "split": "uniform", "split.uniform.theta": 0.5, "predictor": "gate", "eviction": "lcp"},
    {"budget": "50%", "split": "uniform", "split.uniform.theta": 0.0, "scope": "global", "predictor": "gate"},
    {"budget": "50%", "split": "uniform", "split.uniform.theta": 0.5, "eviction": "none", "buffer": 4},
    {"budget": "50%", "split": "whole"},
]


@pytest.mark.parametrize(
    ("arch", "blocks", "how"),
    [
        ("qwen3_moe", 2, {"dtype": "float32"}),
        ("gpt_oss", 2, {"dtype": "bfloat16"}),  # biases, gates and ups in turn
        ("demo", 3, {"format": "mxfp4"}),  # whose blocks fill no vector
    ],
)
def test_experts_in_blocks_have_the_bits_of_whole_ones(
    arch: str, blocks: int, how: dict[str, object], tmp_path: Path
) -> None:
    """Whatever is resident of them: tokens, a few rows, and prompts."""
    path = arch if arch == "demo" else save_tokenizer(make_checkpoint(arch, tmp_path))
    with unloading(load(path, **how)) as engine:
        wanted = logits(engine, PROMPT, [len(PROMPT)])
    with unloading(load(path, blocks=blocks, sequences=4, **how)) as engine:
        assert engine.wiring.answering.hooked.program is not None and engine.sizes.blocks == blocks
        partial = 0
        for case in SPLITS:
            engine.change({**Settings(), **case})
            for cuts in ([len(PROMPT)], [1] * len(PROMPT), [12, 5, 7]):
                assert torch.equal(logits(engine, PROMPT, cuts), wanted), (case, cuts)
            assert torch.equal(logits(engine, PROMPT, [23, 1], OTHERS), wanted), case
            engine.expert_cache.check_integrity()
            partial += engine.expert_cache.take_counts().top_hits
        assert partial > 0 and "split sums" not in engine.loaded.plan.note


@pytest.mark.parametrize("arch", layered(WINDOWS, quick=lambda arch: arch == "exaone_moe"))
def test_windows(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a text that is longer than the memory of a window, and of a pass that breaks off between two layers."""
    monkeypatch.setattr(row_steps, "MOST", 9)
    path = save_tokenizer(make_checkpoint(arch, tmp_path, sliding_window=12, **WINDOWS[arch]))
    ids = torch.randint(3, 250, (230,), generator=torch.Generator().manual_seed(1)).tolist()
    how = {"dtype": "float32", "context": 256, "sequences": 4}
    with unloading(load(path, arithmetic="reference", **how)) as engine:
        wanted = logits(engine, ids, [len(ids)])
    with unloading(load(path, **how)) as engine:
        assert engine.wiring.answering.hooked.program is not None
        found = logits(engine, ids, [len(ids)])
        assert (found - wanted).norm() < CLOSE * wanted.norm()
        for cuts in ([1] * len(ids), [7] * 32 + [6], [150, 80], [120, 9, 100, 1]):
            assert torch.equal(logits(engine, ids, cuts), found), cuts
        assert torch.equal(logits(engine, ids, [130, 100], OTHERS), found)
        pipeline = engine.wiring.measuring
        for at, kept in ((100, True), (127, False)):  # positions from 128 on are written over the first ones
            kv = engine.wiring.pool.chat.fresh()
            read(pipeline, kv, ids[:at])
            with pytest.raises(Stopped):
                read(pipeline, kv, ids[at : at + 20], breaks_off=True)
            kv.abort_pass(at)
            assert kv.memory.rollback(kv) == kept
            if kept:
                assert torch.equal(read(pipeline, kv, ids[at:]), found)


def test_no_bit_depends_on_how_it_is_computed(demo: Engine) -> None:
    ids = torch.randint(3, 4000, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    share(1)
    wanted = logits(demo, ids, [24])
    for settings in ({"budget": "100%"}, {"budget": "50%"}, {"budget": "25%", "scope": "global", "eviction": "lfu"}):
        demo.change(settings)
        for cuts in ([24], [1] * 24, [7] * 3 + [3], [23, 1]):
            assert torch.equal(logits(demo, ids, cuts), wanted), (settings, cuts)
        for others in ([[9, 8, 7]], OTHERS):
            assert torch.equal(logits(demo, ids, [23, 1], others), wanted), (settings, others)
            assert torch.equal(logits(demo, ids, [12, 12], others), wanted), (settings, others)
    demo.change({"budget": "50%", "predictor": "gate"})
    sampling = Sampling(max_new_tokens=12, temperature=0.0)
    texts = ["".join(piece.text for piece in demo.generate("The ferry left", sampling) if piece.text) for _ in range(2)]
    assert texts[0] == texts[1] != ""


@pytest.mark.long(0.2)  # tests/runtime/program/test_absorb.py, test_attend.py have its rows in any pieces
@pytest.mark.parametrize("path", LATENT, indirect=True)
def test_no_bit_of_latent_attention_depends_on_how_it_is_computed(path: Path) -> None:
    how = dict(dtype="bfloat16", format="int4-g32", dense="int4-g32", context=256, sequences=4)
    ids = torch.randint(3, 250, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    with unloading(load(path, **how)) as engine:
        assert engine.wiring.answering.hooked.program is not None
        share(1)
        wanted = logits(engine, ids, [150])
        ways = (1, 2, 3), ([140] + [1] * 10, [1] * 20 + [130], [150])
        for threads, cuts in itertools.product(*ways):
            share(threads)
            assert torch.equal(logits(engine, ids, cuts), wanted), (threads, cuts)
            assert torch.equal(logits(engine, ids, cuts, OTHERS), wanted), (threads, cuts)
        pool, pipeline = engine.wiring.pool, engine.wiring.measuring
        kv = pool.take(256)
        read(pipeline, kv, ids[:140])
        kept = kv.memory.stash(kv)
        read(pipeline, kv.memory.fresh(), ids[::-1])
        assert torch.equal(read(pipeline, kv.memory.put_back(kept, 77), ids[77:]), wanted)
        pool.clear()


@pytest.mark.parametrize("token", [-1, 1 << 40])
def test_no_token_is_read_from_outside_of_the_embeddings(demo: Engine, token: int) -> None:
    wanted = logits(demo, [1, 2, 3], [3])
    for ids, cuts in (([1, token, 3], [3]), ([1, 2, token], [2, 1])):
        with pytest.raises(IndexError, match="outside of the model's"):
            logits(demo, ids, cuts)
    assert torch.equal(logits(demo, [1, 2, 3], [3]), wanted)


ROWS = {"token": 1, "drafts": 4, "batch": 3}  # of a pass
EVICTION = {"token": "lru", "drafts": "lcp", "batch": "lru"}  # LCP counts the tokens that choose an expert


@pytest.mark.parametrize(("rows", "budget"), [("token", "100%"), ("token", "60%"), ("drafts", "85%"), ("batch", "85%")])
def test_passes_in_one_native_call_request_what_layers_would(
    demo: Engine, rows: str, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, computed = list[tuple[int, int]](), MoEStep.computed

    def heard(step: MoEStep, first: int, chosen: Sequence[list[list[int]]]) -> None:
        native.extend((first + at, len(of)) for at, of in enumerate(chosen))
        computed(step, first, chosen)

    monkeypatch.setattr(MoEStep, "computed", heard)
    drafts = "lookup" if rows == "drafts" else "off"
    how = {"budget": budget, "predictor": "none", "scope": "layer", "eviction": EVICTION[rows], "drafts": drafts}
    demo.change(how)
    monkeypatch.setattr(demo.parts.drafter.gate, "fixed", ROWS[rows] - 1 or None)
    monkeypatch.setattr(Lookup, "guess", lambda text, ids, most: Guess([*ids[-3:]][:most], 3) if most > 0 else None)
    asked = ["The ferry left", "On", "What does it"] if rows == "batch" else ["The ferry left"]

    def answer() -> list[object]:
        with demo.workbench("A test begins.") as bench:
            bench.start_over()
        found, seen = list[object](), list[object]()
        sampling = Sampling(max_new_tokens=24, temperature=0.0, logprobs=0)
        for one in demo.generate_many([BatchRequest(at, text, sampling) for at, text in enumerate(asked)]):
            if (piece := one.piece) is None:
                continue
            found.append((one.key, piece.text, piece.logprob))
            if (step := piece.step) is not None and not any(step is one for one in seen):
                seen.append(step)
                found.append((step.phase, step.ids.tolist(), step.layer.tolist()))
                found.append((step.expert.tolist(), step.outcome.tolist()))
        return found

    wanted = answer()
    passes, layers = sum(of == ROWS[rows] for _, of in native), demo.shape.layers
    assert (passes > 20 * layers) if budget == "100%" else layers < passes < 20 * layers
    native.clear()
    monkeypatch.setattr(MoEStep, "hits_at", lambda step: 0)
    assert answer() == wanted
    assert not native
