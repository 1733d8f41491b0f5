"""Every code block of the README and of the site runs."""

import signal
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Page, blocks_of, commands_of

PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")],
    key=lambda page: page.relative_to(ROOT).as_posix(),
)


@contextmanager
def at_most(seconds):
    """Stop a block that waits for something that never comes."""
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"the block took more than {seconds} s"))
        signal.alarm(seconds)
    try:
        yield
    finally:
        if hasattr(signal, "SIGALRM"):
            signal.alarm(0)


@pytest.mark.filterwarnings("ignore::neuralmean.NeuralMeanWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_blocks_of_a_page_run(page: Path, request):
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    if not blocks:
        pytest.skip("there is no code on this page")
    namespace, nmd = request.getfixturevalue("world"), request.getfixturevalue("nmd")
    runner = Page(page.name, namespace, nmd)
    try:
        for block in blocks:
            with at_most(120):
                runner.run(block)
    finally:
        runner.close()


def test_a_block_that_fails_is_noticed(world, nmd):
    page = Page("page.md", world, nmd)
    with pytest.raises(AssertionError, match="page.md:1: nmd score absent.nmd"):
        page.run(blocks_of("```bash\nnmd score absent.nmd photos/\n```")[0])
    with pytest.raises(AssertionError, match="no target"):
        page.run(blocks_of("```bash\nmake nonsense\n```")[0])
    with pytest.raises(AssertionError, match="no extra"):
        page.run(blocks_of('```bash\npip install "neuralmean[nonsense]"\n```')[0])
    with pytest.raises(NameError, match="nobody"):
        page.run(blocks_of("```python\nnobody\n```")[0])


def test_a_block_is_left_out_only_with_a_reason():
    assert blocks_of("<!-- not run: needs a cluster -->\n\n```bash\nx\n```") == []
    assert len(blocks_of("<!-- not run: -->\n\n```bash\nx\n```")) == 1


def test_commands_are_joined_and_comments_dropped():
    assert commands_of("nmd score a \\\n  b   # why\n# alone\n$ make test && make check") == [
        "nmd score a    b",
        "make test",
        "make check",
    ]
