"""Where a missing expert is computed changes no bit of a logit: on the device, by the computing thread or by threads of
their own out of host memory, whichever the costs say, and whatever was decided before."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.engine import Engine
from core.errors import SettingError
from core.runtime.host_compute import HostCompute
from core.runtime.placement import PlacementCosts
from core.runtime.program.experts import FastMath
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from core.types import Ids, Outcome, StepRecord
from tests.architectures.trial import random_model
from tests.decoded import greedy
from tests.loaded import loaded, unloading
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")

FORMATS = ("int8", "int4-g64", "mxfp4", "nf4", "int2", "int3", "int4-g64-sym", "iq4_nl", "checkpoint")
QUICK = ("int4-g64", "fast"), ("checkpoint", "reference")
PROMPT = torch.randint(3, 250, (20,), generator=torch.Generator().manual_seed(2)).tolist()
ALL: dict[str, object] = {
    "budget": "100%",
    "miss_placement": "wait",
    "link": "emulated",
    "link_gbps": 0.05,
    "link_latency_us": 5,
}
TOKENS = 24


def engine_of(path: Path, format: str = "int8", arithmetic: str = "fast", **how: object) -> Engine:
    given = {"format": format, "arithmetic": arithmetic, "dtype": "bfloat16", "context": 128} | how
    return Engine.load(LoadSpec.checked(str(path), Settings(ALL), **given))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("placement")
    config = dict(hidden_size=128, moe_intermediate_size=64, num_experts=16, num_experts_per_tok=4)
    random_model("qwen3_moe", **config).save_pretrained(folder)
    return save_tokenizer(folder)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with unloading(engine_of(path)) as engine:
        yield engine


def answer(engine: Engine, tokens: int = TOKENS) -> tuple[torch.Tensor, list[StepRecord]]:
    """[tokens, V] before each token of a greedy answer, and the records of its decoded tokens."""
    seen, steps = list[torch.Tensor](), list[StepRecord]()
    for piece in engine.generate(Ids(PROMPT), Sampling(max_new_tokens=tokens), draw=greedy(seen)):
        if piece.step is not None and piece.step.phase == "decode":
            steps.append(piece.step)
    return torch.stack(seen), steps


def emptied(engine: Engine, **settings: object) -> None:
    """These settings, and a cache as after a load."""
    engine.change({**ALL, **settings})
    engine.expert_cache.start_over()


@pytest.mark.parametrize(
    ("format", "arithmetic"), layered(itertools.product(FORMATS, ("fast", "reference")), quick=QUICK.__contains__)
)
def test_no_bit_depends_on_where_misses_are_computed(path: Path, format: str, arithmetic: str) -> None:
    with unloading(engine_of(path, format, arithmetic)) as engine:
        assert isinstance(engine.wiring.math[0], FastMath) == (arithmetic == "fast")
        wanted, _ = answer(engine, 12)
        for budget in ("25%", "50%"):
            for placement, threads in (("wait", 1), ("host", 0), ("host", 1), ("measured", 0), ("measured", 1)):
                emptied(engine, budget=budget, miss_placement=placement, host_threads=threads)
                found, steps = answer(engine, 12)
                assert torch.equal(found, wanted), (budget, placement, threads)
                misses = sum(int((one.outcome == Outcome.MISS).sum()) for one in steps)
                hosted = sum(one.host_computed for one in steps)
                assert misses > 0
                assert hosted == {"wait": 0, "host": misses}.get(placement, hosted)
                assert sum(one.demand_bytes for one in steps) == (misses - hosted) * engine.sizes.blob
                assert all(one.exact and one.device_bytes <= one.budget_bytes for one in steps)
                engine.expert_cache.check_integrity()


def test_rows_of_prompts_and_guesses_wait_for_no_copy(engine: Engine) -> None:
    wanted, _ = answer(engine)
    emptied(engine, budget="25%", miss_placement="host", link_gbps=0.001, drafts="lookup")
    engine.parts.drafter.gate.fixed = 4
    seen, steps = list[torch.Tensor](), list[StepRecord]()
    for piece in engine.generate(Ids(PROMPT), Sampling(max_new_tokens=TOKENS), draw=greedy(seen)):
        steps += [piece.step] if piece.step is not None else []
    engine.parts.drafter.gate.fixed = None
    emptied(engine)
    assert torch.equal(torch.stack(seen), wanted)
    assert steps[0].phase == "prefill" and any(one.drafted for one in steps), "of each kind"
    for one in steps:
        assert one.stall_ms == one.demand_bytes == 0 < one.host_computed
    engine.expert_cache.check_integrity()


def test_a_prompt_copies_no_more_than_fits_beside_copies_that_have_not_landed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied(engine)
    wanted, _ = answer(engine)
    monkeypatch.setattr(PlacementCosts, "hidden", lambda self, experts, copy_s: 10**6)  # all that fits is copied
    emptied(engine, budget="25%", miss_placement="measured", link_gbps=0.002)
    behind = 0
    for first in range(3):
        other = [*reversed(PROMPT[first:])]  # nothing of it is kept
        assert list(engine.generate(Ids(other), Sampling(max_new_tokens=4)))
        behind += engine.expert_cache.copies.behind_now()
        assert torch.equal(answer(engine)[0], wanted)
    assert behind > 0, "copies had landed before every prompt"
    engine.expert_cache.check_integrity()


def test_measured_placement_needs_no_token_that_waits_where_it_clearly_saves(engine: Engine) -> None:
    emptied(engine, budget="25%", miss_placement="measured", link_gbps=0.001)
    _, steps = answer(engine, 9)
    assert all(one.host_computed > 0 for one in steps)
    found = engine.tried
    assert found.predicted and found.placement is not None and found.placement[3]
    assert found.placement[1] > 2 * found.placement[0], "ms a token that waits, by the link's pace"


def test_automatic_placement_is_measured_where_it_can_be(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied(engine, budget="25%", miss_placement="auto", link_gbps=0.001)
    wanted, steps = answer(engine)
    assert engine.parts.host.active and sum(one.host_computed for one in steps) > 0
    for why in ("closeness", "objection"):
        emptied(engine, budget="25%", miss_placement="wait", link_gbps=0.001)
        with monkeypatch.context() as patch:
            patch.setattr(HostCompute, why, 0.01 if why == "closeness" else lambda self: "it cannot")
            engine.change({"miss_placement": "auto"})
            found, steps = answer(engine)
        assert not engine.parts.host.active and sum(one.host_computed for one in steps) == 0
        assert torch.equal(found, wanted)


def test_measured_placement_takes_turns_with_waiting(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FEWEST": 1, "LEAD": 0, "LEARNING": 0, "BLOCK": 2, "MOST": 2, "SURE": 1e9}.items():
        monkeypatch.setattr(f"core.policy.comparison.{name}", value)
    monkeypatch.setattr(PlacementCosts, "alike", False)  # as with threads of their own
    for name, number in {"REST": 3, "CLEAR": 0.0}.items():
        monkeypatch.setattr(f"core.policy.throttle.{name}", number)
    emptied(engine, budget="25%", miss_placement="measured", link_gbps=0.001)
    before = len(engine.parts.telemetry.marks)
    _, steps = answer(engine, 14)
    foretells, waits, hosts, rest = [True] * 3, [False] * 2, [True] * 2, [False] * 3
    assert [one.host_computed > 0 for one in steps] == [*foretells, *waits, *hosts, *rest, *foretells]
    marks = [*engine.parts.telemetry.marks][before:]
    said = [text for _, text in marks if text.startswith("computing on the host")]
    assert [text.split(":")[0] for text in said] == ["computing on the host paused, not told apart"]


def test_an_expert_is_copied_behind_the_token(engine: Engine) -> None:
    emptied(engine, budget="50%", miss_placement="host", link_gbps=50.0)
    _, steps = answer(engine)
    admitted = sum(one.host_admitted for one in steps)
    assert 0 < admitted <= sum(one.host_computed for one in steps)
    assert sum(one.admitted_bytes for one in steps) == admitted * engine.sizes.blob


def test_what_the_policy_ranks_lowest_is_not_copied(engine: Engine) -> None:
    emptied(engine, budget="50%", miss_placement="host", eviction="lfu", link_gbps=50.0)
    answer(engine)
    _, steps = answer(engine)
    assert sum(one.host_admitted for one in steps) < sum(one.host_computed for one in steps)


def test_a_policy_that_keeps_nothing_has_nothing_copied(engine: Engine) -> None:
    wanted, _ = answer(engine)
    emptied(engine, budget="50%", miss_placement="host", eviction="none")
    found, steps = answer(engine)
    assert torch.equal(found, wanted)
    assert sum(one.host_admitted for one in steps) == 0 < sum(one.host_computed for one in steps)
    engine.change({"eviction": "lru"})


def test_a_link_that_is_behind_admits_few(engine: Engine) -> None:
    emptied(engine, budget="25%", miss_placement="host", link_gbps=0.001)
    _, steps = answer(engine)
    assert sum(one.host_admitted for one in steps) < sum(one.host_computed for one in steps) / 4
    assert all(one.stall_ms == 0 for one in steps)


def test_experts_in_parts_are_not_computed_by_the_host(path: Path) -> None:
    with loaded(path, ALL, arithmetic="reference", format="int8", dtype="bfloat16", blocks=2) as engine:
        with pytest.raises(SettingError, match=r"miss_placement host cannot be used: experts are cached in parts"):
            engine.change({"miss_placement": "host"})
        assert engine.settings["miss_placement"] == "wait"
