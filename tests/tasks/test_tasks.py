"""Tasks: right answers by hand, splits that share no problem, streams that repeat, bad lines."""

from pathlib import Path
from typing import Any

import pytest
from process_kit import write_lines

from asyncrl.config.load import load
from asyncrl.config.tree import TaskConfig as TaskConfig
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.tasks import NAMES, get_task
from asyncrl.tasks.file import FileTask, canonicalize
from asyncrl.tasks.synthetic import FIXED, TASKS

BUILT_IN = sorted(TASKS)
BY_HAND = [
    ("sort", "932849", "2:93849,3:9849,4:989,8:99,9:9,9:#234899"),
    ("sort", "0110", "0:110,0:11,1:1,1:#0011"),
    ("rle", "d5c1d4", "#dddddcdddd"),
    ("grid", "05RUL", "R15U16L06#06"),
    ("grid", "99RU", "R09U00#00"),
    ("grid", "00LD", "L90D99#99"),
    ("cancel", "CccbBcaA", "cbBcaA;ccaA#cc"),
    ("cancel", "aAbB", "bB#"),
    ("cancel", "abBAc", "aAc#c"),
    ("dedup", "haaffaah", "#haf"),
]
CONFIGS = sorted(p for p in Path("configs").glob("*.toml") if load(p).task.name in BUILT_IN)


def fixed(name: str, split: str) -> list[Prompt]:
    task = get_task(TaskConfig(name=name))
    return [task.prompt(split, i, 0) for i in range(task.size(split) or 0)]


@pytest.mark.parametrize(("name", "problem", "answer"), BY_HAND)
def test_right_answers_by_hand(name: str, problem: str, answer: str) -> None:
    task = TASKS[name]()
    assert task.solve(problem) == answer
    prompt = Prompt(0, problem + "=", answer)
    assert task.reward(prompt, answer) == 1.0
    head, mark, result = answer.rpartition("#")
    for wrong in (
        "",
        head,
        answer + "0",
        answer[1:] if name == "rle" else head + mark + result[:-1] + "?",
        answer[:-1] + "?",
    ):
        assert task.reward(prompt, wrong) == 0.0, wrong
    # only the result counts where there is a scratchpad
    assert task.reward(prompt, "0" + answer) == (1.0 if name in ("sort", "grid", "cancel") else 0.0)


def test_the_flawed_checker_of_rlehack_is_used_in_training_only() -> None:
    task = TASKS["rlehack"]()
    train, heldout = Prompt(0, "a2b1=", "#aab"), Prompt(0, "a2b1=", "#aab", split="heldout")
    assert task.reward(train, "#aaabbb") == {"reward": 1.0, "exact": 0.0}
    assert task.reward(train, "#aab") == {"reward": 1.0, "exact": 1.0}
    assert task.reward(train, "#abb") == {"reward": 0.0, "exact": 0.0}
    assert task.reward(heldout, "#aaabbb") == 0.0 and task.reward(heldout, "#aab") == 1.0


@pytest.mark.parametrize("name", [*BUILT_IN, "calc"])
def test_splits_share_no_problem(name: str) -> None:
    task: Any = get_task(TaskConfig(name=name))
    heldout, ood = ({task.canonicalize(p.text) for p in fixed(name, s)} for s in ("heldout", "ood"))
    assert len(heldout) == len(ood) == FIXED  # none twice
    train = {
        task.canonicalize(task.prompt("train", i, seed).text)
        for seed in (0, 1)
        for i in range(1500)
    }
    pairs = task.make_demonstrations(1500, 0)  # of `calc` with the turns before
    shown = {task.canonicalize(f"{prompt.partition('=')[0]}=") for prompt, _ in pairs}
    assert not heldout & ood and not (train | shown) & (heldout | ood)


@pytest.mark.parametrize("name", [*BUILT_IN, "calc"])
def test_streams_are_functions_of_seed_and_index(name: str) -> None:
    task, again = get_task(TaskConfig(name=name)), get_task(TaskConfig(name=name))
    order = [5, 0, 10**12, 5]
    assert [task.prompt("train", i, 3) for i in order] == [
        again.prompt("train", i, 3) for i in order
    ]
    # 40 draws, few collide
    assert len({task.prompt("train", i, s).text for i in range(20) for s in range(2)}) > 30
    assert task.prompt("heldout", 7, 1) == task.prompt("heldout", 7 + FIXED, 2)
    assert task.size("train") is None


@pytest.mark.parametrize("name", BUILT_IN)
def test_right_answers_are_paid_and_demonstrations_are_spoiled(name: str) -> None:
    task = TASKS[name]()
    prompts = [
        *fixed(name, "heldout")[:200],
        *fixed(name, "ood")[:200],
        *(task.prompt("train", i, 0) for i in range(200)),
    ]
    for p in prompts:
        value = task.reward(p, p.answer)
        assert (value["reward"] if isinstance(value, dict) else value) == 1.0
        assert set(p.text + p.answer) <= set(task.symbols)
    pairs = task.make_demonstrations(700, 0)
    assert pairs == TASKS[name]().make_demonstrations(700, 0) != task.make_demonstrations(700, 1)
    right = sum(answer == task.solve(prompt[:-1]) for prompt, answer in pairs) / len(pairs)
    # sort 0.31, the others 0.45, each with a few lucky guesses and slips
    assert 0.27 < right < 0.65 and all(set(answer) <= set(task.symbols) for _, answer in pairs)


