"""What README and docs/ name must be there."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from headrace import EngineConfig

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Where the files that documents name may lie: most are named as seen from the package.
PACKAGE = ROOT / "src" / "headrace"
PLACES = [ROOT, PACKAGE, PACKAGE / "kernels", PACKAGE / "kernels" / "native"]
# ggml's specification of GGUF.
OTHERS = {"docs/gguf.md"}


@pytest.mark.parametrize("doc", DOCS, ids=lambda d: d.name)
def test_every_relative_link_leads_to_a_file(doc: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", doc.read_text(encoding="utf-8"))
    assert [to for to in links if "://" not in to and not (doc.parent / to).is_file()] == []


@pytest.mark.parametrize("doc", DOCS, ids=lambda d: d.name)
def test_every_file_that_is_named_exists(doc: Path) -> None:
    named = re.findall(
        r"`(\w[\w*.-]*(?:/[\w*./-]*|\.[ch]pp|\.py))`", doc.read_text(encoding="utf-8")
    )
    assert [name for name in named if not any(any(at.glob(name)) for at in PLACES)] == []


def test_the_sources_refer_to_documents_that_exist() -> None:
    for file in [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        text = file.read_text(encoding="utf-8")
        for name in set(re.findall(r"(?<![\w./])docs/\w[\w-]*\.md", text)) - OTHERS:
            assert (ROOT / name).is_file(), f"{file} names {name}"


def test_the_readme_has_fewer_than_a_thousand_words() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) < 1000


def test_every_setting_of_the_engine_is_explained() -> None:
    told = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert [field.name for field in fields(EngineConfig) if f"`{field.name}`" not in told] == []
