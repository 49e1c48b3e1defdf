"""Every combination that makes no sense is refused at launch, in one sentence that says what to change.

The commands are real, and so are the installed plugins; nothing is started.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from molt_core.cli import main
from molt_core.testing.tiny import make_tiny_checkpoint, make_tiny_tokenizer

ROOT = Path(__file__).parents[2]
EST, LEVEL, MODE = (
    "--algo.advantage.estimator",
    "--algo.advantage.is_correction_level",
    "--algo.advantage.is_correction_mode",
)
BAND, GATING = "--algo.advantage.is_correction_threshold", "--algo.advantage.is_correction_gating"
LOSS, CLIP, AGG, SYNC = (
    "--actor.loss_mode",
    "--actor.eps_clip_low_high",
    "--actor.loss_agg_mode",
    "--train.force_sync_mode",
)
SAMPLES, PROMPTS = "--rollout.n_samples_per_prompt", "--rollout.batch_size"
REF, CRITIC = "--ref.model_name_or_path", "--critic.model_name_or_path"
KL, USE, ESTIMATE, TO, TARGET = (
    "--algo.kl.init_coef",
    "--algo.kl.use_loss",
    "--algo.kl.estimator",
    "--algo.kl.ref",
    "--algo.kl.target",
)
FILTER, RANGE = "--algo.dynamic_filtering_enable", "--algo.dynamic_filtering_range"
OVERLONG, BUFFER, STOP = "--reward.overlong_max", "--reward.overlong_buffer", "--reward.stop_properly"
CONTEXT, TURN, EVAL = "--data.max_len", "--rollout.max_new_tokens", "--eval.dataset"
GATE = (LEVEL, "token", MODE, "mask", GATING, "binary_kl")
DISTILL = (EST, "on_policy_distill", REF, "ref")
FLASH = (EST, "flash_reinforce", SAMPLES, "1", PROMPTS, "4")
REWARD = (EST, "reinforce", KL, "0.1", USE.replace("--", "--no-"))

LOCAL = """
from molt_core import Estimator, Needs, Reward

class Score(Reward):
    pass

class OfFour(Estimator):
    needs = Needs(groups=True, min_samples=4)
