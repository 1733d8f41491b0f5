"""What the build adds to the metadata."""

import importlib.util
import re
from pathlib import Path

import pytest

import neuralmean

pytest.importorskip("hatchling", reason="the build backend is not installed")
HOOK = Path(__file__).parents[1] / "hatch_build.py"
if not HOOK.is_file():
    pytest.skip("this is not the repository", allow_module_level=True)


@pytest.fixture(scope="module")
def hook():
    spec = importlib.util.spec_from_file_location("hatch_build", HOOK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_relative_links_and_images_of_the_readme_become_absolute(hook):
    text = "![p](docs/p.png) [a](docs/a.md#b) [c](#d) [e](https://f) [![g](https://h)](i)"
    assert hook.absolute(text, "https://r") == (
        "![p](https://r/raw/HEAD/docs/p.png) [a](https://r/blob/HEAD/docs/a.md#b) [c](#d) [e](https://f) [![g](https://h)](i)"
    )


@pytest.mark.parametrize("address", ["", "https://r/"])
def test_the_addresses_are_those_of_the_release(hook, monkeypatch, address):
    monkeypatch.setenv("NEURALMEAN_REPOSITORY", address)
    metadata = {}
    hook.Hook(str(HOOK.parent), {}).update(metadata)
    assert metadata["urls"].get("Issues") == ("https://r/issues" if address else None)
    assert ("](docs/start.md)" in metadata["readme"]["text"]) == (not address)


def test_version_changelog_and_citation_agree():
    version = neuralmean.__version__.partition(".dev")[0]
    assert re.search(rf"^## {re.escape(version)}$", (HOOK.parent / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert re.search(rf"^version: {re.escape(version)}$", (HOOK.parent / "CITATION.cff").read_text(), re.M)


def test_the_readme_has_no_table_too_wide_for_a_page():
    rows = [line for line in (HOOK.parent / "README.md").read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    assert rows
    assert max(row.count("|") - 1 for row in rows) <= 7
