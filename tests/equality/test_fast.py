"""The fast arithmetic: near transformers' logits, and the same bits however a prompt is cut, whatever goes along,
whatever is resident, and however many threads compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

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
from tests.checkpoints import make_checkpoint
from tests.equality.fast import CLOSE, KNOWN, OTHERS, load, logits, read
from tests.equality.passes import PROMPT
from tests.loaded import unloading
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")

WINDOWS: dict[str, dict[str, object]] = {
    "gpt_oss": {},
    "exaone_moe": {},
    "flint": {},
    "gemma4_text": KNOWN["gemma4_text"],
    "mimo_v2_flash": KNOWN["mimo_v2_flash"],
    "mellum": dict(layer_types=["sliding_attention", "full_attention"] * 2),  # each with angles of its own
}


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    engine = load("demo", sequences=4)
    assert engine.wiring.answering.hooked.program is not None
    yield engine
    engine.unload()


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
