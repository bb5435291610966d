"""Supervised training: what is learned of a file, packed or row by row the same, resumed bit for
bit, and a model that a run takes.  The warm start is made of it."""

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from power import Disk
from process_kit import ROOT

from asyncrl.cli import main
from asyncrl.config import layers, load
from asyncrl.config import sft as configs
from asyncrl.config.sft import SftData, SftTraining
from asyncrl.contract.errors import ConfigError, DamagedDataError, NotFiniteError, NothingToDo
from asyncrl.models.policy import build_model, compute_weights_digest, export, load_policy
from asyncrl.models.tokenizer import load_tokenizer
from asyncrl.records import jsonl
from asyncrl.supervise.preflight import preflight
from asyncrl.tasks import fit, get_task, warm_start
from asyncrl.tasks.fit import FitExample
from learner import sft

SYMBOLS = "0123456789+= abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ<>|_\n.,:?!"
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


ROLES = ("user", "assistant")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    torch.set_num_threads(1)
    build_model(path, SYMBOLS, hidden=32, heads=2)
    (path / "chat_template.jinja").write_text(CHATML)
    return path


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def config(tmp_path: Path, model: Path) -> configs.SftConfig:
    draw = random.Random(0)
    pairs = [(draw.randrange(10), draw.randrange(100)) for _ in range(60)]
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    written(tmp_path / "train.jsonl", rows[:50])
    written(tmp_path / "heldout.jsonl", rows[50:])
    (tmp_path / "my.toml").write_text(
        f'model.path = "{model}"\nruns = "{tmp_path / "runs"}"\n'
        '[data]\ntrain = "{here}/train.jsonl"\nheldout = "{here}/heldout.jsonl"\n'
        "[training]\nsteps = 10\nbatch = 16\nlr = 1e-2\n"
        "checkpoint_every = 3\nmicro_batch_tokens = 60\nheldout_every = 5\nwarmup_steps = 2\n"
    )
    return configs.read(str(tmp_path / "my.toml"), ("name='whole'",))


def trained(config: configs.SftConfig, log: sft.Log = lambda _: None) -> dict[str, Any]:
    found = sft.run(config, sft.prepare(config, "my.toml"), log)
    assert found is not None
    return found


def test_every_assistant_turn_follows_the_turns_before_it(tmp_path: Path, model: Path) -> None:
    contents = ("hi", "yes?", "more", "no")
    turns = [{"role": role, "content": x} for role, x in zip(ROLES * 2, contents, strict=True)]
    rows = [{"messages": turns}, {"messages": turns[:1], "answer": "ok"}]
    path = written(tmp_path / "d.jsonl", [*rows, {"prompt": "1+1=", "answer": "2"}])
    tokenizer = load_tokenizer(model)
    rows = fit.read_pairs(str(path), tokenizer, SftData(train=str(path)), 256, model).rows
    decode = lambda ids: tokenizer.decode(ids.tolist())  # noqa: E731
    assert [(decode(row.prompt), decode(row.answer)) for row in rows] == [
        ("<user>hi|<assistant>", "yes?<eos>"),
        ("<user>hi|<assistant>yes?|<user>more|<assistant>", "no<eos>"),
        ("<user>hi|<assistant>", "ok<eos>"),
        ("1+1=", "2<eos>"),
    ]


# ends a turn by a token of its own, by one in the middle of more, strips the text, or refuses it
ENDED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
SPACED = "{% for m in messages %}<{{ m.role }}> {{ m.content | trim }} <end>{% endfor %}"
ASKING = "{% if add_generation_prompt %}<assistant>{% endif %}"
REFUSING = "{% if not add_generation_prompt %}{{ raise_exception('no answers') }}{% endif %}"


