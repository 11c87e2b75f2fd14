"""GGUF architectures of Mixture-of-Experts models that cannot be read, and why."""

from collections.abc import Iterable

from core.errors import ModelError

NO_TYPE = "transformers has no model type for it"
VECTORS = "it makes vectors of texts instead of writing them"
FILLS_IN = f"{NO_TYPE}; it fills in masked words instead of writing one after the other"
REFUSED: dict[str, str] = {
    "arctic": NO_TYPE,
    "bailingmoe": NO_TYPE,
    "deci": NO_TYPE,
    "deepseek": NO_TYPE,
    "deepseek2-ocr": NO_TYPE,
    "grok": NO_TYPE,
    "grovemoe": NO_TYPE,
    "llada-moe": FILLS_IN,
    "llama-embed": VECTORS,
    "minicpm": NO_TYPE,
    "mistral3": "the model type that transformers has for it, ministral3, has no experts",
    "nomic-bert-moe": VECTORS,
    "rnd1": FILLS_IN,
    "smallthinker": NO_TYPE,
    "step35": (
        "transformers has its text model only as a part of Step 3.7, and its files do not say how the rotary embedding "
        "is stretched for the half of a head that is rotated"
    ),
}
OTHERWISE = "Moestro does not read it yet"


def refusal(architecture: str, supported: Iterable[str]) -> ModelError:
    """The error for an architecture that is not among the supported ones: why, and what to take instead."""
    reason = REFUSED.get(architecture)
    instead = (
        "Import the model's safetensors version instead"
        if reason is None
        else f"Choose a model of another architecture: {', '.join(supported)}"
    )
    return ModelError(
        f"Moestro cannot read GGUF files of the architecture {architecture!r}: {reason or OTHERWISE}. {instead}."
    )
