"""``mofa serve`` in process: what it answers, what it refuses, and the report behind an answer."""

from __future__ import annotations

import html
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mofa
from mofa.errors import SpecError
from mofa.serve.address import listening_socket, loopback_address
from mofa.serve.answer import ANCHORED, degrees_and_anchors_of_plan
from mofa.serve.coarse_space import coarse_space
from mofa.serve.question import Question, SliderDegrees
from mofa.serve.replayed_reports import MOST_STORED, ReplayedReports, report_page_bytes
from mofa.serve.served_job import ServedJob

pytest.importorskip("flask", reason="NOT TESTED: mofa serve, as flask is not installed (pip install 'mofa[serve]')")

PORT = 8421
HOST = f"127.0.0.1:{PORT}"
FEW = {"fix": {"recompute": "full", "sp": True}, "maximum": {}, "with_": [], "without": ["fewer_gpus", "tp_overlap"]}
SMALL = {"gpus": 8, "degrees": {"tp": 2, "pp": 1, "cp": 1, "ep": 1, "micro_batch": 1}}


@pytest.fixture(scope="module")
def job() -> ServedJob:
    """A small job with a small space."""
    workload = mofa.load_workload("llama3-8b", global_batch=16)
    return ServedJob(
        workload, mofa.load_cluster("h100-hgx", 8), mofa.load_framework("megatron"), FEW,
        ("llama3-8b", "h100-hgx", "--global-batch", "16"),
        ("--fix", "recompute=full", "--fix", "sp=true", "--without", "fewer_gpus,tp_overlap"),
    )  # fmt: skip


