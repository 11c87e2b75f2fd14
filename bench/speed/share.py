"""bench share: what a model does on this machine as Auto runs it, as one JSON and a picture that others can compare.

Answers to prompts of bundled texts, each read anew, with the machine's own link. The budget is the most that is safe,
unless another one is given."""

from collections.abc import Iterator
from html import escape
from itertools import islice

from bench.harness.engines import model_of, token_stream
from bench.harness.figures import spread
from bench.harness.run import Result, Run, Suite
from core.capacity.fit import estimate
from core.engine import Engine
from core.errors import BudgetError
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.presets import FIRST, preset
from core.settings.sampling import Sampling
from core.system.wording import cell, format_bytes
from core.types import AnswerStats, Ids

PROMPT, SMALL_PROMPT = 512, 24  # tokens
SIZE = 720, 300  # of the picture


def measure(run: Run, model: str = "demo", budget: str = "", rounds: int = 3, tokens: int = 96) -> Result:
    """`tokens` = those of an answer. `budget`: "" = the most that is safe."""
    path, settings = model_of(run, model), {**preset(FIRST).values, "link": "own"}
    budget = budget or estimate(LoadSpec.checked(path, Settings(settings)), forecast=False).suggested
    if not budget:
        raise BudgetError(f"{model} needs more memory than is free here. Close other programs, or give --budget.")
    engine = run.engine(path, {**settings, "budget": budget}, endless=True)
    length = min(SMALL_PROMPT if run.small else PROMPT, engine.context - tokens - 1)
    stream, answers = token_stream(engine), list[AnswerStats]()
    for number in run.rounds(rounds):
        found = _answer(engine, [*islice(stream, length)], tokens)
        answers += [found] if number else []
    memory, distance = engine.memory(), engine.arithmetic.distance
    return {
        "preset": FIRST,
        "budget": budget,
        "format": engine.loaded.plan.format,
        "resident": engine.expert_cache.capacity / (engine.shape.total * engine.sizes.blocks),
        "prompt_tokens": length,
        "tok_s": spread([one.tok_s for one in answers]),
        "ttft_ms": spread([one.ttft_ms for one in answers]),
        "hit_rate": spread([one.hit_rate or 0.0 for one in answers]),
        "kl": None if distance is None else distance.kl,
        "kl_tokens": None if distance is None else distance.tokens,
        "device_bytes": memory.peak,
        "device_total": memory.device_total,
        "host_bytes": memory.host,
    }


def _answer(engine: Engine, prompt: list[int], tokens: int) -> AnswerStats:
    for piece in engine.generate(Ids(prompt), Sampling(max_new_tokens=tokens)):
        if piece.stats is not None:
            return piece.stats
    raise AssertionError("every answer ends")


def _lines(r: Result) -> Iterator[tuple[str, str]]:
    """(figure, its name)"""
    yield f"{r['tok_s']['median']:.1f} tok/s", f"median of {r['rounds']} answers of {r['tokens']} tokens"
    yield f"{r['ttft_ms']['median'] / 1e3:.2f} s", f"to the first token, after a prompt of {r['prompt_tokens']}"
    yield (
        f"{r['hit_rate']['median']:.1%} hits",
        f"{r['resident']:.0%} of {r['layers']} x {r['experts']} experts resident",
    )
    yield f"KL {cell(r['kl'], '.2g')}", "nats a token from the reference arithmetic" if r["kl"] else "exact arithmetic"


def table(r: Result) -> list[str]:
    about = f"{r['model']} ({r['format']}), Auto, {format_bytes(r['device_bytes'])} in use, on {r['device']}"
    return [about, *(f"  {figure:>16}  {name}" for figure, name in _lines(r))]


def picture(r: Result) -> str:
    """The same as an SVG."""
    width, height = SIZE
    left = 'font-family="system-ui, sans-serif" x="32"'
    rows = "".join(
        f'<text {left} y="{132 + 42 * at}" font-size="26" font-weight="700" fill="#e2e8f0">{escape(figure)}</text>'
        f'<text font-family="system-ui, sans-serif" x="250" y="{132 + 42 * at}" font-size="15" fill="#94a3b8">'
        f"{escape(name)}</text>"
        for at, (figure, name) in enumerate(_lines(r))
    )
    machine = f"{r['device']}, {r['cores']} cores, {format_bytes(r['device_bytes'])} of memory, Auto"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<rect width="{width}" height="{height}" rx="16" fill="#0f1729"/>'
        f'<text {left} y="52" font-size="22" font-weight="700" fill="#818cf8">{escape(r["model"])} '
        f"({escape(r['format'])})</text>"
        f'<text {left} y="78" font-size="14" fill="#94a3b8">{escape(machine)}</text>{rows}'
        f'<text {left} y="{height - 14}" font-size="11" fill="#64748b">Moestro {escape(r.get("moestro", ""))} '
        f"{escape(r.get('date', ''))}</text></svg>\n"
    )


SUITE = Suite(measure, table, small={"rounds": 1, "tokens": 6})
