"""Chats in prompt files are rendered as transformers' own `apply_chat_template` does, or refused
with file and line; and prompts from CSV, directories of data sets and the hub."""

import functools
import itertools
import json
import shutil
import string
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_kit import COMMIT, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.models.tokenizer import encode_prompt, load_tokenizer
from asyncrl.supervise import preflight
from asyncrl.tasks.data.rows import find_files
from asyncrl.tasks.evaluation_sets import check_prompt_files
from asyncrl.tasks.file import FileTask, canonicalize, read_prompts

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<unk>"]
FAMILIES: dict[str, str] = tomllib.loads(Path("tests/data/family_templates.toml").read_text())
BOTH = ("<s> $A </s>", "<s> $A <s> $B </s>")


def save_tokenizer(path: Path, template: str = "", *, begins: bool = False) -> Path:
    """Save a tokenizer of characters; begins: it puts <s> before a text and </s> after it."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *string.printable])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    if begins:
        inner.post_processor = processors.TemplateProcessing(
            single=BOTH[0], pair=BOTH[1], special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=template or None,
    )
    fast.save_pretrained(path)
    return path


@functools.cache
def load_family(family: str) -> tuple[Any, Any]:
    path = save_tokenizer(Path(tempfile.mkdtemp()), FAMILIES[family])
    return load_tokenizer(path), AutoTokenizer.from_pretrained(path)


def read(rows: list[Any], tmp: Path, **columns: str) -> list[Prompt]:
    path = tmp / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_prompts(str(path), "train", columns)


TEXT = st.text(string.ascii_letters + " \n<>/?", min_size=1, max_size=8).filter(str.strip)
VALUES = st.none() | st.booleans() | st.integers(-9, 9) | TEXT
ARGUMENTS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=2)
NAME = st.sampled_from(["add", "look"])


def functions(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    inside = st.fixed_dictionaries({"name": NAME, **fields})
    return st.fixed_dictionaries({"type": st.just("function"), "function": inside})


CALLS = st.lists(functions(arguments=ARGUMENTS), min_size=1, max_size=2)
TOOLS = st.lists(functions(description=TEXT, parameters=st.just({"type": "object"})), max_size=2)
USER = TEXT.map(lambda text: [{"role": "user", "content": text}])
ANSWER = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXT}, optional={"reasoning_content": TEXT}
)
TOOL_TURNS = st.builds(
    lambda content, calls, result: [
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "content": result},
    ],
    st.none() | st.just("") | TEXT,
    CALLS,
    TEXT,
)
ROUND = st.tuples(USER, st.just([]) | TOOL_TURNS, ANSWER.map(lambda turn: [turn]))
CHATS = st.builds(
    lambda system, rounds, *end: list(itertools.chain(system, *itertools.chain(*rounds), *end)),
    st.just([]) | st.just([{"role": "system", "content": "be brief"}]),
    st.lists(ROUND, max_size=2),
    USER,
    st.just([]) | TOOL_TURNS | ANSWER.map(lambda turn: [turn]),
)
KWARGS = st.none() | st.fixed_dictionaries(
    {}, optional={"enable_thinking": st.booleans(), "reasoning_effort": st.sampled_from(["low"])}
)


@settings(max_examples=300, deadline=None)
@given(family=st.sampled_from(sorted(FAMILIES)), turns=CHATS, tools=st.none() | TOOLS, more=KWARGS)
def test_a_chat_is_what_transformers_renders_or_is_refused(
    family: str, turns: list[dict[str, Any]], tools: Any, more: Any
) -> None:
    ours, theirs = load_family(family)
    row = {"prompt": turns, "tools": tools, "chat_template_kwargs": more, "answer": "7"}
    with tempfile.TemporaryDirectory() as folder:
        (prompt,) = read([row], Path(folder))
    is_continued = turns[-1]["role"] == "assistant"
    try:
        expected = theirs.apply_chat_template(
            turns,
            tools=tools,
            add_generation_prompt=not is_continued,
            continue_final_message=is_continued,
            tokenize=True,
            return_dict=False,
            **(more or {}),
        )
    except Exception as error:
        with pytest.raises(ConfigError, match=type(error).__name__):
            encode_prompt(ours, prompt)
        return
    assert encode_prompt(ours, prompt).tolist() == expected


def test_fields_of_a_chat_reach_the_template_from_json_and_parquet(tmp_path: Path) -> None:
    """Arrow gives each turn and tool the fields of all others, with nulls that nobody wrote."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    user = {"role": "user", "content": "q"}
    tools = [
        {"type": "function", "function": {"name": "add", "parameters": {"b": 1}}},
        {"type": "function", "function": {"name": "look", "parameters": {"c": 1}}},
    ]
    rows: list[dict[str, Any]] = [
        {"messages": [user], "tools": tools},
        {
            "messages": [
                user,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "2"},
            ]
        },
    ]
    jsonl = read(rows, tmp_path)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chats.parquet")
    parquet = read_prompts(str(tmp_path / "chats.parquet"), "train")
    assert [x.messages for x in parquet] == [x.messages for x in jsonl]
    ours, theirs = load_family("qwen3")
    for prompts in (jsonl, parquet):
        for prompt, row in zip(prompts, rows, strict=True):
            text = theirs.apply_chat_template(
                row["messages"], tools=row.get("tools"), tokenize=False, add_generation_prompt=True
            )
            assert ours.decode(encode_prompt(ours, prompt).tolist()) == text
    text_tools = read([{**rows[0], "tools": json.dumps(tools)}], tmp_path)
    assert text_tools[0].template_arguments == {"tools": tools}