"""

REFUSED = {
    # Names and options of plugins.
    "unknown estimator": ((EST, "grop"), "did you mean grpo?"),
    "unknown loss": ((LOSS, "ppo2"), "did you mean ppo?"),
    "option of another estimator": (("--algo.advantage.args.gamma", "0.9", EST, "grpo"), "--algo.advantage.args.gamma"),
    "discount above 1": (("--algo.advantage.args.gamma", "1.5", EST, "reinforce"), "less than or equal to 1"),
    # Losses.
    "dual clip with gspo": (
        ("--actor.dual_clip", "3", LOSS, "gspo"),
        "loss gspo has no dual_clip: leave --actor.dual_clip out",
    ),
    "dual clip with cispo": (("--actor.dual_clip", "3", LOSS, "cispo"), "leave --actor.dual_clip out"),
    "dual clip with reinforce": (("--actor.dual_clip", "3", LOSS, "reinforce"), "leave --actor.dual_clip out"),
    "clipping with reinforce": ((CLIP, "0.2", "0.2", LOSS, "reinforce"), "leave --actor.eps_clip_low_high out"),
    "dual clip of at most 1": (
        ("--actor.dual_clip", "1"),
        "--actor.dual_clip: input should be greater than 1",
    ),
    "ceiling of cispo below 1": ((CLIP, "0", "0.9", LOSS, "cispo"), "input should be greater than or equal to 1"),
    "lower bound for cispo": ((CLIP, "0.1", "2", LOSS, "cispo"), f"{CLIP}: input should be less than or equal to 0"),
    "clip range of zero": ((CLIP, "0", "0.2"), "--actor.eps_clip_low_high: input should be greater than 0"),
    "option given twice": (("--actor.dual_clip", "3", "--actor.loss_args.dual_clip", "4"), "give one of them"),
    # Aggregation.
    "unknown aggregation": ((AGG, "token-sum"), "--actor.loss_agg_mode"),
    "constant without its aggregation": (
        ("--actor.loss_agg_norm", "100"),
        "no effect with token-mean: leave it out, or set --actor.loss_agg_mode seq-mean-token-sum",
    ),
    "constant of zero": ((AGG, "seq-mean-token-sum", "--actor.loss_agg_norm", "0"), "greater than 0"),
    # Estimators and the number of rollouts and steps.
    **{
        f"{name} with one rollout per prompt": ((EST, name, SAMPLES, "1"), f"set {SAMPLES} to 2 or more")
        for name in ("grpo", "dr_grpo", "rloo", "reinforce_baseline")
    },
    "fewer rollouts than a local estimator compares": (
        (EST, "./local.py:OfFour", SAMPLES, "3"),
        f"set {SAMPLES} to 4 or more",
    ),
    "several rollouts per prompt without groups": ((*FLASH, SAMPLES, "4"), f"set {SAMPLES} 1"),
    "several windows where one is meant": ((*FLASH, "--train.batch_size", "2"), "leave --train.batch_size out"),
    "several epochs where one is meant": ((*FLASH, "--train.max_epochs", "2"), "set --train.max_epochs 1"),
    "several windows with a loss for one": (
        (LOSS, "reinforce", "--train.batch_size", "32"),
        "leave --train.batch_size out and set --train.max_epochs 1, or choose another --actor.loss_mode",
    ),
    "several epochs with a loss for one": ((LOSS, "reinforce", "--train.max_epochs", "2"), "set --train.max_epochs 1"),
    "a single rollout to compare with itself": ((*FLASH, PROMPTS, "1"), f"set {PROMPTS} to 2"),
    # 2 x 6 = 12 rollouts; the divisors next to 5 are 4 and 6, and next to 13 there is only 12.
    "batch that does not divide": ((PROMPTS, "2", SAMPLES, "6", "--train.batch_size", "5"), "set it to 4 or 6"),
    "batch above all rollouts": ((PROMPTS, "2", SAMPLES, "6", "--train.batch_size", "13"), "set it to 12, or"),
    "too few groups in flight": (("--rollout.vllm_generate_batch_size", "7"), f"set it to {PROMPTS} or more"),
    # Strictly on-policy.
    "queue without lag": ((SYNC, "--train.async_queue_size", "2"), "set --train.async_queue_size 1"),
    "staleness without lag": ((SYNC, "--train.max_staleness", "1"), "leave --train.max_staleness out"),
    "more groups in flight without lag": (
        (SYNC, "--rollout.vllm_generate_batch_size", "9"),
        f"set --rollout.vllm_generate_batch_size to {PROMPTS}",
    ),
    # The correction.
    "asynchronous without correction": ((LEVEL, "off"), f"set {LEVEL} token, or {SYNC}"),
    "several steps without correction": ((LEVEL, "off", SYNC, "--train.max_epochs", "2"), "set --train.max_epochs 1"),
    "several windows without correction": ((LEVEL, "off", SYNC, "--train.batch_size", "32"), f"set {LEVEL} token"),
    "clipping sequences": ((LEVEL, "seq", MODE, "clip"), f"set {MODE} mask"),
    "truncating sequences": ((LEVEL, "seq", MODE, "trunc"), f"set {MODE} mask"),
    "clipping geometric means": ((LEVEL, "geo", MODE, "clip"), f"set {MODE} mask"),
    "truncating geometric means": ((LEVEL, "geo", MODE, "trunc"), f"set {MODE} mask"),
    "thresholds reversed": ((BAND, "5", "0.5"), "LOW must be less than HIGH"),
    "thresholds equal": ((BAND, "1", "1"), "LOW must be less than HIGH"),
    "lower threshold that is no number": ((BAND, "nan", "2"), "finite number"),
    "upper threshold that is no number": ((BAND, "0.5", "nan"), f"{BAND}: input should be a finite number"),
    "negative threshold": ((BAND, "-1", "2"), "greater than or equal to 0"),
    "threshold without end": ((BAND, "0.5", "inf"), f"{BAND}: input should be a finite number"),
    "thresholds above an unchanged policy": ((MODE, "clip", BAND, "1.5", "2"), "set LOW to 1 or less"),
    "thresholds below an unchanged policy": ((MODE, "mask", BAND, "0.5", "0.9"), "HIGH to 1 or more"),
    "lower threshold for truncation": ((BAND, "0.8", "1.2"), f"set {BAND} 0 1.2, or {MODE} clip"),
    "mode without correction": ((SYNC, LEVEL, "off", MODE, "mask"), f"{MODE} has no effect without a correction"),
    "threshold without correction": ((SYNC, LEVEL, "off", BAND, "0", "2"), f"leave it out, or set {LEVEL} token"),
    "gating that truncates": ((GATING, "binary_kl", BAND, "0", "0.1"), f"set {MODE} mask, not trunc"),
    "gating that clips": ((GATING, "tv", MODE, "clip", BAND, "0", "0.1"), f"set {MODE} mask, not clip"),
    "gating without correction": (
        (SYNC, *GATE, LEVEL, "off", BAND, "0", "0.1"),
        f"{MODE} and {BAND} and {GATING} have no effect without a correction: leave them out",
    ),
    "gating with a lower bound": ((*GATE, BAND, "0.1", "0.2"), f"set {BAND} 0 0.2"),
    "total variation that admits everything": ((*GATE, GATING, "tv", BAND, "0", "1"), f"lower {BAND}"),
    "divergence that admits everything": ((*GATE, BAND, "0", "13.9"), f"lower {BAND}"),
    # Rewards and filters.
    "reward range that is no number": (("--reward.clip_range", "nan", "1"), "LOW must be less than HIGH"),
    **{
        f"{args[0]} without rewards": ((*DISTILL, *args), "which ignores rewards: leave")
        for args in (
            ("--reward.name", "./local.py:Score"),
            ("--reward.overlong_max", "100", "--reward.overlong_buffer", "50"),
            ("--reward.stop_properly", "0.5"),
            ("--reward.clip_range", "0", "1"),
            (FILTER,),
        )
    },
    "reward range reversed": (("--reward.clip_range", "1", "0"), "LOW must be less than HIGH"),
    "penalty that no rollout can reach": ((CONTEXT, "99", OVERLONG, "99", BUFFER, "9"), "more than the 98 tokens"),
    # 16 turns of 4 tokens
    "penalty that no turns can reach": ((TURN, "4", OVERLONG, "65", BUFFER, "9"), "more than the 64 tokens"),
    "options of no reward plugin": (
        ("--reward.args.scale", "2", "--reward.timeout", "5"),
        "--reward.args and --reward.timeout have no effect on the environment's own reward",
    ),
    "nothing that gives a reward": (("--env.name", "single-turn"), "set --env.name to one that does, or --reward.name"),
    "overlong without buffer": (("--reward.overlong_max", "100"), "--reward.overlong_buffer: give the other"),
    "overlong without maximum": (("--reward.overlong_buffer", "100"), "--reward.overlong_max and"),
    "buffer above the maximum": (("--reward.overlong_max", "10", "--reward.overlong_buffer", "11"), "lower it"),
    "overlong and stop properly": (
        ("--reward.overlong_max", "100", "--reward.overlong_buffer", "50", "--reward.stop_properly", "0.5"),
        "or set --reward.stop_properly 1",
    ),
    "factor above 1": (("--reward.stop_properly", "1.5"), "less than or equal to 1"),
    "factor below 0": (("--reward.stop_properly", "-0.5"), "greater than or equal to 0"),
    "filtering groups of one": (
        (*FLASH, "--algo.dynamic_filtering_enable"),
        "or --no-algo.dynamic_filtering_enable",
    ),
    "filter range reversed": (
        ("--algo.dynamic_filtering_enable", "--algo.dynamic_filtering_range", "1", "0"),
        "LOW must be less than HIGH",
    ),
    "filter range without a filter": (
        ("--algo.dynamic_filtering_range", "0", "1"),
        f"leave it out, or set {FILTER}",
    ),
    "other filter options without a filter": (
        ("--algo.dynamic_filtering_metric", "acc", "--algo.dynamic_filtering_max_tries", "3"),
        "--algo.dynamic_filtering_metric and --algo.dynamic_filtering_max_tries have no effect without a filter",
    ),
    # Sampling that the trainer cannot follow.
    "nucleus sampling": (("--rollout.top_p", "0.9"), "set --rollout.top_p 1"),
    "top-k sampling": (("--rollout.top_k", "5"), "set --rollout.top_k -1"),
    "temperature without end": (("--rollout.temperature", "inf"), "input should be a finite number"),
    # Lengths.
    "prompt as long as the context": ((CONTEXT, "64", "--data.max_prompt_len", "64"), "--data.max_prompt_len 64"),
    "reply as long as the context": ((CONTEXT, "64", TURN, "64"), f"{TURN} 64 leaves no room"),
    "held-out reply as long as the context": (
        (CONTEXT, "9", EVAL, "prompts.jsonl", "--eval.max_new_tokens", "9"),
        "--eval.max_new_tokens 9 leaves no room",
    ),
    "context of one": ((CONTEXT, "1"), "--data.max_len must be at least 2"),
    "context above the model's": ((CONTEXT, "1000000"), "positions of model: lower it"),
    # Optimizers.
    "beta of one": (("--actor.adam.betas", "0.9", "1.0"), "--actor.adam.betas 1.0"),
    "negative beta of the critic": ((EST, "gae", "--critic.adam.betas", "-0.1", "0.9"), "--critic.adam.betas -0.1"),
    "rate that is no number": (("--actor.adam.lr", "nan"), "--actor.adam.lr: input should be a finite number"),
    "unknown schedule": (("--actor.lr_scheduler", "cosin"), "--actor.lr_scheduler 'cosin' is not usable here"),
    "unknown schedule of the critic": ((EST, "gae", "--critic.lr_scheduler", "x"), "--critic.lr_scheduler 'x'"),
    "warm-up of a schedule without one": (("--actor.lr_warmup_ratio", "0.1"), "another --actor.lr_scheduler"),
    "lowest rate of a schedule without one": (
        ("--actor.lr_scheduler", "linear", "--actor.min_lr_ratio", "0.2"),
        "--actor.min_lr_ratio has no effect with the schedule linear",
    ),
    "entropy bonus that is no number": (("--actor.entropy_coef", "nan"), "input should be a finite number"),
    "entropy bonus without end": (("--actor.entropy_coef", "inf"), "input should be a finite number"),
    # KL.
    "KL reward without effect": (
        (*REWARD, EST, "grpo"),
        "so it would have no effect: set --algo.kl.use_loss",
    ),
    "KL reward to the rollout policy": ((*REWARD, TO, "rollout"), "set --algo.kl.use_loss, or --algo.kl.ref reference"),
    "KL to the very policy that samples": ((SYNC, KL, "0.1", TO, "rollout"), "so a KL to it would have no effect"),
    "steering without a pull": ((KL, "0.1", TARGET, "0.1", ESTIMATE, "k1"), "set --algo.kl.estimator k2 or k3"),
    "horizon of a fixed coefficient": ((KL, "0.1", "--algo.kl.horizon", "64"), f"leave it out, or set {TARGET}"),
    "reference without a KL": ((REF, "ref"), "set --algo.kl.init_coef above 0"),
    "reference beside a KL to the rollout policy": ((KL, "0.1", TO, "rollout", REF, "ref"), f"{REF} has no effect"),
    **{
        f"{args[0]} without a KL": (args, f"{args[0].replace('no-', '')} has no effect without a KL: leave it out")
        for args in (
            (USE,),
            (USE.replace("--", "--no-"),),
            (ESTIMATE, "k2"),
            (TO, "rollout"),
            (TARGET, "0.1"),
            ("--algo.kl.horizon", "64"),
        )
    },
    # Distillation.
    "distilling without a teacher": (DISTILL[:2], f"needs a teacher: set {REF} to another model"),
    "distilling from the student": ((*DISTILL, REF, "model"), "needs a teacher"),
    "distilling by a loss": ((*DISTILL, USE), f"leave {USE} out"),
    "distilling from the rollout policy": ((*DISTILL, TO, "rollout"), "set --algo.kl.ref reference"),
    "distilling with k3": ((*DISTILL, ESTIMATE, "k3"), f"leave {ESTIMATE} out, or set k1"),
    "steering what a student learns from": ((*DISTILL, TARGET, "0.1"), "and set --algo.kl.init_coef"),
    # Models around the policy.
    "teacher of another vocabulary": ((*DISTILL, REF, "other"), "another vocabulary than model (token '<tool>'"),
    "reference of another vocabulary": ((KL, "0.1", REF, "other"), f"set {REF} to a model with the actor's tokenizer"),
    "critic of another vocabulary": ((EST, "gae", CRITIC, "other"), f"set {CRITIC} to a model with the actor's"),
    "reference that is not there": ((KL, "0.1", REF, "./nowhere"), f"{REF}: there is no folder"),
    "critic that is not there": ((EST, "gae", CRITIC, "./nowhere"), f"{CRITIC}: there is no folder"),
    "reference without a tokenizer": ((KL, "0.1", REF, "bare"), f"{REF}: bare has no tokenizer files"),
    "reference with a shorter context": ((KL, "0.1", REF, "short"), "more than the 64 positions of short: lower it"),
    **{
        f"{args[0]} without a critic": (
            args,
            f"{args[0]} has no effect with estimator reinforce_baseline, which has no",
        )
        for args in (
            (CRITIC, "ref"),
            ("--critic.value_clip", "0.1"),
            ("--critic.max_epochs", "2"),
            ("--critic.adam.lr", "1e-4"),
            ("--actor.freezing_steps", "1"),
        )
    },
    "only the critic's steps": (
        (EST, "gae", "--actor.freezing_steps", "1"),
        "leaves none of the 1 steps for the actor",
    ),
    # Prompts, evaluation, checkpoints, parallelism.
    "prompts without a question": (
        (*DISTILL, "--env.name", "single-turn", "--data.prompt_dataset", "texts.jsonl"),
        "no column 'messages' or 'prompt' or 'question'",
    ),
    "evaluating every 0 steps": ((EVAL, "prompts.jsonl", "--eval.steps", "0"), "--eval.steps 0: give 1 or more"),
    **{
        f"{args[0]} without held-out prompts": (args, f"{args[0]} has no effect without held-out prompts")
        for args in (
            ("--eval.steps", "5"),
            ("--eval.at_start",),
            ("--eval.temperature", "0"),
            (SAMPLES.replace("rollout", "eval"), "2"),
            ("--eval.max_new_tokens", "5"),
            ("--eval.max_samples", "5"),
        )
    },
    "held-out prompts for nothing": ((EVAL, "prompts.jsonl", "--no-eval.at_end"), "set --eval.steps, --eval.at_start"),
    "checkpoint every 0 steps": (("--ckpt.save_steps", "0"), "--ckpt.save_steps 0: give 1 or more"),
    "tensor parallel": (("--fsdp.tp_size", "2"), "set --fsdp.tp_size 1"),
    "context parallel": (("--fsdp.cp_size", "2"), "set --fsdp.cp_size 1"),
    "expert parallel": (("--fsdp.ep_size", "2"), "set --fsdp.ep_size 1"),
}

ACCEPTED = {
    "defaults": (),
    "sequence gate for single rollouts": (
        *(*FLASH, *GATE, BAND, "0", "0.05", AGG, "seq-mean-token-mean", LOSS, "reinforce"),
    ),
    "Dr. GRPO": (EST, "dr_grpo", AGG, "seq-mean-token-sum", "--actor.loss_agg_norm", "512"),
    "sequences": (LOSS, "gspo", AGG, "seq-mean-token-mean", LEVEL, "geo", MODE, "mask", BAND, "0.9", "1.1"),
    "one-sided clipping": (EST, "rloo", LOSS, "cispo", CLIP, "0", "4", LEVEL, "token", MODE, "clip"),
    "overlong penalty and filter": (
        *("--reward.overlong_max", "100", "--reward.overlong_buffer", "20", "--algo.dynamic_filtering_enable"),
        *("--algo.dynamic_filtering_range", "0", "1", "--actor.dual_clip", "3"),
    ),
    "cut rollouts": ("--reward.stop_properly", "0"),
    "on-policy without correction": (SYNC, LEVEL, "off"),
    "truncation without a lower threshold": (BAND, "0", "2"),
    "several steps of several windows": ("--train.batch_size", "16", "--train.max_epochs", "2"),
    "lag": (
        *("--train.async_queue_size", "3", "--train.max_staleness", "2", "--rollout.vllm_generate_batch_size", "32"),
    ),
    "one rollout per prompt": (EST, "reinforce", SAMPLES, "1"),
    "four to compare": (EST, "./local.py:OfFour", SAMPLES, "4"),
    "reward plugin": ("--env.name", "single-turn", "--reward.name", "./local.py:Score", "--reward.timeout", "5"),
    "rewards without bounds": ("--reward.clip_range", "-inf", "inf"),
    "KL as a loss": (KL, "0.1", REF, "ref", TARGET, "0.1", "--algo.kl.horizon", "64", ESTIMATE, "k2"),
    "KL to the rollout policy": (KL, "0.1", TO, "rollout"),
    "KL to the rollout policy while it moves": (KL, "0.1", TO, "rollout", SYNC, "--train.max_epochs", "2"),
    "KL as a reward": REWARD,
    "distillation": (*DISTILL, "--env.name", "single-turn", KL, "0.5"),
    "critic": (EST, "gae", CRITIC, "ref", "--critic.value_clip", "0", "--critic.lr_scheduler", "linear"),
    "warm-up and lowest rate": (
        *("--actor.lr_scheduler", "cosine_with_min_lr", "--actor.lr_warmup_ratio", "0.1", "--actor.min_lr_ratio", "0"),
    ),
    "evaluation": (EVAL, "prompts.jsonl", "--eval.steps", "5", "--eval.temperature", "0"),
    "lengths": ("--ckpt.save_steps", "10", CONTEXT, "64", TURN, "63"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, prompts and components, for commands with relative paths."""
    folder = tmp_path_factory.mktemp("launch")
    small = {"hidden_size": 32, "layers": 1, "heads": 1, "kv_heads": 1, "intermediate": 32}
    for name in ("model", "ref", "other", "short", "bare"):
        make_tiny_checkpoint(folder / name, **small)
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(folder / "other")
    config = folder / "short" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 64}))
    for file in (*(folder / "bare").glob("tokenizer*"), *(folder / "bare").glob("*.jinja")):
        file.unlink()
    (folder / "local.py").write_text(LOCAL)
    (folder / "prompts.jsonl").write_text('{"question": "1 + 1?", "answer": "2", "metadata": {}}\n')
    (folder / "texts.jsonl").write_text('{"text": "1 + 1?"}\n')
    return folder


