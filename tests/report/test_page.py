"""``mofa report``: one page whose numbers are those of the JSON, the CSV and the terminal, and which loads nothing."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import mofa
from mofa.cli.main import main
from mofa.plan.long_run import Days
from mofa.report.page.document_parts import Chart, DataTable, Number, Paragraph, Section, Tiles
from mofa.report.page.facts import ReportFacts
from mofa.report.page.gather import report_facts
from mofa.report.page.html import MOST_PAGE_BYTES, page_html, script_safe
from mofa.report.page.markdown import page_markdown
from mofa.report.page.write import report_files, report_sections
from tests.report.undrawn import figures_undrawn

JOB = ("llama3-8b", "h100-hgx", "--global-batch", "64", "--gpus", "16", "--jobs", "1")
FIXED = ("--fix", "tp=2", "--fix", "cp=1", "--fix", "micro_batch=1", "--top", "3", "--refine-seconds", "0")


class PageReader(HTMLParser):
    """The marked numbers of a page, its scripts, its links and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.numbers: list[tuple[str, Any, str]] = []
        self.scripts: dict[str, str] = {}
        self.links: list[str] = []
        self.tags: set[str] = set()
        self._open: tuple[str, dict[str, str | None]] = ("", {})
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = tag, dict(attrs)
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "poster")]

    def handle_data(self, data: str) -> None:
        tag, attributes = self._open
        if tag == "data":
            self.numbers.append((str(attributes["data-path"]), json.loads(str(attributes["value"])), data))
        if tag == "script":
            self.scripts[str(attributes.get("id"))] = data
        self._open = "", {}


def value_of(document: Any, path: str) -> Any:
    """What stands in JSON under keys and positions."""
    for key in path.split("."):
        document = document[int(key)] if isinstance(document, list) else document[key]
    return document


class Written:
    """What ``mofa report`` printed and wrote."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        assert (
            main(["report", *arguments, "--out", str(folder), "--json-file", str(folder.parent / "r.json"), "--quiet"])
            == 0
        )
        self.json = json.loads((folder.parent / "r.json").read_text())
        self.html = (folder / "report.html").read_text(encoding="utf-8")
        self.markdown = (folder / "report.md").read_text(encoding="utf-8")
        self.page = PageReader(self.html)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A report of a small job."""
    with figures_undrawn():
        return Written(tmp_path_factory.mktemp("dense") / "out", *JOB, *FIXED)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A report that leads with somebody's own job, with all figures that there are."""
    folder = tmp_path_factory.mktemp("own")
    job = ("export", *JOB[:6], "--strategy", "tp=2 pp=2 recompute=full", "--to", "megatron", "--no-replay", "--quiet")
    assert main([*job, "--out", str(folder / "job")]) == 0
    return Written(
        folder / "out", str(folder / "job" / "megatron.sh"), "h100-hgx", *JOB[4:], *FIXED, "--from", "megatron"
    )


@pytest.fixture(scope="module")
def facts() -> ReportFacts:
    """The facts of a report with two plans."""
    job, machines = mofa.load_workload("llama3-8b", global_batch=32), mofa.load_cluster("h100-hgx", 8)
    return report_facts(mofa.find_plans(job, machines, fix={"tp": 2, "cp": 1, "micro_batch": 1}, top=2))


def test_numbers_of_the_page_are_those_of_the_json(written: Written) -> None:
    document = json.loads(written.page.scripts["numbers"])
    assert document["result"] == written.json == json.loads((written.folder / "plan.json").read_text())
    assert len(written.page.numbers) > 150
    for path, value, _ in written.page.numbers:
        assert value_of(document, path) == value, path


def test_the_page_says_what_the_terminal_says(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *JOB, *FIXED, "--quiet"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["1"])
    texts = {path: text for path, _, text in written.page.numbers}
    for field, unit in (("step_s", ""), ("tokens_per_s_per_gpu", ""), ("mfu", ""), ("memory.device_bytes", " GiB")):
        assert f" {texts[f'result.plans.0.{field}'].removesuffix(unit)} " in line, field


def test_the_page_says_what_the_csv_says(written: Written) -> None:
    plans = pd.read_csv(written.folder / "plans.csv")
    values = {path: value for path, value, _ in written.page.numbers}
    for i, row in enumerate(plans.to_dict("records")):
        for field in ("step_s", "tokens_per_s_per_gpu", "mfu"):
            assert values[f"result.plans.{i}.{field}"] == pytest.approx(row[field], rel=1e-15)


