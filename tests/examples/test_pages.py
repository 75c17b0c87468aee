"""Do the links and pictures of README and docs lead somewhere, does every page have a way to it, and do pictures fetch nothing?"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PICTURES = sorted((ROOT / "docs" / "images").glob("*.svg"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_pictures_are_shown_and_stand_alone(picture: Path) -> None:
    assert f"docs/images/{picture.name}" in (ROOT / "README.md").read_text(encoding="utf-8")
    text = picture.read_text(encoding="utf-8")
    assert "font-face" not in text
    assert "url(http" not in text


@pytest.mark.parametrize("index", [ROOT / "docs", ROOT / "docs/design"], ids=["docs", "design"])
def test_an_index_lists_every_page(index: Path) -> None:
    pages = index.rglob("*.md") if index.name == "docs" else index.glob("*.md")
    listed = {
        (index / link).resolve()
        for link in re.findall(r"\]\(([^)#]+)\)", (index / "README.md").read_text(encoding="utf-8"))
    }
    notes = set((ROOT / "docs/design").glob("0*.md")) if index.name == "docs" else set()
    assert [page for page in pages if page.name != "README.md" and page not in listed | notes] == []
