"""What the ranks would refuse at their start, found by one process without weights."""

from __future__ import annotations

from functools import partial

from relax_gym.context import RunContext
from relax_gym.launch import launched_rank
from relax_gym_trainers.megatron_learner import hf, lora
from relax_gym_trainers.megatron_learner.distillation import check_teacher
from relax_gym_trainers.megatron_learner.model import check_code, check_layout
from relax_gym_trainers.megatron_learner.options import MegatronLearnerOptions
from relax_gym_trainers.megatron_learner.rank import layout_of
from relax_gym_trainers.megatron_learner.rank_processes import check_launched
from relax_gym_trainers.megatron_learner.ray_ranks import import_ray
from relax_gym_trainers.megatron_learner.towers import check_encoders, text_config
from relax_gym_trainers.torch_learner.distillation import check_teachers
from relax_gym_trainers.torch_learner.model import load_settings


def check_model(context: RunContext, options: MegatronLearnerOptions) -> None:
    """See `Learner.check_model`."""
    layout = layout_of(options)
    if launched_rank() is not None:
        check_launched(layout.world_size)
    elif options.launcher == "ray":
        import_ray()
    whole = load_settings(context.model_path, trust_remote_code=False)
    check_code(whole, trusted=context.config.model.trust_remote_code)
    config = text_config(whole)
    check_layout(config, whole, layout)
    hf.known_tensors(context.model_path, config)
    if options.freeze_encoders:
        check_encoders(config)
    if options.lora is not None:
        lora.check_targets(config, whole, layout, options.lora, freeze_encoders=options.freeze_encoders)
    rows = config.vocab_size
    check_teachers(context, rows, partial(check_teacher, context=context, layout=layout, rows=rows))
