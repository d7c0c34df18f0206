"""A run, an adapter or a model folder -> text. The prompt ids are the ones that training saw (`chat.prompt_ids`)."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune import adapter_file, chat
from finetune.errors import FinetuneError, InputError, RunError
from finetune.formats import Conversation, Message
from finetune.model import load_base, load_tokenizer, model_folder, training_device
from finetune.model_files import read_json
from finetune.origin import check_origin, read_origin
from finetune.recipe import Full
from finetune.run import Run, open_run, run_around
from finetune.weight_files import read_shard

_WORTH_SHARING = 8  # tokens; below, one more forward pass costs more than it saves


@dataclass(frozen=True)
class Answer:
    """One reply, how many tokens it took, and whether the model ended it by itself."""

    text: str
    tokens: int
    stopped: bool


@dataclass(frozen=True)
class Speaker:
    """A model that answers. With `bare=True` an attached adapter is switched off for the call."""

    model: Any
    tokenizer: Any
    system: str | None = None

    def answer(
        self, conversations: Sequence[Conversation], *, max_new_tokens: int, tokens: int = 16_384, bare: bool = False
    ) -> list[Answer]:
        """Greedy replies in the order of the questions; batches of similar length hold about `tokens` tokens."""
        prompts = [self.prompt(talk) for talk in conversations]
        batches = self.batches(prompts, max_new_tokens=max_new_tokens, tokens=tokens, bare=bare)
        answers = dict(pair for batch in batches for pair in batch)
        return [answers[index] for index in range(len(prompts))]

    def prompt(self, conversation: Conversation) -> list[int]:
        """The ids that stand before the reply. Raises `BadRow` when the template cannot carry this conversation."""
        return chat.prompt_ids(self.tokenizer, conversation.messages, conversation.tools)

    def batches(
        self, prompts: Sequence[list[int]], *, max_new_tokens: int, tokens: int = 16_384, bare: bool = False
    ) -> Iterator[list[tuple[int, Answer]]]:
        """Greedy replies as (place in `prompts`, answer), batch by batch, the shortest prompts first."""
        import torch

        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        self.model.eval()
        for chosen in _batches(order, [len(p) + max_new_tokens for p in prompts], tokens):
            with torch.inference_mode(), self._adapter_off() if bare else nullcontext():
                found = self._batch([prompts[i] for i in chosen], max_new_tokens)
            yield list(zip(chosen, found, strict=True))

    def stream(
        self, messages: list[Message], *, max_new_tokens: int, bare: bool = False
    ) -> Generator[str, None, None]:
        """The reply to one conversation, piece by piece; closed, the model stops within a token."""
        import torch
        from transformers import StoppingCriteriaList, TextIteratorStreamer

        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=300)
        ids = torch.tensor([chat.prompt_ids(self.tokenizer, messages)], device=self.model.device)
        failed: list[BaseException] = []
        left = threading.Event()  # nobody reads any more

        def work() -> None:
            more = {"streamer": streamer, "stopping_criteria": StoppingCriteriaList([lambda *_, **__: left.is_set()])}
            try:
                with torch.inference_mode(), self._adapter_off() if bare else nullcontext():
                    self._generate(ids, torch.ones_like(ids), max_new_tokens, **more)
            except BaseException as error:  # handed to the reading thread below
                failed.append(error)
                streamer.end()

        self.model.eval()
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield from (piece for piece in streamer if piece)
        finally:
            left.set()
            thread.join()
        if failed:
            raise FinetuneError(
                f"The model stopped in the middle of its answer: {failed[0]}.", "Try a shorter question."
            )

    def _batch(self, prompts: list[list[int]], max_new_tokens: int) -> list[Answer]:
        """One batch. What all prompts begin with (system message, examples) is read once, the rest is padded left.

        prefix prefix prefix   -    -   rest rest        mask   1 1 1  0 0  1 1
        prefix prefix prefix  rest rest rest rest               1 1 1  1 1  1 1
        """
        import torch

        device, pad = self.model.device, self._pad()
        shared = _shared(prompts)
        width = max(map(len, prompts))
        gaps = [width - len(prompt) for prompt in prompts]
        rows = [p[:shared] + [pad] * gap + p[shared:] for p, gap in zip(prompts, gaps, strict=True)]
        mask = [[1] * shared + [0] * gap + [1] * (width - shared - gap) for gap in gaps]
        more: dict[str, Any] = {}
        if shared:
            read = self.model(input_ids=torch.tensor([prompts[0][:shared]], device=device), use_cache=True)
            name = "cache" if "cache" in read else "past_key_values"  # transformers 5.2x renames it
            more[name] = read[name]
            more[name].batch_repeat_interleave(len(prompts))
        ids = torch.tensor(rows, device=device)
        output = self._generate(ids, torch.tensor(mask, device=device), max_new_tokens, **more)
        stops = set(chat.end_of_turn_ids(self.tokenizer))
        return [self._read(row[width:].tolist(), stops) for row in output]

    def _read(self, ids: list[int], stops: set[int]) -> Answer:
        end = next((n for n, token in enumerate(ids) if token in stops), len(ids))
        text = self.tokenizer.decode(ids[:end], skip_special_tokens=True)
        return Answer(text, end, end < len(ids))

    def _generate(self, ids: Any, mask: Any, max_new_tokens: int, **more: Any) -> Any:
        from transformers import GenerationConfig

        # A config of our own: the base's may sample, and its end tokens may not be the trained ones.
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=chat.end_of_turn_ids(self.tokenizer),
            pad_token_id=self._pad(),
            use_cache=True,
        )
        return self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config, **more)

    def _pad(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.tokenizer.eos_token_id)

    def _adapter_off(self) -> Any:
        """peft's switch; a model without adapters is bare already."""
        return self.model.disable_adapter() if hasattr(self.model, "disable_adapter") else nullcontext()


