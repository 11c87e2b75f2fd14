"""docs/formats.md is what the sources do."""

from pathlib import Path

from tests.sources.page import page

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"


def test_the_page_of_formats_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page() + "\n", "run: python -m tests.sources.page > docs/formats.md"
