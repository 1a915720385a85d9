"""A teacher on real SGLang: its scores are those of one plain forward pass."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_cases import sample
from sglang_kit import ARGUMENTS, CPU_ENVIRONMENT, KEY, TOLERANCE, context_of, sglang_python

from relax_gym.models import load_language_model
from relax_gym.teacher import checked_scores
from relax_gym_plugins.samplers.sglang.process import ServerProcess
from relax_gym_plugins.teachers.options import SGLangTeacherOptions
from relax_gym_plugins.teachers.sglang import SGLangTeacher

pytestmark = pytest.mark.sglang
pytest_plugins = ["sglang_fixtures"]
SAMPLES = [
    sample([5, 6, 7, 8, 9, 10], [0, 0, 1, 1, 0, 1], episode="a"),
    sample([5, 6, 7, 8, 40, 41, 42], [0, 0, 1, 1, 0, 1, 1], episode="b"),  # its prefix is cached by then
    sample([11, 12], [0, 1], episode="c"),
]


def compare(teacher: SGLangTeacher, folder: Path, top_k: int) -> None:
    model = load_language_model(folder, dtype=torch.float32)
    for one, score in zip(SAMPLES, checked_scores(teacher, SAMPLES, temperature=1.0, top_k=top_k), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([one.token_ids.tolist()])).logits[0].float()
        trained = np.flatnonzero(one.loss_mask)
        expected = logits.log_softmax(-1)[trained - 1]
        sampled = expected[range(len(trained)), one.token_ids[trained]]
        np.testing.assert_allclose(score.logprobs, sampled, rtol=0, atol=TOLERANCE)
        if top_k:
            best = expected.topk(top_k).values
            np.testing.assert_allclose(score.top_logprobs, best, rtol=0, atol=TOLERANCE)
            at_ids = expected.gather(1, torch.from_numpy(score.top_ids))
            np.testing.assert_allclose(score.top_logprobs, at_ids, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("top_k", [0, 7])
def test_an_attached_server_scores_as_the_model_does(
    sglang_server: ServerProcess, tiny_qwen3: Path, tmp_path: Path, top_k: int
) -> None:
    os.environ[KEY] = sglang_server.headers["Authorization"].removeprefix("Bearer ")
    options = SGLangTeacherOptions(urls={"big": (sglang_server.url,)}, api_key_env=KEY)
    teacher = SGLangTeacher(context_of(tiny_qwen3, tmp_path), options, "big")
    try:
        compare(teacher, tiny_qwen3, top_k)
        compare(teacher, tiny_qwen3, top_k)
    finally:
        teacher.close()


def test_a_launched_server_is_of_the_teachers_model_and_ends_with_it(tiny_qwen3: Path, tmp_path: Path) -> None:
    options = SGLangTeacherOptions(server_args=ARGUMENTS, python=sglang_python(), env=CPU_ENVIRONMENT)
    teacher = SGLangTeacher(context_of(tiny_qwen3, tmp_path), options, str(tiny_qwen3))
    try:
        compare(teacher, tiny_qwen3, 3)
    finally:
        teacher.close()
    (log,) = (tmp_path / "teachers").rglob("server-0.log")
    assert log.read_text().endswith("launcher: SGLang ended with status 0\n")
