"""llama.cpp's own converter scripts: found in a checkout of the user's, or fetched once and unpacked into the cache.

The source package of llama-cpp-python carries them. Nothing is built: pip downloads the one archive whose SHA-256
stands here, and the Python files of the converter are taken out of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from finetune.embedded import cache_folder, make_once
from finetune.errors import FinetuneError, InputError
from finetune.weight_files import file_sha256

VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
CHECKOUT = "FINETUNE_LLAMA_CPP"  # names a folder of llama.cpp to use instead
MODEL, LORA = "convert_hf_to_gguf.py", "convert_lora_to_gguf.py"
_INSIDE = "vendor/llama.cpp"
_WANTED = (MODEL, LORA, "LICENSE", "conversion/", "gguf-py/gguf/", "gguf-py/LICENSE")


def converter(checkout: Path | None = None) -> Path:
    """The folder with the scripts: `checkout`, or $FINETUNE_LLAMA_CPP, or the fetched one.

    Raises `InputError` when the named folder has none, or when none can be fetched.
    """
    named = checkout or (Path(os.environ[CHECKOUT]) if os.environ.get(CHECKOUT) else None)
    if named is None:
        return make_once(cache_folder() / f"llama.cpp-converter-{VERSION}", _fetch)
    if missing := [name for name in (MODEL, LORA) if not (named / name).is_file()]:
        raise InputError(f"{named} has no {missing[0]}.", "Name the folder of a llama.cpp checkout.")
    return named


def convert(script: str, arguments: list[str], *, checkout: Path | None = None) -> None:
    """Run a script of the converter, offline. Raises `FinetuneError` with its last words when it fails."""
    import importlib.util

    if missing := [name for name in ("gguf", "sentencepiece") if importlib.util.find_spec(name) is None]:
        raise InputError(f"The converter needs {' and '.join(missing)}.", "Run `pip install 'finetune[export]'`.")
    folder = converter(checkout)
    done = subprocess.run(
        [sys.executable, str(folder / script), *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        words = [line for line in done.stderr.splitlines() if line.strip()] or ["it says nothing"]
        raise FinetuneError(
            f"llama.cpp's converter stopped: {words[-1].strip()}.",
            "If it does not know this model or tokenizer, try a newer llama.cpp: set "
            f"{CHECKOUT} to a checkout. `finetune --debug export ...` shows all of its messages.",
        ) from RuntimeError(done.stderr)


def _fetch(aside: Path) -> None:
    with tempfile.TemporaryDirectory(dir=aside.parent) as temporary:
        wanted = Path(temporary) / "wanted.txt"
        wanted.write_text(f"llama-cpp-python=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
        done = subprocess.run(
            [
                sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                "--no-binary", ":all:", "--require-hashes", "-r", str(wanted), "-d", temporary,
            ],
            capture_output=True,
            text=True,
        )  # fmt: skip
        archives = list(Path(temporary).glob("*.tar.gz"))
        if done.returncode != 0 or len(archives) != 1:
            words = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no pip here"]
            raise InputError(
                f"llama.cpp's converter cannot be fetched ({words[-1].removeprefix('ERROR: ')}).",
                f"Connect once, or set {CHECKOUT} to a folder of llama.cpp.",
            )
        unpack(archives[0], aside)


def unpack(archive: Path, folder: Path, sha256: str = SHA256) -> None:
    """Take the converter's files out of the source package. Raises `InputError` for another archive."""
    if (found := file_sha256(archive)) != sha256:
        raise InputError(
            f"{archive.name} has SHA-256 {found} and not {sha256}.", "Fetch it again; this is not the known file."
        )
    with tarfile.open(archive) as files:
        for entry in files:
            inside = PurePosixPath(entry.name).relative_to(PurePosixPath(entry.name).parts[0])
            if not (entry.isfile() and inside.is_relative_to(_INSIDE)) or ".." in inside.parts:
                continue
            name = str(inside.relative_to(_INSIDE))
            content = files.extractfile(entry) if name.startswith(_WANTED) else None
            if content is not None:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content.read())
