"""The torchrun command and its environment, and what `launch` refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from finetune import launch as module
from finetune.device import Device
from finetune.errors import InputError
from finetune.launch import launch_command

CPU = Device("cpu", "CPU", 10**9, bf16=False)
CARD = Device("cuda", "card", 10**9, bf16=True)


def test_the_command_runs_the_same_train_on_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "this_device", lambda: CARD)
    command, environment = launch_command(4, ["train", "gemma2b-lora", "--set", "train.epochs=2"], 29501)
    assert command == [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc_per_node", "4",
        "--master_addr", "127.0.0.1", "--master_port", "29501",
        "-m", "finetune", "train", "gemma2b-lora", "--set", "train.epochs=2",
    ]  # fmt: skip
    assert environment == {}


@pytest.mark.parametrize(("cores", "processes", "threads"), [(8, 2, "4"), (2, 4, "1"), (None, 1, "1"), (3, 2, "1")])
def test_on_cpus_the_processes_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, processes: int, threads: str
) -> None:
    monkeypatch.setattr(module, "this_device", lambda: CPU)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    _, environment = launch_command(processes, ["train", "x"], 1)
    assert environment == {
        "ACCELERATE_USE_CPU": "true",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": threads,
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
    }


@pytest.mark.parametrize("arguments", [[], ["plan", "x"], ["--set", "a=b", "train", "x"]])
def test_only_train_is_launched(arguments: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        launch_command(2, arguments, 1)
    assert str(caught.value) == ("`launch` starts `finetune train ...`. Write `finetune launch -n 2 train RECIPE`.")


def test_the_process_becomes_the_launcher_and_the_users_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "this_device", lambda: CPU)
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "7"})
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: started.append([path, *command]))
    module.launch(2, ["train", "x"])
    [command] = started
    assert command[0] == command[1] == sys.executable
    assert 1024 < int(command[command.index("--master_port") + 1]) < 65536
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert os.environ["ACCELERATE_USE_CPU"] == "true"


def test_the_door_hands_every_word_through() -> None:
    code = (
        "import sys, finetune.launch, finetune.cli\n"
        "finetune.launch.launch = lambda n, words: print(n, list(words))\n"
        "words = ['launch', '-n', '2', 'train', 'r', '--set', 'train.epochs=2', '--output', 'o', '--json']\n"
        "sys.argv = ['finetune', *words]\n"
        "finetune.cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 ['train', 'r', '--set', 'train.epochs=2', '--output', 'o', '--json']\n", done.stderr


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "0"),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, "3"),
        ({"CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"WORLD_SIZE": "2"}, None),
    ],
)
def test_a_process_alone_sees_one_card(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], after: str | None
) -> None:
    for name in ("WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    module.use_one_card()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == after


@pytest.mark.parametrize("code", [0, 130])
def test_a_process_of_several_leaves_with_its_code_and_without_taking_python_apart(code: int) -> None:
    """An object that is left over is not finalized, as a tensor in a thread of gloo's would be; atexit is kept."""
    script = f"""
import atexit
from finetune.launch import leave

class Tensor:
    def __del__(self):
        print("taken apart")

kept = Tensor()
atexit.register(print, "registered for the end")
print("work")
leave({code})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert done.stdout.split("\n") == ["work", "registered for the end", ""]
