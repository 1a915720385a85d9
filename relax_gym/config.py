"""One TOML file → frozen models. Nothing heavy is imported to read and check a config."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from relax_gym.config_faults import explain_fault
from relax_gym.errors import ConfigError, RelaxGymError
from relax_gym.overrides import apply_override
from relax_gym.section import Section
from relax_gym.supervision_config import SupervisionConfig, TimelineConfig

if TYPE_CHECKING:
    from relax_gym.algorithm import Algorithm

ModelT = TypeVar("ModelT", bound=BaseModel)


class PluginSection(BaseModel):
    """A part of the config that names a plugin; all other keys are that plugin's options."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """Everything but the name."""
        return dict(self.model_extra or {})


class SamplerSection(PluginSection):
    """`[sampler]`: where completions come from."""

    name: str = "local"


class AlgorithmSection(PluginSection):
    """`[algorithm]`: advantages and loss."""

    name: str = "grpo"


class LearnerSection(PluginSection):
    """`[learner]`: what trains the weights."""

    name: str = "torch"


class TeacherSection(PluginSection):
    """`teacher_engine` of an algorithm: what its teachers run in. The name alone, or a section like `[sampler]`."""

    name: str = "local"

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given


class Options(Section):
    """Options of a component (sampler, learner, teacher, tracker …): subclass it and add fields."""

    may_change: ClassVar[Collection[str]] = ()
    """Those with which a run may be resumed that began with others: they say how to compute, not what."""

    def check_run(self, config: RunConfig) -> None:
        """Raise ConfigError when these options do not go with the rest of the run. Called when a config is read."""

    def context_limit(self, positions: int | None) -> int | None:
        """Of a sampler, its `max_context` for a model with so many positions, as far as it is known before it starts.

        Raises:
            ConfigError: they ask for more than the model has.
        """
        return positions


class ModelConfig(Section):
    """`[model]`: which language model."""

    name: str = Field(description="local folder, Hugging Face hub id, or 'tiny-qwen3' (built in code from kwargs)")
    revision: str | None = None
    kwargs: dict[str, Any] = Field(default_factory=dict, description="options of a model that is built in code")
    trust_remote_code: bool = False


class EnvConfig(Section):
    """`[[env]]`: one environment of the mixture."""

    id: str
    kwargs: dict[str, Any] = Field(default_factory=dict)
    eval_kwargs: dict[str, Any] = Field(default_factory=dict, description="replace some kwargs in evaluation")
    eval_fraction: float = Field(
        0.1, ge=0, lt=1, description="share of the env's rows held out of training; without eval_kwargs, with rows"
    )
    weight: float = Field(1.0, gt=0, description="share of the groups, relative to the other envs")
    algorithm: AlgorithmSection | None = Field(None, description="for this env's episodes, instead of [algorithm]")
    loss_weight: float = Field(1.0, gt=0, description="factor of the loss of this env's tokens")


class RewardConfig(Section):
    """`[[reward]]`: one term of the weighted sum. The default is the env's own reward."""

    name: str
    weight: float = 1.0
    key: str | None = Field(None, description="which number counts, of a reward that returns a mapping of them")
    kwargs: dict[str, Any] = Field(default_factory=dict)


class ChatConfig(Section):
    """`[chat]`: how messages become token ids."""

    template: str | None = Field(None, description="a Jinja chat template, or a path to one; default: the tokenizer's")
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    strip_thinking: bool = Field(True, description="hide <think>…</think> from the environment")
    tool_role: Literal["tool", "user"] = Field("tool", description="role that tool results are rendered with")
    history: Literal["template", "keep"] = Field(
        "template",
        description="what a template that rewrites past turns leads to: 'template' follows it in a new segment, "
        "'keep' goes on from the ids the model saw",
    )


class MediaConfig(Section):
    """`[media]`: how images, videos and audio of observations are read and processed."""

    timeout: float = Field(30.0, gt=0, description="seconds that reading one item may take")
    workers: int = Field(2, ge=1, description="processes that decode; one that hangs or dies is replaced")
    max_bytes: int = Field(2**28, ge=1, description="most bytes of one download or encoded item")
    max_pixels: int = Field(2**26, ge=1, description="most pixels of an image or a video frame; more is refused")
    resize_pixels: int | None = Field(None, ge=1, description="larger images and frames are scaled down to it")
    video_fps: float = Field(2.0, gt=0, description="frames per second taken of a video")
    video_min_frames: int = Field(1, ge=1, description="fewest frames taken, as far as the video has them")
    video_max_frames: int = Field(32, ge=1, description="most frames taken")
    video_max_tokens: int | None = Field(None, ge=1, description="most tokens of one video; frames are left out for it")
    audio_max_seconds: float = Field(600.0, gt=0, description="longest audio; more is refused")
    sound_in_video: bool = Field(False, description="let a model that can hear the sound track of videos")
    processor_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="for the model's processor, such as {images_kwargs = {max_pixels = 65536}}"
    )
    cache_bytes: int = Field(2**30, ge=0, description="of processed items kept in memory")
    keep_gib: float = Field(4.0, ge=0, description="most GiB of media kept in the run folder; 0: none")

    @model_validator(mode="after")
    def _check_frames(self) -> MediaConfig:
        if self.video_min_frames > self.video_max_frames:
            raise ValueError(
                f"video_min_frames = {self.video_min_frames} is more than video_max_frames = {self.video_max_frames}"
            )
        return self


