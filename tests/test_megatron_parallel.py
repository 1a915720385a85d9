"""Layouts: what they refuse, and the groups they form."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import megatron_learner_kit as learners
import pytest
import torch
from megatron_kit import on_ranks
from megatron_learner_kit import Case, Folders
from torch.distributed import distributed_c10d
from transformers import Qwen3Config, Qwen3MoeConfig

from relax_gym.errors import ConfigError
from relax_gym_trainers.megatron_learner import parallel
from relax_gym_trainers.megatron_learner.parallel import Layout
from relax_gym_trainers.megatron_learner.rank_service import Place

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "num_hidden_layers": 4}
DENSE = Qwen3Config(**SIZES)
EXPERTS = Qwen3MoeConfig(**SIZES, num_experts=6, moe_intermediate_size=8)


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        ({"tp": 8}, DENSE, "learner.tp = 8 does not divide the 4 attention heads"),
        ({"tp": 4}, DENSE, "learner.tp = 4 does not divide the 2 key/value heads"),
        (
            {"tp": 2},
            Qwen3Config(**SIZES | {"intermediate_size": 25}),
            "2 does not divide the 25 hidden units",
        ),
        ({"pp": 3}, DENSE, r"learner.pp · vpp = 3 does not divide the 4 layers"),
        ({"pp": 2, "vpp": 4}, DENSE, r"learner.pp · vpp = 8 does not divide the 4 layers"),
        ({"ep": 2, "dp": 2}, DENSE, "learner.ep = 2, but a qwen3 model has no experts; set it to 1"),
        ({"ep": 4, "dp": 4}, EXPERTS, "learner.ep = 4 does not divide the 6 experts"),
        ({"etp": 3, "dp": 3}, EXPERTS, "learner.etp = 3 does not divide the 8 hidden units of an expert"),
        ({"tp": 2, "sequence_parallel": False}, EXPERTS, "experts with learner.tp > 1 need it; leave it out"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(options: dict[str, Any], config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout(**options).check(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 0}, "learner.tp = 0: give a whole number from 1"),
        ({"sequence_parallel": True}, "learner.sequence_parallel = true needs learner.tp > 1"),
        ({"vpp": 2}, "learner.vpp = 2 needs learner.pp > 1"),
        ({"ep": 2}, "etp · learner.ep = 2 does not divide tp · cp · dp = 1"),
        ({"tp": 2, "ep": 2}, "etp · learner.ep = 4 does not divide tp · cp · dp = 2"),
    ],
)
def test_sizes_that_exclude_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout(**options)


def test_what_is_left_out_follows_the_tensor_parallel_size() -> None:
    assert Layout(tp=2) == Layout(tp=2, etp=2, sequence_parallel=True)
    assert Layout() == Layout(etp=1, sequence_parallel=False)
    assert Layout(tp=2, pp=2, cp=2, dp=3).world_size == 24
    Layout(tp=2, ep=2, etp=1).check(EXPERTS)
    Layout(tp=2, pp=2, vpp=2).check(DENSE)


def test_rows_are_padded_to_what_context_and_sequence_parallel_need() -> None:
    assert Layout().token_multiple == 1
    assert Layout(tp=2, sequence_parallel=False).token_multiple == 1
    assert Layout(tp=2).token_multiple == 2
    assert Layout(cp=2).token_multiple == 4
    assert Layout(tp=2, cp=2).token_multiple == 8


def test_an_interleaved_pipeline_gets_the_communication_that_is_right() -> None:
    options = Layout(pp=2, vpp=2).megatron_options()
    assert (options["overlap_p2p_comm"], options["batch_p2p_comm"]) == (True, False)
    assert "overlap_p2p_comm" not in Layout(pp=2).megatron_options()


def groups(layout: Layout) -> dict[str, tuple[int, int]]:
    from megatron.core import parallel_state as state

    names = {
        "tp": state.get_tensor_model_parallel_group,
        "pp": state.get_pipeline_model_parallel_group,
        "cp": state.get_context_parallel_group,
        "ep": state.get_expert_model_parallel_group,
        "etp": state.get_expert_tensor_parallel_group,
        "dp": state.get_data_parallel_group,
    }
    return {name: (get().rank(), get().size()) for name, get in names.items()}


def test_groups_have_the_sizes_of_the_layout() -> None:
    ranks = on_ranks(Layout(tp=2, dp=2, ep=4, etp=1), groups)
    assert [rank["tp"] for rank in ranks] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [rank["dp"] for rank in ranks] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [rank["ep"] for rank in ranks] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert {rank["etp"] for rank in ranks} == {(0, 1)}


FOR_MEGATRONS_CHECKPOINTS = "EXPERT_DATA_PARALLEL_GROUP_GLOO"
"""megatron-core 0.16 forgets the time limit of this one, which nothing else uses."""


def patiences(layout: Layout, place: Place, folder: Path, case: Case) -> set[timedelta]:
    """How long the groups of a rank wait."""
    learners.rank_learner(layout, place, 0, folder, case)
    groups = distributed_c10d._world.pg_map
    used = [group for group in groups if group.group_desc != FOR_MEGATRONS_CHECKPOINTS]
    return {group._get_backend(torch.device("cpu")).options._timeout for group in used}


def test_no_collective_ends_before_the_longest_call(tmp_path: Path) -> None:
    for options in ({"timeout": 7170.0}, {"start_timeout": 7170.0}):
        found = learners.on_ranks(Layout(), patiences, Folders(tmp_path)["dense"], Case(options=options))
        assert found == [{timedelta(seconds=7170), timedelta(hours=2)}]  # megatron-core's in whole minutes


def test_a_rank_outside_of_the_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 2 joins a layout of 2 ranks; start as many processes"):
        parallel.initialise(Layout(tp=2), 2, "tcp://127.0.0.1:1", "gloo")


def again(layout: Layout) -> int:
    from megatron.core import parallel_state as state

    parallel.destroy()
    parallel.destroy()
    return int(state.model_parallel_is_initialized())


def test_groups_can_be_left_twice() -> None:
    with pytest.raises(Exception, match="Default process group has not been initialized"):
        on_ranks(Layout(), again)