GO = {"role": "user", "content": "2+2="}
FOUR = {"role": "assistant", "content": "4"}
FORM = "for the chat template, `tools` must be a list of tools"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [GO, FOUR]}, r'`messages` ends with an assistant turn.*"messages\.-1\.conte'),
        ({"messages": [GO, FOUR], "answer": "5"}, "`messages` ends with an assistant turn"),
        ({"messages": [FOUR], "answer": "4"}, "the prompt is empty"),
        ({"messages": [GO], "tools": "a hammer"}, FORM),
        ({"messages": [GO], "tools": ["add"]}, FORM),
        ({"messages": [GO], "chat_template_kwargs": [1]}, FORM),
        ({"prompt": "2+2=", "chat_template_kwargs": {"a": 1}}, "`chat_template_kwargs` needs `mes"),
        ({"messages": [GO, {"role": "assistant"}]}, "`messages` must be a list"),
    ],
)
def test_a_bad_chat_is_refused_at_its_line(row: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"chats\.jsonl:2: {problem}"):
        read([{"prompt": "1+1=", "answer": "2"}, row], tmp_path)


def test_the_last_assistant_turn_is_the_answer_or_its_beginning(tmp_path: Path) -> None:
    rows = [{"messages": [GO, FOUR]}]
    (prompt,) = read(rows, tmp_path, answer="messages.-1.content")
    assert (prompt.messages, prompt.answer) == ([GO], "4")
    # a column of another name, and an answer that stands in a column of its own as well
    renamed = {"messages": "talk", "answer": "talk.-1.content"}
    assert read([{"talk": [GO, FOUR]}], tmp_path, **renamed) == [prompt]
    assert read([{"messages": [GO, FOUR], "answer": "4 "}], tmp_path)[0].messages == [GO]
    (continued,) = read(rows, tmp_path, prompt="messages")
    assert continued.messages == [GO, FOUR] and continued.is_continued
    assert continued.join_answer("2") == [GO, {"role": "assistant", "content": "42"}]
    assert prompt.join_answer("2") == [GO, {"role": "assistant", "content": "2"}]