def _shared(prompts: list[list[int]]) -> int:
    """Tokens that all prompts begin with, when reading them once pays; one token of each always remains."""
    if len(prompts) < 2:
        return 0
    first, last = min(prompts), max(prompts)
    most = min(len(first), len(last), min(map(len, prompts)) - 1)
    same = next((n for n in range(most) if first[n] != last[n]), most)
    return same if same >= _WORTH_SHARING else 0


def _batches(order: list[int], lengths: list[int], tokens: int) -> Iterator[list[int]]:
    """Cut `order` (shortest first) so that a batch, padded to its last and longest row, stays within `tokens`."""
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * lengths[index] > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@dataclass(frozen=True)
class Target:
    """What a user names to be asked, served or exported: whole weights in `model`, and an adapter or none.

    `name` is short and no path: a run's name, or that of a folder or hub model. `run` is a run that was named itself,
    `inside` the run that a merged folder, a model or an adapter lies in.
    """

    name: str
    model: Path
    adapter: Path | None = None
    run: Run | None = None
    inside: Run | None = None

    @property
    def tokenizer(self) -> Path:
        """The folder with the tokenizer and chat template that go with these weights."""
        own = self.adapter is not None and (self.adapter / "tokenizer_config.json").is_file()
        return self.adapter if own and self.adapter is not None else self.model

    @property
    def system(self) -> str | None:
        """The system message of the run's rows: the recipe's, or the one that all of them had."""
        run = self.run or self.inside
        return None if run is None else run.recipe().data.system or (run.read("data.json") or {}).get("system")

    @property
    def answered(self) -> Run | None:
        """The run whose recorded answers are those of these very weights."""
        final = self.adapter is None or (self.inside is not None and _same(self.adapter, self.inside.adapter))
        return self.run or (self.inside if final else None)


def find_target(name: str | Path) -> Target:
    """The run, adapter folder or model of this name.

    Raises `RunError` for a run that has trained nothing yet, `ModelError` when there is no such model, and
    `InputError` when the base is not the one that the adapter was trained on.
    """
    try:
        run = open_run(name)
    except RunError:
        return _plain_target(Path(name), str(name))
    recipe = run.recipe()
    if run.model.is_dir():
        return Target(run.name, run.model, run=run)
    if isinstance(recipe.method, Full) or not run.adapter.is_dir():
        raise RunError(
            f"{run.folder} has nothing trained yet.", f"Finish it with `finetune train --resume {run.folder}`."
        )
    return _on_its_base(run.name, recipe.model, recipe.load.revision, run.adapter, run)


