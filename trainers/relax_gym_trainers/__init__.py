"""Built-in algorithms, learners and teacher engines."""

from relax_gym.hookspecs import hookimpl
from relax_gym.registry import Component


@hookimpl
def register_algorithms() -> dict[str, str]:
    """The built-in algorithms."""
    algorithms = "relax_gym_trainers.algorithms"
    return {
        "cispo": f"{algorithms}.cispo:CISPO",
        "dapo": f"{algorithms}.dapo:DAPO",
        "dr_grpo": f"{algorithms}.dr_grpo:DrGRPO",
        "grpo": f"{algorithms}.grpo:GRPO",
        "gspo": f"{algorithms}.gspo:GSPO",
        "gspo_token": f"{algorithms}.gspo_token:GSPOToken",
        "opd": f"{algorithms}.opd:OPD",
        "reinforce_pp": f"{algorithms}.reinforce_pp:ReinforcePP",
        "reinforce_pp_baseline": f"{algorithms}.reinforce_pp_baseline:ReinforcePPBaseline",
        "rloo": f"{algorithms}.rloo:RLOO",
        "sapo": f"{algorithms}.sapo:SAPO",
        "sft": f"{algorithms}.sft:SFT",
    }


@hookimpl
def register_learners() -> dict[str, Component]:
    """The built-in learners."""
    return {
        "torch": Component(
            factory="relax_gym_trainers.torch_learner.learner:TorchLearner",
            options="relax_gym_trainers.torch_learner.options:TorchLearnerOptions",
        ),
        "megatron": Component(
            factory="relax_gym_trainers.megatron_learner.learner:MegatronLearner",
            options="relax_gym_trainers.megatron_learner.options:MegatronLearnerOptions",
            serve="relax_gym_trainers.megatron_learner.ranks:serve",
        ),
    }


@hookimpl
def register_teachers() -> dict[str, Component]:
    """The built-in teacher engines."""
    return {
        "local": Component(
            factory="relax_gym_trainers.torch_learner.local_teacher:LocalTeacher",
            options="relax_gym_trainers.torch_learner.options:LocalTeacherOptions",
        )
    }
