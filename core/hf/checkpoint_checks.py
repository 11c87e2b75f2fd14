"""Checks that a checkpoint's tensors are those of the model that its config.json describes.

Each raises ModelError, which says what to do.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import torch

from core.errors import ModelError

NUMBERED = re.compile(r"(?P<before>(?:[^.]+\.)*?)(?P<number>\d{1,9})(?P<after>\..*)")
"""A tensor's name around the first number in it, which is that of its layer."""
AHEAD = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head|nextn|mtp)\b")
"""What only layers that predict further tokens have."""
COUNTED = re.compile(r"(\D*)(\d+)")
"""The part of a name that tells one expert from another: "3", or "expert_3"."""
CODED = re.compile(
    r"(?P<of>.+)[._](scales?|scale_inv|scale_\d+|global_scale|biases|q?zeros|zero_points?|(nested_)?absmax|"
    r"(nested_)?quant_map|SCB|codebooks?|g_idx|quant_state\..+)"
)
"""Names of what a quantized weight is computed from besides its codes, around the weight's or its module's name."""
REMEDY = "Download config.json again, or use the original model."
PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_shape(key: str, shape: Sequence[int], target: str, wanted: tuple[int, ...] | None) -> None:
    """`shape` of the tensor `key`, against what the model's parameter `target` has; None: not known."""
    if wanted is not None and tuple(shape) != wanted:
        raise ModelError(
            f"The checkpoint holds {key!r} in the shape {tuple(shape)}, but by config.json {target!r} has "
            f"the shape {wanted}. They are not of the same model: download it again."
        )


def check_plain(key: str, dtype: torch.dtype) -> None:
    """A weight that no quantization explains is one of numbers."""
    if dtype not in PLAIN:
        raise ModelError(
            f"The checkpoint holds {key!r} as {str(dtype).removeprefix('torch.')}, "
            f"codes for which its settings name no quantization. {REMEDY}"
        )


def check_coded(unused: Iterable[str], read: set[str]) -> None:
    """No tensor that nothing reads says how a weight that is `read` was quantized."""
    for key in unused:
        if (found := CODED.fullmatch(key)) is None:
            continue
        weight = next((one for one in (found["of"], f"{found['of']}.weight") if one in read), None)
        if weight is not None:
            raise ModelError(
                f"The checkpoint holds {key!r}, so {weight!r} is stored as codes, for which its settings name no "
                f"quantization. {REMEDY}"
            )


def check_layers(unused: Mapping[str, str], known: Mapping[str, object]) -> None:
    """The checkpoint has no layers that config.json omits, except multi-token prediction layers, which transformers'
    models do not have. `unused`: its tensors that the model does not have -> the parameters that they would be."""
    last: dict[str, int] = {}
    for name in known:
        if at := NUMBERED.fullmatch(name):
            last[at["before"]] = max(int(at["number"]), last.get(at["before"], 0))
    ahead = {(at["before"], at["number"]) for key in unused if AHEAD.search(key) and (at := NUMBERED.fullmatch(key))}
    for key, name in unused.items():
        at = NUMBERED.fullmatch(name)
        if at is None or int(at["number"]) <= last.get(at["before"], int(at["number"])):
            continue
        alike = any(f"{at['before']}{n}{at['after']}" in known for n in range(last[at["before"]] + 1))
        stored = NUMBERED.fullmatch(key)
        if alike and (stored is None or (stored["before"], stored["number"]) not in ahead):
            raise ModelError(
                f"The checkpoint holds weights of layer {at['number']} ({key!r}), but by config.json "
                f"the model ends with layer {last[at['before']]}. Download config.json again."
            )


def check_experts(keys: Sequence[str], experts: int, shapes: Sequence[tuple[int, ...]]) -> None:
    """The tensors of one kind of all experts count from 0 on, and those of the first `experts` are of one shape."""
    if not _counted(keys):
        raise ModelError(
            f"The experts' weights from {keys[0]!r} to {keys[-1]!r} are not numbered one by one from 0 on. "
            "Download the model again."
        )
    odd = next((at for at, shape in enumerate(shapes[:experts]) if shape != shapes[0]), None)
    if odd is not None:
        raise ModelError(
            f"The experts' weights {keys[0]!r} and {keys[odd]!r} are of different shapes, {shapes[0]} and "
            f"{shapes[odd]}. Download the model again."
        )


def _counted(keys: Sequence[str]) -> bool:
    """Whether the names of experts' tensors differ in one part alone, which counts from 0 on."""
    parts = [key.split(".") for key in keys]
    if len(keys) == 1 or len({len(part) for part in parts}) > 1:
        return len(keys) == 1
    differing = [column for column in zip(*parts, strict=True) if len(set(column)) > 1]
    found = [COUNTED.fullmatch(part) for column in differing for part in column]
    counts = [(one[1], int(one[2])) for one in found if one is not None]
    return counts == [(counts[0][0], at) for at in range(len(keys))] if counts else False
