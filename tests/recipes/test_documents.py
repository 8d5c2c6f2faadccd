"""What the documents point at is there: links, files, recipes, settings."""

import re
from pathlib import Path

import pytest

from miles.config.schema import settings

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").glob("*/README.md")]
OTHER_COMMANDS = {
    "--help",
    "--task",
    "--options",
    "--wheel",
    "--quiet",
    "--rows",
    "--sft",
    "--gold-key",
    "--stacks",
    "--model-path",
    "--port",
    "--custom-weight-loader",
}
"""Flags that are not settings: of make_data.py and of commands of their own."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        assert target.startswith("http") or (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_flags_and_recipes_exist(document: Path) -> None:
    if document.name == "settings.md":  # generated, and checked where it is made
        return
    text = document.read_text()
    known = {setting.flag for setting in settings().values()} | OTHER_COMMANDS
    flags = {flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text) if flag not in ("--config", "--resume")}
    assert {flag for flag in flags if flag not in known and flag.replace("--no-", "--", 1) not in known} == set()
    for path in re.findall(r"recipes/[\w-]+/[\w.]+", text):
        assert (ROOT / path).exists(), path


def test_the_files_of_the_house_are_where_the_map_says() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    row = re.compile(r"^\| \d+ \| (.+?) \|", re.MULTILINE)
    places = [name for cell in row.findall(text) for name in re.findall(r"`([\w/]+\.py|[\w/]+/)`", cell) if "/" in name]
    assert len(places) > 10
    assert [name for name in places if not (ROOT / "miles" / name).exists()] == []
