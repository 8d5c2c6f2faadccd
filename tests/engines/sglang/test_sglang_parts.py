"""Versions, options, the server's process, and the places of tensors: what needs no server."""

import asyncio
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from torch import nn

from miles.config.run_config import RunConfig
from miles.config.validate import validate
from miles.engines.embedded.stopping import Stopping
from miles.engines.sglang import flights, starting
from miles.engines.sglang.client import Client, ServerRefused
from miles.engines.sglang.engine import SGLangEngine
from miles.engines.sglang.known_options import check_options
from miles.engines.sglang.options import cpu_environment, flags, graph_sizes, server_options
from miles.engines.sglang.places import find_places
from miles.engines.sglang.server import Server, ServerGone, server_version
from miles.engines.sglang.sharded import ShardedWeights
from miles.engines.sglang.versions import Version
from miles.rollout.preflight import check_run
from miles.types import FinishReason, GenerateRequest, SamplingParams
from miles.weights.compare import compare_checksums
from miles.weights.sender import WeightPublisher
from tests.engines.contract import until

# ---- versions and options


def test_versions_know_what_they_can() -> None:
    old, middle, new = (Version.of(text) for text in ("0.5.15.post1", "0.5.19", "0.5.23"))
    assert [version.update_session for version in (old, middle, new)] == [False, False, True]
    assert [version.version_spans for version in (old, middle, new)] == [False, True, True]
    with pytest.raises(ValueError, match=r"SGLang 0\.5\.9: too old"):
        Version.of("0.5.9")


def test_options_of_a_table_are_stronger_than_defaults() -> None:
    args = RunConfig(hf_checkpoint="m", engine="sglang", gpus_per_engine=0.4, engine_max_running=6, sglang={"attention_backend": "fa3"})
    options = server_options(args, device="cuda", has_tokenizer=True)
    assert options["attention_backend"] == "fa3"
    assert options["mem_fraction_static"] == 0.36
    assert options["cuda_graph_bs_decode"] == [1, 2, 3, 4, 6]
    assert server_options(args, device="cpu", has_tokenizer=False)["skip_tokenizer_init"] is True
    two = server_options(RunConfig(hf_checkpoint="m", gpus_per_engine=2.0), device="cuda", has_tokenizer=True)
    assert (two["tp_size"], two["mem_fraction_static"]) == (2, 0.9)


def test_ranks_on_a_cpu_have_cores_of_their_own_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def cores(ranks: int, available: set[int]) -> str | None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: available)
        return cpu_environment({"tp_size": ranks}, 1).get("SGLANG_CPU_OMP_THREADS_BIND")

    assert cores(1, {0, 1}) is None
    assert cores(2, {0, 1}) == "0|1"
    assert cores(2, {4, 5, 6, 9}) == "4,6|5,9"
    assert cores(4, {3, 7}) == "3|7|3|7"


def test_options_become_flags() -> None:
    assert flags({"tp_size": 2, "log_requests": True, "quiet": False, "quantization": None, "cuda_graph_bs_decode": [1, 2]}) == [
        *("--tp-size", "2", "--log-requests", "--cuda-graph-bs-decode", "1", "2")
    ]


