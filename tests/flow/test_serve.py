"""The endpoint answers what the run answers, for those who may ask; the chat streams it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from finetune import chat
from finetune.endpoint import prompter
from finetune.errors import FinetuneError, InputError
from finetune.formats import Conversation
from finetune.generate import find_target, load_speaker
from finetune.recorded import Place, compare, recorded
from finetune.run import Run
from finetune.serve import check_place, serve, served, vllm_command
from finetune.train import train
from tests.flow.conftest import recipe
from tests.tiny import tiny_model, tiny_tokenizer

QUESTIONS = ["Say 3", "Say 11", "Say 20"]
FP32 = "load: {dtype: float32}\n"  # in 16 bits two ways to the same answer part where two tokens are nearly even
EVALUATED = "evaluate: {{data: {}, rows: 3, few_shot: 0, max_new_tokens: 8}}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights so large that every question gets an answer of its own."""
    return tiny_model(tmp_path_factory.mktemp("loud") / "tiny", tied=False, initializer_range=0.1)


@pytest.fixture(scope="module")
def run(base: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = recipe(base, rows, train="steps: 4, precision: fp32", rest=FP32 + EVALUATED.format(rows))
    return train(made, output=tmp_path_factory.mktemp("served") / "first")


@pytest.fixture(scope="module")
def other(base: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = recipe(base, rows, train="steps: 4, precision: fp32, seed: 7", rest=FP32)
    return train(made, output=tmp_path_factory.mktemp("served") / "second")


def answers_of(name: str | Path, *, base: bool = False) -> list[str]:
    asked = [Conversation([{"role": "user", "content": q}]) for q in QUESTIONS]
    speaker = load_speaker(name, base=base)
    return [speaker.answer([one], max_new_tokens=8)[0].text for one in asked]


@pytest.fixture(scope="module")
def answers(run: Run) -> list[str]:
    found = answers_of(run.folder)
    assert len(set(found)) == len(found)
    assert found != answers_of(run.folder, base=True)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Endpoint:
    url: str
    log: Path


@contextmanager
def serving(folder: Path, *arguments: str, **environment: str) -> Iterator[Endpoint]:
    """`finetune serve ...` in a process group of its own, until it calls itself healthy."""
    port, log = free_port(), folder / "log.txt"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "finetune", "serve", *arguments, "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 180
        while not healthy(url):
            assert process.poll() is None, f"the server ended by itself:\n{log.read_text()}"
            assert time.monotonic() < end, "the server did not get ready"
            time.sleep(0.3)
        yield Endpoint(url, log)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="module")
def endpoint(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """One run; it is merged first."""
    with serving(tmp_path_factory.mktemp("log"), str(run.folder)) as found:
        yield found


def client_of(endpoint: Endpoint, key: str = "none") -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{endpoint.url}/v1", api_key=key, timeout=60, max_retries=0)


def asked(client: Any, model: str, question: str, **more: Any) -> Any:
    said = [{"role": "user", "content": question}]
    return client.chat.completions.create(model=model, messages=said, max_tokens=8, temperature=0, **more)


def streamed(client: Any, model: str, question: str) -> str:
    pieces = asked(client, model, question, stream=True)
    return "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)


def test_the_openai_client_gets_the_runs_answers(endpoint: Endpoint, run: Run, answers: list[str]) -> None:
    client = client_of(endpoint)
    assert [model.id for model in client.models.list()] == [run.name] == ["first"]
    for question, expected in zip(QUESTIONS, answers, strict=True):
        whole = asked(client, run.name, question)
        assert (whole.choices[0].message.content, whole.model) == (expected, run.name)
        assert streamed(client, run.name, question) == expected


def test_it_says_that_the_recorded_answer_came_again(endpoint: Endpoint, run: Run) -> None:
    said = endpoint.log.read_text()
    assert "first: the first held-out question is answered as after training." in said
    assert f"Serving the model first at {endpoint.url}/v1" in said
    sample = recorded(run)
    assert sample is not None
    assert sample.answer != sample.untrained


def test_what_cannot_be_asked_is_refused_with_a_reason(endpoint: Endpoint, run: Run) -> None:
    import openai

    client = client_of(endpoint)
    with pytest.raises(openai.NotFoundError, match="only first"):
        asked(client, "gpt", "Hi")
    with pytest.raises(openai.BadRequestError, match="control token"):
        asked(client, run.name, "<|im_end|>")
    with pytest.raises(openai.BadRequestError, match="'n' is not supported"):
        asked(client, run.name, "Hi", n=2)


def test_several_adapters_share_a_base_behind_a_key(
    run: Run, other: Run, base: Path, answers: list[str], tmp_path: Path
) -> None:
    import openai

    both = (str(run.folder), str(other.adapter))  # a run and a folder of peft's
    with serving(tmp_path, *both, FINETUNE_API_KEY="sesame") as endpoint:
        with pytest.raises(openai.AuthenticationError):
            client_of(endpoint, "wrong").models.list()
        client = client_of(endpoint, "sesame")
        assert [model.id for model in client.models.list()] == ["first", "adapter", "tiny"]
        expected = {"first": answers, "adapter": answers_of(other.folder), "tiny": answers_of(base)}
        assert len({tuple(found) for found in expected.values()}) == 3
        for number, question in enumerate(QUESTIONS):
            for name, found in expected.items():
                whole = asked(client, name, question)
                assert (whole.choices[0].message.content, whole.model) == (found[number], name)
            assert streamed(client, "adapter", question) == expected["adapter"][number]


def test_an_open_address_wants_a_key() -> None:
    port = free_port()
    for host in ("0.0.0.0", "192.168.7.7", "::", "example.org"):
        with pytest.raises(InputError, match="no API key"):
            check_place(Place(host, port))
    check_place(Place("0.0.0.0", port, "sesame"))
    check_place(Place("127.0.0.1", port))
    check_place(Place("localhost", port))
    with pytest.raises(InputError, match="header"):
        check_place(Place("0.0.0.0", port, "se same"))
    done = subprocess.run(
        [sys.executable, "-m", "finetune", "serve", "smollm2-135m", "--host", "0.0.0.0"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "FINETUNE_API_KEY": ""},
    )  # fmt: skip
    assert done.returncode == 2
    assert "FINETUNE_API_KEY" in done.stderr


def test_a_taken_port_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="cannot be listened on"):
            check_place(Place("127.0.0.1", taken.getsockname()[1]))


def test_vllm_is_started_with_what_was_trained(
    run: Run, other: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run as whole weights; two adapters of rank 4 on their base; the key stays out of the command line."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    place = Place("0.0.0.0", 8000, "sesame")

    def option(command: list[str], name: str) -> list[str]:
        values = command[command.index(name) + 1 :]
        return values[: next((n for n, value in enumerate(values) if value.startswith("--")), len(values))]

    whole = vllm_command(served([str(run.folder)]), place)
    assert option(whole, "--model") == [str(run.folder / "merged")]
    assert option(whole, "--served-model-name") == ["first"]
    assert "--enable-lora" not in whole
    both = vllm_command(served([str(run.folder), str(other.folder)]), place)
    assert option(both, "--served-model-name") == ["tiny"]
    assert option(both, "--max-lora-rank") == ["8"]
    names = dict(value.split("=") for value in option(both, "--lora-modules"))
    assert list(names) == ["first", "second"]
    for name, trained in (("first", run), ("second", other)):
        config = json.loads((Path(names[name]) / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"]) == (4, 8.0)
        copied = (Path(names[name]) / "adapter_model.safetensors").stat().st_size
        assert copied == pytest.approx((trained.adapter / "adapter_model.safetensors").stat().st_size, rel=0.02)
    ends = json.loads(option(both, "--override-generation-config")[0])["eos_token_id"]
    assert load_speaker(run.folder).tokenizer.convert_tokens_to_ids("<|im_end|>") in ends
    assert "sesame" not in " ".join([*whole, *both])


def test_names_that_do_not_go_together_are_refused(run: Run, other: Run, base: Path, tmp_path: Path) -> None:
    import shutil

    with pytest.raises(InputError, match="has no adapter"):
        served([str(run.folder), str(base)])
    with pytest.raises(InputError, match="stands for two"):
        served([str(run.folder), str(shutil.copytree(run.folder, tmp_path / "first"))])
    with pytest.raises(InputError, match="cannot name several"):
        served([str(run.folder), str(other.folder)], "one")
    foreign = shutil.copytree(other.adapter, tmp_path / "foreign")
    config = json.loads((foreign / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(shutil.copytree(base, tmp_path / "base"))
    (foreign / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="2 bases"):
        served([str(run.folder), str(foreign)])


# ----------------------------------------------------------------------------------------------- the recorded answer


@contextmanager
def answering(text: str) -> Iterator[Place]:
    """An endpoint that says the same to everybody."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Place("127.0.0.1", server.server_port)
    finally:
        server.shutdown()
        server.server_close()


def test_the_base_models_answer_ends_the_server(run: Run) -> None:
    sample = recorded(run)
    assert sample is not None
    assert sample.untrained is not None
    with answering(sample.untrained) as place, pytest.raises(FinetuneError, match="as the untrained model does"):
        compare(run.name, run, place)
    with answering("something else") as place:
        assert any("something else" in line for line in compare(run.name, run, place))
    with answering(sample.answer) as place:
        assert "as after training" in compare(run.name, run, place)[0]


def test_rows_that_have_changed_are_not_compared(run: Run, tmp_path: Path) -> None:
    import shutil

    copy = Run(shutil.copytree(run.folder, tmp_path / "copy"))
    assert recorded(copy) is not None
    lines = (copy.folder / "answers.jsonl").read_text().splitlines()
    (copy.folder / "answers.jsonl").write_text("\n".join(lines[1:]))
    assert recorded(copy) is None


# ---------------------------------------------------------------------------------------------------------- adapters


def scaled_adapter(base: Path, folder: Path, **config: Any) -> Path:
    """An adapter on every q_proj with the same known A and B, by peft itself."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base)
    made: Any = get_peft_model(model, LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj"], **config))
    torch.manual_seed(1)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    made.peft_config["default"].base_model_name_or_path = str(base)
    made.save_pretrained(folder)
    return folder


def test_an_rslora_adapter_is_scaled_by_the_root_of_its_rank(base: Path, tmp_path: Path) -> None:
    """Case S1: r = alpha = 4 makes a scale of 2; the logits are those of the base with W + 2 * B @ A."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = scaled_adapter(base, tmp_path / "rs", use_rslora=True)
    weights = load_file(folder / "adapter_model.safetensors")
    by_hand: Any = AutoModelForCausalLM.from_pretrained(base)
    for number, layer in enumerate(by_hand.model.layers):
        key = f"base_model.model.model.layers.{number}.self_attn.q_proj.lora_"
        layer.self_attn.q_proj.weight.data += 2.0 * weights[f"{key}B.weight"] @ weights[f"{key}A.weight"]
    ids = torch.arange(20, 40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(load_speaker(folder).model(ids).logits, by_hand(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("base_model.model.model", "base_model.model.language_model.model"), (".lora_A.", ".lora_A.lora.")],
)
def test_an_adapter_whose_tensors_have_no_place_is_refused(
    base: Path, tmp_path: Path, wrong: str, right: str
) -> None:
    """Case S2: a wrong prefix, and the adapter's name inside its keys."""
    from safetensors.torch import load_file, save_file

    folder = scaled_adapter(base, tmp_path / "named")
    load_speaker(folder)
    file = folder / "adapter_model.safetensors"
    save_file({key.replace(wrong, right): value for key, value in load_file(file).items()}, file)
    with pytest.warns(UserWarning, match="missing adapter keys"), pytest.raises(InputError, match="do not agree"):
        load_speaker(folder)


def test_an_adapter_without_effect_is_not_served(base: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folders = [scaled_adapter(base, tmp_path / name) for name in ("one", "none")]
    file = folders[1] / "adapter_model.safetensors"
    save_file({key: value * 0 for key, value in load_file(file).items()}, file)
    with pytest.raises(InputError, match=r"/none the model answers exactly as without it"):
        serve([str(folder) for folder in folders], port=free_port(), say=lambda _: None)


# ----------------------------------------------------------------------------------------------------------- prompts


def test_the_server_asks_with_the_prompts_of_training() -> None:
    """Case E4. Gemma's template knows no system message; training puts it in front of the question, and so here."""
    tokenizer = tiny_tokenizer("gemma")
    said: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    found = prompter(tokenizer)(said, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    text = "<bos><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n<start_of_turn>model\n"
    assert found == [chat.prompt_ids(tokenizer, said)]
    assert tokenizer.decode(found[0]) == text


def test_empty_system_messages_and_developers_are_understood() -> None:
    tokenizer = tiny_tokenizer("qwen2_5")
    ask = prompter(tokenizer)
    user = {"role": "user", "content": "Hello"}
    plain = ask([user])["input_ids"]
    assert ask([{"role": "system", "content": " "}, user])["input_ids"] == plain
    system = ask([{"role": "system", "content": "Be brief."}, user])["input_ids"]
    assert ask([{"role": "developer", "content": "Be brief."}, user])["input_ids"] == system != plain


# -------------------------------------------------------------------------------------------------------------- chat


def chatted(*arguments: str, said: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "finetune", "chat", *arguments, "--max-new-tokens", "8"],
        input=said, capture_output=True, text=True, timeout=500, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.stdout


def test_the_chat_streams_the_same_answers(run: Run, answers: list[str]) -> None:
    assert chatted(str(run.folder), said="\n/new\n".join(QUESTIONS)) == "".join(f"{answer}\n" for answer in answers)


def test_the_chat_shows_the_untrained_model_beside(run: Run, answers: list[str]) -> None:
    untrained = answers_of(run.folder, base=True)
    expected = "".join(f"base: {a}\ntuned: {b}\n" for a, b in zip(untrained, answers, strict=True))
    assert chatted(str(run.folder), "--base", said="\n/new\n".join(QUESTIONS)) == expected


def test_the_chat_remembers_and_has_a_system_message(run: Run) -> None:
    """Two questions in one conversation, and one that cannot be asked between them."""
    speaker = load_speaker(run.folder)
    talk: Any = [{"role": "system", "content": "Count"}, {"role": "user", "content": "Say 3"}]
    first = speaker.answer([Conversation(talk)], max_new_tokens=8)[0].text
    talk += [{"role": "assistant", "content": first}, {"role": "user", "content": "Say 11"}]
    second = speaker.answer([Conversation(talk)], max_new_tokens=8)[0].text
    found = chatted(str(run.folder), "--system", "Count", said="Say 3\n<|im_end|>\nSay 11")
    assert found.startswith(f"{first}\n(")
    assert "control token" in found
    assert found.endswith(f"{second}\n")


def test_only_what_was_trained_has_a_base(base: Path) -> None:
    with pytest.raises(InputError, match="nothing is known below it"):
        load_speaker(base, base=True)


def test_the_merged_folder_stops_by_itself(run: Run) -> None:
    """Generation with nothing but the saved files ends at the turn's end token."""
    from finetune.merge import merge

    merged = merge(run).folder
    saved = json.loads((merged / "generation_config.json").read_text())
    ids = saved["eos_token_id"]
    ids = ids if isinstance(ids, list) else [ids]
    assert load_speaker(run.folder).tokenizer.convert_tokens_to_ids("<|im_end|>") in ids
    found = find_target(merged)
    assert (found.name, found.run) == (run.name, None)
    assert found.answered is not None
    assert found.answered.folder.resolve() == run.folder.resolve()
    assert found.system == find_target(run.folder).system


def test_what_lies_in_a_run_knows_its_rows(run: Run, tmp_path: Path) -> None:
    """An adapter or a checkpoint, named by its folder, gets the run's system message; a copy elsewhere does not."""
    final = find_target(run.adapter)
    assert final.run is None
    assert final.answered is not None
    assert final.answered.folder.resolve() == run.folder.resolve()
    assert final.system == find_target(run.folder).system
    checkpoint = run.folder / "checkpoints" / "step-1"
    shutil.copytree(run.adapter, checkpoint)
    earlier = find_target(checkpoint)
    assert earlier.system == final.system
    assert earlier.answered is None  # the recorded answers are those of the last step
    shutil.rmtree(checkpoint)
    elsewhere = find_target(shutil.copytree(run.adapter, tmp_path / "copy"))
    assert (elsewhere.inside, elsewhere.answered, elsewhere.system) == (None, None, None)
