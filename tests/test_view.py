"""Episodes in the terminal: which are shown, how tokens are coloured, and that nothing in them is obeyed."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from relax_gym.cli import main
from relax_gym.errors import RunFolderError
from relax_gym.testing import tiny_tokenizer
from relax_gym.tiny_models import char_tokenizer
from relax_gym.view import Wanted, message_text, pieces, printable, read_episodes, render_episode, run_tokenizer

TINY = tiny_tokenizer(["<|image_pad|>"])
NAUGHTY = "[bold red]x[/] \x1b[2J\x07 \u202egnp"


def turn(context: str, said: str, **changes: Any) -> dict[str, Any]:
    ids = TINY.encode(said, add_special_tokens=False)
    return {
        "observation": [{"role": "user", "content": context}],
        "text": said,
        "action": said,
        "reward": 0.5,
        "info": {},
        "new_segment": False,
        "finish_reason": "stop",
        "context_ids": TINY.encode(context, add_special_tokens=False),
        "token_ids": ids,
        "logprobs": [-0.1] * len(ids),
        "versions": [3] * len(ids),
        **changes,
    }


def episode(**changes: Any) -> dict[str, Any]:
    return {
        "step": 1,
        "kind": "train",
        "episode_id": "0-0",
        "env_id": "me/Echo-v0",
        "seed": 7,
        "stop_reason": "env_done",
        "reward": 1.0,
        "rewards": {"env": 0.5, "brief": 0.5},
        "error": None,
        "turns": [turn("say ", "ab")],
        "final_observation": [],
        **changes,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    records = [
        episode(step=0, kind="eval", episode_id="eval-0", reward=0.1),
        episode(step=1, episode_id="0-0", reward=0.2),
        episode(step=2, episode_id="1-0", reward=0.3),
        episode(step=2, episode_id="1-1", reward=None, rewards={"env": None}),
        episode(step=2, episode_id="1-2", reward=0.9),
        episode(step=2, episode_id="1r1-0", kind="zero_variance", reward=0.0),
    ]
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "episodes.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def styled(text: Text) -> list[tuple[str, str]]:
    return [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (Wanted(), ["1-0", "1-1", "1-2"]),
        (Wanted(limit=1), ["1-0"]),
        (Wanted(kind="eval"), ["eval-0"]),
        (Wanted(step=1), ["0-0"]),
        (Wanted(episode="1-2"), ["1-2"]),
        (Wanted(step=2, order="best"), ["1-2", "1-0", "1r1-0"]),
        (Wanted(step=2, order="worst", limit=2), ["1r1-0", "1-0"]),
        (Wanted(episode="1-1", order="worst"), ["1-1"]),
    ],
)
def test_which_episodes_are_shown(run: Path, wanted: Wanted, ids: list[str]) -> None:
    assert [record["episode_id"] for record in read_episodes(run, wanted)] == ids


def test_episodes_of_a_step_that_was_never_trained_are_shown_on_request(run: Path) -> None:
    with (run / "episodes.jsonl").open("a") as file:
        file.write(json.dumps(episode(step=3, kind="queued", episode_id="3-0")) + "\n")
    assert [record["episode_id"] for record in read_episodes(run, Wanted(limit=1))] == ["1-0"]
    for wanted in (Wanted(kind="queued"), Wanted(step=3), Wanted(episode="3-0")):
        assert [record["episode_id"] for record in read_episodes(run, wanted)] == ["3-0"]


def test_nothing_matches(run: Path) -> None:
    with pytest.raises(RunFolderError, match=r"matches; it has steps 0 to 2 of kind eval, train, zero_variance"):
        read_episodes(run, Wanted(step=9))


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"is not a run folder: it has no config\.toml"):
        read_episodes(tmp_path, Wanted())


def test_the_tokenizer_needs_no_plugin_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[model]\nname = "gone"\n[[env]]\nid = "uninstalled/Env-v0"\n')
    TINY.save_pretrained(tmp_path / "checkpoints" / "step-000001")
    tokenizer = run_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.decode(TINY.encode("ab", add_special_tokens=False)) == "ab"


CODE = """
from transformers import PreTrainedTokenizerFast
class OwnTokenizer(PreTrainedTokenizerFast):
    own = True
