import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles.config.run_config import RunConfig
from miles.tracking import tracking
from miles.train import sft


def path_of(args):
    (path,) = args.prompt_data.values()
    return path


def conversations(folder: Path, count: int = 24) -> str:
    path = folder / "train.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"What is {n} + 1?"}, {"role": "assistant", "content": str(n + 1)}]} for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def settings(model: str, folder: Path, **changes: Any) -> RunConfig:
    defaults = {
        "hf_checkpoint": model,
        "advantage_estimator": "sft",
        "n_samples_per_prompt": 1,
        "prompt_data": conversations(folder),
        "rollout_batch_size": 8,
        "num_epoch": 2,
        "lr": 3e-3,
        "device": "cpu",
        "run_root": str(folder),
        "console": "quiet",
    }
    return RunConfig(**(defaults | changes))


def test_the_loss_falls_and_the_exported_model_answers(tiny: str, tmp_path: Path) -> None:
    data = conversations(tmp_path)
    args = settings(tiny, tmp_path, num_epoch=5, eval_interval=5, eval_data={"same": data}, global_batch_size=4)
    sft.main(args)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 5 * 3 * 2
    assert losses[0] == pytest.approx(math.log(512), rel=0.1)
    assert losses[-1] < 0.6 * losses[0]
    held = [line["eval/same/loss"] for line in lines if "eval/same/loss" in line]
    assert held[0] == pytest.approx(losses[0], rel=0.1)
    assert held[-1] < 0.6 * held[0]
    exported = tmp_path / "run" / "checkpoints" / "hf"
    assert AutoModelForCausalLM.from_pretrained(exported).config.vocab_size == 512
    assert AutoTokenizer.from_pretrained(exported).chat_template


def test_only_the_assistant_is_trained(tiny: str, tmp_path: Path) -> None:
    args = settings(tiny, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    rows = sft.load_conversations(path_of(args), tokenizer, args)
    (share,) = sft.make_shares(rows[:3], 0, args)
    written = tokenizer.decode(share.data.token_ids[share.data.loss_mask == 1])
    assert written == "1<|im_end|>2<|im_end|>3<|im_end|>"
    assert share.data.token_ids.tolist() == [token for ids, _ in rows[:3] for token in ids]


def test_a_prompt_and_its_label_make_a_conversation(tiny: str, tmp_path: Path) -> None:
    args = settings(tiny, tmp_path)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "What is 3 + 1?", "label": 4}\n')
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    (pair,) = sft.load_conversations(str(tmp_path / "pairs.jsonl"), tokenizer, args)
    assert pair == sft.load_conversations(path_of(args), tokenizer, args)[3]


def test_every_row_once_an_epoch_in_an_order_of_its_own(tiny: str, tmp_path: Path) -> None:
    args = settings(tiny, tmp_path, rollout_batch_size=4)
    first, second = ([row for batch in range(e * 5, e * 5 + 5) for row in sft.batch_rows(batch, 21, args)] for e in (0, 1))
    assert len(set(first)) == len(set(second)) == 20
    assert first != second
    plain = args.model_copy(update={"shuffle": False})
    assert sft.batch_rows(6, 21, plain) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": [{"role": "user"', "line 2"),
        ('{"text": "x"}', "neither a field 'messages'"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no message of the role assistant"),
    ],
)
@pytest.mark.case("C21")
def test_a_bad_row_is_named_by_file_and_line(tiny: str, tmp_path: Path, line: str, reason: str) -> None:
    args = settings(tiny, tmp_path)
    path = tmp_path / "bad.jsonl"
    good = Path(path_of(args)).read_text().splitlines()[0]
    path.write_text(f"{good}\n{line}\n{good}\n")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    with pytest.raises(ValueError, match=reason) as caught:
        sft.load_conversations(str(path), tokenizer, args)
    assert "bad.jsonl, line 2" in str(caught.value)
    assert len(sft.load_conversations(str(path), tokenizer, args.model_copy(update={"skip_bad_rows": True}))) == 2


def test_fewer_rows_than_a_batch_are_refused(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="24 conversations"):
        sft.train(settings(tiny, tmp_path, rollout_batch_size=25))


def test_a_resumed_run_ends_where_a_whole_one_does(tiny: str, tmp_path: Path) -> None:
    whole = sft.train(settings(tiny, tmp_path, save_interval=2))
    checkpoints = tmp_path / "run" / "checkpoints"
    again = sft.train(settings(tiny, tmp_path, load=str(checkpoints / "rollout_000003"), name="again"))
    assert len(whole) == 6
    assert [step["train/loss"] for step in again] == [step["train/loss"] for step in whole[4:]]
    tracking.finish()


def test_two_ranks_of_one_command(tiny: str, tmp_path: Path) -> None:
    sft.main(settings(tiny, tmp_path, num_trainers=2, num_rollout=2, name="two"))
    losses = [step["train/loss"] for step in sft.train(settings(tiny, tmp_path, num_rollout=2, name="one"))]
    lines = (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["train/loss"] for line in lines if "train/loss" in line] == pytest.approx(losses, rel=1e-5)
