"""Architectures that need an adapter, the page of all of them, and, when there is time, every one anew."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

from core.capacity.plan import CLOSE, plan
from core.engine import Engine
from core.errors import ModelError
from core.hf.checkpoint import CheckpointReader
from core.hf.discover import find_experts
from core.hf.outline import outline
from core.hf.skeleton import load_skeleton, meta_skeleton
from core.measure.calibrate.gather import calibrate
from core.profile import PARTS
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from tests.architectures import __main__ as generator
from tests.architectures.features import TITLES
from tests.architectures.methods import COLUMNS, FAILS, FAST, HOW, TEXTS, YES, Trial
from tests.architectures.scan import moe_types
from tests.architectures.table import methods_head, page, stated
from tests.architectures.trial import Outcome, known, random_model, save, try_all, try_type
from tests.engine.profiles import drawn_profile
from tests.loaded import loaded, unloading
from tests.selection import layered

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
BOUND = 1e-6
ATTENTION = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")  # in groups; latent; windows, sinks; gated delta nets
ADAPTED = {
    "step3p7": "exact",
    "zaya": "exact",
    "ernie4_5_vl_moe": "exact",
    "llama4": "close",
    "longcat_flash": "exact",
    "dbrx": "close",
    "jamba": "exact",
    "jetmoe": "exact",
    "switch_transformers": "exact",
}


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    layered(
        itertools.product(ADAPTED, (torch.float32, torch.bfloat16)),
        quick=lambda case: case[0] == "llama4" and case[1] == torch.float32,
    ),
)
def test_adapted(model_type: str, dtype: torch.dtype) -> None:
    if not known(model_type):
        pytest.skip(f"the installed transformers has no {model_type}")
    outcome = try_type(model_type, 6, dtype)
    assert outcome.verdict in ("exact", ADAPTED[model_type]), outcome
    assert outcome.off <= BOUND


def test_what_is_close_is_said(tmp_path: Path) -> None:
    path = save(random_model("llama4_text"), tmp_path)
    spec = LoadSpec.checked(str(path), Settings({}))
    assert plan(spec).note == CLOSE.format(BOUND)
    with unloading(Engine.load(spec)) as engine:
        manifest = engine.manifest()
        stats = list(engine.generate("a b", Sampling(max_new_tokens=1)))[-1].stats
    assert (manifest["exact"], manifest["closeness"]) == (False, BOUND)
    assert (stats.exact, stats.closeness) == (True, BOUND)


@pytest.mark.long(0.1)
@pytest.mark.skipif(not known("minimax_m3_vl_text"), reason="the installed transformers has no minimax_m3_vl_text")
def test_what_only_some_models_of_a_type_are_refused_for_is_named() -> None:
    row = next(line for line in page([try_type("minimax_m3_vl_text", 2)]).splitlines() if "minimax_m3_vl_text" in line)
    assert "| exact |" in row and row.endswith("| refused with layers of sparse attention (minimax_m3_sparse) |")


@pytest.mark.skipif(not known("granitemoe_swa"), reason="the installed transformers has no granitemoe_swa")
def test_layers_without_rotation_are_exact() -> None:
    assert try_type("granitemoe_swa", 2).verdict == "exact"


def test_of_others_nothing_is_said(tmp_path: Path) -> None:
    planned = plan(LoadSpec.checked(str(save(random_model("jetmoe"), tmp_path)), Settings({})))
    assert (planned.note, planned.closeness) == ("", 0.0)


def test_why_not_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="single rows of two tables"):
        load_skeleton(save(random_model("doge"), tmp_path))


def test_dbrx_experts_are_read_row_by_row(tmp_path: Path) -> None:
    model = random_model("dbrx")
    path = save(model, tmp_path)
    glu = model.transformer.blocks[1].ffn.experts.mlp
    with CheckpointReader(load_skeleton(path), path) as reader:
        got = reader.read(1, 5)
    rows = slice(5 * glu.ffn_hidden_size, 6 * glu.ffn_hidden_size)
    assert torch.equal(got["gate_up_proj"], torch.cat([glu.w1[rows], glu.v1[rows]]))
    assert torch.equal(got["down_proj"], glu.w2[rows].t())


def test_jetmoe_keeps_the_experts_of_attention(tmp_path: Path) -> None:
    whole = random_model("jetmoe")
    model = load_skeleton(save(whole, tmp_path))
    sites = find_experts(model)
    assert [site.name for site in sites] == [f"model.layers.{i}.mlp.experts" for i in range(len(sites))]
    assert not any("input_linear" in name and ".mlp." in name for name, _ in model.named_parameters())
    kept = model.get_submodule("model.layers.0.self_attention.experts.input_linear").weight
    assert torch.equal(kept, whole.get_submodule("model.layers.0.self_attention.experts.input_linear").weight)


def test_llama4_with_several_experts_a_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="2 experts a token"):
        meta_skeleton(save(random_model("llama4_text", num_experts_per_tok=2), tmp_path))


@pytest.mark.long(0.1)
@pytest.mark.skipif(not known("inkling2_loop_text"), reason="the installed transformers has no inkling2_loop_text")
def test_layers_in_a_loop_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="computes some of its layers several times for each token"):
        outline(meta_skeleton(save(random_model("inkling2_loop_text"), tmp_path)))


def test_longcat_routes_to_real_experts_alone(tmp_path: Path) -> None:
    model = load_skeleton(save(random_model("longcat_flash"), tmp_path))
    site = find_experts(model)[0]
    logits, weights, ids, through = site.router(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    assert (logits.shape, site.num_experts) == ((64, 8), 8)
    assert int(ids.max()) < 8
    assert (through > 0).any()
    assert ((weights > 0) ^ (through > 0)).all()


@pytest.mark.skipif(not known("longcat_flash"), reason="the installed transformers has no longcat_flash")
@pytest.mark.parametrize("changes", [{"split": "uniform"}, {"miss_placement": "host"}], ids=["in parts", "on the host"])
def test_an_expert_that_a_token_has_several_times_is_computed_once(changes: dict[str, str], tmp_path: Path) -> None:
    path, blocks = save(random_model("longcat_flash"), tmp_path), 1 + ("split" in changes)
    with loaded(path, {}, **HOW, arithmetic="fast", blocks=blocks) as engine:
        assert Trial(engine).same(changes) == YES


@pytest.mark.long(0.3)
@pytest.mark.skipif(not known("longcat_flash"), reason="the installed transformers has no longcat_flash")
def test_predictions_are_executed_beside_identity_experts(tmp_path: Path) -> None:
    with loaded(save(random_model("longcat_flash"), tmp_path), {}, **HOW, arithmetic="fast") as engine:
        trial = Trial(engine)
        trial.columns(["calibration"])
        found = trial.columns(["evaluation"])["evaluation"]
        assert found["text"] == YES and not any(words.startswith(FAILS) for words in found.values())


@pytest.mark.long(0.2)
def test_the_page_has_every_type() -> None:
    version, types = stated(PAGE.read_text(encoding="utf-8"))
    if version != transformers.__version__:
        pytest.skip(f"the page is of transformers {version}")
    assert types == moe_types()


@pytest.mark.long(0.2)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "inkling2_text"])
def test_what_an_engine_does_with_a_model(model_type: str) -> None:
    found = try_all(model_type).features
    alone = "This model answers prompts one at a time: its code cannot compute several prompts in one pass."
    assert found.pop("batches") == (alone if model_type == "inkling2_text" else YES)
    assert (found.pop("fast") == YES) == (model_type == "qwen3_moe")
    assert set(found.values()) == {YES}


def test_the_page_notes_what_is_not_so() -> None:
    one = Outcome("qwen3_moe", "exact", features=dict.fromkeys(TITLES, YES) | {"lab": "stops"})
    text = page([one, replace(one, model_type="olmoe", features=one.features | {"batches": "other logits"})])
    assert "| qwen3_moe | Qwen3 30B-A3B | exact | yes | yes | yes | 1 | yes |  |" in text
    assert "| olmoe | OLMoE 1B-7B | exact | yes | yes | 2 | 1 | yes |  |" in text
    assert text.endswith("## Notes\n\n1. stops\n2. other logits\n")


def test_the_page_notes_the_methods_that_do_otherwise() -> None:
    methods = {column: {"a": YES, "b": YES} for column in COLUMNS}
    methods["predictor"] = {
        "a": "needs",
        "b": "needs",
        "c": YES,
        f"a{FAST}": "needs",
        f"b{FAST}": YES,
        f"c{FAST}": "no",
    }
    text = page([Outcome("olmoe", "exact", features=dict.fromkeys(TITLES, YES), methods=methods)])
    cells = ["1" if column == "predictor" else YES for column in COLUMNS]
    assert f"\n| olmoe | {' | '.join(cells)} |\n" in text.partition("## Methods")[2]
    assert text.endswith("## Notes\n\n1. a, b: needs; c (fast): no\n")
    assert stated(text)[1] == ["olmoe"]
    assert "Not tried" not in text
    untried = Outcome("mixtral", "close", off=1e-7)
    text = page([untried, Outcome("olmoe", "exact", methods=methods), Outcome("doge", "refused")])
    assert "|\n\nNot tried for this page: mixtral.\n\n## Notes" in text


def test_the_page_has_every_method_and_no_failure() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert methods_head() in text
    assert FAILS not in text


@pytest.mark.parametrize("at", range(len(ATTENTION)), ids=ATTENTION)
def test_methods_with_each_kind_of_attention(at: int, tmp_path: Path) -> None:
    """Each method with one of them, and by turns in both arithmetics. Networks, which take long, are trained once."""
    path, columns = save(random_model(ATTENTION[at]), tmp_path), ["eviction", "layer_slots", "predictor", "lossy"]
    with loaded(path, {}, **HOW, arithmetic=("reference", "fast")[at % 2]) as engine:
        trial = Trial(engine, at, len(ATTENTION))
        if at == 0:
            columns += ["calibration", "plan"]
        else:
            measured = calibrate(engine, TEXTS, parts=set(PARTS) - {"estimator", "path"})
            engine.use_profile(measured.over(drawn_profile(engine)))
            assert trial.planned() == YES
        found = trial.columns([*columns, *(["drafts"] if at % 2 else [])])
    assert {words for cells in found.values() for words in cells.values()} == {YES}
    assert all(found.values())


@pytest.mark.long(60)
@pytest.mark.timeout(14400)
def test_the_page_is_what_is_found() -> None:
    text = PAGE.read_text(encoding="utf-8")
    version, _ = stated(text)
    if Version(transformers.__version__) < Version(version):
        pytest.skip(f"the page is of transformers {version}")

    def rows(of: str) -> set[str]:  # a tiny one that could not be made depends on what else is installed
        return {line for line in of.splitlines() if line.startswith("| ") and "| untried |" not in line}

    assert rows(page([generator.found(name, None) for name in moe_types()])) == rows(text)
