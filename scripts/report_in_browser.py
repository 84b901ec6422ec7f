"""Open reports in a real headless browser and check what a reader meets there.

python scripts/report_in_browser.py [REPORT.html ...]

Without a page, three are made: of a dense model, of a mixture of experts, and of somebody's own job. Checked are: no
message in the console, no request to anywhere, every chart drawn, pointing at a dot, filters, the numbers, 400 pixels,
dark mode, contrast of text, and print. It needs playwright (pip install 'mofa[browser]') and Chromium or Chrome:
MOFA_BROWSER names it where it is not on the path. Where one is missing it says so and passes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
WIDE, NARROW = 1200, 400
"""Widths of windows. [px]"""
CONTRAST, CONTRAST_OF_LARGE = 4.5, 3.0
"""The least of text over what is behind it: WCAG 2.2, success criterion 1.4.3, level AA. [-]"""
PAPER_PX = 718
"""Width of A4 without its margins, at 96 px an inch. [px]"""
MOST_BYTES = 5_000_000
"""Of a page. [B]"""


def browser_path() -> str | None:
    """The browser to drive; None where there is none."""
    named = os.environ.get("MOFA_BROWSER")
    if named:
        return shutil.which(named)
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def made_pages(folder: Path) -> Iterator[Path]:
    """Reports of a dense model, of experts, and of a job of somebody's own."""
    dense = ["llama3-8b", "h100-hgx", "--gpus", "16"]
    experts = ["deepseek-v2-lite", "h100-hgx", "--gpus", "8", "--fix", "cp=1"]
    _mofa("export", *dense, "--strategy", "tp=2 pp=2 recompute=selective", "--to", "megatron", "--out", folder / "job")
    own = [folder / "job" / "megatron.sh", "h100-hgx", "--gpus", "16", "--from", "megatron"]
    for name, job in (("dense", dense), ("experts", experts), ("own", own)):
        _mofa("report", *job, "--out", folder / name, "--refine-seconds", "0")
        yield folder / name / "report.html"