def _on_its_base(name: str, model: str, revision: str | None, adapter: Path, run: Run | None) -> Target:
    """Both, the base at the commit that it had when the adapter was trained."""
    origin = read_origin(adapter, run)
    folder = model_folder(model, (origin.commit if origin else None) or revision)
    check_origin(name, origin, model, folder)
    if (adapter / adapter_file.WEIGHTS).is_file():
        adapter_file.check_finite(adapter)
    return Target(name, folder, adapter, run, run_around(adapter))


def _plain_target(path: Path, name: str) -> Target:
    if not (path / adapter_file.CONFIG).is_file():
        short = path.resolve().name if path.exists() else name.rpartition("/")[2]
        run = run_around(path) if short in ("merged", "model") else None
        return Target(run.name if run else short.removesuffix(".gguf"), model_folder(name), inside=run)
    config = read_json(path / adapter_file.CONFIG)
    base = str(config.get("base_model_name_or_path") or "")
    if not base:
        raise InputError(
            f"The adapter {path} does not say which base it belongs to.",
            f"Write the base's name or folder as base_model_name_or_path into {path / adapter_file.CONFIG}.",
        )
    return _on_its_base(path.resolve().name, base, config.get("revision"), path, None)


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def load_speaker(name: str | Path, *, base: bool = False) -> Speaker:
    """A run, an adapter (on its base) or a model, ready to answer.

    `base` gives the untrained model below it. Raises what `find_target` does, and `InputError` when there is no
    model below or the adapter does not fit its base.
    """
    target = find_target(name)
    if base and target.run is not None:
        recipe = target.run.recipe()
        folder = model_folder(recipe.model, recipe.load.revision)
        return Speaker(load_base(recipe, folder), load_tokenizer(recipe), target.system)
    if base and target.adapter is None:
        raise InputError(f"{name} is no run or adapter, so nothing is known below it.", "Name a run or an adapter.")
    return Speaker(load_target(target, adapter=not base), load_tokenizer_of(target), target.system)


def load_tokenizer_of(target: Target) -> Any:
    """The tokenizer and chat template that a target answers with."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target.tokenizer)


def load_target(target: Target, *, adapter: bool = True) -> Any:
    """The model, on this process's device; with its adapter attached where it has one."""
    if target.run is not None:
        model: Any = load_base(target.run.recipe(), target.model, quantized=target.adapter is not None)
    else:
        model = _load_plain(target.model)
    return attach(model, target.adapter) if adapter and target.adapter is not None else model


def attach(model: Any, folder: Path, name: str = "default") -> Any:
    """`model` with the adapter in `folder`, as peft's model; a further one when it is peft's already.

    Raises `InputError` unless every tensor of the adapter has found its place and every place is filled: peft would
    warn at most, and the answers would be the bare base's.
    """
    from peft import PeftModel

    if isinstance(model, PeftModel):
        model.load_adapter(str(folder), name)
    else:
        model = PeftModel.from_pretrained(model, folder, adapter_name=name)
    _check_filled(model, folder, name)
    return model


def _check_filled(model: Any, folder: Path, name: str) -> None:
    from peft import get_peft_model_state_dict

    file = folder / adapter_file.WEIGHTS
    if not file.is_file():
        raise InputError(
            f"The adapter {folder} has no {adapter_file.WEIGHTS}.",
            "Load and save it once with peft, which writes it.",
        )
    stored = set(read_shard(file).tensors)
    places = set(get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False))
    own = {f"base_model.model.{key}" for key in model.get_base_model().state_dict()}
    kept = {key for key in stored if ".base_layer." in key or key in own}  # base weights that were saved beside it
    if wrong := sorted((stored - kept) ^ places):
        raise InputError(
            f"The adapter {folder} and the places it has in this model do not agree: {_some(wrong)}.",
            "Use the base it was trained on, and the names that peft's save_pretrained writes.",
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _load_plain(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map={"": training_device()})
    # 16-bit products are slower than fp32 on most CPUs
    return model.float() if training_device() == "cpu" and model.dtype != torch.float32 else model
