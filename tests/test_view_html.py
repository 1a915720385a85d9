"""The page of episodes: what is kept of media, what is shown, and that nothing in it is obeyed."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import wave
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from command import run

from relax_gym.config import parse_config
from relax_gym.media import Audio, Image, Media, Video
from relax_gym.media.files import MediaFolder, encode
from relax_gym.run_folder import RunFolder
from relax_gym.testing import tiny_tokenizer
from relax_gym.types import Completion, FinishReason, Group, StopReason, Task, Trajectory, Turn
from relax_gym.view_html import render_page

TOKENIZER = tiny_tokenizer(["<|image_pad|>"])
NAUGHTY = "<script>document.title='owned'</script>\"><img src=x onerror=\"document.title='owned'\"></style>\u202egnp"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def image(size: int = 32) -> Image:
    pixels = np.full((size, size + 1, 3), 235, dtype=np.uint8)
    pixels[:8, :8], pixels[-8:, -8:] = (220, 40, 40), (30, 160, 60)
    return Image(pixels=pixels)


def tone(seconds: float = 1.0) -> Audio:
    samples = 0.4 * np.sin(2 * np.pi * 440 * np.arange(round(8000 * seconds)) / 8000)
    return Audio(samples=samples.astype(np.float32), rate=8000)


def video(sound: Audio | None = None) -> Video:
    frames = np.zeros((4, 33, 32, 3), dtype=np.uint8)
    for number, frame in enumerate(frames):
        frame[8:16, 8 * number : 8 * number + 8] = (60, 120, 240)
    times = np.arange(4) / 2
    return Video(frames=frames, times=times, indices=np.arange(4), total_frames=4, duration=2.0, audio=sound)


def turn(said: str, *items: Media, text: str = "Where to?", reward: float = 0.5) -> Turn:
    ids = TOKENIZER.encode(said, add_special_tokens=False)
    fed = TOKENIZER.encode(text, add_special_tokens=False) + [TOKENIZER.convert_tokens_to_ids("<|image_pad|>")] * 64
    parts = [{"type": item.kind, item.kind: item} for item in items]
    return Turn(
        observation=({"role": "user", "content": [*parts, {"type": "text", "text": text}]},),
        context_ids=tuple(fed),
        completion=Completion(
            token_ids=tuple(ids),
            logprobs=tuple(-0.05 - 1.7 * (at % 3) for at in range(len(ids))),
            versions=(3,) * len(ids),
            finish_reason=FinishReason.STOP,
        ),
        text=said,
        action=said,
        reward=reward,
    )


def group() -> Group:
    trajectory = Trajectory(
        task=Task(env_id="me/Look-v0", seed=7),
        episode_id="0-0",
        turns=(
            turn("right", image()),
            turn("It moves to the right.", video(tone(2.0)), text="Which way does it move?"),
            turn(NAUGHTY, tone(), image(), text=NAUGHTY),
        ),
        stop_reason=StopReason.ENV_DONE,
        final_observation=({"role": "user", "content": [{"type": "image", "image": image(48)}]},),
        rewards={"env": 1.5, "brief": -0.25},
    )
    return Group(group_id="0", slot=0, trajectories=(trajectory, trajectory))


def run_of(folder: Path, **media: Any) -> Path:
    env = {"id": "relax_gym/GuessNumber-v0"}
    train = {"steps": 1, "groups_per_step": 1, "group_size": 2}
    config = parse_config(
        {"run_dir": str(folder / "run"), "model": {"name": "tiny-qwen3"}, "env": [env], "train": train, "media": media}
    )
    written = RunFolder(config, resume=False)
    written.begin(0)
    written.add_group(1, group(), kind="train")
    written.close()
    return written.path


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]


# What is kept --------------------------------------------------------------------------------------------------------


def test_each_item_is_kept_once_and_lines_say_where(tmp_path: Path) -> None:
    folder = run_of(tmp_path)
    names = {f"{item.digest}.{end}" for item, end in ((image(), "png"), (video(tone(2.0)), "mp4"), (tone(), "wav"))}
    assert {file.name for file in (folder / "media").iterdir()} == names | {f"{image(48).digest}.png"}
    first, second = lines(folder)
    assert first["turns"] == second["turns"]
    (part, text) = first["turns"][0]["observation"][0]["content"]
    assert part == {"type": "image", "image": {"file": f"media/{image().digest}.png", "width": 33, "height": 32}}
    assert text == {"type": "text", "text": "Where to?"}
    assert first["turns"][1]["observation"][0]["content"][0]["video"]["times"] == [0.0, 0.5, 1.0, 1.5]
    kept = first["turns"][2]["observation"][0]["content"][0]["audio"]
    assert (kept["seconds"], kept["rate"]) == (1.0, 8000)


def test_files_hold_what_the_model_was_shown(tmp_path: Path) -> None:
    assert (np.array(PIL.Image.open(io.BytesIO(encode(image())))) == image().pixels).all()
    with wave.open(io.BytesIO(encode(tone()))) as sound:
        samples = np.frombuffer(sound.readframes(8000), dtype="<i2") / 32767
    np.testing.assert_allclose(samples, tone().samples, atol=1e-4)
    from relax_gym.media.video import VideoPlan, read_video

    plan = VideoPlan(fps=2.0, min_frames=4, max_frames=9, max_pixels=10**6, sound_rate=8000)
    read = read_video(encode(video(tone(2.0))), plan)
    assert read.frames.shape == (4, 34, 32, 3)
    assert np.abs(read.frames[:, :33].astype(int) - video().frames).mean() < 6
    assert read.audio is not None
    assert read.audio.seconds == pytest.approx(2.0, abs=0.2)


def test_a_full_folder_keeps_no_more_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = MediaFolder(tmp_path / "media", limit=100)
    noted = [folder.keep(item) for item in (image(), image(40), image(48))]
    folder.close()
    assert [file.name for file in (tmp_path / "media").iterdir()] == [f"{image().digest}.png"]
    assert [note["width"] for note in noted] == [33, 41, 49]
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / 'media'} holds 0.0 GiB, media.keep_gib = 9.31323e-08: no more media of episodes are kept"
    ]


def test_nothing_is_kept_when_turned_off_and_the_page_says_so(tmp_path: Path) -> None:
    folder = run_of(tmp_path, keep_gib=0)
    assert not (folder / "media").exists()
    page = render_page(folder, lines(folder), None)
    assert "image (width 33 · height 32) was not kept" in page
    assert "<img" not in page


# What is shown -------------------------------------------------------------------------------------------------------


def test_a_page_shows_tokens_by_mask_and_probability(tmp_path: Path) -> None:
    folder = run_of(tmp_path)
    page = render_page(folder, lines(folder), TOKENIZER)
    right = TOKENIZER.encode("right", add_special_tokens=False)
    assert f'<span class="token sure" title="id {right[0]}, log-prob -0.0500">r</span>' in page
    assert f'<span class="token doubtful" title="id {right[1]}, log-prob -1.7500">i</span>' in page
    assert f'<span class="token unlikely" title="id {right[2]}, log-prob -3.4500">g</span>' in page
    assert '">W</span><span class="token context"' in page
    assert "&lt;|image_pad|&gt;×64</span>" in page
    assert "<li>brief <b>-0.25</b></li>" in page
    assert '<span class="reward">reward 1.25</span>' in page


def test_k122_nothing_that_was_written_becomes_markup(tmp_path: Path) -> None:
    folder = run_of(tmp_path)
    for tokenizer in (TOKENIZER, None):
        page = render_page(folder, lines(folder), tokenizer)
        tags = set(re.findall(r"<(\w+)", page))
        assert "script" not in tags
        assert page.count("<style>") == page.count("</style>") == 1
        assert "onerror" not in re.sub(r">[^<]*<", "><", page)
        assert "\u202e" not in page
        assert "\\u202egnp" in page


def test_a_line_cannot_name_a_file_outside_the_folder(tmp_path: Path) -> None:
    folder = run_of(tmp_path)
    (record, _) = lines(folder)
    for name in ("../secret.png", "config.toml", "/etc/passwd"):
        record["turns"][0]["observation"][0]["content"][0]["image"]["file"] = name
        assert "was not kept" in render_page(folder, [record], None)


def test_view_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, page = run_of(tmp_path), tmp_path / "page.html"
    code, out, _ = run(capsys, "view", str(folder), "--html", str(page), "--limit", "1")
    assert (code, out) == (0, f"1 episodes: {page}\n")
    assert page.read_text(encoding="utf-8").count("<video controls") == 1


# In a browser --------------------------------------------------------------------------------------------------------


def browse(page: Path, *options: str) -> str:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}"]
    done = subprocess.run([*command, *options, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt install chromium")
def test_a_browser_shows_the_media_and_runs_nothing(tmp_path: Path) -> None:
    folder = run_of(tmp_path)
    page = tmp_path / "page.html"
    page.write_text(render_page(folder, lines(folder)[:1], TOKENIZER), encoding="utf-8")
    dom = browse(page, "--dump-dom")
    assert "<title>run · 1 episode</title>" in dom
    # The same page with a script of the test's, which its policy would stop.
    probe = """<script>setTimeout(() => { document.title = JSON.stringify({
        images: [...document.images].map(i => i.naturalWidth),
        durations: [...document.querySelectorAll('audio, video')].map(m => Math.round(m.duration)),
        }) }, 3000)</script>"""
    open_page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    page.write_text(open_page.replace("</body>", f"{probe}</body>"), encoding="utf-8")
    seen = re.search(r"<title>(\{.*?\})</title>", browse(page, "--virtual-time-budget=6000", "--dump-dom"))
    assert seen is not None
    assert json.loads(seen[1].replace("&quot;", '"')) == {"images": [33, 33, 49], "durations": [2, 1]}


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt install chromium")
def test_a_browser_can_draw_the_page(tmp_path: Path) -> None:
    folder = run_of(tmp_path)
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(render_page(folder, lines(folder)[:1], TOKENIZER), encoding="utf-8")
    browse(page, f"--screenshot={picture}", "--window-size=1000,1400", "--hide-scrollbars")
    drawn = PIL.Image.open(picture)
    assert drawn.size == (1000, 1400)
    reds = (np.abs(np.array(drawn.convert("RGB")).astype(int) - (220, 40, 40)).sum(axis=2) < 20).sum()
    assert reds > 100, "the red square of the image is there"
