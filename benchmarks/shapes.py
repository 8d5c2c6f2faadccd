"""The shapes that the benchmarks use: Qwen3, random weights; and the rollout work that suits each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Size:
    """A shape, and the rollout work that suits it."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = True
    requests: int = 64
    mean_length: int = 34
    longest: int = 128


SIZES = {
    "ci": Size(2, 64, 4, 2, 16, 128, 512, requests=16, mean_length=8, longest=24),
    "tiny": Size(4, 128, 4, 2, 32, 256, 4096),
    "tiny-49k": Size(4, 128, 4, 2, 32, 256, 49152),
    "135m": Size(30, 576, 9, 3, 64, 1536, 49152),
    "0.6b": Size(28, 1024, 16, 8, 128, 3072, 151936, requests=256, mean_length=128, longest=512),
    "1.7b": Size(28, 2048, 16, 8, 128, 6144, 151936, requests=256, mean_length=128, longest=512),
    "4b": Size(36, 2560, 32, 8, 128, 9728, 151936, requests=256, mean_length=128, longest=512),
    "8b": Size(36, 4096, 32, 8, 128, 12288, 151936, tied=False, requests=256, mean_length=128, longest=512),
}


@dataclass(frozen=True)
class Work:
    """Prompts and how many tokens each is answered with."""

    prompts: list[list[int]]
    lengths: list[int]

    @classmethod
    def draw(cls, size: Size, siblings: int, seed: int) -> Work:
        """Response lengths are geometric, cut at the longest: most are short, a few are long, as in practice."""
        draw = np.random.default_rng(seed)
        prompts = [draw.integers(2, size.vocabulary, int(draw.integers(16, 80))).tolist() for _ in range(size.requests // siblings)]
        lengths = np.minimum(draw.geometric(1 / size.mean_length, size.requests), size.longest)
        return cls([prompts[i // siblings] for i in range(size.requests)], lengths.tolist())

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def context(self) -> int:
        return max(map(len, self.prompts)) + max(self.lengths)


def make_model(size: Size, folder: str, dtype: str = "float32", device: str = "cpu") -> None:
    """Write a checkpoint of random weights; they are drawn on `device`, where a GPU is far faster."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        tie_word_embeddings=size.tied,
        eos_token_id=1,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    model.save_pretrained(folder)
