"""The embedded data set: generated once for all tests, and in small once more by a process that must agree."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

pytest.importorskip("hassil")
pytest.importorskip("home_assistant_intents")

from finetune import home_intents, home_words
from finetune.errors import DataError


@pytest.fixture(scope="module")
def made():
    return home_intents.generate()


@pytest.fixture(scope="module")
def recogniser():
    return home_intents.Recogniser(home_intents._package_data())


@pytest.fixture
def generated_before(made, monkeypatch):
    """`ensure` without the seconds; gives the list of its calls."""
    calls = []
    monkeypatch.setattr(home_intents, "generate", lambda: calls.append(1) or made)
    return calls


def command(row) -> str:
    return row["messages"][1]["content"]


def label(row) -> dict:
    return json.loads(row["messages"][2]["content"])


def names(half: int) -> set[str]:
    """All rooms, devices and things: 0 those of training, 1 the held-out ones."""
    return {name for halves in home_words.VOCABULARY.values() for name in halves[half].split(", ")}


def mentions(text: str, words: set[str]) -> set[str]:
    return {word for word in words if re.search(rf"\b{re.escape(word)}\b", text)}


# --------------------------------------------------------------------------------------------------------------- rows


def test_a_row_is_a_command_and_sorted_json(made):
    for row in made.train + made.test:
        assert list(row) == ["messages"]
        assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
        assert row["messages"][0]["content"] == home_intents.SYSTEM
        text = row["messages"][2]["content"]
        keys = list(json.loads(text))
        assert keys == ["intent", *sorted(keys[1:])]
        assert text == json.dumps(json.loads(text), ensure_ascii=False)
        assert command(row) == " ".join(command(row).split()).lower()


def test_eight_intents_equally_often(made):
    assert len(home_words.INTENTS) == 8
    assert Counter(label(row)["intent"] for row in made.train) == dict.fromkeys(home_words.INTENTS, 640 // 8)
    assert Counter(label(row)["intent"] for row in made.test) == dict.fromkeys(home_words.INTENTS, 200 // 8)
    assert made.about["intents"]["train"]["HassTurnOn"] == 80


def test_rows_of_one_split(made, generated_before, monkeypatch):
    monkeypatch.setattr(home_intents, "generate", lambda seed: {11: made}[seed])
    assert home_intents.rows("train") == made.train
    assert home_intents.rows("test") == made.test


def test_no_command_occurs_twice(made):
    commands = [command(row) for row in made.train + made.test]
    assert len(set(commands)) == 840


def test_held_out_names_are_in_no_training_row(made):
    assert not names(0) & names(1)
    for row in made.train:
        assert not mentions(command(row), names(1)), row


def test_half_of_the_test_rows_name_only_the_unseen(made):
    held_out = made.about["held_out_test_rows"]
    assert len(held_out) == 100
    for number, row in enumerate(made.test):
        values = {value for value in label(row).values() if isinstance(value, str)}
        assert bool(values & names(1)) == (number in held_out)
        if number in held_out:
            assert not values & names(0), row


def test_every_slot_can_be_read_off_the_command(made):
    """Names are copied and numbers said, or said by a word with one meaning; the domain is the word for the group."""
    said = {"half": 30, "candle light": 1900, "warm white": 2700, "cold white": 4000, "cool white": 4000}
    said |= {"daylight": 6500, "day light": 6500, "max": 100, "maximum": 100, "highest": 100}
    said |= {"min": 1, "minimum": 1, "lowest": 1}
    groups = {"light": "light|lamp|illuminate", "fan": "fan", "cover": "open|raise|close|shut"}
    for row in made.train + made.test:
        text = command(row)
        for slot, value in label(row).items():
            if isinstance(value, int):
                words = mentions(text, set(said))
                assert str(value) in re.findall(r"\d+", text) or value in {said[word] for word in words}, row
            elif slot == "domain":
                assert label(row)["intent"] == "HassLightSet" or re.search(groups[value], text), row
            elif slot == "device_class":
                assert re.search({"garage": "garage door"}.get(value, value), text), row
            elif slot != "intent":
                assert value in text, row


def test_labels_keep_one_type_per_slot(made):
    types: dict[str, set[type]] = {}
    for row in made.train + made.test:
        for slot, value in label(row).items():
            types.setdefault(slot, set()).add(type(value))
    assert types.pop("minutes") == types.pop("brightness") == types.pop("temperature") == {int}
    assert all(kinds <= {str, int} and len(kinds) == 1 for kinds in types.values())


def test_same_seed_same_rows_in_every_process(monkeypatch):
    """Another hash seed shuffles every set and would show any hidden dependence on it."""
    code = (
        "import json; from finetune import home_intents; home_intents.ROWS.update(train=64, test=32);"
        "made = home_intents.generate(seed=5); print(json.dumps([made.train, made.test, made.about]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    monkeypatch.setattr(home_intents, "ROWS", {"train": 64, "test": 32})
    made = home_intents.generate(seed=5)
    assert json.loads(done.stdout) == [made.train, made.test, made.about]
    assert made.train[:5] != home_intents.generate(seed=6).train[:5]


def test_the_rows_are_those_of_this_revision(made):
    """When this fails on purpose: raise `_REVISION`, so that nobody keeps the old files, and put the new sum here."""
    if made.about["packages"] != {"home-assistant-intents": "2026.11.25", "hassil": "3.13.0"}:
        pytest.skip(f"the sum is of other packages than {made.about['packages']}")
    text = json.dumps([made.train, made.test])
    assert (home_intents._REVISION, hashlib.sha256(text.encode()).hexdigest()[:16]) == (2, "323b4d11937f6634")


# --------------------------------------------------------------------------------------------------------- recogniser

LIGHT = {"intent": "HassLightSet", "brightness": 40, "name": "desk lamp"}


def test_the_recogniser_reads_commands(recogniser):
    def only(text):
        (reading,) = {json.dumps(one, sort_keys=True) for one in recogniser.readings(text)}
        return json.loads(reading)

    assert only("set the desk lamp to 40 percent") == LIGHT
    assert only("turn off the kitchen lights") == {"intent": "HassTurnOff", "area": "kitchen", "domain": "light"}
    assert only("what's the weather in oslo") == {"intent": "HassGetWeather", "name": "oslo"}
    assert only("timer for 2 and a half hours") == {"intent": "HassStartTimer", "hours": 2, "minutes": 30}


def test_every_row_was_confirmed(made, recogniser):
    assert made.about["checked_by_recogniser"] == 840
    assert made.about["rejected_by_recogniser"] >= 0
    assert all(recogniser.agrees(command(row), label(row)) for row in made.train[:100])


@pytest.mark.parametrize(
    "wrong",
    [
        {**LIGHT, "intent": "HassTurnOn"},
        {**LIGHT, "brightness": 41},
        {**LIGHT, "brightness": "40"},
        {**LIGHT, "name": "floor lamp"},
        {**LIGHT, "domain": "light"},
        {"intent": "HassLightSet", "name": "desk lamp"},
    ],
)
def test_a_wrong_label_is_rejected(recogniser, wrong):
    assert recogniser.agrees("set the desk lamp to 40 percent", LIGHT)
    assert not recogniser.agrees("set the desk lamp to 40 percent", wrong)


def test_a_command_that_cannot_be_read_is_rejected(recogniser):
    assert not recogniser.agrees("please sing a song", LIGHT)
    assert not recogniser.agrees("turn on the lights", {"intent": "HassTurnOn", "domain": "light"})  # in which room?


def test_a_command_with_two_readings_is_rejected(monkeypatch):
    """'the office lamp' is a lamp of that name, or the lamps in the office."""
    monkeypatch.setitem(home_words.VOCABULARY, "light", ("desk lamp, office lamp", "reading lamp"))
    confused = home_intents.Recogniser(home_intents._package_data())
    assert confused.agrees("turn on the desk lamp", {"intent": "HassTurnOn", "name": "desk lamp"})
    for reading in ({"name": "office lamp"}, {"area": "office", "domain": "light"}):
        assert {"intent": "HassTurnOn", **reading} in confused.readings("turn on the office lamp")
        assert not confused.agrees("turn on the office lamp", {"intent": "HassTurnOn", **reading})


def test_generation_rejects_what_the_recogniser_does_not_confirm(monkeypatch):
    """A sampler that writes down one degree more than it says gets no row through."""
    right = home_intents._Draw.value

    def one_more(self, list_name):
        said, value = right(self, list_name)
        return said, value + 1 if list_name == "temperature" else value

    monkeypatch.setattr(home_intents._Draw, "value", one_more)
    monkeypatch.setattr(home_intents, "_TRIES", 30)
    writer = home_intents._Writer(home_intents._package_data(), seed=1)
    with pytest.raises(DataError, match="30 draws gave no new command for HassClimateSetTemperature"):
        writer.one("HassClimateSetTemperature", held_out=False)
    assert writer.rejected > 10
    assert writer.one("HassTurnOn", held_out=False).label["intent"] == "HassTurnOn"


# -------------------------------------------------------------------------------------------------------------- files


def test_ensure_writes_once_and_reuses(tmp_path, made, generated_before):
    first = home_intents.ensure(tmp_path / "deep" / "data")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["data"]
    assert sorted(path.name for path in first["about"].parent.iterdir()) == [
        "about.json",
        "test.jsonl",
        "train.jsonl",
    ]
    assert [len(first[split].read_text().splitlines()) for split in ("train", "test")] == [640, 200]
    assert [json.loads(line) for line in first["test"].read_text().splitlines()] == made.test
    about = json.loads(first["about"].read_text())
    assert (about["seed"], about["rows"]) == (11, {"train": 640, "test": 200})
    assert about["held_out"]["fan"] == ["box fan", "desk fan"]
    assert about["packages"]["hassil"] == importlib.metadata.version("hassil")
    assert home_intents.ensure(tmp_path / "deep" / "data") == first
    assert len(generated_before) == 1


def test_older_and_incomplete_folders_are_made_again(tmp_path, generated_before, monkeypatch):
    files = home_intents.ensure(tmp_path / "data")
    files["test"].unlink()
    assert home_intents.ensure(tmp_path / "data")["test"].exists()
    monkeypatch.setattr(home_intents, "_REVISION", 99)
    home_intents.ensure(tmp_path / "data")
    assert len(generated_before) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupted_write_leaves_nothing_half_made(tmp_path, generated_before, monkeypatch, at):
    calls = []

    def interrupted(descriptor):
        calls.append(descriptor)
        if len(calls) == at:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            home_intents.ensure(tmp_path / "data")
    assert list(tmp_path.iterdir()) == []
    assert home_intents.ensure(tmp_path / "data")["about"].exists()


def test_a_quicker_process_is_no_error(tmp_path, made, generated_before, monkeypatch):
    """Both find nothing, both write; the other one gets the name first, between our two renames."""
    folder, replace = tmp_path / "data", os.replace

    def second(source, target):
        if target == folder:
            folder.mkdir()
            home_intents._write(made, folder)
        replace(source, target)

    monkeypatch.setattr(os, "replace", second)
    assert home_intents.ensure(folder)["train"].exists()
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_files_of_others_and_edited_files_are_kept(tmp_path, generated_before):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(DataError, match=r"notes\.txt was not written by finetune"):
        home_intents.ensure(tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"
    train = home_intents.ensure(tmp_path / "data")["train"]
    train.write_text(train.read_text() + "{}\n")
    with pytest.raises(DataError, match=r"train\.jsonl was not written by finetune or was changed since"):
        home_intents.ensure(tmp_path / "data")
    assert train.read_text().endswith("{}\n")


def test_a_place_that_cannot_be_written_is_said(tmp_path, generated_before):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DataError, match="cannot be written"):
            home_intents.ensure(place)


def test_the_command_writes_and_names_the_files(tmp_path, generated_before, capsys):
    assert home_intents.main(["--out", str(tmp_path / "data")]) == 0
    names = ["train.jsonl", "test.jsonl", "about.json"]
    assert capsys.readouterr().out.split() == [str(tmp_path / "data" / name) for name in names]


def test_the_cache_follows_the_variable(tmp_path, generated_before, monkeypatch):
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    train = home_intents.path("train")
    assert train.name == "train.jsonl"
    assert re.fullmatch("home-intents-[0-9a-f]{12}", train.parent.name)
    monkeypatch.setattr(home_intents, "_REVISION", 99)
    assert home_intents.path("test").parent != train.parent


# ----------------------------------------------------------------------------------------------------------- packages


@pytest.mark.parametrize("package", ["hassil", "home_assistant_intents"])
def test_a_missing_package_is_said(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError) as error:
        home_intents.generate()
    assert package in error.value.what
    assert error.value.hint.endswith("pip install home-assistant-intents hassil")


def test_a_missing_package_is_said_before_anything_is_written(tmp_path, monkeypatch, capsys):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert home_intents.main(["--out", str(tmp_path / "data")]) == 2
    assert "'home-assistant-intents', which is not installed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_templates_that_are_gone_are_said():
    data = home_intents._package_data()
    del data["intents"]["HassStartTimer"]
    with pytest.raises(DataError, match="has no sentence for HassStartTimer"):
        home_intents._Writer(data, seed=1)


def test_importing_is_light():
    code = "import sys, finetune.home_intents; print(sorted({'torch', 'datasets', 'hassil'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
