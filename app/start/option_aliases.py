"""Options by the names that llama.cpp, Ollama, vLLM and transformers give them, and what was probably meant.

Standard library only: read before anything is installed.
"""

import ipaddress
from collections.abc import Collection, Sequence
from difflib import get_close_matches

SAME: dict[str, tuple[str, ...]] = {
    "--model": ("-m", "--model-path", "--model-id", "--model-name-or-path"),
    "--prompt": ("-p",),
    "--max-new-tokens": ("-n", "--predict", "--n-predict", "--num-predict", "--max-tokens", "--max-completion-tokens"),
    "--temperature": ("--temp",),
    "--repetition-penalty": ("--repeat-penalty",),
    "--seed": ("-s",),
    "--context": ("-c", "--ctx-size", "--n-ctx", "--num-ctx", "--context-length", "--max-model-len"),
    "--threads": ("-t", "--n-threads", "--num-threads", "--num-thread"),
    "--dtype": ("--torch-dtype",),
    "--address": ("--listen", "--bind"),
    "--token": ("--api-key",),
    "--in": ("-i", "--input-file"),
    "--out": ("-o", "--output", "--output-file"),
}
"""Ours, and the others' words for the same."""

_BUDGET = (
    "Single experts are cached on the GPU, not whole layers: --budget says how much memory they may take, as a share "
    "of all experts (--budget 50%) or in bytes of the whole model (--budget 6.5GB)."
)
_HOST = "--host says how much of the experts is kept in host memory: all, none, or a size; the others stay on disk."
_FORMAT = "--format says in how many bits experts are kept, for example --format int4-g64."
_ONE_GPU = "Moestro computes on one GPU, the first that torch sees; CUDA_VISIBLE_DEVICES chooses another."
INSTEAD: dict[str, str] = {
    **dict.fromkeys(("-ngl", "--n-gpu-layers", "--gpu-layers", "--num-gpu"), _BUDGET),
    **dict.fromkeys(("-ncmoe", "--n-cpu-moe", "-cmoe", "--cpu-moe", "-ot", "--override-tensor"), _BUDGET),
    **dict.fromkeys(("--gpu-memory-utilization", "--cpu-offload-gb", "--max-memory"), _BUDGET),
    **dict.fromkeys(("--mlock", "--mmap", "--no-mmap", "--swap-space"), _HOST),
    **dict.fromkeys(("-q", "--quantization", "--quantize", "--load-in-4bit", "--load-in-8bit"), _FORMAT),
    **dict.fromkeys(("-tp", "--tensor-parallel-size", "-sm", "--split-mode", "-ts", "--tensor-split"), _ONE_GPU),
    **dict.fromkeys(("-mg", "--main-gpu"), _ONE_GPU),
    **dict.fromkeys(
        ("-hf", "-hfr", "--hf-repo"),
        "Import the model first, with the command `import org/name --download`; --model opens the pack that it writes.",
    ),
    "--trust-remote-code": "Moestro runs no code that comes with a model. Leave it out.",
}
"""Options without a like here, and what takes their place."""

COMMANDS = {"run": "chat", "generate": "chat", "serve": "ui", "server": "ui", "list": "models", "ls": "models"}
COMMANDS |= {"pull": "import", "convert": "import", "quantize": "import", "benchmark": "bench", "perplexity": "eval"}
"""The others' commands, and which of ours was probably meant: their further words differ too much to be taken."""


class UnknownOptionError(ValueError):
    """The command has no such option; the text says what to do."""


def same(known: Collection[str]) -> dict[str, str]:
    """The others' words that a command with these options takes -> its own option."""
    return {word: ours for ours, words in SAME.items() if ours in known for word in words if word not in known}


def translated(words: Sequence[str], known: Collection[str]) -> list[str]:
    """The words of a command line with the command's own options in place of the others'. Raises UnknownOptionError."""
    found, others = list[str](), same(known)
    for at, word in enumerate(words):
        if word == "--":
            return [*found, *words[at:]]
        name, equals, value = word.partition("=")
        if not _is_option(word):
            found.append(word)
            continue
        if name not in known:
            ours = others.get(name) or others.get(name.replace("_", "-")) or name.replace("_", "-")
            if ours not in known:
                raise UnknownOptionError(INSTEAD.get(ours) or _unknown(name, [*known, *others], others))
            name = ours
        if (
            name == "--host"
            and "--address" in known
            and _is_address(value if equals else "".join(words[at + 1 : at + 2]))
        ):
            name = "--address"
        found.append(f"{name}{equals}{value}")
    return found


def described(known: Collection[str]) -> str:
    """What of the others' words such a command takes, as a sentence; "" = none."""
    others = same(known)
    parts = [
        f"{', '.join(w for w in others if others[w] == ours)} for {ours}" for ours in dict.fromkeys(others.values())
    ]
    parts += ["--host ADDRESS for --address"] if {"--host", "--address"} <= {*known} else []
    return f"Other programs' words are taken as well: {'; '.join(parts)}." if parts else ""


def command_meant(word: str, known: Collection[str]) -> str:
    """The command that was probably meant by an unknown word; "" = none comes near."""
    return COMMANDS.get(word) or next(iter(get_close_matches(word, known, 1)), "")


def _unknown(name: str, words: Sequence[str], others: dict[str, str]) -> str:
    nearest = next(iter(get_close_matches(name, words, 1)), "")
    return f"There is no option {name}." + (f" Did you mean {others.get(nearest, nearest)}?" if nearest else "")


def _is_option(word: str) -> bool:
    """As argparse sees it: a dash, and neither a negative number nor a text with spaces."""
    if not word.startswith("-") or word == "-" or " " in word.partition("=")[0]:
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def _is_address(text: str) -> bool:
    try:
        return text == "localhost" or bool(ipaddress.ip_address(text))
    except ValueError:
        return False
