"""taken = trained + filtered + dropped + returned + abandoned + open."""

import multiprocessing

from hypothesis import given
from hypothesis import strategies as st

from miles.tracking import ledger
from miles.tracking.ledger import Ledger, balance


def line(event: str, group: int, **fields) -> dict:
    return {"event": event, "group_index": group, **fields}


def test_notes_are_read_back(tmp_path):
    books = Ledger(tmp_path / "ledger.jsonl")
    books.note("taken", 3, attempt=0)
    books.note_all("trained", (3, 4), rollout_id=0)
    books.close()
    books.close()
    read = list(ledger.read(tmp_path / "ledger.jsonl"))
    assert [(note["event"], note["group_index"]) for note in read] == [("taken", 3), ("trained", 3), ("trained", 4)]
    assert read[1]["rollout_id"] == 0
    assert list(ledger.read(tmp_path / "nowhere")) == []


def test_balanced_books():
    books = balance(
        [
            *(line("taken", group) for group in range(6)),
            line("finished", 0),
            line("trained", 0, rollout_id=0),
            line("filtered", 1, reason="no spread"),
            line("dropped", 2, reason="timeout"),
            line("returned", 3),
            line("taken", 3, attempt=1),
            line("trained", 3, rollout_id=0),
            line("abandoned", 4),
        ]
    )
    assert books.holds
    assert books.taken == 7
    assert dict(books.ended) == {"trained": 2, "filtered": 1, "dropped": 1, "returned": 1, "abandoned": 1}
    assert books.open == [5]
    assert books.reasons == {"filtered: no spread": 1, "dropped: timeout": 1}


def test_what_does_not_balance_is_named():
    assert balance([line("trained", 1)]).faults == ["group 1 ended (trained) without having been taken"]
    assert balance([line("taken", 1), line("taken", 1)]).faults == ["group 1 was taken again before its first take ended"]
    twice = balance([line("taken", 1), line("trained", 1), line("taken", 1), line("trained", 1)])
    assert twice.faults == ["group 1 was trained 2 times"]
    assert not twice.holds


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["trained", "filtered", "dropped", "returned", "abandoned", "open"]))))
def test_any_orderly_history_balances(history):
    lines, done = [], set()
    for group, end in history:
        if group in done:
            continue
        lines.append(line("taken", group))
        if end != "open":
            lines.append(line(end, group))
        if end != "returned":
            done.add(group)
    assert balance(lines).holds


def write_many(path: str, first: int) -> None:
    books = Ledger(path)
    books.note_all("taken", range(first, first + 300), padding="x" * 200)
    books.close()


def test_several_processes_share_one_file_without_torn_lines(tmp_path):
    path = tmp_path / "ledger.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(str(path), 300 * number)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert sorted(note["group_index"] for note in ledger.read(path)) == list(range(900))


def test_a_rewound_ledger_holds_what_is_not_done_again(tmp_path):
    path = tmp_path / "ledger.jsonl"
    books = Ledger(path)
    for group in range(8):
        books.note("taken", group)
    for group, end, fields in (
        (0, "trained", {"rollout_id": 0}),
        (1, "filtered", {"reason": "x"}),
        (2, "trained", {"rollout_id": 1}),
        (3, "filtered", {"reason": "x"}),
        (4, "trained", {"rollout_id": 2}),
        (5, "abandoned", {}),
    ):
        books.note(end, group, **fields)
    ledger.rewind(path, first_rollout=2)
    assert sorted({note["group_index"] for note in ledger.read(path)}) == [0, 1, 2]
    assert balance(ledger.read(path)).holds
    ledger.rewind(path, first_rollout=2, done_again=[1])
    assert sorted({note["group_index"] for note in ledger.read(path)}) == [0, 2]
    ledger.rewind(tmp_path / "nowhere", 0)
