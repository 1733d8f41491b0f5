"""Pages name tests and files of the repository; each of them exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
_TEST = re.compile(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)?(?:::((?:\w+::)*\w+))?`")


def missing_tests(text: str) -> list[str]:
    """Return the tests that a page names and that do not exist; `::name` belongs to the file named before it."""
    missing, path = [], None
    for match in _TEST.finditer(text):
        name = match[1]
        if name is None and match[2] is None:
            continue
        path = path if name is None else ROOT / "tests" / name
        if path is None or not path.is_file():
            missing.append(match[0])
        elif match[2] is not None:
            source = path.read_text(encoding="utf-8")
            parts = match[2].split("::")
            if not all(re.search(rf"^ *(?:async )?(?:def|class) {part}\b", source, re.MULTILINE) for part in parts):
                missing.append(match[0])
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_tests_that_a_page_names_exist(page):
    assert not missing_tests(page.read_text(encoding="utf-8"))


def test_a_test_that_is_gone_is_noticed():
    assert missing_tests("`docs/test_references.py::test_a_test_that_is_gone_is_noticed`") == []
    assert missing_tests("`docs/test_references.py::test_absent`, `test_absent.py`") == [
        "`docs/test_references.py::test_absent`",
        "`test_absent.py`",
    ]


def test_the_files_that_the_architecture_names_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:\w+/)+\w+\.py)`", text):
        assert (ROOT / "src" / "neuralmean" / name).is_file() or (ROOT / name).is_file(), name
