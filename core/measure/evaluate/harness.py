"""Runs tasks of lm-evaluation-harness (an optional extra) on a loaded model, under the settings in force."""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.engine import Engine
from core.errors import BusyError, MoestroError, SettingError
from core.hf import chat_template
from core.measure.evaluate.modes import Mode
from core.measure.evaluate.run import Progress, restored, start_mode
from core.measure.evaluate.scorer import Scorer
from core.measure.evaluate.tally import ModeTotals
from core.settings.param import declared
from core.settings.sampling import Sampling

REQUIREMENT = "lm-eval>=0.4.9,<0.6"  # as in pyproject.toml, extra "harness"
MOST = 256  # answer tokens if a task sets no limit


def adapter(scorer: Scorer) -> Any:
    """The model as an `lm_eval.api.model.LM` over a scorer. Raises SettingError when the harness is not installed."""
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        raise SettingError(
            f"Tasks need lm-evaluation-harness, which is not installed ({error}). Install it with: "
            f'{sys.executable} -m pip install "{REQUIREMENT}"'
        ) from None

    class Moestro(LM):
        """A thin wrapper: `core.measure.evaluate.scorer` does the tokenizing and scoring."""

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return [scorer.loglikelihood(*request.args) for request in requests]

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return [scorer.rolling(request.args[0]) for request in requests]

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return [scorer.generate_until(request.args[0], *_asked(request.args[1])) for request in requests]

        @property
        def tokenizer_name(self) -> str:
            return str(scorer.engine.model_name)

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return chat_template.render(
                scorer.engine.prompt.tokenizer,
                chat_history,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )

    return Moestro()


def _asked(words: dict[str, Any]) -> tuple[list[str], int, Sampling]:
    """Stops, token limit and sampling from a task's `generation_kwargs`."""
    until = words.get("until") or []
    known = set(declared(Sampling))
    draws = bool(words.get("do_sample", float(words.get("temperature", 0.0)) > 0))
    given = {name: value for name, value in words.items() if name in known}
    sampling = Sampling.checked(**{"seed": 0, **given}) if draws else Sampling()
    most = next((int(words[name]) for name in ("max_gen_toks", "max_new_tokens", "max_tokens") if name in words), MOST)
    return [until] if isinstance(until, str) else list(until), most, sampling


def run_tasks(
    scorer: Scorer, tasks: Sequence[str], folder: Path | None = None, limit: int | None = None
) -> dict[str, dict[str, float]]:
    """Task -> its figures ("acc", "acc_stderr" ...). `folder` has additional tasks (.yaml); `limit` = examples per
    task. Raises SettingError when the harness is not installed or a task is unknown."""
    model = adapter(scorer)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    if folder is not None and not folder.is_dir():
        raise SettingError(f"There is no folder {folder} with tasks.")
    manager = TaskManager(include_path=str(folder) if folder is not None else None)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise SettingError(
            f"The harness has no task {' or '.join(map(repr, unknown))}. List its tasks with: "
            f"{sys.executable} -m lm_eval ls tasks"
        )
    found = simple_evaluate(
        model=model,
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        bootstrap_iters=1000,
        log_samples=False,
        confirm_run_unsafe_code=False,
    )
    results: dict[str, dict[str, Any]] = (found or {}).get("results", {})
    return {
        task: {
            name.replace(",none", ""): float(value)
            for name, value in figures.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for task, figures in results.items()
    }


def evaluate_tasks(
    engine: Engine,
    modes: Sequence[Mode],
    residencies: Sequence[float],
    tasks: Sequence[str],
    folder: Path | None = None,
    limit: int | None = None,
    progress: Progress = lambda text, share: None,
    cancel: threading.Event | None = None,
) -> list[dict[str, Any]]:
    """One dict per residency and mode: the tasks' own figures, the share of changed assignments, and the speed. The
    engine's settings are restored afterwards. Raises SettingError without the harness, Cancelled."""
    found: list[dict[str, Any]] = []
    todo = [(share, mode) for share in residencies for mode in modes]
    with restored(engine) as base:
        for at, (share, mode) in enumerate(todo):
            progress(f"{mode.title} at {share:.4g} of the experts", at / len(todo))
            tally, problem, figures = ModeTotals(), "", dict[str, dict[str, float]]()
            try:
                start_mode(engine, mode.fitted(engine.shape.top_k).over(base.with_({"budget": f"{share * 100:g}%"})))
            except BusyError:
                raise
            except MoestroError as error:
                problem = str(error)
            if not problem:
                figures = run_tasks(Scorer(engine, cancel, tally), tasks, folder, limit)
            tpot_ms = tally.mean("total_ms")
            found.append(
                {
                    "mode": mode.name,
                    "residency": share,
                    "problem": problem,
                    "figures": figures,
                    "substituted_rate": tally.rate("changed", "assignments"),
                    "link_bytes": tally.mean("link_bytes"),
                    "tok_s": 1e3 / tpot_ms if tpot_ms else None,
                    "emulated": tally.emulated,
                }
            )
    return found
