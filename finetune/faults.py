"""A recipe that its models refuse -> one sentence for each faulty place, in the words of the file.

    train.epochs is 0 but must be above 0. Passes over the training rows.
    method.dropout cannot be '0,05'. Dropout before A; above 0 costs about 1.2x time. Write the decimal point as 0.05.
    'rnak' is not known in 'method'; did you mean 'rank'?
    'rank' is not known at the top level; it belongs in 'method.rank'.

All of it is read off the models: which fields there are, what they admit, and the sentence that describes them. A
recipe is two levels deep: fields at the top, and groups of fields, each with one model or with one per `kind`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from finetune import strict_yaml
from finetune.errors import RecipeError
from finetune.strict_yaml import Path

Places = dict[Path, tuple[int, str]]  # where a path was written: a line to sort by, and the words that name the place
Fault = tuple[int, str]  # the line to sort by, and the message

_BOUNDS = {
    "greater_than_equal": "at least",
    "greater_than": "above",
    "less_than_equal": "at most",
    "less_than": "below",
}
_KINDS = "it must be full, lora or qlora"


def recipe_error(faults: Iterable[Fault]) -> RecipeError:
    """All faults in the order of their lines."""
    lines = [text for _, text in sorted(faults, key=lambda fault: fault[0])]
    these = f"these {len(lines)} lines" if len(lines) > 1 else "this line"
    return RecipeError("\n".join(lines) + "\n", f"Correct {these}; `finetune schema` shows every field.")


def faults_of(error: ValidationError, value: dict[str, Any], where: Places, recipe: type[BaseModel]) -> list[Fault]:
    """What pydantic found wrong in `value`, checked against the model `recipe`: one fault for each place.

    Several of its errors are one fault when they tell of one union, of a misspelt key and the field then missing, or
    of a list and an entry in it.
    """
    form = _Form(value, recipe)
    items = [(form.path(item), item) for item in error.errors()]
    misspelt = {(*path[:-1], form.meant(path)) for path, item in items if item["type"] == "extra_forbidden"}
    sentences: dict[Path, str] = {}
    for path, item in items:
        if item["type"] == "missing" and path in misspelt:
            continue
        if path not in sentences or item["type"] in _BOUNDS:  # of one union's errors a bound tells the most
            sentences[path] = form.sentence(path, item)
    around = {path[:n] for path in sentences for n in range(len(path))}
    faults = []
    for path, sentence in sentences.items():
        if path not in around:
            line, place = next(where[path[:n]] for n in range(len(path), -1, -1) if path[:n] in where)
            faults.append((line, f"{place}: {sentence}"))
    return faults


class _Form:
    """The values of a recipe beside its models. A group goes by its name, the top level by ""."""

    def __init__(self, value: dict[str, Any], recipe: type[BaseModel]) -> None:
        self.value = value
        self.models = {"": [recipe]}  # of each group; several where `kind` chooses
        for name, field in recipe.model_fields.items():
            parts = _admitted(field.annotation)
            if models := [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]:
                self.models[name] = models

    def model(self, group: str) -> type[BaseModel]:
        """The model of a group; while `kind` chooses none, the last, which has all fields of the others."""
        models, value = self.models[group], self.value.get(group)
        kind = value.get("kind") if isinstance(value, dict) else None
        for model in models[:-1]:
            if kind in get_args(model.model_fields["kind"].annotation):
                return model
        return models[-1]

    def path(self, item: ErrorDetails) -> Path:
        """The place in the file: pydantic's own, ('method', 'lora', 'targets', 'list[str]', 1), names types too."""
        loc = item["loc"]
        if item["type"] == "union_tag_invalid":
            return (*loc, "kind")
        if item["type"] == "union_tag_not_found":
            return (*loc, next((key for key in item["input"] if nearest(key, ["kind"])), "kind"))
        models = self.models.get(str(loc[0]), [])
        keys = loc[:1] + loc[2:] if len(models) > 1 else loc
        named = 2 if models else 1
        value: Any = self.value
        for key in keys[:named]:
            value = value.get(key) if isinstance(value, dict) else None
        mapped = value if isinstance(value, dict) and "[key]" not in keys else {}
        return (*keys[:named], *(key for key in keys[named:] if isinstance(key, int) or key in mapped))

    def sentence(self, path: Path, item: ErrorDetails) -> str:
        """What is wrong at a path, what the field is, and what to write where that can be guessed."""
        error, got, name = item["type"], item["input"], ".".join(map(str, path))
        if error == "union_tag_invalid":
            return f"{name} is {show(got['kind'])}; {_KINDS}."
        if error == "union_tag_not_found" and path[-1] == "kind":
            return f"{name} is missing; {_KINDS}."
        if error in ("extra_forbidden", "union_tag_not_found"):
            return self.unknown(path)
        field = self.field(path)
        if error == "missing":
            return f"'{name}' is missing. {field.description}"
        if error in _BOUNDS:
            [bound] = item["ctx"].values()
            limit = f"{_BOUNDS[error]} {bound}".removesuffix(".0")
            return f"{name} is {show(got)} but must be {limit}. {field.description}"
        if error == "value_error":
            return f"{name} is {show(got)}: {item['ctx']['error']}. {field.description}"
        inside = len(path) > 2 and isinstance(
            path[-1], str
        )  # an entry of a mapping, all of which are numbers or text
        admitted = [float] if inside else _admitted(field.annotation)
        words = [word for word in admitted if isinstance(word, str)]
        if isinstance(got, str) and got not in words and (near := nearest(got, words)):
            return f"{name} cannot be {show(got)}; did you mean '{near}'? {field.description}"
        return f"{name} cannot be {show(got)}. {field.description}{_hint(got, admitted)}"

    def unknown(self, path: Path) -> str:
        """An unknown key: its near miss, else the other group it belongs in, else all that is known here."""
        group, key = _group_and_name(path)
        here = f"'{key}' is not known " + (f"in '{group}'" if group else "at the top level")
        if near := self.meant(path):
            return f"{here}; did you mean '{near}'?"
        for other, models in self.models.items():
            for model in models if other != group else ():
                if near := nearest(key, model.model_fields, cutoff=0.85):
                    place = f"it belongs in '{other}.{near}'" if other else f"'{near}' stands at the top level"
                    return f"{here}; {place}."
        return f"{here}; known are {', '.join(self.model(group).model_fields)}."

    def meant(self, path: Path) -> str | None:
        """The field that an unknown key is a near miss of."""
        group, key = _group_and_name(path)
        return nearest(key, self.model(group).model_fields)

    def field(self, path: Path) -> FieldInfo:
        """The field at a path; for an entry of a list, that of the list."""
        group, name = _group_and_name(path)
        return self.model(group).model_fields[name]


