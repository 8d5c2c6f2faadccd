"""How names become functions, also in several threads at once."""

import sys
import threading

import pytest

from miles import plugins


def test_two_threads_in_one_circle_of_imports_see_whole_modules(tmp_path, monkeypatch):
    (tmp_path / "circle_one.py").write_text("import circle_two, time\ntime.sleep(0.3)\nLATE = 1\n")
    (tmp_path / "circle_two.py").write_text("import time\ntime.sleep(0.1)\nimport circle_one\n\ndef late():\n    return circle_one.LATE\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(plugins.load("circle_one.LATE"))),
        threading.Thread(target=lambda: found.append(plugins.load("circle_two.late")())),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1, 1]


@pytest.fixture
def modules(tmp_path, monkeypatch):
    (tmp_path / "checked").mkdir()
    (tmp_path / "checked" / "mine.py").write_text("raise RuntimeError('was run')\ndef score(sample): ...\n")
    (tmp_path / "checked" / "broken.py").write_text("def score(sample:\n")
    (tmp_path / "checked" / "lacking.py").write_text("\nimport no_such_library\n")
    (tmp_path / "checked" / "dynamic.py").write_text("from checked.mine import *\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_name_is_checked_without_running_its_module(modules):
    for name in ("checked.mine.score", "checked.dynamic.score", "json.dumps", "math"):
        plugins.check(name, {"math": "nowhere.at.all"}, setting="--reward")
    assert not any(name.startswith("checked") for name in sys.modules)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("scor", "--reward: 'scor' is neither built in nor a dotted path .*; built in are math"),
        ("checked.mine.scor", "--reward: module 'checked.mine' has no 'scor'"),
        ("checked.yours.score", "--reward: no module 'checked.yours' for 'checked.yours.score'"),
        ("no_such_package.module.score", "--reward: no module 'no_such_package.module'"),
        (".score", "--reward: '.score' is neither built in"),
    ],
)
def test_what_cannot_be_loaded_is_said_by_the_check(modules, name, reason):
    for way in (plugins.check,) if "mine" in name else (plugins.check, plugins.load):
        with pytest.raises(ValueError, match=reason):
            way(name, {"math": "nowhere.at.all"}, setting="--reward")


def test_a_module_that_cannot_be_imported_is_named_with_the_line(modules):
    for way in (plugins.check, plugins.load):
        with pytest.raises(
            ValueError, match=r"--reward: module 'checked.broken' cannot be imported: SyntaxError: .* \(.*broken.py, line 1\)"
        ):
            way("checked.broken.score", setting="--reward")
    for name, error in (
        ("lacking", r"ModuleNotFoundError: No module .*lacking.py, line 2"),
        ("mine", r"RuntimeError: was run .*mine.py, line 1"),
    ):
        with pytest.raises(ValueError, match=f"module 'checked.{name}' cannot be imported: {error}"):
            plugins.load(f"checked.{name}.score", setting="--reward")
