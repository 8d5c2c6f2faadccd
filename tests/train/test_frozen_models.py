"""The reference and the teacher: loaded when asked for, and only a teacher that reads the same words in the same ids."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.train.rollouts import Store, make_shares, make_trainer, settings


def test_a_teacher_is_asked_for_its_word_on_every_trained_token(tiny: str, store: Store) -> None:
    trainer = make_trainer(settings(tiny, advantage_estimator="opd", teacher_checkpoint=tiny, use_tis=True), store)
    assert trainer.frozen.loaded == {}
    share = make_shares(0)[0]
    columns, steps = trainer._prepare(share, None)
    assert set(trainer.frozen.loaded) == {"teacher"}
    own = trainer._evaluate(trainer.model, steps, columns)
    wanted = (own - columns.rollout_logprobs)[columns.trained]
    assert columns.advantages[columns.trained].tolist() == pytest.approx(wanted.tolist(), abs=1e-5)
    assert not columns.advantages[~columns.trained].any()
    assert not any(parameter.requires_grad for parameter in trainer.frozen.get("teacher").parameters())


def test_a_served_teachers_word_comes_with_the_samples(tiny: str, store: Store) -> None:
    args = settings(tiny, advantage_estimator="opd", teacher_urls=["http://x:1"], teacher_coef=0.5, use_tis=True)
    trainer = make_trainer(args, store)
    share = make_shares(0)[0]
    with pytest.raises(ValueError, match="--teacher-urls: no teacher has scored these samples"):
        trainer._prepare(share, None)
    share.data.teacher_logprobs = share.data.rollout_logprobs - np.arange(len(share.data.token_ids), dtype=np.float32)
    columns, _ = trainer._prepare(share, None)
    assert trainer.frozen.loaded == {}
    wanted = -0.5 * np.arange(len(columns.trained)) * columns.trained
    assert columns.advantages.tolist() == pytest.approx(wanted.tolist(), abs=1e-4)


def test_a_teacher_with_another_tokenizer_is_refused(tiny: str, store: Store, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(other)
    trainer = make_trainer(settings(tiny, advantage_estimator="opd", teacher_checkpoint=str(other), use_tis=True), store)
    with pytest.raises(ValueError, match="--teacher-checkpoint: its tokenizer is not that of --hf-checkpoint"):
        trainer.train(0, store.put(make_shares(0)[0]))
