"""The page of episodes: what is kept of media, what is shown, and that nothing in it is obeyed."""

from __future__ import annotations

import base64
import html
import io
import json
import re
import shutil
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL.Image
import PIL.ImageSequence
import pytest
from command import run

from relax_gym.cli import runs
from relax_gym.config import RunConfig, parse_config
from relax_gym.media import Audio, Image, Media, Video, files
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
        rewards={"env": 1.5, "brief": -0.25, "judge": None},
        reward_failures={"judge": "TimeoutError: <b>no answer</b>"},
        reward_parts={"brief/words": 12.0},
    )
    return Group(group_id="0", slot=0, trajectories=(trajectory, trajectory))


def config_of(folder: Path, **media: Any) -> RunConfig:
    env = {"id": "relax_gym/GuessNumber-v0"}
    train = {"steps": 1, "groups_per_step": 1, "group_size": 2}
    return parse_config(
        {"run_dir": str(folder / "run"), "model": {"name": "tiny-qwen3"}, "env": [env], "train": train, "media": media}
    )


def run_of(folder: Path, **media: Any) -> Path:
    written = RunFolder(config_of(folder, **media), resume=False)
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


@pytest.mark.parametrize(
    ("times", "duration", "ends"),
    [([0.0, 0.5, 1.0, 1.5], 2.0, 2.0), ([0.2, 0.4, 3.0], 4.0, 4.0), ([0.0], 0.5, 0.5), ([0.0, 0.0], 0.001, 0.002)],
    ids=["even", "variable", "one frame", "all at once"],
)
def test_a_video_shows_each_frame_until_the_next(times: list[float], duration: float, ends: float) -> None:
    frames, count = np.zeros((len(times), 17, 9, 3), dtype=np.uint8), len(times)
    clip = Video(
        frames=frames,
        times=np.array(times),
        indices=np.arange(count),
        total_frames=count,
        duration=duration,
        audio=None,
    )
    with av.open(io.BytesIO(encode(clip)), "r") as container:
        stream = container.streams.video[0]
        assert stream.duration is not None and stream.time_base is not None
        assert float(stream.duration * stream.time_base) == pytest.approx(ends)
        shown = [frame.time for frame in container.decode(video=0)]
    assert shown == pytest.approx([0.0, *(max(time, 0.001) for time in times[1:])])


@pytest.mark.parametrize("rate", [5000, 16000, 192000])
def test_sound_of_any_rate_is_kept_with_a_video(rate: int) -> None:
    wanted = 0.4 * np.sin(2 * np.pi * 440 * np.arange(2 * rate) / rate)
    sound = Audio(samples=wanted.astype(np.float32), rate=rate)
    with av.open(io.BytesIO(encode(video(sound))), "r") as container:
        heard = np.concatenate([frame.to_ndarray()[0] for frame in container.decode(audio=0)])
        assert container.streams.audio[0].rate == 48000
    assert len(heard) / 48000 == pytest.approx(2.0, abs=0.1)
    spectrum = np.abs(np.fft.rfft(heard[4800:52800]))
    assert spectrum.argmax() == pytest.approx(440, abs=1), "Hz"


def test_without_pyav_a_video_is_an_animated_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    folder = run_of(tmp_path)
    (record, _) = lines(folder)
    kept = record["turns"][1]["observation"][0]["content"][0]["video"]
    assert kept["file"].endswith(".png")
    with PIL.Image.open(folder / kept["file"]) as animation:
        frames = [np.array(frame.convert("RGB")) for frame in PIL.ImageSequence.Iterator(animation)]
        assert animation.info["duration"] == 500
    assert (np.stack(frames) == video().frames).all()
    assert '<img alt="video" width="128" height="132" class="zoomed"' in render_page(folder, [record], None)


def test_a_full_folder_keeps_no_more_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = MediaFolder(tmp_path / "media", limit=100)
    folder.keep(image())
    folder.close()
    folder = MediaFolder(tmp_path / "media", limit=100)
    again, other = folder.keep(image()), folder.keep(image(40))
    folder.close()
    assert again == {"file": f"media/{image().digest}.png", "width": 33, "height": 32}
    assert other == {"file": None, "width": 41, "height": 40}
    assert [file.name for file in (tmp_path / "media").iterdir()] == [f"{image().digest}.png"]
    assert [re.sub(r"[\d.e-]+ GiB", "N GiB", record.message) for record in caplog.records] == [
        f"{tmp_path / 'media'} holds N GiB, media.keep_gib = 9.31e-08: no more media of episodes are kept"
    ]


def test_an_item_that_cannot_be_written_is_logged_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = MediaFolder(tmp_path / "file" / "media", limit=1e9)
    folder.keep(image())
    folder.close()
    assert folder.keep(image())["file"] is None
    (record,) = caplog.records
    assert record.message.startswith(f"<image 33x32 {image().digest[:8]}> is not kept: NotADirectoryError")


def test_items_that_wait_to_be_written_are_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BACKLOG", image().nbytes)
    folder = MediaFolder(tmp_path / "media", limit=1e9)
    assert [folder.keep(item)["file"] is None for item in (image(40), image(48))] == [True, True]
    assert folder.keep(image())["file"] is not None
    folder.close()
    assert [record.message for record in caplog.records] == [
        f"media of episodes come faster than they are written to {tmp_path / 'media'}: some are not kept"
    ]


