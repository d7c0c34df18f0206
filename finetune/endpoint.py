"""Existing servers as applications inside this process: transformers' for model folders, llama.cpp's for GGUF files.

transformers' server loads models by itself, under the path as their name, and renders prompts by the template alone.
Here it is given the model as `generate` loads it, under short names, and the prompts of training (`chat.prompt_ids`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from finetune import chat, turns
from finetune.errors import DataError, InputError
from finetune.formats import BadRow
from finetune.generate import Target


def chooser(model: Any, base_name: str) -> Callable[[str], None]:
    """Makes peft's `model` answer with the adapter of that name, or bare for `base_name`."""

    def choose(name: str) -> None:
        if name == base_name:
            model.base_model.disable_adapter_layers()
        else:
            model.base_model.enable_adapter_layers()
            model.set_adapter(name)

    return choose


def check_effect(model: Any, choose: Callable[[str], None], base_name: str, target: Target, tokenizer: Any) -> None:
    """Compare the logits of one prompt with the bare base's. Raises `InputError` when the adapter changes nothing."""
    import torch

    ids = torch.tensor([chat.prompt_ids(tokenizer, [{"role": "user", "content": "Hello"}])], device=model.device)
    logits = []
    model.eval()
    for name in (base_name, target.name):
        choose(name)
        with torch.inference_mode():
            logits.append(model(input_ids=ids).logits[0, -1].float())
    if torch.equal(*logits):
        raise InputError(
            f"With the adapter {target.adapter} the model answers exactly as without it.",
            "It is untrained or not made for this base; serve the base alone, or train it.",
        )


def transformers_app(model: Any, tokenizers: Mapping[str, Any]) -> Any:
    """transformers' own server as an application, with `model` loaded under every name.

    Prompts are those of training, by `chat.prompt_ids`; generation stops at the trained ends of a turn.
    """
    from transformers import GenerationConfig
    from transformers.cli.serve import Serve as Server
    from transformers.cli.serving.model_manager import TimedModel

    class Application(Server):
        def start_server(self) -> None:
            """The application is wanted, and no second listening socket."""

    server = Application(non_blocking=True, log_level="error")
    manager = server._model_manager
    manager.process_model_name = str  # type: ignore[method-assign,assignment]  # a name is a name, no hub id
    generation = model.generation_config or GenerationConfig()  # type: ignore[no-untyped-call]
    known = generation.eos_token_id
    stops = [known] if isinstance(known, int) else list(known or [])
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, tokenizer in tokenizers.items():
        stops += [token for token in chat.end_of_turn_ids(tokenizer) if token not in stops]
        tokenizer.apply_chat_template = prompter(tokenizer, most)
        manager.loaded_models[name] = TimedModel(model, timeout_seconds=-1, processor=tokenizer)
    generation.eos_token_id = stops
    if generation.pad_token_id is None:
        generation.pad_token_id = stops[0]
    model.generation_config = generation
    model.eval()
    return server.server.config.app


def prompter(tokenizer: Any, most: int | None = None) -> Callable[..., Any]:
    """`apply_chat_template` with the ids that training saw, fewer than `most`.

    A request with template options gets the template's.
    """
    template = tokenizer.apply_chat_template

    def prompt(conversation: Any, tools: Any = None, return_tensors: str | None = None, **how: Any) -> Any:
        from fastapi import HTTPException
        from transformers import BatchEncoding

        usual = ("add_generation_prompt", "return_dict", "tokenize", "load_audio_from_video")
        if any(key not in usual for key in how):
            return template(conversation, tools=tools, return_tensors=return_tensors, **how)
        try:
            ids = chat.prompt_ids(tokenizer, turns.said(_usual(conversation), "messages"), turns.tools_of(tools))
        except (BadRow, DataError) as error:
            reason = error.reason if isinstance(error, BadRow) else error.what
            raise HTTPException(400, detail=reason) from None
        if most is not None and len(ids) >= most:
            raise HTTPException(
                400, detail=f"the prompt has {len(ids):,} tokens, and the model takes {most:,} in all"
            )
        return BatchEncoding({"input_ids": [ids], "attention_mask": [[1] * len(ids)]}, tensor_type=return_tensors)

    return prompt


def _usual(messages: Any) -> Any:
    """Without empty system messages, which clients send when their field is left empty; developer is a system."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return messages
    named = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]
    return [m for m in named if m.get("role") != "system" or str(m.get("content") or "").strip()]


def llama_app(file: Path, name: str) -> Any:
    """llama.cpp's server as an application. Raises `InputError` when a part of it is not installed."""
    try:
        from llama_cpp.server.app import create_app  # type: ignore[import-not-found]
        from llama_cpp.server.settings import ModelSettings, ServerSettings  # type: ignore[import-not-found]
    except ImportError as error:
        raise InputError(
            f"llama.cpp's server is not complete here ({error}).", "Run `pip install 'llama-cpp-python[server]'`."
        ) from None
    # Its default ends a running answer when the next request comes.
    settings = ServerSettings(interrupt_requests=False)
    model = ModelSettings(model=str(file), model_alias=name, n_ctx=8192, n_gpu_layers=-1, verbose=False)
    return create_app(server_settings=settings, model_settings=[model])
