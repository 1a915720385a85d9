"""Attaching over TLS, with a key."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fake_sglang import FakeSGLang
from test_sglang_sampler import PROMPT, WEIGHTS, config

from relax_gym.context import RunContext
from relax_gym.errors import ConfigError, SamplerError
from relax_gym.models import load_tokenizer, resolve_model
from relax_gym.sampler import SamplingParams
from relax_gym_plugins.samplers.sglang.options import SGLangSamplerOptions
from relax_gym_plugins.samplers.sglang.sampler import SGLangSampler

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not on the path")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One that signs itself, for 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "certificate.pem", folder / "key.pem"
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-days", "2"]
    names = ["-subj", "/CN=a test", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", *kind, *names, "-out", made, "-keyout", key]
    subprocess.run(command, check=True, capture_output=True)
    return made, key


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeSGLang:
    """It wants a key, which the environment has."""
    monkeypatch.setenv("SERVER_KEY", "a secret")
    server = FakeSGLang()
    server.key = "a secret"
    return server


def using(
    server: FakeSGLang,
    certificate: tuple[Path, Path],
    use: Callable[[SGLangSampler], Awaitable[None]],
    folder: Path,
    *,
    ca_file: object = None,
    api_key_env: str | None = "SERVER_KEY",
) -> None:
    """Serve with the certificate, and use a sampler that is attached, but not started."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificate)

    async def run() -> None:
        async with server.serving(tls=tls):
            given = config()
            path = resolve_model(given.model)
            context = RunContext(config=given, run_dir=folder, model_path=path, tokenizer=load_tokenizer(path))
            options = SGLangSamplerOptions(
                urls=(server.url,),
                sync="disk",
                api_key_env=api_key_env,
                ca_file=None if ca_file is None else str(ca_file),
            )
            sampler = SGLangSampler(context, options)
            try:
                await use(sampler)
            finally:
                await sampler.aclose()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_what_ca_file_vouches_for_is_trusted(
    server: FakeSGLang, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    async def use(sampler: SGLangSampler) -> None:
        await sampler.start()
        await sampler.update_weights(WEIGHTS, 0)
        completion = await sampler.open_session().generate(PROMPT, SamplingParams(max_new_tokens=2))
        assert completion.versions == (0, 0)

    using(server, certificate, use, tmp_path, ca_file=certificate[0])
    assert server.url.startswith("https://") and "update_weights_from_disk" in server.calls


def test_a_certificate_nobody_vouches_for_is_refused(
    server: FakeSGLang, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    async def use(sampler: SGLangSampler) -> None:
        with pytest.raises(SamplerError, match=rf"{server.url}/server_info: .*self.signed.*; .*sampler\.ca_file"):
            await sampler.start()

    using(server, certificate, use, tmp_path)


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_ca_file_that_cannot_be_read_is_named(
    content: str | None, server: FakeSGLang, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    ca_file = tmp_path / "ca.pem"
    if content:
        ca_file.write_text(content)

    async def use(sampler: SGLangSampler) -> None:
        with pytest.raises(ConfigError, match=rf"sampler\.ca_file = '{re.escape(str(ca_file))}'"):
            await sampler.start()

    using(server, certificate, use, tmp_path, ca_file=ca_file)


def test_without_the_key_the_error_names_the_option(
    server: FakeSGLang, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    async def use(sampler: SGLangSampler) -> None:
        with pytest.raises(SamplerError, match=r"answered 401: Unauthorized; .*sampler\.api_key_env") as error:
            await sampler.start()
        assert "a secret" not in str(error.value)

    using(server, certificate, use, tmp_path, ca_file=certificate[0], api_key_env=None)
    assert not server.bodies
