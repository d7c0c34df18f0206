"""`finetune merge` as a user meets it: a run in, a complete folder out; several, others, the hub; two sentences."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.merge import merge, size_of
from finetune.model_card import licence_of
from finetune.recipe import parse_recipe
from finetune.run import open_or_create
from tests.command import finetune
from tests.test_merge import edit, weights, write_adapter
from tests.tiny import tiny_model, tiny_tokenizer

METHODS = {
    "lora": "{kind: lora, rank: 4, alpha: 12, targets: qv}",
    "qlora": "{kind: qlora, rank: 4, alpha: 12, targets: qv}",
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 base with a card, a licence in it and a generation config of its own."""
    folder = tiny_model(tmp_path_factory.mktemp("base") / "tiny-base", dtype="bfloat16")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# The base\n")
    edit(folder / "generation_config.json", temperature=0.6)
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(base, folder / str(seed), seed=seed) for seed in (1, 2)]


def make_run(folder: Path, base: Path, adapter: Path, kind: str = "lora") -> Path:
    """What `train` leaves: resolved recipe, data.json, result.json, evaluation.json, adapter with its tokenizer."""
    rows = folder.parent / "rows.jsonl"
    talk = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "you are the model"}]}
    rows.write_text("".join(json.dumps(talk) + "\n" for _ in range(6)))
    recipe = parse_recipe(
        f"model: {base}\nload: {{dtype: float32}}\nmethod: {METHODS[kind]}\n"
        f"data: {{train: {rows}, format: messages}}\n"
        "train: {batch_size: 2, micro_batch: 2, optimizer: adamw_torch, precision: fp32, checkpointing: false}\n"
    )
    run, _ = open_or_create(recipe, "run", folder)
    shutil.copytree(adapter, run.adapter)
    tiny_tokenizer().save_pretrained(run.adapter)
    (run.adapter / "generation_config.json").write_text('{"eos_token_id": [6, 8]}')
    run.write(
        "data.json", {"rows_read": 7, "rows_trained": 6, "tokens": 90, "rows_bad": {"empty": 1}, "rows_dropped": 0}
    )
    run.write("result.json", {"steps": 3, "loss": 1.25, "eval_loss": 1.5})
    arms = [
        {"name": "untrained, zero-shot", "exact_match": 0.0, "stop_rate": 0.5},
        {"name": "tuned", "exact_match": 0.75},
    ]
    run.write("evaluation.json", {"rows": 4, "arms": arms})
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """The two sentences of a command that was refused, in one line."""
    code, out, err = finetune(capsys, "merge", *arguments)
    lines = [line for line in err.strip().splitlines() if not line.startswith("Loading weights")]
    assert (code, out, len(lines)) == (2, "", 2), (code, out, err)
    assert lines[0].startswith("finetune: ")
    return " ".join(lines)


# ------------------------------------------------------------------------------------------------------------ one run


