"""The same cases for every sampler: in-process, a scripted SGLang server, a real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_sglang import FakeSGLang, next_token
from sampler_suite import CASES, Reference, Subject
from sglang_kit import ARGUMENTS, GPU_ARGUMENTS, TOLERANCE, attached, sglang_python

from relax_gym.config import RunConfig
from relax_gym.context import RunContext
from relax_gym.models import load_language_model, load_tokenizer, resolve_model
from relax_gym_plugins.samplers.local.options import LocalSamplerOptions
from relax_gym_plugins.samplers.local.sampler import LocalSampler
from relax_gym_plugins.samplers.sglang.options import SGLangSamplerOptions
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler

pytest_plugins = ["sglang_fixtures"]
pytestmark = pytest.mark.usefixtures("one_thread")


def make_context(folder: Path) -> RunContext:
    config = RunConfig.model_validate(
        {
            "model": {"name": "tiny-qwen3"},
            "env": [{"id": "test/None-v0"}],
            "algorithm": {"name": "grpo"},
            "train": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        }
    )
    path = resolve_model(config.model)
    return RunContext(config=config, run_dir=folder, model_path=path, tokenizer=load_tokenizer(path))


@asynccontextmanager
async def local(folder: Path, _: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    context = make_context(folder)
    reference = Reference(load_language_model(context.model_path, dtype=torch.float32))
    sampler = LocalSampler(context, LocalSamplerOptions(dtype="float32", max_context=256))
    yield Subject(
        sampler=sampler,
        table=reference.table,
        weights=reference.weights,
        tokenizer=context.tokenizer,
        tolerance=1e-4,
    )


@asynccontextmanager
async def fake(folder: Path, _: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    def table(version: int, ids: list[int], temperature: float, bias: Any) -> Any:
        likely = next_token(str(version), ids)
        logprobs = np.full((1, 100), -np.inf)
        logprobs[0, likely] = -0.01 * (likely + 1)
        return logprobs

    context = make_context(folder)
    async with FakeSGLang(tokenizer=context.tokenizer).serving() as server:
        yield Subject(
            sampler=SGLangSampler(context, SGLangSamplerOptions(urls=(server.url,), sync="disk")),
            table=table,
            weights=lambda version: [("norm", torch.full((4,), float(version)))],
            tokenizer=context.tokenizer,
            tolerance=1e-6,
            greedy=False,
        )


@asynccontextmanager
async def real(folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """A server of its own on a GPU, the one of all tests on a CPU; the last case leaves that with its own weights."""
    context = make_context(folder)
    reference = Reference(
        load_language_model(context.model_path, dtype=torch.float32), getattr(torch, ARGUMENTS["dtype"])
    )
    if torch.cuda.is_available():
        options = SGLangSamplerOptions(python=sglang_python(), server_args=GPU_ARGUMENTS, max_context=256)
        sampler = SGLangSampler(context, options)
    else:
        server, model = map(request.getfixturevalue, ("sglang_server", "tiny_qwen3"))
        sampler = attached(server, model, folder, sync="ipc", max_context=256)
    yield Subject(
        sampler=sampler,
        table=reference.table,
        weights=reference.weights,
        tokenizer=context.tokenizer,
        tolerance=TOLERANCE,
    )


SUBJECTS = {"local": local, "fake": fake, "sglang": real}


@pytest.fixture(
    scope="module", params=["local", "fake", pytest.param("sglang", marks=pytest.mark.sglang)], ids=lambda name: name
)
def playing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Runs a case with a sampler that serves all cases of its kind."""
    if request.param == "sglang" and not torch.cuda.is_available():
        request.getfixturevalue("sglang_server")  # which has a loop of its own while it starts
    runner = asyncio.Runner()
    subject = SUBJECTS[request.param](tmp_path_factory.mktemp(request.param), request)

    async def begin() -> Subject:
        made = await subject.__aenter__()
        await made.sampler.start()
        await made.sampler.update_weights(made.weights(0), 0)
        return made

    async def end(made: Subject) -> None:
        await made.sampler.aclose()
        await subject.__aexit__(None, None, None)

    made = runner.run(begin())
    yield lambda case: runner.run(asyncio.wait_for(case(made), 60))
    runner.run(end(made))
    runner.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test(playing: Any, case: Any) -> None:
    playing(case)
