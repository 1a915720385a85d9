"""Built-in rewards, one in a file."""

from relax_gym.hookspecs import hookimpl


@hookimpl
def register_rewards() -> dict[str, str]:
    """The built-in rewards."""
    return {
        "env": "relax_gym_rewards.env_return:EnvReturn",
        "genrm": "relax_gym_rewards.genrm.judge:GenRM",
        "genrm_group": "relax_gym_rewards.genrm.compare:GenRMGroup",
        "exact_match": "relax_gym_rewards.exact_match:ExactMatch",
        "numeric": "relax_gym_rewards.numeric:Numeric",
        "math": "relax_gym_rewards.math:Math",
        "turn_penalty": "relax_gym_rewards.turn_penalty:TurnPenalty",
        "format": "relax_gym_rewards.format:Format",
        "length": "relax_gym_rewards.length:Length",
        "repetition": "relax_gym_rewards.repetition:Repetition",
        "f1": "relax_gym_rewards.f1:F1",
        "em": "relax_gym_rewards.em:EM",
        "multiple_choice": "relax_gym_rewards.multiple_choice:MultipleChoice",
        "gpqa": "relax_gym_rewards.gpqa:GPQA",
        "gsm8k": "relax_gym_rewards.gsm8k:GSM8K",
        "regex": "relax_gym_rewards.regex:Regex",
        "json_schema": "relax_gym_rewards.json_schema:JsonSchema",
        "iou": "relax_gym_rewards.iou:IoU",
        "point": "relax_gym_rewards.point:Point",
        "wer": "relax_gym_rewards.wer:WER",
        "cer": "relax_gym_rewards.cer:CER",
        "bleu": "relax_gym_rewards.bleu:BLEU",
        "chrf": "relax_gym_rewards.chrf:ChrF",
        "dapo_math": "relax_gym_rewards.dapo_math:DAPOMath",
        "deepscaler_math": "relax_gym_rewards.deepscaler_math:DeepScaleRMath",
        "geo3k": "relax_gym_rewards.geo3k:Geo3K",
        "openr1mm": "relax_gym_rewards.openr1mm:OpenR1MM",
        "ifbench": "relax_gym_rewards.ifbench:IFBench",
        "code": "relax_gym_rewards.code:Code",
        "first_failure": "relax_gym_rewards.composites:FirstFailure",
        "gate": "relax_gym_rewards.composites:Gate",
        "product": "relax_gym_rewards.composites:Product",
        "weighted_sum": "relax_gym_rewards.composites:WeightedSum",
        "tool_use": "relax_gym_rewards.tool_use:ToolUse",
        "remote": "relax_gym_rewards.remote:Remote",
        "random": "relax_gym_rewards.random:Random",
    }