def test_graph_sizes_reach_the_largest_batch() -> None:
    for running in (1, 5, 64, 100):
        sizes = graph_sizes(running)
        assert (sizes[0], sizes[-1]) == (1, running)
        assert all(after <= 2 * before for before, after in pairwise(sizes))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sglang_python": "/no/such/python"}, "no such interpreter"),
        ({"sglang": {"port": 1}}, "--sglang port: is set through nothing"),
        ({"sglang": {"dtype": "half"}}, "--sglang dtype: is set through --dtype"),
        ({"sglang": {"mem-fraction-static": 0.5}}, "write it as mem_fraction_static"),
        ({"sglang": {"quantization": "fp8"}}, "--no-verify-weight-updates"),
        ({"sglang_urls": ["http://a:1"], "num_engines": 2}, "each engine has one server"),
        ({"gpus_per_engine": 1.5}, "whole GPUs"),
        ({"engine": "embedded", "sglang": {"x": 1}}, "belongs to --engine sglang"),
        ({"engine": "embedded", "gpus_per_engine": 2.0}, "computes on one GPU"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(settings: dict, message: str) -> None:
    assert any(message in problem for problem in validate(RunConfig(**{"engine": "sglang", "hf_checkpoint": "random:tiny"} | settings)))


def test_an_option_that_the_server_does_not_know_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    """A package as far as it is looked at, found by an interpreter that stands for its environment."""
    fields = tmp_path / "sglang" / "srt" / "arg_groups" / "fields"
    fields.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "srt" / "server_args.py").write_text('parser.add_argument(\n    "--tp-size",\n    type=int)\n')
    (fields / "memory.py").write_text(
        "class Memory:\n    mem_fraction_static: A[\n        Optional[float],\n        'share'] = 0.9\n    hybrid: bool = False\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncd {tmp_path} && exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    check_options(str(python), {"tp_size": "2", "mem_fraction_static": 1, "hybrid": True})
    for name, value, kind in (
        ("mem_fraction_static", "lots", "a number"),
        ("mem_fraction_static", True, "a number"),
        ("hybrid", 1, "true or false"),
    ):
        with pytest.raises(ValueError, match=rf"--sglang {name}: SGLang wants {kind}, got {value!r}"):
            check_options(str(python), {name: value})
    with pytest.raises(ValueError, match=r"--sglang mem_fraction: .* no such option; did you mean mem_fraction_static\?"):
        check_options(str(python), {"tp_size": 2, "mem_fraction": 0.5})
    check_options(sys.executable, {"no_such_option": 1})  # another machine may have it
    with pytest.raises(ValueError, match="--sglang no_such_option"):
        check_run(
            RunConfig(engine="sglang", sglang_python=str(python), sglang={"no_such_option": 1}, hf_checkpoint="random:tiny", num_rollout=1)
        )


# ---- the process


async def test_servers_that_share_a_gpu_start_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(starting, "pick_device", torch.device)  # there need not be one here
    monkeypatch.setattr(starting, "LOOK_SECONDS", 0.01)
    part, whole = (RunConfig(hf_checkpoint="m", device="cuda", gpus_per_engine=share) for share in (0.5, 1.0))
    seen: list[str] = []

    async def start(name: str) -> None:
        async with starting.turn(part, 60.0):
            seen.append(name)
            for _ in range(5):
                await asyncio.sleep(0)
            seen.append(name)

    await asyncio.gather(*map(start, "abc"))
    assert [first == second for first, second in zip(seen[::2], seen[1::2], strict=True)] == [True] * 3
    async with starting.turn(part, 60.0):
        async with starting.turn(whole, 0.0):
            pass
        with pytest.raises(TimeoutError, match=r"other engines were starting on it until --engine-start-timeout 300 s was over"):
            async with starting.turn(part, 0.05):
                pass


def test_an_interpreter_without_sglang_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot run it .*make sglang-cpu"):
        server_version(sys.executable)
    with pytest.raises(ValueError, match="--sglang-python"):
        server_version(str(tmp_path / "python"))


async def test_a_server_that_ends_at_once_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    server = Server(sys.executable, {"model_path": "m"}, tmp_path / "logs" / "server.log", {})
    client = Client(server.url, timeout=5)
    try:
        with pytest.raises(
            TimeoutError, match=r"within --limit 0 s: its processes have computed for \d+ s, .* not grown for \d+ s\. Its log is"
        ):
            await server.ready(client, 0, "--limit 0 s")
        with pytest.raises(ServerGone, match=r"exit code 1.*server\.log(.|\n)*No module named 'sglang'"):
            await server.ready(client, 120, "120 s")
        assert not server._scratch.exists(), "what a server leaves behind goes when it is found to have ended"
    finally:
        await client.close()
        server.kill()
        server.kill()
    with pytest.raises(ServerGone):
        server.check()


async def test_a_checkpoint_that_cannot_be_served_starts_nothing(checkpoint: str, tmp_path: Path) -> None:
    for settings, message in (
        ({"hf_checkpoint": ""}, "--hf-checkpoint"),
        ({"hf_checkpoint": str(tmp_path)}, r"config\.json"),
        ({"hf_checkpoint": checkpoint, "engine_max_context": 5000}, "512 positions"),
    ):
        engine = SGLangEngine(RunConfig(**({"engine": "sglang", "run_root": str(tmp_path)} | settings)), "engine-0")
        with pytest.raises(ValueError, match=message):
            await engine.init()
        assert (await engine.health()).reason == "not loaded"
        await engine.dispose()
    assert not (tmp_path / "run").exists()


async def test_a_url_without_a_server_of_ours_is_named(checkpoint: str) -> None:
    async def refused(url: str, message: str) -> None:
        engine = SGLangEngine(RunConfig(engine="sglang", hf_checkpoint=checkpoint, engine_max_context=128), "engine-0", url=url)
        with pytest.raises(ValueError, match=f"--sglang-urls {url}: {message}"):
            await engine.init()
        await engine.dispose()

    answers = {"text": web.Response(text="hello"), "404": web.Response(status=404), "other": web.json_response({"version": "0.5.23"})}

    async def answer(request: web.Request) -> web.Response:
        return answers[request.match_info["kind"]]

    app = web.Application()
    app.router.add_get("/{kind}/server_info", answer)
    server = TestServer(app)
    await server.start_server()
    for kind in ("text", "404"):
        await refused(str(server.make_url(f"/{kind}")), "no SGLang server answers there")
    await refused(str(server.make_url("/other")), "that server was not started by miles' launcher")
    closed = str(server.make_url("/text"))
    await server.close()
    await refused(closed, "no SGLang server answers there")


async def test_a_busy_server_is_asked_again_later_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "BUSY_SECONDS", (0.01, 0.02))
    asked: list[float] = []
    busy_for = 2

    async def answer(_: web.Request) -> web.Response:
        asked.append(time.monotonic())
        if len(asked) <= busy_for:
            return web.Response(status=503, text="busy")
        meta = {"output_token_logprobs": [[-0.5, 7, None]], "weight_versions": [], "finish_reason": {"type": "length"}}
        return web.json_response({"output_ids": [7], "meta_info": meta})

    app = web.Application()
    app.router.add_post("/generate", answer)
    server = TestServer(app)
    await server.start_server()
    client = Client(str(server.make_url("")), timeout=5)
    flying = flights.Flights(client, Stopping(frozenset(), None), max_context=32, tells_versions=False, seeded=False)
    request = GenerateRequest("r", [1, 2], SamplingParams(max_new_tokens=1))
    try:
        assert (await flying.fly(request)).token_ids == [7]
        assert all(after - before >= wait for (before, after), wait in zip(pairwise(asked), (0.01, 0.02), strict=True))
        asked.clear()
        busy_for = 100
        with pytest.raises(ServerRefused, match="503"):
            await flying.fly(request)
        assert len(asked) == 3
        monkeypatch.setattr(flights, "BUSY_SECONDS", (60.0,))
        waiting = asyncio.create_task(flying.fly(request))

        async def waits() -> bool:
            return len(asked) == 4 and not flying.running

        await until(waits)
        await flying.cut(None)
        assert (await asyncio.wait_for(waiting, 10)).finish_reason is FinishReason.ABORT
    finally:
        await client.close()
        await server.close()


