"""Two CPU processes really train together, with the losses of one process that accumulates twice as much."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from finetune.run import Run
from finetune.train import train
from tests.flow.conftest import losses, recipe, recipe_text
from tests.tiny import tiny_model

ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "true",
    "MASTER_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}


def run_command(command: list[str], cwd: Path, environment: dict[str, str]) -> str:
    """Output of a launcher, which is ended with everything it started when it takes too long."""
    process = subprocess.Popen(
        command, cwd=cwd, env={**os.environ, **environment}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    return output


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def accelerate(port: str) -> list[str]:
    return [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
        "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", port, "-m", "finetune",
    ]  # fmt: skip


@pytest.mark.parametrize(("how", "method"), [("accelerate launch", "lora"), ("finetune launch", "qlora")])
def test_two_processes_equal_one(base: Path, rows: Path, tmp_path: Path, how: str, method: str) -> None:
    train_fields, rest = "steps: 4, save_every: 4", ""
    if method == "lora":
        base = tiny_model(
            tmp_path / "base", dtype="bfloat16"
        )  # whose weights lie in memory as they are (`fast.weights`)
    one = train(recipe(base, rows, method, train=train_fields), output=tmp_path / "one")
    file = tmp_path / "r.yaml"
    file.write_text(recipe_text(base, rows, method, train=train_fields, rest=rest))
    verb = ["train", str(file), "--output", str(tmp_path / "two")]
    launcher = (
        accelerate(free_port())
        if how == "accelerate launch"
        else [sys.executable, "-m", "finetune", "launch", "-n", "2"]
    )
    output = run_command([*launcher, *verb], tmp_path, ENVIRONMENT)
    assert "Training on 2 processes" in output
    assert output.count("Training on") == 1  # process 0 speaks alone
    two = Run(tmp_path / "two")
    assert two.read("result.json")["processes"] == 2
    assert losses(two.folder) == pytest.approx(losses(one.folder), rel=1e-4)
    a, b = (load_file(run.adapter / "adapter_model.safetensors") for run in (one, two))
    assert all((a[name] - b[name]).abs().max() < 1e-4 for name in a)
    assert two.complete_checkpoints()


def test_a_batch_that_does_not_divide_is_refused(base: Path, rows: Path, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(
        recipe_text(base, rows).replace("batch_size: 4", "batch_size: 6").replace("micro_batch: 2", "micro_batch: 2")
    )
    done = subprocess.run(
        [sys.executable, "-m", "finetune", "train", str(file)], cwd=tmp_path, capture_output=True, text=True,
        timeout=60,
        env={**os.environ, "WORLD_SIZE": "2", "RANK": "0", "ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "no multiple of 2 rows x 2 devices" in done.stderr


def test_the_launcher_that_starts_one_process_instead_of_two_is_refused(
    base: Path, rows: Path, tmp_path: Path
) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(recipe_text(base, rows))
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    done = subprocess.run(
        [*command, "--mixed_precision", "no", "-m", "finetune", "train", str(file)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert "has started one" in done.stderr
    assert not (tmp_path / "runs").exists()
