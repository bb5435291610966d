"""Reward functions as users write them: TRL's form, parameters that fit nothing, and what is kept
of a call that failed."""

import asyncio
import datetime
import inspect
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from process_kit import SMALL, demo_command, run_command, write_lines

from actors import reward_worker
from actors.reward_worker import RewardCall, RewardFunction, RewardUnit
from actors.rewards import RewardRunner, check_reward_process, judge_all
from actors.scorers import user_function
from actors.scorers.user_function import adapt_function
from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.tasks import get_task
from asyncrl.tasks.file import FileTask, read_prompts

SUM = Prompt(0, "1+1=", "2", meta={"unit": "m"})
CHAT = Prompt(1, "3?", "3", [{"role": "user", "content": "3?"}], {"unit": "s"})

FUNCTIONS = (Path(__file__).parents[1] / "data" / "programs" / "user_functions.txt").read_text()


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    file = tmp_path / "own_reward.py"
    file.write_text(FUNCTIONS)

    def make(name: str, *sets: str) -> Config:
        words = [f"reward.function='{file}:{name}'", "reward.deadline_s=600.0", *sets]
        return load.load("demo", words)

    return make


def judged(config: Config, *asked: tuple[Prompt, str]) -> list[Any]:
    return judge_all(config, get_task(config.task), [(p, text, [5, 6]) for p, text in asked])


def line_of(text: str) -> int:
    return FUNCTIONS[: FUNCTIONS.index(text)].count("\n") + 1


def test_errors_have_line_prompt_and_answer(config: Callable[..., Config], tmp_path: Path) -> None:
    def fail(name: str, text: str) -> str:
        made = config(name)
        runner = RewardRunner(made, get_task(made.task), tmp_path)
        try:
            runner.submit((0, 0, 0), SUM, text, [5])
            (result,) = runner.collect()
        finally:
            runner.close()
        assert result.failed
        return result.failed.why

    line = line_of('return {}["no such key"]')
    assert fail("fails", "x" * 200) == (
        f"the reward raised KeyError: 'no such key' at own_reward.py:{line} in helper; "
        f"prompt '1+1=', response '{'x' * 80}'...; reward.log: {tmp_path / 'reward.log'}"
    )
    log = (tmp_path / "reward.log").read_text()
    assert f"prompt:   '1+1='\nresponse: '{'x' * 200}'\nTraceback" in log
    unusable = fail("nothing", "7")
    assert "reward is a NoneType, not a number; prompt '1+1=', response '7'" in unusable
    assert "reward is a NoneType" in (tmp_path / "reward.log").read_text()


def test_parameters_that_fit_nothing_are_refused(config: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError) as error:
        check_reward_process(config("one"))
    said = "takes (text) (too many positional arguments); write reward(prompt, text), or reward("
    assert said in str(error.value) and "own_reward.py:one" in str(error.value)


def test_our_own_forms_are_taken() -> None:
    def tokens(prompt: Prompt, text: str, *, tokens: list[int]) -> float:
        return 0.0

    async def judge(prompt: Prompt, text: str, judge: Any) -> float:
        return 0.0

    def many(prompts: list[Prompt], texts: list[str]) -> list[float]:
        return []

    many.batched = True  # type: ignore[attr-defined]
    for function in (tokens, many, print, max):
        assert adapt_function(function, "m:f", ()) is function
    assert adapt_function(judge, "m:f", ("judge",)) is judge
    with pytest.raises(ConfigError, match="missing a required argument: 'judge'"):
        adapt_function(judge, "m:f", ())


def test_trls_form_is_called_by_names(config: Callable[..., Config]) -> None:
    found = judged(config("trl"), (SUM, "2"), (SUM, "3"), (CHAT, "3"))
    assert [(r.reward, str(r.failed)) for r in found] == [(1.0, ""), (0.0, ""), (1.5, "")]
    found = judged(config("later"), (SUM, "2"), (SUM, "3"))
    assert [(r.reward, str(r.failed)) for r in found] == [(1.0, ""), (0.0, "")]


def test_a_default_stands_for_what_only_trls_trainer_has() -> None:
    def may_ask(completions: list[str], trainer_state: Any = None) -> list[float]:
        return [float(trainer_state is None) for _ in completions]

    assert adapt_function(may_ask, "m:f", ())([SUM], ["abc"], tokens=[[1]]) == [1.0]