"""


@pytest.mark.parametrize("trusted", [True, False])
def test_the_tokenizer_runs_its_own_code_only_if_the_config_trusts_it(tmp_path: Path, trusted: bool) -> None:
    (tmp_path / "config.toml").write_text(f'[model]\nname = "gone"\ntrust_remote_code = {str(trusted).lower()}\n')
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    TINY.save_pretrained(checkpoint)
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings))
    (checkpoint / "own.py").write_text(CODE)
    assert getattr(run_tokenizer(tmp_path), "own", False) is trusted


@pytest.mark.parametrize("config", ["", "[model", '[model]\nname = "tiny-qwen3"\nkwargs = {nonsense = 1}\n'])
def test_a_run_without_tokenizer_can_be_viewed_all_the_same(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.toml").write_text(config)
    (tmp_path / "checkpoints" / "step-foo").mkdir(parents=True)
    assert run_tokenizer(tmp_path) is None


def test_context_is_dim_and_what_was_sampled_is_coloured_by_its_log_prob() -> None:
    record = episode(turns=[turn("say ", "abc", logprobs=[-0.1, -1.0, -5.0])])
    spans = styled(render_episode(record, TINY))
    assert spans[1:] == [
        ("turn 1\n", "cyan"),
        ("s", "dim"),
        ("a", "dim"),
        ("y", "dim"),
        (" ", "dim"),
        ("a", "bold green"),
        ("b", "bold yellow"),
        ("c", "bold red"),
        ("  reward 0.5  3 tokens of version 3  finish stop\n", "cyan"),
        ("stop env_done  reward 1 (env 0.5, brief 0.5)\n", "bold cyan"),
    ]


def test_without_tokenizer_the_text_is_shown() -> None:
    plain = render_episode(episode(turns=[turn("say", "ab", reward=None)]), None).plain
    assert plain == (
        "── episode 0-0  me/Echo-v0  seed 7  step 1  train ──\n"
        "turn 1\nuser: say\nmodel: ab\n  the env did not answer  2 tokens of version 3  finish stop\n"
        "stop env_done  reward 1 (env 0.5, brief 0.5)\n"
    )


def test_error_with_its_traceback() -> None:
    error = {"env_id": "me/Echo-v0", "turn": 1, "message": "KeyError: 'x'", "traceback": "Traceback …\nKeyError: 'x'\n"}
    record = episode(error=error, reward=None, rewards={"env": None}, stop_reason="error")
    plain = render_episode(record, None).plain
    assert plain.endswith(
        "stop error  reward unscored (env unscored)\nerror at turn 1: KeyError: 'x'\nTraceback …\nKeyError: 'x'\n"
    )


def test_why_a_reward_could_not_score() -> None:
    failures = {"brief": "KeyError: 'answer' (\x1b.py:21)"}
    rewards = {"env": 0.5, "brief": None}
    plain = render_episode(episode(reward=None, rewards=rewards, reward_failures=failures), None).plain
    assert plain.endswith(
        "stop env_done  reward unscored (env 0.5, brief unscored)\n"
        "reward brief could not score it: KeyError: 'answer' (\\x1b.py:21)\n"
    )


def test_new_segment_is_marked() -> None:
    assert "[new segment: " in render_episode(episode(turns=[turn("a", "b", new_segment=True)]), TINY).plain


@pytest.mark.parametrize("tokenizer", [TINY, None])
def test_k122_model_text_is_shown_and_not_obeyed(tokenizer: Any) -> None:
    record = episode(turns=[turn(NAUGHTY, NAUGHTY)], final_observation=[{"role": "user", "content": NAUGHTY}])
    file = StringIO()
    Console(file=file, force_terminal=True, color_system=None, width=200).print(render_episode(record, tokenizer))
    shown = file.getvalue()
    assert shown.count(r"[bold red]x[/] \x1b[2J\x07 \u202egnp") == 3
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown
    assert "\u202e" not in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc é 漢 🜁", "a\tb\nc é 漢 🜁"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\r\x08\x7f\x9b", r"\r\x08\x7f\x9b"),
        ("\u2066\u2028\ufeff", r"\u2066\u2028\ufeff"),
        ("\ud800", r"\ud800"),
        ("\u061c\U000e0041", r"\u061c\U000e0041"),
    ],
)
def test_k122_printable(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_characters_of_several_tokens_stay_whole() -> None:
    ids = TINY.encode("a漢b", add_special_tokens=False)
    assert [(text, part.stop - part.start) for text, part in pieces(ids, TINY)] == [("a", 1), ("漢", 3), ("b", 1)]


def test_a_character_that_was_cut_off_is_still_shown() -> None:
    ids = TINY.encode("漢", add_special_tokens=False)[:2]
    assert [text for text, _ in pieces(ids, TINY)] == ["\ufffd"]


def test_pieces_of_the_built_in_model() -> None:
    tokenizer = char_tokenizer()
    ids = tokenizer.encode("user 7<|im_end|>", add_special_tokens=False)
    assert [text for text, _ in pieces(ids, tokenizer)] == ["user", " ", "7", "<|im_end|>"]


def test_image_pads_are_counted() -> None:
    record = episode(turns=[turn("<|image_pad|>" * 300 + "aaaaaaa", "ok")])
    assert "\n<|image_pad|>×300aaaaaaaok\n" in render_episode(record, TINY).plain


def test_message_text() -> None:
    parts = [{"type": "image", "image": object()}, {"type": "text", "text": "what?"}]
    assert message_text({"role": "user", "content": parts}) == "user: <image>what?"
    call = {"function": {"name": "add", "arguments": {}}}
    assert message_text({"role": "assistant", "content": None, "tool_calls": [call]}) == (
        'assistant: {"function": {"name": "add", "arguments": {}}}'
    )


def test_best_and_worst_exclude_each_other(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["view", str(run), "--best", "--worst"])
    assert end.value.code == 2
    assert "exclude each other" in capsys.readouterr().err
