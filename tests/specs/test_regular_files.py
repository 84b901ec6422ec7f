"""Named pipes, sockets and devices in place of files: refused in one line, where opening them would wait."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mofa.errors import SpecError
from mofa.export.entry import load_result_json
from mofa.export.read_job import read_job
from mofa.specs.files import load_json, load_yaml, read_text
from mofa.specs.huggingface.keys import read_keys

READERS: list[Callable[[Path], object]] = [
    load_yaml, lambda path: load_json(path, str(path)), read_keys, load_result_json,
    lambda path: read_job("megatron", path), lambda path: read_job("torchtitan", path),
]  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_a_named_pipe_is_refused_and_not_waited_for(reader: Callable[[Path], object], tmp_path: Path) -> None:
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    with pytest.raises(SpecError, match=r"config\.json: is a named pipe, no file") as error:
        reader(pipe)
    assert "\n" not in str(error.value)


def test_a_device_is_refused_and_a_shells_own_pipe_read() -> None:
    with pytest.raises(SpecError, match="is a device"):
        load_yaml("/dev/zero")
    reading, writing = os.pipe()
    os.write(writing, b"a: 1\n")
    os.close(writing)
    assert read_text(f"/dev/fd/{reading}", "x") == "a: 1\n"
    os.close(reading)
