"""What the driver decides without any rank: which windows are steps, which options are refused, SFT's data order."""

from __future__ import annotations

import io
import os
import pickle

import numpy as np
import pytest
import torch

from molt_core.config.sft import SftTrainConfig
from molt_core.config.shared import FsdpConfig
from molt_core.contract import Segment, Turn
from molt_core.errors import ConfigError
from molt_core.training.compat import automodel_on_cpu
from molt_core.training.export import chunked
from molt_core.training.group import TrainGroup
from molt_core.training.mesh import check_parallelism, compute_dtype
from molt_core.training.objective import MetricSums
from molt_core.training.rows import TrainRow
from molt_core.training.sft import num_sft_steps, run_sft
from molt_core.training.state import _MetadataUnpickler


def segment(length: int, num_actions: int = 1, first: int = 0) -> Segment:
    prompt = [first] * (length - num_actions)
    return Segment.from_turns([Turn(prompt, [1] * num_actions, [0.0] * num_actions, [0] * num_actions)])


class RecordingGroup(TrainGroup):
    """A group of two ranks that notes what it is asked to do."""

    def __init__(self):
        super().__init__([None, None])
        self.calls = []

    def _call_each(self, method, arguments):
        self.calls.append((method, arguments))
        return [MetricSums({"train/skipped_steps": 0.0, "critic/skipped_steps": 1.0}, {}, {})] * 2


def test_a_window_without_an_action_token_is_counted_and_is_no_step():
    group = RecordingGroup()
    empty = [TrainRow(segment(3, 0), 0, 3, 0)]
    metrics = group.update([empty])
    assert group.calls == []
    assert metrics == {"train/optimizer_steps": 0.0, "train/empty_windows": 1.0}
    metrics = group.update([empty, [TrainRow(segment(3), 0, 3, 1)]])
    assert metrics["train/optimizer_steps"] == 1
    assert metrics["train/empty_windows"] == 1


def test_a_window_that_is_listed_again_is_planned_once():
    group = RecordingGroup()
    windows = [[TrainRow(segment(3), 0, 3, 1)], [TrainRow(segment(4), 0, 4, 1)]]
    group.update(windows * 2, recompute_old=True)
    (method, arguments), *_ = group.calls
    plans, order, recompute, _ = arguments[0]
    assert (method, len(plans), order, recompute) == ("update", 2, [0, 1, 0, 1], True)


def test_the_critic_has_steps_and_metrics_of_its_own():
    group = RecordingGroup()
    windows = [[TrainRow(segment(3), 0, 3, 1, advantage=2.5)]]
    metrics = group.update_critic(windows * 3)
    (method, arguments), *_ = group.calls
    plans, order = arguments[0]
    assert (method, len(plans), order) == ("update_critic", 1, [0, 0, 0])
    assert metrics["critic/optimizer_steps"] == 3 - 2  # each of the two ranks reports a skipped one


@pytest.mark.parametrize("name", ["tp_size", "cp_size", "ep_size"])
def test_parallelism_that_the_trainer_does_not_do_is_refused(name):
    check_parallelism(FsdpConfig())
    with pytest.raises(ConfigError, match=name):
        check_parallelism(FsdpConfig(**{name: 2}))


def test_the_compute_dtype_follows_the_device_unless_it_is_given():
    assert compute_dtype("auto", "cpu") is torch.float32
    assert compute_dtype("auto", "cuda") is torch.bfloat16
    assert compute_dtype("bf16", "cpu") is torch.bfloat16


def test_chunks_keep_order_and_stay_within_the_limit_unless_one_tensor_is_larger():
    pairs = [(str(n), torch.zeros(n)) for n in (2, 2, 9, 1, 1)]
    chunks = list(chunked(pairs, max_bytes=16))
    assert [[name for name, _ in chunk] for chunk in chunks] == [["2", "2"], ["9"], ["1", "1"]]
    assert isinstance(chunks[0][0][1], np.ndarray)
    assert isinstance(next(chunked([("b", torch.zeros(1, dtype=torch.bfloat16))], 16))[0][1], torch.Tensor)


def test_every_cuda_device_is_the_cpu_inside_the_compatibility_layer_and_only_there():
    before = torch.cuda.current_device
    with automodel_on_cpu():
        assert torch.cuda.current_device() == 0
        devices = [torch.device("cuda", 0), torch.device("cuda:1"), torch.device("cuda"), torch.zeros(1).to(0).device]
        devices += [torch.zeros(1, device="cuda").device, torch.zeros(1).to("cuda:0").device]
        devices += [next(torch.nn.Linear(1, 1).to(torch.cuda.current_device()).parameters()).device]
    assert {device.type for device in devices} == {"cpu"}
    assert torch.cuda.current_device is before
    assert torch.device("cuda", 0).type == "cuda"


def test_a_checkpoint_s_table_of_contents_cannot_run_code():
    class Evil:
        def __reduce__(self):
            return os.system, ("true",)

    with pytest.raises(pickle.UnpicklingError, match="system"):
        _MetadataUnpickler(io.BytesIO(pickle.dumps(Evil()))).load()


class SftGroup:
    """Notes the first token of every row of every step."""

    def __init__(self):
        self.steps = []

    def update(self, windows, *, max_tokens, micro_batch_size):
        (rows,) = windows
        self.steps.append([int(row.source.ids[0]) for row in rows])
        return {"train/loss": 1.0}


def test_sft_shows_every_segment_once_per_epoch_in_an_order_of_its_own():
    segments = [segment(2, first=i) for i in range(6)]
    group = SftGroup()
    config = SftTrainConfig(batch_size=2, max_epochs=2)
    assert num_sft_steps(6, config) == 6
    assert run_sft(segments, group, config, on_step=lambda *_: None) == 6
    epochs = [[i for step in steps for i in step] for steps in (group.steps[:3], group.steps[3:])]
    assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 2
    assert epochs[0] != epochs[1]


def test_sft_resumes_behind_the_step_of_its_state():
    segments = [segment(2, first=i) for i in range(5)]
    config = SftTrainConfig(batch_size=2, max_epochs=3)
    whole, states = SftGroup(), []
    run_sft(segments, whole, config, on_step=lambda step, metrics, state: states.append(state))
    for state in states[:-1]:
        resumed = SftGroup()
        assert run_sft(segments, resumed, config, on_step=lambda *_: None, state=state) == len(whole.steps)
        assert resumed.steps == whole.steps[state["step"] :]


def test_sft_stops_at_max_steps():
    group = SftGroup()
    config = SftTrainConfig(batch_size=2, max_epochs=3, max_steps=2)
    assert run_sft([segment(2)] * 5, group, config, on_step=lambda *_: None) == 2
    assert len(group.steps) == 2
