"""Words of a command line as values."""

import pytest

from miles.config import flags
from miles.config.schema import settings


def value(*words: str):
    found = flags.read(words)
    assert found.problems == []
    (result,) = found.values.values()
    return result


def problem(*words: str) -> str:
    (said,) = flags.read(words).problems
    return said


@pytest.mark.case("C90")
def test_both_ways_of_writing_a_value():
    assert value("--top-k", "8") == value("--top-k=8") == 8
    assert value("--lr", "1e-6") == value("--lr=1e-6") == 1e-6
    assert value("--name", "a b") == "a b"
    assert value("--name=") == ""
    assert value("--name=a=b") == "a=b"
    assert value("--seed", "-3") == -3
    assert flags.read(["--seed", "1", "--seed", "2"]).values == {"seed": 2}


def test_booleans():
    assert value("--fully-async") is True
    assert value("--no-fully-async") is False
    assert value("--fully-async=false") is False
    assert value("--fully-async=true") is True
    assert "must be true or false, got 'maybe'" in problem("--fully-async=maybe")
    assert "takes no value, got yes" in problem("--fully-async", "yes")
    assert "takes no value" in problem("--no-shuffle", "1")


def test_optional_settings_lose_their_value():
    assert value("--no-load") is None
    assert value("--no-eval-interval") is None
    assert "unknown flag" in problem("--no-lr")


def test_lists():
    assert value("--stop", "A", "B") == value("--stop", "A", "--stop", "B") == value("--stop", '["A", "B"]') == ["A", "B"]
    assert value("--stop", "[INST]") == ["[INST]"]
    assert value("--stop=--") == ["--"]
    assert value("--stop", "a,b") == ["a,b"]
    assert value("--stop-token-ids", "1", "2") == value("--stop-token-ids", "[1, 2]") == [1, 2]
    assert value("--no-stop") == []
    assert "needs a value" in problem("--stop")
    assert "must be a whole number" in problem("--stop-token-ids", "x")


def test_tables():
    assert value("--eval-data", "easy=a.jsonl", "hard=b=c.jsonl") == {"easy": "a.jsonl", "hard": "b=c.jsonl"}
    assert value("--eval-data", "easy=a.jsonl", "--eval-data", '{"hard": "b"}') == {"easy": "a.jsonl", "hard": "b"}
    assert value("--chat-template-kwargs", "enable_thinking=false", "style=short", "n=3") == {
        "enable_thinking": False,
        "style": "short",
        "n": 3,
    }
    assert value("--no-eval-data") == {}
    assert "wants name=value, got 'a.jsonl'" in problem("--eval-data", "a.jsonl")
    assert "is not JSON" in problem("--eval-data", "{a: 1}")


def test_what_belongs_to_no_flag():
    assert "'run.toml': belongs to no flag" in problem("run.toml")
    assert "'x': belongs to no flag" in problem("--top-k=3", "x")
    assert "needs one value, got none" in problem("--lr")
    assert "needs one value, got 1 2" in problem("--lr", "1", "2")
    assert "needs one value, got none" in flags.read(["--lr", "--top-k", "3"]).problems[0]


@pytest.mark.parametrize("setting", settings().values(), ids=lambda setting: setting.name)
def test_an_abbreviation_of_any_flag_is_unknown_and_the_right_one_is_named(setting):
    short = setting.flag[:-1]
    if short in {other.flag for other in settings().values()}:
        return
    said = problem(short, "1")
    assert said.startswith(f"{short}: unknown flag; did you mean --")


def test_the_underscored_name_is_unknown_too():
    assert problem("--num_rollout", "3") == "--num_rollout: unknown flag; did you mean --num-rollout?"


def test_every_optional_setting_is_none_by_default():
    """So that a missing key in a file says the same as None."""
    assert [setting.name for setting in settings().values() if setting.optional and setting.default is not None] == []
