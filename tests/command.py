"""Runs the command line in this process."""

from __future__ import annotations

import pytest

from relax_gym.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of `relax-gym <arguments>`."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    code = end.value.code
    return (0 if code is None else int(code)), out, err
