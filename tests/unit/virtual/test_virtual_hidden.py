from __future__ import annotations

import os
import subprocess

import pytest
import torch

from dmconfig.units import MIB
from dmconfig.virtual import VirtualMachine, run_hidden

# No test host has a real device: this imitates one that is there unless it is hidden.
IMITATION = """
import os, torch
torch.cuda.is_available = lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != ""
from dmconfig.virtual import VirtualMachine
with VirtualMachine([1 << 20]):
    print(torch.ones(2).to("cuda:0").device)
"""


def test_machine_that_is_refused_beside_a_real_device_runs_hidden(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where CUDA is visible, entering names the way out, and that way works and says what it does."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: os.environ["CUDA_VISIBLE_DEVICES"] != "")
    with pytest.raises(RuntimeError, match=r'CUDA_VISIBLE_DEVICES="".* dmconfig\.virtual\.run_hidden$'):
        VirtualMachine([MIB]).__enter__()
    assert run_hidden(["-c", IMITATION]).returncode == 0
    captured = capfd.readouterr()
    assert captured.out == "cuda:0\n"
    assert captured.err.splitlines()[0] == (
        'dmconfig.virtual: a process of its own, real accelerators hidden (CUDA_VISIBLE_DEVICES="" '
        'HIP_VISIBLE_DEVICES="-1" ONEAPI_DEVICE_SELECTOR="*:cpu")'
    )
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0", "hidden from the new process only"


def test_hidden_process_gives_its_exit_code_and_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is this one's but for the hiding, output is captured when asked, and failure is not raised."""
    monkeypatch.setenv("KEPT", "yes")
    code = (
        "import os, sys; print(os.environ['KEPT'], sys.argv[1:], repr(os.environ['CUDA_VISIBLE_DEVICES'])); sys.exit(3)"
    )
    result = run_hidden(["-c", code, "one", "two"], capture_output=True)
    assert (result.returncode, result.stdout) == (3, "yes ['one', 'two'] ''\n")


def test_hidden_process_can_be_limited_in_time() -> None:
    """One that takes too long is ended."""
    with pytest.raises(subprocess.TimeoutExpired):
        run_hidden(["-c", "import time; time.sleep(60)"], timeout_s=0.2)