def test_a_base_that_is_no_name(tmp_path: Path, adapters: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Refused where the base is looked for, before the adapter is read."""
    adapter = Path(shutil.copytree(adapters[0], tmp_path / "adapter"))
    edit(adapter / "adapter_config.json", base_model_name_or_path=5)
    code, _, err = finetune(capsys, "merge", adapter, "--output", tmp_path / "out")
    assert (code, len(err.splitlines())) == (2, 2)
    assert "'base_model_name_or_path' in" in err


def test_a_run_becomes_a_complete_folder(
    tmp_path: Path, base: Path, adapters: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", base, adapters[0])
    code, out, _ = finetune(capsys, "merge", run)
    assert code == 0
    folder = run / "merged"
    assert f"Merged 4 of 20 tensors (0.00 GB) into {folder}" in out
    assert "Proved on 4 rows: logits equal base + adapter to " in out
    assert "the most likely token is the same in" in out
    assert {file.name for file in folder.iterdir()} == {
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "README.md", "finetune_merge.json",
    }  # fmt: skip
    assert set(json.loads((folder / "generation_config.json").read_text())["eos_token_id"]) == {6, 8}
    proof = json.loads((folder / "finetune_merge.json").read_text())["proof"]
    assert proof["difference"] < 1e-5 < proof["rounding"]


def test_the_card_tells_what_was_done(tmp_path: Path, base: Path, adapters: list[Path]) -> None:
    from transformers import AutoModelForCausalLM

    run = make_run(tmp_path / "run", base, adapters[0])
    folder = merge(run, name="me/tiny-tuned").folder
    card = (folder / "README.md").read_text()
    head = card.split("---")[1]
    assert "license: apache-2.0" in head
    assert "library_name: transformers" in head
    assert "base_model" not in head, "a folder of this machine is no model of the hub"
    for said in (
        "# me/tiny-tuned", "tiny-base, fine-tuned", "bfloat16", "Proved on 4 rows", "rank 4, alpha 12", "rows.jsonl",
        "6 rows, 90 tokens", "1 of 7 rows", "3, mean loss 1.250", "On 4 held-out rows.", "| tuned | 75% |",
        "(6, 8)", 'from_pretrained("me/tiny-tuned"', "vllm serve me/tiny-tuned", "convert_hf_to_gguf.py",
        "ollama create", "is under apache-2.0",
    ):  # fmt: skip
        assert said in card, said
    assert str(tmp_path) not in card
    assert str(base.parent) not in card
    code = card.split("```python\n")[1].split("```")[0].replace("me/tiny-tuned", str(folder))
    names: dict[str, Any] = {}
    exec(code.replace("max_new_tokens=256", "max_new_tokens=2"), names)
    assert isinstance(names["model"], type(AutoModelForCausalLM.from_pretrained(folder)))


def test_licences(tmp_path: Path) -> None:
    assert licence_of("smollm2-135m", tmp_path) == "apache-2.0"
    assert licence_of("x", tmp_path) is None
    (tmp_path / "LICENSE").write_text("\n  Some Licence 1.0\nText")
    assert licence_of("x", tmp_path) == "Some Licence 1.0"
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: gemma\n---\n")
    assert licence_of("x", tmp_path) == "gemma"


def test_json_and_no_proof(
    tmp_path: Path, base: Path, adapters: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", base, adapters[0])
    code, out, _ = finetune(capsys, "merge", run, "--json", "--no-verify", "--dtype", "float32")
    said = json.loads(out)
    assert (code, said["merged"], said["proof"], said["folder"]) == (0, 4, None, str(run / "merged"))
    assert {tensor.dtype for tensor in weights(run / "merged").values()} == {torch.float32}


def test_rows_that_are_gone_are_said(tmp_path: Path, base: Path, adapters: list[Path]) -> None:
    run = make_run(tmp_path / "run", base, adapters[0])
    (tmp_path / "rows.jsonl").unlink()
    result = merge(run)
    assert result.proof is not None
    assert any("on sentences, not on the run's rows" in note and "rows.jsonl" in note for note in result.notes)


def test_a_qlora_run_both_ways(
    tmp_path: Path, base: Path, adapters: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """What the 4 bits cost is measured; with --like-training the packed layers change, and the others do not."""
    run = make_run(tmp_path / "run", base, adapters[0], "qlora")
    code, out, _ = finetune(capsys, "merge", run)
    assert code == 0
    assert "trained beside 4-bit weights and is merged into the 16- or 32-bit ones" in out
    assert "of 64 places. --like-training" in out
    code, out, _ = finetune(capsys, "merge", run, "--like-training", "--output", tmp_path / "like")
    assert code == 0
    assert "The weights are the 4-bit ones that the adapter was trained beside" in out
    before, plain, like = weights(base), weights(run / "merged"), weights(tmp_path / "like")
    up = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(plain[up], before[up])
    assert not torch.equal(like[up], before[up])
    assert torch.equal(like["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_shards_of_a_size(tmp_path: Path, base: Path, adapters: list[Path]) -> None:
    """Tensors in the base's order; a file holds as many as fit, and one that is larger alone."""
    run = make_run(tmp_path / "run", base, adapters[0])
    one = weights(merge(run, verify=False).folder)
    result = merge(run, tmp_path / "many", max_shard=30_000, verify=True)
    files = sorted(result.folder.glob("*.safetensors"))
    sizes = [[t.numel() * t.element_size() for t in load_file(file).values()] for file in files]
    assert len(files) > 3
    assert [file.name for file in files] == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert all(sum(each) <= 30_000 or len(each) == 1 for each in sizes)
    assert all(sum(each) + after[0] > 30_000 or len(each) == 1 for each, after in zip(sizes, sizes[1:], strict=False))
    many = weights(result.folder)
    assert set(many) == set(one)
    assert all(torch.equal(many[name], one[name]) for name in one)
    assert result.proof is not None
    assert [path.name for path in merge(run, tmp_path / "whole", max_shard=10**9).folder.glob("*.safetensors")] == [
        "model.safetensors"
    ]


def test_sizes_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert (size_of("5GB"), size_of("4 GiB"), size_of("1.5mb")) == (5 * 10**9, 4 * 2**30, 1_500_000)
    for wrong in ("5", "GB", "0GB", "-1GB", "five"):
        assert f"'{wrong}' is no size of a file." in refused(capsys, "run", f"--max-shard-size={wrong}")


# ------------------------------------------------------------------------------------------ several, and without runs


def test_several_runs_and_adapters(
    tmp_path: Path, base: Path, adapters: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", base, adapters[0])
    code, out, _ = finetune(capsys, "merge", run, adapters[1], "--weights", "0.7,0.3", "--output", tmp_path / "both")
    assert code == 0
    assert "Proved on" in out
    name = "model.layers.0.self_attn.q_proj"
    expected = weights(base)[f"{name}.weight"].double()
    for adapter, share in zip(adapters, (0.7, 0.3), strict=True):
        change = load_file(adapter / "adapter_model.safetensors")
        a, b = (change[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "AB")
        expected += share * 3 * b @ a
    got = weights(tmp_path / "both")[f"{name}.weight"]
    assert ((got - expected).abs() <= 2**-8 * expected.abs() + 1e-9).all()  # half a step of bfloat16


def test_another_way_to_combine(
    tmp_path: Path, base: Path, adapters: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", base, adapters[0])
    how = ("--combine", "ties", "--density", "0.3", "--output", tmp_path / "both")
    code, out, _ = finetune(capsys, "merge", run, adapters[1], *how)
    assert code == 0
    assert "Proved on" in out
    assert "The 2 adapters were made one by ties at density 0.3, and that one is merged and proved." in out
    assert "'tie' is no way to combine adapters. Give sum" in refused(capsys, run, adapters[1], "--combine", "tie")
    assert "2 is no density" in refused(capsys, run, adapters[1], "--combine", "ties", "--density", "2")
    assert "one adapter, and nothing to combine" in refused(capsys, run, "--combine", "ties")


def test_an_adapter_without_its_run(
    tmp_path: Path, base: Path, adapters: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = shutil.copytree(adapters[0], tmp_path / "adapter")
    assert "has no folder of its own" in refused(capsys, adapter)
    assert finetune(capsys, "merge", adapter, "--output", tmp_path / "named")[0] == 0
    edit(adapter / "adapter_config.json", base_model_name_or_path="")
    assert "does not say what its base is. Name it with --base." in refused(
        capsys, adapter, "--output", tmp_path / "x"
    )
    edit(adapter / "adapter_config.json", base_model_name_or_path="someone/elsewhere")
    moved = shutil.copytree(base, tmp_path / "moved")
    code, out, _ = finetune(capsys, "merge", adapter, "--base", moved, "--output", tmp_path / "out")
    assert code == 0
    assert "adapter names someone/elsewhere as its base; whether" in out
    assert not (tmp_path / "x").exists()


def test_a_checkpoint_of_a_run(tmp_path: Path, base: Path, adapters: list[Path]) -> None:
    """It is merged into the run's base and proved on its rows; several ones do not overwrite each other."""
    run = make_run(tmp_path / "run", base, adapters[0])
    for step, adapter in enumerate(adapters, 1):
        shutil.copytree(adapter, run / "checkpoints" / f"step-{step}")
    folders = [merge(run / "checkpoints" / f"step-{step}", tmp_path / f"at-{step}").folder for step in (1, 2)]
    marks = [json.loads((folder / "finetune_merge.json").read_text()) for folder in folders]
    assert marks[0]["adapter"]["sha256"] != marks[1]["adapter"]["sha256"]
    assert "rows.jsonl" in (folders[0] / "README.md").read_text()


def test_another_base_is_refused(
    tmp_path: Path, base: Path, adapters: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The same shapes and other weights: only the fingerprint tells them apart."""
    other = tiny_model(tmp_path / "other", dtype="bfloat16", seed=7)
    said = refused(capsys, adapters[0], "--base", other, "--output", tmp_path / "out")
    assert f"was trained on {base}, and {other} holds other weights. Merge it into its own base" in said
    stranger = write_adapter(other, tmp_path / "stranger")
    run = make_run(tmp_path / "run", base, adapters[0])
    assert "stranger was trained on" in refused(capsys, run, stranger, "--output", tmp_path / "out")
    merged = merge(run, verify=False).folder
    assert "is already a merge result" in refused(capsys, adapters[0], "--base", merged, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_else_is_refused(
    tmp_path: Path, base: Path, adapters: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", base, adapters[0])
    assert "2 adapters and 1 weights" in refused(
        capsys, run, adapters[1], "--weights", "1", "--output", tmp_path / "o"
    )
    assert "--weights a,b is no list of numbers" in refused(capsys, run, "--weights", "a,b")
    assert "was not trained beside 4-bit weights" in refused(capsys, run, "--like-training")
    assert "'int8' is no type to merge into" in refused(capsys, run, "--dtype", "int8")
    assert "There is no run folder nowhere" in refused(capsys, "nowhere")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    assert "is not an empty folder" in refused(capsys, run, "--output", tmp_path / "full")
    shutil.rmtree(run / "adapter")
    assert "has no trained adapter yet" in refused(capsys, run)
    assert not (run / "merged").exists()


# ---------------------------------------------------------------------------------------------------------- the hub


class Hub:
    """What HfApi is asked for, remembered."""

    endpoint = "https://hub.invalid"
    files: dict[str, list[str]]
    calls: list[tuple[str, dict[str, Any]]]
    account: str | None = "me"

    def whoami(self) -> dict[str, str]:
        if self.account is None:
            raise OSError("Invalid user token")
        return {"name": self.account}

    def repo_exists(self, name: str) -> bool:
        return name in self.files

    def list_repo_files(self, name: str) -> list[str]:
        return self.files[name]

    def create_repo(self, name: str, **more: Any) -> None:
        self.calls.append(("create", {"name": name, **more}))

    def upload_folder(self, **more: Any) -> None:
        self.calls.append(("folder", more))

    def upload_file(self, **more: Any) -> None:
        self.calls.append(("file", more))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    import huggingface_hub

    fresh = type("FreshHub", (Hub,), {"files": {}, "calls": []})
    monkeypatch.setattr(huggingface_hub, "HfApi", fresh)
    return fresh


@pytest.mark.parametrize("public", [False, True])
def test_push_is_private_unless_told_otherwise(
    tmp_path: Path, base: Path, adapters: list[Path], capsys: pytest.CaptureFixture[str], hub: type[Hub], public: bool
) -> None:
    run = make_run(tmp_path / "run", base, adapters[0])
    code, out, _ = finetune(capsys, "merge", run, "--push", "me/tuned", *["--public"] * public)
    assert code == 0
    assert "https://hub.invalid/me/tuned" in out
    assert hub.calls[0] == ("create", {"name": "me/tuned", "private": not public, "exist_ok": True})
    assert hub.calls[1][1]["folder_path"] == str(run / "merged")
    assert hub.calls[1][1]["ignore_patterns"] == ["finetune_merge.json"]
    mark = json.loads(hub.calls[2][1]["path_or_fileobj"])
    assert len(mark["base"]["sha256"]) == 64
    assert str(tmp_path) not in hub.calls[2][1]["path_or_fileobj"].decode()
    assert "# me/tuned" in (run / "merged" / "README.md").read_text()


def test_what_the_hub_would_refuse_is_seen_before_the_work(
    tmp_path: Path, base: Path, adapters: list[Path], capsys: pytest.CaptureFixture[str], hub: type[Hub],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run = make_run(tmp_path / "run", base, adapters[0])
    assert "'tuned' is no name on the hub. Write it as owner/name." in refused(capsys, run, "--push", "tuned")
    hub.files = {"me/theirs": ["model.safetensors"]}
    assert "already has a model me/theirs" in refused(capsys, run, "--push", "me/theirs")
    monkeypatch.setattr(hub, "account", None)
    assert "Invalid user token. Sign in with `hf auth login`" in refused(capsys, run, "--push", "me/tuned")
    assert not hub.calls
    assert not (run / "merged").exists()


def test_an_upload_that_stops_leaves_the_folder_and_goes_on(
    tmp_path: Path, base: Path, adapters: list[Path], capsys: pytest.CaptureFixture[str], hub: type[Hub],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def stop(self: Hub, **more: Any) -> None:
        raise ConnectionError("The line is cut")

    run = make_run(tmp_path / "run", base, adapters[0])
    with monkeypatch.context() as patch:
        patch.setattr(hub, "upload_folder", stop)
        code, _, err = finetune(capsys, "merge", run, "--push", "me/tuned")
    assert code == 1
    assert "its upload as me/tuned stopped: The line is cut.\nThe same command goes on with the upload." in err
    stamp = (run / "merged" / "model.safetensors").stat().st_mtime_ns
    hub.files = {"me/tuned": [".gitattributes"]}
    assert finetune(capsys, "merge", run, "--push", "me/tuned")[0] == 0
    assert (run / "merged" / "model.safetensors").stat().st_mtime_ns == stamp
    assert [name for name, _ in hub.calls][-2:] == ["folder", "file"]


def test_the_lines_of_the_page_are_commands() -> None:
    from tests.test_docs import ROOT, check_parses, finetune_lines

    lines = [line for _, line, _ in finetune_lines(ROOT / "docs" / "merge.md")]
    assert len(lines) == 7
    for line in lines:
        check_parses(line.split()[1:])
