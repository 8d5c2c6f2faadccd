"""Rules that one field's type cannot hold: ranges of floats, combinations, arithmetic, and files that must be there."""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from miles.config.algorithm_rules import algorithm
from miles.config.checkpoint_files import COMPLETE, damage
from miles.config.data_rules import rewards, training_data
from miles.config.lora_rules import lora
from miles.config.metrics_file import has_eval, read
from miles.config.places import model_missing, newest_checkpoint, there, unwritable
from miles.config.problem import Problem, wrong
from miles.config.run_config import RunConfig
from miles.config.schema import settings

SGLANG_OURS = {
    "model_path": "--hf-checkpoint",
    "dtype": "--dtype",
    "context_length": "--engine-max-context",
    "max_running_requests": "--engine-max-running",
    "custom_weight_loader": "nothing: weights come through it",
    "host": "nothing: servers of a run listen on loopback",
    "port": "nothing: a free one is taken",
    "dp_size": "--num-engines",
    "pp_size": "nothing: pipelines are not supported",
}
"""Options of SGLang's server that follow from settings of a run, and from which."""


class SettingsError(ValueError):
    """All that is wrong with a command line and its files."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{count} in the settings:\n" + "\n".join(f"  {problem}" for problem in problems))


def validate(args: RunConfig) -> list[str]:
    """Everything wrong with these settings, each message with its flags; empty when nothing is."""
    return [problem.text for problem in problems_of(args)]


def problems_of(args: RunConfig) -> list[Problem]:
    """As `validate`, each with the settings concerned."""
    return [problem for rule in RULES for problem in rule(args)]


def ranges(args: RunConfig) -> Iterator[Problem]:
    for name, setting in settings().items():
        value = args.__dict__[name]
        if setting.kind == "float" and value is not None and not math.isfinite(value):
            yield wrong(args, name, "must be a finite number")
    if args.temperature <= 0:
        yield wrong(
            args, "temperature", "must be greater than 0; greedy training has no gradient (greedy evaluation: --eval-temperature 0)"
        )
    if args.eval_temperature < 0:
        yield wrong(args, "eval_temperature", "must be at least 0 (0 is greedy)")
    for name in ("top_p", "eval_top_p"):
        if not 0 < args.__dict__[name] <= 1 and math.isfinite(args.__dict__[name]):
            yield wrong(args, name, "must be above 0 and at most 1")
    if args.top_k < 0:
        yield wrong(args, "top_k", "must be at least 0 (0 is off)")
    if not 0 <= args.min_p < 1:
        yield wrong(args, "min_p", "must be at least 0 and below 1")
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if args.__dict__[name] != off and args.advantage_estimator != "sft":
            text = "log-probs are those of the whole distribution, so training on what a truncated one wrote is biased"
            yield wrong(args, name, f"{text}; leave it at {off:g} (evaluation has its own: --eval-top-p)")
    if args.min_lr > args.lr and args.lr_schedule != "constant":
        yield wrong(args, "min_lr lr", "the schedule may not end above its peak")
    if "" in args.stop:
        yield wrong(args, "stop", "an empty string would end every response at once")
    if args.engine == "sglang" and len(args.stop) > 32:
        yield wrong(args, "stop engine", "a server takes 32 strings at most")
    if any(token < 0 for token in args.stop_token_ids):
        yield wrong(args, "stop_token_ids", "token ids are not negative")
    if not args.name or "/" in args.name or "\\" in args.name or args.name in (".", ".."):
        yield wrong(args, "name", "must be the name of one folder")
    if not -(2**63) <= args.seed < 2**63:
        yield wrong(args, "seed", "must fit into 64 bits")


def batches(args: RunConfig) -> Iterator[Problem]:
    size = args.global_batch_size
    if size is not None and args.samples_per_rollout % size:
        product = f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt}"
        product += f" = {args.samples_per_rollout}"
        if args.num_rollout is not None:
            total = args.num_rollout * args.samples_per_rollout
            product += f"; with --num-rollout {args.num_rollout}: {total} in the whole run"
            product += f", {total} < {size}" if total < size else ""
        names = ("global_batch_size", "rollout_batch_size", "n_samples_per_prompt")
        yield Problem(names, f"--global-batch-size {size}: must divide the samples of one rollout, {product}")
    if args.samples_per_step < args.num_trainers:
        text = f"an optimizer step of {args.samples_per_step} samples leaves some of {args.num_trainers} ranks without any"
        yield wrong(args, "num_trainers global_batch_size", text)
    if args.num_rollout is None and args.num_epoch is None:
        yield Problem(("num_rollout", "num_epoch"), "--num-rollout, --num-epoch: one of them must say how long the run is")
    if args.compares_siblings and not args.has_teacher and args.n_samples_per_prompt == 1:
        text = f"{args.advantage_estimator} compares siblings; with one of them nothing is learnt"
        yield wrong(args, "n_samples_per_prompt advantage_estimator", text)
    first = args.start_rollout_id
    if first is not None and args.num_rollout is not None and first >= args.num_rollout:
        yield wrong(args, "start_rollout_id num_rollout", "nothing to do: the first rollout lies behind the last")


def lengths(args: RunConfig) -> Iterator[Problem]:
    if args.advantage_estimator == "sft":
        return
    room = args.engine_max_context
    for response, prefix in (("max_response_length", ""), ("eval_max_response_length", "in evaluation ")):
        longest = args.__dict__[response]
        if longest is None:
            continue
        if longest >= room:
            yield wrong(args, f"{response} engine_max_context", f"{prefix}no room is left for a prompt")
        elif args.max_prompt_length is not None and args.max_prompt_length + longest > room:
            text = f"{prefix}{args.max_prompt_length} + {longest} = {args.max_prompt_length + longest} tokens do not fit into {room}"
            yield wrong(args, f"max_prompt_length {response} engine_max_context", text)


def modes(args: RunConfig) -> Iterator[Problem]:
    if args.fully_async and args.pause_mode == "abort":
        yield wrong(args, "fully_async pause_mode", "every publish would cut off what is in flight; use retract or in_place")
    if args.mask_offpolicy_in_partial_rollout and not args.fully_async:
        yield wrong(args, "mask_offpolicy_in_partial_rollout", "only with --fully-async does a sample go on across a publish")
    if args.fully_async and args.colocate:
        yield wrong(args, "fully_async colocate", "on shared devices nothing can generate while the trainer works")
    if args.rollout_function == ("batch" if args.fully_async else "fully_async"):
        text = "is the other mode's function; leave it out, or " + ("drop" if args.fully_async else "add") + " --fully-async"
        yield wrong(args, "rollout_function", text)


def evaluation(args: RunConfig) -> Iterator[Problem]:
    if args.eval_mode == "snapshot" and args.eval_function is None:
        yield wrong(args, "eval_mode", "needs --eval-function, the dotted path of your evaluator")
    if args.eval_mode == "shared" and args.eval_function is not None:
        yield wrong(args, "eval_function", "is used with --eval-mode snapshot only")
    if args.eval_interval is not None and args.eval_mode == "shared" and not args.eval_data:
        yield Problem(("eval_interval", "eval_data"), f"--eval-interval {args.eval_interval}: needs --eval-data NAME=PATH")
    if args.keep_best_metric and args.eval_interval is None:
        yield wrong(args, "keep_best_metric", "needs --eval-interval: without evaluations no checkpoint is the best")
    for name, path in args.eval_data.items():
        if not name or "/" in name:
            yield Problem(
                ("eval_data",), f"--eval-data {name}={path}: the set's name becomes part of eval/NAME/reward: no slash, not empty"
            )
        if not there(path):
            yield Problem(("eval_data",), f"--eval-data {name}={path}: no such file (looked from {Path.cwd()})")


def files(args: RunConfig) -> Iterator[Problem]:
    if not args.hf_checkpoint:
        yield Problem(("hf_checkpoint",), "--hf-checkpoint: a model is needed; `miles get-model` makes a small one")
    for name in ("hf_checkpoint", "ref_checkpoint", "critic_checkpoint", "teacher_checkpoint"):
        if args.__dict__[name] and (reason := model_missing(args.__dict__[name])):
            yield wrong(args, name, f"{reason}; `miles get-model` makes a small model")


def folders(args: RunConfig) -> Iterator[Problem]:
    sentinel = args.save_trigger_sentinel
    written = {name: args.__dict__[name] for name in ("run_root", "save", "weight_sync_dir", "eval_hf_dir")}
    for name, folder in {**written, "save_trigger_sentinel": sentinel and str(Path(sentinel).parent)}.items():
        if folder and (reason := unwritable(folder)):
            yield wrong(args, name, reason)


def resuming(args: RunConfig) -> Iterator[Problem]:
    if args.load is None:
        return
    folder = Path(args.load).expanduser()
    newest = newest_checkpoint(folder)
    if newest is None:
        damaged = damage(folder) if (folder / COMPLETE).exists() else ""
        nowhere = "" if folder.exists() else "no such directory"
        yield wrong(args, "load", nowhere or damaged or "no complete checkpoint there (rollout_NNNNNN with COMPLETE in it, undamaged)")
    elif args.start_rollout_id is None and args.num_rollout is not None and newest + 1 >= args.num_rollout:
        if args.goes_on and lacks_last_eval(args, newest):
            return
        text = f"nothing to do: the checkpoint is at {newest + 1} of {args.num_rollout} rollouts; ask for more with --num-rollout"
        yield wrong(args, "load num_rollout", text)


def lacks_last_eval(args: RunConfig, last: int) -> bool:
    """Whether the run in the folder, trained and saved through its last rollout, ended before it was evaluated there."""
    return args.eval_interval is not None and not has_eval(read(args.run_dir), last)


def processes(args: RunConfig) -> Iterator[Problem]:
    if args.in_process and args.ray_address:
        yield wrong(args, "in_process ray_address", "one process needs no cluster")
    if args.in_process and args.num_trainers > 1:
        yield wrong(args, "in_process num_trainers", "ranks of one group need a process each")
    if args.mini_ft_controller and args.api_server_port == 0:
        yield wrong(args, "mini_ft_controller", "works through the control API; give it an --api-server-port")
    if args.gpus_per_trainer > 1:
        yield wrong(args, "gpus_per_trainer", "must be at most 1: one worker computes on one GPU; raise their number instead")
    if args.gpus_per_engine > 1 and args.engine != "sglang":
        yield wrong(args, "gpus_per_engine engine", "must be at most 1: this engine computes on one GPU; raise their number instead")
    if args.gpus_per_engine > 1 and not args.gpus_per_engine.is_integer():
        yield wrong(args, "gpus_per_engine", "a tensor parallel engine has whole GPUs")


def sglang(args: RunConfig) -> Iterator[Problem]:
    if args.engine != "sglang":
        for name in ("sglang", "sglang_python", "sglang_urls"):
            if args.__dict__[name]:
                yield wrong(args, f"{name} engine", "belongs to --engine sglang")
        return
    if args.sglang_urls and len(args.sglang_urls) != args.num_engines:
        yield wrong(args, "sglang_urls num_engines", "each engine has one server")
    if args.sglang_urls and (args.sglang or args.sglang_python):
        name = "sglang" if args.sglang else "sglang_python"
        yield wrong(args, f"{name} sglang_urls", "a server that runs already has its options and its interpreter")
    if args.sglang_python and not os.access(args.sglang_python, os.X_OK):
        yield wrong(args, "sglang_python", "no such interpreter; `make sglang-cpu` makes .venv-sglang/bin/python for CPUs")
    for option in sorted(args.sglang.keys() & SGLANG_OURS.keys()):
        yield Problem(("sglang",), f"--sglang {option}: is set through {SGLANG_OURS[option]}")
    for option in sorted(name for name in args.sglang if name != name.lower() or "-" in name):
        yield Problem(("sglang",), f"--sglang {option}: write it as {option.lower().replace('-', '_')}")
    if args.sglang.get("quantization") and args.verify_weight_updates:
        yield wrong(args, "sglang verify_weight_updates", "quantised weights have no checksum of what was sent; --no-verify-weight-updates")


def warnings_of(args: RunConfig) -> list[str]:
    """What is allowed and probably not meant."""
    found = []
    if args.offload_train and not args.use_critic and not args.colocate:
        found.append("--offload-train: without a critic or --colocate nothing else wants the trainer's memory")
    if args.save_hf and args.save_interval is None:
        found.append("--save-hf: exports happen at saves, and --save-interval asks for none but those on demand")
    if args.use_tis and args.use_rollout_logprobs:
        found.append("--use-tis: with --use-rollout-logprobs the ratio itself starts at the engines' log-probs, and all weights are 1")
    if args.policy_loss == "gspo" and args.eps_clip > 0.05:
        found.append(f"--eps-clip {args.eps_clip:g}: a sample's geometric mean ratio never gets there; gspo's paper has 3e-4 and 4e-4")
    if args.policy_loss == "cispo" and args.eps_clip_high is None:
        found.append("--policy-loss cispo: --eps-clip-high is that of the clipped loss; cispo wants a wider limit, such as 4")
    if args.api_server_port and args.api_server_host not in ("127.0.0.1", "localhost", "::1"):
        found.append(
            f"--api-server-host {args.api_server_host}: the control API can be reached from outside; its token is all that guards it"
        )
    return found


RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    ranges,
    batches,
    lengths,
    algorithm,
    lora,
    modes,
    evaluation,
    training_data,
    files,
    rewards,
    folders,
    resuming,
    processes,
    sglang,
)
