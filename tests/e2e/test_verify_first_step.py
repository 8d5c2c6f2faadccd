"""--verify-first-step over whole runs of the driver: honest ones go on, a fault on the way ends them by its name."""

import logging
import re

import pytest
import torch

from miles.engines.served_weights import ServedWeights
from miles.protocols import FirstStepWrong

VERIFY = ("--verify-first-step", "--num-rollout", "2")


@pytest.mark.parametrize("flags", [(), ("--fully-async",), ("--advantage-estimator", "ppo", "--num-critic-only-steps", "1")])
def test_an_honest_run_goes_on(drive, flags, caplog):
    with caplog.at_level(logging.INFO):
        run = drive("honest", *VERIFY, *flags)
    (line,) = [record.getMessage() for record in caplog.records if "all passed" in record.getMessage()]
    as_written = r"\d+ trained tokens are as engines wrote them; "
    assert re.search(rf"first step: all passed: ({as_written})?log-probs .* differ by .*; the policy ratio is 1.*; ", line)
    assert "no KL to a reference" in line
    assert "gold answers" in line
    assert dict(run.series("verify/logprob_abs_diff_max")).popitem()[1] < 1e-4
    assert len(run.series("verify/tokens_as_written")) == 1
    assert [rollout for rollout, _ in run.series("train/loss")][-1] == 1


def test_weights_that_change_behind_the_trainers_back(drive, monkeypatch):
    finish = ServedWeights.finish

    @torch.no_grad()
    def corrupted(self):
        checksums = finish(self)  # the publish was right; what comes after it is not
        self.parameters["model.norm.weight"][3] += 0.5
        return checksums

    monkeypatch.setattr(ServedWeights, "finish", corrupted)
    with pytest.raises(FirstStepWrong, match=r"weights: engine 0 of 1 .*1 differ: model\.norm\.weight"):
        drive("corrupt", *VERIFY)


def test_an_engine_that_samples_at_another_temperature(drive, monkeypatch):
    from miles.engines.embedded import sampling

    real = sampling.sample
    monkeypatch.setattr("miles.engines.embedded.decoder.sample", lambda logits, draws: real(logits / 0.5, draws))
    with pytest.raises(FirstStepWrong, match=r"sampling filter: .* they are those of temperature 0\.5, not of --temperature 1"):
        drive("hot", *VERIFY)


def test_ids_that_were_encoded_again(drive):
    with pytest.raises(FirstStepWrong, match="tokenisation: trained token 0"):
        drive("retokenised", *VERIFY, "--generate-function", "tests.rollout.plugs.retokenised")
