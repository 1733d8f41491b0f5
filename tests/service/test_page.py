"""The page in a real browser: what a person sees, with a mouse, a keyboard, a phone, and a token."""

import shutil
import urllib.request

import pytest
import torch

from neuralmean.service import Settings, create_app
from tests.service.conftest import PREPROCESSING, png
from tests.service.test_launch import serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")

TOKEN = "correct-horse-battery"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser):
    """Opens the page of a port; at the end nothing may have gone wrong in it and nobody else been asked."""
    contexts, problems = [], []

    def open_page(port, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        base = f"http://127.0.0.1:{port}"
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if _is_problem(message) else None)
        page.on(
            "request",
            lambda request: (
                problems.append(request.url) if not request.url.startswith((base, "blob:", "data:")) else None
            ),
        )
        page.goto(base)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def _is_problem(message):
    # The browser itself notes every answer that is not 200; those are looked at by what the page makes of them.
    return message.type == "error" and "Failed to load resource" not in message.text


def _image(seed=0):
    return {"name": "noise.png", "mimeType": "image/png", "buffer": png(seed)[0]}


def test_an_image_gets_a_verdict_a_place_among_others_and_a_reason(detector, visit):
    with serving(create_app(detector, PREPROCESSING, name="toy")) as port:
        page = visit(port)
        page.wait_for_selector(".state.good")
        assert page.inner_text("h1") == "toy"
        page.set_input_files("#file", _image())
        page.wait_for_selector("#result:not([hidden])")
        assert page.inner_text("#verdict") == "● In distribution"
        assert "of 200 held-out images look at least as unusual." in page.inner_text("#sentence")
        assert "layers, which see" in page.inner_text("#reason")
        assert page.locator("#distribution .bar").count() == 40
        assert page.locator("#distribution .mark").count() == 1
        assert page.locator("#profile .bar").count() == 2
        assert page.inner_text("#n-seen") == "0"  # who looks at an image does not change the stream
        request = urllib.request.Request(f"http://127.0.0.1:{port}/score", data=png()[0], method="POST")
        urllib.request.urlopen(request, timeout=10).close()
        page.wait_for_selector("#stream .dot")
        assert page.inner_text("#n-seen") == "1"


def test_a_bad_file_gets_a_sentence(detector, visit):
    with serving(create_app(detector, PREPROCESSING, name="toy")) as port:
        page = visit(port)
        page.wait_for_selector(".state.good")
        with page.expect_response("**/score*"):
            page.evaluate("check(new File(['no image'], 'a.png'))")
        page.wait_for_selector("#problem:not([hidden])")
        assert "Expected 'a.png' to be an image, but it is not a PNG" in page.inner_text("#problem")


def test_a_shifted_stream_is_shown_with_its_pictures_and_can_be_reset_by_keyboard(detector, visit):
    app = create_app(detector, PREPROCESSING, name="toy")
    with serving(app) as port:
        page = visit(port)
        page.wait_for_selector(".state.good")
        for seed in range(8):  # the first 64 inputs only show how correlated the stream is
            _flag(port, detector, seed)
        page.wait_for_selector(".state.bad")
        assert page.inner_text("#state") == "The stream has shifted"
        assert "Noticed at input" in page.inner_text("#drift-text")
        page.wait_for_selector("#flagged img")
        assert page.evaluate("[...document.querySelectorAll('#flagged img')].every((i) => i.naturalWidth === 8)")
        assert page.locator("#stream .dot.bad").count() > 0
        page.focus("#reset")
        page.keyboard.press("Enter")
        page.wait_for_selector(".state.good")
        assert page.locator("#drift").is_hidden()


def _flag(port, detector, seed):
    import httpx

    x = 2 + 3 * torch.rand(10, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "FP32", "data": x.flatten().tolist()}
    answer = httpx.post(f"http://127.0.0.1:{port}/v2/models/toy/infer", json={"inputs": [tensor]}, timeout=30)
    assert answer.json()["outputs"][3]["data"] == [True] * 10


def test_the_page_can_be_used_with_the_keyboard_alone(detector, visit):
    with serving(create_app(detector, PREPROCESSING, name="toy")) as port:
        page = visit(port)
        page.wait_for_selector(".state.good")
        focused = []
        for _ in range(4):
            page.keyboard.press("Tab")
            focused.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        assert focused == ["Skip to the image check", "API", "Metrics", "file"]
        assert page.evaluate("getComputedStyle(document.getElementById('drop')).outlineStyle") != "none"
        with page.expect_file_chooser() as chooser:
            for key in ("Shift+Tab", "Tab", "Enter"):  # Chromium needs a moment to hand choosers over
                page.keyboard.press(key)
        chooser.value.set_files(_image())
        page.wait_for_selector("#result:not([hidden])")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_in_one_direction_only_and_both_schemes_can_be_read(detector, visit, scheme):
    with serving(
        create_app(detector, PREPROCESSING, name="a-model-with-a-rather-long-name-that-must-break-somewhere")
    ) as port:
        page = visit(port, viewport={"width": 360, "height": 640}, color_scheme=scheme, has_touch=True)
        page.wait_for_selector(".state.good")
        page.set_input_files("#file", _image())
        page.wait_for_selector("#result:not([hidden])")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        for selector in ("body", ".quiet", "#verdict", "a"):
            assert _contrast(page, selector) >= 4.5, selector


def _contrast(page, selector):
    """The ratio of WCAG between an element's colour and the card behind it."""
    script = """(selector) => {
        const parse = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
        const linear = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
        const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
        const front = light(parse(getComputedStyle(document.querySelector(selector)).color));
        const back = light(parse(getComputedStyle(document.querySelector('section')).backgroundColor));
        return (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    }"""
    return page.evaluate(script, selector)


def test_a_server_with_a_token_asks_for_it_once(detector, visit):
    with serving(create_app(detector, PREPROCESSING, name="toy", settings=Settings(token=TOKEN))) as port:
        page = visit(port)
        page.wait_for_selector("#token-dialog[open]")
        page.fill("#token", "wrong-token")
        page.keyboard.press("Enter")
        page.wait_for_selector("#token-problem:not([hidden])")
        page.fill("#token", TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_selector(".state.good")
        assert not page.locator("#token-dialog").is_visible()
        page.set_input_files("#file", _image())
        page.wait_for_selector("#result:not([hidden])")


def test_without_thumbnails_there_is_no_place_for_them(detector, visit):
    with serving(create_app(detector, PREPROCESSING, name="toy", settings=Settings(thumbnails=False))) as port:
        page = visit(port)
        page.wait_for_selector(".state.good")
        page.wait_for_selector("#flagged-part", state="hidden")


def test_the_api_page_lists_the_routes(detector, visit):
    with serving(create_app(detector, PREPROCESSING, name="toy")) as port:
        page = visit(port)
        page.click("text=API")
        page.wait_for_selector(".operation")
        assert "POST /score" in page.inner_text("main")
