"""The door: names, help, exit codes, nothing else. Heavy modules are imported inside the commands that need them."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from typer.core import TyperGroup

from finetune.errors import FinetuneError, InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from finetune.recipe import Recipe

WAY, GROUND = "The way of a run", "The ground"


class Grouped(TyperGroup):
    """The first page of help, by click alone: typer's own spends 0.15 s on importing rich's Markdown."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super(TyperGroup, self).format_help(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The commands in the groups they are registered with, in that order."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.commands[name]
            groups.setdefault(getattr(command, "rich_help_panel", ""), []).append(
                (name, command.get_short_help_str(80))
            )
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)


app = typer.Typer(
    name="finetune",
    cls=Grouped,
    help="Plan, train, merge and serve fine-tuned language models.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A shipped recipe's name or a .yaml file.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name under runs/.")]
Target = Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run, a merged folder, or a model.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a recipe field; repeatable.")]  # noqa: UP045
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and the libraries' own messages.")]


def _version(asked: bool) -> None:
    if asked:
        from finetune import __version__

        print(__version__)
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")]


@app.callback()
def _options(context: typer.Context, debug: Debug = False, version: Version = False) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if debug:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    else:
        _calm()


# ------------------------------------------------------------------------------------------------ the way of a run


@app.command(rich_help_panel=WAY)
def init(
    path: Annotated[Optional[Path], typer.Argument(help="File to write.")] = None,  # noqa: UP045
    model: Annotated[Optional[str], typer.Option(help="Hub id, local folder, .gguf file or smollm2-135m.")] = None,  # noqa: UP045
    method: Annotated[Optional[str], typer.Option(help="full, lora or qlora.")] = None,  # noqa: UP045
    data: Annotated[str | None, typer.Option(help="Training rows: file, glob, hub data set or home-intents.")] = None,  # noqa: UP045
    targets: Annotated[str, typer.Option(help="qv, attention or attention+mlp.")] = "attention+mlp",
) -> None:
    """Write a commented recipe from a few flags or questions."""
    from finetune.start import write_recipe

    asks = sys.stdin.isatty()
    model = model or (typer.prompt("Model", default="smollm2-135m") if asks else "smollm2-135m")
    method = method or (typer.prompt("Method (full, lora, qlora)", default="lora") if asks else "lora")
    data = data or (typer.prompt("Training rows", default="home-intents") if asks else "home-intents")
    written = write_recipe(path or Path("recipe.yaml"), str(model), str(method), str(data), targets)
    print(f"Wrote {written}; next: finetune plan {written}")


