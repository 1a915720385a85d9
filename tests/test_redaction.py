"""Options declared as secrets reach their plugin and no file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import AliasChoices, AliasPath, ConfigDict, Field, SecretBytes, SecretStr

from relax_gym.build import build_parts
from relax_gym.config import Options, PluginSection, RunConfig, load_config, parse_config, plugin_options
from relax_gym.dry_run import dry_run
from relax_gym.errors import ConfigError, RunFolderError
from relax_gym.plugins import plugins
from relax_gym.redaction import MASK, check_secrets, masked, secrets
from relax_gym.registry import Component
from relax_gym.run_folder import RunFolder
from relax_gym.train import train


class Login(Options):
    """A part of other options."""

    user: str
    password: SecretStr


class PostOptions(Options):
    """What a tracker somewhere else needs."""

    token: SecretStr
    login: Login | None = None
    url: str = Field("http://localhost")


class Ladder:
    """A value that pydantic cannot write as JSON."""


class DeepOptions(Options):
    """Secrets wherever a plugin may put them."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    keys: list[SecretStr]
    unique: set[SecretStr]
    logins: list[Login]
    headers: dict[str, SecretStr]
    ranks: dict[int, SecretStr]
    api_key: SecretStr = Field(alias="apiKey")
    pin: SecretStr = Field(validation_alias=AliasChoices("pin", AliasPath("door", "pin")))
    door: dict[str, str]
    blob: SecretBytes
    long: SecretStr = Field(min_length=20)
    ladder: Ladder = Field(default_factory=Ladder)


DEEP = {
    "keys": ["k3y-1", "k3y-2"],
    "unique": ["uniqu3", "uniqu3"],
    "logins": [{"user": "a", "password": "pw-a"}, {"user": "b", "password": "pw-b"}],
    "headers": {"x.api.key": "h3ader", "y": "h4ader"},
    "ranks": {"1": "r4nk"},
    "apiKey": "al1as",
    "door": {"pin": "p1n", "colour": "red"},
    "blob": "bl0b",
    "long": "l0ng" * 6,
}


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    plugins().tables["tracker"].add("test_deep", Component(factory="math:sqrt", options=DeepOptions), "test")
    plugins().tables["sampler"].add("test_post", Component(factory="math:sqrt", options=PostOptions), "test")
    plugins().tables["tracker"].add("test_post", Component(factory="math:sqrt", options=PostOptions), "test")
    plugins().tables["teacher"].add("test_post", Component(factory="math:sqrt", options=PostOptions), "test")


def config(tmp_path: Path, token: str = "s3cret", **sampler: Any) -> RunConfig:
    return parse_config(
        {
            "run_dir": str(tmp_path / "run"),
            "model": {"name": "tiny-qwen3"},
            "env": [{"id": "relax_gym/GuessNumber-v0"}],
            "sampler": {"name": "test_post", "token": token, **sampler},
            "algorithm": {
                "name": "opd",
                "teacher": "t",
                "top_k": 4,
                "teacher_engine": {"name": "test_post", "token": "te4cher"},
            },
            "trackers": [
                {"name": "test_post", "token": "tr4cker", "login": {"user": "me", "password": "passw0rd"}},
            ],
            "train": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        }
    )


def test_secrets_are_found_by_their_key_and_masked_in_a_copy(tmp_path: Path) -> None:
    given = config(tmp_path)
    assert secrets(given) == {
        ("sampler", "token"): "s3cret",
        ("trackers", 0, "token"): "tr4cker",
        ("trackers", 0, "login", "password"): "passw0rd",
        ("algorithm", "teacher_engine", "token"): "te4cher",
    }
    assert masked(given)["algorithm"]["teacher_engine"] == {"name": "test_post", "token": MASK}
    assert masked(given)["trackers"] == [
        {"name": "test_post", "token": MASK, "login": {"user": "me", "password": MASK}}
    ]
    assert plugin_options(given.sampler, PostOptions, source="", key="").token.get_secret_value() == "s3cret"


def test_secrets_in_lists_mappings_and_under_other_names_are_masked(tmp_path: Path) -> None:
    given = config(tmp_path).model_copy(update={"trackers": (PluginSection(name="test_deep", **DEEP),)})
    assert masked(given)["trackers"] == [
        {
            "name": "test_deep",
            "keys": [MASK, MASK],
            "unique": [MASK, MASK],
            "logins": [{"user": "a", "password": MASK}, {"user": "b", "password": MASK}],
            "headers": {"x.api.key": MASK, "y": MASK},
            "ranks": {"1": MASK},
            "apiKey": MASK,
            "door": {"pin": MASK, "colour": "red"},
            "blob": MASK,
            "long": MASK,
        }
    ]
    assert secrets(given)["trackers", 0, "headers", "x.api.key"] == "h3ader"


def test_a_mask_that_the_plugin_would_refuse_does_not_keep_a_run_from_resuming(tmp_path: Path) -> None:
    given = config(tmp_path).model_copy(update={"trackers": (PluginSection(name="test_deep", **DEEP),)})
    for resume in (False, True):
        RunFolder(given, resume=resume).begin(0)
    assert f'long = "{MASK}"' in (tmp_path / "run" / "config.toml").read_text()


def test_no_secret_is_in_the_run_folder_and_resume_takes_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/relax-gym", "train", "x.toml", "--set", "sampler.token=s3cret"])
    RunFolder(config(tmp_path), resume=False).begin(0)
    written = "".join(path.read_text() for path in (tmp_path / "run").iterdir() if path.is_file())
    assert not [secret for secret in ("s3cret", "tr4cker", "passw0rd", "te4cher") if secret in written]
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["command"] == ["relax-gym", "train", "x.toml", "--set", f"sampler.token={MASK}"]
    RunFolder(config(tmp_path, token="another"), resume=True).begin(0)
    assert "another" not in (tmp_path / "run" / "config.toml").read_text()
    with pytest.raises(RunFolderError) as caught:
        RunFolder(config(tmp_path, url="http://elsewhere"), resume=True)
    assert "s3cret" not in str(caught.value)


def test_a_config_from_a_run_folder_asks_for_its_secrets(tmp_path: Path) -> None:
    RunFolder(config(tmp_path), resume=False).begin(0)
    with pytest.raises(ConfigError, match=r"sampler.token is a secret, .*; give it with --set sampler.token=…"):
        build_parts(load_config(tmp_path / "run" / "config.toml"))


def test_evaluation_asks_for_the_samplers_secrets_only(tmp_path: Path) -> None:
    RunFolder(config(tmp_path), resume=False).begin(0)
    again = load_config(tmp_path / "run" / "config.toml", ["sampler.token=s3cret"])
    check_secrets(again, "sampler")
    for start in (train, dry_run):
        with pytest.raises(ConfigError, match=r"trackers\.0\.token is a secret"):
            start(again.model_copy(update={"run_dir": str(tmp_path / "new")}))


def test_other_steps_are_noted_when_a_run_is_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "relax_gym")
    first = config(tmp_path)
    RunFolder(first, resume=False).begin(0)
    RunFolder(first, resume=True).begin(0)
    assert caplog.messages == []
    longer = first.model_copy(update={"train": first.train.model_copy(update={"steps": 4})})
    RunFolder(longer, resume=True).begin(0)
    assert caplog.messages == [
        "train.steps was 1 and is 4: a learning-rate schedule over all steps goes on as one over 4"
    ]
