"""A reward model: a Hugging Face sequence classifier with one logit, the reward.

It runs in a reward process and takes lists of responses, sorted by length and padded together. A
pad token never changes a logit, because the model receives an attention mask.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.tree import RewardModelConfig as Settings
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.models import fetch
from asyncrl.models.tokenizer import load_transformers_tokenizer
from asyncrl.models.trainer import split_by_length

fetch.stay_offline()
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
TOKENS = 8192  # of one forward pass, with padding


def build_refusal(settings: Settings, reason: str) -> ConfigError:
    """Build the error for an unsuitable reward model."""
    return ConfigError(f"reward.model.path = {settings.path}: {reason}")


def read_classifier_config(settings: Settings) -> dict[str, Any]:
    """Read config.json of a classifier with one label. Raises ConfigError."""
    path = Path(settings.path) / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise build_refusal(settings, f"not a model directory: its config.json: {error}") from error
    kinds = config.get("architectures") or []
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise build_refusal(
            settings,
            f"is a {', '.join(kinds) or 'model of no kind'}, not a sequence classifier "
            "(...ForSequenceClassification); a generative judge goes to [reward.judge]",
        )
    labels = config.get("num_labels") or len(config.get("id2label") or {}) or 2
    if labels != 1:
        raise build_refusal(settings, f"has {labels} labels; a reward is one number, so one label")
    return dict(config)


class RewardModelScorer:
    """A reward function that takes lists. Raises ConfigError for unsuitable models."""

    batched = True

    def __init__(self, settings: Settings) -> None:
        from transformers import AutoModelForSequenceClassification
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()  # missing weights, its warning, are refused below
        torch.set_num_threads(settings.threads)
        read_classifier_config(settings)
        device = settings.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.tokenizer = load_transformers_tokenizer(settings.path)
            model, loading_info = AutoModelForSequenceClassification.from_pretrained(
                settings.path, dtype=getattr(torch, settings.dtype), output_loading_info=True
            )
        except Exception as error:  # safetensors, tokenizers and torch raise different types
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise build_refusal(settings, f"cannot be loaded: {reason}") from error
        if missing := sorted(loading_info["missing_keys"]):
            raise build_refusal(
                settings,
                f"lacks {missing[0]} and {len(missing) - 1} more weights, which would be random; "
                "was it saved as a classifier?",
            )
        self.model = model.to(device).eval()
        self._set_padding(settings)
        positions = getattr(model.config, "max_position_embeddings", None) or 1 << 20
        self.context = min(settings.context or positions, positions)

    def _set_padding(self, settings: Settings) -> None:
        """Set a padding token on which model and tokenizer agree.

        A decoder's classifier reads the last token that is not padding.
        """
        pad = self.tokenizer.pad_token_id
        if pad is None:
            raise build_refusal(
                settings, "its tokenizer has no padding token; set one (pad_token) and save it"
            )
        model_pad = self.model.config.pad_token_id
        if model_pad is None:
            self.model.config.pad_token_id = pad
        elif model_pad != pad:
            raise build_refusal(
                settings,
                f"its tokenizer pads with token {pad}, its config.json says {model_pad}; make them "
                "one",
            )
        self.tokenizer.padding_side = "right"

    def encode_pair(self, prompt: Prompt, text: str) -> dict[str, list[int]]:
        """Encode prompt and response, through the chat template or else as a pair.

        Raises ValueError for too many tokens.
        """
        if self.tokenizer.chat_template:
            rendered = self.tokenizer.apply_chat_template(
                prompt.join_answer(text), tokenize=False, **prompt.template_arguments
            )
            encoding = self.tokenizer(rendered, add_special_tokens=False)
        else:
            contents = (turn.get("content") or "" for turn in prompt.messages)
            question = "\n".join(contents) or prompt.text
            encoding = self.tokenizer(question, text)
        length = len(encoding["input_ids"])
        if length > self.context:
            raise ValueError(
                f"prompt and response have {length} tokens, the reward model reads {self.context} "
                "(reward.model.context)"
            )
        return dict(encoding)

    @torch.no_grad()
    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[float]:
        """Return the logits, in the order of the responses."""
        encodings = [
            self.encode_pair(prompt, text) for prompt, text in zip(prompts, texts, strict=True)
        ]
        rewards = [0.0] * len(encodings)
        lengths = [len(encoding["input_ids"]) for encoding in encodings]
        for group in split_by_length(lengths, TOKENS, math.inf):
            padded = self.tokenizer.pad([encodings[index] for index in group], return_tensors="pt")
            logits = self.model(**padded.to(self.model.device)).logits
            for index, logit in zip(group, logits[:, 0].float().tolist(), strict=True):
                rewards[index] = logit
        return rewards
