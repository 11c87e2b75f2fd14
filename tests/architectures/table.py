"""The table of docs/architectures.md: every type, what was found, and a model that people have of it."""

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

import transformers

from core.engine.batch_trial import TOGETHER
from core.settings.config import general
from core.settings.registry import variants
from tests.architectures.features import CLOSE, PIECES, TITLES, YES
from tests.architectures.methods import COLUMNS, FAST, MODES, TRIED, lossy_changes, named
from tests.architectures.trial import RUNS, Outcome

EXAMPLES = {
    "afmoe": "Trinity Mini",
    "aria": "Aria",
    "bailing_hybrid": "Ling 2.5",
    "cohere2_moe": "Command A MoE",
    "dbrx": "DBRX Instruct",
    "deepseek_v2": "DeepSeek-V2-Lite",
    "deepseek_v3": "DeepSeek-V3, Kimi K2",
    "deepseek_v32": "DeepSeek-V3.2",
    "deepseek_v4": "DeepSeek-V4",
    "doge": "Doge 120M MoE",
    "dots1": "dots.llm1",
    "ernie4_5_moe": "ERNIE 4.5 21B-A3B",
    "ernie4_5_vl_moe": "ERNIE 4.5 VL 28B-A3B",
    "exaone_moe": "K-EXAONE",
    "flex_olmo": "FlexOlmo 7x7B",
    "gemma4": "Gemma 4 26B-A4B",
    "glm4_moe": "GLM-4.5-Air",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "glm4v_moe": "GLM-4.5V",
    "glm_moe_dsa": "GLM-5",
    "gpt_oss": "gpt-oss-20b",
    "granitemoe": "Granite 3.1 3B-A800M",
    "granitemoehybrid": "Granite 4.0 H Small",
    "hunyuan_v1_moe": "Hunyuan-A13B",
    "hy_v4_vl": "Hy4",
    "inkling2_loop": "Inkling 2 Mini",
    "jamba": "Jamba Mini",
    "jetmoe": "JetMoE 8B",
    "kimi_k25": "Kimi K2.5",
    "kimi_linear": "Kimi Linear 48B-A3B",
    "lara_mini": "Lara 4 Mini",
    "lfm2_moe": "LFM2 8B-A1B",
    "llama4": "Llama 4 Scout",
    "longcat_flash": "LongCat-Flash",
    "mimo_v2_flash": "MiMo-V2-Flash",
    "minimax": "MiniMax-Text-01",
    "minimax_m2": "MiniMax-M2",
    "mistral3": "Mistral Small 4",
    "mixtral": "Mixtral 8x7B",
    "nemotron_h": "Nemotron 3 Nano",
    "olmoe": "OLMoE 1B-7B",
    "phimoe": "Phi-3.5-MoE",
    "qwen2_moe": "Qwen1.5-MoE-A2.7B",
    "qwen3_5_moe": "Qwen3.5 35B-A3B",
    "qwen3_moe": "Qwen3 30B-A3B",
    "qwen3_next": "Qwen3-Next 80B-A3B",
    "qwen3_omni_moe_thinker": "Qwen3-Omni 30B-A3B",
    "qwen3_vl_moe": "Qwen3-VL 30B-A3B",
    "sarvam_mla": "Sarvam 105B",
    "sarvam_moe": "Sarvam 30B",
    "solar_open": "Solar Open 100B",
    "step3p7": "Step 3.7 Flash",
    "switch_transformers": "Switch Base 8",
    "zaya": "ZAYA1",
}
HEAD = """# Architectures

Every Mixture-of-Experts model type of transformers {version}, as found by loading a tiny random checkpoint of each with
half of its experts resident, answering in fp32 on one thread of a CPU in the reference arithmetic while settings
change, and comparing the logits with transformers' own. **Exact**: no bit differs. **Close**: they differ by no more
than the bound, a share of the largest logit, while nothing lossy is on; the fit card, the badge EXACT UP TO ROUNDING,
every answer and every export say so. Numbers of 16 bits and large models were not compared for this page. **Refused**:
with the reason that you would read; what only some models of a type have, and are refused for, is named. **Untried**:
without a word about whether it runs.

What else an engine does was tried with the same checkpoints:

- **Answers**: `Engine.generate` has the logits of transformers reading the prompt alone.
- **Kept KV**: chats that go on, and that are edited, continue from it. What is computed in other pieces is
  rounded elsewhere: within {pieces:g} of the largest logit.
- **Batches**: eight prompts of 1 to 40 tokens answered together have the logits that each has alone, within
  {together:g} of the largest.
- **Lab**: with routing and predictions recorded (`telemetry lab`) every logit is the same.
- **Fast**: the [fast arithmetic](computing.md) computes it, on a CPU, with logits within {fast:g} of the largest;
  or the experts alone, in the pass of the model's own modules.

**Yes**: so it is. A number: it is as the [note](#notes) of that number says. [Methods](#methods) has what settings
choose among.

Of models of text and images or sound the text is loaded; what is left out is named. Heads that predict further tokens
(MTP), which transformers' models do not have, are imported where they are of DeepSeek-V3's kind, as GLM-4.x's are, of
Qwen3-Next's, as Qwen3.5's are, or the first of MiMo-V2-Flash's, for [drafts](settings.md) in the fast arithmetic;
others are named and left out. A new version of transformers may add types: `python -m tests.architectures FOLDER >
docs/architectures.md` makes this page anew, and goes on where it was stopped.

"""


