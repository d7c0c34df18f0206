"""The README.md of a merged model: what it was made of, how well it does, and how to load it.

It goes wherever the model goes, so it holds names and numbers and no path of the machine that wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from finetune import embedded, strict_yaml
from finetune.recipe import Full, Recipe

CARD = "README.md"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_EMBEDDED = {embedded.SMOLLM2: ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")}
_SCORES = {
    "exact_match": "exact", "valid_json": "valid JSON", "intent_accuracy": "intent", "slot_f1": "slot F1",
    "stop_rate": "stops by itself",
}  # fmt: skip


@dataclass(frozen=True)
class About:
    """What is known of a merged model. `recipe` and what the run left are None for an adapter that came without."""

    name: str
    base: str
    licence: str | None
    dtype: str
    stops: Sequence[int]
    recipe: Recipe | None = None
    data: Mapping[str, Any] | None = None
    result: Mapping[str, Any] | None = None
    evaluation: Mapping[str, Any] | None = None
    proof: str | None = None


def base_name(model: str) -> str:
    """How to name a base to others: its hub id, or the last part of a path."""
    if model in _EMBEDDED:
        return _EMBEDDED[model][0]
    return model if _HUB_ID.fullmatch(model) and not Path(model).exists() else PurePath(model).name


def licence_of(model: str, folder: Path) -> str | None:
    """The licence that a base states in its own card or licence file; None where it does not say."""
    if model in _EMBEDDED:
        return _EMBEDDED[model][1]
    card = folder / CARD
    if card.is_file():
        text = card.read_text(encoding="utf-8", errors="replace")
        fields = dict(re.findall(r"^(license(?:_name)?): *['\"]?([\w.-]+)", text, re.MULTILINE))
        said: str | None = fields.get("license_name") or fields.get("license")
        if text.startswith("---") and said:
            return said
    for file in sorted(folder.glob("LICEN[CS]E*")):
        first = next((line.strip() for line in file.read_text(errors="replace").splitlines() if line.strip()), "")
        return first[:80] or None
    return None


def model_card(about: About) -> str:
    """The card as Markdown with the fields that the hub reads at its top."""
    parts = [_head(about), f"# {about.name}", _what(about)]
    if about.recipe is not None:
        parts.append(_training(about, about.recipe))
    if about.evaluation:
        parts.append(_scores(about.evaluation))
    parts += [_loading(about), _licence(about)]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _head(about: About) -> str:
    fields: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if _HUB_ID.fullmatch(about.base):
        fields |= {"base_model": about.base, "base_model_relation": "finetune"}
    if about.licence and re.fullmatch(r"[a-z0-9.-]+", about.licence):
        fields["license"] = about.licence
    kind = [about.recipe.method.kind] if about.recipe else []
    return f"---\n{strict_yaml.dump({**fields, 'tags': ['finetune', *kind]}).strip()}\n---"


def _what(about: About) -> str:
    text = (
        f"{about.base}, fine-tuned, with the adapter merged into its weights: {about.dtype}, ready for any server. "
        "Made by `finetune merge`."
    )
    return f"{text}\n\n{about.proof}" if about.proof else text


def _training(about: About, recipe: Recipe) -> str:
    return "\n".join(["## Training", "", *_table(("", ""), list(_facts(about, recipe)))])


def _facts(about: About, recipe: Recipe) -> Iterator[tuple[str, str]]:
    method, train = recipe.method, recipe.train
    if not isinstance(method, Full):
        targets = method.targets if isinstance(method.targets, str) else ", ".join(method.targets)
        variant = "" if method.variant == "lora" else f" ({method.variant})"
        yield "method", f"{method.kind}{variant}, rank {method.rank}, alpha {method.alpha:g}, on {targets}"
    rate, schedule = f"{train.learning_rate:g}", train.schedule
    yield "optimisation", f"{train.optimizer}, learning rate {rate}, {schedule}, {train.batch_size} rows a step"
    yield "rows", ", ".join(PurePath(name).name for name in recipe.data.sources)
    counts, result = about.data or {}, about.result or {}
    if "rows_trained" in counts:
        tokens = f", {counts['tokens']:,} tokens" if "tokens" in counts else ""
        yield "counts", f"{counts['rows_trained']:,} rows{tokens}, {train.epochs:g} epochs"
    bad = sum(counts.get("rows_bad", {}).values()) + counts.get("rows_dropped", 0)
    if bad:
        yield "left out", f"{bad:,} of {counts['rows_read']:,} rows"
    if result:
        yield "steps", f"{result['steps']:,}, mean loss {result['loss']:.3f}"
        if result.get("eval_loss") is not None:
            yield "evaluation loss", f"{result['eval_loss']:.3f}"


def _scores(evaluation: Mapping[str, Any]) -> str:
    arms = evaluation["arms"]
    shown = [key for key in _SCORES if any(arm.get(key) is not None for arm in arms)]
    rows = [(arm["name"], *(_share(arm.get(key)) for key in shown)) for arm in arms]
    table = _table(("", *(_SCORES[key] for key in shown)), rows)
    return "\n".join(["## Scores", "", f"On {evaluation['rows']} held-out rows.", "", *table])


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _loading(about: About) -> str:
    name = about.name
    stops = ", ".join(map(str, about.stops))
    return f"""## Loading

The chat template and the trained stop tokens ({stops}) are in the files, so every server below uses them.

transformers

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto", device_map="auto")
messages = [{{"role": "user", "content": "..."}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**inputs.to(model.device), max_new_tokens=256)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
```

vLLM

```sh
vllm serve {name}
```

llama.cpp

```sh
python convert_hf_to_gguf.py {name} --outfile model-f16.gguf --outtype f16
llama-server -m model-f16.gguf --jinja
```

Ollama, from the GGUF file

```sh
echo "FROM ./model-f16.gguf" > Modelfile
ollama create my-model -f Modelfile
ollama run my-model
```"""


def _licence(about: About) -> str:
    said = f"is under {about.licence}" if about.licence else "states its licence where it was published"
    return f"## Licence\n\nThe base model {about.base} {said}, and that holds for this model too."
