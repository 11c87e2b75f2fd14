"""The seam on every architecture, against transformers' own full load, from several threads."""

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from core.errors import ModelError
from core.hf.cached_pass import CACHE
from core.hf.checkpoint import CheckpointReader
from core.hf.discover import ExpertsSite, find_experts, read_router
from core.hf.hooks import install, probe_router
from core.hf.outline import outline
from core.hf.skeleton import load_skeleton, meta_skeleton
from tests.checkpoints import ARCHITECTURES, EXTRA, make_checkpoint
from tests.conftest import Checkpoint
from tests.selection import layered


class Case(NamedTuple):
    """One architecture: its checkpoint, transformers' full model, our skeleton and meta model."""

    arch: str
    path: Path
    full: Any
    skeleton: Any
    meta: Any


QUICK = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "minimax_m2")


@pytest.fixture(scope="module", params=layered([*ARCHITECTURES, *EXTRA], quick=lambda arch: arch in QUICK))
def case(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Case:
    path = checkpoint(request.param)
    full = AutoModelForCausalLM.from_pretrained(path, dtype="auto", experts_implementation="grouped_mm").eval()
    return Case(request.param, path, full, load_skeleton(path), meta_skeleton(path))


def stacked(model: Any, site: ExpertsSite, part: str) -> torch.Tensor:
    tensor: torch.Tensor = model.get_submodule(site.name).get_parameter(part)
    return tensor


def held_bytes(model: Any) -> int:
    return sum(t.numel() * t.itemsize for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())


def test_discovery(case: Case) -> None:
    sites = find_experts(case.full)
    assert len(sites) == 3 - (case.arch in ("glm4_moe", "deepseek_v2", "deepseek_v3")), "their first layer is dense"
    assert [s.index for s in sites] == list(range(len(sites)))
    for site in sites:
        assert (site.num_experts, site.top_k) == (8, 2 if case.arch in ("mixtral", "phimoe") else 4)
        assert site.has_bias == site.is_transposed == (not site.is_concatenated) == (case.arch == "gpt_oss")
        assert set(site.parts) == {"gate_up_proj", "down_proj"} | (
            {"gate_up_proj_bias", "down_proj_bias"} if site.has_bias else set()
        )
        inner = site.parts["down_proj"].shape[0 if site.is_transposed else 1]
        assert site.parts["gate_up_proj"].shape == ((64, 2 * inner) if site.is_transposed else (2 * inner, 64))


@pytest.mark.parametrize("model", ["skeleton", "meta"])
def test_a_skeleton_and_a_meta_model_have_the_same_sites(case: Case, model: str) -> None:
    def plain(site: ExpertsSite) -> tuple[object, ...]:
        return (
            site.name,
            site.num_experts,
            site.top_k,
            site.parts,
            site.has_gate,
            site.has_bias,
            site.is_transposed,
            site.is_concatenated,
            site.has_post_expert_norm,
            type(site.router),
        )

    assert [plain(s) for s in find_experts(getattr(case, model))] == [plain(s) for s in find_experts(case.full)]


def test_skeleton_has_everything_but_experts(case: Case) -> None:
    full, ours = case.full.state_dict(), case.skeleton.state_dict()
    experts = {f"{s.name}.{part}" for s in find_experts(case.full) for part in s.parts}
    assert set(full) - set(ours) == experts
    assert all(torch.equal(tensor, full[name]) for name, tensor in ours.items())
    assert not case.skeleton.training
    assert type(case.skeleton) is type(case.full)
    buffers = dict(case.full.named_buffers())
    assert all(torch.equal(b, buffers[n]) for n, b in case.skeleton.named_buffers())


@pytest.mark.parametrize("model", ["skeleton", "meta"])
def test_reader_equals_a_plain_load(case: Case, model: str) -> None:
    with CheckpointReader(getattr(case, model), str(case.path)) as reader:
        for site in reader.sites:
            for expert in range(site.num_experts):
                parts = reader.read(site.index, expert)
                assert list(parts) == list(site.parts)
                for part, tensor in parts.items():
                    assert torch.equal(tensor, stacked(case.full, site, part)[expert]), (site.name, part, expert)
        with pytest.raises(IndexError):
            reader.read(0, 8)


@pytest.mark.parametrize("dtype", layered([torch.bfloat16, torch.float16], quick=lambda dtype: dtype == torch.bfloat16))
def test_another_dtype_is_what_a_plain_load_makes_of_it(case: Case, dtype: torch.dtype) -> None:
    full = AutoModelForCausalLM.from_pretrained(case.path, dtype=dtype).state_dict()
    ours = load_skeleton(case.path, dtype)
    assert all(t.dtype == full[n].dtype and torch.equal(t, full[n]) for n, t in ours.state_dict().items())
    shape = outline(meta_skeleton(case.path, dtype))
    assert shape.dense_bytes == held_bytes(ours)
    assert shape.sites[0].parts == find_experts(ours)[0].parts


def test_outline_counts_what_is_loaded(case: Case) -> None:
    shape = outline(case.meta)
    assert shape.dense_bytes == held_bytes(case.skeleton)
    assert (shape.hidden, shape.vocab, shape.context_limit) == (64, 256, 512)
    cache = case.full(torch.ones(1, 20, dtype=torch.long), use_cache=True)[CACHE]
    kept = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    assert shape.kv_bytes(20) == sum(t.numel() * t.itemsize for t in kept)


def test_outline_knows_sliding_windows(checkpoint: Checkpoint) -> None:
    shape = outline(meta_skeleton(checkpoint("gpt_oss")))
    assert {layer.window for layer in shape.kv} == {128, None}  # 32, and what passes by address need
    assert shape.kv_bytes(256) < 2 * shape.kv_bytes(128)


def test_layers_that_are_computed_several_times_for_a_token_are_refused(checkpoint: Checkpoint) -> None:
    meta = meta_skeleton(checkpoint("qwen3_moe"))
    block: Any = find_experts(meta)[1].parent
    once = block.forward
    block.forward = lambda hidden: once(once(hidden))
    with pytest.raises(ModelError, match="some of its layers several times for each token"):
        outline(meta)
    block.forward = once
    assert outline(meta).kv

    def more(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        layers = kwargs[CACHE].layers
        layers.append(copy.deepcopy(layers[0]))

    meta.register_forward_pre_hook(more, with_kwargs=True)
    with pytest.raises(ModelError, match="some of its layers several times for each token"):
        outline(meta)


@torch.no_grad()
def test_install_reproduces_the_logits_and_uninstall_leaves_no_trace(case: Case) -> None:
    ids = torch.arange(3, 27).view(2, 12)
    before = case.full(ids).logits
    modules = [*case.full.modules()]
    state = [dict(vars(m)) for m in modules]
    hooks = [len(m._forward_hooks) for m in modules]
    implementation = case.full.get_experts_implementation()
    sites = find_experts(case.full)
    seen: list[tuple[int, tuple[Any, ...], tuple[torch.Tensor, ...]]] = []

    def eager(site: ExpertsSite, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](site.module, hidden, chosen, weights)
        return result

    installed = install(case.full, sites, eager, lambda layer, args, kwargs, out: seen.append((layer, args, out)))
    with pytest.raises(ModelError, match="already in use"):
        install(case.full, sites, eager)
    assert torch.equal(case.full(ids).logits, before)
    assert [layer for layer, _, _ in seen] == list(range(len(sites)))
    installed.uninstall()
    installed.uninstall()
    assert torch.equal(case.full(ids).logits, before)
    assert len(seen) == len(sites)
    assert case.full.get_experts_implementation() == implementation
    assert [len(m._forward_hooks) for m in modules] == hooks
    assert [set(vars(m)) for m in modules] == [set(s) for s in state]
    with install(case.full, sites, eager):
        assert torch.equal(case.full(ids).logits, before)


@torch.no_grad()
def test_probing_a_router_on_its_own_input_finds_its_choice(case: Case) -> None:
    sites = find_experts(case.full)
    calls: dict[int, tuple[Any, dict[str, Any], Any]] = {}

    def watch(layer: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[torch.Tensor, ...]) -> None:
        calls[layer] = (args, kwargs, output)

    with install(case.full, sites, lambda site, hidden, ids, weights: hidden, watch):
        case.full(torch.arange(3, 27).view(2, 12))
        recorded = dict(calls)
        for site in sites:
            args, kwargs, output = recorded[site.index]
            scores = probe_router(site, args, kwargs)
            assert scores.shape == (24, 8)
            assert scores.dtype == torch.float32
            assert (scores.sum(-1) > 0.999).all()
            chosen = read_router(site, output).ids.sort(-1).values
            assert torch.equal(scores.topk(site.top_k).indices.sort(-1).values, chosen)
            other = probe_router(site, recorded[0][0], recorded[0][1])  # a lower layer's input: another router's view
            assert other.shape == scores.shape
        assert all(calls[layer] is call for layer, call in recorded.items())  # probing fired no hook


@torch.no_grad()
def test_a_skeleton_without_experts_says_so(case: Case) -> None:
    with pytest.raises(ModelError, match="without its experts"):
        case.skeleton(torch.arange(3, 9)[None])
    with pytest.raises(ModelError, match="without its experts"):
        case.skeleton.save_pretrained(case.path / "nowhere")
    assert not (case.path / "nowhere").exists()


@pytest.mark.long(0.1)
def test_looking_at_models_in_parallel_mixes_nothing_up(tmp_path: Path) -> None:
    """transformers sets the number type of new tensors for the whole process while it builds a model."""
    dtypes = (torch.float32, torch.bfloat16)
    paths = [make_checkpoint("mixtral", tmp_path / str(dtype), dtype=dtype) for dtype in dtypes]

    def look(turn: int) -> None:
        path, dtype = paths[turn % 2], dtypes[turn % 2]
        meta = meta_skeleton(path) if turn % 5 else load_skeleton(path)
        assert {p.dtype for p in meta.parameters()} == {dtype}
        if turn % 5:
            assert {part.dtype for site in outline(meta).sites for part in site.parts.values()} == {dtype}

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(look, range(40)))
    assert torch.get_default_dtype() == torch.float32