METHODS = """
## Methods

Each method that settings choose among, with the same checkpoints of the types that run, of whose experts each layer has
one more resident than a token needs; settings change while the model stays loaded. Each answers a chat of two turns,
of which the second continues from the kept KV, and three texts together. **Yes**: all of them do, and whatever is not
lossy has the bits that this has with every expert resident. A number: its note begins with those of them that do
otherwise. Prefetchers are tried in both arithmetics, the rest of what is exact in the reference one, parts of experts
with experts in two blocks, and lossy ways, drafts and evaluation in the fast arithmetic where it computes at least the
experts.

- **Calibration**: a profile with every part, networks included, comes back from its file. All others use it.
- **Plan**: the fit card says of slots and budget what the load is; MoEpic's plan is made from the profile, and used.
- **Evaluation**: on tokens of a text and on questions, with the modes
  {modes}.
{kinds}
- **Drafts**: by looking up what the text already has; a verified token has the bits of one computed alone.

"""


LOSSY = """- **Lossy**: {}. Each changes something, which is counted, called inexact and scored against the exact
model, and what follows without it is exact."""


def methods_head() -> str:
    """What the second table is of: every variant by name."""
    kinds = [f"- **{_title(kind)}**: {_listed(one.name for one in variants(kind))}." for kind in TRIED]
    lines = [textwrap.fill(line, 118, subsequent_indent="  ", break_on_hyphens=False) for line in kinds]
    ways: dict[str, list[str]] = {}
    for change in lossy_changes():
        way, _, by = named(change).partition(" ")
        ways.setdefault(way, []).append(by)
    lossy = "; ".join(f"{way} {_listed(by)}".strip() for way, by in ways.items())
    lines.append(textwrap.fill(LOSSY.format(lossy), 118, subsequent_indent="  ", break_on_hyphens=False))
    return METHODS.format(modes=_listed(MODES.split(",")), kinds="\n".join(lines))


def page(outcomes: Iterable[Outcome]) -> str:
    """The whole page."""
    heads, notes = ["model type", "for example", "logits", *TITLES, "why, or what is left out"], dict[str, int]()
    rows = [heads, ["---"] * len(heads)]
    outcomes = list(outcomes)
    for one in outcomes:
        features = [_feature(one.features.get(title, ""), notes) for title in TITLES]
        rows.append([one.model_type, EXAMPLES.get(one.model_type, ""), _logits(one), *features, _why(one)])
    table, methods = _table(rows), _methods(outcomes, notes)
    listed = "\n".join(f"{number}. {note}" for note, number in notes.items())
    head = HEAD.format(version=transformers.__version__, pieces=PIECES, together=TOGETHER, fast=CLOSE)
    return f"{head}{table}{methods}" + (f"\n## Notes\n\n{listed}\n" if notes else "")


def _feature(found: str, notes: dict[str, int]) -> str:
    """A cell; what happens instead of the feature is a note below the table."""
    return found if found in ("", YES) else str(notes.setdefault(found, len(notes) + 1))


def _methods(outcomes: Sequence[Outcome], notes: dict[str, int]) -> str:
    """The second table, of those that were tried."""
    rows = [
        [one.model_type, *(_feature(_together(one.methods.get(column, {})), notes) for column in COLUMNS)]
        for one in outcomes
        if one.methods
    ]
    heads = ["model type", *(_title(column).lower() for column in COLUMNS)]
    lacking = [one.model_type for one in outcomes if one.verdict in RUNS and not one.methods]
    rest = textwrap.fill(f"Not tried for this page: {_listed(lacking)}.", 118, break_on_hyphens=False)
    return methods_head() + _table([heads, ["---"] * len(heads), *rows]) + f"\n{rest}\n" * bool(lacking) if rows else ""


def _together(cells: Mapping[str, str]) -> str:
    """One cell of several: `YES` where all are, else those that are not, with what is said of them."""
    by_words: dict[str, list[str]] = {}
    for name, words in cells.items():
        by_words.setdefault(words, []).append(name)
    for words, names in by_words.items():
        marked = {name + FAST for name in names}
        by_words[words] = [name for name in names if name not in marked]
    others = [f"{', '.join(names)}: {words}" for words, names in by_words.items() if words != YES]
    return "; ".join(others) or (YES if cells else "")


def _table(rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _title(column: str) -> str:
    """Of a column: what the setting is called, where it is of one."""
    known = general()
    return known[column].title if column in known else column


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def stated(text: str) -> tuple[str, list[str]]:
    """(version of transformers, model types) of a page."""
    version = re.search(r"transformers (\d+\.\d+\.\d+)", text)
    first = text.partition("## Methods")[0]
    return version[1] if version else "", re.findall(r"^\| (\w[\w-]*) \| .* \|$", first, re.MULTILINE)


def _logits(one: Outcome) -> str:
    return f"close (1e{math.ceil(math.log10(one.off))})" if one.verdict == "close" else one.verdict


def _why(one: Outcome) -> str:
    if one.left_out or one.unless:
        unless = f"refused with {one.unless}" if one.unless else ""
        return "; ".join(filter(None, (f"without {', '.join(one.left_out)}" if one.left_out else "", unless)))
    return one.why.removesuffix(" Choose another model.").replace("|", "\\|")