@app.command(rich_help_panel=WAY)
def plan(
    recipe: RecipeName,
    device: Annotated[str, typer.Option(help="auto, a size such as 24GB, or a card such as rtx4090.")] = "auto",
    rows: Annotated[Optional[str], typer.Option(help="Rows whose lengths count; none takes max_length.")] = None,  # noqa: UP045
    compare: Annotated[bool, typer.Option("--compare", help="Full, LoRA and QLoRA side by side.")] = False,
    rank: Annotated[Optional[str], typer.Option(help="Ranks to compare, such as 4,8,16,64.")] = None,  # noqa: UP045
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that train together, and what they share.")] = 1,
    simulate: Annotated[bool, typer.Option("--simulate", help="Trace one step of the very model as well.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Run two real steps here and compare.")] = False,
    fit: Annotated[Optional[Path], typer.Option(metavar="FILE", help="Write the recipe that fits.")] = None,  # noqa: UP045
    svg: Annotated[Optional[Path], typer.Option(metavar="FILE", help="Draw the plan into a file.")] = None,  # noqa: UP045
    html: Annotated[Optional[Path], typer.Option(metavar="FILE", help="Write the plan as a page.")] = None,  # noqa: UP045
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Predict the training memory before a weight is downloaded."""
    from finetune import planning

    with _stdout_for_json(as_json):
        answer = planning.answer(
            _load(recipe, set_), device=device, rows=rows, compare=compare or rank is not None, ranks=_numbers(rank),
            gpus=gpus, simulate=simulate, verify=verify,
        )  # fmt: skip
        answer.write(fit=fit, svg=svg, html=html, name=Path(recipe).stem)
    if as_json:
        _document(answer.document())
    else:
        for view in answer.views():
            _show(view)
    answer.require_fit(written=fit)


def _numbers(text: str | None) -> tuple[int, ...]:
    """`4,8,16` as numbers. Raises `InputError` for anything else."""
    try:
        found = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        found = (0,)
    if any(number < 1 for number in found):
        raise InputError(f"--rank {text} is no list of ranks.", "Write whole numbers with commas, such as 4,8,16.")
    return found


@app.command(rich_help_panel=WAY)
def data(
    recipe: RecipeName,
    row: Annotated[Optional[int], typer.Option(min=1, help="This row of the files alone, with all tokens.")] = None,  # noqa: UP045
    rows: Annotated[int, typer.Option(min=0, help="How many of the first rows are shown.")] = 3,
    html: Annotated[Optional[Path], typer.Option(metavar="FILE", help="Write a page to search the rows.")] = None,  # noqa: UP045
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Look at the rows as the model will see them, before paying for a GPU."""
    from finetune.data_report import look
    from finetune.data_rows import ask, take
    from finetune.data_view import data_view, row_view
    from finetune.model import load_tokenizer

    with _stdout_for_json(as_json):
        loaded = _load(recipe, set_)
        taken = take(loaded, load_tokenizer(loaded))
        if row is not None:
            asked = ask(taken, row)
        if row is None or html is not None:
            report = look(taken)
        if html is not None:
            from finetune.data_page import data_html

            html.write_text(data_html(report), encoding="utf-8")
    if as_json:
        _document(report.document(rows) if row is None else asked.document())
    else:
        _show(data_view(report, rows) if row is None else row_view(asked))
    taken.require_trainable()


@app.command(rich_help_panel=WAY)
def train(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A shipped recipe's name or a .yaml file.")
    ] = None,  # noqa: UP045
    output: Annotated[Optional[Path], typer.Option(help="Run folder; by default runs/<recipe>-<time>.")] = None,  # noqa: UP045
    resume: Annotated[Optional[str], typer.Option(metavar="RUN", help="Go on with an unfinished run.")] = None,  # noqa: UP045
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Train a recipe and leave a run folder."""
    from finetune.launch import use_one_card
    from finetune.run import check_output, open_run
    from finetune.startup import prepare_process

    if (recipe is None) == (resume is None):
        raise InputError(
            "`train` takes a RECIPE or --resume RUN.", "Write `finetune train smollm2-lora`, for example."
        )
    if resume is not None:
        if set_ or output is not None:
            raise InputError("A resumed run keeps its recipe and its folder.", "Leave out --set and --output.")
        unfinished = open_run(resume)
        loaded, name, output = unfinished.recipe(), unfinished.name, unfinished.folder
    else:
        loaded, name = _load(str(recipe), set_), Path(str(recipe)).stem
        if output is not None:
            check_output(output)  # before the libraries are loaded
    use_one_card()
    prepare_process(loaded)
    with _stdout_for_json(as_json):
        from finetune.train import train as run_training

        run = run_training(loaded, name=name, output=output, say=_say)
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        _document({"run": str(run.folder), **run.read("result.json"), "evaluation": run.read("evaluation.json")})
        return
    from finetune.report import next_steps

    if run.read("evaluation.json"):
        _show_evaluation(run.folder)
    _show(next_steps(_after_training(run.folder, adapter=run.adapter.is_dir())))


def _after_training(folder: Path, *, adapter: bool) -> list[tuple[str, str]]:
    steps = [(f"finetune chat {folder}", "talk to it"), (f"finetune serve {folder}", "an OpenAI-compatible endpoint")]
    merge_step = (f"finetune merge {folder}", "fold the adapter into the base, ready for any server")
    return [steps[0], *([merge_step] if adapter else []), steps[1]]


@app.command("eval", rich_help_panel=WAY)
def evaluate(
    run: RunName,
    rows: Annotated[Optional[int], typer.Option(min=1, help="How many held-out rows.")] = None,  # noqa: UP045
    as_json: Json = False,
) -> None:
    """Score the untrained and the tuned model on held-out rows."""
    with _stdout_for_json(as_json):
        from finetune.evaluate import evaluate as run_evaluation

        result = run_evaluation(run, rows=rows)
    if as_json:
        _document(result.document())
        return
    from finetune.report import evaluation_view

    _show(evaluation_view(result))


@app.command(rich_help_panel=WAY)
def chat(
    target: Target,
    system: Annotated[Optional[str], typer.Option(help="System message; by default the recipe's.")] = None,  # noqa: UP045
    base: Annotated[bool, typer.Option("--base", help="The untrained model answers too, side by side.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 512,
) -> None:
    """Talk to a run or a model in the terminal."""
    from finetune.talk import talk

    talk(target, system=system, base=base, max_new_tokens=max_new_tokens)


@app.command(rich_help_panel=WAY)
def merge(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="A run, a checkpoint of it or an adapter folder; several become one."),
    ],
    output: Annotated[Path | None, typer.Option(help="Folder for the merged model; by default <run>/merged.")] = None,  # noqa: UP045
    weights: Annotated[
        str | None, typer.Option(help="How much of each adapter, such as 0.7,0.3; by default all of it.")
    ] = None,  # noqa: UP045
    combine: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="How several become one: sum is exact; linear, ties, dare_linear, dare_ties, magnitude_prune "
            "work on the factors, svd, ties_svd and so on on the products.",
        ),
    ] = "sum",
    density: Annotated[
        Optional[float], typer.Option(help="Share of values that ties, dare and magnitude_prune keep; 0.5.")  # noqa: UP045
    ] = None,
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The base of an adapter that came without its run.")
    ] = None,  # noqa: UP045
    dtype: Annotated[Optional[str], typer.Option(help="keep (the base's), float32, bfloat16 or float16.")] = None,  # noqa: UP045
    max_shard_size: Annotated[
        str | None, typer.Option(help="Largest weight file, such as 5GB; by default the base's files.")
    ] = None,  # noqa: UP045
    like_training: Annotated[
        bool, typer.Option("--like-training", help="Merge a QLoRA run into the 4-bit weights it saw.")
    ] = False,
    verify: Annotated[bool, typer.Option(help="Prove that the result answers as base plus adapter.")] = True,
    push: Annotated[str | None, typer.Option(metavar="HUB_ID", help="Upload the result to the hub, private.")] = None,  # noqa: UP045
    public: Annotated[bool, typer.Option("--public", help="With --push: for everyone to see.")] = False,
    as_json: Json = False,
) -> None:
    """Fold an adapter into its base, block by block, and prove the result."""
    from finetune.merge import merge as run_merge
    from finetune.merge import size_of
    from finetune.publish import check_hub
    from finetune.publish import push as upload

    shard = None if max_shard_size is None else size_of(max_shard_size)
    shares = _shares(weights)
    if push is not None:
        check_hub(push)
    with _stdout_for_json(as_json), _progress("Merging") as progress:
        merged = run_merge(
            runs[0], output, dtype=dtype, others=runs[1:], weights=shares, base=base, max_shard=shard,
            like_training=like_training, combine=combine, density=density, verify=verify, name=push,
            progress=progress,
        )  # fmt: skip
    address = upload(merged.folder, push, public=public) if push else None
    if as_json:
        _document({**merged.document(), **({"pushed": address} if push else {})})
        return
    from finetune.report import next_steps

    print(f"Merged {merged.merged} of {merged.tensors} tensors ({merged.bytes / 1e9:.2f} GB) into {merged.folder}")
    for note in [*([merged.proof.sentence()] if merged.proof else []), *merged.notes]:
        print(f"  {note}")
    if address:
        print(f"  Uploaded to {address} ({'public' if public else 'private, where it was new'})")
    _show(next_steps([(f"finetune serve {merged.folder}", "an OpenAI-compatible endpoint on 127.0.0.1:8000")]))


def _shares(text: str | None) -> tuple[float, ...]:
    """`0.7,0.3` as numbers. Raises `InputError` for anything else."""
    try:
        found = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        found = (math.nan,)
    if not all(math.isfinite(number) for number in found):
        raise InputError(f"--weights {text} is no list of numbers.", "Write one for each adapter, such as 0.7,0.3.")
    return found


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of bytes on stderr while a person watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@app.command(rich_help_panel=WAY)
def serve(
    targets: Annotated[list[str], typer.Argument(metavar="RUN|MODEL...", help="One, or adapters of one base.")],
    host: Annotated[Optional[str], typer.Option(help="Address; by default the recipe's, 127.0.0.1.")] = None,  # noqa: UP045
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port; by default the recipe's, 8000.")] = None,  # noqa: UP045
    name: Annotated[Optional[str], typer.Option(help="Name of the model for clients; by default the run's.")] = None,  # noqa: UP045
) -> None:
    """Serve a run or a model behind an OpenAI-compatible endpoint."""
    from finetune.serve import serve as run_server

    run_server(targets, host, port, name=name, say=_say)


@app.command(rich_help_panel=WAY)
def infer(
    target: Target,
    rows: Annotated[Path, typer.Option(metavar="FILE", help="Questions: a file in the layout of training rows.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Answers: one JSON line for each line of the questions.")],
    system: Annotated[Optional[str], typer.Option(help="System message; by default the recipe's.")] = None,  # noqa: UP045
    base: Annotated[bool, typer.Option("--base", help="Ask the untrained model.")] = False,
    max_new_tokens: Annotated[Optional[int], typer.Option(min=1, help="Longest answer in tokens.")] = None,  # noqa: UP045
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one batch, prompts and answers.")] = 16_384,
    as_json: Json = False,
) -> None:
    """Answer a file of questions; stopped, it goes on where it was."""
    with _stdout_for_json(as_json):
        from finetune.infer import infer as run_inference

        done = run_inference(
            target, rows, out, max_new_tokens=max_new_tokens, system=system, base=base, batch_tokens=batch_tokens,
            say=_say,
        )  # fmt: skip
    if as_json:
        _document(done.document())
        return
    print(f"Answered {done.answered} of {done.rows} rows into {done.out}")
    if done.refused:
        print(f"  {done.refused} rows could not be asked; their lines say why.")


@app.command(rich_help_panel=WAY)
def export(
    target: Target,
    to: Annotated[str, typer.Option(help="gguf (llama.cpp), ollama or vllm.")],
    output: Annotated[Optional[Path], typer.Option(help="Folder; by default <run>/<to>.")] = None,  # noqa: UP045
    kind: Annotated[str, typer.Option("--type", help="Weights in a GGUF file: f16, q8_0, bf16 or f32.")] = "f16",
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapter alone, as a GGUF file.")] = False,
    llama_cpp: Annotated[
        Optional[Path], typer.Option(metavar="FOLDER", help="A llama.cpp checkout whose converter is used.")  # noqa: UP045
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run for llama.cpp, Ollama or vLLM, and check what was written."""
    with _stdout_for_json(as_json):
        from finetune.export import export as run_export

        done = run_export(target, to, output, kind=kind, adapter=adapter, llama_cpp=llama_cpp, say=_say)
    if as_json:
        _document(done.document())
        return
    for file in done.files:
        print(f"Wrote {file} ({file.stat().st_size / 1e6:,.1f} MB)")
    for line in done.lines():
        print(f"  {line}")


# ------------------------------------------------------------------------------------------------------ the ground


@app.command(rich_help_panel=GROUND)
def recipes(as_json: Json = False) -> None:
    """List the recipes found by name."""
    from finetune.recipe import shipped_recipes
    from finetune.start import about_recipe

    found = {name: about_recipe(file) for name, file in shipped_recipes().items()}
    if as_json:
        _document(found)
        return
    from finetune.report import rows_view

    _show(rows_view(["recipe", "what", "card"], [[name, *about[:2]] for name, about in found.items()]))


@app.command(rich_help_panel=GROUND)
def facts(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, local folder, .gguf file or smollm2-135m.")],
    revision: Annotated[Optional[str], typer.Option(help="Branch, tag or commit of a hub model.")] = None,  # noqa: UP045
    as_json: Json = False,
) -> None:
    """Show what a model is, from its headers: parameters, types, numbers and layers."""
    from finetune.facts import read_facts

    found = read_facts(model, revision)
    if as_json:
        _document(found.document())
        return
    from finetune.report import facts_view

    _show(facts_view(found))


@app.command(rich_help_panel=GROUND)
def runs(as_json: Json = False) -> None:
    """List the runs under runs/."""
    from finetune.run import all_runs

    found = [{"run": run.name, "finished": run.finished, **(run.read("result.json") or {})} for run in all_runs()]
    if as_json:
        _document(found)
        return
    from finetune.report import rows_view

    rows = [
        [run["run"], "finished" if run["finished"] else "unfinished", run.get("steps", ""), _number(run.get("loss"))]
        for run in found
    ]
    _show(rows_view(["run", "state", "steps", "mean loss"], rows))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


@app.command(rich_help_panel=GROUND)
def schema() -> None:
    """Print the JSON Schema of a recipe."""
    from finetune.recipe import schema as recipe_schema

    _document(recipe_schema())


@app.command(rich_help_panel=GROUND, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def launch(
    context: typer.Context,
    processes: Annotated[int, typer.Option("--processes", "-n", min=1, help="Processes on this machine.")] = 1,
) -> None:
    """Run `finetune train ...` on several processes of this machine."""
    from finetune.launch import launch as start

    start(processes, context.args)


# --------------------------------------------------------------------------------------------------------- helpers


def _load(name: str, overrides: list[str] | None) -> Recipe:
    from finetune.recipe import load_recipe

    return load_recipe(name, overrides or ())


def _say(line: str) -> None:
    """One line of a command's story; only process 0 speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


def _document(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _show(view: RenderableType) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(view)


def _show_evaluation(folder: Path) -> None:
    from finetune.evaluate import read_evaluation
    from finetune.report import evaluation_view

    _show(evaluation_view(read_evaluation(folder)))


def _stdout_for_json(as_json: bool) -> AbstractContextManager[Any]:
    """While a command works under --json, everything but the document goes to stderr."""
    from contextlib import redirect_stdout

    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def _calm() -> None:
    """Keep the libraries' progress bars and notes out of the way; --debug brings them back."""
    import warnings

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_TQDM", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its profiler warns of memory that was there before it
    warnings.filterwarnings("ignore")
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    own = logging.getLogger("finetune")
    own.addHandler(handler)
    own.setLevel(logging.INFO)
    own.propagate = False


def main() -> None:
    """Entry point: an error the user can put right is two sentences and an exit code, never a traceback."""
    code = _run()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from finetune.launch import leave

        leave(code)
    sys.exit(code)


def _run() -> int:
    """The exit code of the command that was asked for."""
    try:
        app()
    except SystemExit as end:  # what click ends with, whether it went well or not
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except FinetuneError as error:
        if "--debug" in sys.argv:
            raise
        rank = os.environ.get("RANK", "0")
        if rank == "0" or not isinstance(error, InputError):  # wrong input is the same on every process
            who = "finetune" if rank == "0" else f"finetune, process {rank}"
            sys.stderr.write(f"{who}: {error.what.rstrip()}\n{error.hint}\n".rstrip() + "\n")
        return error.exit_code
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        sys.stderr.write(
            f"finetune: stopped by {type(error).__name__}: {error}\n"
            "Run it again with `finetune --debug ...` for the traceback.\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    main()
