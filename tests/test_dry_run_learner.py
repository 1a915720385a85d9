"""`--dry-run` and the start of a run refuse a learner for the same reasons, before a weight is loaded."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from learner_cases import save_model
from megatron_learner_kit import EXPERTS
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoTokenizer, GPT2Config, LlamaConfig, Qwen3MoeConfig

from relax_gym.config import ModelConfig, Options
from relax_gym.models import resolve_model
from relax_gym_trainers.megatron_learner.learner import MegatronLearner
from relax_gym_trainers.megatron_learner.ranks import Ranks
from relax_gym_trainers.torch_learner import learner as torch_learner

SIZES = {"hidden_size": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 4}
CONFIG = """\
run_dir = "RUN/run"
trackers = []
model = { name = "MODEL" }
env = [{ id = "relax_gym/GuessNumber-v0" }]
train = { steps = 1, groups_per_step = 2, group_size = 2 }
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders with one tokenizer: dense, of experts, two that the Megatron learner is not for; and `other`, with
    a tokenizer of its own."""
    parent = tmp_path_factory.mktemp("models")
    dense = resolve_model(ModelConfig(name="tiny-qwen3", kwargs=SIZES))
    tokenizer = AutoTokenizer.from_pretrained(dense)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    }
    configs = {
        "experts": Qwen3MoeConfig(**sizes, **EXPERTS),
        "biased": LlamaConfig(**sizes, attention_bias=True),
        "gpt2": GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2),
    }
    for name, config in configs.items():
        tokenizer.save_pretrained(save_model(parent / name, config))
    shutil.copytree(dense, parent / "other")
    tokenizer.add_tokens(["four", "more", "new", AddedToken("tokens")])
    tokenizer.save_pretrained(parent / "other")
    return {"dense": dense, **{name: parent / name for name in (*configs, "other")}}


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learners' own start ends where weights would be loaded."""
    monkeypatch.setattr(Ranks, "__init__", lambda *args, **options: pytest.fail("ranks were started"))
    monkeypatch.setattr(torch_learner.models, "load_model", lambda *args, **options: pytest.fail("weights were loaded"))


REFUSED = {
    "tp": ("dense", "name = 'megatron', tp = 3", "learner.tp = 3 does not divide the 4 attention heads of the model"),
    "pp": ("dense", "name = 'megatron', pp = 2", "learner.pp · vpp = 2 does not divide the 3 layers of the model"),
    "ep": ("dense", "name = 'megatron', ep = 2, dp = 2", "learner.ep = 2, but a qwen3 model has no experts"),
    "etp": (
        "experts",
        "name = 'megatron', ep = 4, tp = 2",
        "learner.etp · learner.ep = 8 does not divide tp · cp · dp",
    ),
    "sp": (
        "experts",
        "name = 'megatron', tp = 2, sequence_parallel = false",
        "learner.sequence_parallel = false, but experts with learner.tp > 1 need it",
    ),
    "family": ("gpt2", "name = 'megatron'", "the Megatron learner has no family for model_type 'gpt2'"),
    "field": ("biased", "name = 'megatron'", "config.json has attention_bias = True, but the Megatron learner trains"),
    "encoders": ("dense", "name = 'megatron', freeze_encoders = true", "learner.freeze_encoders = true, but qwen3 mod"),
    "targets": (
        "dense",
        "name = 'megatron', lora = { targets = ['q_projj'] }",
        "learner.lora.targets = ('q_projj',): Target modules",
    ),
    "stage": (
        "experts",
        "name = 'megatron', pp = 2, lora = { targets = ['layers.1.self_attn.q_proj'] }",
        "learner.lora.targets = ('layers.1.self_attn.q_proj',) adapts none of the layers 0 to 0",
    ),
    "torch-targets": (
        "dense",
        "name = 'torch', lora = { targets = ['q_proj', 'lm_head'] }",
        "learner.lora.targets = ('q_proj', 'lm_head') adapts lm_head, but model.embed_tokens and lm_head have one wei",
    ),
    "torch-freeze": ("dense", "name = 'torch', freeze = ['*.nothing']", "learner.freeze: '*.nothing' matches no param"),
    "torch-device": ("dense", "name = 'torch', device = 'cuda:99'", "learner.device = 'cuda:99', but torch sees"),
}


def errors(capsys: Any, folder: Path, model: Path, *changes: str) -> tuple[str, str]:
    """What a dry run and a run print when they refuse."""
    (one, dry_error), (other, error) = (attempt(capsys, folder, model, *changes, dry=dry) for dry in (True, False))
    assert (one, other) == (1, 1)
    return dry_error, error


def attempt(capsys: Any, folder: Path, model: Path, *changes: str, dry: bool = True) -> tuple[int, str]:
    """Exit code and error."""
    path = folder / "run.toml"
    path.write_text(CONFIG.replace("RUN", str(folder)).replace("MODEL", str(model)))
    given = [part for change in changes for part in ("--set", change)]
    code, _, error = run(capsys, "train", path, *(["--dry-run"] if dry else []), *given)
    return code, error


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # peft asks for them itself
@pytest.mark.parametrize("name", REFUSED)
def test_a_learner_that_the_model_is_not_for(capsys: Any, tmp_path: Path, folders: dict[str, Path], name: str) -> None:
    model, learner, message = REFUSED[name]
    dry, started = errors(capsys, tmp_path, folders[model], f"learner={{ {learner} }}")
    assert dry == started
    assert dry.startswith(f"error: {message}")


