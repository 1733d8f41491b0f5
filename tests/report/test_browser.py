"""The report in a real browser: nothing complains, every plot is drawn, both themes have their colours."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome to look at the report with")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=3000",
)

PROBE = """
<script>
const errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
addEventListener("load", () => {
  const root = document.documentElement;
  const colour = () => getComputedStyle(document.body).backgroundColor;
  const seen = (svg) => svg.getClientRects().length > 0;
  const plots = [...document.querySelectorAll("svg[data-plot]")].filter(seen).map((svg) => {
    const box = svg.getBBox(), area = svg.getBoundingClientRect();
    const unpainted = [...svg.querySelectorAll(".curve, .axis, .grid, .mark, .bar, .up, .down")].filter((shape) => {
      const style = getComputedStyle(shape);
      return style.stroke === "none" && (style.fill === "none" || style.fill === "rgba(0, 0, 0, 0)");
    });
    return {plot: svg.dataset.plot, width: area.width, height: area.height, drawn: box.width, unpainted: unpainted.length};
  });
  const images = [...document.images].map((image) => image.naturalWidth);
  const button = document.getElementById("theme"), before = colour();
  const shown = !button.hidden;
  button.click();
  const after = colour();
  const overflow = root.scrollWidth - root.clientWidth;
  const found = {errors, plots, images, shown, before, after, overflow, theme: root.dataset.theme};
  const note = document.createElement("pre");
  note.id = "probe";
  note.textContent = JSON.stringify(found);
  document.body.append(note);
});
</script>
"""


def browse(folder, page, *options):
    environment = {**os.environ, "HOME": str(folder)}
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)


def probe(made, folder, *options, width):
    # The page's own policy would not let the probe run.
    html = re.sub(r"<meta http-equiv[^>]*>", "", made.html).replace("</head>", PROBE + "</head>")
    page = folder / "probe.html"
    page.write_text(html, encoding="utf-8")
    frame = folder / "frame.html"  # a window is never narrower than 500 pixels, a frame may be
    frame.write_text(f'<iframe src="probe.html" style="border:0;width:{width}px;height:9000px"></iframe>')
    if width < 600:
        html = html.replace("document.body.append(note)", "parent.postMessage(note.textContent, '*')")
        page.write_text(html, encoding="utf-8")
        frame.write_text(
            frame.read_text()
            + "<script>addEventListener('message', (e) => { const n = document.createElement('pre'); n.id = 'probe';"
            " n.textContent = e.data; document.body.append(n); });</script>"
        )
    done = browse(
        folder, frame if width < 600 else page, f"--window-size={max(width, 600)},2000", *options, "--dump-dom"
    )
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(found.group(1))


def test_the_browser_has_nothing_to_complain_about(made, tmp_path):
    done = browse(tmp_path, made.path, "--dump-dom")
    assert "ROC curves" in done.stdout
    assert "CONSOLE" not in done.stderr, done.stderr
    # The script ran under the page's own policy: the button for the theme is there.
    assert re.search(r'<button id="theme" type="button" aria-pressed="(true|false)">(Dark|Light)</button>', done.stdout)


@pytest.mark.parametrize(("width", "cards"), [(1100, 48), (380, 24)], ids=["desk", "phone"])
def test_every_plot_is_drawn_and_nothing_sticks_out(made, tmp_path, width, cards):
    found = probe(made, tmp_path, width=width)
    assert found["errors"] == []
    drawn = [plot["plot"] for plot in found["plots"]]
    assert {name: drawn.count(name) for name in set(drawn)} == {
        "scores": 1, "roc": 1, "batches": 1, "layers": 1, "depth": 1, "profile": cards,
    }  # fmt: skip
    for plot in found["plots"]:
        assert plot["unpainted"] == 0, plot
        assert plot["drawn"] > 50, plot
        if plot["plot"] != "profile":
            assert plot["width"] > 250, plot
            assert plot["height"] > 150, plot
    assert len(found["images"]) == 2 * 48  # the picture, and where its score comes from
    assert all(size > 0 for size in found["images"])
    assert found["overflow"] <= 0


def test_the_page_follows_a_system_that_is_dark(made, tmp_path):
    found = probe(made, tmp_path, "--blink-settings=preferredColorScheme=0", width=1100)
    assert found["before"] == "rgb(17, 20, 24)"
    assert found["theme"] == "light"


def test_the_button_changes_the_theme(made, tmp_path):
    found = probe(made, tmp_path, width=1100)
    assert found["shown"]
    assert found["before"] != found["after"]
    assert found["theme"] in ("dark", "light")
