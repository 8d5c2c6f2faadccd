"""Every recipe's settings are read, its data are drawn with a seed, and nothing held out is trained on."""

import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from miles.config.cli import resolve

ROOT = Path(__file__).parent.parent.parent
TOMLS = sorted((ROOT / "recipes").glob("*/*.toml"))
SUMS = ROOT / "recipes" / "smollm2-sums"
MAKERS = ["smollm2-sums", "reasoning-gym", "sft-sums"]


def maker(recipe: str) -> Any:
    return runpy.run_path(str(ROOT / "recipes" / recipe / "make_data.py"))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("path", TOMLS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_setting_of_a_recipe_is_known_and_possible(path: Path) -> None:
    args = resolve(["--config", str(path)], check=False)
    written = {name for table in tomllib.loads(path.read_text()).values() for name in table}
    assert written == set(args.origins)


@pytest.mark.parametrize("recipe", MAKERS)
def test_the_same_seed_draws_the_same_data(recipe: str, tmp_path: Path) -> None:
    make = maker(recipe)["make"]
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        make(tmp_path / name, seed=seed)
    for file in ("train.jsonl", "held_out.jsonl"):
        one, two, other = ((tmp_path / name / file).read_bytes() for name in ("one", "two", "other"))
        assert one == two
        assert one != other


@pytest.mark.parametrize("recipe", MAKERS)
def test_nothing_held_out_is_trained_on(recipe: str, tmp_path: Path) -> None:
    maker(recipe)["make"](tmp_path)
    train, held_out = rows(tmp_path / "train.jsonl"), rows(tmp_path / "held_out.jsonl")
    assert len(held_out) == 64
    assert len(train) > 100
    known = {json.dumps(row.get("prompt") or row["messages"][0]) for row in train}
    assert len(known) == len(train), "a problem was drawn twice"
    assert not known & {json.dumps(row.get("prompt") or row["messages"][0]) for row in held_out}


def test_the_mirror_image_of_a_held_out_sum_is_not_trained_on_either(tmp_path: Path) -> None:
    maker("smollm2-sums")["make"](tmp_path)

    def operands(file: str) -> list[frozenset[int]]:
        last = [row["prompt"].splitlines()[-1] for row in rows(tmp_path / file)]
        return [frozenset(map(int, re.findall(r"\d+", line))) for line in last]

    held_out, train = operands("held_out.jsonl"), operands("train.jsonl")
    assert not set(held_out) & set(train)
    assert frozenset({2, 3}) not in {*held_out, *train}, "the solved example"


def test_labels_are_right(tmp_path: Path) -> None:
    maker("smollm2-sums")["make"](tmp_path)
    for row in rows(tmp_path / "train.jsonl") + rows(tmp_path / "held_out.jsonl"):
        a, b = map(int, re.findall(r"\d+", row["prompt"].splitlines()[-1]))
        assert row["label"] == str(a + b)


def test_too_many_held_out_problems_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only 3 different pairs"):
        maker("smollm2-sums")["make"](tmp_path, largest=2, num_held_out=64)


def test_the_three_forms_of_the_sums_are_the_same_task() -> None:
    """They differ in how generation and training take turns, and in nothing that changes what is learned."""
    forms = {name: resolve(["--config", str(SUMS / f"{name}.toml")], check=False).model_dump() for name in ("run", "fully_async", "sync")}
    for name, allowed in (
        ("fully_async", {"name", "fully_async", "max_weight_staleness"}),
        ("sync", {"name", "trainer_threads", "engine_threads"}),
    ):
        assert {key for key, value in forms[name].items() if value != forms["run"][key]} <= allowed
