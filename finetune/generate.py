"""A run or a model folder -> text. The prompt ids are the ones that training saw (`chat.prompt_ids`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune import chat
from finetune.errors import FinetuneError, RunError
from finetune.formats import Conversation, Message
from finetune.model import load_base, load_tokenizer, model_folder, training_device
from finetune.recipe import Recipe
from finetune.run import Run, open_run

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
        import torch

        prompts = [chat.prompt_ids(self.tokenizer, talk.messages, talk.tools) for talk in conversations]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        answers: list[Answer | None] = [None] * len(prompts)
        self.model.eval()
        with torch.inference_mode(), self._adapter_off() if bare else nullcontext():
            for chosen in _batches(order, [len(p) + max_new_tokens for p in prompts], tokens):
                for index, answer in zip(
                    chosen, self._batch([prompts[i] for i in chosen], max_new_tokens), strict=True
                ):
                    answers[index] = answer
        return [answer for answer in answers if answer is not None]

    def stream(self, messages: list[Message], *, max_new_tokens: int, bare: bool = False) -> Iterator[str]:
        """The reply to one conversation, piece by piece."""
        import torch
        from transformers import TextIteratorStreamer

        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=300)
        ids = torch.tensor([chat.prompt_ids(self.tokenizer, messages)], device=self.model.device)
        failed: list[BaseException] = []

        def work() -> None:
            try:
                with torch.inference_mode(), self._adapter_off() if bare else nullcontext():
                    self._generate(ids, torch.ones_like(ids), max_new_tokens, streamer=streamer)
            except BaseException as error:  # handed to the reading thread below
                failed.append(error)
                streamer.end()

        self.model.eval()
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        yield from (piece for piece in streamer if piece)
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


def load_speaker(target: str | Path, *, base: bool = False) -> Speaker:
    """A run (its adapter on its base, or its full model) or a model, ready to answer.

    `base` gives a run's untrained model. Raises `RunError` when the run has trained nothing yet.
    """
    try:
        run = open_run(target)
    except RunError:
        return _load_plain(str(target))
    recipe = run.recipe()
    system = recipe.data.system or (run.read("data.json") or {}).get("system")
    if base:
        folder = model_folder(recipe.model, recipe.load.revision)
        return Speaker(load_base(recipe, folder), load_tokenizer(recipe), system)
    return Speaker(*_load_trained(run, recipe), system)


def _load_trained(run: Run, recipe: Recipe) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    if run.model.is_dir():
        return load_base(recipe, run.model, quantized=False), AutoTokenizer.from_pretrained(run.model)
    if not run.adapter.is_dir():
        raise RunError(
            f"{run.folder} has no trained adapter yet.", f"Finish it with `finetune train --resume {run.folder}`."
        )
    from peft import PeftModel

    base = load_base(recipe, model_folder(recipe.model, recipe.load.revision))
    return PeftModel.from_pretrained(base, run.adapter), AutoTokenizer.from_pretrained(run.adapter)


def _load_plain(name: str) -> Speaker:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map={"": training_device()})
    if training_device() == "cpu" and model.dtype != torch.float32:
        model = model.float()  # 16-bit products are slower than fp32 on most CPUs
    return Speaker(model, AutoTokenizer.from_pretrained(folder))
