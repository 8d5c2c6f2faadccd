"""RunConfig -> config.toml -> RunConfig."""

from pathlib import Path

from hypothesis import HealthCheck, given
from hypothesis import settings as rules
from hypothesis import strategies as st

from miles.config import toml
from miles.config.cli import resolve
from miles.config.run_config import RunConfig
from miles.config.schema import Setting, settings

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ANYTHING = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def values_of(setting: Setting) -> st.SearchStrategy:
    """Values that the field's type allows; bounded numbers stay where every bound allows them."""
    items = {
        "str": TEXT,
        "int": st.integers(0, 10**9),
        "float": st.floats(0.001, 0.999),
        "any": ANYTHING,
        "choice": st.sampled_from(setting.choices or ("",)),
    }
    made = {
        "bool": st.booleans(),
        "int": st.integers(64, 60000),
        "float": st.floats(0.001, 0.999),
        "str": TEXT,
        "choice": st.sampled_from(setting.choices or ("",)),
        "list": st.lists(items.get(setting.item, TEXT), max_size=3),
        "dict": st.dictionaries(TEXT, items.get(setting.item, TEXT), max_size=3),
    }[setting.kind]
    return made | st.none() if setting.optional else made


CONFIGS = st.fixed_dictionaries({}, optional={s.name: values_of(s) for s in settings().values() if s.name not in toml.SECRETS})


@rules(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(CONFIGS)
def test_a_config_written_and_read_is_the_same(tmp_path: Path, values: dict):
    args = RunConfig(**values)
    path = tmp_path / "config.toml"
    path.write_text(toml.dump(args), encoding="utf-8")
    again = resolve(["--config", str(path)], check=False)
    assert again.model_dump() == args.model_dump()


def test_origins_stand_beside_the_values(tmp_path):
    text = toml.dump(resolve(["--top-k", "3", "--name", "x"], check=False))
    assert "top_k = 3  # flag\n" in text
    assert "top_p = 1.0  # default\n" in text
    assert "# load: not set\n" in text


def test_secrets_are_not_written():
    assert "hush" not in toml.dump(RunConfig(api_server_token="hush"))


def test_the_comment_of_an_origin_cannot_break_the_file(tmp_path):
    odd = tmp_path / "a\tb#c.toml"
    odd.write_text("[run]\nseed = 5\n")
    args = resolve(["--config", str(odd)], check=False)
    path = tmp_path / "out.toml"
    path.write_text(toml.dump(args))
    assert resolve(["--config", str(path)], check=False).seed == 5
