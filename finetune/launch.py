"""Several processes of one machine that really train together."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from finetune.device import this_device
from finetune.errors import InputError


def launch_command(processes: int, arguments: Sequence[str], port: int) -> tuple[list[str], dict[str, str]]:
    """The torchrun command for `finetune <arguments>` and the environment it needs.

    On CPUs the processes talk through gloo on loopback and share the cores.
    """
    if not arguments or arguments[0] != "train":
        raise InputError("`launch` starts `finetune train ...`.", "Write `finetune launch -n 2 train RECIPE`.")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc_per_node", str(processes),
        "--master_addr", "127.0.0.1", "--master_port", str(port), "-m", "finetune", *arguments,
    ]  # fmt: skip
    environment: dict[str, str] = {}
    if this_device().kind == "cpu":
        threads = max(1, (os.cpu_count() or 1) // processes)
        environment = {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(threads)}
    return command, environment


def launch(processes: int, arguments: Sequence[str]) -> None:
    """Replace this process by the launcher."""
    command, environment = launch_command(processes, arguments, _free_port())
    os.environ.update({key: value for key, value in environment.items() if key not in os.environ})
    sys.stdout.flush()
    os.execv(command[0], command)


def check_launched() -> None:
    """Raise `InputError` when `accelerate launch --cpu --num_processes N` has started only one process.

    It takes the launcher for a single process then, which sets a rendezvous address for N > 1 but no world size.
    """
    if {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys() and "WORLD_SIZE" not in os.environ:
        raise InputError(
            "`accelerate launch` was asked for several processes and has started one; with --cpu it always does.",
            "Use `finetune launch -n 2 train ...`, or the accelerate line under 'Several processes' in the README.",
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
