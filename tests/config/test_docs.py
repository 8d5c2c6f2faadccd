"""Every setting is documented, and the page is what the settings say."""

from pathlib import Path

from miles.config.docs import default_text, help_text, kind_text, settings_markdown
from miles.config.other_names import nearest
from miles.config.schema import docstrings, settings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_every_setting_has_a_docstring_that_is_a_sentence():
    undocumented = [name for name in settings() if not docstrings().get(name, "").endswith((".", ")"))]
    assert undocumented == []


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == settings_markdown(), "run: miles settings-doc"


def test_help_fits_the_terminal():
    assert max(map(len, help_text("miles train", width=80).splitlines())) <= 130
    assert all(len(line) <= 80 for line in help_text("miles train", width=80).splitlines() if line.startswith(" " * 8))


def test_how_values_and_defaults_are_shown():
    known = settings()
    assert kind_text(known["pause_mode"]) == "retract|in_place|abort"
    assert kind_text(known["eval_data"]) == "NAME=VALUE ..."
    assert kind_text(known["stop_token_ids"]) == "INT ..."
    assert kind_text(known["shuffle"]) == ""
    assert (default_text(known["shuffle"]), default_text(known["load"]), default_text(known["eval_data"])) == ("true", "", "")


def test_the_nearest_name():
    assert nearest("--temprature", ["--temperature", "--top-p"]) == "--temperature"
    assert nearest("--num-roll", ["--num-engines", "--num-rollout"]) == "--num-rollout"
    assert nearest("--zzz", ["--temperature"]) is None
