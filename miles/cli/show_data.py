"""miles show-data DATA: rows as the model sees them, with tokens and what is trained told apart on a terminal, and the latter elsewhere."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from miles.cli import data_command

if TYPE_CHECKING:
    from rich.text import Text

    from miles.config.run_config import RunConfig
    from miles.data.shown import Piece

Shown = tuple[str, list[int], list[int]]


def main(argv: Sequence[str]) -> int:
    """0; 1 for data that cannot be used, with file and line; 2 for wrong flags."""
    parser = argparse.ArgumentParser(
        prog="miles show-data",
        description="Rows as token ids, decoded again: prompts as the engine gets them, conversations (messages) with their loss mask.",
        allow_abbrev=False,
    )
    parser.add_argument("--rows", type=int, default=3, help="show so many rows (3)")
    parser.add_argument("--first", type=int, default=1, help="begin with this row (1)")
    parser.add_argument("--sft", action="store_true", help="take prompt and label for a conversation, as miles sft does")
    try:
        options, args = data_command.read(parser, argv)
        tokenizer = load(args)
    except ValueError as error:
        print(f"miles show-data: {error}", file=sys.stderr)
        return 2
    from rich.console import Console
    from rich.text import Text

    from miles.data.shown import pieces

    terminal = Console(soft_wrap=True, highlight=False)
    shown = 0
    try:
        for path in options.paths.values():
            for where, ids, mask in islice(read(path, tokenizer, args, options.sft), options.first - 1, options.first - 1 + options.rows):
                shown += 1
                terminal.print(Text(f"── {where}   {len(ids)} tokens, {sum(mask)} trained", style="bold"))
                terminal.print(coloured(pieces(tokenizer, ids, mask), marks=not terminal.is_terminal))
    except ValueError as error:
        print(f"miles show-data: {error}", file=sys.stderr)
        return 1
    if not shown:
        print(f"miles show-data: {', '.join(options.paths.values())}: no row {options.first}", file=sys.stderr)
        return 1
    coded = "green; every other token is underlined" if terminal.is_terminal else "in double brackets"
    print(f"\nWhat is trained is {coded}.")
    return 0


def load(args: "RunConfig") -> Any:
    from miles.data.tokenizer import load_tokenizer

    if args.hf_checkpoint.startswith("random:"):
        from miles.train.random_model import resolve_checkpoint

        args = args.model_copy(update={"hf_checkpoint": resolve_checkpoint(args.hf_checkpoint, args.seed)})
    return load_tokenizer(args)


def read(path: str, tokenizer: Any, args: "RunConfig", sft: bool) -> Iterator[Shown]:
    """(file:line, ids, mask) of each row. Raises ValueError with file and line."""
    from miles.data.conversation import conversation, mask_conversation
    from miles.data.dataset import read_row
    from miles.data.files import open_rows
    from miles.data.tokenizer import encode

    for found in open_rows(path):
        where = f"{path}:{found.origin.split()[-1]}"
        try:
            if sft or (isinstance(found.value, dict) and "messages" in found.value):
                ids, mask = mask_conversation(tokenizer, *conversation(found.value, args), args.chat_template_kwargs or None)
            else:
                text, _ = read_row(tokenizer, found.origin, found.value, args)
                (ids,) = encode(tokenizer, [text])
                mask = [0] * len(ids)
        except ValueError as error:
            if args.skip_bad_rows:
                print(f"{where}: left out: {error}", file=sys.stderr)
                continue
            raise ValueError(f"{where}: {error}") from None
        yield where, ids, mask


def coloured(found: "Sequence[Piece]", *, marks: bool) -> "Text":
    """One text; `marks` put brackets around what is trained, for a terminal without colours."""
    from rich.text import Text

    text = Text()
    before = False
    for place, piece in enumerate(found):
        if marks and piece.trained != before:
            text.append("[[" if piece.trained else "]]")
        before = piece.trained
        style = "green" if piece.trained else "dim"
        text.append(piece.text.replace("\n", "⏎\n"), style=style + (" underline" if place % 2 else ""))
    if marks and before:
        text.append("]]")
    return text
