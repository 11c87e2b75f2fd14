"""Loads: of the demo, in every format, with a template that fails; settings that change leave nothing behind."""

import gc
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import DynamicCache

from core.engine import Engine
from core.errors import ModelError
from core.hf.discover import find_experts
from core.memory.codec import Codec, make_codec
from core.policy.eviction.lfu import LFU
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.registry import variants
from core.settings.sampling import Sampling
from core.system.template_worker import RENDERER
from core.types import AnswerStats
from tests.checkpoints import make_checkpoint
from tests.equality.passes import plain_transformers, run
from tests.loaded import loaded
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with loaded("demo", {"budget": "50%"}, device="cpu") as engine:
        yield engine


def ask(engine: Engine, question: str) -> tuple[str, AnswerStats]:
    pieces = list(engine.generate([{"role": "user", "content": question}], Sampling(max_new_tokens=64)))
    stats = pieces[-1].stats
    assert stats is not None
    return "".join(p.text for p in pieces), stats


@pytest.mark.long(0.1)
def test_the_link_of_the_demo_is_emulated_and_says_so(demo: Engine) -> None:
    demo.change(dict(Settings({"budget": "50%"})))
    _, stats = ask(demo, "What does json.dumps do?")
    assert stats.emulated
    assert demo.frame().emulated
    assert demo.manifest()["link"] == "emulated"
    assert 0.01 < demo.frame().link_limit_gbps < 20
    demo.change({"link": "own"})
    _, stats = ask(demo, "What does json.dumps do?")
    assert not stats.emulated
    assert demo.manifest()["link"] == "measured"


def test_the_manifest_says_whether_the_settings_are_exact(demo: Engine) -> None:
    for changes, exact in (({}, True), ({"miss": "drop"}, False), ({"predictor": "gate", "execute": "always"}, False)):
        demo.change({**Settings({"budget": "50%"}), **changes})
        assert demo.manifest()["exact"] is exact
    demo.change(dict(Settings({"budget": "50%"})))
    assert demo.manifest()["exact"] is True and demo.manifest()["closeness"] == 0.0


CHAT = [{"role": "user", "content": "hello there"}]


def test_telemetry_that_is_off_at_the_load_is_off(model: Path) -> None:
    engine = Engine.load(LoadSpec.checked(str(model), Settings({"telemetry": "off"}), context=256))
    list(engine.generate(CHAT, Sampling(max_new_tokens=3)))
    assert engine.parts.telemetry.activations().sum() == 0
    engine.change({"telemetry": "on"})
    list(engine.generate(CHAT, Sampling(max_new_tokens=3)))
    assert engine.parts.telemetry.activations().sum() > 0
    engine.unload()


def test_only_what_a_change_concerns_is_built_anew(engine: Engine) -> None:
    engine.change({"predictor": "gate"})
    policy, predictor = engine.expert_cache.policy, engine.predictor_host.predictor
    engine.change({"eviction.lcp.omega": 8, "predictor.expert_map.capacity": 30, "link_latency_us": 20})
    assert engine.expert_cache.policy is policy and engine.predictor_host.predictor is predictor
    engine.change({"predictor.width": 3})
    assert engine.expert_cache.policy is policy and engine.predictor_host.predictor is not predictor
    engine.change({"eviction": "lfu"})
    assert engine.expert_cache.policy is not policy


def test_what_changes_in_the_last_pass_is_applied_when_the_answer_ends(engine: Engine) -> None:
    """As when a prompt of one pass is being read, a control is moved, and Stop follows."""
    cancel, applied = threading.Event(), list[bool]()

    def moved(module: object, args: object) -> None:
        engine.change({"budget": "75%", "eviction": "lfu"})
        applied.append(engine.expert_cache.slots > before)
        cancel.set()

    before = engine.expert_cache.slots
    with engine.model.register_forward_pre_hook(moved):
        pieces = list(engine.generate(CHAT, Sampling(max_new_tokens=3), cancel))
    assert pieces[-1].kind == "end" and applied == [False], "one pass, and no change within it"
    assert engine.expert_cache.slots == engine.sizes.slots(engine.settings.cache.budget) > before
    assert isinstance(engine.expert_cache.policy, LFU)


def test_a_template_that_fails_ends_the_load(model: Path, tmp_path: Path) -> None:
    broken, before = shutil.copytree(model, tmp_path / "broken"), len(RENDERER._owners)
    (broken / "chat_template.jinja").write_text("{% for m in messages %}")
    with pytest.raises(ModelError, match=r"chat template is damaged in line 1: .* Download"):
        Engine.load(LoadSpec.checked(str(broken), context=256))
    assert len(RENDERER._owners) == before


def test_the_process_is_kept_as_long_as_the_model(model: Path) -> None:
    before = len(RENDERER._owners)
    engine = Engine.load(LoadSpec.checked(str(model), context=256))
    worker = RENDERER.pid
    assert len(RENDERER._owners) == before + 1
    assert engine.count_tokens([{"role": "user", "content": "hi"}]) == len("u:hi\na:")
    assert worker is not None and RENDERER.pid == worker
    engine.unload()
    assert len(RENDERER._owners) == before


