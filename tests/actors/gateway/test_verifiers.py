"""Environments of verifiers by name, with the real package in the environment of the clients:
their prompts, their sessions at the endpoint, their rubrics as rewards, and what is refused."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import verifiers_kit
from clients_kit import MULTIPLY, python_of
from hubs_kit import PATIENCE_S, Player
from process_kit import ENV
from verifiers_kit import KINDS, Bench

from actors.gateway.hubs.prompt_files import FOLDER, write_prompt_files
from actors.gateway.hubs.stepped import choose_text_field
from asyncrl.config import load, rules
from asyncrl.config.agents import AgentConfig, AgentSource
from asyncrl.config.tree import Config, MixedTaskConfig, TaskConfig
from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError
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
    assert {task.draw("kinds", at, 0).task for at in range(5)} == {"kinds"}
    assert {task.draw("kinds", at, 0).id for at in range(5)} == {0, 1, 2, 3, 4}
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
    assert (opened.session.calls, len(opened.session.build_training_rows())) == (2, 1)
    call = MULTIPLY.replace("17", "7").replace("3", "1")
    result, opened = bench.play(bench.prompt("What is 7 times 1?"), call, "7")
    assert (result.kind, result.reward) == ("scored", 1.0), result
    assert "7" in bench.texts(opened)[1].rpartition("multiply")[2]
    assert (opened.session.calls, len(opened.session.build_training_rows())) == (2, 1)


def test_a_reward_function_that_raises_fails_the_session(bench: Bench) -> None:
    """verifiers itself counts it as 0."""
    result, _ = bench.play(bench.prompt("a number, please"), "none")
    assert result.kind == "failed" and "fragile" in result.why and "invalid literal" in result.why
    result, _ = bench.play(bench.prompt("a number, please"), "4")
    assert (result.kind, result.reward) == ("scored", 0.25)


def test_an_empty_answer_is_scored_and_not_sampled_again(bench: Bench) -> None:
    """verifiers ends such a rollout with an error, and the function cannot read it."""
    result, opened = bench.play(bench.prompt("a number, please"), "")
    assert (result.kind, result.reward, opened.session.calls) == ("scored", 0.0, 1), result


def test_a_limit_cuts_the_session_and_its_rubric_scores_it(bench: Bench) -> None:
    # after two long answers the next prompt is longer than the context
    result, opened = bench.play(bench.prompt("guess"), "x" * 190, "y" * 190)
    assert (result.kind, result.truncated) == ("scored", True), result
    assert opened.session.shortened and opened.session.calls == 2

    result, opened = bench.play_limited(bench.prompt("guess"), "3")
    assert (result.kind, result.scored, result.reward) == ("failed", True, 0.0), result
    assert opened.session.limit == "max_calls" and "agent.max_calls" in result.why


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
        assert result.kind == "scored" and opened.session.calls == 1, result
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
