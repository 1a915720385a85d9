"""One episode, whatever the env does. Time limits are real but short; nothing asserts how long anything took."""

import asyncio
import threading

import faulty_envs
import pytest
from faulty_envs import closes

from relax_gym.chat import ChatRenderer
from relax_gym.errors import SamplerError
from relax_gym.media.loader import MediaLoader
from relax_gym.rollout import Limits, rollout
from relax_gym.sampler import SamplingParams
from relax_gym.testing import ScriptedSampler, tiny_tokenizer
from relax_gym.trajectory import to_samples
from relax_gym.types import Completion, FinishReason, StopReason, Task, Trajectory
from relax_gym.workers import WorkerThreads

TOKENIZER = tiny_tokenizer()
RENDERER = ChatRenderer(TOKENIZER)
END = TOKENIZER.eos_token_id


def play(
    task: Task,
    replies: object = ("hello",) * 9,
    *,
    max_turns: int = 5,
    max_context: int = 2000,
    max_new_tokens: int = 32,
    step_timeout: float = 5.0,
    episode_timeout: float = 10.0,
    stop: tuple[str, ...] = (),
) -> Trajectory:
    sampler = ScriptedSampler(replies, tokenizer=TOKENIZER)

    async def main() -> Trajectory:
        await sampler.update_weights([], 3)
        session = sampler.open_session()
        return await rollout(
            task,
            episode_id="e",
            open_session=lambda env: session,
            renderer=RENDERER,
            params=SamplingParams(max_new_tokens=max_new_tokens, stop=stop, stop_token_ids=(END,), seed=1),
            limits=Limits(
                max_turns=max_turns,
                max_context=max_context,
                step_timeout=step_timeout,
                episode_timeout=episode_timeout,
            ),
            threads=WorkerThreads("env"),
            loader=MediaLoader(),
        )

    return asyncio.run(main())


def faulty(fault: str = "", *, env: str = "Faulty", turns: int = 2, name: str = "") -> Task:
    return Task(env_id=f"test/{env}-v0", seed=11, kwargs={"fault": fault, "turns": turns, "name": name})


@pytest.mark.parametrize("env", ["Faulty", "FaultyAsync"])
def test_an_episode_ends_with_its_env(env: str) -> None:
    closes.clear()
    trajectory = play(faulty(env=env, name="good"))
    assert trajectory.stop_reason is StopReason.ENV_DONE
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0]
    assert [turn.text for turn in trajectory.turns] == ["hello", "hello"]
    assert trajectory.info == {"correct": True}
    assert trajectory.error is None
    assert closes["good"] == 1


def test_k03_k05_training_ids_are_what_the_sampler_saw_and_sampled() -> None:
    prompts: list[list[int]] = []
    said = [[200, 201, END], [105, 100, END]]

    def script(prompt, params, turn):
        prompts.append(list(prompt))
        return said[turn]

    (sample,) = to_samples(play(faulty(), script), "g")
    ids = sample.token_ids.tolist()
    assert ids == prompts[1] + said[1]
    assert prompts[1][: len(prompts[0]) + 3] == prompts[0] + said[0]
    assert [i for i, m in zip(ids, sample.loss_mask.tolist(), strict=True) if m] == said[0] + said[1]
    assert set(sample.versions[sample.loss_mask == 1].tolist()) == {3}


@pytest.mark.parametrize(
    ("fault", "turn", "message", "closed"),
    [
        ("constructor", 0, "ValueError: no licence", 0),
        ("reset", 0, "ValueError: reset is broken", 1),
        ("reset nonsense", 0, "EnvError: reset returned 'hello'; it must return (messages, info dict)", 1),
        ("step", 1, "KeyError: 'lost item'", 1),
        ("role", 1, "EnvError: message 0 has role 'robot'; allowed: system, user, assistant, tool", 1),
        ("reward type", 1, "EnvError: step returned reward {'score': 1}; it must be a number", 1),
    ],
)
@pytest.mark.parametrize("env", ["Faulty", "FaultyAsync"])
def test_k92_a_faulty_env_costs_its_episode_and_is_reported(
    env: str, fault: str, turn: int, message: str, closed: int
) -> None:
    closes.clear()
    trajectory = play(faulty(fault, env=env))
    assert trajectory.stop_reason is StopReason.ERROR
    error = trajectory.error
    assert error is not None
    assert (error.env_id, error.seed, error.turn) == (f"test/{env}-v0", 11, turn)
    assert error.message == message
    assert "Traceback" in error.traceback
    assert closes[fault] == closed
    assert trajectory.reward is None


def test_an_env_that_exits_its_thread_costs_one_episode() -> None:
    trajectory = play(faulty("exit"))
    assert trajectory.error is not None
    assert trajectory.error.message == "RuntimeError: SystemExit raised in a worker thread: 3"


@pytest.mark.parametrize("env", ["Faulty", "FaultyAsync", "OneThread"])
def test_k98_a_hung_step_keeps_the_partial_episode(env: str) -> None:
    closes.clear()
    trajectory = play(faulty("hang", env=env), step_timeout=0.1)
    faulty_envs.release.set()
    assert trajectory.stop_reason is StopReason.TIMEOUT
    assert trajectory.error is not None
    assert trajectory.error.message == "step took longer than rollout.step_timeout = 0.1 s"
    assert [turn.text for turn in trajectory.turns] == ["hello"]
    assert trajectory.turns[0].reward is None
    for _ in range(100):  # the thread-bound env is closed by its own thread, once that is free
        if closes["hang"]:
            break
        threading.Event().wait(0.02)
    assert closes["hang"] == 1
    faulty_envs.release.clear()


