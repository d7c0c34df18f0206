"""A tiny tokenizer and a tiny random model for tests: real file formats, real chat templates, no download.

The tokenizer is a byte-level BPE: control tokens first, then the 256 bytes, then a few merges, so every text comes
back from its ids unchanged. All families share one vocabulary; only template, bos, eos and pad differ.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

CONTROL = [
    "<pad>", "<unk>", "<bos>", "<eos>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<start_of_turn>",
    "<end_of_turn>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>",
]  # fmt: skip

# Phi-3's turn tokens swallow the white space behind them; the published tokenizer says so, and it matters for masks.
SWALLOWING = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]

WORDS = [
    "\n\n", "  ", " the", " you", " are", " is", " a", "the", "user", "system", "assistant", "model", "Hello", "and",
    "ing",
]  # fmt: skip

# SmolLM2's own template: without a system message it writes one of its own.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Llama 2's: the system text inside the first user turn, a bos before each question, the reply between two spaces.
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set talk = messages[1:] %}"
    "{% set rules = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
    "{% else %}{% set rules = '' %}{% set talk = messages %}{% endif %}"
    "{% for message in talk %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must alternate') }}{% endif %}"
    "{% set content = rules + message['content'] if loop.first else message['content'] %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)

# Mistral's first: no system role, [INST] is plain text, a space before the reply.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}"
    "{% endif %}{% endfor %}"
)

# family -> (bos, eos, pad, does the tokenizer itself put bos in front), as the published tokenizers have them
FAMILIES: dict[str, tuple[str | None, str, str, bool]] = {
    "smollm2": ("<|im_start|>", "<|im_end|>", "<|im_end|>", False),
    "gemma": ("<bos>", "<eos>", "<pad>", True),
    "gemma2": ("<bos>", "<eos>", "<pad>", True),
    "gemma3": ("<bos>", "<eos>", "<pad>", True),
    "llama2": ("<s>", "</s>", "<unk>", True),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>", True),
    "llama3_1": ("<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>", True),
    "mistral": ("<s>", "</s>", "<unk>", True),
    "qwen2_5": (None, "<|im_end|>", "<|endoftext|>", False),
    "qwen3": (None, "<|im_end|>", "<|endoftext|>", False),
    "phi3": ("<s>", "<|endoftext|>", "<|endoftext|>", False),
    "none": ("<s>", "</s>", "</s>", True),
}


def template_text(family: str) -> str | None:
    """The chat template of a family: some from here, "none" has none, the others from the trl wheel."""
    own = {"none": None, "smollm2": SMOLLM2, "llama2": LLAMA2, "mistral": MISTRAL}
    if family in own:
        return own[family]
    family = "gemma" if family == "gemma2" else family  # one template for both
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{family}.jinja").read_text(encoding="utf-8")


def tiny_tokenizer(
    template: str | None = "smollm2",
    *,
    bos: str | None = "auto",
    eos: str | None = "auto",
    pad: str | None = "auto",
    add_bos: bool | None = None,
) -> Any:
    """A fast tokenizer of about 330 tokens.

    `template` is a family's name, template text, or None for a base model without one. `bos`, `eos` and `pad` name
    control tokens; "auto" takes the family's (for template text, SmolLM2's). `add_bos` says whether the tokenizer's
    own post-processor puts bos in front, on top of what the template prints.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    family = "none" if template is None else template if template in FAMILIES else "smollm2"
    own_bos, own_eos, own_pad, own_add = FAMILIES[family]
    bos = own_bos if bos == "auto" else bos
    eos = own_eos if eos == "auto" else eos
    pad = own_pad if pad == "auto" else pad
    vocab, merges = _vocabulary()
    core = Tokenizer(BPE(vocab=vocab, merges=merges))
    control = [AddedToken(token, special=True, normalized=False, rstrip=token in SWALLOWING) for token in CONTROL]
    core.add_special_tokens(control)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    if bos and (own_add if add_bos is None else add_bos):
        core.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, vocab[bos])])
    named = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in named.items() if token},
    )
    tokenizer.chat_template = template_text(template) if template in FAMILIES else template
    return tokenizer


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    from tokenizers import pre_tokenizers

    tokens = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        letters = word.replace(" ", "Ġ").replace("\n", "Ċ")
        for end in range(1, len(letters)):
            pair = (letters[:end], letters[end])
            if pair not in merges:
                merges.append(pair)
                tokens.append(letters[: end + 1])
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}, merges


def tiny_model(
    folder: str | Path,
    *,
    tied: bool = True,
    shards: int = 1,
    dtype: str = "float32",
    arch: str = "llama",
    seed: int = 0,
    template: str | None = "smollm2",
    **config: Any,
) -> Path:
    """Write a random model (hidden 64, 2 layers, 4 heads, 2 key-value heads) and its tokenizer.

    Equal seed, equal bytes. `arch` is llama, qwen2 or gemma2; `shards` > 1 writes exactly that many weight files with
    an index; further keywords overwrite fields of the config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(folder)
    tokenizer = tiny_tokenizer(template)
    tokenizer.save_pretrained(folder)
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
        "tie_word_embeddings": tied, "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    before = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **{**fields, **config}))
    torch.random.set_rng_state(before)
    model = model.to(getattr(torch, dtype))
    model.config.dtype = dtype
    model.save_pretrained(folder)
    if shards > 1:
        _shard(folder, shards)
    return folder


def _shard(folder: Path, shards: int) -> None:
    """Replace model.safetensors by exactly `shards` files and an index."""
    from safetensors.torch import load_file, save_file

    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    names = sorted(tensors)
    where = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(part, file))
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    whole.unlink()
