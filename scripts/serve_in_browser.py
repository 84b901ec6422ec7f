"""Open mofa serve in a real headless browser and move its sliders.

python scripts/serve_in_browser.py

Checked are: no message in the console, no request but to the server, the answer at once, charts, the plan that was
played out and its report when they arrive, a slider of GPUs, of a degree and of memory, searching all again, an error
in a line, another model's config, 400 pixels, dark mode and contrast of text. It needs playwright and a browser, as
report_in_browser.py does, and the packages of mofa[serve]. Where one is missing it says so and passes.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from report_in_browser import CONTRAST, CONTRAST_OF_LARGE, LOW_CONTRAST, NARROW, WIDE, browser_path

JOBS = (
    ("dense", ["llama3-8b", "h100-hgx", "--gpus", "16"]),
    ("experts", ["deepseek-v2-lite", "h100-hgx", "--gpus", "8", "--max", "cp=1"]),
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000,
    "max_position_embeddings": 4096,
}  # fmt: skip
PATIENCE_MS = 120_000
"""For a report to be searched and played out on a busy machine. [ms]"""


@contextmanager
def running_server(arguments: list[str]) -> Iterator[str]:
    """Where a server is that lasts as long as the context."""
    command = [sys.executable, "-m", "mofa", "serve", *arguments, "--no-browser", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        place = re.search(r"http://\S+/", said)
        if place is None:
            raise SystemExit(f"serve_in_browser: the server says {said!r}")
        yield place[0]
    finally:
        process.terminate()
        process.wait()


class ServeCheck:
    """One page of a server in one window, and what is wrong with it."""

    def __init__(self, browser: Any, url: str, name: str, width: int, scheme: str) -> None:
        self.url, self.width, self.name = url, width, f"{name}, {width} px, {scheme}"
        self.wrong: list[str] = []
        self.refused_on_purpose = False
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("request", self._requested)

    def _console(self, message: Any) -> None:
        if not (self.refused_on_purpose and "status of 400" in message.text):
            self.wrong.append(f"console: {message.text}")

    def _requested(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.wrong.append(f"asks for {request.url}")

    def expect(self, holds: bool, what: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.wrong.append(what)

    def text(self, selector: str) -> str:
        """What stands in an element."""
        return str(self.page.text_content(selector) or "")

    def wait_for_answer(self) -> None:
        """Wait for closed forms, which are there within moments."""
        self.page.wait_for_selector("html[data-answered]", timeout=PATIENCE_MS)

    def wait_for_report(self) -> None:
        """Wait for the plan that was played out."""
        self.page.wait_for_function(
            "() => document.getElementById('behind').textContent.includes('played out, in')", timeout=PATIENCE_MS
        )

    def move(self, name: str, place: str) -> None:
        """Move a slider to its first or last place, or one further, by the keyboard."""
        self.page.focus(f"#slider-{name}")
        self.page.keyboard.press({"first": "Home", "last": "End", "next": "ArrowRight", "before": "ArrowLeft"}[place])
        self.wait_for_answer()

    def check_first(self) -> None:
        """The answer and its charts are there, then the report."""
        self.page.goto(self.url)
        self.wait_for_answer()
        self.expect("Closed forms, in" in self.text("#at-once"), f"says at once {self.text('#at-once')!r}")
        self.expect(
            "coarse search says" in self.text("#at-once"), "does not say that its degrees are of a coarse search"
        )
        self.expect("tokens/s/GPU" in self.text("#answer"), "the answer has no plan")
        # by its name, as another answer may replace it meanwhile
        self.page.evaluate("document.getElementById('chart-front').scrollIntoView()")
        self.page.wait_for_selector("#chart-front svg.main-svg")
        self.wait_for_report()
        self.wait_for_answer()
        self.expect("held: " in self.text("#at-once"), f"says behind it {self.text('#at-once')!r}")
        self.expect("coarse" not in self.text("#at-once"), "still holds what a coarse search says")
        self.expect("tokens/s/GPU" in self.text("#replayed"), "the plan that was played out is not shown")
        frame = self.page.frame_locator("#report")
        frame.locator("html[data-ready]").wait_for(timeout=PATIENCE_MS)
        self.expect("What limits it" in frame.locator("main").inner_text(), "the report has no limits")
        self.expect(self.text("#command").startswith("mofa report "), f"the command is {self.text('#command')!r}")

    def check_sliders(self) -> None:
        """GPUs, a degree and memory change the answer, and searching all takes the degree back."""
        self.move("gpus", "next")
        self.expect(
            f"{self.text('#slider-gpus >> xpath=.. >> output')} x" in self.text("#title"), "GPUs: the title stays"
        )
        self.move("tp", "last")
        self.expect("tp=8" in self.text("#answer"), f"tp=8 gives {self.text('#at-once')!r}")
        self.expect("--fix tp=8" in self.text("#command"), f"tp=8 gives {self.text('#command')!r}")
        self.move("memory", "first")
        shown = self.text("#answer") + self.text("#error")
        self.expect("Nothing fits" in shown, f"1 GB gives {shown[:80]!r}")
        self.move("memory", "last")
        self.page.click("#search-all")
        self.wait_for_answer()
        self.expect("--fix" not in self.text("#command"), f"searching all gives {self.text('#command')!r}")
        self.wait_for_report()

    def check_refusal(self) -> None:
        """A number of GPUs that cannot be is said in a line, and the page goes on."""
        self.refused_on_purpose = True
        self.page.fill("#gpus-number", "12")
        self.page.press("#gpus-number", "Enter")
        self.page.wait_for_selector("#error:not([hidden])")
        self.expect("whole nodes" in self.text("#error"), f"12 GPUs give {self.text('#error')!r}")
        self.page.fill("#gpus-number", "8")
        self.page.press("#gpus-number", "Enter")
        self.page.wait_for_selector("#error", state="hidden")
        self.wait_for_answer()

    def check_config(self) -> None:
        """Another model's config is planned."""
        self.page.evaluate("document.querySelector('#controls details').open = true")
        with tempfile.TemporaryDirectory(prefix="mofa-") as folder:
            file = Path(folder) / "tiny<b>.json"
            file.write_text(json.dumps(CONFIG))
            self.page.set_input_files("#config-file", str(file))
            self.page.fill("#config-seq-len", "2048")
            self.page.fill("#config-global-batch", "64")
            self.page.click("#config-send")
            self.page.wait_for_function("() => document.getElementById('title').textContent.startsWith('tiny-b')")
            self.wait_for_answer()
        self.expect("tokens/s/GPU" in self.text("#answer"), f"a config gives {self.text('#error')!r}")

    def check_reading(self) -> None:
        """No line is wider than the window, and all text stands out."""
        self.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        widest = self.page.evaluate("document.documentElement.scrollWidth")
        self.expect(widest <= self.width, f"is {widest} px wide")
        for text in self.page.evaluate(LOW_CONTRAST, [CONTRAST, CONTRAST_OF_LARGE]):
            self.wrong.append(f"contrast: {text}")

    def close(self) -> None:
        """Close the window."""
        self.context.close()