def _group_and_name(path: Path) -> tuple[str, str]:
    return (str(path[0]), str(path[1])) if len(path) > 1 else ("", str(path[0]))


def _admitted(annotation: Any) -> list[Any]:
    """All that a field's type admits: its types, unions opened, `list` for any list, and the words of literals."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return list(parts)
    if origin is list:
        return [list, *(word for word in _admitted(parts[0]) if isinstance(word, str))]
    if origin is Annotated:
        return _admitted(parts[0])
    return [kind for part in parts for kind in _admitted(part)] or [annotation]


def _hint(got: Any, admitted: list[Any]) -> str:
    """Why a value that looks right is not: a point, quotes, a word of YAML 1.1, a comma, a list without brackets."""
    if isinstance(got, float) and got.is_integer() and int in admitted:
        return f" Write {int(got)}."
    if isinstance(got, (int, float)) and str in admitted:
        return f" Write it in quotes if it is text: '{show(got)}'."
    if not isinstance(got, str) or not (text := got.strip()):
        return ""
    plain = strict_yaml.scalar(text)
    if bool in admitted and text.lower() in ("yes", "no", "on", "off"):
        return f" '{text}' is text here; write {'true' if text.lower() in ('yes', 'on') else 'false'}."
    if type(None) in admitted and text == "None":
        return " 'None' is text here; write null."
    if type(plain) in admitted or (isinstance(plain, int) and float in admitted):
        return f" It stands in quotes and is text; write {text} without them."
    if float in admitted and re.fullmatch(r"[0-9]+,[0-9]+", text):
        return f" Write the decimal point as {text.replace(',', '.')}."
    return f" Write a list as [{text}]." if list in admitted else ""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.7) -> str | None:
    """The known word most like this one, if any is alike enough."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def show(value: Any) -> str:
    """A value as a message names it."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a group of fields"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"'{value}'" if isinstance(value, str) else str(value)