TOLERANCE = 1e-5  # fp32: the same weights, another order of summation


def round_experts(model: Any, format: str) -> Codec:
    """Replace every expert of a plain model by what the format keeps of it."""
    codec: Codec | None = None
    for site in find_experts(model):
        codec = make_codec(
            format, specs=site.parts, dtype=torch.float32, device=torch.device("cpu"), is_transposed=site.is_transposed
        )
        for expert in range(site.num_experts):
            weights = {part: getattr(site.module, part).data[expert] for part in site.parts}
            slot = torch.empty(codec.slot_bytes, dtype=torch.uint8)
            codec.place(codec.encode(weights), slot)
            parts = codec.views(slot)
            for part, spec in site.parts.items():
                if spec.is_weight:
                    weights[part].copy_(codec.dequantize(parts, part))
    assert codec is not None
    return codec


@pytest.mark.parametrize(
    ("arch", "format"),
    layered(
        [
            *(("qwen3_moe", format) for format in ("int8", "int4-g64", "nf4", "int3", "int2")),
            ("mixtral", "int4-g32-sym"),
            *(("gpt_oss", format) for format in ("int4-g32", "int8-g32", "mxfp4", "iq4_nl")),
        ],
        quick=lambda case: case[1] == "mxfp4",
    ),
)
def test_the_engine_computes_with_the_rounded_weights(arch: str, format: str, tmp_path: Path) -> None:
    path = save_tokenizer(make_checkpoint(arch, tmp_path / arch))
    exact, _ = run(plain_transformers(path, torch.float32), None, lambda step: None, steps=4)
    plain = plain_transformers(path, torch.float32)
    round_experts(plain, format)
    want, _ = run(plain, DynamicCache(config=plain.config), lambda step: None, steps=4)
    with loaded(path, {"budget": "50%"}, dtype="float32", format=format) as engine:
        got, _ = run(engine.model, engine.fresh_cache(), lambda step: None, steps=4)
        assert (got - want).abs().max().item() <= TOLERANCE
        assert (got[:24] - exact[:24]).abs().max().item() > 10 * TOLERANCE, "nothing was rounded"
        assert engine.sizes.slot < engine.shape.hidden * 64 * 3 * 4


@pytest.mark.long(0.1)
@pytest.mark.parametrize(
    "format", layered(["int8", "int4-g64", "iq4_nl", "int3"], quick=lambda format: format == "int4-g64")
)
def test_bfloat16_runs_the_fast_paths(format: str, tmp_path: Path) -> None:
    path = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path / "m", dtype=torch.bfloat16))
    logits = []
    for dtype in ("float32", "bfloat16"):
        engine = Engine.load(LoadSpec.checked(str(path), Settings({"budget": "50%"}), dtype=dtype, format=format))
        logits.append(run(engine.model, engine.fresh_cache(), lambda step: None, steps=0)[0].float())
        engine.unload()
    error = (logits[0] - logits[1]).norm() / logits[0].norm()
    assert 0 < error < 0.05


RECORDS = {"LazyStepRecord", "Transfer", "StepRecord", "Ticket", "Lossy"}  # bounded, see test_telemetry.py
SHARED = "moestro-contention", "moestro-rows"  # threads of the process, which come as other programs leave it time
VALUES = {
    "predictor": [v.name for v in variants("predictor") if not v.needs],
    "eviction": [v.name for v in variants("eviction") if not v.needs],
    "scope": ["global", "layer"],
    "budget": ["75%", "50%"],
    "link": ["emulated", "own"],
    "miss": ["drop", "wait"],
}


def through(engine: Engine, name: str) -> None:
    """Every value of a setting for one token, and back to the first."""
    values = [*VALUES[name], VALUES[name][0]]
    answer = engine.generate("Hello", Sampling(temperature=0, max_new_tokens=len(values) + 1))
    for piece in answer:
        if piece.kind == "token" and values:
            engine.change({name: values.pop()})
    assert not values, "the answer ended before"


def alive(engine: Engine) -> dict[str, int]:
    """What there is of our own objects, of hooks in the model, threads, child processes and open files."""
    gc.collect()
    ours = Counter(type(one).__qualname__ for one in gc.get_objects() if type(one).__module__.startswith("core."))
    process = psutil.Process()
    return {
        **{name: count for name, count in ours.items() if name not in RECORDS},
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.model.modules()),
        "threads": sum([thread.name not in SHARED for thread in threading.enumerate()]),
        "processes": len(process.children()),
        "files": process.num_fds() if hasattr(process, "num_fds") else 0,
    }


@pytest.mark.parametrize("name", layered(VALUES, quick=lambda name: name == "predictor"))
def test_changing_a_setting_leaves_nothing_behind(engine: Engine, name: str) -> None:
    engine.change({"quality_rate": 0.0})  # or what lossy answers are to be compared by would wait for its turn
    through(engine, name)
    before = alive(engine)
    for _ in range(3):
        through(engine, name)
    after = alive(engine)
    assert {key: (before.get(key), count) for key, count in after.items() if count > before.get(key, 0)} == {}
