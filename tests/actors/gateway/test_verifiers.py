"""Environments of the verifiers package and its task sets, played by a run."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import verifiers_kit
from agent_run_kit import rows
from clients_kit import MULTIPLY, python_of, tool_call
from hubs_kit import PATIENCE_S, Player
from process_kit import ENV, PATIENT, ROOT, RUN_SEED, run_command
from verifiers_kit import KINDS, Bench

from actors.gateway.hubs.prompt_files import FOLDER, write_prompt_files
from actors.gateway.hubs.stepped import choose_text_field
from asyncrl.config import load, rules
from asyncrl.config.agents import AgentConfig, AgentSource
from asyncrl.config.tree import Config, MixedTaskConfig, TaskConfig
from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError
from asyncrl.models.policy import build_model
from asyncrl.supervise import preflight
from asyncrl.tasks import get_task

pytestmark = pytest.mark.slow

KIND = "verifiers:verifiers_kinds"


def config(runs: Path, python: str = "", env: str = KIND, **agent: Any) -> Config:
    return verifiers_kit.config(runs, env, python, **agent)


@pytest.fixture(scope="module")
def located(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    """The config whose prompts are those of the environment with all kinds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(KINDS)
        yield preflight.localize(config(tmp_path_factory.mktemp("runs")))


def test_the_prompts_are_the_rows_of_its_data_sets(located: Config, tmp_path: Path) -> None:
    task = get_task(located.task)
    assert (task.name, task.size("heldout"), task.size("ood")) == ("env", 1, 0)
    train = sorted((task.prompt("train", at, 0) for at in range(5)), key=lambda prompt: prompt.id)
    assert [prompt.id for prompt in train] == [0, 1, 2, 3, 4]
    brief = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4="}]
    assert train[0].messages == brief and train[0].answer == "7"
    assert train[0].meta == {"dataset": "train"}
    held = task.prompt("heldout", 0, 0)
    assert held.messages[-1]["content"] == "5+2=" and held.meta == {"dataset": "eval"}
    # named by their content in the folder of the runs, once
    assert Path(located.task.prompts).parent == Path(located.runs) / FOLDER
    assert write_prompt_files(located) is located
    sets = preflight.localize_sets(
        msgspec.structs.replace(located, task=TaskConfig(name="env", prompts="here")), ["seed=1"]
    )
    assert sets == ["seed=1"]
    with pytest.raises(ValueError, match="the environment gives it"):
        task.reward(held, "7")


def test_a_part_has_its_environments_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(KINDS)
    own = AgentSource(env=KIND, python=python_of("clients"))
    parts = [MixedTaskConfig(name="sort"), MixedTaskConfig(name="env", label="kinds", agent=own)]
    mixed = TaskConfig(name="mixture", mixture=parts)
    given = msgspec.structs.replace(config(tmp_path), task=mixed, agent=AgentConfig())
    found = preflight.localize(given)
    task = get_task(found.task)
    assert found.task.mixture[0] == parts[0]
    assert {task.build_prompt("train", "kinds", at, 0).task for at in range(5)} == {"kinds"}
    assert {task.build_prompt("train", "kinds", at, 0).id for at in range(5)} == {0, 1, 2, 3, 4}
    assert Path(found.task.mixture[1].prompts).parent == tmp_path / FOLDER
    assert write_prompt_files(found) is found


REFUSED = [
    ("verifiers:no-such", {}, "'no_such'; install its package into agent.python"),
    (KIND, {"kinds": 1}, "unexpected keyword argument 'kinds'; see [agent.args]"),
    (KIND, {"kind": "group"}, "scores the rollouts of a group together"),
    (KIND, {"kind": "picture"}, "train row 0: its prompt has content that is not text"),
]


