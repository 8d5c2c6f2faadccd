"""The rules of the trace event format, as a viewer applies them."""

import json
from collections import defaultdict


def check(text: str) -> list[dict]:
    """The events of a whole trace; asserts that a viewer shows them as they were meant."""
    events = json.loads(text)
    assert isinstance(events, list)
    rows, slices, flows = {}, defaultdict(list), defaultdict(list)
    for event in events:
        assert event["ph"] in ("X", "B", "M", "s", "t", "f")
        assert event["pid"] == 1
        if event["ph"] == "M":
            assert event["name"] == "thread_name"
            assert event["tid"] not in rows, "a row is named once"
            rows[event["tid"]] = event["args"]["name"]
            continue
        assert isinstance(event["ts"], int)
        if event["ph"] in ("X", "B"):
            end = event["ts"] + event["dur"] if event["ph"] == "X" else float("inf")
            assert end >= event["ts"]
            slices[event["tid"]].append((event["ts"], end))
        else:
            flows[event["cat"], event["id"]].append(event)
    assert len(set(rows.values())) == len(rows)
    assert set(slices) <= set(rows)
    for row in slices.values():
        open_ends = []
        for start, end in sorted(row, key=lambda slice: (slice[0], -slice[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], "slices of one row lie beside or within one another"
            open_ends.append(end)
    for arrow in flows.values():
        assert [event["ph"] for event in arrow] == ["s", *["t"] * (len(arrow) - 2), "f"]
        assert [event["ts"] for event in arrow] == sorted(event["ts"] for event in arrow), "arrows go with time"
        assert arrow[-1]["bp"] == "e"
        for event in arrow:
            assert any(low <= event["ts"] <= high for low, high in slices[event["tid"]]), "an arrow ends at a slice"
    return events
