"""miles settings-doc: docs/settings.md from the settings."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from miles.config.docs import settings_markdown


def main(argv: Sequence[str]) -> int:
    """0; with --check 1 when the page is not what the settings say."""
    parser = argparse.ArgumentParser(prog="miles settings-doc", description="Write the page on the settings.", allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("docs/settings.md"), help="where (docs/settings.md)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is out of date")
    options = parser.parse_args(argv)
    text = settings_markdown()
    if options.check:
        fresh = options.out.exists() and options.out.read_text(encoding="utf-8") == text
        print(f"{options.out} is {'up to date' if fresh else 'out of date: run miles settings-doc'}")
        return 0 if fresh else 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text, encoding="utf-8")
    print(options.out)
    return 0
