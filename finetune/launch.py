"""Several processes of one machine that really train together."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

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
        # A step and its checkpoint may take minutes on a CPU; torchrun would kill them 30 s after Ctrl-C.
        environment = {
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
            "ACCELERATE_USE_CPU": "true",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": str(threads),
        }
    return command, environment


def launch(processes: int, arguments: Sequence[str]) -> None:
    """Replace this process by the launcher."""
    command, environment = launch_command(processes, arguments, _free_port())
    os.environ.update({key: value for key, value in environment.items() if key not in os.environ})
    sys.stdout.flush()
    os.execv(command[0], command)


def use_one_card() -> None:
    """Let a process that no launcher started see one card; transformers would split its batches over several."""
    if "WORLD_SIZE" not in os.environ:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]


def check_launched() -> None:
    """Raise `InputError` for launchers whose word cannot be kept: sharding, and one process instead of several.

    `accelerate launch --cpu --num_processes N` takes the launcher for a single process, which sets a rendezvous
    address for N > 1 but no world size.
    """
    for name, what in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
        if os.environ.get(name, "").lower() in ("1", "true", "yes"):
            raise InputError(
                f"Accelerate's configuration asks for {what}, which is not supported yet.",
                "Start with `finetune launch`, or choose multi-GPU without sharding in `accelerate config`.",
            )
    if {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys() and "WORLD_SIZE" not in os.environ:
        raise InputError(
            "`accelerate launch` was asked for several processes and has started one; with --cpu it always does.",
            "Use `finetune launch -n 2 train ...`, or the accelerate line under 'Several processes' in the README.",
        )


def leave(code: int) -> NoReturn:
    """End a process of several: what is registered for the end runs, and then Python is not taken apart.

    A thread of gloo's may still hold a tensor of Python's. It aborts the process when it lets go of it while Python
    is being taken apart ("terminate called without an active exception"), and the launcher reports a finished run as
    failed. Ending the group before, by `destroy_process_group`, is no way out: then the model's wrapper is the last
    to hold the group, and waits for that thread with the interpreter's lock that the thread is waiting for.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