@pytest.fixture
def molt(folder, capsys, monkeypatch):
    """Runs a command in the folder; the exit code, and what it says on stdout and stderr."""
    monkeypatch.chdir(folder)

    def run(*args):
        code = main([*args])
        return code, *capsys.readouterr()

    return run


FILES = ("--actor.model_name_or_path", "model", "--data.prompt_dataset", "prompts.jsonl")
TRAIN = ("train", "--dry-run", "--device", "cpu", *FILES, "--env.name", "arithmetic")


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused_with_what_to_change(case, molt):
    args, says = REFUSED[case]
    code, _, error = molt(*TRAIN, *args)
    assert code == 2
    assert error.startswith("Error: ")
    assert error.count("\n") == 1
    assert says in error


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_makes_sense_is_accepted_and_again_as_the_configuration_that_a_run_saves(case, molt, tmp_path):
    code, config, error = molt(*TRAIN, *ACCEPTED[case])
    assert (code, error) == (0, "")
    saved = tmp_path / "config.toml"
    saved.write_text(config)
    assert molt("train", "--dry-run", "--config", str(saved)) == (0, config, "")


@pytest.mark.parametrize("recipe", sorted(ROOT.glob("recipes/*.toml")), ids=lambda path: path.stem)
def test_the_recipes_are_accepted(recipe, molt, folder):
    if "reasoning_gym" in recipe.read_text():
        pytest.importorskip("molt_reasoning_gym", reason="`make demo-real` installs it")
    if "sft" in recipe.stem:
        line = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}
        (folder / "chats.jsonl").write_text(json.dumps(line) + "\n")
        args = ("sft", "--model.model_name_or_path", "model", "--data.dataset", "chats.jsonl")
    else:
        args = ("train", *FILES, *((EVAL, "prompts.jsonl") if "[eval]" in recipe.read_text() else ()))
    code, _, error = molt(*args, "--dry-run", "--config", str(recipe))
    assert (code, error) == (0, "")


README = re.findall(r"^molt (train .*)\n```", (ROOT / "README.md").read_text().replace("\\\n", ""), re.MULTILINE)


@pytest.mark.parametrize("command", [line for line in README if "..." not in line])
def test_the_commands_of_the_readme_are_accepted(command, molt):
    args = shlex.split(command)
    teacher = (REF, "ref") if REF in args else ()
    code, _, error = molt(*args, *FILES, *teacher, "--dry-run", "--device", "cpu")
    assert (code, error) == (0, "")


def test_the_readme_has_commands():
    assert len(README) >= 2
