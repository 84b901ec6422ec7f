"""The pages and answers of a server, as a WSGI application; it reads nothing but its requests and mofa's own files."""

from __future__ import annotations

import json
import re
import threading
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mofa.errors import MofaError, SpecError
from mofa.plan.summaries import WorkloadSummary
from mofa.plan.version import installed_version
from mofa.report.page.html import page_source_file_text
from mofa.serve.answer import ANCHORED, answer_at_once
from mofa.serve.question import DEGREES, HandedConfig, Question, read_handed_config, read_question
from mofa.serve.replayed_reports import ReplayedReports
from mofa.serve.served_job import ServedJob
from mofa.specs.load import load_workload
from mofa.specs.shown_text import escape_invisible

if TYPE_CHECKING:  # the extra serve, which not every machine has
    from flask import Flask, Request, Response
    from werkzeug.exceptions import HTTPException

MOST_REQUEST_BYTES = 2**20
"""Of a request's body: configs have some thousand bytes. [B]"""
MOST_CONFIGS = 32
"""Configs that a server takes, one after the other. [-]"""
OWN_NAMES = ("127.0.0.1", "localhost", "::1")
"""Names of this machine; a request that calls it otherwise was led here by somebody else's name (DNS rebinding)."""
HEADERS = {
    "X-Content-Type-Options": "nosniff", "X-Frame-Options": "SAMEORIGIN", "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store", "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}  # fmt: skip
NOTHING_FOREIGN = (
    "default-src 'none'; script-src {scripts}; style-src 'self' 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; frame-src 'self'; frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
)
"""What a page may load; reports carry their script in them."""


class Answers:
    """What a server answers: closed forms at once, one after the other, and reports behind them."""

    def __init__(self, job: ServedJob, start: Question, folder: Path) -> None:
        self.jobs = {"0": job}
        self.start = start
        self.reports = ReplayedReports(folder)
        self._folder = folder
        self._lock = threading.Lock()

    def job_of_question(self, question: Question) -> ServedJob:
        """The job that a question is about.

        Raises
        ------
        SpecError
            If there is none of that number.
        """
        if question.workload not in self.jobs:
            raise SpecError(f"request: workload {question.workload!r} is none of this server's; hand its config over")
        return self.jobs[question.workload]

    def answer_at_once(self, question: Question) -> dict[str, Any]:
        """The answer of closed forms; what is made for another question ends, and leaves its cores."""
        job = self.job_of_question(question)
        self.reports.stop_others(question)
        with self._lock:
            return answer_at_once(job, question)

    def begin_report(self, question: Question) -> int:
        """The number of the report behind an answer."""
        job = self.job_of_question(question)
        job.cluster_of_question(question)
        return self.reports.begin(job, question)

    def read_handed_config(self, config: HandedConfig) -> dict[str, Any]:
        """Read a model's config, and say which workload it is from now on."""
        with self._lock:
            if len(self.jobs) > MOST_CONFIGS:
                raise SpecError(f"{config.name[:60]}: this server has taken {MOST_CONFIGS} configs; start it again")
            number = str(len(self.jobs))
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(config.name).stem).strip(".-")[:60] or "config"
            file = self._folder / f"config-{number}" / f"{name}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text(config.text, encoding="utf-8", errors="surrogatepass")
            try:
                workload = load_workload(file, seq_len=config.seq_len, global_batch=config.global_batch)
            except MofaError as error:
                raise SpecError(str(error).replace(str(file), f"{name}.json")) from None
            words = (f"{name}.json", self.jobs["0"].words[1], "--seq-len", str(config.seq_len), "--global-batch",
                     str(config.global_batch))  # fmt: skip
            self.jobs[number] = self.jobs["0"].of_workload(workload, words)
        return {"workload": number, **_named(self.jobs[number])}


def _named(job: ServedJob) -> dict[str, Any]:
    summary = WorkloadSummary.from_spec(job.workload)
    return {
        "name": escape_invisible(summary.name), "num_params": summary.num_params,
        "seq_len": summary.seq_len, "global_batch": summary.global_batch,
        "has_experts": job.workload.model.moe is not None,
    }  # fmt: skip