def test_markdown_has_every_number_of_the_page(written: Written) -> None:
    assert [text for _, _, text in written.page.numbers if text not in written.markdown] == []
    images = re.findall(r"!\[[^]]*\]\(([^)]+)\)", written.markdown)
    assert len(images) >= 3 and all((written.folder / name).is_file() for name in images)


def test_a_page_loads_nothing_and_is_small(written: Written) -> None:
    assert [link for link in written.page.links if not link.startswith(("#", "data:"))] == []
    assert "default-src 'none'" in written.html
    assert not {"iframe", "object", "embed", "img"} & written.page.tags
    assert len(written.html.encode()) < MOST_PAGE_BYTES


def test_a_report_has_all_that_it_should(written: Written) -> None:
    titles = re.findall(r"<h2>(.*?)</h2>", written.html)
    assert titles == [
        "The question", "The plan", "Why it wins", "What limits it", "Memory", "Memory against throughput",
        "Alternatives side by side", "The pipeline over a step", "What would help", "How accurate such predictions are",
        "Where the numbers come from", "Assumptions", "How to launch it",
    ]  # fmt: skip
    for words in ("--tensor-model-parallel-size", "Alive at the peak of stage", "facts of the machines"):
        assert words in written.html
    assert set(json.loads(written.page.scripts["charts"])) >= {
        "step", "roofline", "memory", "memory-over-time", "front", "timeline", "sensitivity", "accuracy"
    }  # fmt: skip


def test_the_explained_plan_is_the_plan_that_the_search_returned(written: Written) -> None:
    document = json.loads(written.page.scripts["numbers"])
    best, plan = document["best"], document["result"]["plans"][0]
    assert (best["step_s"], best["memory"]["device_bytes"]) == (plan["step_s"], plan["memory"]["device_bytes"])
    assert best["time"]["exposed"] == plan["time"]["exposed"]


def test_a_page_leads_with_the_job_of_the_user(own: Written) -> None:
    assert re.findall(r"<h2>(.*?)</h2>", own.html)[0] == "Your configuration beside the plan"
    document = json.loads(own.page.scripts["numbers"])
    assert document["own"]["strategy"]["recompute"] == "full"
    values = {path: value for path, value, _ in own.page.numbers}
    assert values["own.step_s"] == document["own"]["step_s"] > values["result.plans.0.step_s"]
    waterfall = json.loads(own.page.scripts["charts"])["own"]["data"][0]
    assert waterfall["x"][0] == pytest.approx(values["own.step_s"])
    assert sum(waterfall["x"]) == pytest.approx(values["result.plans.0.step_s"])


@pytest.mark.parametrize(("fits", "factor"), [(False, 0.9), (False, 1.1), (True, 0.9), (True, 1.1)])
def test_a_job_that_does_not_fit_is_not_praised(facts: ReportFacts, *, fits: bool, factor: float) -> None:
    plan = facts.explained
    more = {} if fits else {"by_component": {**plan.memory.by_component, "activations": 2.0**37}, "fits": False}
    memory = plan.memory.model_copy(update={"device_bytes": plan.memory.device_bytes if fits else 2.0**37, **more})
    own = plan.model_copy(update={"memory": memory, "step_s": plan.step_s * factor})
    section = report_sections(replace(facts, own=own))[0]
    texts = ["".join(map(str, part.pieces)) for part in section.parts if isinstance(part, Paragraph)]
    if fits:
        assert not any("not fit" in text for text in texts)
        assert texts[1].endswith({0.9: "is -10.0%.", 1.1: "10.0% more tokens a second."}[factor])
    else:
        limit = plan.memory.limit_bytes / 2**30
        assert texts[0] == f"Yours does not fit: its fullest GPU needs 128.00 of {limit:.2f} GiB."
        assert texts[2].endswith(". It fits.") and not any("faster" in text or "%" in text for text in texts)


