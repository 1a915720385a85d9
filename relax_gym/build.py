"""Config → the parts of a run, built in the order that lets the cheapest mistake surface first."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from relax_gym.algorithm import Algorithm
from relax_gym.chat import ChatRenderer
from relax_gym.cleanup import Cleanup, closed_on_failure
from relax_gym.config import PluginSection, RunConfig, load_algorithms, plugin_options
from relax_gym.context import RunContext, Tracker
from relax_gym.errors import reason
from relax_gym.launch import launched_rank
from relax_gym.learner import Learner
from relax_gym.models import load_tokenizer, resolve_model
from relax_gym.play import Player
from relax_gym.plugins import plugins
from relax_gym.preflight import check_tools, probe_envs, refused
from relax_gym.processing import MediaProcessor
from relax_gym.redaction import check_secrets
from relax_gym.registry import load
from relax_gym.sampler import Sampler
from relax_gym.scoring import WeightedReward, close_rewards, make_reward
from relax_gym.tasks import TaskSource

log = logging.getLogger("relax_gym")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop is made of. The sampler is not started and nothing has been published yet."""

    context: RunContext
    renderer: ChatRenderer
    tasks: TaskSource
    algorithms: tuple[Algorithm, ...]
    rewards: tuple[WeightedReward, ...]
    sampler: Sampler

    def player(self) -> Player:
        """Plays episodes with these parts."""
        config = self.context.config
        return Player(
            sampler=self.sampler,
            renderer=self.renderer,
            rewards=self.rewards,
            config=config.rollout,
            media=config.media,
        )

    async def aclose(self) -> None:
        """Close them when they do not get to play."""
        async with Cleanup() as cleanup:
            cleanup.add(partial(close_rewards, self.rewards, timeout=self.context.config.rollout.reward_timeout))
            cleanup.add(self.sampler.aclose)


def build_parts(config: RunConfig, *, start_step: int = 0, model_path: Path | None = None) -> Parts:
    """Everything but learner and trackers, which evaluation does without. `model_path` overrides `config.model`."""
    from transformers.utils import logging as transformers_logging

    if config.threads is not None:
        import torch

        torch.set_num_threads(config.threads)
    check_secrets(config, "sampler")  # of all the secrets, evaluation needs no other
    probes = probe_envs(config)
    with closed_on_failure() as built:
        rewards = build_rewards(config)
        built.add(partial(close_rewards, rewards, timeout=config.rollout.reward_timeout))
        tasks = TaskSource(config.env, seed=config.seed, eval_episodes=config.eval.episodes)
        for shortage in tasks.shortages():
            log.warning(shortage)
        path = model_path or resolve_model(config.model)
        transformers_logging.disable_progress_bar()  # it would tear the display apart
        renderer = build_renderer(config, path)
        check_tools(probes, renderer)
        context = build_context(config, path, renderer, start_step=start_step)
        return Parts(
            context=context,
            renderer=renderer,
            tasks=tasks,
            algorithms=load_algorithms(config),
            rewards=rewards,
            sampler=build_component("sampler", config.sampler, context),  # last: nothing can fail after it
        )


def build_context(config: RunConfig, model_path: Path, renderer: ChatRenderer, *, start_step: int = 0) -> RunContext:
    """What the factories of components are given."""
    return RunContext(
        config=config,
        run_dir=Path(config.run_dir),
        model_path=model_path,
        tokenizer=renderer.tokenizer,
        processor=renderer.processor,
        never_sampled=tuple(renderer.never_sampled),
        start_step=start_step,
    )


def build_rewards(config: RunConfig) -> tuple[WeightedReward, ...]:
    """The weighted terms of the reward. Raises ConfigError when a reward refuses its kwargs."""
    terms: list[WeightedReward] = []
    with closed_on_failure() as built:
        built.add(partial(close_rewards, terms, timeout=config.rollout.reward_timeout))
        for index, term in enumerate(config.reward):
            try:
                reward = make_reward(plugins().get("reward", term.name), term.kwargs)
            except Exception as error:  # a constructor is the user's code; the advice is the same whatever it raises
                raise refused(f"reward.{index}.kwargs", f"reward {term.name!r}", term.kwargs, reason(error)) from error
            key = term.key or getattr(reward, "key", None)
            terms.append(WeightedReward(name=term.name, weight=term.weight, key=key, reward=reward))
    return tuple(terms)


def build_renderer(config: RunConfig, model_path: Path) -> ChatRenderer:
    """The model's tokenizer with the chat template of the config, every id that ends a turn, and its processor.

    Some models have their chat template with the processor only.
    """
    trust = config.model.trust_remote_code
    tokenizer = load_tokenizer(model_path, trust_remote_code=trust)
    processor = MediaProcessor.load(model_path, config.media, trust_remote_code=trust)
    if processor is not None and not tokenizer.chat_template:
        tokenizer.chat_template = processor.processor.chat_template
    return ChatRenderer(tokenizer, config.chat, extra_stop_token_ids=_generation_stops(model_path), processor=processor)


def build_learner(context: RunContext) -> Learner:
    """The learner named in the config. Warns where it will train on another distribution than is sampled from."""
    _warn_of_truncation(context.config)
    if launched_rank() is None:  # else the others wait to hear of it from the learner
        check_learner(context)
    learner: Learner = build_component("learner", context.config.learner, context)
    return learner


def check_learner(context: RunContext) -> None:
    """See `Learner.check_model`. Raises ConfigError or ModelError."""
    section = context.config.learner
    component = plugins().get("learner", section.name)
    options = plugin_options(section, component.load_options(), source="config", key="learner")
    learner = load(component.factory)
    if hasattr(learner, "check_model"):  # a function that builds one has none
        learner.check_model(context, options)


def _warn_of_truncation(config: RunConfig) -> None:
    if not any(algorithm.is_policy_gradient for algorithm in load_algorithms(config)):
        return
    for key in ("top_p", "top_k", "min_p"):
        value, off = getattr(config.rollout, key), type(config.rollout).model_fields[key].default
        if value != off:
            log.warning(
                f"rollout.{key} = {value}: tokens are sampled from a truncated distribution but trained with log-probs "
                f"of the full one, so the gradient is biased; set it to {off} to train on what is sampled"
            )


def build_trackers(context: RunContext) -> list[Tracker]:
    """The trackers named in the config."""
    trackers: list[Tracker] = []
    with closed_on_failure() as built:
        for section in context.config.trackers:
            trackers.append(build_component("tracker", section, context))
            built.add(trackers[-1].close)
    return trackers


def build_component(kind: str, section: PluginSection, context: RunContext, *more: Any) -> Any:
    """Call a component's factory with the context, its checked options and what else its kind takes."""
    component = plugins().get(kind, section.name)
    options = plugin_options(section, component.load_options(), source="config", key=kind)
    return load(component.factory)(context, options, *more)


def _generation_stops(model_path: Path) -> list[int]:
    """The ids that end generation according to the model itself, which may know more than its tokenizer."""
    file = model_path / "generation_config.json"
    stops = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.exists() else None
    return stops if isinstance(stops, list) else [] if stops is None else [stops]