def test_an_environment_that_cannot_be_played_is_refused_in_one_line(tmp_path: Path) -> None:
    """All in one process, as each import of verifiers takes seconds."""
    cases = json.dumps([(env, args) for env, args, _ in REFUSED])
    argv = [*importing.make_command("verifiers_refused", python=python_of("clients")), cases]
    out = subprocess.run(argv, cwd=KINDS, env=ENV, capture_output=True, text=True, check=True)
    for (env, _, said), answer in zip(REFUSED, json.loads(out.stdout), strict=True):
        assert answer["error"].startswith(f"agent.env = {env}: "), answer
        assert said in answer["error"] and "\n" not in answer["error"], answer


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ({"python": f"{sys.base_prefix}/bin/python3"}, "-m pip install msgspec xxhash"),
        ({"python": "no/python"}, "agent.python: no/python cannot be started: No such file"),
        ({"python": sys.executable}, "No module named 'verifiers'; install verifiers"),
    ],
)
def test_a_python_that_cannot_play_it_is_refused_in_one_line(
    agent: Mapping[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(KINDS)
    with pytest.raises(ConfigError, match=said) as refused:
        preflight.localize(config(tmp_path, **agent))
    assert "\n" not in str(refused.value) and not (tmp_path / FOLDER).exists()


def test_the_environment_and_its_task_go_together(tmp_path: Path) -> None:
    assert not rules.check(config(tmp_path))
    with pytest.raises(ConfigError, match="is empty; `asyncrl run` writes"):
        get_task(TaskConfig(name="env"))
    for agent, key in (
        ({"env": "a:B"}, "task.name: env with agent.env = a:B"),
        ({"opponent": "random", "eval_opponent": "random"}, "agent.opponent: verifiers:"),
        ({"env": "", "serve": True, "python": "p"}, "agent.python: runs agent.env"),
        ({"env": "", "serve": True, "args": {"a": 1}}, "agent.args: belong to an environment"),
    ):
        problems = rules.check(config(tmp_path, **agent))
        assert any(problem.startswith(key) for problem in problems), problems
    other = msgspec.structs.replace(config(tmp_path), task=TaskConfig(name="calc"))
    assert any(problem.startswith("task.name: calc with") for problem in rules.check(other))


@pytest.fixture(scope="module")
def bench(located: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("agent"), located)
    yield made
    made.close()


def test_its_rubric_is_the_reward_and_each_function_a_part(bench: Bench) -> None:
    for text, answer, reward in (("3+4=", "7", 1.5), ("5+2=", "seven", 0.0)):
        result, opened = bench.play(bench.prompt(text), answer)
        assert (result.kind, result.reward, result.truncated) == ("scored", reward, False), result
        assert result.parts["exact"] == result.parts["short"] == float(reward > 0)
        assert result.parts["num_turns"] == 1.0
        assert "Be brief." in bench.texts(opened)[0] and text in bench.texts(opened)[0]


def test_turns_and_tools_are_one_training_sequence(bench: Bench) -> None:
    result, opened = bench.play(bench.prompt("guess"), "3", "7")
    assert (result.kind, result.reward) == ("scored", 0.0), result  # the last word is "hit"
    assert "no" in bench.texts(opened)[1] and result.parts["num_turns"] == 2.0
    assert (opened.calls, len(opened.build_training_rows())) == (2, 1)
    call = MULTIPLY.replace("17", "7").replace("3", "1")
    result, opened = bench.play(bench.prompt("What is 7 times 1?"), call, "7")
    assert (result.kind, result.reward) == ("scored", 1.0), result
    assert "7" in bench.texts(opened)[1].rpartition("multiply")[2]
    assert (opened.calls, len(opened.build_training_rows())) == (2, 1)


def test_a_reward_that_raises_fails_and_an_empty_answer_is_scored(bench: Bench) -> None:
    """verifiers itself counts it as 0."""
    result, _ = bench.play(bench.prompt("a number, please"), "none")
    assert result.kind == "failed" and "fragile" in result.why and "invalid literal" in result.why
    result, _ = bench.play(bench.prompt("a number, please"), "4")
    assert (result.kind, result.reward) == ("scored", 0.25)
    result, opened = bench.play(bench.prompt("a number, please"), "")
    assert (result.kind, result.reward, opened.calls) == ("scored", 0.0, 1), result


def test_a_limit_cuts_the_session_and_its_rubric_scores_it(bench: Bench) -> None:
    # after two long answers the next prompt is longer than the context
    result, opened = bench.play(bench.prompt("guess"), "x" * 190, "y" * 190)
    assert (result.kind, result.truncated) == ("scored", True), result
    assert opened.shortened and opened.calls == 2

    result, opened = bench.play_limited(bench.prompt("guess"), "3")
    assert (result.kind, result.scored, result.reward) == ("failed", True, 0.0), result
    assert opened.limit == "max_calls" and "agent.max_calls" in result.why


def test_rows_that_change_between_processes_fail_the_session(bench: Bench) -> None:
    prompt = bench.prompt("3+4=")
    other = msgspec.structs.replace(prompt, messages=[{"role": "user", "content": "8+9="}])
    result, _ = bench.play(other)
    assert result.kind == "failed" and "give load_environment a fixed seed" in result.why


def test_an_environment_of_the_package_index_is_played(tmp_path: Path) -> None:
    """One that other people made: sophistry-bench-sprint, with eight functions in its rubric."""
    env = "verifiers:sophistry-bench-sprint"
    located = preflight.localize(config(tmp_path / "runs", env=env, args={"n_items": 4}))
    bench = Bench(tmp_path, located, context=0)
    try:
        result, opened = bench.play(bench.task.prompt("train", 0, 0), "The passage says so.")
        assert result.kind == "scored" and opened.calls == 1, result
        assert result.reward == result.parts["aggregate_reward"]
        assert {"correctness_reward", "n_claims_metric", "num_turns"} <= result.parts.keys()
    finally:
        bench.close()


HERE = Path(__file__).parents[2] / "support"


@pytest.fixture()
def in_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.transport.worker_pool.GRACE_S", PATIENCE_S)
    monkeypatch.chdir(HERE)


def test_an_environment_of_gymnasium_is_played_by_its_id(in_support: None) -> None:
    player = Player(env="gymnasium:gym_words:Count-v0", args={"rounds": 2})
    try:
        first, again = player.reset(1, seed=7), player.reset(2, seed=7)
        assert first.obs == again.obs and first.tools == [] and first.parts == {}
        number = int(str(first.obs))
        event = player.step(1, str(number + 1))
        assert (event.obs, event.reward, event.ended) == (str(number + 1), 1.0, False)
        event = player.step(1, str(number + 2))
        assert (event.reward, event.ended, event.truncated) == (1.0, True, True)
        event = player.step(2, "no")
        assert (event.reward, event.ended, event.truncated) == (0.0, True, False)
        player.pool.end(1)
        assert player.reset(3, seed=8).kind == "ok"
    finally:
        player.pool.close()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    argv = [python_of("clients"), str(HERE / "openenv_server.py")]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    process.kill()
    process.wait()


def test_a_server_of_openenv_is_played_by_its_url(in_support: None, server: str) -> None:
    player = Player(env=f"openenv:{server}/", args={"observation": "text"})
    try:
        # each session has a connection of its own
        assert [player.reset(each, seed=each).obs for each in (1, 2)] == ["seed 1", "seed 2"]
        event = player.step(1, "hello")
        assert (event.obs, event.reward, event.ended) == ("HELLO", 5.0, False)
        assert (event := player.step(1, "bye")).ended and event.reward == 3.0
        assert player.step(2, "x").obs == "X"
    finally:
        player.pool.close()


def test_a_field_is_named_where_the_schema_has_several(server: str) -> None:
    fields = {"text": {"type": "string"}, "note": {"type": "string"}, "metadata": {}}
    assert choose_text_field("observation", fields, "note") == "note"
    assert choose_text_field(
        "action", {"word": {"type": "string"}, "n": {"type": "integer"}}, ""
    ) == ("word")
    for given in ("", "other", "metadata"):
        with pytest.raises(ConfigError, match=r"its observation has the text fields text, note"):
            choose_text_field("observation", fields, given)


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ({"env": "gymnasium:gym_words:No-v0"}, "making it raised NameNotFound"),
        ({"env": "gymnasium:gym_words:Numbers-v0"}, "its observations are Discrete and not Text"),
        ({"env": "gymnasium:A-v0", "python": sys.executable}, "install gymnasium into the Python"),
        ({"env": "gem:game:A-v0"}, "install gem-llm into the Python of agent.python"),
        ({"env": "openenv:http://127.0.0.1:9"}, "making it raised URLError: .*refused"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_in_one_line(
    agent: Mapping[str, Any], said: str, in_support: None
) -> None:
    player = Player(**agent)
    try:
        with pytest.raises(ConfigError, match=said) as refused:
            player.event()
        assert str(refused.value).startswith(f"agent.env = {agent['env']}: ")
    finally:
        player.pool.close()


def test_an_environment_of_a_hub_gives_the_prompts() -> None:
    def problems(**agent: Any) -> list[str]:
        raw = {"model": {"path": "m"}, "task": {"name": agent.pop("task", "seeds")}}
        return rules.check(load.build(raw | {"agent": agent}))

    assert not problems(env="gem:game:A-v0", args={"rounds": 1})
    for agent, said in (
        ({"env": "gem:A", "task": "sort"}, "task.name: gem:A gives its own prompts"),
        ({"env": "gem:"}, "agent.env: gem: names no environment"),
        ({"env": "textarena:A", "args": {"a": 1}}, "agent.args: textarena:A takes none"),
    ):
        assert any(each.startswith(said) for each in problems(**agent)), problems(**agent)


SETS = "verifiers:tasksets_kinds"
NULL = {"harness": {"id": "null"}}


@pytest.fixture(scope="module")
def taskset_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(KINDS)
        patch.setenv("PYTHONPATH", str(KINDS))  # as if it were installed, for its tools' process
        runs = tmp_path_factory.mktemp("runs")
        located = preflight.localize(verifiers_kit.config(runs, SETS, python_of("verifiers")))
        made = Bench(tmp_path_factory.mktemp("agent"), located)
        yield made
        made.close()


def test_the_prompts_are_the_tasks(taskset_bench: Bench) -> None:
    brief = {"role": "system", "content": "Be brief."}
    for number, text in enumerate(("3+4=", "4+3=", "guess")):
        prompt = taskset_bench.prompt(text)
        assert prompt.id == number and prompt.meta == {"dataset": "train"}
        assert prompt.messages == [brief, {"role": "user", "content": text}]
    assert (taskset_bench.rows, taskset_bench.heldout) == (7, 1)  # a tenth, or one


def test_its_rewards_pay_and_each_is_a_part(taskset_bench: Bench) -> None:
    for text, answer, reward in (("3+4=", "7", 1.5), ("4+3=", "7", 1.5), ("3+4=", "seven", 0.0)):
        result, opened = taskset_bench.play(taskset_bench.prompt(text), answer)
        assert (result.kind, result.reward, result.truncated) == ("scored", reward, False), result
        paid = float(reward > 0)
        assert result.parts == {"exact": paid, "short": paid, "turns": 1.0, "reward": reward}
        assert (
            "Be brief." in taskset_bench.texts(opened)[0] and text in taskset_bench.texts(opened)[0]
        )
        assert (opened.calls, len(opened.build_training_rows())) == (1, 1)


def test_an_exchange_of_several_turns_is_one_training_sequence(taskset_bench: Bench) -> None:
    result, opened = taskset_bench.play(taskset_bench.prompt("guess"), "3", "7")
    assert (result.kind, result.reward, result.parts["turns"]) == ("scored", 1.5, 2.0), result
    assert "no" in taskset_bench.texts(opened)[1]
    assert (opened.calls, len(opened.build_training_rows())) == (2, 1)


def test_tools_of_the_taskset_are_called(taskset_bench: Bench) -> None:
    calls = [
        tool_call("calculator_multiply", a=7, b=1),
        tool_call("calculator_divide", a=7, b=1),
        "7",
    ]
    result, opened = taskset_bench.play(taskset_bench.prompt("What is 7 times 1?"), *calls)
    assert (result.kind, result.reward, result.truncated) == ("scored", 1.5, False), result
    _, second, third = taskset_bench.texts(opened)
    assert second.rpartition("</tool_call>")[2].count("7") == 1
    assert "error: unknown tool 'calculator_divide'" in third
    assert len(opened.build_training_rows()) == 1


def test_an_empty_answer_is_scored(taskset_bench: Bench) -> None:
    result, opened = taskset_bench.play(taskset_bench.prompt("3+4="), "")
    assert (result.kind, result.reward, opened.calls) == ("scored", 0.5, 1), result


def test_what_raises_fails_the_session(taskset_bench: Bench) -> None:
    for text, answers, why in (
        ("a number, please", ["none"], "invalid literal"),
        ("an error, please", ["7"], "the environment is broken"),
        ("two answers, please", ["7", "7"], "ran the agent agent 2 times, not once"),
    ):
        result, opened = taskset_bench.play(taskset_bench.prompt(text), *answers)
        assert result.kind == "failed" and why in result.why and not result.scored, result
        assert opened.calls == len(answers), "nothing is tried again"
    result, _ = taskset_bench.play(taskset_bench.prompt("a number, please"), "4")
    assert (result.kind, result.reward) == ("scored", 0.125)


def test_a_limit_cuts_the_session_and_its_task_scores_it(taskset_bench: Bench) -> None:
    result, opened = taskset_bench.play(taskset_bench.prompt("guess"), "1", "2", "3")
    assert (result.kind, result.truncated, result.reward) == ("scored", True, 0.5), result
    assert opened.calls == 3 and not opened.limit  # max_turns of its agent
    # after two long answers the next prompt is longer than the context
    result, opened = taskset_bench.play(taskset_bench.prompt("guess"), "x" * 190, "y" * 190)
    assert (result.kind, result.truncated, result.reward) == ("scored", True, 0.0), result
    assert opened.shortened and opened.calls == 2
    result, opened = taskset_bench.play_limited(taskset_bench.prompt("guess"), "3")
    assert (result.kind, result.scored, result.reward) == ("failed", True, 0.5), result
    assert opened.limit == "max_calls" and "agent.max_calls" in result.why


def test_tasks_that_change_between_processes_fail_the_session(taskset_bench: Bench) -> None:
    prompt = taskset_bench.prompt("3+4=")
    other = msgspec.structs.replace(prompt, messages=[{"role": "user", "content": "8+9="}])
    result, _ = taskset_bench.play(other)
    assert result.kind == "failed" and "give the taskset a fixed seed" in result.why


REFUSED_SETS: list[tuple[str, dict[str, Any], str]] = [
    ("verifiers:no-such", {}, "'no_such'; install its package into agent.python"),
    (SETS, {"taskset": {"kinds": 1}}, "[agent.args]: taskset.kinds: Extra inputs"),
    (SETS, {"taskset": {"endless": True}}, "never ends: say how many tasks are read"),
    (SETS, {"taskset": {"picture": True}}, "row 0: its prompt has content that is not text"),
    (SETS, {"agent": {"harness": {"id": "bash"}}}, 'agent.args.agent.harness.id = "null"'),
    (SETS, {"id": "user-sim", "assistant": NULL}, "assistant, user would be played by 2 policies"),
    ("verifiers:verifiers_kinds", {}, "agent.python has verifiers 0.4.0"),
]


def test_a_task_set_that_cannot_be_played_is_refused_in_one_line() -> None:
    """All in one process, as each import of verifiers takes seconds."""
    accepted = (SETS, {"taskset": {"endless": True}, "select": {"limit": 3}})
    cases = [(env, args) for env, args, _ in REFUSED_SETS] + [accepted]
    argv = [*importing.make_command("verifiers_refused", python=python_of("verifiers"))]
    ended = subprocess.run(
        [*argv, json.dumps(cases)], cwd=KINDS, env=ENV, capture_output=True, check=True
    )
    *refused, found = json.loads(ended.stdout)
    for (env, _, why), answer in zip(REFUSED_SETS, refused, strict=True):
        assert answer["error"].startswith(f"agent.env = {env}: "), answer
        assert why in answer["error"] and "\n" not in answer["error"], answer
    assert found == {"train": 3, "eval": 0}


PAGE = ROOT / "docs" / "agents.md"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


# an environment of version 0.1 and its config
OLD_MODULE = (Path(__file__).parents[2] / "data" / "programs" / "verifiers_old.txt").read_text()
OLD_CONFIG = """
task.name = "env"
[agent]
env = "verifiers:my_sums"
args = { count = 200 }
"""


def write_environment(folder: Path, name: str) -> None:
    """The environment of the page and its config, as a reader would save them, or the old one."""
    text = PAGE.read_text(encoding="utf-8")
    (module,) = re.findall(r"(?ms)^```python\n(import verifiers.*?)^```", text)
    (config,) = re.findall(r'(?ms)^```toml\n(task.name = "env".*?)^```', text)
    if name == "my_sums":
        module, config = OLD_MODULE, OLD_CONFIG
    (folder / f"{name}.py").write_text(module, encoding="utf-8")
    (folder / "sums.toml").write_text(config, encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "python", "metrics"),
    [("my_tasks", "verifiers", []), ("my_sums", "clients", ["num_turns"])],
)
def test_an_environment_of_verifiers_is_trained_on_by_its_name(
    name: str, python: str, metrics: Sequence[str], tmp_path: Path
) -> None:
    """One call a session; the environment pays, and each of its rewards is a part."""
    build_model(tmp_path / "m", "0123456789+= ", hidden=32, layers=1)
    (tmp_path / "m" / "chat_template.jinja").write_text(TEMPLATE)
    write_environment(tmp_path, name)
    sets = (
        *PATIENT,
        *(f"seed={RUN_SEED}", "name=sums", "model.path=m", f"agent.python={python_of(python)!r}"),
        "agent.workers=1",  # each imports the package for itself
        *("agent.step_s=3600.0", "agent.idle_s=3600.0", "agent.deadline_s=7200.0"),
        *("wires.lease_s=3600.0", "learner.steps=2", "learner.groups=2", "learner.group_size=4"),
        *("generator.max_new_tokens=8", "generator.context=64", "evaluation.every=0"),
        *("evaluation.final_prompts=4", "record.samples_every=1", "record.samples=0"),
    )
    argv = [sys.executable, "-m", "asyncrl.cli", "run", "sums.toml", "--json"]
    argv += [word for item in sets for word in ("--set", item)]
    run_command(argv, cwd=tmp_path).check()
    run = tmp_path / "runs" / "sums"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["trajectories"], summary["ledger"]["failed"]) == (2, 16, 0)
    samples = rows(run / "samples.jsonl")
    assert len(samples) == 16
    for sample in samples:
        parts = sample["parts"]
        assert {"exact", "brief", *metrics} <= parts.keys()
        assert sample["reward"] == pytest.approx(parts["exact"] + 0.1 * parts["brief"])
        # an empty answer is no turn to version 0.1, and is trained on all the same
        assert sample["calls"] == 1 and all(parts[metric] <= 1 for metric in metrics)
    assert len({sample["prompt"] for sample in samples}) > 1 and summary["heldout_end"] is not None
