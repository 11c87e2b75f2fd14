"""Try one architecture: a tiny random checkpoint of it, run here and by transformers itself, logits compared."""

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from core.engine import Engine
from core.errors import ModelError
from core.hf.cached_pass import cached_pass
from core.hf.text_only import keep_text
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import Ids
from tests.architectures.features import PROMPTS, try_features
from tests.architectures.methods import try_methods
from tests.architectures.tiny import VARIANTS, changed, tiny, with_choice
from tests.loaded import loaded
from tests.switch import generated
from tests.tiny_tokenizer import save_tokenizer

PROMPT = torch.randint(3, 250, (24,), generator=torch.Generator().manual_seed(1)).tolist()
CHUNKS = (16, 8)
AUTOS = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM)
TURNS: dict[str, list[object]] = {
    "budget": ["all", "50%", "62.5%", "75%"],
    "eviction": ["lru", "lfu", "random", "none"],
    "predictor": ["none", "gate"],
    "scope": ["layer", "global"],
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found. `off` = the largest difference of logits, as a share of the largest logit; 0.0 = none at all.
    `unless`: what other models of the type may have, with which they are refused; "" = nothing is known."""

    model_type: str
    verdict: Literal["exact", "close", "refused", "untried"]
    why: str = ""
    off: float = 0.0
    left_out: tuple[str, ...] = ()
    unless: str = ""
    features: dict[str, str] = field(default_factory=dict)  # by column of the page; {} where they were not tried
    methods: dict[str, dict[str, str]] = field(default_factory=dict)  # by column of the second table, and by method


def known(model_type: str) -> bool:
    """Whether the installed transformers has it."""
    return model_type in CONFIG_MAPPING


def writers(config: Any) -> list[Any]:
    """transformers' auto classes that would write text with a model of this config, its text part alone first."""
    return [auto for auto in AUTOS if type(config) in auto._model_mapping and _fits(auto, config)]


def _fits(auto: Any, config: Any) -> bool:
    return bool(config.is_encoder_decoder) == (auto is AutoModelForSeq2SeqLM)


def random_model(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny random model of a type, whole. Raises what transformers raises for what it cannot build."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**tiny(model_type), **changes})
    autos = writers(config)
    if not autos:
        raise ModelError("transformers has no class that writes text with it alone")
    model = autos[-1].from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "bias" in name and tensor.dim() == 1 and tensor.is_floating_point():
                tensor.normal_(0, 0.05)
    return model


def save(model: Any, directory: Path) -> Path:
    """Write a checkpoint with a tokenizer."""
    model.save_pretrained(directory, max_shard_size="150KB")
    return save_tokenizer(directory)


@torch.inference_mode()
def run(model: Any, cache: Any, steps: int, before: Callable[[int], None] = lambda step: None) -> torch.Tensor:
    """Logits [len(PROMPT) + steps, V] of the prompt in two chunks and of greedy tokens."""
    first, ids = torch.tensor([PROMPT]).split(list(CHUNKS), dim=1)
    logits = [cached_pass(model, first, cache).logits[0].clone()]
    for step in range(steps + 1):
        before(step)
        out = cached_pass(model, ids, cache).logits[0]
        logits.append(out.clone())
        ids = out[-1:].argmax(-1)[None]
    return torch.cat(logits)


def written(engine: Engine, steps: int, before: Callable[[int], None]) -> torch.Tensor:
    """Logits [steps, V] of the tokens that a text-to-text model writes greedily for the prompt."""
    logits: list[torch.Tensor] = []

    def draw(ids: list[int], row: torch.Tensor) -> int:
        logits.append(row[0].clone())
        before(len(logits))
        return int(row[0].argmax())

    for _ in engine.generate(Ids(PROMPT), Sampling(max_new_tokens=steps), draw=draw):
        pass
    return torch.stack(logits)


def transformers_own(path: Path, dtype: torch.dtype) -> Any:
    """transformers' model of a checkpoint, with grouped_mm where it has that."""
    model = writers(AutoConfig.from_pretrained(path))[0].from_pretrained(path, dtype=dtype).eval()
    try:
        model.set_experts_implementation("grouped_mm")
    except (ValueError, AttributeError):
        pass  # experts without transformers' interface: there is one way only
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


ROUTERS = {"zaya": 16.0}  # weights of routers that are deep, and would drown in their biases
RUNS = ("exact", "close")  # verdicts of types whose features and methods are tried


def try_all(model_type: str) -> Outcome:
    """As `try_type`, and what else an engine does with a model that runs."""
    outcome = try_type(model_type)
    if outcome.verdict not in RUNS:
        return outcome
    with tempfile.TemporaryDirectory() as folder:
        path = save(random_model(model_type), Path(folder))
        how = {"dtype": "float32", "arithmetic": "reference", "context": 128, "sequences": len(PROMPTS)}
        with loaded(path, {"budget": "50%"}, **how) as engine:
            return replace(outcome, features=try_features(engine, transformers_own(path, torch.float32)))


def methods_of(model_type: str) -> dict[str, dict[str, str]]:
    """What `try_methods` finds of a model that runs."""
    with tempfile.TemporaryDirectory() as folder:
        return try_methods(str(save(choosing_model(model_type), Path(folder))))


def choosing_model(model_type: str) -> Any:
    """As `random_model`, with more than a group for tokens to choose from, and routers that do not choose the same for
    all of them."""
    model = random_model(model_type, **with_choice(tiny(model_type)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".gate." in name and parameter.dim() >= 2:
                parameter.mul_(ROUTERS.get(model_type, 1.0))
    return model


def try_type(model_type: str, steps: int = 12, dtype: torch.dtype = torch.float32) -> Outcome:
    """Load a tiny checkpoint of it with a budget of one half, answer while settings change, and compare; the same for
    its variant, where it has one.

    Raises AssertionError where the budget was not kept.
    """
    outcome = _tried(model_type, tiny(model_type), steps, dtype)
    if model_type not in VARIANTS:
        return outcome
    name, changes = VARIANTS[model_type]
    other = _tried(model_type, changed(model_type, changes), steps, dtype)
    return replace(outcome, unless=name) if other.verdict == "refused" else max(outcome, other, key=lambda one: one.off)


def _tried(model_type: str, fields: dict[str, Any], steps: int, dtype: torch.dtype) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = save(random_model(model_type, **fields), Path(folder))
        except ModelError as error:
            return Outcome(model_type, "refused", str(error))
        except Exception as error:  # whatever a config that is not right for this model makes of transformers' code
            return Outcome(model_type, "untried", f"no tiny one could be made: {type(error).__name__}")
        name = str(dtype).removeprefix("torch.")
        try:
            spec = LoadSpec.checked(str(path), Settings({"budget": "50%"}), dtype=name, arithmetic="reference")
            engine = Engine.load(spec)
        except ModelError as error:
            return Outcome(model_type, "refused", str(error))
        try:
            chance = random.Random(0)

            def turn(step: int) -> None:
                engine.change({knob: chance.choice(choices) for knob, choices in TURNS.items()})
                engine.expert_cache.check_integrity()
                assert engine.memory().used <= engine.memory().budget

            texts = engine.text_to_text
            got = written(engine, steps, turn) if texts else run(engine.model, engine.fresh_cache(), steps, turn)
            left_out = keep_text(engine.model)
        finally:
            engine.unload()
        plain = transformers_own(path, dtype)
        want = generated(plain, PROMPT, steps)[1] if texts else run(plain, DynamicCache(config=plain.config), steps)
        off = ((got - want).abs().max() / want.abs().max()).item()
        return Outcome(model_type, "close" if off else "exact", "", off, left_out)
