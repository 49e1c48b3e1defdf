"""Every combination that makes no sense is refused at launch, in one sentence that says what to change.

The commands are real, and so are the installed plugins; nothing is started.
"""

from __future__ import annotations

import pytest

from molt_core.cli import main
from molt_core.testing.tiny import make_tiny_checkpoint

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
GATE = (LEVEL, "token", MODE, "mask", GATING, "binary_kl")
SAMPLES = "--rollout.n_samples_per_prompt"
DISTILL = (EST, "on_policy_distill", "--ref.model_name_or_path", "teacher")
FLASH = (EST, "flash_reinforce", SAMPLES, "1", "--rollout.batch_size", "4")

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
    "ceiling of cispo below 1": ((CLIP, "0.1", "0.9", LOSS, "cispo"), "input should be greater than or equal to 1"),
    "clip range of zero": ((CLIP, "0", "0.2"), "--actor.eps_clip_low_high: input should be greater than 0"),
    "option given twice": (("--actor.dual_clip", "3", "--actor.loss_args.dual_clip", "4"), "give one of them"),
    # Aggregation.
    "unknown aggregation": ((AGG, "token-sum"), "--actor.loss_agg_mode"),
    "constant without its aggregation": (
        ("--actor.loss_agg_norm", "100"),
        "or set --actor.loss_agg_mode seq-mean-token-sum",
    ),
    "constant of zero": ((AGG, "seq-mean-token-sum", "--actor.loss_agg_norm", "0"), "greater than 0"),
    # Estimators and the number of rollouts and steps.
    **{
        f"{name} with one rollout per prompt": ((EST, name, SAMPLES, "1"), f"set {SAMPLES} to 2 or more")
        for name in ("grpo", "dr_grpo", "rloo", "reinforce_baseline")
    },
    "several rollouts per prompt without groups": ((*FLASH, SAMPLES, "4"), f"set {SAMPLES} 1"),
    "several windows where one is meant": ((*FLASH, "--train.batch_size", "2"), "leave --train.batch_size out"),
    "several epochs where one is meant": ((*FLASH, "--train.max_epochs", "2"), "set --train.max_epochs 1"),
    "several windows with a loss for one": (
        (LOSS, "reinforce", "--train.batch_size", "32"),
        "leave --train.batch_size out and set --train.max_epochs 1, or choose another --actor.loss_mode",
    ),
    "several epochs with a loss for one": ((LOSS, "reinforce", "--train.max_epochs", "2"), "set --train.max_epochs 1"),
    "a single rollout to compare with itself": ((*FLASH, "--rollout.batch_size", "1"), "set --rollout.batch_size to 2"),
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
    "lower threshold that is no number": ((BAND, "nan", "2"), "greater than or equal to 0"),
    "upper threshold that is no number": ((BAND, "0.5", "nan"), f"{BAND}: input should be greater than 0"),
    "negative threshold": ((BAND, "-1", "2"), "greater than or equal to 0"),
    "threshold without end": ((BAND, "0.5", "inf"), "finite HIGH"),
    "gating that truncates": ((GATING, "binary_kl", BAND, "0", "0.1"), f"set {MODE} mask, not trunc"),
    "gating that clips": ((GATING, "tv", MODE, "clip", BAND, "0", "0.1"), f"set {MODE} mask, not clip"),
    "gating without correction": ((*GATE, LEVEL, "off", SYNC, BAND, "0", "0.1"), f"set {LEVEL} token"),
    "gating with a lower bound": ((*GATE, BAND, "0.1", "0.2"), f"set {BAND} 0 0.2"),
    "total variation that admits everything": ((*GATE, GATING, "tv", BAND, "0", "1"), f"lower {BAND}"),
    "divergence that admits everything": ((*GATE, BAND, "0", "13.9"), f"lower {BAND}"),
    # Rewards and filters.
    "reward range that is no number": (("--reward.clip_range", "nan", "1"), "LOW must be less than HIGH"),
    **{
        f"{args[0]} without rewards": ((*DISTILL, *args), f"ignores rewards: leave {args[0]}")
        for args in (
            ("--reward.name", "./scores.py:Score"),
            ("--reward.overlong_max", "100", "--reward.overlong_buffer", "50"),
            ("--reward.stop_properly", "0.5"),
            ("--algo.dynamic_filtering_enable",),
        )
    },
    "reward range reversed": (("--reward.clip_range", "1", "0"), "LOW must be less than HIGH"),
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
        "set --algo.dynamic_filtering_enable",
    ),
    # Sampling that the trainer cannot follow.
    "nucleus sampling": (("--rollout.top_p", "0.9"), "set --rollout.top_p 1"),
    "top-k sampling": (("--rollout.top_k", "5"), "set --rollout.top_k -1"),
    "entropy bonus that is no number": (("--actor.entropy_coef", "nan"), "not a finite number"),
    "entropy bonus without end": (("--actor.entropy_coef", "inf"), "not a finite number"),
    # KL.
    "steering what a student learns from": ((*DISTILL, "--algo.kl.target", "0.1"), "and set --algo.kl.init_coef"),
    "KL reward without effect": (
        ("--algo.kl.init_coef", "0.1", "--no-algo.kl.use_loss", EST, "grpo"),
        "so it would have no effect: set --algo.kl.use_loss",
    ),
    "distilling without a teacher": (
        (EST, "on_policy_distill"),
        "needs a teacher: set --ref.model_name_or_path to another model",
    ),
    "reference without a KL": (("--ref.model_name_or_path", "m"), "set --algo.kl.init_coef above 0"),
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
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), hidden_size=32, layers=1, intermediate=32)


@pytest.fixture
def launch(model, tmp_path, capsys, monkeypatch):
    """Runs `molt train --dry-run` on a checkpoint and a prompt; the exit code, and what it says on stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scores.py").write_text("from molt_core import Reward\nclass Score(Reward):\n    pass\n")
    (tmp_path / "prompts.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    base = ["train", "--dry-run", "--device", "cpu", "--env.name", "arithmetic"]
    base += ["--actor.model_name_or_path", str(model), "--data.prompt_dataset", f"{tmp_path}/prompts.jsonl"]

    def run(args):
        return main([*base, *args]), capsys.readouterr().err

    return run


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused_with_what_to_change(case, launch):
    args, says = REFUSED[case]
    code, error = launch(args)
    assert code == 2
    assert error.startswith("Error: ")
    assert error.count("\n") == 1
    assert says in error


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_makes_sense_is_accepted(case, launch):
    assert launch(ACCEPTED[case]) == (0, "")
