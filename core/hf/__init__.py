"""Interface to transformers: finds the experts, loads everything else, reads experts from disk, hooks the computation
in.

All code that depends on transformers' internals is in this package. Works with transformers >= 5.17, < 5.25.
"""

from core.hf.checkpoint import CheckpointReader
from core.hf.discover import ExpertsSite, RouterOutput, find_experts, read_router
from core.hf.files import check_model
from core.hf.hooks import Installed, install, probe_router
from core.hf.outline import KvLayer, Outline, outline
from core.hf.quantized_linear import round_linears, rounded_bytes
from core.hf.skeleton import load_skeleton, meta_skeleton, release_weights

__all__ = [
    "CheckpointReader",
    "ExpertsSite",
    "Installed",
    "KvLayer",
    "Outline",
    "RouterOutput",
    "check_model",
    "find_experts",
    "install",
    "load_skeleton",
    "meta_skeleton",
    "outline",
    "probe_router",
    "read_router",
    "release_weights",
    "round_linears",
    "rounded_bytes",
]
