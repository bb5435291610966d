"""The vision side of a LLaVA: blobs to pixel tensors, and to the features of its vision tower."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from asyncrl.contract.blobs.images import ImageShape
from asyncrl.contract.errors import ConfigError
from asyncrl.models import pictures
from asyncrl.models.image_tokens import FAMILY, read_shape

KEPT_IMAGES = 512  # images whose pixel tensors are cached
NEVER_SAMPLED = -1e30  # the logit of the image token
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(eq=False)
class ImageEncoder:
    """Image processor and vision tower of the LLaVA `hf`, whose directory is `path`.

    Each distinct image is encoded once for all the rows of a forward pass.
    """

    hf: Any
    path: str
    shape: ImageShape

    @classmethod
    def from_model(cls, hf: Any, path: str) -> ImageEncoder | None:
        """Return the encoder of a model; None: it reads only text."""
        if hf.config.model_type != FAMILY:
            return None
        shape = read_shape(path)
        if shape is None:  # built in memory: there is no directory yet
            shape = ImageShape(hf.config.image_token_id, hf.config.image_seq_length)
        return cls(hf, path, shape)

    @cached_property
    def processor(self) -> Any:
        """The image processor. Raises ConfigError where the directory has none."""
        import transformers

        try:
            return transformers.AutoImageProcessor.from_pretrained(self.path, backend="pil")
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise ConfigError(
                f"model.path: the image processor in {self.path} cannot be loaded "
                f"({' or '.join(PROCESSOR_FILES)}): {str(error).splitlines()[0]}"
            ) from error

    @cached_property
    def load_pixels(self) -> Callable[[bytes], Tensor]:
        """Return the pixels of a blob as the model reads them, [3, H, W]."""
        processor = self.processor
        return lru_cache(KEPT_IMAGES)(
            lambda blob: processor(pictures.as_pil(blob), return_tensors="pt")["pixel_values"][0]
        )

    def compute_features(self, blobs: Mapping[str, bytes], *, single: bool) -> dict[str, Tensor]:
        """Return digest -> features [length, hidden] of images, differentiable.

        single: encode each image by itself, so that its features do not depend on the others.
        Raises ConfigError where the vision tower gives another number of features.
        """
        if not blobs:
            return {}
        pixels = [self.load_pixels(blob) for blob in blobs.values()]
        encoded: list[Tensor] = []
        for group in [[image] for image in pixels] if single else [pixels]:
            stacked = torch.stack(group).to(self.hf.device, self.hf.dtype)
            features = self.hf.get_image_features(pixel_values=stacked, return_dict=True)
            encoded += features.pooler_output
        for image in encoded:
            if len(image) != self.shape.length:
                raise ConfigError(
                    f"model.path: the vision tower in {self.path} makes {len(image)} features of "
                    f"an image, and image_seq_length in its config.json is {self.shape.length}"
                )
        return dict(zip(blobs, encoded, strict=True))

    @staticmethod
    def build_inputs(names: Iterable[str], features: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the arguments of a forward pass whose image tokens are `names`, in row order."""
        encoded = [features[name] for name in names]
        if not encoded:
            return {}
        return {"mm_encoder_outputs": {"image": SimpleNamespace(pooler_output=encoded)}}

    def exclude_image_token(self, logits: Tensor) -> Tensor:
        """Exclude the image token from sampling: only a prompt may hold one.

        logits: fp32 [..., V].
        """
        token = torch.tensor([self.shape.token], device=logits.device)
        return logits.index_fill(-1, token, NEVER_SAMPLED)
