"""Fractions share a GPU, ranks do not, and too little is said in numbers."""

import pytest

from miles.ray import gpu_slots
from miles.ray.worker_spec import WorkerSpec


def spec(name, kind, gpus=0.0, cpus=1.0):
    return WorkerSpec(name, "x.Y", kind=kind, apart=kind != "engine", num_gpus=gpus, num_cpus=cpus)


def test_trainer_and_engine_share_one_gpu():
    slots, place = gpu_slots.plan([spec("actor-0", "actor", 0.5), spec("engine-0", "engine", 0.4)])
    assert place == {"actor-0": 0, "engine-0": 0}
    assert gpu_slots.bundles(slots) == [{"CPU": 2.0, "GPU": 1.0}]


def test_whole_gpus_lie_apart_and_large_engines_get_several():
    slots, place = gpu_slots.plan([spec("actor-0", "actor", 1.0), spec("engine-0", "engine", 1.0), spec("engine-1", "engine", 2.0)])
    assert [slot.gpus for slot in slots] == [1, 1, 2]
    assert place == {"actor-0": 0, "engine-0": 1, "engine-1": 2}


def test_ranks_of_one_role_never_share_but_critic_and_engines_may():
    specs = [spec("actor-0", "actor", 0.4), spec("actor-1", "actor", 0.4), spec("critic-0", "critic", 0.3), spec("critic-1", "critic", 0.3)]
    _, place = gpu_slots.plan([*specs, spec("engine-0", "engine", 0.3), spec("engine-1", "engine", 0.3)])
    assert place == {"actor-0": 0, "actor-1": 1, "critic-0": 0, "critic-1": 1, "engine-0": 0, "engine-1": 1}


def test_cpu_workers_have_a_slot_each():
    slots, place = gpu_slots.plan([spec("actor-0", "actor"), spec("engine-0", "engine", cpus=0.0)])
    assert place == {"actor-0": 0, "engine-0": 1}
    assert gpu_slots.bundles(slots) == [{"CPU": 1.0}, {"CPU": 0.001}]


def test_too_few_slots_are_refused_with_the_numbers():
    specs = [spec("actor-0", "actor", 1.0), spec("actor-1", "actor", 1.0), spec("engine-0", "engine", 1.0)]
    slots, _ = gpu_slots.plan(specs)
    with pytest.raises(ValueError, match=r"the run needs 3 \(2 actor, 1 engine\), 1 of 4 are free.*--num-engines"):
        gpu_slots.refuse_if_too_many(slots, specs, {"GPU": 1.0, "CPU": 8.0}, {"GPU": 4.0, "CPU": 8.0})