class RolloutConfig(Section):
    """`[rollout]`: how episodes are played."""

    max_turns: int = Field(8, ge=1)
    max_new_tokens: int = Field(256, ge=1, description="most tokens of one turn's answer")
    token_budget: int | None = Field(
        None, ge=2, description="most tokens of an episode's context; default: the model's"
    )
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    stop: tuple[str, ...] = ()
    step_timeout: float = Field(60.0, gt=0, description="seconds one reset or step of an env may take")
    episode_timeout: float = Field(1800.0, gt=0, description="seconds one episode may take")
    reward_timeout: float = Field(60.0, gt=0, description="seconds one reward may take")


class TrainConfig(Section):
    """`[train]`: the loop."""

    steps: int = Field(ge=0)
    groups_per_step: int = Field(ge=1)
    group_size: int = Field(ge=1)
    max_staleness: int = Field(0, ge=0, description="0 is exactly on-policy; more lets rollouts run ahead of training")
    update_every: int = Field(1, ge=1, description="steps between two publications of the weights to the sampler")
    order: Literal["slot", "ready"] = Field(
        "slot", description="groups of a step: its own slots, or the first that finish as far as max_staleness allows"
    )
    oversample: int = Field(0, ge=0, description="with 'ready', groups begun beyond those that steps take")
    max_empty_steps: int = Field(5, ge=1, description="steps in a row without any trainable token before the run stops")
    max_replacements: int = Field(
        16, ge=0, description="how often one dropped group is replaced before its slot stays empty"
    )

    @property
    def on_policy(self) -> bool:
        """Whether every token is trained by the weights that sampled it."""
        return self.max_staleness == 0 and self.update_every == 1

    @model_validator(mode="after")
    def _check_order(self) -> TrainConfig:
        if self.oversample and self.order == "slot":
            raise ValueError(
                f"oversample = {self.oversample} with order = 'slot', in which a step waits for all of its own groups; "
                "set order = 'ready', or oversample = 0"
            )
        if self.steps % self.update_every:
            raise ValueError(
                f"steps = {self.steps} is no multiple of update_every = {self.update_every}: the weights of the last "
                "steps would never be published"
            )
        return self


class EvalConfig(Section):
    """`[eval]`: held-out episodes, their seeds disjoint from training's."""

    every: int = Field(0, ge=0, description="steps between evaluations; 0 only before and after training")
    episodes: int = Field(0, ge=0, description="episodes of each env; 0 turns evaluation off")
    greedy: bool = True


class CheckpointConfig(Section):
    """`[checkpoint]`: what is kept on disk."""

    every: int = Field(0, ge=0, description="steps between checkpoints; 0 only at the end")
    keep: int = Field(2, ge=1, description="how many of the newest stay")


class WarmupConfig(Section):
    """`[warmup]`: supervised steps on the env's own expert before RL."""

    steps: int = Field(ge=0, description="0: no warm-up")
    episodes_per_step: int = Field(32, ge=1)
    lr: float = Field(2e-3, gt=0)
    expert_probability: float = Field(1.0, ge=0, le=1, description="else a random legal action: an imperfect expert")