def make_app(answers: Answers, port: int) -> Flask:
    """The application.

    Parameters
    ----------
    answers
        What it answers.
    port
        Where it listens, as requests must say it. [-]
    """
    from flask import Flask, Response, request
    from plotly.offline import get_plotlyjs
    from werkzeug.exceptions import HTTPException

    app = Flask("mofa.serve", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MOST_REQUEST_BYTES
    app.before_request(lambda: _refuse_others(request, port))
    app.after_request(_with_headers)
    app.register_error_handler(MofaError, lambda error: _error(str(error), 400))
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _bug)
    page = (files("mofa.serve.page") / "index.html").read_text(encoding="utf-8")
    first = {
        "version": installed_version(), "start": answers.start.model_dump(mode="json"),
        "job": _named(answers.jobs["0"]),
        "degrees": DEGREES, "anchored": ANCHORED, "gpus_per_node": answers.jobs["0"].cluster.node.gpus_per_node,
        "gpu": escape_invisible(answers.jobs["0"].cluster.gpu.name),
        "capacity_gb": answers.jobs["0"].cluster.gpu.capacity_bytes.value / 1e9,
    }  # fmt: skip

    def text(content: str, kind: str) -> Response:
        return Response(content, content_type=f"{kind}; charset=utf-8")

    app.add_url_rule("/", "page", lambda: text(page, "text/html"))
    app.add_url_rule("/first", "first", lambda: _json(first))
    app.add_url_rule("/plotly.js", "plotly", lambda: text(get_plotlyjs(), "text/javascript"))
    app.add_url_rule("/charts.js", "charts", lambda: text(page_source_file_text("charts.js"), "text/javascript"))
    app.add_url_rule("/report.css", "report_style", lambda: text(page_source_file_text("page.css"), "text/css"))
    for name, kind in (("serve.js", "text/javascript"), ("serve.css", "text/css")):
        content = (files("mofa.serve.page") / name).read_text(encoding="utf-8")
        app.add_url_rule(f"/{name}", name, lambda content=content, kind=kind: text(content, kind))
    app.add_url_rule(
        "/answer", "answer", lambda: _json(answers.answer_at_once(read_question(_body(request)))), methods=["POST"]
    )
    app.add_url_rule(
        "/report", "begin", lambda: _json({"number": answers.begin_report(read_question(_body(request)))}),
        methods=["POST"],
    )  # fmt: skip
    app.add_url_rule(
        "/config",
        "config",
        lambda: _json(answers.read_handed_config(read_handed_config(_body(request)))),
        methods=["POST"],
    )
    app.add_url_rule(
        "/report/<int:number>", "state", lambda number: _json(_or_404(answers.reports.report_state(number)))
    )
    app.add_url_rule(
        "/report/<int:number>/report.html", "report",
        lambda number: Response(_or_404(answers.reports.page_html(number)), content_type="text/html; charset=utf-8"),
    )  # fmt: skip
    return app


def _body(asked: Request) -> bytes:
    """A request's body, which says that it is JSON: pages of other sites cannot say so without asking first."""
    if asked.mimetype != "application/json":
        raise SpecError("request: its content type is not application/json; send JSON")
    body: bytes = asked.get_data()
    return body


def _refuse_others(asked: Request, port: int) -> None:
    """Refuse requests that a page of somebody else's sent, by a name or from an address that is not this server's."""
    from flask import abort

    names = {f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name in OWN_NAMES}
    if asked.headers.get("Host", "") not in names:
        abort(400, "Host: is not this server's; open it as 127.0.0.1 or localhost, with its port")
    origin = asked.headers.get("Origin")
    if origin is not None and (urlsplit(origin).scheme, urlsplit(origin).netloc) != ("http", asked.headers["Host"]):
        abort(403, "Origin: is another site's, which may not ask this server")
    if asked.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        abort(403, "Sec-Fetch-Site: is another site, which may not ask this server")


def _with_headers(response: Response) -> Response:
    from flask import request

    response.headers.update(HEADERS)
    is_report = request.endpoint == "report"
    response.headers["Content-Security-Policy"] = NOTHING_FOREIGN.format(
        scripts="'unsafe-inline'" if is_report else "'self'"
    )
    return response


def _or_404(value: Any) -> Any:
    from flask import abort

    if value is None:
        abort(404, "report: is not there; ask for it again")
    return value


def _json(value: Any) -> Response:
    from flask import Response

    return Response(json.dumps(value, allow_nan=False, separators=(",", ":")), content_type="application/json")


def _error(message: str, status: int) -> Response:
    response = _json({"error": escape_invisible(" ".join(message.split()))})
    response.status_code = status
    return response


def _http_error(error: HTTPException) -> Response:
    return _error(error.description or error.name, error.code or 500)


def _bug(error: Exception) -> Response:
    return _error(f"{type(error).__name__}: {error}; this is a bug of mofa", 500)