def test_code_of_a_folder_is_not_passed_over(folders: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    """The torch learner and the samplers would run it."""
    coded = Path(shutil.copytree(folders["dense"], tmp_path / "coded"))
    config = json.loads((coded / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Other"}
    (coded / "config.json").write_text(json.dumps(config))
    (coded / "modeling.py").write_text(
        "from transformers import Qwen3ForCausalLM\n\nclass Other(Qwen3ForCausalLM): ...\n"
    )
    dry, started = errors(capsys, tmp_path, coded, "learner.name=megatron", "model.trust_remote_code=true")
    assert dry == started
    assert "config.json has code of its own in auto_map, but the Megatron learner trains qwen3 models as" in dry


def test_megatron_is_missing(
    capsys: Any, tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "relax_gym_trainers.megatron_learner.checks", None)
    dry, started = errors(capsys, tmp_path, folders["dense"], "learner.name=megatron")
    assert dry == started
    assert dry.startswith('error: learner.name = "megatron" needs megatron-core: pip install "relax-gym[megatron]" (')


@pytest.mark.parametrize(
    ("learner", "teacher", "message"),
    [
        ("torch", "other", "teacher {} has another tokenizer than the model: "),
        ("megatron", "other", "teacher {} has another tokenizer than the model: "),
        ("megatron", "biased", "teacher {} cannot be laid out over the learner's ranks as its policy: config.json has"),
    ],
)
def test_teachers_that_do_not_fit(
    capsys: Any, tmp_path: Path, folders: dict[str, Path], learner: str, teacher: str, message: str
) -> None:
    given = f"algorithm={{ name = 'opd', teacher = '{folders[teacher]}' }}"
    dry, started = errors(capsys, tmp_path, folders["dense"], f"learner.name={learner}", given)
    assert dry == started
    assert dry.startswith(f"error: {message.format(folders[teacher])}")


@pytest.mark.parametrize(
    ("model", "learner"),
    [
        ("dense", "name = 'megatron', tp = 2, lora = { rank = 4 }"),
        ("experts", "name = 'megatron', tp = 2, ep = 2, etp = 1"),
        ("dense", "name = 'torch', lora = { targets = ['q_proj'] }"),
    ],
)
def test_a_learner_that_fits(capsys: Any, tmp_path: Path, folders: dict[str, Path], model: str, learner: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.replace("RUN", str(tmp_path)).replace("MODEL", str(folders[model])))
    teach = f"algorithm={{ name = 'opd', teacher = '{folders['dense']}' }}"
    assert run(capsys, "train", path, "--dry-run", "--set", f"learner={{ {learner} }}", "--set", teach)[::2] == (0, "")
    assert torch.zeros(1).type() == "torch.FloatTensor"  # nothing of Megatron's stand-ins is left behind


def test_another_number_of_processes_was_launched(
    capsys: Any, tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    alone = 'error: 3 processes were started (WORLD_SIZE), but learner.name = "torch" runs in one'
    assert all(error.startswith(alone) for error in errors(capsys, tmp_path, folders["dense"]))
    code, error = attempt(capsys, tmp_path, folders["dense"], "learner={ name = 'megatron', tp = 2 }")
    assert code == 1
    assert error.startswith("error: 3 processes were started (WORLD_SIZE), but the learner's layout has 2 ranks")


def test_launched_ranks_hear_of_a_wrong_layout_from_the_learner(
    capsys: Any, tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for the first one, which must come to where it meets them."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(pytest.fail.Exception, match="ranks were started"):
        errors(capsys, tmp_path, folders["dense"], "learner={ name = 'megatron', tp = 3 }", "threads=1")


def test_a_head_of_its_own_beside_embeddings_that_the_config_ties(
    capsys: Any, tmp_path: Path, folders: dict[str, Path]
) -> None:
    """Such weights are not tied when they are loaded."""
    model = tmp_path / "model"
    shutil.copytree(folders["dense"], model)
    weights = load_file(model / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"] * 2}, model / "model.safetensors")
    for learner in ("freeze = ['lm_head.weight']", "lora = { targets = ['q_proj', 'lm_head'] }"):
        assert attempt(capsys, tmp_path, model, f"learner={{ name = 'torch', {learner} }}") == (0, "")
        code, error = attempt(capsys, tmp_path, folders["dense"], f"learner={{ name = 'torch', {learner} }}")
        assert (code, error[:15]) == (1, "error: learner.")


def test_options_of_a_subclass_are_its_own_to_check() -> None:
    nothing: Any = None
    for learner in (torch_learner.TorchLearner, MegatronLearner):
        assert learner.check_model(nothing, Options()) is None  # type: ignore[arg-type]


def test_a_teacher_that_is_not_there_whoever_trains(
    capsys: Any, tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_gym.dry_run.check_learner", lambda context: None)
    teacher = tmp_path / "nobody"
    code, error = attempt(capsys, tmp_path, folders["dense"], f"algorithm={{ name = 'opd', teacher = '{teacher}' }}")
    assert code == 1
    assert str(teacher) in error
