"""An OpenAI-compatible endpoint by an existing server, and a chat in the terminal.

A run is merged first (into `<run>/merged`, once); what is served is always a plain model folder. On a CPU
transformers' own server answers; where vLLM is installed and a GPU is there, vLLM does.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from finetune.errors import InputError, RunError
from finetune.merge import merge
from finetune.model import model_folder, training_device
from finetune.recipe import Serve
from finetune.run import open_run


def served_folder(target: str | Path) -> Path:
    """The model folder behind a run, a merged folder or a model name."""
    try:
        run = open_run(target)
    except RunError:
        return model_folder(str(target))
    return run.model if run.model.is_dir() else merge(run).folder


def server_command(folder: Path, host: str, port: int) -> list[str]:
    """The command line of the server that fits this machine.

    Raises `InputError` when none is installed or the port is taken.
    """
    _check_port(host, port)
    if training_device() != "cpu" and importlib.util.find_spec("vllm"):
        return [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(folder),
            "--host",
            host,
            "--port",
            str(port),
        ]
    missing = [name for name in ("fastapi", "uvicorn", "openai") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"The server needs {' and '.join(missing)}.", "Run `pip install 'finetune[serve]'`.")
    program = Path(sys.executable).with_name("transformers")
    found = str(program) if program.is_file() else shutil.which("transformers")
    if found is None:
        raise InputError(
            "The command `transformers` is not on the path.", "Reinstall with `pip install transformers`."
        )
    return [found, "serve", str(folder), "--host", host, "--port", str(port)]


def serve(target: str | Path, host: str | None, port: int | None, *, say: Callable[[str], None]) -> None:
    """Replace this process by the server, which runs until it is stopped; the run's recipe says where by default."""
    settings = _settings(target)
    folder, host, port = served_folder(target), host or settings.host, port or settings.port
    command = server_command(folder, host, port)
    say(f"Serving {folder} at http://{host}:{port}/v1 (model name: {folder})")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the folder
    sys.stdout.flush()
    os.execv(command[0], command)


def _settings(target: str | Path) -> Serve:
    try:
        return open_run(target).recipe().serve
    except RunError:
        return Serve()


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InputError(
                f"{host}:{port} cannot be listened on ({error.strerror}).", "Give another --port."
            ) from None
