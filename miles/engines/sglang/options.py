"""Settings into the flags of a server. The table [sglang] is stronger than every default here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from miles.config.run_config import RunConfig

SPARE = 16
"""Tokens of context beyond --engine-max-context: a server keeps a few for itself."""
MEMORY_SHARE = 0.9
"""Of an engine's share of a GPU, what weights and KV cache may take; activations and CUDA graphs need the rest."""

ENVIRONMENT = {
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for SPARE; the model's own limit is checked before
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def server_options(args: RunConfig, *, device: str, has_tokenizer: bool) -> dict[str, Any]:
    """Everything that a server is started with but its address: option -> value, as in [sglang]."""
    running = args.engine_max_running
    options: dict[str, Any] = {
        "model_path": args.hf_checkpoint,
        "dtype": args.dtype,
        "context_length": args.engine_max_context + SPARE,
        "max_running_requests": running,
        "random_seed": args.seed & 0x7FFFFFFF,
        "trust_remote_code": args.trust_remote_code,
        "skip_tokenizer_init": not has_tokenizer,
        "skip_server_warmup": True,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "log_level": "info",
        "log_level_http": "warning",
        "load_snapshot_publish_interval": 15,
    }
    if device == "cpu":
        room = running * (args.engine_max_context + SPARE) + SPARE
        options |= {"device": "cpu", "attention_backend": "torch_native", "sleep_on_idle": True, "max_total_tokens": room}
    else:
        options |= {
            "device": "cuda",
            "attention_backend": "triton",
            "disable_prefill_cuda_graph": True,
            "cuda_graph_bs_decode": graph_sizes(running),
            "mem_fraction_static": round(min(args.gpus_per_engine, 1.0) * MEMORY_SHARE, 3),
            "tp_size": max(1, round(args.gpus_per_engine)),
        }
        if args.colocate:
            options |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    return options | args.sglang


def cpu_environment(options: Mapping[str, Any], threads: int) -> dict[str, str]:
    """What a server on a CPU is told beside its options. SGLang wants a NUMA node for each rank, or a list of cores: the cores of this
    process are dealt out, and serve several ranks where there are fewer."""
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}
    if (ranks := int(options.get("tp_size", 1))) > 1:
        cores = sorted(os.sched_getaffinity(0))
        shares = [cores[rank::ranks] or [cores[rank % len(cores)]] for rank in range(ranks)]
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    return environment


def graph_sizes(running: int) -> list[int]:
    """Batch sizes to capture as CUDA graphs: 1, 2, 3, 4, 6, 8, 12, 16, ... A batch is padded to the next one, at most by half; each
    takes seconds at the start."""
    sizes = {min(size, running) for power in range(running.bit_length() + 1) for size in (1 << power, 3 << power)}
    return sorted(sizes)


def flags(options: Mapping[str, Any]) -> list[str]:
    """{"tp_size": 2, "log_requests": True, "trust_remote_code": False} -> ["--tp-size", "2", "--log-requests"]"""
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif value is not False and value is not None:
            words += [flag, str(value)]
    return words
