"""The plan of the house, held: who may import whom, who may touch which library, and that every setting lives."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles.config.run_config import SECTIONS

ROOT = Path(__file__).parent.parent
HOUSE = ROOT / "miles"
FILES = sorted(HOUSE.rglob("*.py"))
DRIVERS = [path for name in ("train_async.py", "train.py") if (path := ROOT / name).exists()]

FLOOR = {
    room: floor
    for floor, rooms in enumerate(
        [
            ("types", "plugins"),
            ("config", "protocols"),
            ("data", "tracking", "weights"),
            ("engines", "rewards", "algorithms", "fault_tolerance", "dashboard"),
            ("rollout", "train"),
            ("ray", "cli"),
            ("utils",),
        ]
    )
    for room in rooms
}
MAY_ALSO = {("cli", "ray")}
DOOR_OF = {
    "ray": {"ray"},
    "sglang": {"engines"},
    "torch": {"train", "algorithms", "weights", "engines"},
    "wandb": {"tracking"},
    "mlflow": {"tracking"},
    "trackio": {"tracking"},
    "tensorboard": {"tracking"},
}
DOORS = [
    "ray/placement_group.py",
    "utils/arguments.py",
    "utils/ft_utils/mini_ft_controller.py",
    "utils/tracking_utils/tracking.py",
]
IMPORTS_INSIDE_FUNCTIONS = {"tracking/sinks.py", "plugins.py"}


def room_of(path: Path) -> str:
    return path.relative_to(HOUSE).with_suffix("").parts[0]


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the room"
            yield node.module or "", node
            if node.module == "miles":
                yield from ((f"miles.{alias.name}", node) for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOUSE)))
def test_imports_go_down_and_through_the_doors(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    assert room in FLOOR, f"{path} is in no room of the house"
    for module, node in imports(ast.parse(path.read_text())):
        top, *rest = module.split(".")
        if top == "miles" and rest and rest[0] != room:
            other = rest[0]
            assert FLOOR[other] < FLOOR[room] or (room, other) in MAY_ALSO, f"{path}:{node.lineno}: {room} may not import {module}"
            assert other != "utils", "the drivers' shelf is for drivers"
        if top in DOOR_OF:
            assert room in DOOR_OF[top], f"{path}:{node.lineno}: only {sorted(DOOR_OF[top])} may import {top}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOUSE)))
def test_imports_stand_at_the_top(path: Path) -> None:
    relative = str(path.relative_to(HOUSE))
    if relative in IMPORTS_INSIDE_FUNCTIONS or relative.startswith("cli/"):
        return
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = [node.lineno for _, node in imports(function)]
            assert not inside, f"{relative}: imports inside {function.name}, lines {inside}"


def settings() -> list[str]:
    return [name for section in SECTIONS.values() for name in section.__annotations__ if name != "model_config"]


def test_no_setting_is_defined_twice() -> None:
    assert [name for name, count in Counter(settings()).items() if count > 1] == []


def test_every_setting_is_read() -> None:
    readers = [path.read_text() for path in FILES if room_of(path) not in ("config", "cli")] + [path.read_text() for path in DRIVERS]
    properties = [(HOUSE / "config" / "run_config.py").read_text(), (HOUSE / "config" / "algorithm.py").read_text()]
    read = {node.attr for text in readers + properties for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    assert sorted(set(settings()) - read) == [], "settings that nothing reads"


def test_nothing_guesses_at_a_setting() -> None:
    for path in [*FILES, *DRIVERS]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) == 3:
                target = ast.unparse(node.args[0])
                assert target.split(".")[-1] not in ("args", "config", "cfg", "settings"), (
                    f"{path}:{node.lineno}: getattr on settings with a default"
                )


@pytest.mark.parametrize("door", DOORS)
def test_a_door_only_hands_names_on(door: str) -> None:
    path = HOUSE / door
    assert path.exists(), f"the drivers need {door}"
    kinds = {type(node) for node in ast.parse(path.read_text()).body}
    assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign}, f"{door} defines something"