# ---- where tensors lie


class Fused(nn.Module):
    """q, k and v in one parameter, an embedding with padding, of one rank of `ranks`; as SGLang's models load."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.qkv = nn.Parameter(torch.zeros(12 // ranks, 4))
        self.embed = nn.Parameter(torch.zeros(16, 4))
        self.out = nn.Parameter(torch.zeros(4, 8 // ranks))

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name == "embed":
                self.embed.data[: tensor.shape[0]].copy_(tensor)
                self.embed.data[tensor.shape[0] :].fill_(0)
            elif name == "out":
                width = 8 // self.ranks
                self.out.data.copy_(tensor.narrow(1, self.rank * width, width))
            elif name == "summed":
                self.out.data.add_(tensor.sum().item() if not tensor.is_meta else 0)
            else:
                size = 4 // self.ranks
                self.qkv.data.narrow(0, "qkv".index(name) * size, size).copy_(tensor.narrow(0, self.rank * size, size))


TENSORS = [
    ("embed", "float32", (13, 4)),
    ("q", "float32", (4, 4)),
    ("k", "float32", (4, 4)),
    ("v", "float32", (4, 4)),
    ("out", "float32", (4, 8)),
]


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, _, shape in TENSORS}


def test_places_are_views_into_what_the_model_computes_with() -> None:
    model, tensors = Fused(), values()
    before = [parameter.clone() for parameter in model.parameters()]
    places = find_places(model, TENSORS)
    assert all(map(torch.equal, before, model.parameters())), "finding places writes nothing"
    model.load_weights(tensors.items())
    assert all(torch.equal(place.target, tensors[name]) and place.whole for name, place in places.items())
    model.qkv.data[5] += 1
    assert [name for name, place in places.items() if not torch.equal(place.target, tensors[name])] == ["k"]


def test_a_tensor_that_is_not_kept_as_it_comes_is_named() -> None:
    with pytest.raises(ValueError, match="Fused of SGLang does not keep these tensors as they come: summed"):
        find_places(Fused(), [*TENSORS, ("summed", "float32", (3,))])


@pytest.mark.parametrize("broken", [None, "k"])
def test_ranks_vouch_for_their_parts(broken: str | None) -> None:
    tensors = values()
    sender = WeightPublisher([(name, torch.float32, shape) for name, _, shape in TENSORS], RunConfig(name=f"ranks-{os.getpid()}"))
    models = [Fused(rank, 2) for rank in range(2)]

    def write(model: Fused):
        def load(named) -> None:
            model.load_weights(named)
            if broken and model.rank == 1:
                model.qkv.data[2:4] += 1

        return load

    ends = [
        ShardedWeights(TENSORS, find_places(model, TENSORS), write(model), rank=rank, timeout=30, share=lambda bucket: None)
        for rank, model in enumerate(models)
    ]
    plan = sender.plan(1)
    for end in ends:
        end.begin(plan, 0)
    sender.send_bucket(0, tensors.items())
    for end in ends:
        end.receive(0)
    found = [compare_checksums(sender.checksums(), end.finish()) for end in ends]
    assert found[0].equal
    assert found[1].differing == (() if broken is None else (broken,))
    assert torch.equal(models[1].out.data, tensors["out"][:, 4:])
    for end in ends:
        end.dispose()
    sender.dispose()
