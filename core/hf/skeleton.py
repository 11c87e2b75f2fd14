"""Loads a model without its experts: attention, norms, embeddings, routers and shared experts only.

The experts' parameters are deleted from transformers' empty (meta) model just before it reads the checkpoint, so expert
bytes never enter memory. The required override is on a subclass that exists only during the load.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from core.errors import ModelError
from core.hf.adapters import adapt
from core.hf.cached_pass import with_chosen_rows
from core.hf.discover import find_experts, strip
from core.hf.expert_attributes import CONVERSIONS
from core.hf.files import ModelFiles, ModelPath, check_model
from core.hf.head import attach, detach, head_of, stored_names
from core.hf.hooks import NAME, register
from core.hf.quantized_linear import QuantizedLinear
from core.hf.text_only import keep_text, text_class
from core.hf.text_to_text import as_causal
from core.system.text_config import text_config
from core.system.wording import reason

BUILDING = threading.Lock()  # transformers builds models under process-wide dtype and flags


def load_skeleton(
    path: ModelPath,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    *,
    head: bool = False,
    dense: bool = False,
) -> Any:
    """The model in eval mode on `device`, its dense weights in `dtype` (None: the checkpoint's), without experts. With
    `head`, `core.hf.head.head_of` has the checkpoint's. `dense`: it is one that has no experts.

    Its forward raises until `hooks.install` has bound the experts. `save_pretrained` is blocked: it would write a model
    without experts. Raises ModelError for every model that cannot be loaded, keeping nothing in memory.
    """
    files = check_model(path)
    config, kind = _architecture(files)
    register()
    built = False

    class Skeleton(kind):  # type: ignore[misc, valid-type]
        @staticmethod
        def _load_pretrained_model(model: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal built
            built = True
            left_out = keep_text(model)
            adapt(model)
            if head:
                attach(model)
            sites = [] if dense else find_experts(model)  # raises for a model that is not MoE, before anything is read
            conversions = [one for site in sites[:1] for one in getattr(site.module, CONVERSIONS, ())]
            ours = (name for one in conversions for name in one.source_patterns)
            further = rf"model\.layers\.{getattr(model.config, 'num_hidden_layers', -1)}\."  # of a head
            others = r"experts?\.", further, *ours
            unread = {r"."} if left_out else {*model._keys_to_ignore_on_load_unexpected, *others}
            model._keys_to_ignore_on_load_unexpected = unread
            strip(model)
            return kind._load_pretrained_model(model, *args, **kwargs)

    for name in ("__name__", "__qualname__", "__module__"):  # transformers uses these for lookups
        setattr(Skeleton, name, getattr(kind, name))
    try:
        with BUILDING, _no_progress_bar():
            model, info = Skeleton.from_pretrained(
                str(files.path),
                config=config,
                dtype=dtype or "auto",
                experts_implementation=NAME,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                key_mapping=stored_names(text_config(config)) if head else None,
            )
    except ModelError:
        raise
    except Exception as error:  # transformers' and the model's own code, on untrusted files
        if not built:
            raise _unbuildable(error) from error
        raise ModelError(
            f"The model in {files.path} could not be loaded: {reason(error)}. Download it again."
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"The checkpoint in {files.path} lacks {len(missing)} weights that the model needs "
            f"({', '.join(missing[:3])}). Download it again."
        )
    model.__class__ = kind
    model.save_pretrained = _blocked
    as_causal(model)
    with_chosen_rows(model)
    model.to(device).eval()
    if head:
        detach(model)
    return model


def release_weights(model: torch.nn.Module) -> None:
    """Free the memory of everything that a model computes with, even if a part of it is still referenced."""
    if (head := head_of(model)) is not None:
        release_weights(head.layer)
    for parameter in model.parameters():
        parameter.data = parameter.data.new_empty(0)
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.release()
        for values in (module._buffers, vars(module)):
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    values[name] = value.new_empty(0)


def meta_skeleton(path: ModelPath, dtype: torch.dtype | None = None, *, head: bool = False) -> Any:
    """The whole model, experts included, on the meta device: shapes and dtypes without storage. With `head`, a head is
    attached to it. Raises ModelError."""
    files = check_model(path)
    config, kind = _architecture(files)
    model = _on_meta(config, kind, dtype)
    if head:
        attach(model)
    return model


def _on_meta(config: Any, kind: Any, dtype: torch.dtype | None) -> Any:
    register()
    number = dtype or config.dtype or torch.float32
    try:
        with BUILDING, torch.device("meta"):
            model = kind._from_config(config, dtype=number, experts_implementation=NAME).eval()
            keep_text(model)
            adapt(model)
            as_causal(model)
            with_chosen_rows(model)
            return model
    except ModelError:
        raise
    except Exception as error:  # inconsistent sizes fail anywhere in the model's own code
        raise _unbuildable(error) from error


def _unbuildable(error: Exception) -> ModelError:
    return ModelError(f"config.json describes a model that cannot be built: {reason(error)}. Download it again.")


def _architecture(files: ModelFiles) -> tuple[Any, Any]:
    """(config, model class). Raises ModelError when transformers does not know the model, or only by remote code."""
    name = files.config["model_type"][:100]
    if name not in CONFIG_MAPPING:
        if files.config.get("auto_map"):
            raise ModelError(
                f"The model in {files.path} ({name!r}) runs only with Python code that comes with it "
                "(auto_map in config.json). Moestro never runs such code. Choose another model."
            )
        raise ModelError(
            f"The installed transformers does not know the model type {name!r}. Update transformers, or "
            "choose another model."
        )
    try:
        config = AutoConfig.from_pretrained(str(files.path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers' validation of an untrusted file can raise anything
        raise ModelError(f"{files.path / 'config.json'} cannot be used: {reason(error)}. Download it again.") from error
    found = text_class(config)
    if found is None and config.is_encoder_decoder:
        raise ModelError(
            f"{name!r} writes one text for another with an encoder of its own, which Moestro runs for Switch "
            "Transformers only. Choose another model."
        )
    if found is None:
        raise ModelError(
            f"{name!r} is not a text-generating model that transformers can load as a causal language "
            "model. Choose another model."
        )
    return found


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Suppress transformers' progress bar: the caller reports progress."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _blocked(*args: object, **kwargs: object) -> NoReturn:
    raise ModelError(
        "This model was loaded without its experts, so saving it would write a broken model. Copy the "
        "original checkpoint instead."
    )