@pytest.mark.parametrize("env", ["Faulty", "FaultyAsync"])
def test_k98_an_episode_out_of_time_keeps_its_turns_and_can_be_scored(env: str) -> None:
    closes.clear()
    trajectory = play(faulty("slow", env=env, turns=1000), max_turns=1000, episode_timeout=0.8)
    assert trajectory.stop_reason is StopReason.TIMEOUT
    assert trajectory.error is None
    assert 1 <= len(trajectory.turns) <= 6
    assert closes["slow"] == 1


def test_a_failing_close_is_logged_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    assert play(faulty("close")).stop_reason is StopReason.ENV_DONE
    assert "env test/Faulty-v0 (seed 11): close() failed" in caplog.text


def test_a_cancelled_episode_closes_its_env_once() -> None:
    closes.clear()
    sampler = ScriptedSampler(lambda *_: "hello", tokenizer=TOKENIZER, delay=10**9)

    async def main() -> None:
        session = sampler.open_session()
        episode = asyncio.create_task(
            rollout(
                faulty(name="cancelled"),
                episode_id="e",
                open_session=lambda env: session,
                renderer=RENDERER,
                params=SamplingParams(max_new_tokens=4),
                limits=Limits(max_turns=2, max_context=999),
                threads=WorkerThreads("env"),
                loader=MediaLoader(),
            )
        )
        while not sampler.requests:  # noqa: ASYNC110 (the sampler has no event to wait for)
            await asyncio.sleep(0.001)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode

    asyncio.run(main())
    assert closes["cancelled"] == 1
    assert sampler.cancelled == 1


def test_k88_an_env_with_thread_affinity_sees_one_thread() -> None:
    trajectory = play(faulty(env="OneThread", turns=5))
    assert [turn.info["threads"] for turn in trajectory.turns] == [1] * 5


def test_max_turns() -> None:
    trajectory = play(faulty(turns=9), max_turns=3)
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert len(trajectory.turns) == 3
    assert trajectory.final_observation == ({"role": "user", "content": "go on"},)


def test_k32_a_prompt_that_does_not_fit_ends_the_episode_before_it_starts() -> None:
    trajectory = play(faulty(), max_context=10)
    assert trajectory.stop_reason is StopReason.PROMPT_TOO_LONG
    assert trajectory.turns == ()
    assert to_samples(trajectory, "g") == []


def test_k32_an_answer_cut_by_the_context_is_kept_and_flagged() -> None:
    first = len(RENDERER.conversation().observe([{"role": "user", "content": "say something"}]).context_ids)
    trajectory = play(faulty(turns=9), ["x" * 50] * 9, max_context=first + 7)
    assert trajectory.stop_reason is StopReason.LENGTH
    assert [len(turn.completion.token_ids) for turn in trajectory.turns] == [7]
    assert trajectory.turns[0].completion.finish_reason is FinishReason.LENGTH
    assert trajectory.turns[0].reward == 0.0


def test_token_budget_ends_an_episode_whose_next_prompt_does_not_fit() -> None:
    first = len(RENDERER.conversation().observe([{"role": "user", "content": "say something"}]).context_ids)
    trajectory = play(faulty(turns=9), ["x"] * 9, max_context=first + 10)
    assert trajectory.stop_reason is StopReason.TOKEN_BUDGET
    assert len(trajectory.turns) == 1


def test_an_answer_cut_by_max_new_tokens_goes_to_the_env() -> None:
    trajectory = play(faulty(), ["a long answer"] * 2, max_new_tokens=6)
    assert [turn.action for turn in trajectory.turns] == ["a long", "a long"]
    assert trajectory.stop_reason is StopReason.ENV_DONE


def test_an_empty_completion_is_a_turn_without_trained_tokens() -> None:
    trajectory = play(faulty(), [[], [END]])
    (sample,) = to_samples(trajectory, "g")
    assert [turn.action for turn in trajectory.turns] == ["", ""]
    assert sample.turn_spans[0][0] == sample.turn_spans[0][1]
    assert sample.trained_tokens == 1


def test_the_env_sees_the_text_before_a_stop_string() -> None:
    trajectory = play(faulty(turns=1), ["yes\nObservation: x"], stop=("\nObservation",))
    assert trajectory.turns[0].text == "yes\nObservation: x"
    assert trajectory.turns[0].action == "yes"


def test_an_aborted_completion_ends_the_episode() -> None:
    gone = Completion(token_ids=(), logprobs=(), versions=(), finish_reason=FinishReason.ABORT)
    assert play(faulty(), [gone]).stop_reason is StopReason.ABORT


def test_a_broken_sampler_is_not_the_episodes_fault() -> None:
    closes.clear()
    with pytest.raises(SamplerError, match="engine died"):
        play(faulty(name="innocent"), [SamplerError("engine died")])
    assert closes["innocent"] == 1


def test_every_turn_samples_with_its_own_seed() -> None:
    seeds = []

    def script(prompt, params, turn):
        seeds.append(params.seed)
        return "x"

    play(faulty(turns=3), script)
    play(faulty(turns=3), script)
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:]
