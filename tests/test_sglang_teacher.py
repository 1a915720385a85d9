"""The teacher engine `sglang` against scripted servers: exact scores, one server for each env, and failures."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from fake_sglang import FakeSGLang, log_softmax
from learner_cases import context, learner, random_batch, sample, save_model
from transformers import GPT2Config

from relax_gym.config import parse_config
from relax_gym.errors import ConfigError, ModelError, TrainingError
from relax_gym.plugins import plugins
from relax_gym.teacher import checked_scores
from relax_gym.types import Batch
from relax_gym_plugins.teachers.options import SGLangTeacherOptions
from relax_gym_plugins.teachers.sglang import SGLangTeacher

ENV, OTHER = "test/None-v0", "test/Other-v0"
GPT2 = GPT2Config(vocab_size=100, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=1)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_model(tmp_path_factory.mktemp("models") / "student", GPT2)
    context(folder).tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def serving(*servers: FakeSGLang) -> Iterator[list[str]]:
    """Serve in an event loop of its own, as a teacher blocks this thread."""
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            for server in servers:
                await stack.enter_async_context(server.serving())
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    try:
        yield [server.url for server in servers]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@contextmanager
def teacher(student: Any, *servers: FakeSGLang, **options: Any) -> Iterator[SGLangTeacher]:
    with serving(*servers) as urls:
        given = SGLangTeacherOptions(urls={"big": tuple(urls)}, **options)
        made = SGLangTeacher(context(student), given, "big")
        try:
            yield made
        finally:
            made.close()


@pytest.mark.parametrize("top_k", [0, 5])
def test_scores_are_those_of_the_servers_model_at_the_trained_tokens(student: Any, top_k: int) -> None:
    server = FakeSGLang()
    samples = [*random_batch(groups=3).samples, sample([3, 4, 5], [0, 0, 0]), sample([9, 8], [0, 1])]
    with teacher(student, server) as engine:
        scores = checked_scores(engine, samples, temperature=1.0, top_k=top_k)
    for one, score in zip(samples, scores, strict=True):
        ids, trained = one.token_ids.tolist(), np.flatnonzero(one.loss_mask)
        rows = [log_softmax("default", ids[:at]) for at in trained]
        expected = [row[ids[at]] for row, at in zip(rows, trained, strict=True)]
        np.testing.assert_allclose(score.logprobs, expected, rtol=0, atol=1e-6)
        assert (score.top_ids is None) == (top_k == 0)
        if top_k:
            best = [sorted(range(100), key=lambda id, row=row: -row[id])[:top_k] for row in rows]
            assert score.top_ids.tolist() == best
            values = [[row[id] for id in ids] for row, ids in zip(rows, best, strict=True)]
            np.testing.assert_allclose(score.top_logprobs, np.reshape(values, (len(rows), top_k)), rtol=0, atol=1e-6)
    assert len(server.bodies) == len(samples) - 1, "a sample without trained tokens was asked for"
    assert {body["sampling_params"]["max_new_tokens"] for body in server.bodies} == {0}


@pytest.mark.parametrize("algorithm", [{"top_k": 3}, {"level": "reward"}])
def test_each_env_has_its_own_teacher(student: Any, algorithm: dict[str, Any]) -> None:
    first, second = FakeSGLang(), FakeSGLang()
    batch = random_batch(groups=2).samples
    routed = [dataclasses.replace(one, env_id=ENV if one.group_id == "g0" else OTHER) for one in batch]
    with serving(first, second) as urls:
        engine = {"name": "sglang", "urls": {"a": [urls[0]], "b": [urls[1]]}}
        run = context(student, name="opd", teachers={ENV: "a", OTHER: "b"}, teacher_engine=engine, **algorithm)
        trainer = learner(run)
        metrics = trainer.step(Batch(version=0, samples=routed))
        trainer.close()
    assert metrics["grad_norm"] > 0 and np.isfinite(metrics["opd_kl"])
    for server, env in ((first, ENV), (second, OTHER)):
        asked = sorted(body["input_ids"] for body in server.bodies)
        assert asked == sorted(one.token_ids.tolist() for one in routed if one.env_id == env)


@pytest.mark.parametrize(
    "fault",
    [
        500,
        "drop",
        {"meta_info": None},
        {"meta_info.input_token_logprobs": None},
        {"meta_info.input_token_logprobs": [[-1.0, 7, None]] * 3},
        {"meta_info.input_token_logprobs": [[None, 3, None], [None, 4, None], [-1.0, 5, None]]},
        {"meta_info.input_token_logprobs": [[None, 3, None], [float("nan"), 4, None], [-1.0, 5, None]]},
        {"meta_info.input_token_logprobs": [[None, 3, None], ["x", 4, None], [-1.0, 5, None]]},
        {"meta_info.input_top_logprobs": None},
        {"meta_info.input_top_logprobs": [None, [[-1.0, 4, None]], [[-1.0, 5, None]]]},
        {"meta_info.input_top_logprobs": [None, [[-1.0, 4, None]] * 2, [[-1.0, 500, None]] * 2]},
    ],
)
def test_what_cannot_be_trained_on_is_asked_again_and_then_ends_the_run(student: Any, fault: Any) -> None:
    server, other = FakeSGLang(), FakeSGLang()
    server.faults, other.faults = [fault], [fault]
    with teacher(student, server, other, retries=2) as engine:
        (score,) = engine.score([sample([3, 4, 5], [0, 1, 1])], temperature=1.0, top_k=2)
        assert np.isfinite(score.logprobs).all()
        server.faults, other.faults = [fault] * 3, [fault] * 3
        with pytest.raises(TrainingError, match=r"teacher 'big': sample 'e0', http://127\.0\.0\.1"):
            engine.score([sample([3, 4, 5], [0, 1, 1])], temperature=1.0, top_k=2)


def test_a_refused_request_is_not_repeated_and_closing_is_for_good(student: Any) -> None:
    server = FakeSGLang()
    with teacher(student, server) as engine:
        server.faults = [400]
        with pytest.raises(TrainingError, match="answered 400"):
            engine.score([sample([3, 4], [0, 1])], temperature=1.0, top_k=0)
        assert len(server.bodies) == 1
        with pytest.raises(TrainingError, match=r"at temperature 1 only, not at 0\.5"):
            engine.score([sample([3, 4], [0, 1])], temperature=0.5, top_k=0)
        engine.close()
        with pytest.raises(TrainingError, match="is closed"):
            engine.score([sample([3, 4], [0, 1])], temperature=1.0, top_k=0)


def test_a_likely_token_that_the_policy_does_not_have_is_refused(tmp_path: Any) -> None:
    small = save_model(tmp_path / "small", GPT2Config(**{**GPT2.to_dict(), "vocab_size": 61}))
    with (
        teacher(small, FakeSGLang(), retries=0) as engine,
        pytest.raises(TrainingError, match="logits for 61 ids only"),
    ):
        engine.score([sample([3, 4], [0, 1])], temperature=1.0, top_k=50)


def test_another_tokenizer_or_no_server_is_an_error_at_the_start(student: Any) -> None:
    ours = context(student).tokenizer
    with teacher(student, FakeSGLang(tokenizer=ours)) as engine:
        assert engine.score([], temperature=1.0, top_k=0) == []
    theirs = FakeSGLang(tokenizer=type("Other", (), {"encode": lambda *_, **__: [1, 2]})())
    refusal = pytest.raises(ModelError, match=r"has another tokenizer than the model: it reads a text as \[1, 2\]")
    with refusal, teacher(student, theirs):
        pass
    options = SGLangTeacherOptions(urls={"big": ("http://127.0.0.1:9",)})
    before = threading.active_count()
    with pytest.raises(ModelError, match=r"cannot start teacher 'big': http://127\.0\.0\.1:9"):
        SGLangTeacher(context(student), options, "big")
    assert threading.active_count() == before


def test_the_key_is_named_by_its_variable(student: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeSGLang()
    server.key = "secret"
    with serving(server) as urls:
        options = SGLangTeacherOptions(urls={"big": tuple(urls)}, api_key_env="RELAX_GYM_TEST_TEACHER_KEY")
        with pytest.raises(ConfigError, match=r"^teacher_engine\.api_key_env names RELAX_GYM_TEST_TEACHER_KEY"):
            SGLangTeacher(context(student), options, "big")
        monkeypatch.setenv("RELAX_GYM_TEST_TEACHER_KEY", "secret")
        made = SGLangTeacher(context(student), options, "big")
        assert len(made.score([sample([3, 4], [0, 1])], temperature=1.0, top_k=0)) == 1
        made.close()


def test_options_are_checked_when_the_config_is_read() -> None:
    assert "sglang" in plugins().tables["teacher"].names()
    with pytest.raises(ValueError, match="is no URL of a server"):
        SGLangTeacherOptions(urls={"big": ("localhost",)})
    with pytest.raises(ValueError, match="api_key_env is for servers in urls"):
        SGLangTeacherOptions(api_key_env="KEY")
    config = {
        "model": {"name": "tiny-qwen3"},
        "env": [{"id": "relax_gym/GuessNumber-v0"}],
        "rollout": {"temperature": 0.7},
        "algorithm": {"name": "opd", "teacher": "x", "top_k": 4, "teacher_engine": "sglang"},
        "train": {"steps": 1, "groups_per_step": 1, "group_size": 2},
    }
    with pytest.raises(ConfigError, match=r"rollout\.temperature = 0\.7: SGLang gives log-probs of prompts at"):
        parse_config(config, source="test")
