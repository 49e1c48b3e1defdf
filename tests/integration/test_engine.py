"""vLLM on CPU in a Ray actor: exact log-probs, refits with requests in flight, cancellation, and a runner on top."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

from molt_core import Env, Result
from molt_core.rollout.actors import EngineDiedError, WeightsIncompleteError
from molt_core.rollout.engine import EngineRequest, EngineSettings
from molt_core.rollout.refit import Refitter, refit
from molt_core.rollout.remote import start_engines, start_runners
from molt_core.testing.tiny import make_tiny_checkpoint
from molt_core.training.rows import fetch_rollouts

pytestmark = pytest.mark.integration

END = 258
"""The tiny tokenizer's turn end."""
PROMPTS = [[65 + i, 66, 67, 68 + i] for i in range(8)]
TOLERANCE = 1e-4


class OneTurn(Env):
    """The reward is the number of sampled ids."""

    async def reset(self, row, ctx):
        return [{"role": "user", "content": row["question"]}]

    async def step(self, action, ctx):
        return Result(reward=len(action.ids), terminated=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def ray_session():
    import ray

    ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def engine(ray_session, folder):
    settings = EngineSettings(str(folder), "cpu", "float32", max_len=512, enable_prefix_caching=True)
    (engine,) = start_engines(settings, 1)
    asyncio.run(engine.check_health())
    yield engine
    asyncio.run(engine.shutdown())


@pytest.fixture(scope="module")
def policies(folder):
    """Policies by version: the checkpoint, and others with the same names and shapes."""
    import torch
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(4)]
    for version, model in enumerate(models[1:], 1):
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return models


def chunks(model, num=3):
    """Checkpoint tensors in chunks, as the trainer sends them; the tied output layer is not in a checkpoint."""
    import ray

    tensors = [(name, value.numpy()) for name, value in model.state_dict().items() if name != "lm_head.weight"]
    return [ray.put(tensors[i::num]) for i in range(num)]


def logprobs(model, prompt, completion, temperature):
    """Log-probs of a completion under the softmax of logits / temperature."""
    import torch

    ids = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        scores = torch.log_softmax(model(ids).logits[0].double() / temperature, -1)
    return scores[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


async def sample(engine, prompts=PROMPTS, *, max_tokens=24, temperature=1.0):
    requests = [
        EngineRequest(prompt, max_tokens, temperature, seed=seed, stop_token_ids=(END,))
        for seed, prompt in enumerate(prompts)
    ]
    return await asyncio.gather(*(engine.generate(request) for request in requests))


async def check_policy(engine, model, version, temperature):
    for prompt, done in zip(PROMPTS, await sample(engine, temperature=temperature), strict=True):
        assert set(done.versions) == {version}
        expected = logprobs(model, prompt, done.ids, temperature)
        np.testing.assert_allclose(done.logprobs, expected, atol=TOLERANCE)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_distribution_that_is_sampled_from(engine, policies, temperature):
    asyncio.run(refit([engine], chunks(policies[0]), 0))
    asyncio.run(check_policy(engine, policies[0], 0, temperature))


def test_sampling_follows_its_seed_and_stops_at_the_given_ids(engine):
    async def scenario():
        first = await sample(engine, max_tokens=200)
        again = await sample(engine, max_tokens=200)
        assert [done.ids for done in first] == [done.ids for done in again]
        stopped = [done for done in first if done.finish_reason == "stop"]
        cut = [done for done in first if done.finish_reason == "length"]
        assert all(done.ids[-1] == END and END not in done.ids[:-1] for done in stopped)
        assert all(END not in done.ids and len(done.ids) == 200 for done in cut)
        assert stopped  # one id in 320 at random: 8 requests of 200 tokens
        greedy = await sample(engine, [PROMPTS[0]] * 2, temperature=0.0)
        assert greedy[0].ids == greedy[1].ids

    asyncio.run(scenario())


def test_refits_with_requests_in_flight_are_exact_token_by_token(engine, policies):
    prompts = [[70 + i] * 30 for i in range(16)]

    async def scenario():
        for version in (1, 2, 3):
            under_way = asyncio.create_task(sample(engine, prompts, max_tokens=450))
            await asyncio.sleep(0.15)
            await Refitter([engine], lambda model=policies[version]: chunks(model)).refit(version)
            crossed = 0
            for prompt, done in zip(prompts, await under_way, strict=True):
                new = np.array(done.versions) == version
                assert set(np.array(done.versions)[~new]) <= {version - 1}
                assert not new.any() or new[new.argmax() :].all()  # the old policy's tokens come first
                expected = np.where(
                    new,
                    logprobs(policies[version], prompt, done.ids, 1.0),
                    logprobs(policies[version - 1], prompt, done.ids, 1.0),
                )
                np.testing.assert_allclose(done.logprobs, expected, atol=TOLERANCE)
                crossed += 0 < new.sum() < len(new)
            assert crossed > 0
            await check_policy(engine, policies[version], version, 1.0)
            await check_policy(engine, policies[version], version, 0.7)
            assert await engine.version() == version

    asyncio.run(refit([engine], chunks(policies[0]), 0))
    asyncio.run(scenario())


@pytest.mark.parametrize(
    "left_out",
    ["model.layers.2.self_attn.k_proj.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"],
)
def test_a_refit_that_leaves_a_tensor_out_is_an_error_that_names_the_parameter(engine, policies, left_out):
    import ray

    tensors = [[pair for pair in ray.get(ref) if pair[0] != left_out] for ref in chunks(policies[1])]
    layer = left_out.rsplit(".", 2)[0]
    with pytest.raises(WeightsIncompleteError, match=f"1 engine parameters were not replaced .{layer}"):
        asyncio.run(refit([engine], [ray.put(chunk) for chunk in tensors], 9))
    asyncio.run(refit([engine], chunks(policies[2]), 2))
    asyncio.run(check_policy(engine, policies[2], 2, 1.0))


def test_a_tensor_that_is_sent_twice_or_has_no_place_is_an_error(engine, policies):
    import ray

    whole = chunks(policies[1])
    for extra, message in (("model.norm.weight", "twice"), ("model.foo.weight", "foo")):
        with pytest.raises(Exception, match=message):
            asyncio.run(refit([engine], [*whole, ray.put([(extra, np.zeros(128, np.float32))])], 9))
    asyncio.run(refit([engine], chunks(policies[2]), 2))


def test_nothing_of_a_refit_stays_on_disk(engine, policies):
    asyncio.run(refit([engine], chunks(policies[2]), 2))
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("molt-refit-")]