def test_a_resumed_run_may_keep_more(tmp_path: Path) -> None:
    run_of(tmp_path, keep_gib=0)
    again = RunFolder(config_of(tmp_path, keep_gib=1), resume=True)
    again.begin(0)
    again.add_group(1, group(), kind="train")
    again.close()
    assert len(lines(again.path)) == 2, "the lines without media are forgotten"
    assert len(list((again.path / "media").iterdir())) == 4


def test_nothing_is_kept_when_turned_off_and_the_page_says_so(tmp_path: Path) -> None:
    folder = run_of(tmp_path, keep_gib=0)
    assert not (folder / "media").exists()
    assert lines(folder)[0]["turns"][0]["observation"][0]["content"][0]["image"]["file"] is None
    page = render_page(folder, lines(folder), None)
    assert "image (33 × 32) was not kept" in page
    assert "video (32 × 33 · 4 frames · 2 s · 2 fps · with sound) was not kept" in page
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
    assert "<li>brief/words <b>12</b></li>" in page
    assert "<li>judge <b>unscored</b> TimeoutError: &lt;b&gt;no answer&lt;/b&gt;</li>" in page
    assert 'Turn 2 <span class="reward">reward 0.5</span>' in page
    assert '<span class="reward">unscored</span>' in page


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


def test_an_image_that_is_shown_often_is_in_the_page_once(tmp_path: Path) -> None:
    folder = run_of(tmp_path)
    page = render_page(folder, lines(folder), TOKENIZER)
    data = base64.b64encode(encode(image())).decode()
    assert page.count(data) == 1
    assert page.count(f'<use href="#{image().digest}"/>') == 4
    assert page.count(f'<image id="{image().digest}" width="33" height="32"') == 1


def test_tool_calls_and_newlines_are_shown(tmp_path: Path) -> None:
    folder = run_of(tmp_path)
    (record, _) = lines(folder)
    call = {"function": {"name": "crop", "arguments": {"left": "<i>"}}}
    record["turns"][0]["observation"] = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    record["turns"][0]["context_ids"] = TOKENIZER.encode("\n", add_special_tokens=False)
    page = render_page(folder, [record], TOKENIZER)
    assert (
        "&quot;name&quot;: &quot;crop&quot;, &quot;arguments&quot;: {&quot;left&quot;: &quot;&lt;i&gt;&quot;}" in page
    )
    assert '"><i>\n</i></span>' in page


def test_view_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, page = run_of(tmp_path), tmp_path / "page.html"
    code, out, err = run(capsys, "view", str(folder), "--html", str(page), "--limit", "1")
    assert (code, out, err) == (0, f"{page}: 1 episode, {page.stat().st_size / 1e6:.2f} MB\n", "")
    assert page.read_text(encoding="utf-8").count("<video controls") == 1


def test_view_says_when_a_page_is_large(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "LARGE_PAGE", 0.01)
    code, _, err = run(capsys, "view", str(run_of(tmp_path)), "--html", str(tmp_path / "page.html"))
    assert (code, err) == (0, "browsers are slow with pages of this size; a smaller --limit helps\n")


def test_view_says_where_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "none" / "page.html"
    code, _, err = run(capsys, "view", str(run_of(tmp_path)), "--html", str(page))
    assert code == 1
    assert f"cannot write '{page}': No such file or directory; give --html another file" in err


# In a browser --------------------------------------------------------------------------------------------------------


PROBE = """<script>setTimeout(() => {
    const seen = {
        title: document.title,
        images: [...document.images].map(image => image.naturalWidth),
        drawn: [...document.querySelectorAll('svg[role]')].map(svg => svg.getBBox().width),
        media: [...document.querySelectorAll('audio, video')].map(
            item => [item.tagName, Math.round(item.duration), item.readyState > 0, item.error]),
    };
    document.title = JSON.stringify(seen);
}, 3000)</script>"""
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt install chromium")


def browse(page: Path, *options: str) -> str:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}"]
    done = subprocess.run([*command, *options, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@needs_chromium
def test_a_browser_draws_the_page_and_runs_nothing_in_it(tmp_path: Path) -> None:
    folder = run_of(tmp_path)
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(render_page(folder, lines(folder)[:1], TOKENIZER) + PROBE, encoding="utf-8")
    dom = browse(page, "--dump-dom", f"--screenshot={picture}", "--window-size=1000,1400", "--hide-scrollbars")
    assert "<title>run · 1 episode</title>" in dom
    drawn = PIL.Image.open(picture)
    assert drawn.size == (1000, 1400)
    reds = (np.abs(np.array(drawn.convert("RGB")).astype(int) - (220, 40, 40)).sum(axis=2) < 20).sum()
    assert reds > 2000, "two images, enlarged four times, with a square of 8 x 8 red pixels"


@needs_chromium
def test_a_browser_loads_all_media(tmp_path: Path) -> None:
    """Without the policy, which would stop this script, those in the texts still do not run."""
    folder = run_of(tmp_path)
    page = tmp_path / "page.html"
    bare = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", render_page(folder, lines(folder)[:1], None))
    page.write_text(bare + PROBE, encoding="utf-8")
    seen = re.search(r"<title>(\{.*?\})</title>", browse(page, "--virtual-time-budget=6000", "--dump-dom"))
    assert seen is not None
    assert json.loads(html.unescape(seen[1])) == {
        "title": "run · 1 episode",
        "images": [49],
        "drawn": [33, 33],
        "media": [["VIDEO", 2, True, None], ["AUDIO", 1, True, None]],
    }