def _mofa(*arguments: object) -> None:
    command = [sys.executable, "-m", "mofa", *map(str, arguments), "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class PageCheck:
    """One page in one window, and what is wrong with it."""

    def __init__(self, browser: Any, file: Path, width: int, scheme: str) -> None:
        self.file, self.width, self.name = file, width, f"{file.parent.name}, {width} px, {scheme}"
        self.wrong: list[str] = []
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.wrong.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("request", self._requested)

    def _requested(self, request: Any) -> None:
        if request.url != self.file.as_uri() and not request.url.startswith(("data:", "blob:")):
            self.wrong.append(f"asks for {request.url}")

    def expect(self, holds: bool, what: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.wrong.append(what)

    def open(self) -> None:
        """Load the page, open what is folded, and scroll through it so that every chart is drawn."""
        self.page.goto(self.file.as_uri())
        self.page.wait_for_selector("html[data-ready]", timeout=60_000)
        self.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        for place in self.page.query_selector_all(".chart"):
            place.scroll_into_view_if_needed()
            self.page.wait_for_function("(place) => place.querySelector('svg.main-svg') !== null", arg=place)
        self.page.wait_for_timeout(300)

    def check_reading(self) -> None:
        """No line is wider than the window, and all text stands out."""
        widest = self.page.evaluate("document.documentElement.scrollWidth")
        self.expect(widest <= self.width, f"is {widest} px wide")
        for text in self.page.evaluate(LOW_CONTRAST, [CONTRAST, CONTRAST_OF_LARGE]):
            self.wrong.append(f"contrast: {text}")

    def check_numbers(self) -> None:
        """Every marked number is the one of the JSON that the page carries."""
        document = json.loads(self.page.evaluate("document.getElementById('numbers').textContent"))
        marked = self.page.evaluate(
            "[...document.querySelectorAll('data')].map((each) => [each.dataset.path, each.value])"
        )
        self.expect(len(marked) > 100, f"only {len(marked)} numbers are marked")
        for path, value in marked:
            node: Any = document
            for key in path.split("."):
                node = node[int(key)] if isinstance(node, list) else node[key]
            self.expect(node == json.loads(value), f"{path}: {node} is shown as {value}")

    def check_pointing(self) -> None:
        """Pointing at the plan's dot shows its strategy."""
        place = self.page.query_selector("#chart-front")
        place.scroll_into_view_if_needed()
        x, y = self.page.evaluate(PLACE_OF_PLAN)
        self.page.mouse.move(x - 40, y + 40)
        self.page.mouse.move(x, y, steps=8)
        try:
            self.page.wait_for_selector("#chart-front .hoverlayer .hovertext", timeout=5_000)
        except Exception as error:  # playwright's own, whose module may be missing here
            self.wrong.append(f"pointing at the plan shows nothing: {type(error).__name__}")
            return
        said = self.page.text_content("#chart-front .hoverlayer")
        self.expect("tokens/s/GPU" in said and "=" in said, f"pointing at the plan shows {said!r}")

    def check_filters(self) -> None:
        """Every choice leaves dots of that degree alone, and the reset brings all back."""
        before = self.page.evaluate(DOTS)
        for place, select in enumerate(self.page.query_selector_all("#front .filters select")):
            choice = select.query_selector("option:last-child").text_content()
            select.select_option(label=choice)
            shown = self.page.evaluate(DOTS)
            others = [row for row in shown if row[place] != choice]
            self.expect(not others and len(shown) < len(before), f"filter {place}={choice} leaves {others[:2]}")
            words = self.page.text_content("#front .filters output")
            self.expect(words.startswith(f"{len(shown)} of {len(before)}"), f"filter says {words!r}")
            select.select_option(value="")
        self.page.click("#front .filters button")
        self.page.wait_for_timeout(100)
        self.expect(len(self.page.evaluate(DOTS)) == len(before), "the reset does not bring all dots back")

    def check_print(self) -> None:
        """It prints, on white, no wider than paper."""
        self.page.emulate_media(media="print")
        self.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        self.page.wait_for_timeout(500)
        hidden = self.page.evaluate("getComputedStyle(document.querySelector('nav')).display")
        self.expect(hidden == "none", "the sections' links are printed")
        widest = self.page.evaluate(
            "Math.max(...[...document.querySelectorAll('.main-svg')].map((each) => each.getBoundingClientRect().width))"
        )
        self.expect(widest <= PAPER_PX, f"a chart is {widest} px wide on paper")
        for text in self.page.evaluate(LOW_CONTRAST, [CONTRAST, CONTRAST_OF_LARGE]):
            self.wrong.append(f"contrast on paper: {text}")
        gridded = self.page.evaluate("getComputedStyle(document.querySelector('#chart-step .xgrid')).stroke")
        self.expect(gridded == "rgb(204, 204, 204)", f"charts are printed in the colours of the screen ({gridded})")
        paper = self.page.pdf(format="A4")
        self.expect(paper.startswith(b"%PDF") and len(paper) > 50_000, f"its print has {len(paper)} bytes")

    def close(self) -> None:
        """Close the window."""
        self.context.close()


PLACE_OF_PLAN = """() => {
  const chart = document.getElementById('chart-front'), layout = chart._fullLayout, dots = chart.data[2];
  const box = chart.getBoundingClientRect();
  return [box.left + layout.margin.l + layout.xaxis.l2p(dots.x[0]) + (layout._size.l - layout.margin.l),
          box.top + layout._size.t + layout.yaxis.l2p(dots.y[0])];
}"""
DOTS = "() => document.getElementById('chart-front').data.flatMap((trace) => trace.customdata)"
LOW_CONTRAST = """([least, ofLarge]) => {
  const parts = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = (rgb) => {
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb.slice(0, 3).map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const back = parts(getComputedStyle(each).backgroundColor);
      if (back.length && (back.length < 4 || back[3] > 0.99)) return back;
    }
    return [255, 255, 255];
  };
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const low = new Map(), UNREAD = 'script, style, noscript, title, option, .hoverlayer, .modebar';
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement, style = getComputedStyle(element);
    if (!texts.currentNode.textContent.trim() || element.closest(UNREAD)) continue;
    if (!element.getClientRects().length || style.visibility === 'hidden') continue;
    const inChart = element.closest('svg') !== null;
    const ink = parts(inChart ? style.fill : style.color), size = parseFloat(style.fontSize);
    const wanted = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? ofLarge : least;
    const reached = ratio(light(ink), light(behind(inChart ? element.closest('.chart') : element)));
    if (reached < wanted) low.set(reached.toFixed(2) + ' of ' + texts.currentNode.textContent.trim().slice(0, 40), 1);
  }
  return [...low.keys()].slice(0, 5);
}"""


def wrong_with(browser: Any, file: Path) -> list[str]:
    """All that is wrong with a page, in wide and narrow windows, light and dark."""
    out = [] if file.stat().st_size <= MOST_BYTES else [f"{file.name}: has {file.stat().st_size:,} bytes"]
    for width, scheme in ((WIDE, "light"), (WIDE, "dark"), (NARROW, "light"), (NARROW, "dark")):
        check = PageCheck(browser, file, width, scheme)
        check.open()
        check.check_reading()
        if width == WIDE:
            check.check_numbers()
            check.check_pointing()
            check.check_filters()
            check.check_print()
        check.close()
        out += [f"{check.name}: {what}" for what in check.wrong]
    return out


def main() -> int:
    """Check pages; 1 where something is wrong."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("report_in_browser: NOT RUN, playwright is not installed (pip install 'mofa[browser]')")
        return 0
    path = browser_path()
    if path is None:
        print("report_in_browser: NOT RUN, no Chromium or Chrome is installed; MOFA_BROWSER may name one")
        return 0
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mofa-") as scratch, sync_playwright() as driver:
        pages = [Path(name).resolve() for name in sys.argv[1:]] or list(made_pages(Path(scratch)))
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])  # a container's root has none
        for file in pages:
            some = wrong_with(browser, file)
            print(f"{file.parent.name}: {file.stat().st_size:,} bytes, {'fine' if not some else f'{len(some)} wrong'}")
            wrong += some
        browser.close()
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
