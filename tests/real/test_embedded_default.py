"""`finetune train smollm2-lora` whole: the scores that the README shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.recipe import load_recipe
from finetune.train import train


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_default_recipe_reaches_its_scores(tmp_path: Path) -> None:
    run = train(load_recipe("smollm2-lora"), output=tmp_path / "run")
    arms = {arm["name"]: arm for arm in run.read("evaluation.json")["arms"]}
    assert arms["untrained, zero-shot"]["exact_match"] <= 0.05
    assert arms["tuned"]["exact_match"] >= 0.70
    assert arms["tuned"]["valid_json"] >= 0.98
    assert arms["tuned"]["exact_match"] > arms["untrained, 4-shot"]["exact_match"] + 0.3
