"""What a search of the hub finds, what of it fits, and an import that breaks off and goes on: a hub of our own."""

import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from app.services import hub_search
from app.services.hub_search import fits, search
from app.ui.tabs.hub_search import for_page, listed
from core.errors import MoestroError
from core.importing import download
from tests.app.conftest import ended, open_host
from tests.checkpoints import make_checkpoint
from tests.gguf_writer.write import make_gguf
from tests.pack.fake_hub import FakeHub, in_use
from tests.tiny_tokenizer import save_tokenizer

REPO, FILES = "somebody/Tiny-MoE", "somebody/Tiny-MoE-GGUF"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint and GGUF files that can be read; and what a search leaves out."""
    folder = tmp_path_factory.mktemp("shelf")
    moe = save_tokenizer(make_checkpoint("qwen3_moe", folder / "moe"))
    (ggufs := folder / "ggufs").mkdir()
    _, file = make_gguf("qwen3_moe", folder / "made")
    for name in ("tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf"):
        shutil.copy(file, ggufs / name)
    others = {
        "dense": {"model_type": "qwen3", "num_hidden_layers": 2},
        "own": {"model_type": "never_heard", "num_experts": 8, "auto_map": {}},
        "exl": {"model_type": "qwen3_moe", "num_experts": 8, "quantization_config": {"quant_method": "exl3"}},
    }
    for name, config in others.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "model.safetensors").write_bytes(b"x" * 100)
    (folder / "damaged").mkdir()
    for name, content in (("config.json", b"{"), ("model.safetensors", b"x")):
        (folder / "damaged" / name).write_bytes(content)
    (folder / "text").mkdir()
    (folder / "text" / "b.gguf").write_bytes(b"GGUF")
    found = {REPO: moe, FILES: ggufs}
    return found | {f"other/tiny-{name}": folder / name for name in (*others, "damaged", "text")}


@pytest.fixture
def hub(shelf: dict[str, Path], tmp_path: Path) -> Iterator[FakeHub]:
    with in_use(FakeHub(shelf[REPO], REPO, shelf), tmp_path / "cache") as server:
        yield server


def test_a_search_finds_what_an_import_can_read(hub: FakeHub, shelf: dict[str, Path]) -> None:
    found = search(" tiny ", allowed=True)
    assert [(one.repo, one.entry.path) for one in found] == [
        (REPO, REPO),
        (FILES, f"{FILES}:tiny-Q4_K_M.gguf"),
        (FILES, f"{FILES}:tiny-Q8_0.gguf"),
    ]
    entry, gguf = found[0].entry, found[1].entry
    assert (entry.kind, entry.experts, entry.top_k, found[0].downloads) == ("safetensors", 8, 4, 1234)
    assert entry.bytes > sum(file.stat().st_size for file in shelf[REPO].glob("*.safetensors"))
    assert (gguf.kind, gguf.experts, gguf.top_k) == ("GGUF", 8, 4)
    assert gguf.bytes == (shelf[FILES] / "tiny-Q8_0.gguf").stat().st_size
    page = listed(found, lambda size: (size < gguf.bytes, "words"))
    assert page.count("data-source") == 3 and page.count("<details>") == 1 and "2 GGUF files" in page
    assert search("no such name", allowed=True) == [] and "Nothing found" in listed([], lambda size: (True, ""))


def test_nothing_is_asked_without_a_word_of_the_user(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.down = True  # any request would be an error of another kind
    with pytest.raises(MoestroError, match="Tick Allow download"):
        search("tiny", allowed=False)
    with pytest.raises(MoestroError, match="part of the model's name"):
        search(" ", allowed=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MoestroError, match="set to work offline"):
        search("tiny", allowed=True)


def test_a_hub_that_fails_is_told_and_names_are_no_markup(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.down = True
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    with pytest.raises(MoestroError, match="cannot be reached"):
        search("tiny", allowed=True)
    hub.down = False
    one = search("Tiny-MoE", allowed=True)[0]
    page = listed([hub_search.Found(one.entry, "<img src=x>", 1, True)], lambda size: (False, "<b>full</b>"))
    assert "<img" not in page and "<b>full" not in page and " disabled" in page and "accept the terms" in page


def test_what_fits_is_told_by_disk_and_memory(tmp_path: Path, hub: FakeHub) -> None:
    assert fits(1 << 10, tmp_path / "packs")[0] and "Fits into memory" in fits(1 << 10, tmp_path / "packs")[1]
    assert fits(1 << 60, tmp_path)[0] is False and "Does not fit on the disk" in fits(1 << 60, tmp_path)[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub_search, "host_memory", lambda: type("Memory", (), {"available": 10}))
        assert fits(1 << 10, tmp_path) == (True, "Larger than the 10 B of free memory: experts are read from disk")


def test_an_import_that_breaks_off_while_it_downloads_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    host = open_host(tmp_path / "home", loaded=False)
    hub.cut, fetch = 50_000, download._append

    def once(*asked: Any) -> None:
        try:
            fetch(*asked)
        finally:
            hub.down = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "_append", once)
        job = ended(host.importer.start(REPO, "int8", "", download=True))
    assert job.state == "error" and job.can_resume and job.kept == "has arrived", job.error
    assert "What has arrived is kept." in for_page(job.error) and "command" not in for_page(job.error)
    hub.cut, hub.down = None, False
    again = ended(host.importer.resume())
    assert again.error == "" and again.out is not None and (again.out / "moestro.json").exists()
    assert not again.can_resume and again.out.name == "Tiny-MoE-int8"
    assert any(first > 0 for _, first in hub.asked), "from the byte where it broke off"


@pytest.mark.parametrize(
    ("how", "told"),
    [("gated", "gated model. Accept its terms"), ("gone", "There is no model"), ("full", "is full. What has arrived")],
)
def test_why_a_download_cannot_be_is_told(
    how: str, told: str, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = open_host(tmp_path / "home", loaded=False)
    if how == "gated":
        hub.gated.add(REPO)
    if how == "full":

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(download, "_append", full)
    job = ended(host.importer.start("somebody/else" if how == "gone" else REPO, "int8", "", download=True))
    assert job.state == "error" and told in job.error, job.error
