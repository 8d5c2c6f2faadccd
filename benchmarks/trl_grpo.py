"""TRL's side of `against_trl.py`; runs in an environment that has trl and needs nothing of miles.

Reads one JSON object from standard input (see `Job`) and writes one line of JSON for every optimizer step and evaluation.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


@dataclass(frozen=True)
class Job:
    model: str
    train: str
    held_out: str
    steps: int
    groups: int
    siblings: int
    micro_batch: int
    length: int
    fixed_length: bool
    lr: float
    min_lr: float
    eval_interval: int
    threads: int
    seed: int


def last_number(completions: list[str], label: list[str], **_: Any) -> list[float]:
    """1 where the last number of the answer is the label."""
    found = [re.findall(r"-?\d+", text) for text in completions]
    return [float(bool(numbers) and numbers[-1] == gold) for numbers, gold in zip(found, label, strict=True)]


class Clock(TrainerCallback):
    """Writes what happens, with the seconds since the training began."""

    def __init__(self, job: Job, tokenizer: Any) -> None:
        self.job, self.tokenizer = job, tokenizer
        self.rows = [json.loads(line) for line in Path(job.held_out).read_text().splitlines()]
        self.began = time.perf_counter()

    def tell(self, **what: Any) -> None:
        print(json.dumps({"seconds": time.perf_counter() - self.began, **what}), flush=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.evaluate(model, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.tell(step=state.global_step)
        if self.job.eval_interval and state.global_step % self.job.eval_interval == 0:
            self.evaluate(model, state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "reward" in logs:
            self.tell(reward=float(logs["reward"]), length=float(logs["completions/mean_length"]))

    @torch.no_grad()
    def evaluate(self, model: Any, step: int) -> None:
        if not self.job.eval_interval:
            return
        model.eval()
        inputs = self.tokenizer([row["prompt"] for row in self.rows], return_tensors="pt", padding=True, padding_side="left")
        output = model.generate(**inputs, do_sample=False, max_new_tokens=self.job.length, eos_token_id=self.tokenizer.eos_token_id)
        answers = self.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right = last_number(answers, [row["label"] for row in self.rows])
        model.train()
        self.tell(eval_step=step, accuracy=sum(right) / len(right))


def main() -> None:
    job = Job(**json.load(sys.stdin))
    torch.set_num_threads(job.threads)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.eos_token = "\n" if "\n" in tokenizer.get_vocab() else tokenizer.convert_ids_to_tokens(tokenizer.encode("\n")[-1])
    batch = job.groups * job.siblings
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            max_steps=job.steps,
            per_device_train_batch_size=job.micro_batch,
            gradient_accumulation_steps=batch // job.micro_batch,
            num_generations=job.siblings,
            max_completion_length=job.length,
            generation_kwargs={"min_new_tokens": job.length} if job.fixed_length else None,
            learning_rate=job.lr,
            lr_scheduler_type="polynomial",  # of power 1: linear, down to the least rate
            lr_scheduler_kwargs={"lr_end": job.min_lr, "power": 1.0},
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="dapo",  # the mean over all tokens of the step
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=job.seed,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32),
            reward_funcs=last_number,
            args=settings,
            train_dataset=load_dataset("json", data_files=job.train, split="train"),
            processing_class=tokenizer,
            callbacks=[Clock(job, tokenizer)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