def test_what_the_user_fixed_is_said_and_not_changed(written: Written) -> None:
    rows = json.loads(written.page.scripts["numbers"])["analysis"]["changes"]
    assert rows and not {row["field"] for row in rows} & {"tp", "cp", "micro_batch"}
    assert "You fixed tp=2 cp=1 micro_batch=1" in written.html
    assert "You fixed tp, cp, micro_batch: changes of that are left out." in written.html
    asked, taken = written.markdown.split("| asked for |")[1].split("| not asked for |")
    assert "| fixed |" in asked and "| fixed |" not in taken and "| framework |" in taken


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A report of which options say more."""
    bounds = ("--max", "pp=1", "--without", "recompute", "--without", "fewer_gpus")
    given = ("--framework", "megatron", "--set", "workload.routing.kind=balanced")
    with figures_undrawn():
        return Written(tmp_path_factory.mktemp("asked") / "out", *JOB, *FIXED, *bounds, *given)


def test_what_bounds_and_words_took_away_is_said_and_not_compared(asked: Written) -> None:
    rows = json.loads(asked.page.scripts["numbers"])["analysis"]["changes"]
    assert {row["field"] for row in rows} == {"zero"}
    assert "You fixed tp, cp, micro_batch, bounded pp and left out recomputation: changes of that" in asked.html


def test_what_options_gave_is_not_called_a_default(asked: Written) -> None:
    given, taken = asked.markdown.split("| asked for |")[1].split("| not asked for |")
    assert "| framework |" in given and "| framework |" not in taken
    assert "| routing |" in given and "| routing |" not in taken and "| objective |" in taken


def test_counts_of_what_fits_are_said_to_count(facts: ReportFacts) -> None:
    """Those that the search left, and those of the table beside them that are slower."""
    report = facts.report
    texts = {
        section.key: " ".join("".join(map(str, part.pieces)) for part in section.parts if isinstance(part, Paragraph))
        for section in report_sections(facts)
    }
    fits = int(facts.strategies["fits"].sum())
    assert f"{report.feasible:,} fit and were not ruled out as slower" in texts["why"]
    assert f"of {fits:,} strategies that fit" in texts["front"]
    less = fits - report.feasible
    assert (f" {less:,} of them cannot be among the best" in texts["front"]) == (less > 0)


def test_days_have_no_band_that_leaves_out_the_step(facts: ReportFacts) -> None:
    days = Days(p10=20.16, p50=20.18, p90=20.21)
    plan = facts.report.plans[0].model_copy(update={"days": days})
    report = facts.report.model_copy(update={"plans": (plan, *facts.report.plans[1:])})
    sections = {section.key: section for section in report_sections(replace(facts, report=report))}
    tiles = next(part for part in sections["plan"].parts if isinstance(part, Tiles)).tiles
    tile = next(tile for tile in tiles if tile.label == "days with failures")
    assert str(tile.number) == "20.2" and "8 in 10" not in tile.note and "step is not counted" in tile.note


def test_without_scripts_no_chart_is_promised(written: Written) -> None:
    quiet = re.findall(r"<noscript>(.*?)</noscript>", written.html, re.S)
    assert any("figure" in text and "display: none" in text for text in quiet)
    said = next(text for text in quiet if "Scripts are off" in text)
    assert "Every number" not in said and "but for the pipeline" in said


def test_markdown_cells_hold_layouts_as_they_are() -> None:
    layout = "Et*5|(t*6|)*4t*3L"
    table = DataTable((("field", "left"), ("value", "left")), [("layout", layout)])
    row = page_markdown([Section("a", "A", (table,))], "title", ()).splitlines()[-1]
    cells = re.split(r"(?<!\\)\|", row)
    assert len(cells) == 4 and re.sub(r"\\(.)", r"\1", cells[2]).strip() == layout


NASTY = "</script><script>alert(1)</script>\u202e**|<img src=x onerror=alert(2)>"


def test_names_of_users_are_escaped(facts: ReportFacts) -> None:
    report = facts.report.model_copy(update={"workload": facts.report.workload.model_copy(update={"name": NASTY})})
    files = report_files(replace(facts, report=report, command=f"mofa {NASTY}", launch={NASTY: NASTY}))
    page = files["report.html"].decode()
    assert "alert(1)</script>" not in page and "<img" not in page and "\u202e" not in page
    assert html.escape("</script><script>alert(1)") in page
    assert json.loads(PageReader(page).scripts["numbers"])["result"]["workload"]["name"] == NASTY
    heading = files["report.md"].decode().splitlines()[0]
    assert "\\<script\\>" in heading and "\u202e" not in heading


def test_json_in_a_script_cannot_end_it() -> None:
    assert json.loads(script_safe(json.dumps({"a": NASTY}))) == {"a": NASTY}
    assert not set("<>&\u2028") & set(script_safe(json.dumps({"a": NASTY + "\u2028&"}, ensure_ascii=False)))


def test_charts_are_such_as_plotly_has(facts: ReportFacts) -> None:
    from plotly.graph_objects import Figure

    charts = [part for section in report_sections(facts) for part in section.parts if isinstance(part, Chart)]
    assert len({chart.name for chart in charts}) == len(charts) >= 8
    for chart in charts:
        Figure(dict(chart.figure))


def test_the_front_is_no_worse_than_its_dots(facts: ReportFacts) -> None:
    front = next(s for s in report_sections(facts) if s.key == "front").parts[1]
    assert isinstance(front, Chart)
    dots, best, _ = front.figure["data"]
    for x, y in zip(dots["x"], dots["y"], strict=True):
        assert any(a <= x and b >= y for a, b in zip(best["x"], best["y"], strict=True))
    columns = list(front.filters)
    for trace in front.figure["data"]:
        for text, row in zip(trace["text"], trace["customdata"], strict=True):
            assert len(row) == len(columns)
            said = dict(word.split("=", 1) for word in text.split() if "=" in word)
            assert all(said.get(name, value) == value for name, value in zip(columns, row, strict=True))


def test_a_number_without_a_value_is_a_dash(facts: ReportFacts) -> None:
    assert facts.shown_seconds("result.plans.0.usd") == "–"
    shown = facts.shown_seconds("result.plans.0.step_s")
    assert isinstance(shown, Number) and shown.value == facts.report.plans[0].step_s


def test_every_kind_of_part_is_rendered(facts: ReportFacts) -> None:
    kinds = {type(part) for section in report_sections(facts) for part in section.parts}
    assert {Paragraph, Tiles, DataTable, Chart} <= kinds
    lone = Section("a", "A", (Paragraph(("words",)),))
    assert '<p class="plain">words</p>' in page_html(facts, [lone], "title")


def test_neither_help_nor_plan_loads_what_draws_pages() -> None:
    code = (
        "import sys, mofa.cli.main, mofa.cli.commands.plan, mofa.cli.commands.report, mofa.cli.report_page, "
        "mofa.report.page.write\n"
        "print([name for name in ('plotly', 'jinja2', 'matplotlib', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_browser_check_says_that_it_did_not_run_without_a_browser(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "report_in_browser.py"
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(script.parents[1])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.startswith("report_in_browser: NOT RUN, ") and done.stderr == ""


def test_what_is_wrong_is_said_before_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *JOB, "--out", str(tmp_path / "x"), "--to", "megatrn"]) == 2
    assert "did you mean megatron" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["report", *JOB, "--out", str(tmp_path / "file" / "x")]) == 2
    assert main(["report", *JOB[:4], "--gpus", "1", "--fix", "cp=1", "--out", str(tmp_path / "y"), "--quiet"]) == 3
    assert re.search(r"nothing fits; [\d,]+ GPUs would do", capsys.readouterr().err)
    assert not (tmp_path / "y").exists()


@pytest.mark.usefixtures("undrawn")
def test_plan_writes_the_same_page(tmp_path: Path) -> None:
    assert main(["plan", *JOB, *FIXED, "--no-replay", "--out", str(tmp_path / "out"), "--quiet"]) == 0
    page = PageReader((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    document = json.loads(page.scripts["numbers"])
    assert document["result"] == json.loads((tmp_path / "out" / "plan.json").read_text())
    assert "timeline" not in json.loads(page.scripts["charts"])  # nothing was played
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "plans were played out" not in text and "played out once more" not in text
    assert text.count("nothing was played out") == 2


def test_figures_show_the_numbers_of_the_charts(facts: ReportFacts) -> None:
    from mofa.report.figures.resource_changes import plot_resource_changes
    from mofa.report.figures.roofline_plot import plot_roofline

    axes = plot_roofline(facts.plan_analysis.roofline)
    shown = {line.get_label(): (line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines[1:]}
    for point in facts.plan_analysis.roofline.points:
        if point.flops:
            name = {"gemm": "matrix products", "attention": "attention"}[point.kind]
            assert shown[name] == (point.flops_per_byte, point.flops_per_s / 1e12)
    changes = facts.plan_analysis.resources
    widths = [bar.get_width() for bar in plot_resource_changes(changes).patches]
    assert widths == [100 * change.step_change_less for change in changes] + [
        100 * change.step_change_more for change in changes
    ]