class RunConfig(Section):
    """A whole run."""

    seed: int = Field(0, ge=0, lt=2**31)
    run_dir: str = "runs/default"
    threads: int | None = Field(None, ge=1, description="CPU threads of torch; default: torch's own choice")
    model: ModelConfig
    env: tuple[EnvConfig, ...] = Field(min_length=1)
    reward: tuple[RewardConfig, ...] = (RewardConfig(name="env"),)
    chat: ChatConfig = ChatConfig()
    media: MediaConfig = MediaConfig()
    rollout: RolloutConfig = RolloutConfig()
    sampler: SamplerSection = SamplerSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    learner: LearnerSection = LearnerSection()
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    timeline: TimelineConfig = TimelineConfig()
    trackers: tuple[PluginSection, ...] = (PluginSection(name="tensorboard"),)
    warmup: WarmupConfig | None = None

    @model_validator(mode="after")
    def _check_intervals(self) -> RunConfig:
        k = self.train.update_every
        for key, every in (("checkpoint.every", self.checkpoint.every), ("eval.every", self.eval.every)):
            if every % k:
                raise ValueError(f"{key} = {every} is no multiple of train.update_every = {k}: give one, or 0")
        return self

    @model_validator(mode="after")
    def _check_rewards(self) -> RunConfig:
        names = [reward.name for reward in self.reward]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"reward names are {names}; give at least one and each only once")
        if taken := {"mean", "std"}.intersection(names):
            raise ValueError(f"reward names are {names}; {min(taken)!r} is taken by the metric reward/{min(taken)}")
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file, apply `dotted.key=value` overrides, check everything that needs no model.

    Raises:
        ConfigError: names the file, key, value, what is allowed and the nearest key.
    """
    data = read_toml(Path(path))
    for override in overrides:
        apply_override(data, override)
    return parse_config(data, source=str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as it is. Raises ConfigError when it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read config {str(path)!r}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def parse_config(data: Mapping[str, Any], *, source: str = "config") -> RunConfig:
    """Check a config that is already a mapping. See `load_config`."""
    config = validate(RunConfig, data, source=source)
    _check_plugins(config, source)
    return config


def dump_config(config: RunConfig) -> str:
    """The config as TOML, every default written out and secrets masked: parsed again, it means the same."""
    import tomli_w

    from relax_gym.kept_config import config_to_keep

    return tomli_w.dumps(config_to_keep(config))


def plugin_options(section: PluginSection, model: type[ModelT], *, source: str, key: str) -> ModelT:
    """A plugin's options, checked by its own model."""
    return validate(model, section.options, source=source, prefix=key)


def load_algorithms(config: RunConfig, *, source: str = "config") -> tuple[Algorithm, ...]:
    """The algorithm of each `[[env]]`, in their order: its own, or the run's. Equal ones are one object.

    Raises:
        UnknownNameError, ConfigError: no such algorithm, or options it does not take.
    """
    built = _algorithms(config, source)
    return tuple(built.get(f"env.{index}.algorithm", built["algorithm"]) for index in range(len(config.env)))


def _algorithms(config: RunConfig, source: str) -> dict[str, Algorithm]:
    """The algorithm of each section that names one, by the section's key."""
    from relax_gym.plugins import plugins

    own = {f"env.{index}.algorithm": env.algorithm for index, env in enumerate(config.env) if env.algorithm}
    built: dict[str, Algorithm] = {}
    for key, section in {"algorithm": config.algorithm, **own}.items():
        options: type[Algorithm] = plugins().get("algorithm", section.name)
        algorithm = plugin_options(section, options, source=source, key=key)
        built[key] = next((same for same in built.values() if same == algorithm), algorithm)
    return built


def component_sections(config: RunConfig, *, source: str = "config") -> Iterator[tuple[str, str, PluginSection]]:
    """(kind, key in the config, section) of every component that a run is made of."""
    yield "sampler", "sampler", config.sampler
    yield "learner", "learner", config.learner
    for index, tracker in enumerate(config.trackers):
        yield "tracker", f"trackers.{index}", tracker
    for key, algorithm in _algorithms(config, source).items():
        asked = algorithm.distillation
        if asked is not None and asked.engine is not None:
            yield "teacher", f"{key}.teacher_engine", asked.engine


def validate(model: type[ModelT], data: Mapping[str, Any], *, source: str, prefix: str = "") -> ModelT:
    """Build a pydantic model; on bad input raise ConfigError with one line for each fault."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [explain_fault(model, fault, prefix) for fault in error.errors()]
        raise ConfigError("\n".join(f"{source}: {line}" for line in lines)) from error


def _check_plugins(config: RunConfig, source: str) -> None:
    """Every name is registered, every option is one the plugin knows; nothing heavy is imported for that."""
    from relax_gym.plugins import plugins
    from relax_gym.registry import check_kwargs, spec

    table = plugins()
    try:
        for env in config.env:
            found = spec(env.id)
            for kwargs in (env.kwargs, {**env.kwargs, **env.eval_kwargs}):
                check_kwargs("env", env.id, found.load(), {**found.kwargs, **kwargs})
        for reward in config.reward:
            check_kwargs("reward", reward.name, table.get("reward", reward.name), reward.kwargs)
        algorithms = load_algorithms(config, source=source)
        for algorithm in algorithms:
            algorithm.check_run(config)
        for kind, key, section in component_sections(config, source=source):
            component = table.get(kind, section.name)
            plugin_options(section, component.load_options(), source=source, key=key).check_run(config)
    except RelaxGymError as error:
        message = str(error)
        raise ConfigError(message if message.startswith(source) else f"{source}: {message}") from error
    for algorithm in algorithms:
        if config.train.group_size == 1 and algorithm.needs_group:
            raise ConfigError(
                f"{source}: train.group_size = 1: {type(algorithm).__name__} compares the episodes of a group; "
                "give 2 or more"
            )
