from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles.config.places import RANDOM_MODELS
from miles.train.random_model import SHAPES, ensure_model, resolve_checkpoint


def test_a_seed_names_one_model(tmp_path: Path, tiny: str) -> None:
    path = ensure_model("random:tiny", 0, tmp_path)
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    assert ensure_model("random:tiny", 0, tmp_path) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == stamp
    assert (path / "model.safetensors").read_bytes() == (Path(tiny) / "model.safetensors").read_bytes()
    other = ensure_model("random:tiny", 1, tmp_path)
    assert (other / "model.safetensors").read_bytes() != (path / "model.safetensors").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([path.name, other.name])


def test_it_starts_out_undecided(tiny: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    log_p = model(torch.arange(3, 60)[None]).logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    assert entropy.mean() > 0.95 * torch.tensor(512.0).log()
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("text", ["What is 17 + 25?", "Ünïcode ✓\n\ttabs", "<|im_start|>"])
def test_any_text_comes_out_as_it_went_in(tiny: str, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == 512
    assert len(tokenizer("1234").input_ids) == 4


def test_the_template_knows_roles_tools_and_system(tiny: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    with_tools = tokenizer.apply_chat_template(messages, tools=[{"type": "function", "function": {"name": "f"}}], tokenize=False)
    assert with_tools.count("<|im_start|>system") == 1
    assert '"name": "f"' in with_tools
    with pytest.raises(Exception, match="unknown role"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "x"}], tokenize=False)


def test_an_unknown_shape_is_refused_and_other_names_pass(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tiny-4k"):
        ensure_model("random:huge", 0, tmp_path)
    assert resolve_checkpoint("org/model", 0) == "org/model"
    assert tuple(SHAPES) == RANDOM_MODELS
