"""Download the frameworks that jobs are exported for, without what they depend on, and unpack them for the tests.

Chakra's package, which reads traces back, is among them. Nothing is installed: the tests read configuration classes
and run them with stand-ins for PyTorch (tests/export/stand_ins.py). The wheels are kept in the virtual environment, so
that they are downloaded once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEELS = (
    "megatron_core==0.16.1", "torchtitan==0.2.2", "torchtitan==0.3.0", "megatron_bridge==0.3.1", "mlc_chakra==1.0.0",
)  # fmt: skip


def default_folder() -> Path:
    """Where the unpacked wheels are: what MOFA_FRAMEWORK_WHEELS names, else a folder of this virtual environment."""
    named = os.environ.get("MOFA_FRAMEWORK_WHEELS")
    return Path(named) if named else Path(sys.prefix) / "share" / "mofa-framework-wheels"


def download(requirement: str, folder: Path) -> None:
    """Unpack the wheel of a requirement into a folder of its name, if it is not there.

    Raises
    ------
    SystemExit
        If pip cannot download it; the message says so.
    """
    target = folder / requirement.replace("==", "-")
    if target.is_dir():
        return
    with tempfile.TemporaryDirectory(prefix="mofa-wheels-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                   "--only-binary", ":all:", "--dest", scratch, requirement]  # fmt: skip
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(
                f"scripts/framework_wheels.py: {requirement} cannot be downloaded; the tests that check exported jobs "
                "by the frameworks' own classes need it"
            )
        (wheel,) = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{target.name}"
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was cut off
        shutil.copytree(unpacked, partial)
        partial.rename(target)


if __name__ == "__main__":
    for requirement in WHEELS:
        download(requirement, default_folder())
    print(default_folder())