def chatting(path: Path, template: str, **special: str) -> Path:
    """A tiny model with the tokens <end> and <more>, and a chat template."""
    build_model(path, SYMBOLS, hidden=32, heads=2)
    stored = json.loads((path / "tokenizer.json").read_text())
    size = len(stored["model"]["vocab"])
    for at, text in enumerate(("<end>", "<more>")):
        # in the place of two symbols: the model's vocabulary stays as it is
        place = size - 1 - at
        old = next(token for token, number in stored["model"]["vocab"].items() if number == place)
        del stored["model"]["vocab"][old]
        stored["model"]["vocab"][text] = place
        row = dict(stored["added_tokens"][0]) | {"id": place, "content": text, "special": True}
        stored["added_tokens"].append(row)
    (path / "tokenizer.json").write_text(json.dumps(stored))
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.mark.parametrize(
    ("template", "content", "learned"),
    [
        (ENDED + ASKING, "no", "no<end>"),  # and not the line's end behind it
        (SPACED + ASKING, " no ", " no <end>"),
        (SPACED.replace("<end>", "<more><end>") + ASKING, "no", " no <more>"),
        (SPACED.replace("<end>", "<more><eos>") + ASKING, "no", " no <more><eos>"),
        ("<think>" + ENDED + ASKING + "<think>", "no", "no<end>"),  # no beginning of the other
    ],
    ids=["own", "stripped", "first-special", "first-stop", "otherwise"],
)
def test_a_chats_answer_ends_as_its_template_ends_it(
    tmp_path: Path, template: str, content: str, learned: str
) -> None:
    model = chatting(tmp_path / "m", template)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    path = written(tmp_path / "d.jsonl", [{"messages": turns}, {"prompt": "a", "answer": "b"}])
    tokenizer = load_tokenizer(model)
    found = fit.read_pairs(str(path), tokenizer, SftData(train=str(path)), 256, model)
    chat, plain = (tokenizer.decode(row.answer.tolist()) for row in found.rows)
    assert chat == learned and plain == "b<eos>"
    assert {tokenizer.decode([e]) for e in found.ends} == {"<eos>", learned[learned.rindex("<") :]}


def test_a_template_that_fails_on_an_answer_is_named(tmp_path: Path) -> None:
    model = chatting(tmp_path / "m", REFUSING + ENDED + ASKING)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = written(tmp_path / "d.jsonl", [{"messages": turns}])
    said = r"d.jsonl:1: the chat template fails on the answer: .*no"
    with pytest.raises(ConfigError, match=said):
        fit.read_pairs(str(path), load_tokenizer(model), SftData(train=str(path)), 256, model)


def test_runs_end_answers_as_learned(tmp_path: Path, forked: Callable[..., dict[str, Any]]) -> None:
    """The template's end is no stop token of the model that it began with."""
    model = chatting(tmp_path / "m", ENDED + ASKING)
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": text}], "answer": "no"} for text in "abcdefgh"
    ]
    written(tmp_path / "train.jsonl", rows)
    (tmp_path / "my.toml").write_text(
        f'model.path = "{model}"\nruns = "{tmp_path / "runs"}"\n'
        'data.train = "{here}/train.jsonl"\n'
        "[training]\nsteps = 60\nbatch = 8\nlr = 1e-2\nwarmup_steps = 2\n"
    )
    left = Path(trained(configs.read(str(tmp_path / "my.toml"), ("name='end'",)))["model"])
    file = written(tmp_path / "prompts.jsonl", rows)
    text = (
        "task.name='file' evaluation.ood_prompts=0 reward.function='' generator.context=40 "
        "learner.steps=2 record.samples_every=1"
    )
    sets = (f"model.path='{left}'", f"task.prompts='{file}'", *text.split())
    run = forked(tmp_path / "run", *sets)
    samples = jsonl.read(run["run_dir"] / "samples.jsonl")
    asked = [sample for sample in samples if sample["prompt"] in "abcdefgh"]
    assert asked and all(sample["text"] == "no" for sample in asked)
    assert all(sample["finish"] == "stop" and len(sample["tokens"]) == 3 for sample in asked)
    assert run["rows"][-1]["eval/heldout_length"] == 3.0
    settings = json.loads((left / "generation_config.json").read_text())
    assert len(settings["eos_token_id"]) == 2 and settings["eos_token_id"][0] == 1


