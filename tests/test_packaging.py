"""What ends up in the wheel and in the sdist, and that each way to install gives the same packages."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from relax_gym_envs.catalog import ENVS

ROOT = Path(__file__).parent.parent
PACKAGES = ("relax_gym", "relax_gym_envs", "relax_gym_rewards", "relax_gym_trainers", "relax_gym_plugins")
PROBE = (
    "import importlib, importlib.util, sys\n"
    f"for name in {PACKAGES}: importlib.import_module(name)\n"
    "import relax_gym\n"
    # An editable install has the project's root on its path, so there a folder without code is found, but no package.
    "specs = map(importlib.util.find_spec, ('envs', 'rewards', 'trainers', 'plugins'))\n"
    "assert all(spec is None or spec.origin is None for spec in specs)\n"
    "print(relax_gym.__version__, len(relax_gym.list()), sys.modules['relax_gym_envs'].__file__)\n"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def test_the_wheel_holds_five_packages_their_data_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = wheel.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)
    assert all(f"{package}/py.typed" in names for package in PACKAGES)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    sources = {path for path in tracked if any(f"{package}/" in f"/{path}" for package in PACKAGES)}
    sources = {path.split("/", 1)[1] if not path.startswith("relax_gym/") else path for path in sources}
    expected = {path for path in sources if path.split("/")[0] in PACKAGES}
    assert expected <= set(names)


def test_the_sdist_builds_on_its_own(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "examples/quickstart.toml"} <= names
    assert "tests/test_packaging.py" in names


@pytest.mark.parametrize("what", ["wheel", "sdist", "editable"])
def test_each_way_to_install_gives_the_same_packages(what: str, built: tuple[Path, Path], tmp_path: Path) -> None:
    source = {"wheel": [str(built[0])], "sdist": [str(built[1])], "editable": ["-e", str(ROOT)]}[what]
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--target", str(tmp_path / "site"), *source], check=True, cwd=tmp_path)
    # Without `site` the project that runs this test is out of sight; its dependencies come back by path.
    script = f"import site, sys; site.addsitedir({str(tmp_path / 'site')!r})\n"
    script += f"sys.path.append({sysconfig.get_path('purelib')!r})\n{PROBE}"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    version, envs, file = done.stdout.split()
    assert (version, int(envs)) == ("0.1.0", len(ENVS))
    assert str(ROOT if what == "editable" else tmp_path) in file