def wrong_with(browser: Any, name: str, arguments: list[str]) -> list[str]:
    """All that is wrong with a server's page, in wide and narrow windows, light and dark."""
    out: list[str] = []
    with running_server(arguments) as url:
        for width, scheme in ((WIDE, "light"), (WIDE, "dark"), (NARROW, "light"), (NARROW, "dark")):
            check = ServeCheck(browser, url, name, width, scheme)
            check.check_first()
            check.check_reading()
            if (width, scheme) in ((WIDE, "light"), (NARROW, "dark")):
                check.check_sliders()
                check.check_refusal()
                check.check_config()
            check.close()
            out += [f"{check.name}: {what}" for what in check.wrong]
    return out


def main() -> int:
    """Check the pages; 1 where something is wrong."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("serve_in_browser: NOT RUN, playwright is not installed (pip install 'mofa[browser]')")
        return 0
    missing = [package for package in ("flask", "waitress") if importlib.util.find_spec(package) is None]
    path = browser_path()
    if missing or path is None:
        lacks = f"{' and '.join(missing)} not installed (pip install 'mofa[serve]')" if missing else (
            "no Chromium or Chrome is installed; MOFA_BROWSER may name one"
        )  # fmt: skip
        print(f"serve_in_browser: NOT RUN, {lacks}")
        return 0
    wrong: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])  # a container's root has none
        for name, arguments in JOBS:
            some = wrong_with(browser, name, arguments)
            print(f"{name}: {'fine' if not some else f'{len(some)} wrong'}")
            wrong += some
        browser.close()
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