BAD = [
    ("{", "d.jsonl:2: not JSON"),
    ("[]", "d.jsonl:2: needs an object"),
    ('{"answer": "x"}', "d.jsonl:2: needs either `prompt`"),
    ('{"prompt": "x", "messages": []}', "d.jsonl:2: needs either `prompt`"),
    ('{"prompt": "x"}', "d.jsonl:2: has no `answer`"),
    ('{"prompt": "", "answer": "x"}', "d.jsonl:2: `prompt` must be a non-empty text"),
    ('{"prompt": "x", "answer": 3}', "d.jsonl:2: `answer` must be a non-empty text"),
    ('{"messages": "x"}', "d.jsonl:2: `messages` must be a list"),
    ('{"messages": [{"role": "user"}]}', "d.jsonl:2: `messages` must be a list"),
    ('{"messages": [{"role": "user", "content": "x"}]}', "d.jsonl:2: `messages` has no assistant"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', "turn without a turn before it"),
    (
        '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]}',
        "turn 2 of `messages` is an assistant turn without content",
    ),
    ('{"prompt": "0123456789", "answer": "0123456789"}', "d.jsonl:2: 21 tokens are more than data"),
]


@pytest.mark.parametrize(("line", "why"), BAD)
def test_a_bad_line_is_named(tmp_path: Path, model: Path, line: str, why: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n' + line + "\n")
    data = SftData(train=str(path), context=20)
    with pytest.raises(ConfigError) as error:
        fit.read_pairs(str(path), load_tokenizer(model), data, 256, model)
    assert why in str(error.value) and "\n" not in str(error.value)


def test_too_long_rows_are_left_out_where_that_is_asked_for(tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": "1" * length, "answer": "2"} for length in (1, 20)]
    path = written(tmp_path / "d.jsonl", rows)
    tokenizer = load_tokenizer(model)
    data = SftData(train=str(path), too_long="skip")
    for limit, kept in ((22, 2), (21, 1)):  # 22 tokens fit
        found = fit.read_pairs(str(path), tokenizer, data, limit, model)
        assert (len(found.rows), found.skipped) == (kept, 2 - kept)
    with pytest.raises(ConfigError, match=r"d.jsonl:2: 22 tokens are more than the model's 21"):
        fit.read_pairs(str(path), tokenizer, SftData(train=str(path)), 21, model)
    with pytest.raises(ConfigError, match="has no usable rows"):
        fit.read_pairs(str(path), tokenizer, data, 2, model)
    with pytest.raises(ConfigError, match=r"none.jsonl is not a file"):
        fit.read_pairs(str(tmp_path / "none.jsonl"), tokenizer, data, 21, model)


def test_without_a_template_messages_are_refused_by_line(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    build_model(bare, "ab", hidden=32, heads=2)
    rows = [{"messages": [{"role": "user", "content": "a"}], "answer": "b"}]
    path = written(tmp_path / "d.jsonl", rows)
    with pytest.raises(ConfigError, match=r"d.jsonl:1: has `messages`, and the tokenizer in"):
        fit.read_pairs(str(path), load_tokenizer(bare), SftData(train=""), 99, bare)


def rows_of(lengths: list[tuple[int, int]]) -> list[FitExample]:
    draw = np.random.default_rng(1)
    return [
        FitExample(*(draw.integers(3, 40, length).astype(np.int32) for length in pair))
        for pair in lengths
    ]


def test_passes_hold_every_row_once_and_keep_to_their_tokens() -> None:
    rows = rows_of([(3, 2), (9, 9), (1, 1), (30, 30), (4, 4), (2, 2), (5, 1)])
    passes = fit.split_examples(rows, 20)
    assert sorted(id(row) for part in passes for row in part) == sorted(map(id, rows))
    assert all(len(part) * max(row.size for row in part) <= 20 or len(part) == 1 for part in passes)
    assert len(passes) < len(rows)
    assert fit.split_examples(rows, 60 * 7) == [rows]  # one pass: as they came


def test_packed_passes_give_the_gradient_of_one_row_at_a_time(model: Path) -> None:
    rows = rows_of([(3, 2), (9, 9), (1, 1), (12, 20), (4, 4)])
    gradients = []
    for most in (1, 40, 1 << 30):
        policy = load_policy(model, device="cpu")
        training = SftTraining(micro_batch_tokens=most, lr=0.0, clip_norm=0.0)
        fitter = fit.ModelFitter(policy, training)
        loss = fitter.step(rows)
        assert loss == pytest.approx(fitter.measure_loss(rows), abs=1e-6)
        gradients.append(torch.cat([p.grad.flatten() for p in policy.hf.parameters()]))
    tokens = sum(len(row.answer) for row in rows)
    ids = [torch.tensor([[*row.prompt.tolist(), *row.answer.tolist()]]) for row in rows]
    plain = load_policy(model, device="cpu", with_modules=True)
    total = torch.zeros(())
    for row, each in zip(rows, ids, strict=True):
        logs = plain.hf(input_ids=each).logits[0].log_softmax(-1)
        picked = logs[len(row.prompt) - 1 : -1].gather(1, each[0, len(row.prompt) :, None])
        total = total - picked.sum() / tokens
    total.backward()
    theirs = torch.cat([p.grad.flatten() for p in plain.hf.parameters()])
    for ours in gradients:
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert loss == pytest.approx(float(total.detach()), abs=1e-5)


def test_batches_go_through_the_file_in_a_new_order_each_pass() -> None:
    rows = rows_of([(1, 1)] * 10)
    training = SftTraining(batch=4)
    drawn = [row for step in range(5) for row in fit.select_batch(rows, training, 3, step)]
    first, second = drawn[:10], drawn[10:]
    assert sorted(map(id, first)) == sorted(map(id, second)) == sorted(map(id, rows))
    assert [id(row) for row in first] != [id(row) for row in second]
    other = [row for step in range(5) for row in fit.select_batch(rows, training, 4, step)]
    assert [id(row) for row in other] != [id(row) for row in drawn]


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_not_finite_ends_it_with_the_weights_as_they_were(model: Path, what: str) -> None:
    policy = load_policy(model, device="cpu")
    fitter = fit.ModelFitter(policy, SftTraining())
    if what == "loss":
        with torch.no_grad():
            policy.hf.model.norm.weight[0] = torch.inf
    else:
        next(iter(policy.hf.parameters())).register_hook(lambda gradient: gradient * torch.inf)
    before = [p.detach().clone() for p in policy.hf.parameters()]
    said = r"the loss or its gradient is not finite in step 0: training.lr = 0.0001"
    with pytest.raises(NotFiniteError, match=said):
        fitter.step(rows_of([(3, 2)]))
    assert all(torch.equal(a, b) for a, b in zip(before, policy.hf.parameters(), strict=True))
    assert fitter.number == 0


def test_the_warm_start_is_bit_for_bit_what_a_plain_loop_makes(tmp_path: Path) -> None:
    """Torch's own scheduler and mean, as the warm start was first written."""
    config = load.load("demo", [f"model.path='{tmp_path / 'warm'}'"])
    warm_start.warm_start(config, tmp_path / "warm", steps=4, threads=1)
    task = get_task(config.task)
    policy = build_model(tmp_path / "plain", task.symbols, seed=config.seed)
    tokenizer = load_tokenizer(tmp_path / "plain")
    how = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.0, "fused": True}
    optimizer = torch.optim.AdamW(policy.hf.parameters(), **how)
    share = lambda s: min((s + 1) / 20, max(0.05, 1 - s / 4))  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    shown = task.make_demonstrations(4 * 64, config.seed)
    for step in range(4):
        prompts, answers = zip(*shown[step * 64 : (step + 1) * 64], strict=True)
        out = policy.logprobs(
            [np.array(tokenizer.encode(text), np.int32) for text in prompts],
            [np.array([*tokenizer.encode(text), 1], np.int32) for text in answers],
            torch.ones(64),
        )
        optimizer.zero_grad()
        (-out.logprobs.mean()).backward()
        torch.nn.utils.clip_grad_norm_(policy.hf.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    got = compute_weights_digest(load_policy(tmp_path / "warm", device="cpu"))
    assert got == compute_weights_digest(policy)


def test_it_learns_and_a_run_takes_what_it_leaves(
    config: configs.SftConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    said: list[str] = []
    found = trained(config, said.append)
    assert (found["steps"], found["rows"], found["tokens"]) == (10, 50, 483)
    assert 0 <= found["seconds"] < 600 and found["seconds"] == round(found["seconds"], 1)
    assert found["heldout_end"] < 0.8 * found["heldout_start"]
    assert found["loss_end"] < found["loss_start"]
    run_dir = Path(found["model"]).parent
    after_cut = disk.cut(run_dir, tmp_path / "after_cut")
    assert json.loads((after_cut / "summary.json").read_text()) == found
    disk.close()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["number"] for row in rows] == list(range(10))
    assert [row["number"] for row in rows if "heldout" in row] == [0, 5]
    assert found["loss_start"] == rows[0]["loss"] and found["loss_end"] == rows[-1]["loss"]
    assert found["heldout_start"] == rows[0]["heldout"] and found["model"] == str(run_dir / "model")
    assert said == ["50 training rows (0 too long and excluded), 10 held out"] + [
        f"step {n}: loss {rows[n]['loss']:.4f}, held out {rows[n]['heldout']:.4f}" for n in (0, 5)
    ]
    assert [row["lr"] for row in rows[:3]] == [0.0, 1e-2 * 0.5, 1e-2]
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["number_10", "number_9"]
    left = load_policy(found["model"], device="cpu")
    assert compute_weights_digest(left) == found["weights_digest"]
    model, prompts = f"model.path='{found['model']}'", f"task.prompts='{tmp_path / 'train.jsonl'}'"
    sets = (model, "model.warm_start=false", prompts)
    preflight(load.load(ROOT / "configs" / "file_example.toml", sets))
    with pytest.raises(ConfigError) as full:
        sft.prepare(config, "my.toml")
    assert str(full.value) == (
        f"{run_dir} is not empty: continue it with `asyncrl sft --resume {run_dir}`, or choose "
        "another name with --set name=..."
    )
    with pytest.raises(NothingToDo) as over:
        sft.run(config, run_dir, print)
    assert str(over.value) == (
        f"{run_dir} has completed all its 10 steps; to add steps, use --resume {run_dir} --set "
        "training.steps=..."
    )


def test_a_resumed_training_is_bit_for_bit_one_that_never_stopped(
    config: configs.SftConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(config)

    def step(self: sft.SftRun) -> None:
        if self.fitter.number == 8:
            raise EOFError
        plain(self)

    plain = sft.SftRun.step
    cut = configs.read(str(Path(config.runs).parent / "my.toml"), ("name='cut'",))
    run_dir = sft.prepare(cut, "my.toml")
    with monkeypatch.context() as patched, pytest.raises(EOFError):
        patched.setattr(sft.SftRun, "step", step)
        # its checkpoint is one that was written on a GPU
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        sft.run(cut, run_dir, print)
    said: list[str] = []
    again = sft.run(sft.load_resumed(run_dir, ()), run_dir, said.append)
    assert said[-1] == f"resumed from {run_dir / 'checkpoints' / 'number_6'}" and again is not None
    assert again | {"seconds": 0, "model": ""} == whole | {"seconds": 0, "model": ""}
    lines = [(Path(f["model"]).parent / "metrics.jsonl").read_text() for f in (whole, again)]
    assert lines[0] == lines[1]


def test_a_signal_leaves_a_checkpoint_and_the_command_goes_on(
    config: configs.SftConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = sft.prepare(config, "my.toml")
    before = signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):
        with sft.catch_stop_signals() as stopping:
            assert stopping() is False
            os.kill(os.getpid(), number)
            assert stopping() is True
    assert sft.run(config, run_dir, lambda _: os.kill(os.getpid(), signal.SIGTERM)) is None
    assert signal.getsignal(signal.SIGTERM) is before
    assert (run_dir / "checkpoints" / "number_0" / "manifest").exists()
    words = ["sft", "--resume", str(run_dir), "--set", "training.steps=2", "--json"]
    main([*words, "--set", "training.warmup_steps=0"])
    said = capsys.readouterr()
    assert "learning rate" not in said.err, "step 0 has the same one in both"
    assert json.loads(said.out.splitlines()[-1])["steps"] == 2
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 6
    main([*words, "--set", "training.steps=4", "--set", "data.heldout=''"])
    log = capsys.readouterr().err
    assert "training.steps was 2 and is 4: the linear schedule" in log and "0 held out" in log


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_refused_start_leaves_nothing_and_a_refused_resume_all(
    config: configs.SftConfig, is_resumed: bool
) -> None:
    run_dir = sft.prepare(config, "my.toml")
    if is_resumed:
        (run_dir / "metrics.jsonl").touch()
    bad = sft.load_resumed(run_dir, ("data.train='gone.jsonl'",))
    with pytest.raises(ConfigError, match=r"gone\.jsonl"):
        sft.run(bad, run_dir, print)
    assert run_dir.exists() == is_resumed == (run_dir / ".sft.lock").exists()
    with pytest.raises(ConfigError) as error:
        sft.load_resumed(run_dir.parent, ())
    assert str(error.value) == f"{run_dir.parent} holds no training of `asyncrl sft` (no sft.toml)"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "give either a CONFIG or --resume"),
        (("--resume", "nowhere"), "holds no training"),
        (("my.toml", "--set", "trainig.lr=1"), "did you mean training?"),
        (("my.toml", "--set", "data.lr=1"), "did you mean training.lr?"),
        (("my.toml", "--set", "training.schedule=x"), "choose one of constant, linear, cosine"),
        (("my.toml", "--set", "name='a/b'"), "must be the name of one directory"),
        (("my.toml", "--set", "data.context=3"), "train.jsonl:1: "),
    ],
)
def test_what_is_refused(
    words: tuple[str, ...],
    why: str,
    config: configs.SftConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["sft", *words])
    assert ended.value.code == 2 and why in capsys.readouterr().err
    # nothing is left in the way of the next try
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_another_models_checkpoint_is_refused(config: configs.SftConfig, tmp_path: Path) -> None:
    found = trained(config)
    other = tmp_path / "other"
    export(build_model(tmp_path / "small", SYMBOLS, hidden=16, heads=2), other)
    run_dir = Path(found["model"]).parent
    with pytest.raises(DamagedDataError, match="is of another model"):
        sft.run(sft.load_resumed(run_dir, (f"model.path='{other}'",)), run_dir, print)
    with pytest.raises(ConfigError, match=r"gone\.jsonl"):
        sft.run(sft.load_resumed(run_dir, ("data.train='gone.jsonl'",)), run_dir, print)
    assert (run_dir / "metrics.jsonl").exists(), "what a run has made stays"


def test_the_schema_for_editors_is_the_one_of_the_code() -> None:
    kept = json.loads((ROOT / "configs" / "sft.schema.json").read_text())
    assert kept == json.loads(json.dumps(layers.build_schema(configs.SftConfig))), (
        "stale: asyncrl config schema --of sft > configs/sft.schema.json"
    )
    assert Path(configs.read(str(ROOT / "configs" / "examples" / "sft.toml")).data.train).is_file()
