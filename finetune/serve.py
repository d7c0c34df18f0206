"""An OpenAI-compatible endpoint by an existing server: transformers', vLLM's, or llama.cpp's for a GGUF file.

    one run, merged folder or model      its whole weights (a run is merged first, into <run>/merged, once)
    an adapter folder, or several names  one base with all of them attached, each under its own name
    a .gguf file                         llama.cpp, where llama-cpp-python is installed

transformers and llama.cpp answer inside this process, behind `gate`; vLLM is a process of its own with its own key.
Before the endpoint calls itself ready, one held-out question of the run is asked, and the answer compared with the
one that was recorded after training.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from finetune import chat
from finetune.endpoint import check_effect, chooser, llama_app, transformers_app
from finetune.errors import FinetuneError, InputError, RunError
from finetune.gate import PLAIN, Gate
from finetune.generate import Target, attach, find_target, load_target, load_tokenizer_of
from finetune.merge import merge
from finetune.model import training_device
from finetune.recipe import Serve
from finetune.recorded import Place, compare
from finetune.run import open_run, run_around

Say = Callable[[str], None]
KEY = "FINETUNE_API_KEY"  # the environment variable; an option would show the key to everybody on the machine
_PATIENCE = 1800.0  # seconds for a server of its own to load a large model


def serve(
    names: Sequence[str],
    host: str | None = None,
    port: int | None = None,
    *,
    key: str | None = None,
    name: str | None = None,
    say: Say,
) -> None:
    """Serve until stopped. The first run's recipe says where by default; `name` renames a single model.

    Raises `InputError` when the address is not this machine's alone and there is no key, when it is taken, when no
    server is installed, or when the names do not go together; `FinetuneError` when the served answer shows that the
    training has no effect.
    """
    settings = _settings(names[0])
    place = Place(host or settings.host, port or settings.port, key or os.environ.get(KEY) or None)
    check_place(place)
    if names[0].endswith(".gguf") and Path(names[0]).is_file() and importlib.util.find_spec("llama_cpp"):
        if len(names) > 1:
            raise InputError("A GGUF file is served alone.", "Name one file.")
        _serve_gguf(Path(names[0]), place, name, say)
        return
    targets = served(names, name, say)
    if training_device() != "cpu" and importlib.util.find_spec("vllm"):
        _serve_vllm(targets, place, say)
    else:
        _serve_transformers(targets, place, say)


def served(names: Sequence[str], name: str | None = None, say: Say = lambda _: None) -> list[Target]:
    """What will answer: one target with whole weights, or several adapters of one base.

    A single run is merged first. Raises `InputError` when several do not share a base, or share a name.
    """
    targets = [find_target(one) for one in names]
    if name is not None:
        if len(targets) > 1:
            raise InputError("One --name cannot name several models.", "Leave it out; each has its own.")
        targets = [replace(targets[0], name=name)]
    if len(targets) == 1:
        [target] = targets
        if target.run is not None and target.adapter is not None:
            if not (target.run.folder / "merged").is_dir():
                say(f"Merging the adapter of {target.name} into its base first ...")
            return [replace(target, model=merge(target.run).folder, adapter=None)]
        return targets
    if bare := [target.name for target in targets if target.adapter is None]:
        raise InputError(
            f"{', '.join(bare)} has no adapter, so it cannot share a base.", "Serve it alone, on another --port."
        )
    bases = {target.model.resolve() for target in targets}
    if len(bases) > 1:
        raise InputError(
            f"These adapters belong to {len(bases)} bases: {', '.join(sorted(map(str, bases)))}.",
            "Serve those of one base together.",
        )
    known = [target.name for target in targets]
    if twice := sorted({name for name in known if known.count(name) > 1}):
        raise InputError(f"The name {', '.join(twice)} stands for two models.", "Rename one of the folders.")
    return targets


def check_place(place: Place) -> None:
    """Raise `InputError` when the address is open to others without a key, or cannot be listened on."""
    if place.key is not None and not (place.key.isascii() and place.key.isprintable() and " " not in place.key):
        raise InputError("The API key has characters that a header cannot carry.", "Take letters and digits.")
    if place.key is None and not _is_local(place.host):
        raise InputError(
            f"{place.host} can be reached from other machines, and there is no API key.",
            f"Set the environment variable {KEY} to a key that clients must send, or listen on 127.0.0.1.",
        )
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((place.host, place.port))
        except OSError as error:
            raise InputError(
                f"{place.host}:{place.port} cannot be listened on ({error.strerror}).", "Give another --port."
            ) from None


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _settings(name: str) -> Serve:
    try:
        return open_run(name).recipe().serve
    except RunError:
        return Serve()


def _needs(packages: Sequence[str]) -> None:
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        raise InputError(f"The server needs {' and '.join(missing)}.", "Run `pip install 'finetune[serve]'`.")


# ------------------------------------------------------------------------------------------------------- transformers


def _serve_transformers(targets: Sequence[Target], place: Place, say: Say) -> None:
    _needs(("fastapi", "uvicorn", "openai"))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the folders
    whole = targets[0].adapter is None
    model = load_target(targets[0], adapter=False)
    tokenizers = {target.name: load_tokenizer_of(target) for target in targets}
    choose = None
    if not whole:
        for target in targets:
            assert target.adapter is not None, target
            model = attach(model, target.adapter, target.name)
        base_name = _base_name(targets)
        tokenizers[base_name] = tokenizers[targets[0].name]
        choose = chooser(model, base_name)
        for target in targets:
            check_effect(model, choose, base_name, target, tokenizers[target.name])
    app = transformers_app(model if whole else model.get_base_model(), tokenizers)
    _run(Gate(app, list(tokenizers), place.key, choose, PLAIN), targets, place, say)


def _base_name(targets: Sequence[Target]) -> str:
    """A short name for the base below several adapters that none of them has."""
    name = targets[0].model.resolve().name
    if targets[0].run is not None:
        name = targets[0].run.recipe().model.rstrip("/").rpartition("/")[2]
    return name if all(name != target.name for target in targets) else f"{name}-base"


# ---------------------------------------------------------------------------------------------------------- llama.cpp


def _serve_gguf(file: Path, place: Place, name: str | None, say: Say) -> None:
    _needs(("fastapi", "uvicorn"))
    name = name or file.stem
    # Its own default of 1.1 punishes every word that comes again, and with it half of all JSON.
    gate = Gate(llama_app(file, name), [name], place.key, plain={"n": (1,)}, defaults={"repeat_penalty": 1.0})
    _run(gate, [Target(name, file, run=run_around(file))], place, say)


# --------------------------------------------------------------------------------------------------------------- vLLM


def vllm_command(targets: Sequence[Target], place: Place) -> list[str]:
    """The command line of vLLM's server. Its key goes by VLLM_API_KEY, which `ps` does not show.

    Raises `InputError` for an adapter that vLLM does not load.
    """
    from finetune.export import vllm_adapter

    first = targets[0]
    whole = first.adapter is None
    names = [first.name] if whole else [_base_name(targets)]
    stops = {"eos_token_id": chat.end_of_turn_ids(load_tokenizer_of(first))}
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(first.model),
        "--tokenizer", str(first.tokenizer), "--served-model-name", *names, "--host", place.host,
        "--port", str(place.port), "--override-generation-config", json.dumps(stops),
    ]  # fmt: skip
    if not whole:
        ready = [(target.name, vllm_adapter(target)) for target in targets]
        rank = max(made.max_lora_rank for _, made in ready)
        command += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules"]
        command += [f"{name}={made.folder}" for name, made in ready]
    return command


def _serve_vllm(targets: Sequence[Target], place: Place, say: Say) -> None:
    command = vllm_command(targets, place)
    environment = {**os.environ, "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}
    if place.key is not None:
        environment["VLLM_API_KEY"] = place.key
    process = subprocess.Popen(command, env=environment)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        end = time.monotonic() + _PATIENCE
        while not _answers(f"{place.url}/health"):
            if process.poll() is not None or time.monotonic() > end:
                raise FinetuneError("vLLM did not start.", "Its own messages above say why.")
            time.sleep(1)
        for target in targets:
            for line in compare(target.name, target.answered, place):
                say(line)
        say(_where([target.name for target in targets], place))
        process.wait()
    except KeyboardInterrupt:
        pass
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


# ----------------------------------------------------------------------------------------------------- start and stop


def _run(gate: Gate, targets: Sequence[Target], place: Place, say: Say) -> None:
    """Listen until stopped; say so, and call it ready, when the first answers are those of the training."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(gate, host=place.host, port=place.port, log_level="warning"))
    failed: list[BaseException] = []

    def check() -> None:
        try:
            while not server.started:
                if server.should_exit:
                    return
                time.sleep(0.05)
            for target in targets:
                for line in compare(target.name, target.answered, place):
                    say(line)
            gate.ready = True
            say(_where(gate.names, place))
        except BaseException as error:  # handed to the main thread below
            failed.append(error)
            server.should_exit = True

    threading.Thread(target=check, daemon=True).start()
    with suppress(KeyboardInterrupt):
        server.run()
    if failed:
        raise failed[0]


def _where(names: Sequence[str], place: Place) -> str:
    key = "" if place.key is None else ", with the API key"
    models = f"model {names[0]}" if len(names) == 1 else f"models {', '.join(names)}"
    return f"Serving the {models} at http://{place.host}:{place.port}/v1{key}"
