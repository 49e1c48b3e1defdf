"""Learning-rate schedules by Hugging Face name."""

from __future__ import annotations

import pytest
import torch

from molt_core.config.shared import AdamConfig, ModelConfig
from molt_core.errors import ConfigError
from molt_core.training.optimizers import build_optimizer, build_scheduler


def rates(name: str, steps: int, **options: float) -> list[float]:
    optimizer = build_optimizer([torch.nn.Parameter(torch.zeros(1))], AdamConfig(lr=1.0))
    scheduler = build_scheduler(optimizer, ModelConfig(lr_scheduler=name, **options), steps)
    seen = []
    for _ in range(steps + 1):
        seen.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return seen


def test_constant_is_the_peak_from_the_first_step():
    assert rates("constant", 4) == [1.0] * 5


def test_warm_up_takes_its_share_of_the_steps_rounded_up():
    # ceil(10 * 0.15) = 2 steps: 0, 1/2, then the peak.
    assert rates("constant_with_warmup", 10, lr_warmup_ratio=0.15)[:4] == [0.0, 0.5, 1.0, 1.0]


def test_linear_falls_to_zero_after_the_last_step():
    assert rates("linear", 4, lr_warmup_ratio=0.0) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_cosine_with_min_lr_ends_at_the_configured_share():
    seen = rates("cosine_with_min_lr", 4, lr_warmup_ratio=0.0, min_lr_ratio=0.2)
    assert seen[0] == pytest.approx(1.0)
    assert seen[2] == pytest.approx(0.6)  # half way between 1 and 0.2
    assert seen[4] == pytest.approx(0.2)


def test_warmup_stable_decay_holds_the_peak_until_the_last_tenth():
    seen = rates("warmup_stable_decay", 20, lr_warmup_ratio=0.1, min_lr_ratio=0.1)
    assert seen[2:19] == pytest.approx([1.0] * 17)
    assert seen[20] == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["cosin", "reduce_lr_on_plateau"])
def test_a_schedule_that_cannot_be_used_is_a_config_error(name):
    with pytest.raises(ConfigError, match=f"{name}.*cosine_with_min_lr"):
        rates(name, 4)


def test_frozen_parameters_are_not_optimized():
    frozen = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    trained = torch.nn.Parameter(torch.zeros(1))
    assert build_optimizer([frozen, trained], AdamConfig()).param_groups[0]["params"] == [trained]
