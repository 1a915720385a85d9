"""The model folder of a checkpoint, without the ranks that wrote it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from relax_gym.errors import RunFolderError


def export_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Write the weights of a checkpoint as a model folder, without tokenizer. Takes memory for one copy of the weights.

    Raises:
        RunFolderError: a Megatron learner has not written the checkpoint, or not to its end.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # host memory holds what the ranks' devices hold together

    import torch
    from transformers import AutoConfig

    from relax_gym_trainers.megatron_learner import compat, hf, lora, model
    from relax_gym_trainers.megatron_learner.checkpoint import FOLDER, check
    from relax_gym_trainers.megatron_learner.checkpoint_files import Stored
    from relax_gym_trainers.megatron_learner.checkpoint_slots import fill, slots
    from relax_gym_trainers.megatron_learner.parallel import Layout, destroy, initialise
    from relax_gym_trainers.megatron_learner.towers import text_config

    state = checkpoint / FOLDER
    if not state.is_dir():
        raise RunFolderError(f"{checkpoint} has no {FOLDER}/; give a checkpoint that a Megatron learner has written")
    stored, layout = Stored(state), Layout()
    whole = AutoConfig.from_pretrained(state)
    config = text_config(whole)
    check(stored, config)
    with compat.prepared(), tempfile.TemporaryDirectory() as meeting:
        initialise(layout, 0, f"file://{meeting}/point", "gloo")
        try:
            chunks = model.build(config, layout, getattr(torch, stored.index["dtype"]), whole=whole)
            if (adapters := stored.index.get("lora")) is not None:
                lora.rebuild(chunks, config, whole, layout, adapters, checkpoint)
            for slot in slots(chunks, None):
                fill(slot, stored)
            hf.write_folder(hf.Export(chunks, config), state, folder)
        finally:
            destroy()