def test_a_cancelled_request_is_aborted(engine):
    async def scenario():
        request = EngineRequest([70] * 4, 500, seed=1)
        task = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(50):
            if await engine.num_unfinished() == 0:
                return
            await asyncio.sleep(0.1)
        raise AssertionError("the request is still running")

    asyncio.run(scenario())


def test_a_request_that_does_not_fit_is_refused_and_the_engine_lives_on(engine):
    async def scenario():
        with pytest.raises(Exception, match="512"):
            await engine.generate(EngineRequest([70] * 513, 1))
        await engine.check_health()
        assert len((await sample(engine, [[70]], max_tokens=1))[0].ids) == 1

    asyncio.run(scenario())


def test_a_group_runs_in_a_runner_actor(engine, folder):
    import ray

    from molt_core.config import RLConfig
    from molt_core.plugins import PluginSpec
    from molt_core.rollout.runner import RunnerSettings
    from molt_core.rollout.tasks import GroupTask, SamplingSettings

    config = RLConfig(
        actor={"model_name_or_path": str(folder)}, env={"name": f"{__file__}:OneTurn"}, data={"max_len": 128}
    )
    (runner,) = start_runners(RunnerSettings.from_config(config, PluginSpec()), [engine], 1)
    task = GroupTask("g", {"question": "Hi"}, 3, seed=0, sampling=SamplingSettings(max_new_tokens=8))
    summaries = asyncio.run(runner.run_group(task))
    assert [s.id for s in summaries] == ["g-0", "g-1", "g-2"]
    for summary in summaries:
        (rollout,) = fetch_rollouts([summary.data])
        (segment,) = rollout.segments
        assert rollout.status == summary.status
        assert rollout.text.startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert segment.num_actions == summary.num_actions == summary.reward
        assert summary.oldest_version == 2
    ray.kill(runner.actor)


def test_a_dead_engine_is_an_error_and_not_a_hang(ray_session, folder):
    settings = EngineSettings(str(folder / "missing"), "cpu", "float32", max_len=64)
    (broken,) = start_engines(settings, 1)
    with pytest.raises(EngineDiedError):
        asyncio.run(broken.generate(EngineRequest([1], 1)))


def test_an_engine_whose_process_is_killed_is_an_error_and_not_a_hang(engine):
    """The last test: the engine is gone afterwards."""
    import psutil

    async def scenario():
        request = asyncio.create_task(engine.generate(EngineRequest([70] * 4, 500)))
        await asyncio.sleep(0.3)
        for process in psutil.Process().children(recursive=True):
            if "EngineCore" in " ".join([process.name(), *process.cmdline()]):
                process.kill()
        with pytest.raises(EngineDiedError):
            await request
        with pytest.raises(EngineDiedError):
            await engine.pause()

    asyncio.run(asyncio.wait_for(scenario(), 60))
