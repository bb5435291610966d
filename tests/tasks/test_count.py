"""The task with pictures, its warm start, and images in files of prompts."""

import base64
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from process_kit import ROOT, load_program, write_lines
from vision_kit import picture

from asyncrl.config import load
from asyncrl.contract.blobs import images
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.models import pictures
from asyncrl.models.policy import load_policy
from asyncrl.tasks import get_task
from asyncrl.tasks.calc import END, TURNS, CalcTask, Calculator, calculate
from asyncrl.tasks.file import FileTask, canonicalize, read_prompts
from asyncrl.tasks.fit import parse_pairs
from asyncrl.tasks.mixture import MixtureTask
from asyncrl.tasks.pictures import count
from asyncrl.tasks.warm_start import warm_start


def shapes(blob: bytes, color: str) -> int:
    """Cells of a picture with this color, counted from the pixels."""
    pixels = pictures.decode_pixels(blob).reshape(
        count.CELLS, count.CELL, count.CELLS, count.CELL, 3
    )
    return int((pixels == count.COLORS[color]).all(-1).any((1, 3)).sum())


def test_a_picture_has_as_many_shapes_as_the_answer_says() -> None:
    task = count.CountTask()
    seen = set()
    for split in ("train", "heldout", "ood"):
        for index in range(60):
            prompt = task.prompt(split, index, 0)
            (blob,) = prompt.images
            color = prompt.text.removeprefix("<image>")[0]
            assert prompt.text == f"<image>{color}=" and images.read_size(blob) == (18, 18)
            assert str(shapes(blob, color)) == prompt.answer
            others = sum(shapes(blob, each) for each in count.COLORS if each != color)
            assert (others >= 4) == (split == "ood")
            assert task.reward(prompt, prompt.answer) == 1.0 != task.reward(prompt, "0")
            seen.add(images.digest(blob))
    assert len(seen) == 180
    blobs = [task.draw_images(f"r{x}........")[0] for x in "rR"]
    disc, square = map(pictures.decode_pixels, blobs)
    assert (disc != 128).any(-1).sum() == 12 < (square != 128).any(-1).sum() == 16


def test_demonstrations_have_the_pictures_of_their_questions() -> None:
    task = count.CountTask()
    pairs = task.make_demonstrations(400, 0)
    shown = [task.draw_images(problem) for problem, _ in task.solve_demonstrations(400, 0)]
    right = [
        str(shapes(blob, text.removeprefix("<image>")[0])) == answer
        for (text, answer), (blob,) in zip(pairs, shown, strict=True)
    ]
    assert 0.4 < np.mean(right) < 0.6


def test_a_warm_start_builds_a_llava(tmp_path: Path) -> None:
    config = load.load(ROOT / "configs" / "count.toml", [f"model.path={str(tmp_path / 'm')!r}"])
    what = warm_start(config, tmp_path / "m", steps=2, threads=1)
    assert what["steps"] == 2 and np.isfinite(what["loss"])
    model = load_policy(tmp_path / "m", "float32", "cpu")
    assert model.vision is not None and model.vision.shape.length == 9


def test_a_mixture_with_pictures_needs_a_model_of_its_own() -> None:
    sections = {
        "model": {"path": "m"},
        "task": {"name": "mixture", "mixture": [{"name": "count"}, {"name": "sort"}]},
    }
    task = get_task(load.build(sections).task)
    assert isinstance(task, MixtureTask)
    assert {len(task.prompt("heldout", n, 0).images) for n in range(2)} == {0, 1}
    with pytest.raises(ConfigError, match="tiny model for a mixture with the images of count"):
        task.make_demonstrations(4, 0)


