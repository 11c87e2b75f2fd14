"""Models on a hub: only on the user's word, only what is needed, on from the byte where it broke off, and offline."""

import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from core.errors import ModelError
from core.importing import download, import_model, missing
from core.importing.hub import HubModel, cached, choose, parse
from core.memory.store import Cancelled
from tests.checkpoints import make_checkpoint
from tests.pack.fake_hub import LARGE, FakeHub, in_use
from tests.pack.packs import same
from tests.tiny_tokenizer import save_tokenizer

REPO = "somebody/tiny-moe"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with what a repository has beside it."""
    folder = make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("hub") / "tiny-moe", max_shard_size="400KB")
    save_tokenizer(folder)
    (folder / "README.md").write_text("about")
    (folder / "pytorch_model.bin").write_bytes(b"never" * LARGE)
    (folder / "modeling_tiny.py").write_text("raise SystemExit")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def hub(model: Path, tmp_path: Path) -> Iterator[FakeHub]:
    """The model on a hub of its own, and an empty cache."""
    with in_use(FakeHub(model, REPO), tmp_path / "cache") as server:
        yield server


def test_what_names_a_model() -> None:
    for text, repo, revision, wanted in (
        ("a/b", "a/b", "main", ""),
        ("a/b:Q4_K_M", "a/b", "main", "Q4_K_M"),
        ("a/b:x/y.gguf", "a/b", "main", "x/y.gguf"),
        ("https://huggingface.co/a/b/", "a/b", "main", ""),
        ("hf.co/a/b", "a/b", "main", ""),
        ("https://huggingface.co/a/b/tree/v2", "a/b", "v2", ""),
        ("https://huggingface.co/a/b/blob/main/b-Q8_0.gguf", "a/b", "main", "b-Q8_0.gguf"),
    ):
        assert parse(text) == HubModel(repo, revision, wanted)
    for text in ("demo", "./a/b", "/a/b", "a/b/c", "~/models", "C:\\a\\b", "../b", ""):
        assert parse(text) is None


@pytest.mark.parametrize(
    "address",
    (
        "https://evil.example/org/name http://evil.example:8000/org/name:Q4_K_M "
        "https://huggingface.co.evil.example/a/b https://huggingface.co@evil.example/a/b "
        "https://evil.example/huggingface.co/a/b ftp://huggingface.co/a/b https://huggingface.co:8443/a/b "
        "https:///a/b https://127.0.0.1/a/b"
    ).split(),
)
def test_another_host_is_refused_by_name(address: str, tmp_path: Path) -> None:
    named = re.escape(address.partition("://")[2].partition("/")[0].rpartition("@")[2])
    with pytest.raises(ModelError, match=f"{named}.* is not the Hugging Face hub"):
        parse(address)
    with pytest.raises(ModelError, match="is not the Hugging Face hub"):
        import_model(address, tmp_path / "pack", download=True)
    assert list(tmp_path.iterdir()) == []


def test_a_mirror_that_the_user_set_is_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "https://mirror.example")
    assert parse("https://mirror.example/a/b/tree/v2") == HubModel("a/b", "v2")
    with pytest.raises(ModelError, match=r"evil\.example"):
        parse("https://evil.example/a/b")


def test_which_files_are_taken() -> None:
    def of(names: str, wanted: str = "") -> list[str]:
        return choose(HubModel("a/b", wanted=wanted), names.split())

    assert of(
        "config.json merges.txt model-1.safetensors model-2.safetensors model.safetensors.index.json x.bin y.pt "
        "consolidated.safetensors README.md code.py sub/config.json b.gguf"
    ) == ["config.json", "merges.txt", "model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"]
    assert of("config.json model.safetensors other.safetensors") == ["config.json", "model.safetensors"]
    many = "b-Q4_K_M.gguf b-Q4_K_S.gguf Q8_0/b-Q8_0-00001-of-00002.gguf Q8_0/b-Q8_0-00002-of-00002.gguf mmproj-b.gguf"
    assert of(many, "q4_k_m") == of(many, "b-Q4_K_M.gguf") == ["b-Q4_K_M.gguf"]
    assert (
        of(many, "Q8_0")
        == of(many, "b-Q8_0-00001-of-00002.gguf")
        == ["Q8_0/b-Q8_0-00001-of-00002.gguf", "Q8_0/b-Q8_0-00002-of-00002.gguf"]
    )
    assert of("b-Q4_K_M.gguf mmproj-b.gguf") == ["b-Q4_K_M.gguf"]
    for names, wanted, words in (
        (many, "", "3 GGUF files.*Name one.*b-Q4_K_S.gguf"),
        (many, "Q4_K", "no GGUF file 'Q4_K'"),
        ("pytorch_model.bin", "", "only as Python pickles"),
        ("README.md", "", "neither"),
    ):
        with pytest.raises(ModelError, match=words):
            of(names, wanted)


def test_it_is_downloaded_imported_and_found_again(
    hub: FakeHub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match="only when you add --download"):
        import_model(REPO, tmp_path / "pack")
    assert hub.asked == [] and missing(REPO) == HubModel(REPO)
    seen: list[tuple[str, float, int, int]] = []
    pack = import_model(REPO, tmp_path / "pack", download=True, progress=lambda *args: seen.append(args))
    fetched = {name for name, _ in hub.asked}
    assert len(fetched) == len(hub.asked) and "tokenizer.json" in fetched
    assert not any(name.endswith((".bin", ".py", ".md")) or "/" in name for name in fetched)
    loading = [at for text, *at in seen if text.startswith("Download")]
    assert loading == sorted(loading) and loading[-1][0] == 1.0 and loading[-1][1] == loading[-1][2]
    assert same(pack, import_model(str(model), tmp_path / "local" / "pack"))
    hub.asked.clear()
    again = import_model(REPO, tmp_path / "again", format="int8")  # no word is needed any more
    assert hub.asked == [] and again.is_dir() and missing(REPO) is None
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    import_model(REPO, tmp_path / "offline", download=True)
    assert hub.asked == []


def test_a_broken_connection_is_taken_up_within_a_download(hub: FakeHub, tmp_path: Path) -> None:
    hub.cut = 150_000
    import_model(REPO, tmp_path / "pack", download=True)
    large = [first for name, first in hub.asked if name.startswith("model-00001")]
    assert len(large) > 2 and large == [n * 147_456 for n in range(len(large))]  # whole chunks of each attempt


def test_a_stopped_download_goes_on_where_it_was(hub: FakeHub, tmp_path: Path) -> None:
    cancel = threading.Event()

    def stop(text: str, share: float, done: int, total: int) -> None:
        if share > 0.4:
            cancel.set()

    with pytest.raises(Cancelled):
        import_model(REPO, tmp_path / "pack", download=True, progress=stop, cancel=cancel)
    assert not (tmp_path / "pack.partial").exists() and cached(HubModel(REPO)) is None
    before, last = list(hub.asked), hub.asked[-1][0]
    hub.asked.clear()
    import_model(REPO, tmp_path / "pack", download=True)
    assert hub.asked[0][0] == last and hub.asked[0][1] > 0  # not from its beginning
    assert not {name for name, _ in hub.asked} & {name for name, _ in before[:-1]}


def test_a_hub_that_goes_away_is_said(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.cut = 0
    with pytest.raises(ModelError, match=r"download of somebody/tiny-moe broke off: .*is kept; run the same command"):
        import_model(REPO, tmp_path / "pack", download=True)
    hub.cut, hub.down = None, True
    with pytest.raises(
        ModelError,
        match=r"cannot be reached.*config.json.*tokenizer.*model-00001-of-.*/tree/main, put "
        r"them into .*tiny-moe, and run: python launch.py import .*tiny-moe",
    ):
        import_model(REPO, tmp_path / "pack", download=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"work offline.*the GGUF file 'Q4_0' .*/other/model/tree/main"):
        import_model("other/model:Q4_0", tmp_path / "pack", download=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache"]


def test_there_is_no_such_model(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model 'other/model' at http"):
        import_model("other/model", tmp_path / "pack", download=True)


def test_what_arrives_damaged_is_not_kept(hub: FakeHub, tmp_path: Path) -> None:
    hub.spoil = b"nonsense"
    with pytest.raises(ModelError, match=r"model-00001-of-\d+.safetensors arrived damaged and was deleted"):
        import_model(REPO, tmp_path / "pack", download=True)
    hub.spoil = b""
    assert import_model(REPO, tmp_path / "pack", download=True).is_dir()


def test_a_download_that_does_not_fit_is_not_begun(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 300_000_000

    monkeypatch.setattr(download, "MARGIN", 299_900_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(ModelError, match=r"download needs .* MB, but only 300 MB are free .*HF_HOME"):
        import_model(REPO, tmp_path / "pack", download=True)
    assert hub.asked == []


def test_without_links_nothing_is_kept_twice(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "symlink", refuse)
    monkeypatch.setattr(huggingface_hub.file_download, "are_symlinks_supported", lambda *args: False)
    import_model(REPO, tmp_path / "pack", download=True)
    files = list((tmp_path / "cache" / "models--somebody--tiny-moe").rglob("*.safetensors"))
    assert files and not any(p.is_symlink() for p in files)
    large = [p for p in (tmp_path / "cache").rglob("blobs/*") if p.stat().st_size >= LARGE]
    assert large == []