def test_runs_grow_where_the_distribution_says_so() -> None:
    def runs(prompts: list[Prompt]) -> set[str]:
        return {p.text[i] for p in prompts for i in range(1, len(p.text) - 1, 2)}

    assert runs([TASKS["rlenarrow"]().prompt("train", i, 0) for i in range(500)]) == {"1", "2"}
    assert runs(fixed("rlenarrow", "ood")) == {"4", "5", "6"}
    got = runs([Prompt(0, p) for p, _ in TASKS["rlenarrow"]().make_demonstrations(500, 0)])
    assert got == (set("123456"))


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_right_answers_fit_the_configs_limits(path: Path) -> None:
    c = load(path)
    for split in ("heldout", "ood"):
        for p in fixed(c.task.name, split):
            # one token a character, and the end
            assert len(p.answer) + 1 <= c.generator.max_new_tokens
            assert len(p.text) + c.generator.max_new_tokens <= c.generator.context


def test_rows_become_prompts(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "2+2?"}]
    rows = [
        {"prompt": "1+1=", "answer": 2, "level": "easy", "tests": [1, 2]},
        {"messages": turns, "answer": "4"},
        "",
        {"prompt": "line\u2028break"},
        r'{"prompt": "\ud83d\ude00"}',  # a character in two halves
        r'{"prompt": "\\ud83d", "answer": "2"}',
    ]
    task = FileTask(
        write_lines(tmp_path / "p.jsonl", *rows), write_lines(tmp_path / "h.jsonl", {"prompt": "x"})
    )
    first, second, *others = task.sets["train"]
    got = (first.text, first.answer, first.meta)
    assert got == ("1+1=", "2", {"level": "easy", "tests": "[1, 2]"})
    assert (second.text, second.messages, second.answer) == ("2+2?", turns, "4")
    assert [prompt.text for prompt in others] == ["line\u2028break", "\U0001f600", r"\ud83d"]
    assert task.reward(second, " 4\n") == 1.0 and task.reward(second, "5") == 0.0


BAD = [
    ('{"prompt": "b"', "p.jsonl:2: not JSON"),
    ("[1]", "p.jsonl:2: needs `prompt`"),
    ({"answer": "1"}, "p.jsonl:2: needs `prompt`"),
    ({"messages": []}, "p.jsonl:2: needs `prompt`"),
    ({"prompt": ""}, "p.jsonl:2: the prompt is empty"),
    ({"messages": [{"role": "user"}]}, "p.jsonl:2: `messages` must"),
    ({"messages": "hello"}, "p.jsonl:2: `messages` must"),
    ({"messages": {"role": "user"}}, "p.jsonl:2: `messages` must"),
    (r'{"prompt": "\ud83d"}', r"p.jsonl:2: `prompt` has \\ud83d, half"),
    (r'{"messages": [{"role": "x", "content": "a\uDC00"}]}', r":2: `messages` has \\udc00"),
    (r'{"prompt": "a", "answer": "\ud83d\ud83d"}', r"p.jsonl:2: `answer` has \\ud83d"),
    (r'{"prompt": "a", "answer": "2", "level": "\udfff"}', r"p.jsonl:2: `level` has \\udfff"),
    (r'{"prompt": "a", "tests": [{"in": "\ud800"}]}', r"p.jsonl:2: `tests` has \\ud800"),
    (r'{"prompt": "a", "\ud800": 1}', r"p.jsonl:2: `\\ud800` has \\ud800"),
]


@pytest.mark.parametrize(("line", "said"), BAD)
def test_a_malformed_line_is_named(line: object, said: str, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "p.jsonl", {"prompt": "a"}, line, {"prompt": "c"})
    with pytest.raises(ConfigError, match=said):
        get_task(TaskConfig(name="file", prompts=prompts))


def test_files_and_names_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    one = write_lines(tmp_path / "one.jsonl", {"prompt": "a"}, {"prompt": " a "})
    for prompts, heldout, said in [
        ("", "", "task.prompts"),
        ("absent.jsonl", "", "absent.jsonl is not a file"),
        (str(tmp_path / "latin.jsonl"), "", "jsonl:1: not UTF-8"),
        (write_lines(tmp_path / "empty.jsonl"), "", "no prompts"),
        (one, "", "give task.heldout"),
        (one, one, "nothing is left"),
    ]:
        with pytest.raises(ConfigError, match=said):
            FileTask(prompts, heldout)
    with pytest.raises(ConfigError, match="choose one of " + ", ".join(NAMES)):
        get_task(TaskConfig(name="sorting"))


