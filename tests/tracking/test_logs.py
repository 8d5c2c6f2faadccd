import logging

import pytest

from miles.tracking import logs


@pytest.fixture(autouse=True)
def _root_as_it_was():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


def test_the_file_gets_what_the_terminal_does_not_want(tmp_path, capsys):
    logs.setup("warning", tmp_path / "logs" / "driver.log")
    logging.getLogger("miles.rollout.x").info("an aside")
    logging.getLogger("miles.rollout.x").warning("mind this")
    text = (tmp_path / "logs" / "driver.log").read_text()
    assert "I rollout.x: an aside" in text
    said = capsys.readouterr().err
    assert "W rollout.x: mind this" in said
    assert "aside" not in said


def test_a_second_set_up_replaces_the_first(tmp_path, capsys):
    for _ in range(3):
        logs.setup("info", tmp_path / "a.log")
    logging.getLogger("miles.x").info("once")
    assert capsys.readouterr().err.count("once") == 1
    assert (tmp_path / "a.log").read_text().count("once") == 1


def test_tracebacks_are_logged(capsys):
    logs.setup("info")
    try:
        raise KeyError("lost")
    except KeyError:
        logging.getLogger("miles.x").exception("it failed")
    said = capsys.readouterr().err
    assert "E x: it failed" in said
    assert "KeyError: 'lost'" in said


def test_chatty_libraries_are_held_back(capsys):
    logs.setup("info")
    logging.getLogger("httpx").info("HTTP Request: GET")
    assert capsys.readouterr().err == ""


def test_the_end_of_a_log_is_shown_once():
    tails = logs.Tails()
    died = "worker engine-0 died: killed\nIts log is e.log; the last lines:\n  loading\n  fault"
    assert tails.once(f"engine-0 is lost: {died}") == f"engine-0 is lost: {died}"
    again = tails.once(f"no engine is left that works:\nengine-0: {died}\nstacks")
    assert again.endswith("the last lines:\n  (shown above)\nstacks")
    other = died.replace("fault", "another")
    assert tails.once(other) == other