def test_a_failed_reward_is_said_once(
    small_model: Path, config: Callable[..., Config], tmp_path: Path
) -> None:
    function = config("fails_later").reward.function
    sets = (*SMALL, f"reward.function={function!r}", "name='r'", "reward.error_budget=0.1")
    done = run_command(demo_command("run", tmp_path, small_model, *sets))
    assert done.code == 1
    said = f"KeyError: 'no such key' at own_reward.py:{line_of('return {}[')} in helper"
    assert done.err.count(said) == 1, done.err
    assert done.json["error"].count(said) == 1 and "reward.error_budget" in done.json["error"]
    log = tmp_path / "runs" / "r" / "reward.log"
    assert f"reward.log: {log}" in done.err and "in helper" in log.read_text()


SEVERAL = """
import asyncio
def right(prompt, text): return float(text == prompt.answer)
def length(completions, **columns): return [len(text) if text else None for text in completions]
async def later(prompt, text):
    await asyncio.sleep(0)
    return {"reward": 0.5, "form": 0.25}
def reward(prompt, text): return None
def mean(completions, **columns): return [1.0]
def fails(prompt, text): raise KeyError(text)
def scored(prompt, text, tokens): return {"reward": 1, "token_rewards": [0.0 for _ in tokens]}
"""


@pytest.mark.parametrize(
    ("names", "weights", "expected"),
    [
        (["right"], [], {"reward": 1.0, "right": 1.0}),
        (["right", "length"], [2.0, -0.5], {"reward": 1.5, "right": 1.0, "length": 1.0}),
        (
            ["right", "later", "reward"],
            [1.0, 2.0, 7.0],
            {"reward": 2.0, "right": 1.0, "later": 0.5, "later.form": 0.25},
        ),
        (["length", "later"], [], {"reward": 1.5, "length": 1.0, "later": 0.5, "later.form": 0.25}),
        (["reward"], [], "the reward function returned an unusable value: reward is a NoneType"),
        (["right", "fails"], [], "raised KeyError: '2' at own_reward.py:10 in fails"),
        (["right", "mean"], [], "mean: the reward function takes lists (`batched`), and returned"),
        (["right", "scored"], [], "scored: token_rewards need a single function"),
    ],
)
def test_several_functions_are_summed_with_their_weights(
    names: list[str], weights: list[float], expected: Any, tmp_path: Path
) -> None:
    """Plain, in TRL's form, async and mixed ones, in a real reward process."""
    (tmp_path / "own_reward.py").write_text(SEVERAL)
    reward = {
        "functions": [f"{tmp_path}/own_reward.py:{name}" for name in names],
        "weights": weights,
        "deadline_s": 600.0,
    }
    config = load.build({"model": {"path": "m"}, "task": {"name": "sort"}, "reward": reward})
    first, second = check_reward_process(config, [(SUM, "2", [5]), (SUM, "2", [5])])
    if isinstance(expected, str):
        assert expected in str(first.failed), first
    else:
        assert (first.reward, first.parts, first.failed) == (expected["reward"], expected, "")
        assert second.parts == expected
    if names == ["length", "later"]:  # None: does not apply, and the others are summed
        (empty,) = check_reward_process(config, [(SUM, "", [5])])
        assert (empty.reward, "length" in empty.parts) == (0.5, False)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (("functions=['m:a', 'm:b']", "weights=[1.0]"), "1 weights for 2 reward.functions"),
        (("functions=['m:a']", "function='m:b'"), "the only source of rewards"),
        (("functions=['x/m.py:reward', 'y/m.py:reward']",), "rename one of them"),
        (("weights=[1.0]",), "1 weights for 0 reward.functions"),
    ],
)
def test_lists_of_functions_that_do_not_fit_are_refused(sets: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load.load("configs/demo.toml", [f"reward.{item}" for item in sets])


def test_the_parts_of_several_functions_have_unique_names() -> None:
    paths = ["a.b:reward", "c/d.py:reward", "c/d.py:one", "e:two"]
    reward = {"functions": paths}
    config = load.build({"model": {"path": "m"}, "task": {"name": "sort"}, "reward": reward})
    assert list(config.reward.function_names) == ["b.reward", "d.reward", "one", "two"]
    assert list(config.reward.function_names.values()) == paths
    with pytest.raises(ConfigError, match=r"reward\.functions = a\.b:reward: "):
        check_reward_process(config, [(SUM, "2", [5])])


@pytest.fixture
def own(tmp_path: Path) -> dict[str, Any]:
    """The functions by their names."""
    file = tmp_path / "own_reward.py"
    file.write_text(FUNCTIONS)
    made: dict[str, Any] = {}
    exec(compile(FUNCTIONS, str(file), "exec"), made)
    return made


def test_the_log_has_a_failed_call_from_the_function_on(
    own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = datetime.datetime(2026, 1, 2, 3, 4, 5)
    monkeypatch.setattr(user_function, "time", SimpleNamespace(strftime=day.strftime))
    log = user_function.FailureLog(str(tmp_path))
    umask = os.umask(0o002)
    try:
        unit = RewardUnit(3, [RewardCall(SUM, "\ud800", [5])])
        reply = reward_worker.judge(RewardFunction(own["fails"]), unit, log)
    finally:
        os.umask(umask)
    lines = [line_of(text) for text in ("return helper", "return {}")]
    assert reply.why == f"raised KeyError: 'no such key' at own_reward.py:{lines[1]} in helper"
    log.note(CHAT, "é\ud800", "reward is \ud800")
    assert (tmp_path / "reward.log").read_text(encoding="utf-8") == (
        f"2026-01-02 03:04:05 prompt 0: {reply.why}\n"
        "prompt:   '1+1='\n"
        "response: '\\ud800'\n"
        "Traceback (most recent call last):\n"
        f'  File "{tmp_path}/own_reward.py", line {lines[0]}, in fails\n'
        "    return helper(text)\n"
        "           ^^^^^^^^^^^^\n"
        f'  File "{tmp_path}/own_reward.py", line {lines[1]}, in helper\n'
        '    return {}["no such key"] + json.loads(text)\n'
        "           ~~^^^^^^^^^^^^^^^\n"
        "KeyError: 'no such key'\n"
        "\n"
        "2026-01-02 03:04:05 prompt 1: reward is \\ud800\n"
        "prompt:   '3?'\n"
        "response: 'é\\ud800'\n"
        "\n"
    )
    assert (tmp_path / "reward.log").stat().st_mode & 0o777 == 0o664


def test_a_full_log_takes_no_more(tmp_path: Path) -> None:
    log = user_function.FailureLog(str(tmp_path))
    path = tmp_path / "reward.log"
    path.write_bytes(b"x" * (user_function.LOG_BYTES - 1))
    log.note(SUM, "y" * user_function.LOG_BYTES, "why")
    assert path.stat().st_size == 2 * user_function.LOG_BYTES - 1, "an entry may be as long"
    path.write_bytes(b"x" * user_function.LOG_BYTES)
    log.note(SUM, "y", "why")
    assert path.stat().st_size == user_function.LOG_BYTES == 1 << 20
    user_function.FailureLog(str(tmp_path / "gone")).note(SUM, "", "no directory: no error")
    user_function.FailureLog("").note(SUM, "", "no run: no log")


def test_the_place_of_an_error_is_outside_libraries(own: dict[str, Any]) -> None:
    def why(function: Any, text: str = "no JSON") -> str:
        unit = RewardUnit(3, [RewardCall(SUM, text, [5])])
        return reward_worker.judge(RewardFunction(function), unit, user_function.FailureLog("")).why

    line = line_of('json.loads(text)["score"]')
    assert why(own["parses"]) == (
        "raised JSONDecodeError: Expecting value: line 1 column 1 (char 0) "
        f"at own_reward.py:{line} in parses"
    )
    assert re.search(r" at shlex\.py:\d+ in \w+$", why(shlex.split)), "a library alone"
    assert re.search(r"and 'str'$", why(divmod)), "a builtin has no place"


def test_a_quoted_text_is_short() -> None:
    quoted = [user_function.format_text("'" * length) for length in (80, 81)]
    assert quoted == ['"' + "'" * 80 + '"', '"' + "'" * 80 + '"...']


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("three", "takes (prompt, text, reference) (missing a required argument: 'reference')"),
        ("swapped", "takes (completion, prompt) (the prompt comes first)"),
        ("lists", "takes (prompts, answers) (mark one that takes lists by lists.batched = True)"),
    ],
)
def test_the_whole_refusal_names_both_forms(own: dict[str, Any], name: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        adapt_function(own[name], f"a:b.py:{name}", ())
    assert str(error.value) == (
        f"reward.function = a:b.py:{name}: {said}; write reward(prompt, text), or "
        "reward(prompts, completions, **columns) as TRL calls one"
    )
    own["lists"].batched = True
    assert adapt_function(own["lists"], "m:lists", ()) is own["lists"]


def test_trls_form_gets_all_columns_by_name() -> None:
    """A column that a prompt does not have is None there."""
    got: list[dict[str, Any]] = []

    def every(*, completions: Any, log_extra: Any, log_metric: Any, **rest: Any) -> list[float]:
        assert log_extra("a", [1]) is log_metric("b", 2) is None
        got.append({"completions": completions} | rest)
        return [1.0, 2.0]

    def few(completions: Any, size: Any, *more: Any, answer: Any = "") -> list[float]:
        got.append({"completions": completions, "size": size, "answer": answer, "more": more})
        return [3.0, 4.0]

    large = Prompt(1, "3?", "3", [{"role": "user", "content": "3?"}], {"size": 3})
    asked = ([SUM, large], ["a", "b"], [[1], [2, 3]])
    assert adapt_function(every, "m:f", ())(*asked) == [1.0, 2.0]
    made = adapt_function(few, "m:f", ())
    assert made(*asked) == [3.0, 4.0] and made.batched is True
    completions = ["a", [{"role": "assistant", "content": "b"}]]
    assert got == [
        {
            "completions": completions,
            "prompts": ["1+1=", [{"role": "user", "content": "3?"}]],
            "completion_ids": [[1], [2, 3]],
            "answer": ["2", "3"],
            "size": [None, 3],
            "unit": ["m", None],
        },
        {"completions": completions, "size": [None, 3], "answer": ["2", "3"], "more": ()},
    ]
    with pytest.raises(ValueError, match="zip"):
        made([SUM, large], ["a"], [[1]])


def test_what_trls_form_lacks_is_named() -> None:
    def asks(completions: Any, truth: Any, best: Any, **_: Any) -> list[float]:
        return []

    with pytest.raises(TypeError) as error:
        adapt_function(asks, "m:f", ())([SUM, CHAT], ["a", "b"], [[1], [2]])
    assert str(error.value) == (
        "it takes best, truth, but the prompts have no such column: they have unit, answer "
        "(task.columns renames)"
    )

    unit = RewardUnit(3, [RewardCall(SUM, "a", [5])])
    function = RewardFunction(adapt_function(asks, "m:f", ()))
    reply = reward_worker.judge(function, unit, user_function.FailureLog(""))
    assert reply.why.endswith(" unit, answer (task.columns renames)"), "no place in the user's code"

    def trains(completions: Any, trainer_state: Any) -> list[float]:
        return []

    def plays(completions: Any, environments: Any) -> list[float]:
        return []

    for function, name in ((trains, "trainer_state"), (plays, "environments")):
        with pytest.raises(ConfigError) as refused:
            adapt_function(function, "m:f", ())
        assert str(refused.value) == (
            f"reward.function = m:f: takes {name}, which only TRL's trainer has; give it a "
            f"default, as in {name}=None, and do without"
        )


def test_a_function_or_an_object_of_trls_form_may_be_async() -> None:
    async def reward(completions: list[str], **_: Any) -> list[float]:
        return [len(text) for text in completions]

    class Reward:
        async def __call__(self, completions: list[str]) -> list[float]:
            return [len(text) for text in completions]

    assert user_function.is_async(Reward()) and not user_function.is_async(print)
    for function in (reward, Reward()):
        made = adapt_function(function, "m:f", ())
        assert inspect.iscoroutinefunction(made) and made.batched is True
        assert asyncio.run(made([SUM], ["abc"], [[1]])) == [3]


def test_columns_of_other_names(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", *({"question": f"{x}?", "solution": x} for x in "abc"))
    with pytest.raises(ConfigError, match=r'is it `question`\? task.columns = \{ prompt = "ques'):
        read_prompts(path, "train")
    task = FileTask(path, columns={"prompt": "question", "answer": "solution"})
    every = [prompt for split in ("train", "heldout") for prompt in task.sets[split]]
    assert sorted((p.text, p.answer) for p in every) == [("a?", "a"), ("b?", "b"), ("c?", "c")]
    assert every[0].meta == {"solution": every[0].answer}, "a reward may ask for it by its name"
    with pytest.raises(ConfigError, match="has no column `task`; it has question, solution"):
        read_prompts(path, "train", {"prompt": "task"})
    words = ["task.name='file'", f"task.prompts={path!r}", 'task.columns={prompt="question"}']
    assert get_task(load.load("demo", words).task).prompt("heldout", 0, 0).text[1:] == "?"
    with pytest.raises(ConfigError, match=r"task.columns: sort reads no file"):
        load.load("demo", ['task.columns={prompt="question"}'])
    with pytest.raises(ConfigError, match=r"task\.columns"):
        load.load("demo", ["task.name='file'", 'task.columns={question="prompt"}'])


def test_a_conversational_prompt_of_trl_is_a_chat(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hello"}]
    path = write_lines(tmp_path / "p.jsonl", {"prompt": turns, "answer": "x"})
    (prompt,) = read_prompts(path, "train")
    assert prompt.messages == turns and prompt.text == "hello" and prompt.answer == "x"
    path = write_lines(tmp_path / "q.jsonl", {"chat": turns})
    (prompt,) = read_prompts(path, "train", {"messages": "chat"})
    assert prompt.messages == turns and prompt.meta == {}