def test_chats_that_differ_in_tools_or_calls_are_different_problems(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = [
        {"messages": [GO]},
        {"messages": [GO], "tools": tools},
        {"messages": [GO], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [{**GO, "name": "ann"}]},
        {"messages": [{**GO, "content": " 2+2= "}]},
    ]
    names = [canonicalize(prompt) for prompt in read(rows, tmp_path)]
    assert len(set(names)) == 4 and names[0] == names[-1] == '[["user", "2+2="]]'


@pytest.mark.parametrize("begins", [True, False])
def test_a_text_begins_as_the_tokenizer_says_and_has_no_end(begins: bool, tmp_path: Path) -> None:
    ours = load_tokenizer(save_tokenizer(tmp_path, begins=begins))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Hi", "a" * 40_000, "", "<s>Hi"):
        ids = encode_prompt(ours, Prompt(0, text)).tolist()
        plain = theirs.encode(text, add_special_tokens=False)
        whole = theirs.encode(text)
        if not begins or not text or text.startswith("<s>"):
            assert ids == plain
        else:
            assert [*ids, theirs.eos_token_id] == whole and ids[0] == theirs.bos_token_id


def test_answers_and_columns_are_found_inside_other_columns(tmp_path: Path) -> None:
    """verl's and SkyRL's files keep the answer in a struct."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{number}+2="}],
            "reward_model": {"style": "rule", "ground_truth": str(number + 2)},
            "extra_info": {"index": number, "hints": ["a", f"h{number}"]},
        }
        for number in range(12)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "verl.parquet")
    columns = {"answer": "reward_model.ground_truth"}
    task = FileTask(str(tmp_path / "verl.parquet"), columns=columns)
    assert task.unanswered == 0
    for prompt in task.sets["train"]:
        assert task.reward(prompt, prompt.answer) == 1.0 and prompt.answer == str(prompt.id + 2)
    settings = f'{{name="file", prompts="{tmp_path}/verl.parquet"}}'
    subject = preflight.Subject(load.load("demo", [f"task={settings}"]))
    with pytest.raises(ConfigError, match=r'no prompt has an .*"reward_model\.ground_truth"'):
        preflight.check_answers(subject)
    (first, *_) = read(rows, tmp_path, answer="extra_info.hints.1")
    assert first.answer == "h0" and json.loads(first.meta["reward_model"])["style"] == "rule"
    for column in ("reward_model.truth", "extra_info.hints.7", "prompt.content", "no.such"):
        with pytest.raises(ConfigError, match=f"chats.jsonl:1: .*no column `{column}`; it has pro"):
            read(rows, tmp_path, answer=column)
    # a name with a dot is the column itself
    assert read([{"prompt": "1", "a.b": "2"}], tmp_path, answer="a.b")[0].answer == "2"


def test_a_run_refuses_prompt_files_that_changed_since_it_began(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "1+1="}\n')
    config = load.load("demo", [f'task={{name="file", prompts="{path}"}}'])
    for _ in range(2):
        check_prompt_files(config, tmp_path)
    path.write_text('{"prompt": "1+2="}\n')
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"has changed since .*SHA-256 \w{12}, now \w"):
            check_prompt_files(config, tmp_path)
    (tmp_path / "prompts.json").unlink()
    check_prompt_files(config, tmp_path)


# written by datasets 5.2.0: a DatasetDict whose train split was filtered and saved in two shards
SAVED = Path(__file__).parents[1] / "data" / "saved_data_set"
COLUMNS = {"prompt": "question"}


def texts(source: str, split: str = "train") -> list[str]:
    return [prompt.text for prompt in read_prompts(source, split, COLUMNS)]


def repository(folder: Path) -> Path:
    """Files as in a repository of the hub: splits by their names and folders."""
    rows = {"train-00000-of-00002": "ab", "train-00001-of-00002": "cd", "validation": "ef"}
    (folder / "data").mkdir(parents=True)
    for name, values in rows.items():
        table = pa.table({"question": list(values), "answer": list(values)})
        pq.write_table(table, folder / "data" / f"{name}.parquet")
    (folder / "test").mkdir()
    (folder / "test" / "0.csv").write_text('question,answer\n"g,h",1\n', encoding="utf-8-sig")
    (folder / "extra.jsonl").write_text('{"question": "i"}\n')
    (folder / "README.md").write_text("# no data")
    return folder


def test_a_directory_has_the_splits_of_its_files(tmp_path: Path) -> None:
    assert texts(str(SAVED)) == ["0+1=", "1+1=", "3+1=", "4+1="]
    assert texts(f"{SAVED}#test") == ["90+1=", "91+1="]
    assert texts(str(SAVED / "test")) == ["90+1=", "91+1="]  # one split by itself
    (first, *_) = read_prompts(str(SAVED), "train", COLUMNS)
    assert first.answer == "1" and json.loads(first.meta["level"]) == {"grade": 0}
    task = FileTask(str(SAVED), f"{SAVED}#test", columns=COLUMNS)
    assert len(task.sets["train"]) == 4 and len(task.sets["heldout"]) == 2
    source = str(repository(tmp_path / "repository"))
    assert texts(source) == ["a", "b", "c", "d", "i"]
    assert texts(f"{source}#validation") == ["e", "f"]
    assert texts(f"{source}#test") == ["g,h"]
    assert texts(f"{source}/data/validation.parquet") == ["e", "f"]
    with pytest.raises(ConfigError, match=r"has no split dev; write .*#SPLIT with one of train, "):
        find_files(f"{source}#dev")


def test_what_is_no_data_is_refused_in_one_line(tmp_path: Path) -> None:
    def refused(name: str, content: bytes, said: str) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=said) as error:
            read_prompts(str(tmp_path / name), "train")
        assert "\n" not in str(error.value)

    refused("long.csv", b"prompt,answer\na,1\nb,2,3\n", "long.csv:3: has another number of fields")
    refused("short.csv", b"prompt,answer\na\n", "short.csv:2: has another number of fields")
    refused("open.csv", b'prompt\n"a\n', r"open.csv:2: not CSV: unexpected end of data")
    refused("latin.csv", b"prompt\n\xff\n", "latin.csv: not UTF-8 at byte 8")
    refused("bad.arrow", b"ARROW", "bad.arrow: not an Arrow file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty: has no data files \(.parquet, "):
        find_files(str(tmp_path / "empty"))
    (tmp_path / "empty" / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"empty: not a saved data set: '_data_files'"):
        find_files(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=r"task.prompts: none#train is not a file"):
        read_prompts("none#train", "train")


def test_the_hubs_client_fetches_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a mixture and evaluation sets, too; then, without a hub, from its cache."""
    part = "{name='file', label='mine', prompts='hf://datasets/org/name/data/validation.parquet'}"
    sets = [
        "task.name='file'",
        "task.prompts='hf://datasets/org/name'",
        "task.heldout='hf://datasets/org/name#test'",
        "evaluation.sets=[{name='x', file='hf://datasets/org/name#validation'}]",
    ]
    wait = {"HF_HUB_ETAG_TIMEOUT": "600", "HF_HUB_DOWNLOAD_TIMEOUT": "600"}
    settings = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", **wait}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    config = load.load("configs/demo.toml", sets)
    mixed = load.load("configs/demo.toml", ["task.name='mixture'", f"task.mixture=[{part}]"])
    said: list[str] = []
    monkeypatch.setattr(preflight, "say", said.append)
    with serving(repository(tmp_path / "repository"), "datasets") as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        local = preflight.localize(config)
        assert texts(local.task.prompts) == ["a", "b", "c", "d", "i"]
        assert texts(local.task.heldout) == ["g,h"]
        assert texts(local.evaluation.sets[0].file) == ["e", "f"]
        assert said[0] == "fetching hf://datasets/org/name" and len(said) == 3
        assert Path(local.task.prompts).name == COMMIT
        words = preflight.localize_sets(mixed, ["seed=1"])
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(ConfigError, match="hf://datasets/org/none: the hub does not provide"):
            preflight.localize(
                load.load("configs/demo.toml", [*sets, "task.prompts='hf://datasets/org/none'"])
            )
    shutil.rmtree(tmp_path / "repository")
    (mine,) = load.load("configs/demo.toml", ["task.name='mixture'", *words]).task.mixture
    assert texts(mine.prompts) == ["e", "f"] and mine.label == "mine"
    assert preflight.localize(config) == local
    for name in ("hf://datasets/org", "hf://datasets/org/name/none.csv"):
        with pytest.raises(ConfigError, match=f"{name}: "):
            preflight.localize(load.load("configs/demo.toml", [*sets, f"task.prompts='{name}'"]))
