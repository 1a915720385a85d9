"""The train part of TRL's GRPO as one call: loss, backward and optimizer as `GRPOTrainer` does them, no generation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shapes import GPU

from relax_gym.models import load_tokenizer


def make_step(
    model: Path, folder: Path, ids: torch.Tensor, prompt: int, *, rows_at_once: int, dtype: str, checkpointing: bool
) -> Callable[[], None]:
    """One optimizer step on `ids` [rows, tokens], each a prompt of `prompt` tokens and a completion, with advantages of
    1 and -1. `dtype` is that of the weights; float32, TRL's default, computes in bfloat16 by autocast on a GPU.

    Raises:
        SystemExit: TRL is not installed.
    """
    steps = len(ids) // rows_at_once
    trainer = make_trainer(
        model,
        len(ids),
        output_dir=str(folder),
        per_device_train_batch_size=rows_at_once,
        gradient_accumulation_steps=steps,
        gradient_checkpointing=checkpointing,
        max_completion_length=ids.shape[1] - prompt,
        model_init_kwargs={"attn_implementation": "sdpa", "dtype": dtype},
    )
    trainer.create_optimizer()
    wrapped, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    wrapped.train()
    batch = scored(ids.to(trainer.accelerator.device), prompt)
    trainer._generate_and_score_completions = lambda _: batch  # what follows is shuffled and cut by TRL
    trainer.current_gradient_accumulation_steps = steps

    def step() -> None:
        for _ in range(steps):
            trainer.training_step(wrapped, {}, None)
        trainer.accelerator.clip_grad_norm_(wrapped.parameters(), trainer.args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        trainer._metrics["train"].clear()

    return step


def make_trainer(model: Path, rows: int, **options: Any) -> Any:
    """TRL's, for a model folder and a data set of `rows` prompts that are never used."""
    try:
        from datasets import Dataset
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer
    except (ImportError, RuntimeError) as error:  # the latter is how it says that something else is missing
        raise SystemExit(f"TRL is missing here, or what it needs: {error}; pip install trl") from error
    tokenizer: Any = load_tokenizer(model)
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    common: dict[str, Any] = {"num_generations": 2, "beta": 0.0, "learning_rate": 1e-6, "report_to": []}
    config = GRPOConfig(**common, bf16=GPU, use_cpu=not GPU, **options)
    data = Dataset.from_dict({"prompt": ["t1"] * rows})
    return GRPOTrainer(str(model), reward_funcs=no_reward, args=config, train_dataset=data, processing_class=tokenizer)


def scored(ids: torch.Tensor, prompt: int) -> dict[str, torch.Tensor]:
    """What TRL has of rows that it has sampled and rewarded, half of them well."""
    prompts, completions = ids[:, :prompt], ids[:, prompt:]
    signs = 1.0 - 2.0 * (torch.arange(len(ids), device=ids.device) % 2)
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": signs,
        "num_items_in_batch": torch.tensor(completions.numel(), device=ids.device),
    }


def no_reward(completions: list[Any], **rest: Any) -> list[float | None]:
    """Never asked."""
    return [0.0] * len(completions)
