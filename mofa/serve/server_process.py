"""Run a server until it is interrupted."""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path
from socket import socket
from tempfile import TemporaryDirectory

from mofa.serve.question import Question
from mofa.serve.served_job import ServedJob

THREADS = 6
"""Requests that are answered at a time: a page asks for few. [-]"""

ENDING_S = 2.0
"""For the server's thread to end, which a page that is still connected keeps from it. [s]"""


def run_server(
    job: ServedJob, start: Question, listening: socket, *, say: Callable[[str], None], open_browser: bool
) -> None:
    """Serve until an exception, such as that of Ctrl-C; no process is left then, and no file.

    Parameters
    ----------
    job, start
        What is served, and where the sliders stand at first.
    listening
        A socket of :func:`mofa.serve.address.listening_socket`.
    say
        Told where the server is, once it answers.
    open_browser
        Whether a browser shows it, where this machine has a screen.
    """
    from waitress import create_server

    from mofa.serve.address import server_url
    from mofa.serve.answer import import_ahead
    from mofa.serve.app import MOST_REQUEST_BYTES, Answers, make_app

    import_ahead()
    address, port = listening.getsockname()[:2]
    with TemporaryDirectory(prefix="mofa-") as folder:
        answers = Answers(job, start, Path(folder))
        server = create_server(
            make_app(answers, port), sockets=[listening], threads=THREADS, ident=None,
            clear_untrusted_proxy_headers=True, max_request_body_size=2 * MOST_REQUEST_BYTES,
        )  # fmt: skip
        serving = threading.Thread(target=server.run, name="mofa-serve", daemon=True)
        serving.start()
        url = server_url(address, port)
        try:
            say(url)
            if open_browser and has_screen():
                webbrowser.open(url)
            serving.join()
        finally:
            answers.reports.stop()
            server.trigger.pull_trigger(server.close)  # in its own thread, which waits at the sockets that it closes
            serving.join(ENDING_S)


def has_screen() -> bool:
    """Whether a browser would open in a window, and not in the terminal that the server was started from."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