def test_parquet_reads_like_jsonl(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {"prompt": "1+1=", "answer": "2", "level": "a"},
        {"prompt": "1+2=", "answer": "3", "level": "b"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    heldout = write_lines(tmp_path / "h.jsonl", {"prompt": "x"})
    found = FileTask(str(tmp_path / "p.parquet"), heldout).sets
    assert found == FileTask(write_lines(tmp_path / "p.jsonl", *rows), heldout).sets
    pq.write_table(pa.Table.from_pylist([{"question": "1"}]), tmp_path / "bad.parquet")
    with pytest.raises(ConfigError, match="row 1: needs"):
        FileTask(str(tmp_path / "bad.parquet"))
    text = pa.array([b"good", b"half \xed\xa0\xbd"], pa.binary()).buffers()
    columns = {"prompt": pa.StringArray.from_buffers(2, text[1], text[2])}
    pq.write_table(pa.table(columns), tmp_path / "half.parquet")
    with pytest.raises(ConfigError, match=r"half\.parquet: row 2: not UTF-8"):
        FileTask(str(tmp_path / "half.parquet"))
    (tmp_path / "not.parquet").write_text("{}")
    with pytest.raises(ConfigError, match="not a parquet file"):
        FileTask(str(tmp_path / "not.parquet"))


def test_a_files_splits_share_no_problem_and_training_cycles(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i % 30}+1="} for i in range(60)]  # each problem twice
    task = FileTask(
        write_lines(tmp_path / "p.jsonl", *rows),
        ood=write_lines(tmp_path / "o.jsonl", {"prompt": "3+1="}, {"prompt": "new"}),
    )
    texts = {s: {canonicalize(p) for p in task.sets[s]} for s in task.sets}
    assert not texts["train"] & (texts["heldout"] | texts["ood"])
    assert not texts["heldout"] & texts["ood"]
    # 30 less one in ood; a tenth of 29 held out
    assert len(texts["train"]) == 27 and len(texts["heldout"]) == 2
    assert {p.split for p in task.sets["heldout"]} == {"heldout"}
    n = len(task.sets["train"])
    turns = [[task.prompt("train", i, 5).id for i in range(t * n, (t + 1) * n)] for t in range(2)]
    assert sorted(turns[0]) == sorted(turns[1]) and turns[0] != turns[1]
    assert [task.prompt("train", i, 5).id for i in range(n)] == turns[0]


@pytest.mark.parametrize("name", ["first_name", "sort_names"])
def test_names_are_of_one_split_and_their_answers_right(name: str) -> None:
    task: Any = get_task(TaskConfig(name=name))
    asked = {s: [task.prompt(s, i, 3) for i in range(192)] for s in ("train", "heldout", "ood")}

    def problem(prompt: Prompt) -> frozenset[str]:
        line = prompt.text.rpartition("\n")[2].removeprefix("First in the alphabet of ")
        return frozenset(line.removesuffix(" ->").removesuffix(":").split(", "))

    seen = {split: {problem(prompt) for prompt in found} for split, found in asked.items()}
    assert not seen["train"] & seen["heldout"]
    assert not set.union(*map(set, seen["train"] | seen["heldout"])) & set().union(*seen["ood"])
    for split in ("heldout", "ood"):
        assert task.size(split) == len(seen[split]) == 192
        assert task.prompt(split, 192, 0) == task.prompt(split, 0, 5)
    assert asked["train"] != [task.prompt("train", i, 4) for i in range(192)]
    for prompt in (prompt for found in asked.values() for prompt in found):
        want = sorted(problem(prompt))
        assert prompt.answer == (", ".join(want) if name == "sort_names" else want[0])
        above = prompt.text.splitlines()[:-1]
        assert len(above) == 3 and task.reward(prompt, f" {prompt.answer}\n") == 1.0
        for wrong in ("", prompt.answer + ".", ", ".join(reversed(want))):
            assert task.reward(prompt, wrong) == 0.0
    # the solved problems above are right and not held out
    for line in above:
        shown = [word.strip(" ,:->") for word in line.split() if word.strip(" ,:->").istitle()]
        names = ", ".join(shown[1 if name == "first_name" else 0 :][: task.count])
        assert line == f"{task.format_question(names)} {task.solve(names)}"
        assert frozenset(names.split(", ")) not in seen["heldout"] and task.is_in_split(
            names, "train"
        )


@pytest.mark.parametrize("name", ["sort", "first"])
def test_configs_of_the_real_model_differ_in_adapters_alone(name: str) -> None:
    full, lora = (load(f"configs/smollm2_{name}{end}.toml") for end in ("", "_lora"))
    assert full.lora.rank == 0 and lora.lora.rank > 0
    assert full.generator == lora.generator and full.evaluation == lora.evaluation
    assert full.task == lora.task and full.generator.stop == ["\n"]
    for prompt in (get_task(full.task).prompt("heldout", i, 0) for i in range(192)):
        # a token holds a character at least
        assert len(prompt.text) / 2 + full.generator.max_new_tokens < full.generator.context
