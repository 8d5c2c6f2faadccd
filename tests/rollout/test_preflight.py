"""What is wrong with data and plugs is said before anything starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from miles.rollout.preflight import check_run
from tests.rollout.small_run import MakeArgs, write_rows


def test_a_run_that_is_well_is_let_through(make_args: MakeArgs, tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"prompt": "a", "label": "1"}, {"prompt": "b"}])
    for reward in ("math", "tests.rollout.plugs.by_place", "remote"):
        check_run(make_args(2, reward=reward, eval_data={"held_out": held_out}))
    (tmp_path / "saved").mkdir()
    check_run(make_args(2).model_copy(update={"prompt_data": {"saved": str(tmp_path / "saved")}}))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"reward": "mth"}, "--reward: 'mth' is neither"),
        ({"reward": "tests.rollout.plugs.by_plce"}, "--reward: module 'tests.rollout.plugs' has no 'by_plce'"),
        ({"eval_reward": "mth"}, "--eval-reward: 'mth'"),
        ({"rollout_function": "nowhere.rollout"}, "--rollout-function: no module 'nowhere'"),
        ({"generate_function": "multi"}, "--generate-function: 'multi' is neither"),
        ({"group_filter": "spread"}, "--group-filter: 'spread' is neither"),
        ({"tool_functions": "tests.rollout.plugs.TOLS"}, "--tool-functions: .* has no 'TOLS'"),
        ({"eval_function": "nowhere.evaluate"}, "--eval-function: no module 'nowhere'"),
        ({"rollout_batch_size": 65}, "has 64 prompts, fewer than --rollout-batch-size 65"),
        ({"label_key": "answer", "reward": "exact"}, "no row has a field 'answer' .--label-key., and the reward 'exact' compares"),
        ({"curriculum": "levle"}, "line 1: field 'levle' .--curriculum.: missing"),
        ({"prompt_key": "question"}, "line 1: no field 'question' .--prompt-key."),
    ],
)
def test_what_is_wrong_is_said(make_args: MakeArgs, settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_run(make_args(**settings))


def test_an_evaluation_set_is_looked_at_too(make_args: MakeArgs, tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"prompt": "a"}])
    with pytest.raises(ValueError, match=r"held_out\.jsonl: no row has a field 'label'"):
        check_run(make_args(eval_data={"held_out": held_out}, eval_reward="math"))
    write_rows(tmp_path / "held_out.jsonl", [])
    with pytest.raises(ValueError, match=r"held_out\.jsonl: no prompts to use: the file is empty"):
        check_run(make_args(eval_data={"held_out": held_out}))


def test_it_is_cheap() -> None:
    """The libraries that take seconds stay out of the driver."""
    heavy = ("torch", "transformers", "datasets", "ray")
    code = f"import sys, miles.rollout.preflight; print([name for name in {heavy} if name in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert said.stdout.strip() == "[]"
