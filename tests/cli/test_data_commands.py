"""miles show-data and miles check-reward on small files."""

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from miles.cli import check_reward
from miles.cli.main import main
from miles.cli.show_data import coloured
from miles.data.shown import Piece


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi [x]"},
    {"role": "assistant", "content": "A1 日本"},
    {"role": "user", "content": "U2"},
    {"role": "assistant", "content": "A2"},
]


def test_conversations_and_prompts_as_the_model_sees_them(tmp_path, capsys):
    path = write(tmp_path / "c.jsonl", {"messages": CHAT}, {"prompt": "2+2?", "label": "4"}, {"prompt": "3+3?"})
    assert main(["show-data", path, "--hf-checkpoint", "random:tiny", "--rows", "2"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"\[\[(.*?)\]\]", out, re.DOTALL) == ["A1 日本<|im_end|>", "A2<|im_end|>"]
    assert re.findall(r"c\.jsonl:(\d)   (\d+) tokens, (\d+) trained", out)[1][2] == "0"
    assert "hi [x]" in out
    assert "2+2?<|im_end|>⏎\n<|im_start|>assistant⏎" in out
    assert "3+3?" not in out
    assert main(["show-data", path, "--hf-checkpoint", "random:tiny", "--sft", "--first", "2", "--rows=1"]) == 0
    assert re.findall(r"\[\[(.*?)\]\]", capsys.readouterr().out) == ["4<|im_end|>"]


def test_colours_on_a_terminal(capsys):
    terminal = Console(force_terminal=True, color_system="standard", width=80)
    with terminal.capture() as shown:
        terminal.print(coloured([Piece("a", False, 1), Piece("[b]", True, 1), Piece("c", True, 1)], marks=False), end="")
    assert shown.get() == "\x1b[2ma\x1b[0m\x1b[4;32m[b]\x1b[0m\x1b[32mc\x1b[0m"


@pytest.mark.parametrize(
    ("argv", "code", "reason"),
    [
        (["show-data", "{bad}", "--hf-checkpoint", "random:tiny"], 1, r"bad\.jsonl:2: field 'prompt': .*role 'oracle'"),
        (["show-data", "{bad}"], 2, "--hf-checkpoint"),
        (["show-data"], 2, "no data: name a file"),
        (["show-data", "{bad}", "--hf-checkpont", "x"], 2, "did you mean --hf-checkpoint"),
        (["show-data", "nowhere.jsonl", "--hf-checkpoint", "random:tiny"], 1, "no file 'nowhere.jsonl'"),
        (["show-data", "{empty}", "--hf-checkpoint", "random:tiny"], 1, r"empty\.jsonl: no row 1"),
        (["show-data", "{good}", "--hf-checkpoint", "random:tiny", "--first", "2"], 1, r"good\.jsonl: no row 2"),
        (["check-reward", "{bad}"], 2, r"bad\.jsonl:2: field 'prompt'"),
        (["check-reward", "{good}", "--reward", "maths"], 2, "'maths' is neither built in"),
        (["check-reward", "{good}", "--gold-key", "best"], 2, r"good\.jsonl:1: no field 'best'"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(tmp_path, capsys, argv, code, reason):
    good = write(tmp_path / "good.jsonl", {"prompt": "x", "label": "1"})
    bad = write(tmp_path / "bad.jsonl", {"prompt": "x"}, {"prompt": [{"role": "oracle", "content": "x"}]})
    empty = write(tmp_path / "empty.jsonl")
    assert main([word.format(good=good, bad=bad, empty=empty) for word in argv]) == code
    assert re.search(reason, capsys.readouterr().err)


def table(out: str) -> dict[str, list[int]]:
    """Kind of answer -> tried, full reward, between, none, unscored, failed."""
    return {
        line.split()[0]: [int(n) for n in line.split()[1:]] for line in out.splitlines() if re.match(r"\s*(gold|wrong|empty) +\d", line)
    }


LABELS = {
    "math": ["4", r"\frac{1}{2}", "(1,2]", "#### 7"],
    "gsm8k": ["so #### 4", "5"],
    "dapo": ["4", r"\boxed{5}"],
    "multiple_choice": ["A", "B", "A"],
    "exact": ["yes", "no"],
    "last_number": ["4", 5],
    "f1": [["a cat", "cat"], "dog"],
    "math=0.8,think_format=0.2": ["4", "5"],
}


@pytest.mark.parametrize("reward", LABELS)
def test_a_right_reward_passes(tmp_path, capsys, reward):
    path = write(tmp_path / "d.jsonl", *({"prompt": "x", "label": label} for label in LABELS[reward]))
    code = main(["check-reward", path, "--reward", reward, "--reward-workers", "0"])
    out = capsys.readouterr().out
    n = len(LABELS[reward])
    assert code == 0, out
    assert table(out) == {"gold": [n, n, 0, 0, 0, 0], "wrong": [n, 0, 0, n, 0, 0], "empty": [n, 0, 0, n, 0, 0]}


def test_own_gold_answers_in_a_mix_with_think_format_and_how_far_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check_reward, "TOLD_EVERY", -1.0)
    rows = [{"prompt": "x", "label": n, "best": f"{own}so \\boxed{{{n}}}"} for n, own in ((4, ""), (5, "<think>hm</think>\n"))]
    path = write(tmp_path / "d.jsonl", *rows, {"prompt": "x", "best": "\\boxed{1}"})
    assert main(["check-reward", path, "--reward", "math=0.8,think_format=0.2", "--gold-key", "best", "--reward-workers", "0"]) == 1
    said = capsys.readouterr()
    assert table(said.out) == {"gold": [3, 2, 0, 0, 1, 0], "wrong": [3, 0, 0, 2, 1, 0], "empty": [3, 0, 0, 2, 1, 0]}
    assert re.search(r"d\.jsonl:3: the gold answer .* without a label cannot be scored", said.out)
    assert said.err.splitlines()[-1] == "9 of 9 answers are scored"


def test_programs_as_gold_answers(tmp_path, capsys):
    rows = [{"prompt": "x", "label": f"def f(x): return x + {n}", "metadata": {"tests": [f"assert f(1) == {n + 1}"]}} for n in (1, 2)]
    assert main(["check-reward", write(tmp_path / "d.jsonl", *rows), "--reward", "code", "--reward-workers", "0"]) == 0
    rows[1]["metadata"]["tests"].append("assert f(2) == 0")
    assert main(["check-reward", write(tmp_path / "d.jsonl", *rows), "--reward", "code", "--reward-workers", "0"]) == 1
    assert re.search(r"d\.jsonl:2: the gold answer .* gets 0, not 1", capsys.readouterr().out)


def test_rows_that_a_reward_gets_wrong_are_named(tmp_path, capsys):
    path = write(
        tmp_path / "d.jsonl",
        {"prompt": "x", "label": "4"},
        {"prompt": "x", "label": "n/a"},
        {"prompt": "x", "label": "4.0"},
        {"prompt": "x"},
    )
    assert main(["check-reward", path, "--reward-workers", "0"]) == 1
    out = capsys.readouterr().out
    assert table(out)["gold"] == [3, 2, 0, 0, 1, 0]
    assert re.search(r"d\.jsonl:2: the gold answer .* for the label 'n/a' cannot be scored", out)
    assert re.search(r"1 row has no gold answer: .*d\.jsonl:4\n", out)
    assert out.endswith("1 of 11 answers is scored WRONG\n")


def test_the_verdict_counts_what_was_tried(tmp_path, capsys):
    labels = ({"label": "4"}, {}, {"label": "5"}, *({} for _ in range(9)))
    path = write(tmp_path / "d.jsonl", *({"prompt": "x"} | row for row in labels))
    assert main(["check-reward", path, "--reward-workers", "0"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"10 rows have no gold answer: .*d\.jsonl:2, .*d\.jsonl:10 and 2 more\n", out)
    last = out.splitlines()[-1]
    assert last == "the reward tells right from wrong on 2 of 12 rows: 2 gold, 2 wrong and 2 empty answers were scored as they should be"
    assert main(["check-reward", path, "--reward-workers", "0", "--rows", "1"]) == 0
    one = capsys.readouterr().out
    assert one.startswith("1 row, reward math\n")
    assert "there is one row\nall is well as far as it was tried (1 gold, 0 wrong and 1 empty answers)" in one


@pytest.mark.parametrize("rows", [[], [{"prompt": "x", "answer": "4"}, {"prompt": "y", "answer": "5"}]])
def test_nothing_tried_is_no_success(tmp_path, capsys, rows):
    assert main(["check-reward", write(tmp_path / "d.jsonl", *rows), "--reward", "exact", "--reward-workers", "0"]) == 2
    assert capsys.readouterr().out.endswith("no gold answer was tried, so nothing is known of the reward\n")


def test_bad_rows_are_left_out_where_that_is_asked_for(tmp_path, capsys):
    path = write(tmp_path / "d.jsonl", {"prompt": "x", "label": "4"}, {"prompt": 7, "label": "5"}, {"prompt": "y", "label": "6"})
    assert main(["check-reward", path, "--reward-workers", "0", "--skip-bad-rows"]) == 0
    told = capsys.readouterr()
    assert table(told.out)["gold"][0] == 2
    assert "d.jsonl:2: left out: " in told.err
    assert main(["show-data", path, "--hf-checkpoint", "random:tiny", "--skip-bad-rows"]) == 0
    told = capsys.readouterr()
    assert told.out.count("──") == 2
    assert "d.jsonl:2: left out: " in told.err


def test_failures_and_generous_rewards_and_gold_of_ones_own(tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def kind(sample):\n    return 0.5\n\ndef best(sample):\n    return float(sample.response == sample.metadata['is'])\n\n"
        "def fails(sample):\n    raise KeyError('mine')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = write(tmp_path / "d.jsonl", *({"prompt": "x", "label": n, "best": f"b{n}", "metadata": {"is": f"b{n}"}} for n in (1, 2)))
    assert main(["check-reward", path, "--reward", "mine.kind", "--reward-workers", "0"]) == 1
    assert table(capsys.readouterr().out) == {kind: [2, 0, 2, 0, 0, 0] for kind in ("gold", "wrong", "empty")}
    assert main(["check-reward", path, "--reward", "mine.best", "--gold-key", "best", "--reward-workers", "0"]) == 0
    assert main(["check-reward", path, "--reward", "mine.fails", "--rows", "1", "--reward-workers", "0"]) == 1
    assert "d.jsonl:1: the gold answer '1' for the label '1' reward mine.fails: KeyError: 'mine'" in capsys.readouterr().out


def test_sets_of_a_config_each_with_its_reward(tmp_path, capsys):
    write(tmp_path / "a.jsonl", {"prompt": "x", "label": "4"}, {"prompt": "x", "label": "5"})
    write(tmp_path / "b.jsonl", {"prompt": "x", "label": "yes"}, {"prompt": "x", "label": "no"})
    config = tmp_path / "run.toml"
    config.write_text(
        f'[data]\nprompt_data = {{ a = "{tmp_path}/a.jsonl", b = "{tmp_path}/b.jsonl" }}\n'
        '[reward]\nreward_workers = 0\n[reward.reward_by_set]\nb = "exact"\n'
    )
    assert main(["check-reward", "--config", str(config)]) == 0
    assert table(capsys.readouterr().out)["gold"] == [4, 4, 0, 0, 0, 0]
