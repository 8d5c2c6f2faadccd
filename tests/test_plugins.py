"""How names become functions, also in several threads at once."""

import threading

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