def test_prompts_of_a_file_have_the_images_of_their_columns(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    blobs = [picture(n) for n in range(3)]
    for n, blob in enumerate(blobs):
        (tmp_path / "pictures" / f"{n}.PNG").write_bytes(blob)
    url = f"data:image/png;base64,{base64.b64encode(blobs[2]).decode()}"
    path = write_lines(
        tmp_path / "p.jsonl",
        {"prompt": "a", "answer": "1", "image": "pictures/0.PNG", "level": "3"},
        {"prompt": "a", "images": ["pictures/1.PNG", url]},
        {"prompt": "a", "image": "debian:12"},
        {"messages": [{"role": "user", "content": "b"}], "image": str(tmp_path / "pictures/2.PNG")},
    )
    first, second, third, fourth = read_prompts(path, "train")
    assert first.images == blobs[:1] and first.meta == {"level": "3"}
    assert second.images == blobs[1:] and fourth.images == blobs[2:]
    assert third.images == [] and third.meta == {"image": "debian:12"}
    other = write_lines(tmp_path / "r.jsonl", {"prompt": "a", "photo": "pictures/0.PNG"})
    (renamed,) = read_prompts(other, "train", {"image": "photo"})
    assert renamed.images == blobs[:1]
    assert len({canonicalize(prompt) for prompt in (first, second, third)}) == 3
    task = FileTask(path)  # the same question about other pictures is another problem
    assert sum(len(rows) for rows in task.sets.values()) == 4
    with pytest.raises(ConfigError, match="prompts have images"):
        task.make_demonstrations(4, 0)
    rows = [{"prompt": "a", "image": {"bytes": blobs[0], "path": "0.png"}}]  # of a data set
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    (prompt,) = read_prompts(str(tmp_path / "p.parquet"), "train")
    assert prompt.images == blobs[:1] and prompt.meta == {}


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("none.png", r"p.jsonl:1: `image` is not an image: .*none.png: No such file"),
        ("p.jsonl.png", r"p.jsonl:1: `image` is not an image: it is neither a PNG nor a JPEG"),
        ("data:image/png;base64,AAAA", r"neither a PNG nor a JPEG; give the path"),
        ({"bytes": None, "path": None}, r"it has neither bytes nor a path"),
    ],
)
def test_a_row_whose_image_cannot_be_read_is_named(tmp_path: Path, image: Any, said: str) -> None:
    (tmp_path / "p.jsonl.png").write_bytes(b"no image")
    with pytest.raises(ConfigError, match=said):
        read_prompts(write_lines(tmp_path / "p.jsonl", {"prompt": "a", "image": image}), "train")
    # supervised training refuses every image
    row = {"prompt": "a", "answer": "1", "image": "a.png"}
    with pytest.raises(ConfigError, match="p:1: has an image; supervised training reads only text"):
        list(parse_pairs("p:1", row))


def test_older_prompts_have_no_images() -> None:
    older = msgspec.msgpack.encode([3, "a=", "b", [], {}, "train", ""])
    assert msgspec.msgpack.decode(older, type=Prompt).images == []
    prompt = Prompt(0, "a", images=[picture(0)])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(prompt), type=Prompt) == prompt
    assert prompt.image_urls == [images.to_data_url(picture(0))]


def play(prompt: Prompt, *texts: str) -> list[tuple[str, float, bool, bool]]:
    env = Calculator()
    assert env.reset(seed=1, options={"prompt": prompt}) == (prompt.text, {})
    return [env.step(text)[:4] for text in texts]


def test_the_calculator_by_hand() -> None:
    assert calculate("?12+30") == "42=" and calculate("?99*99") == "9801="
    for none in ("12+30", "?12", "?12+", "?1+2+3", "?1-2", "?9999*9", "", "#4", "?12345+1"):
        assert calculate(none) == "e=", none
    task = CalcTask()
    assert task.solve("37*8+45") == "#341" and task.solve("12*3-20") == "#16"
    assert task.split_problem("37*8-45") == ("?37*8", "-45")
    for split in ("heldout", "ood"):
        texts = [task.prompt(split, index, 0).text for index in range(500)]
        assert all(0 < int(task.solve(text[:-1])[1:]) < 2000 for text in texts)
    prompt = Prompt(0, "37*8+45=", "#341")
    assert play(prompt, "?37*8", "?296+45", "#341") == [
        ("296=", 0.0, False, False),
        ("341=", 0.0, False, False),
        ("", 1.0, True, False),
    ]
    assert play(prompt, "#340") == [("", 0.0, True, False)]
    assert play(prompt, *["x"] * TURNS)[-1] == ("e=", 0.0, False, True)


def test_demonstrated_turns_stand_behind_what_the_calculator_says() -> None:
    task = CalcTask()
    pairs = task.make_demonstrations(3000, 0)
    assert len(pairs) == 3000 and pairs == CalcTask().make_demonstrations(3000, 0)
    right = whole = 0
    for before, written in pairs:
        problem, *turns = before.split("=", 1)[0], *before.split("=", 1)[1].split("=")[:-1]
        for turn in turns:
            text, says = turn.split(END)
            assert calculate(text) == says + "="
        assert set(written) <= set(task.symbols)
        if written.startswith("#"):
            whole += 1
            right += written == task.solve(problem)
    assert 0.25 < right / whole < 0.6  # spoiled on purpose


@pytest.mark.parametrize("first", ["?37*8", "37*", "?12-30"])
def test_a_framework_is_told_and_says_what_the_environment_does(first: str) -> None:
    """Its messages, written by the template, are the text of a session in the environment."""
    program = load_program(ROOT / "benchmarks" / "openai_agents.py")
    assert program.solved("37*8+45=") == CalcTask().solve("37*8+45")
    assert program.solved("37*8-45=") == CalcTask().solve("37*8-45")
    call = program.called(first)
    (made,) = call["tool_calls"]
    told = program.calculate(**made["function"]["arguments"])
    assert told == calculate(first)
    assert program.called("#341") == {"content": "#341"}
    messages = [
        {"role": "user", "content": "37*8+45="},
        {"role": "assistant", **call},
        {"role": "tool", "content": told},
    ]
    written = jinja2.Template(program.TEMPLATE).render(messages=messages)
    assert written == f"37*8+45={first}{END}{told}"
