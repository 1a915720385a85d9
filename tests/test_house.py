"""The house stays in order: who may import whom, what an import costs, what is public, and how long things are."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import relax_gym

OUTER = ("relax_gym_envs", "relax_gym_rewards", "relax_gym_trainers", "relax_gym_plugins")
PUBLIC = [
    "ActionText",
    "Algorithm",
    "Batch",
    "ChatSpace",
    "Completion",
    "Component",
    "Env",
    "EnvSpec",
    "FinishReason",
    "Learner",
    "Message",
    "RecordEpisode",
    "RelaxGymError",
    "Reward",
    "Sampler",
    "SamplingParams",
    "StepResult",
    "StopReason",
    "Task",
    "TimeLimit",
    "TokenBudget",
    "ToolEnv",
    "TrainedTokens",
    "TrainingSample",
    "Trajectory",
    "Turn",
    "hookimpl",
    "make",
    "register",
    "spec",
    "user",
    "wrap_interaction_env",
]
HEAVY = ("torch", "transformers", "matplotlib", "tokenizers")
MAX_FILE, MAX_FUNCTION = 400, 50


def modules(package: str) -> list[Path]:
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.submodule_search_locations is not None
    return sorted(path for folder in found.submodule_search_locations for path in Path(folder).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Top-level packages a file imports anywhere, inside functions and under TYPE_CHECKING included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("package", ["relax_gym", *OUTER])
def test_import_arrows_point_inward(package: str) -> None:
    forbidden = set(OUTER) - {package}
    arrows = [(str(path), name) for path in modules(package) for name in imported(path) if name in forbidden]
    assert arrows == []


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import relax_gym", (*HEAVY, "pydantic", "rich")),
        ("import relax_gym.types, relax_gym.plugins; relax_gym.plugins.plugins()", HEAVY),
        ("import relax_gym.config", HEAVY),
        ("import relax_gym.cli", (*HEAVY, "pydantic")),
        ("import relax_gym; relax_gym.Env, relax_gym.make, relax_gym.Algorithm", ("torch", "transformers")),
        ("import relax_gym.testing, relax_gym.train, relax_gym.dry_run", ("torch", "transformers")),
    ],
)
def test_imports_are_light(code: str, absent: tuple[str, ...]) -> None:
    report = f"import sys; {code}; print(sorted(set({absent!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom relax_gym.cli import main\n"
        "try:\n    main(['--help'])\n"
        f"except SystemExit as end:\n    print(end.code or 0, sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n0 []\n")


def test_public_names() -> None:
    assert relax_gym.__all__ == PUBLIC
    for name in PUBLIC:
        assert getattr(relax_gym, name) is not None
    assert callable(relax_gym.list)


def test_type_checkers_see_every_public_name() -> None:
    tree = ast.parse(Path(relax_gym.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    names = {alias.asname for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == set(PUBLIC)


@pytest.mark.parametrize("package", ["relax_gym", *OUTER])
def test_files_and_functions_are_short(package: str) -> None:
    too_long = []
    for path in modules(package):
        source = path.read_text(encoding="utf-8")
        if source.count("\n") >= MAX_FILE:
            too_long.append(f"{path}: {source.count(chr(10))} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION:
                    too_long.append(f"{path}:{node.lineno} {node.name}: {lines} lines")
    assert too_long == []


@pytest.mark.parametrize("package", ["relax_gym", *OUTER])
def test_packages_are_typed(package: str) -> None:
    assert modules(package)[0].parent.joinpath("py.typed").exists()
