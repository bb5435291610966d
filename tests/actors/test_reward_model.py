"""Rewards by a sequence classifier: its process against transformers' own forward, one answer at a
time; and directories that cannot judge."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertTokenizer,
    BloomConfig,
    BloomForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from actors.rewards import judge_all
from actors.scorers.reward_model import TOKENS, RewardModelScorer, read_classifier_config
from asyncrl.config import load, rules
from asyncrl.config.scorers import RewardModelConfig as Settings
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.models.trainer import split_by_length
from asyncrl.tasks import get_task

SYMBOLS = "abcdefghij0123456789+= \n"
SPECIAL = ["<pad>", "<sep>", "<u>", "<a>"]
TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"


def tokenizer(**more: Any) -> PreTrainedTokenizerFast:
    vocabulary = {symbol: index for index, symbol in enumerate([*SPECIAL, *SYMBOLS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<sep>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.post_processor = processors.TemplateProcessing(
        single="$A", pair="$A:0 <sep>:0 $B:1 <sep>:1", special_tokens=[("<sep>", 1)]
    )
    made.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=made, **{"pad_token": "<pad>"} | more)


def saved(place: Path, kind: str = "bert", **more: Any) -> Path:
    """A tiny classifier: an encoder that reads pairs, or a decoder with a chat template."""
    torch.manual_seed(3)
    words = len(SPECIAL) + len(SYMBOLS)
    own: dict[str, Any] = {"num_labels": 1, "pad_token_id": 0} | more
    if kind == "qwen2":
        config = Qwen2Config(
            vocab_size=words, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, **own,
        )  # fmt: skip
        Qwen2ForSequenceClassification(config).save_pretrained(place)
        tokenizer(chat_template=TEMPLATE).save_pretrained(place)
        return place
    config = BertConfig(
        vocab_size=2 * words, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, **own,
    )  # fmt: skip
    made = BertForMaskedLM if kind == "writer" else BertForSequenceClassification
    made(config).save_pretrained(place)
    pieces = ["[PAD]", "[SEP]", "[CLS]", "[UNK]", *SYMBOLS, *(f"##{x}" for x in SYMBOLS.strip())]
    BertTokenizer(vocab={piece: at for at, piece in enumerate(pieces)}).save_pretrained(place)
    return place


TEXTS = ["2", "", "abcdefghij" * 3, "3", "12", "2", "abc", "0" * 40]


def alone(place: Path, kind: str) -> list[float]:
    """The logit of each answer by transformers alone: one row, no padding."""
    classes = {"bert": BertForSequenceClassification, "qwen2": Qwen2ForSequenceClassification}
    model = classes[kind].from_pretrained(place).eval()
    words = AutoTokenizer.from_pretrained(place)
    out = []
    for text in TEXTS:
        if kind == "qwen2":
            row = words(f"<u>1+1=<a>{text}", add_special_tokens=False, return_tensors="pt")
        else:
            row = words("1+1=", text, return_tensors="pt")
            assert not text or 1 in row["token_type_ids"][0].tolist()
        with torch.no_grad():
            out.append(float(model(**row).logits))
    assert len(set(out)) == len(set(TEXTS)), "answers that differ are told apart"
    return out


def test_a_batch_gets_what_each_answer_gets_alone(tmp_path: Path) -> None:
    """In a process of its own, answers of many lengths together."""
    place = saved(tmp_path / "rm", "qwen2")
    raw = {
        "model": {"path": "m"},
        "task": {"name": "sort"},
        "reward": {"model": {"path": str(place)}, "batch": 8},
    }
    config = load.build(raw)
    asked = [(Prompt(1, "1+1=", "2"), text, [1]) for text in TEXTS]
    asked += [(Prompt(2, "", "", [{"role": "user", "content": "ab"}]), "b" * 90, [1])]
    got = judge_all(config, get_task(config.task), asked)
    assert [x.reward for x in got[:-1]] == pytest.approx(alone(place, "qwen2"), abs=1e-5)
    assert not any(found.failed for found in got[:-1])
    assert "the reward model reads 64" in str(got[-1].failed), "too long: failed, and never cut"


def test_a_part_of_a_mixture_has_its_own_model(tmp_path: Path) -> None:
    """The other part keeps its own reward."""
    place = saved(tmp_path / "rm", "qwen2")
    liked = {"name": "sort", "label": "liked", "reward_model": {"path": str(place)}}
    raw = {"model": {"path": "m"}, "reward": {"deadline_s": 3600.0}}
    mixture = {"name": "mixture", "mixture": [liked, {"name": "dedup"}]}
    config = load.build(raw | {"task": mixture})
    assert not rules.check(config)
    asked = [(Prompt(1, "1+1=", "2", task="liked"), text, [1]) for text in TEXTS]
    asked.insert(1, (Prompt(7, "aab=", "ab", task="dedup"), "ab", [1]))
    got = [found.reward for found in judge_all(config, get_task(config.task), asked)]
    assert got.pop(1) == 1.0
    assert got == pytest.approx(alone(place, "qwen2"), abs=1e-5)
    twice = {"name": "mixture", "mixture": [liked | {"reward": "a.py:b"}]}
    problems = rules.check(load.build(raw | {"task": twice}))
    assert "task.mixture: liked: reward_model.path: the model is the only scorer" in problems[0]


def test_an_encoder_reads_pairs(tmp_path: Path) -> None:
    scorer = RewardModelScorer(Settings(path=str(saved(tmp_path / "rm"))))
    prompts = [Prompt(1, "1+1=", "2")] * len(TEXTS)
    assert scorer(prompts, TEXTS) == pytest.approx(alone(tmp_path / "rm", "bert"), abs=1e-5)


def test_directories_that_cannot_judge(tmp_path: Path) -> None:
    def why(place: Path) -> str:
        with pytest.raises(ConfigError) as error:
            RewardModelScorer(Settings(path=str(place)))
        start, reason = str(error.value).split(": ", 1)
        assert start == f"reward.model.path = {place}" and "\n" not in reason
        return reason

    none = tmp_path / "none"
    assert why(none) == (
        "not a model directory: its config.json: [Errno 2] No such file or directory: "
        f"'{none}/config.json'"
    )
    assert "is a BertForMaskedLM, not a sequence classifier" in why(saved(tmp_path / "w", "writer"))
    both = saved(tmp_path / "both", "writer")
    said = msgspec.json.decode((both / "config.json").read_bytes())
    for kinds, name in ((["A", "B"], "A, B"), ([], "model of no kind"), (None, "model of no kind")):
        (both / "config.json").write_bytes(msgspec.json.encode(said | {"architectures": kinds}))
        assert why(both) == (
            f"is a {name}, not a sequence classifier "
            "(...ForSequenceClassification); a generative judge goes to [reward.judge]"
        )
    one = "; a reward is one number, so one label"
    assert why(saved(tmp_path / "two", num_labels=2)) == f"has 2 labels{one}"
    unpadded = saved(tmp_path / "unpadded")
    tokenizer(pad_token=None).save_pretrained(unpadded)
    assert why(unpadded) == ("its tokenizer has no padding token; set one (pad_token) and save it")
    assert why(saved(tmp_path / "o", pad_token_id=1)) == (
        "its tokenizer pads with token 0, its config.json says 1; make them one"
    )
    headless = saved(tmp_path / "headless", "writer")
    said = msgspec.json.decode((headless / "config.json").read_bytes())
    said |= {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "L"}}
    (headless / "config.json").write_bytes(msgspec.json.encode(said))
    assert why(headless) == (
        "lacks bert.pooler.dense.bias and 3 more weights, which would be random; was it saved as a "
        "classifier?"
    )
    (saved(tmp_path / "torn") / "model.safetensors").write_bytes(b"x")
    assert re.fullmatch(r"cannot be loaded: SafetensorError: .+", why(tmp_path / "torn"))


@pytest.mark.parametrize(
    ("said", "labels"),
    [
        ({"num_labels": 1, "id2label": {"0": "a", "1": "b"}}, 1),
        ({"id2label": {"0": "a"}}, 1),
        ({"id2label": {str(n): "a" for n in range(5)}}, 5),
        ({"num_labels": None, "id2label": None}, 2),
    ],
)
def test_the_labels_of_a_classifier(tmp_path: Path, said: dict[str, Any], labels: int) -> None:
    config = {"architectures": ["A", "BForSequenceClassification"]} | said
    text = msgspec.json.encode(config | {"name": "größer"})
    (tmp_path / "config.json").write_bytes(text)
    settings = Settings(path=str(tmp_path))
    if labels == 1:
        assert read_classifier_config(settings) == config | {"name": "größer"}
    else:
        with pytest.raises(ConfigError, match=f": has {labels} labels; a reward"):
            read_classifier_config(settings)


def test_a_config_that_says_no_padding_takes_the_tokenizers(tmp_path: Path) -> None:
    place = saved(tmp_path / "rm", "qwen2", pad_token_id=None)
    scorer = RewardModelScorer(Settings(path=str(place), context=20))
    prompt = Prompt(1, "1+1=", "2")
    both = scorer([prompt, prompt], ["2", "0" * 9])
    assert both[0] == pytest.approx(scorer([prompt], ["2"])[0], abs=1e-6)
    assert scorer.context == 20 and scorer.model.config.pad_token_id == 0
    assert (scorer.tokenizer.padding_side, scorer.model.training) == ("right", False)
    with pytest.raises(ValueError) as error:
        scorer([prompt], ["0" * 15])
    assert str(error.value) == (
        "prompt and response have 21 tokens, the reward model reads 20 (reward.model.context)"
    )
    assert scorer([prompt], ["0" * 14]), "as many as it reads"
    with pytest.raises(ValueError, match="zip"):
        scorer([prompt, prompt], ["2"])


def test_a_chat_keeps_its_turns(tmp_path: Path) -> None:
    """By the template, or as a pair whose first text has a line for each turn."""
    turns = [{"role": "user", "content": "1+"}, {"role": "assistant", "content": "2="}]
    chat, plain = Prompt(1, "no", "", turns), Prompt(1, "1+\n2=", "")
    scorer = RewardModelScorer(Settings(path=str(saved(tmp_path / "d", "qwen2")), dtype="bfloat16"))
    read = scorer.tokenizer.decode(scorer.encode_pair(chat, "3")["input_ids"])
    assert read == "<u> 1 + <a> 2 = 3", "tokenizer.json names no decoder"
    assert next(scorer.model.parameters()).dtype == torch.bfloat16 and len(turns) == 2
    pairs = RewardModelScorer(Settings(path=str(saved(tmp_path / "e")), device="auto"))
    assert pairs.encode_pair(chat, "3") == pairs.encode_pair(plain, "3")
    ids = pairs.encode_pair(plain, "3")["input_ids"]
    assert pairs.context == 64 and ids == pairs.tokenizer("1+\n2=", "3")["input_ids"]


def test_a_model_without_a_limit_of_positions_reads_long_texts(tmp_path: Path) -> None:
    words = len(SPECIAL) + len(SYMBOLS)
    config = BloomConfig(
        vocab_size=words, hidden_size=8, n_layer=1, n_head=2, num_labels=1, pad_token_id=0
    )
    BloomForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer(chat_template=TEMPLATE).save_pretrained(tmp_path)
    scorer = RewardModelScorer(Settings(path=str(tmp_path)))
    assert len(scorer([Prompt(1, "1+1=", "2")], ["0" * 300])) == 1
    assert scorer.context == 1 << 20


def test_groups_hold_what_fits_with_their_padding() -> None:
    split = functools.partial(split_by_length, tokens=TOKENS, rows=math.inf)
    assert split([2048] * 5) == [[0, 1, 2, 3], [4]], "8192 tokens and no more"
    assert split([]) == []
    assert split([4000, 4000, 10, 5000]) == [[2, 0], [1], [3]]
