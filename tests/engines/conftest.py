"""A tiny random Qwen3 with a byte-level tokenizer, and engines that serve it."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from miles.config.run_config import RunConfig
from miles.engines.embedded.engine import EmbeddedEngine

VOCABULARY = 512
EOS = 1


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights are larger than usual, so that distributions are neither flat nor alike."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.15,
        eos_token_id=EOS,
        bos_token_id=0,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config)
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    letters = {letter: i + 2 for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = {"<bos>": 0, "<eos>": 1} | letters | {f"w{i}": i for i in range(258, VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def reference(checkpoint: str) -> PreTrainedModel:
    """The same model as transformers runs it by itself."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer(checkpoint: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(checkpoint)


StartEngine = Callable[..., "EngineStart"]


class EngineStart:
    """Awaited: an engine that is ready."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine

    def __await__(self):
        yield from self.engine.init().__await__()
        return self.engine


@pytest.fixture
async def start(checkpoint: str) -> AsyncIterator[StartEngine]:
    """start(engine_max_running=4) -> an engine, disposed after the test."""
    started: list[EmbeddedEngine] = []

    def make(name: str = "engine-0", **settings: object) -> EngineStart:
        defaults = {"hf_checkpoint": checkpoint, "device": "cpu", "engine_max_context": 128, "engine_max_running": 8}
        engine = EmbeddedEngine(RunConfig(**(defaults | settings)), name)
        started.append(engine)
        return EngineStart(engine)

    yield make
    for engine in started:
        await engine.dispose()


@pytest.fixture(scope="session")
def other_checkpoint(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same architecture with other weights."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    folder = Path(tmp_path_factory.mktemp("other"))
    model.save_pretrained(folder)
    return str(folder)
