"""docs/clusters.md: each cluster from nothing to a plan by the page's files and commands, and files to fill in."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from mofa.specs.files import bundled_dir
from mofa.specs.load import load_cluster
from tests.cli.conftest import Cli, one_line_of

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
SIX = PAGE[PAGE.index("## Six clusters") :]
SECTIONS = dict(re.findall(r"^### ([^\n]*)\n(.*?)(?=^##|\Z)", SIX, re.MULTILINE | re.DOTALL))
QUICK = ("--no-replay", "--refine-seconds", "0", "--top", "1", "--json", "--max", "cp=1", "--max", "vpp=1")


@pytest.mark.parametrize("cluster", SECTIONS)
def test_a_cluster_of_the_page_comes_to_a_plan(cli: Cli, cluster: str) -> None:
    plans = 0
    for language, text in re.findall(r"```(yaml|bash)\n(.*?)```", SECTIONS[cluster], re.DOTALL):
        if language == "yaml":
            name, _, content = text.removeprefix("# ").partition("\n")
            Path(name).write_text(content, encoding="utf-8")
            continue
        for line in text.splitlines():
            words = shlex.split(line, comments=True)[1:]
            done = cli(*words, *(QUICK if words[0] == "plan" else ()))
            assert done.returncode == 0, done.stderr
            if words[0] == "plan":
                plans += 1
                plan = json.loads(done.stdout)["plans"][0]
                assert 0.2 < plan["mfu"] < 0.7
    assert plans == 1


def test_the_page_has_six_clusters() -> None:
    assert len(SECTIONS) == 6


@pytest.mark.parametrize("folder", ["gpu", "node"])
def test_reading_a_file_to_fill_in_names_all_that_is_left(cli: Cli, folder: str) -> None:
    like = {"gpu": "h100-sxm", "node": "h100-hgx"}[folder]
    assert cli("new", folder, "--like", like, "--out", "mine.yaml").returncode == 0
    line = one_line_of(cli("show", "hardware", "mine.yaml").stderr)
    left = {
        "gpu": ("name", "peak_flops_per_s.bf16", "tdp_w"),
        "node": ("gpu", "intra.bandwidth_bytes_per_s", "nic.name"),
    }
    assert all(field in line for field in left[folder]) and "still ???" in line
    again = cli("new", folder, "--like", like, "--out", "mine.yaml")
    assert again.returncode == 2 and "exists" in one_line_of(again.stderr)


@pytest.mark.parametrize(
    ("folder", "name"),
    [("gpu", "a100-80gb"), ("gpu", "l40s"), ("gpu", "mi300x"), ("node", "h100-hgx"), ("node", "a100-pcie-pairs")],
)
def test_filled_in_with_what_the_comments_say_it_is_the_profile_that_it_is_like(
    cli: Cli, folder: str, name: str
) -> None:
    """Every fact that is asked for has its value in the comment; some names alone have none."""
    text = cli("new", folder, "--like", name).stdout
    filled = re.sub(rf"\?\?\?(.*; {re.escape(name)}: ([^\n]+))$", r"\2\1", text, flags=re.MULTILINE)
    filled = re.sub(rf"\?\?\?(  # {re.escape(name)}: ([^\n]+))$", r"\2\1", filled, flags=re.MULTILINE)
    filled = filled.replace("protocol: ???", "# protocol:").replace("name: ???", "name: mine", 1)
    filled = filled.replace("source: ???", "source: a test")
    assert "???" not in filled.split("\n", 1)[1]
    Path("mine.yaml").write_text(filled, encoding="utf-8")
    node = "mine.yaml" if folder == "node" else _node_of("mine")
    own = load_cluster(node, 1)
    like = load_cluster(name, 1) if folder == "node" else load_cluster(_node_of(name), 1)
    assert own.gpu.curves.gemm["bf16"].form == like.gpu.curves.gemm["bf16"].form
    assert own.gpu.peak_flops_per_s["bf16"].value == like.gpu.peak_flops_per_s["bf16"].value
    assert own.node.nic.bandwidth_bytes_per_s.value == like.node.nic.bandwidth_bytes_per_s.value
    assert own.node.intra.efficiency.value == like.node.intra.efficiency.value


def _node_of(gpu: str) -> str:
    Path(f"{gpu}-node.yaml").write_text(f"name: some-node\nlike: h100-hgx\ngpu: {gpu}\n", encoding="utf-8")
    return f"{gpu}-node.yaml"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("new", "gpu", "--like", "h100"), "no bundled GPU; did you mean h100-nvl, h100-pcie or h100-sxm?"),
        (("new", "gpu", "--like", "gb300-nvl72"), "no bundled GPU; it is a node, of the GPU gb300"),
        (("new", "node", "--like", "h100-sxm"), "no bundled node; it is a GPU, of the node h100-hgx"),
        (("new", "node", "--like", "h100-hgx", "--gpu", "nope"), "--gpu: nope is no bundled GPU and no file"),
        (("new", "node", "--like", "h100-hgx", "--gpu", "h100"), "did you mean h100-nvl, h100-pcie or h100-sxm?"),
        (("plan", "llama3-8b", "dgx-h200", "--gpus", "8"), "did you mean h200-hgx?"),
        (("plan", "llama3-8b", "l40s", "--gpus", "8"), "it is a GPU, of the node l40s-pcie"),
        (
            (
                "estimate",
                "llama3-8b",
                "h100-hgx",
                "--gpus",
                "8",
                "--strategy",
                "tp=2",
                "--set",
                "hardware.gpu.name=b200",
            ),
            "is a name, which moves no number",
        ),
        (
            ("goodput", "llama3-8b", "h100-hgx", "--faults", "llama3", "--gpus", "512,256"),
            "write smaller numbers first",
        ),
        (
            ("goodput", "llama3-8b", "h100-hgx", "--faults", "llama3", "--gpus", "1,024"),
            "024 in 1,024 begins with 0; a comma stands between two scales, and one of 1024 is written 1024",
        ),
        (
            ("goodput", "llama3-8b", "h100-hgx", "--faults", "llama3", "--gpus", "0,64"),
            "'0' is no number of GPUs from 1",
        ),
        (("plan", "llama3-8b", "h100-hgx", "--gpus", "64,128"), "this is one number; write 64128 if it is one"),
        (("balance", "mixtral-8x7b", "--gpus", "1,024"), "this is one number; write 1024 if it is one"),
        (("plan", "llama3-8b", "h100-hgx", "--nodes", "8,x"), "this is one number; write one, such as 16"),
        (
            ("plan", "llama3-8b", "h100-hgx", "--gpus", "8", "--json-file", "out1/plan.json", "--out", "out1"),
            "--json-file out1/plan.json: --out writes a file of that name there; name another",
        ),
        (
            ("goodput", "llama3-8b", "h100-hgx", "--faults", "llama3", "--gpus", "256,768"),
            "768 is not 256 times a power of two; a comma stands between two scales",
        ),
        (("goodput", "llama3-8b", "h100-hgx", "--faults", "llama3", "--gpus", "8,16..32"), "has commas and '..'"),
        (
            ("goodput", "--faults", "llama3", "--checkpoint", "1s", "--restart", "1s", "--gpus", "256,512"),
            "256,512 are several scales, and the calculator is of one job",
        ),
        (("compare", ":2", "plan.json:1"), ":2: the plan's file is missing"),
        (("show", "workload", "llama3-8b", "--set", "workload.precision=fp8"), "must be a mapping; write its fields"),
        (("new", "node", "--like", "h100-hgx", "--gpu", "../x"), "--gpu: ../x is no name of a GPU"),
        (("plan", "llama3-8b", "h100-hgx", "--batch-size", "64"), "did you mean --global-batch?"),
        (("plan", "llama3-8b", "h100-hgx", "-n", "64"), "did you mean --gpus?"),
        (("plan", "llama3-8b", "h100-hgx", "--tp", "8"), "write --fix tp=N"),
        (("estimate", "llama3-8b", "h100-hgx", "--mbs", "1"), 'write --strategy "micro_batch=N"'),
        (("plan", "llama3-8b", "h100-hgx", "--gpus", "-8"), "--gpus: must be at least 1"),
        (("plan", "llama3-8b", "h100-hgx", "--gpus", "8", "--fix", "tp=4,,8"), "a comma too many"),
        (("plan", "llama3-8b", "h100-hgx", "--gpus", "8", "--max", "recompute=1"), "recompute is no degree"),
        (("plan", "llama3-8b", "h100-hgx", "--gpus", "8", "--spares", "outside"), "no effect without failures"),
        (("plan", "llama3-8b", "h100-hgx", "--gpus", "8", "--framework="), "name (empty) is unknown"),
        (("plan", "meta-llama/Llama-3-8B", "h100-hgx", "--gpus", "8"), "is read from its config.json"),
        (("export", "plan.json", "--to", "slurm", "--out", "job"), "slurm: is no framework that jobs are written for"),
        (("calibrate", "host", "--out", "nowhere/x.yaml"), "does not exist"),
        (("estimate", "llama3-8b", "h100-hgx", "--gpus", "8", "--strategy", "tp=2", "--host", "x"), "no bundled host"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_2(cli: Cli, command: tuple[str, ...], says: str) -> None:
    done = cli(*command)
    assert done.returncode == 2 and says in one_line_of(done.stderr)


def test_a_gpu_s_mistake_is_said_of_its_own_file_and_the_gpu_is_no_cluster(cli: Cli) -> None:
    Path("card.yaml").write_text(
        "name: card\nlike: a100-pcie\nsource: a datasheet\nmemory_bytes: 40 GB\ncapacity_bytes: 39.4 GiB\n",
        encoding="utf-8",
    )
    Path("node.yaml").write_text("name: node\nlike: a100-pcie-pairs\ngpu: card\n", encoding="utf-8")
    line = one_line_of(cli("show", "hardware", "node.yaml").stderr)
    assert line.startswith("mofa: card.yaml: capacity_bytes (39.40 GiB) must be at most memory_bytes (37.25 GiB)")
    line = one_line_of(cli("plan", "llama3-8b", "card.yaml", "--gpus", "8").stderr)
    assert "card.yaml: is a GPU's file" in line and "mofa new node --like a100-pcie-pairs --gpu card" in line
    for like in ("mi300x", "a100-80gb"):  # a whole profile, by its datasheet
        text = (bundled_dir("gpus") / f"{like}.yaml").read_text(encoding="utf-8")
        Path("own.yaml").write_text(text.replace(f"name: {like}", "name: own"), encoding="utf-8")
        node = {"mi300x": "mi300x-oam", "a100-80gb": "a100-hgx"}[like]
        assert f"--like {node} --gpu own" in one_line_of(cli("plan", "llama3-8b", "own.yaml", "--gpus", "8").stderr)


def test_a_protocol_is_read_as_its_makers_write_it(cli: Cli) -> None:
    for written, protocol in (("RoCE", "roce"), ("InfiniBand", "infiniband")):
        Path("node.yaml").write_text(f"name: n\nlike: h100-hgx\nnic: {{protocol: {written}}}\n", encoding="utf-8")
        assert load_cluster("node.yaml", 8).node.nic.protocol == protocol


def test_a_heading_without_lines_is_as_the_profile_and_a_template_says_what_a_node_may_lack(cli: Cli) -> None:
    text = cli("new", "node", "--like", "l40s-pcie").stdout
    assert "# l40s-pcie has uplink of a PCIe switch (4 GPUs, 32 GB/s); write shared: [] if yours has none." in text
    bridged = cli("new", "node", "--like", "a100-pcie-pairs").stdout
    assert "# a100-pcie-pairs has NVLink bridges over a pair (300 GB/s); write bridge: null if not." in bridged
    kept = [line for line in text.splitlines() if "???" not in line]
    Path("node.yaml").write_text("\n".join(["name: mine", *kept]), encoding="utf-8")
    own, like = load_cluster("node.yaml", 8).node, load_cluster("l40s-pcie", 8).node
    assert own.intra.bandwidth_bytes_per_s.value == like.intra.bandwidth_bytes_per_s.value
    assert own.nic.num_per_node == like.nic.num_per_node
    Path("node.yaml").write_text("name: n\nlike: a100-pcie-pairs\nbridge: null\nshared: []\n", encoding="utf-8")
    own = load_cluster("node.yaml", 8).node
    assert own.bridge is None and own.shared == ()


def test_a_missing_fact_is_named_once_and_like_is_offered(cli: Cli) -> None:
    Path("node.yaml").write_text("name: n\ngpu: h100-sxm\n", encoding="utf-8")
    line = one_line_of(cli("show", "hardware", "node.yaml").stderr)
    assert "node.intra.bandwidth_bytes_per_s, node.intra.efficiency" in line and ".provenance" not in line
    assert line.endswith("or write like: with a bundled node's name and only what differs (mofa new node)")


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("memory_bytes: {value: 80 GiB, provenance: datasheet, source: x}", "('x') must have at least 3 characters;"),
        ("tdp_w: {value: -5 W, provenance: datasheet, source: a sheet}", "tdp_w"),
        ("num_sms: {value: many, provenance: datasheet, source: a sheet}", "num_sms"),
        ("memory_bytes: {value: 80 GiB, provenance: guessed, source: a sheet}", "provenance"),
    ],
)
def test_a_wrong_line_is_said_in_words_of_the_file(cli: Cli, lines: str, says: str) -> None:
    Path("card.yaml").write_text(f"name: card\nlike: h100-sxm\nsource: a sheet\n{lines}\n", encoding="utf-8")
    line = one_line_of(cli("show", "hardware", "card.yaml").stderr)
    assert says in line and "should" not in line and "after validation" not in line, line


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("x.yaml", "a: 1\n\tb: 2\n", "line 2: begins with a tab"),
        ("x.yaml", "a: @b\n", "line 1: a value begins with a character that YAML keeps for itself"),
        ("x.yaml", "a: b: c\n", "line 1: a colon too many"),
        ("x.yaml", "a: [1, 2\n", "a quote, a comma or a bracket is missing"),
        ("x.json", '{"a": 1,, "b": 2}', "line 1, column 9: ',' cannot stand there"),
        ("x.json", "{", "something is missing there"),
    ],
)
def test_a_broken_text_is_said_in_plain_words(cli: Cli, name: str, text: str, says: str) -> None:
    Path(name).write_text(text, encoding="utf-8")
    assert says in one_line_of(cli("plan", name, "h100-hgx", "--gpus", "8").stderr)
