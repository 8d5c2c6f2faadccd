from miles.fault_tolerance.cells import Cell, CellState


def test_a_new_cell_is_pending_and_nothing_is_known_of_it():
    cell = CellState("engine-0", {"role": "engine"}).view()
    assert cell.status.phase == "Pending"
    assert {condition.type: condition.status for condition in cell.status.conditions} == {
        "Allocated": "Unknown",
        "Healthy": "Unknown",
        "Serving": "Unknown",
    }


def test_the_resource_version_grows_with_changes_only():
    state = CellState("engine-0")
    first = state.view().metadata.resource_version
    state.change(phase="Running", healthy=("True", ""))
    second = state.view().metadata.resource_version
    state.change(phase="Running", healthy=("True", ""))
    assert first != second == state.view().metadata.resource_version
    state.change(healthy=("False", "no token for 200 s"))
    assert state.view().metadata.resource_version != second
    assert state.view().condition("Healthy").reason == "no token for 200 s"


def test_a_view_is_a_snapshot():
    state = CellState("engine-0")
    view = state.view()
    state.change(suspend=True, phase="Suspended")
    assert view.status.phase == "Pending"
    assert not view.spec.suspend


def test_objects_read_as_kubernetes_writes_them():
    state = CellState("engine-0", {"role": "engine"})
    state.change(weight_version=3)
    wire = state.view().model_dump(by_alias=True)
    assert wire["metadata"]["resourceVersion"] == "1"
    assert wire["status"]["weightVersion"] == 3
    assert "lastTransitionTime" in wire["status"]["conditions"][0]
    assert Cell.model_validate(wire) == state.view()
