"""What all tests share: one thread, quiet transformers, quick collections, tiny checkpoints built once a session.

Nothing heavy is imported before it is used: the process that hands tests to workers reads this file and runs none.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.logged import caplog
from tests.selection import (
    pytest_addoption,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_ignore_collect,
    pytest_make_collect_report,
    pytest_runtest_setup,
    pytest_terminal_summary,
    pytest_xdist_make_scheduler,
)

if TYPE_CHECKING:
    from core.settings.config import Settings

__all__ = [
    "caplog",
    "pytest_addoption",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_ignore_collect",
    "pytest_make_collect_report",
    "pytest_runtest_setup",
    "pytest_terminal_summary",
    "pytest_xdist_make_scheduler",
]

Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> Iterator[None]:
    import torch
    import transformers

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _engines_collect_what_tests_made(request: pytest.FixtureRequest) -> Iterator[None]:
    """An engine collects garbage as it is loaded and unloaded; freezing is left to the fixture below."""
    from core.system import process_memory

    real, process_memory.gc = process_memory.gc, SimpleNamespace(collect=gc.collect, freeze=int, unfreeze=int)  # type: ignore[assignment]
    yield
    process_memory.gc = real
    if not hasattr(request.config, "workerinput"):  # which takes nothing down at its end
        gc.unfreeze()  # or libraries would report their own objects as leaked


@pytest.fixture(scope="session", autouse=True)
def _loads_time_little() -> Iterator[None]:
    """Two passes instead of nine, and less text for a distance: what they take matters to no test. Norms are tried on
    fewer numbers, as at every load: test_fused_rmsnorm.py tries them on more."""
    from core.engine import program_trial
    from core.hf import fused_rmsnorm
    from core.runtime import warmup

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warmup, "PASSES", 2)
        patch.setattr(program_trial, "PIECES", 4)
        patch.setattr(fused_rmsnorm, "ELEMENTS", 1 << 12)
        yield


@pytest.fixture(scope="session", autouse=True)
def _the_reference_computes() -> Iterator[None]:
    """Unless a test names the arithmetic: `auto` compiles a program and measures its distance for every tiny model."""
    from core.settings.loading import LoadSpec

    real = LoadSpec.checked

    def checked(model: str, settings: Settings | None = None, **values: object) -> LoadSpec:
        return real(model, settings, **{"arithmetic": "reference", **values})

    LoadSpec.checked = checked  # type: ignore[method-assign, assignment]
    yield
    LoadSpec.checked = real  # type: ignore[method-assign]


@pytest.fixture(scope="session", autouse=True)
def _models_of_one_config_are_measured_once() -> Iterator[None]:
    """Whatever folder they are in: most tiny checkpoints differ in their weights alone."""
    from core.capacity import plan
    from core.hf.files import stamp

    real, known = plan._outlined, {}

    def outlined(path: Path, changed: tuple[int, ...], dtype: str, head: bool) -> Any:
        config = path / "config.json"
        text = config.read_text(encoding="utf-8") if config.is_file() else ""
        if changed != stamp(path) or (dtype == "auto" and 'dtype"' not in text):  # else its weights tell
            return real(path, changed, dtype, head)
        if (text, dtype, head) not in known:
            known[text, dtype, head] = real(path, changed, dtype, head)
        return known[text, dtype, head]

    plan._outlined = outlined  # type: ignore[assignment]
    yield
    plan._outlined = real


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_compiled_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """By whichever process comes first, in this run or one before."""
    from core.system.native import kept_code

    if (cache := getattr(request.config, "cache", None)) is not None:  # absent with -p no:cacheprovider
        kept_code.keep_in(cache.mkdir("moestro-kernels"))
    yield
    kept_code.keep_in(None)


@pytest.fixture(scope="session", autouse=True)
def _the_template_process_stays() -> Iterator[None]:
    """One process renders the chat templates of all engines: to start it takes longer than to load a tiny one."""
    from core.system.template_worker import RENDERER

    RENDERER.hold(_the_template_process_stays)
    yield
    RENDERER.release(_the_template_process_stays)


@pytest.fixture(scope="module", autouse=True)
def _what_is_imported_stays() -> None:
    """Half a million objects of imported libraries, that no collection need look at: most of a tiny engine's load."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """`checkpoint("mixtral")` is the directory of a tiny random checkpoint; never write into it, copy it."""
    from tests.checkpoints import make_checkpoint

    made: dict[str, Path] = {}

    def get(arch: str) -> Path:
        if arch not in made:
            made[arch] = make_checkpoint(arch, tmp_path_factory.mktemp("checkpoints") / arch)
        return made[arch]

    return get


@pytest.fixture(autouse=True)
def _secrets_are_those_of_one_test() -> Iterator[None]:
    """A process hides for its life what an option declared as a secret, in whatever a later test prints, too."""
    yield
    if (secret := sys.modules.get("app.services.secret")) is not None:
        secret._declared.clear()
