"""python -m tests.gguf_writer.page > docs/gguf.md: which GGUF architectures are read, and how exactly."""

import gguf

from core.importing.sources.gguf.architectures import ARCHITECTURES
from core.importing.sources.gguf.refused import OTHERWISE, REFUSED

EXPERTS = {gguf.MODEL_TENSOR[f"FFN_{part}_EXP"] for part in ("GATE", "UP", "DOWN", "GATE_UP")}
LISTED = sorted(name for arch, name in gguf.MODEL_ARCH_NAMES.items() if EXPERTS & set(gguf.MODEL_TENSORS[arch]))
"""Every architecture with experts that the installed gguf package knows."""
STATES = ("granitehybrid", "jamba", "kimi-linear", "nemotron_h_moe")
LOGARITHM = "close: A_log within 1e-6, as files hold -exp(A_log)"
CLOSE = dict.fromkeys(STATES, LOGARITHM) | dict.fromkeys(
    ("qwen35moe", "qwen3next"), f"{LOGARITHM}; norms within 6e-8, as they hold 1 + weight"
)
MODELS = {
    "afmoe": "Trinity Mini, Trinity Nano",
    "arctic": "Snowflake Arctic",
    "bailingmoe": "Ling Lite, Ling Plus",
    "bailingmoe2": "Ling 2.0, Ring 2.0, Sarvam 30B",
    "dbrx": "DBRX",
    "deci": "DeciLM, Llama Nemotron",
    "deepseek": "DeepSeekMoE 16B",
    "deepseek2": "DeepSeek-V2, V3, R1; Kimi K2; GLM-4.7-Flash; Mistral Large 3 in Mistral's format",
    "deepseek2-ocr": "DeepSeek-OCR",
    "deepseek32": "DeepSeek-V3.2",
    "dots1": "dots.llm1",
    "ernie4_5-moe": "ERNIE 4.5 21B-A3B",
    "exaone-moe": "K-EXAONE",
    "gemma4": "Gemma 4 26B-A4B",
    "glm-dsa": "GLM-5, 5.1, 5.2",
    "glm4moe": "GLM-4.5, 4.6, 4.7",
    "gpt-oss": "gpt-oss 20B, 120B",
    "granitehybrid": "Granite 4.0 H",
    "granitemoe": "Granite 3 MoE",
    "grok": "Grok-1, Grok-2",
    "grovemoe": "GroveMoE",
    "hunyuan-moe": "Hunyuan-A13B",
    "jamba": "Jamba",
    "kimi-linear": "Kimi Linear 48B-A3B",
    "lfm2moe": "LFM2 8B-A1B",
    "llada-moe": "LLaDA-MoE",
    "llama": "Mixtral",
    "llama-embed": "embedding models of Llama",
    "llama4": "Llama 4 Scout, Maverick",
    "mimo2": "MiMo-V2-Flash",
    "minicpm": "MiniCPM-MoE 8x2B",
    "minimax-m2": "MiniMax M2",
    "mistral3": "Ministral 3",
    "mistral4": "Mistral Small 4",
    "nemotron_h_moe": "Nemotron 3 Nano",
    "nomic-bert-moe": "Nomic Embed v2 MoE",
    "olmoe": "OLMoE",
    "phimoe": "Phi-3.5-MoE",
    "qwen2moe": "Qwen1.5-MoE, Qwen2 57B-A14B",
    "qwen35moe": "Qwen3.5 35B-A3B, 122B-A10B; Qwen3.6 35B-A3B",
    "qwen3moe": "Qwen3 30B-A3B, 235B-A22B",
    "qwen3next": "Qwen3-Next 80B-A3B, Qwen3-Coder-Next",
    "qwen3vlmoe": "Qwen3-VL 30B-A3B, Qwen3-Omni",
    "rnd1": "RND1",
    "smallthinker": "SmallThinker 21B-A3B",
    "step35": "Step-3.5-Flash",
}
UNROTATED = "a context of 1,048,576, which the converter writes for all models without rotary embedding"
NOTES = {
    "afmoe": "embeddings are scaled by the root of their width, as llama.cpp does for all",
    "bailingmoe2": "read as sarvam_moe, which computes the same",
    "gemma4": "text only",
    "glm-dsa": "which layers of GLM-5.2 select tokens: what the file says, or its weights, or llama.cpp",
    "granitehybrid": UNROTATED,
    "llama4": "text only; attention in chunks of 8,192 tokens, as llama.cpp has it",
    "mimo2": "the window is the file's: 128 in early files of V2-Flash, where transformers has 129",
    "mistral4": "text only; files that do not say how queries are scaled by position have Mistral Small 4's 0.1",
    "nemotron_h_moe": f"{UNROTATED}; chunk_size and time_step_min are transformers' defaults: files do not say them",
    "phimoe": "the rotary embedding's factor is Phi-3.5-MoE's: files have another in its place",
    "qwen35moe": "text only",
    "qwen3vlmoe": "text only, read as qwen3_moe, which computes the same for it",
}
HEAD = """\
# GGUF files

`python launch.py import path/to/model.gguf` reads a GGUF file, the parts of a split one, or a folder with one model,
and makes a pack of it. Besides the codes of the experts, which are kept bit for bit where one of Moestro's formats
holds them, everything that llama.cpp's converter did to a model is undone: the order of rows, parts that were joined or
taken apart, norms that were stored as 1 + weight.

**Exact**: every weight and every setting is the original model's, bit for bit before quantization. **Close**: by no
more than is said, because the converter rounded. **Refused**: with the reason that you would read. Each was tried with
a tiny random model, written as the converter writes it, whose logits were compared with transformers'. Whether
Moestro's own computing is exact is another question, which [architectures.md](architectures.md) answers by model type.

A file that has a setting or a tensor that would change the result, and that is not known, is refused, whatever its
architecture. Of layers that predict further tokens the first is imported as the model's head where it is GLM-4.x's or
DeepSeek-V3's and whole; others are left out, and so are vision parts (`mmproj`). Divisors of the
rotary embedding's frequencies (`rope_freqs`, as of Llama 3) are read from their tensor.

These are the architectures with experts that the gguf package knows. `python -m tests.gguf_writer.page > docs/gguf.md`
makes this page.

| architecture | models | result | note |
| --- | --- | --- | --- |
"""


def result(architecture: str) -> str:
    if architecture in ARCHITECTURES:
        return CLOSE.get(architecture, "exact")
    return f"refused: {REFUSED.get(architecture, OTHERWISE)}"


def page() -> str:
    rows = [
        f"| {name} | {MODELS[name]} | {result(name)} | {NOTES.get(name, '')} |"
        for name in sorted({*LISTED, *ARCHITECTURES})
    ]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(page(), end="")
