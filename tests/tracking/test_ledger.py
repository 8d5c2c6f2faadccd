"""taken = trained + filtered + dropped + returned + abandoned + open."""

import json
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.tracking import ledger
from miles.tracking.ledger import Ledger, LedgerError, balance, histories


def line(event: str, group: int, **fields) -> dict:
    return {"event": event, "group_index": group, **fields}


def test_notes_are_read_back(tmp_path):
    books = Ledger(tmp_path / "ledger.jsonl")
    books.note_all("taken", (3, 4), attempt=0)
    books.note_all("trained", (3, 4), rollout_id=0)
    books.close()
    books.close()
    read = list(ledger.read(tmp_path / "ledger.jsonl"))
    assert [(note["event"], note["group_index"]) for note in read] == [("taken", 3), ("taken", 4), ("trained", 3), ("trained", 4)]
    assert read[2]["rollout_id"] == 0
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
    assert twice.faults == ["group 1 was trained twice"]
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


def test_what_the_books_forbid_ends_the_run_with_the_numbers(tmp_path):
    books = Ledger(tmp_path / "ledger.jsonl")
    books.note_all("taken", range(3))
    books.note("trained", 0, rollout_id=0)
    with pytest.raises(LedgerError, match=r"group 0 ended \(trained\) without .* \(3 taken = 2 trained .* 2 in flight"):
        books.note("trained", 0, rollout_id=1)
    with pytest.raises(LedgerError, match="group 1 was taken again"):
        books.note("taken", 1)
    with pytest.raises(LedgerError, match="group 7 is finished without having been taken"):
        books.note("finished", 7)
    assert [note["group_index"] for note in ledger.read(books.path)][-1] == 7, "written before it is judged"


def test_the_producer_s_own_count_is_compared(tmp_path):
    books = Ledger(tmp_path / "ledger.jsonl")
    books.note_all("taken", range(3))
    books.note("finished", 1)
    books.expect({"in flight": 2, "finished": 1, "drained": 0})
    with pytest.raises(LedgerError, match=r"the producer has 3 in flight, the books say 3 taken = .* 2 in flight"):
        books.expect({"in flight": 3, "finished": 1})


def test_trained_groups_take_no_memory():
    books = ledger.Books()
    for group in range(10_000):
        books.add(line("taken", group ^ 1))
        books.add(line("trained", group ^ 1))
    assert books.holds
    assert len(books._trained) + len(books.stage) + len(books.reasons) == 0
    books.add(line("taken", 17))
    books.add(line("trained", 17))
    assert books.faults == ["group 17 was trained twice"]


def test_a_rewound_ledger_is_that_of_the_checkpoint(tmp_path):
    books = Ledger(tmp_path / "ledger.jsonl")
    books.note_all("taken", range(4))
    books.note_all("drained", (0, 1), rollout_id=0)
    books.note_all("trained", (0, 1), rollout_id=0)
    books.note_all("drained", (2, 3), rollout_id=1)  # drained before rollout 0 is saved, and handed out again
    number = books.next_number
    books.note_all("trained", (2, 3), rollout_id=1)
    books.note_all("taken", (4, 5))
    again = Ledger(books.path)
    again.rewind(number, 0)
    again.note_all("trained", (2, 3), rollout_id=1)
    again.note_all("taken", (6, 7))
    again = Ledger(books.path)  # killed once more, before the next checkpoint
    again.rewind(number, 0)
    assert {group: [note["event"] for note in notes] for group, notes in histories(ledger.read(books.path)).items()} == {
        0: ["taken", "drained", "trained"],
        1: ["taken", "drained", "trained"],
        2: ["taken"],
        3: ["taken"],
    }
    assert again.books.open == [2, 3]
    again.note_all("trained", (2, 3), rollout_id=1)
    assert balance(ledger.read(books.path)).holds
    other = Ledger(tmp_path / "another.jsonl")
    other.rewind(number, 0)
    assert other.path.read_bytes() == b"", "a run that starts from another's checkpoint has a ledger of its own"


def test_a_ledger_with_a_damaged_line_is_not_gone_on_with(tmp_path):
    books = Ledger(tmp_path / "ledger.jsonl")
    books.note_all("taken", range(4))
    whole = books.path.read_text().splitlines(keepends=True)
    books.path.write_text("".join(whole[:3]) + whole[3][:12])
    Ledger(books.path).rewind(3, 0)  # torn by a kill, after the checkpoint
    for damage in ("17\n", whole[1][:20] + "\n", "\0" * 30 + "\n"):
        books.path.write_text(whole[0] + damage + whole[2])
        assert ledger.damaged(books.path) == [2]
        with pytest.raises(ValueError, match=r"ledger\.jsonl, line 2: damaged"):
            Ledger(books.path).rewind(3, 0)
    books.path.write_text(whole[0] + json.dumps(line("filtered", 1, number=1)) + "\n")
    with pytest.raises(ValueError, match="not whole: group 1 ended"):
        Ledger(books.path).rewind(9, 0)


def test_a_ledger_that_lacks_lines_is_not_gone_on_with(tmp_path):
    books = Ledger(tmp_path / "ledger.jsonl")
    books.note_all("taken", range(4))
    books.note_all("trained", range(4), rollout_id=0)
    whole = books.path.read_bytes()
    for kept in (whole[: whole.index(b"trained")], whole[:-9], whole[: len(whole) // 2] + bytes(len(whole) // 2)):
        books.path.write_bytes(kept)
        with pytest.raises(ValueError, match=r"not whole: it tells of [0-3] trained groups, the checkpoint of 4"):
            Ledger(books.path).rewind(8, 0, 4)
    for kept in (whole, whole + bytes(100), b""):
        books.path.write_bytes(kept)
        Ledger(books.path).rewind(8, 0, 4)


def test_a_full_disk_ends_the_run_with_the_name_of_the_file(tmp_path):
    books = Ledger(tmp_path / "ledger.jsonl")
    books.note_all("taken", range(4))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (books.path.stat().st_size + 100, limits[1]))  # room for a part of what comes
    try:
        with pytest.raises(OSError, match=r"File too large: .*ledger\.jsonl"):
            books.note_all("drained", range(4), rollout_id=0, version=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    Ledger(books.path).rewind(4, -1)
    assert balance(ledger.read(books.path)).open == [0, 1, 2, 3]