class Browser:
    """What a page of the server does: requests from its own address."""

    def __init__(self, job: ServedJob, folder: Path) -> None:
        from mofa.serve.app import Answers, make_app

        self.answers = Answers(job, Question(gpus=8), folder)
        self._client = make_app(self.answers, PORT).test_client()

    def get(self, path: str, **headers: str) -> Any:
        """The response to a look at a path."""
        return self._client.get(path, headers={"Host": HOST, **headers})

    def send(self, path: str, body: object, **headers: str) -> Any:
        """The response to a question; text goes as it is."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._client.post(path, data=data, headers={"Host": HOST, "Content-Type": "application/json", **headers})

    def answer(self, body: object) -> Any:
        """The answer at once to a question that may be asked."""
        response = self.send("/answer", body)
        assert response.status_code == 200, response.text
        return response.get_json()

    def wait(self, number: int) -> dict[str, Any]:
        """What is said of a report once nothing more is."""
        until = time.monotonic() + 120.0
        while time.monotonic() < until:
            state = self.get(f"/report/{number}").get_json()
            if state["phase"] in ("finished", "refused", "failed", "stopped"):
                return dict(state)
            time.sleep(0.05)
        raise AssertionError(f"report {number} is still {state}")


@pytest.fixture
def browser(job: ServedJob, tmp_path: Path) -> Iterator[Browser]:
    """A browser of a server of its own."""
    one = Browser(job, tmp_path)
    yield one
    one.answers.reports.stop()


def one_line(response: Any, status: int) -> str:
    """The error of a response, which is one line of JSON and no traceback."""
    assert response.status_code == status, response.text
    text = str(response.get_json()["error"])
    assert "\n" not in text and "Traceback" not in text and 5 < len(text) < 400
    return text


def test_pages_load_nothing_from_elsewhere(browser: Browser) -> None:
    for path in ("/", "/serve.js", "/serve.css", "/charts.js", "/report.css", "/first"):
        response = browser.get(path)
        assert response.status_code == 200
        assert "http://" not in response.text and "https://" not in response.text, path
        assert response.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; ")
        assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert len(browser.get("/plotly.js").data) > 1_000_000


def test_answer_is_what_the_search_says(browser: Browser, job: ServedJob) -> None:
    answer = browser.answer({**SMALL, "memory_gb": 70.0})
    cluster = job.cluster_of_question(Question(gpus=8, memory_gb=70.0))
    fix = {**FEW["fix"], **SMALL["degrees"]}  # type: ignore[dict-item]
    report = mofa.find_plans(
        job.workload, cluster, framework=job.framework, replay=False, banded=False, **{**FEW, "fix": fix}
    ).report
    assert answer["result"]["plans"] == [plan.model_dump(mode="json") for plan in report.plans]
    assert answer["degrees"]["tp"] == 2 and answer["refused"] is None
    assert answer["result"]["cluster"]["capacity_bytes"] == 70e9
    assert "tokens/s/GPU" in answer["html"] and set(answer["charts"]) == {"step", "front"}
    assert answer["choices"]["tp"] == [1, 2, 4, 8] and answer["command"].endswith("--out report")


def test_first_answer_holds_the_degrees_of_a_coarse_search(browser: Browser, job: ServedJob) -> None:
    first = browser.answer({"gpus": 8})
    coarse = mofa.find_plans(
        job.workload, job.cluster, framework=job.framework, replay=False, banded=False,
        space=coarse_space(job, job.cluster), **FEW,
    ).report.plans[0]  # fmt: skip
    assert first["is_coarse"] and first["anchor"] == {name: getattr(coarse.strategy, name) for name in ANCHORED}
    assert first["result"]["plans"][0]["step_s"] <= coarse.step_s
    held = browser.answer({"gpus": 8, "anchor": first["anchor"]})
    assert not held["is_coarse"] and held["result"]["plans"] == first["result"]["plans"]


def test_degrees_of_the_best_plan_give_that_plan(browser: Browser, job: ServedJob) -> None:
    best = mofa.find_plans(job.workload, job.cluster, framework=job.framework, replay=False, banded=False, **FEW)
    strategy = best.report.plans[0].strategy
    held = browser.answer({"gpus": 8, "anchor": {name: getattr(strategy, name) for name in ANCHORED}})
    assert held["result"]["plans"][0]["step_s"] == best.report.plans[0].step_s


def test_all_strategies_are_searched_where_nothing_in_the_coarse_space_runs(job: ServedJob, tmp_path: Path) -> None:
    few = {**FEW, "fix": {**FEW["fix"], "tp": 1, "pp": 1}}  # type: ignore[dict-item]
    single = ServedJob(mofa.load_workload("llama3-8b", global_batch=1), job.cluster, job.framework, few)
    assert max(coarse_space(single, job.cluster).cp) == 2  # and one sequence keeps eight GPUs busy by cp=8 alone
    answer = Browser(single, tmp_path).answer({"gpus": 8})
    assert answer["degrees"]["cp"] == 8 and not answer["is_coarse"]


def test_best_degrees_are_said_before_a_report_is_played(job: ServedJob) -> None:
    said: list[dict[str, Any]] = []
    report_page_bytes(job, Question(gpus=8), lambda **message: said.append(message))
    degrees = [message["best_degrees"] for message in said if "best_degrees" in message]
    best = mofa.find_plans(job.workload, job.cluster, framework=job.framework, replay=False, banded=False, **FEW)
    assert degrees[0] == degrees_and_anchors_of_plan(best.report.plans[0])


def test_what_cannot_run_is_an_answer(browser: Browser) -> None:
    too_many = browser.answer({**SMALL, "degrees": {**SMALL["degrees"], "tp": 16}})  # type: ignore[dict-item]
    assert too_many["refused"] or "Nothing fits" in too_many["html"]
    too_small = browser.answer({**SMALL, "memory_gb": 3.0})
    assert "Nothing fits" in too_small["html"] and too_small["degrees"] is None


BAD_QUESTIONS = {
    "gpus": [None, 0, -8, 8.5, "8", True, 10**9, 12, [8], 10**400],
    "memory_gb": [0, -1.0, "70", True, 1e6, 90.0, [70]],
    "degrees": [3, "tp=2", [2], {"tp": 0}, {"tp": "2"}, {"tp": 2.5}, {"tp": True}, {"tp": -1}, {"dp": 2}, {"pp": 10**9},
                {"vpp": 0}, {"cp": None, "ep": []}, {"etp": {}}, {"micro_batch": 1e3}],
    "anchor": [3, {"tp": 0}, {"cp_kind": "rings"}, {"cp_kind": 1}, {"layout": "x"}, {"tp": 2}],
    "workload": [0, None, "7", "x" * 100, "../0"],
    "nonsense": [1],
}  # fmt: skip


@pytest.mark.parametrize("path", ["/answer", "/report"])
@pytest.mark.parametrize(
    ("field", "value"), [(name, value) for name, values in BAD_QUESTIONS.items() for value in values]
)
def test_bad_values_are_refused_in_a_line(browser: Browser, path: str, field: str, value: object) -> None:
    text = one_line(browser.send(path, {**SMALL, field: value}), 400)
    named = {"workload": "workload", "gpus": "gpus", "nonsense": "nonsense"}.get(field)
    assert named is None or named in text or value == 10**400
    assert browser.get("/report/1").status_code == 404  # nothing was begun


@pytest.mark.parametrize("path", ["/answer", "/report", "/config"])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"8", b"null", b'"x"', b'{"gpus": NaN}', b'{"gpus": 1e999}', b"\xff\xfe", b"[" * 100_000,
     b'{"gpus": 8, "memory_gb": Infinity}'],
)  # fmt: skip
def test_what_is_no_question_is_refused_in_a_line(browser: Browser, path: str, body: bytes) -> None:
    one_line(browser.send(path, body), 400)


def test_missing_numbers_of_gpus_are_said(browser: Browser) -> None:
    assert "gpus" in one_line(browser.send("/answer", {}), 400)


def test_only_this_machine_and_this_page_may_ask(browser: Browser) -> None:
    for host in ("evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:80", "", f"0.0.0.0:{PORT}"):
        assert "Host" in one_line(browser.get("/", Host=host), 400), host
        one_line(browser.send("/answer", SMALL, Host=host), 400)
    for host in (HOST, f"localhost:{PORT}", f"[::1]:{PORT}"):
        assert browser.get("/", Host=host).status_code == 200
    for origin in ("http://evil.example", f"https://{HOST}", "null", "http://127.0.0.1:80"):
        assert "Origin" in one_line(browser.send("/answer", SMALL, Origin=origin), 403)
    one_line(browser.send("/answer", SMALL, **{"Sec-Fetch-Site": "cross-site"}), 403)
    assert (
        browser.send("/answer", SMALL, Origin=f"http://{HOST}", **{"Sec-Fetch-Site": "same-origin"}).status_code == 200
    )
    assert "content type" in one_line(browser.send("/answer", SMALL, **{"Content-Type": "text/plain"}), 400)


def test_bodies_methods_and_paths_are_limited(browser: Browser) -> None:
    one_line(browser.send("/answer", b" " * 2**20 + b"{}"), 413)
    one_line(browser.get("/answer"), 405)
    for path in ("/nothing", "/report/7", "/report/7/report.html", "/../pyproject.toml", "/report/x", "/report/-1"):
        one_line(browser.get(path), 404)


def test_names_of_users_are_escaped(job: ServedJob, tmp_path: Path) -> None:
    name = "<script>alert(1)</script>\u202e"
    model = job.workload.model.model_copy(update={"name": name})
    changed = job.workload.model_copy(update={"name": name, "model": model})
    browser = Browser(ServedJob(changed, job.cluster, job.framework, FEW), tmp_path)
    answer = browser.answer({**SMALL, "memory_gb": 3.0})
    assert "<script" not in answer["html"] + browser.answer(SMALL)["html"]
    assert "\u202e" not in browser.get("/first").get_json()["job"]["name"]


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


def config(**changes: object) -> dict[str, object]:
    """A config as a page hands it over."""
    return {"name": "small.json", "text": json.dumps(LLAMA), "seq_len": 2048, "global_batch": 32, **changes}


def test_a_config_is_planned_from_then_on(browser: Browser) -> None:
    taken = browser.send("/config", config(name="../../etc/my <model>.json")).get_json()
    assert taken["workload"] == "1" and taken["name"] == "my-model" and not taken["has_experts"]
    answer = browser.answer({**SMALL, "workload": "1"})
    assert answer["result"]["workload"]["num_layers"] == 8 and answer["result"]["workload"]["global_batch"] == 32
    assert "my-model.json h100-hgx --seq-len 2048 --global-batch 32" in answer["command"]
    assert browser.answer(SMALL)["result"]["workload"]["num_layers"] == 32


@pytest.mark.parametrize(
    "changes",
    [
        {"text": "{"}, {"text": "[]"}, {"text": ""}, {"text": json.dumps({**LLAMA, "hidden_size": -1})},
        {"text": json.dumps({"model_type": "unheard-of"})}, {"text": "\ud800"}, {"text": 3}, {"text": "x" * 900_001},
        {"name": ""}, {"name": 3}, {"seq_len": 0}, {"seq_len": "2K"}, {"seq_len": 2.5}, {"global_batch": 0},
        {"global_batch": None}, {"global_batch": True}, {"path": "/etc/passwd"},
    ],
)  # fmt: skip
def test_bad_configs_are_refused_in_a_line(browser: Browser, tmp_path: Path, changes: dict[str, object]) -> None:
    text = one_line(browser.send("/config", config(**changes)), 400)
    assert str(tmp_path) not in text
    one_line(browser.send("/answer", {**SMALL, "workload": "1"}), 400)


def test_configs_are_limited(browser: Browser) -> None:
    from mofa.serve.app import MOST_CONFIGS

    for _ in range(MOST_CONFIGS):
        assert browser.send("/config", config()).status_code == 200
    assert f"{MOST_CONFIGS} configs" in one_line(browser.send("/config", config()), 400)


def embedded(page: str) -> Any:
    """The JSON that a report carries."""
    start = page.index('<script type="application/json" id="numbers">')
    return json.loads(page[page.index(">", start) + 1 : page.index("</script>", start)])


@pytest.mark.usefixtures("undrawn")
def test_the_report_behind_an_answer_is_that_of_mofa_report(browser: Browser, tmp_path: Path) -> None:
    import shlex

    from mofa.cli.main import main

    asked = {**SMALL, "memory_gb": 75.0}
    number = browser.send("/report", asked).get_json()["number"]
    state = browser.wait(number)
    assert state["phase"] == "finished", state
    assert state["best"].startswith("best so far: tp=2") and state["elapsed_s"] > 0.0
    page = browser.get(f"/report/{number}/report.html")
    assert page.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'unsafe-inline'; ")
    served = embedded(page.text)
    command = shlex.split(browser.answer(asked)["command"])
    assert main([*command[1:-1], str(tmp_path / "report"), "--quiet"]) == 0
    written = embedded((tmp_path / "report" / "report.html").read_text())
    for document in (served, written):
        del document["result"]["elapsed_s"]
    assert served["result"] == written["result"]
    assert served["best"] == written["best"] and served["analysis"] == written["analysis"]
    best = served["result"]["plans"][0]
    assert best["costed_by"] == "replay" and state["summary"]["step_s"] == best["step_s"]
    assert f'value="{best["step_s"]!r}"' in html.unescape(state["summary"]["html"])
    assert browser.send("/report", asked).get_json()["number"] == number  # is there already


def test_nothing_that_fits_is_said_behind_an_answer(browser: Browser) -> None:
    number = browser.send("/report", {**SMALL, "memory_gb": 3.0}).get_json()["number"]
    state = browser.wait(number)
    assert state["phase"] == "refused" and "nothing fits" in state["message"]
    one_line(browser.get(f"/report/{number}/report.html"), 404)


def test_the_next_question_ends_what_is_made_for_the_last(browser: Browser) -> None:
    first = browser.send("/report", {"gpus": 512}).get_json()["number"]
    process = browser.answers.reports._process
    assert process is not None and process.is_alive()
    browser.answer({"gpus": 512, "anchor": SMALL["degrees"]})  # the same question, with values that are held
    assert process.is_alive()
    browser.answer(SMALL)
    assert not process.is_alive() and browser.wait(first)["phase"] == "stopped"
    again = browser.send("/report", {"gpus": 512}).get_json()["number"]
    assert again != first


def test_a_killed_process_is_said(job: ServedJob, tmp_path: Path) -> None:
    reports = ReplayedReports(tmp_path)
    number = reports.begin(job, Question(gpus=512))
    process = reports._process
    assert process is not None and process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    until = time.monotonic() + 10.0
    while (state := reports.report_state(number)) is not None and state["phase"] != "failed":
        assert time.monotonic() < until, state
        time.sleep(0.02)
    assert state is not None and "killed" in state["message"]


def test_old_reports_are_forgotten(job: ServedJob, tmp_path: Path) -> None:
    reports = ReplayedReports(tmp_path)
    numbers = [
        reports.begin(job, Question(gpus=8, degrees=SliderDegrees(tp=tp, pp=pp))) for tp in (1, 2, 4) for pp in (1, 2)
    ]
    reports.stop()
    assert [reports.report_state(number) is not None for number in numbers] == [False] * (6 - MOST_STORED) + [
        True
    ] * MOST_STORED


@pytest.mark.parametrize("text", ["0.0.0.0", "192.168.1.2", "::", "::ffff:127.0.0.1", "8.8.8.8", "example.org", ""])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"^--address .*: .*; use 127\.0\.0\.1|is no address; use 127"):
        loopback_address(text)


def test_a_taken_port_is_refused() -> None:
    with listening_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SpecError, match=f"--port {port}: is in use by another program"):
            listening_socket("127.0.0.1", port)
