"""How a vLLM server takes weights: its transfer engine `asyncrl`, which reads a file.

A server loads this module by `--worker-extension-cls actors.vllm_transfer.FileTransferExtension`
and then knows `--weight-transfer-config '{"backend": "asyncrl"}'`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from actors.engine_vllm import SeedExtension, repack

BACKEND = "asyncrl"


@dataclass
class WeightsFile(WeightTransferUpdateInfo):  # type: ignore[misc]
    """path: a safetensors file with transformers' names, which every worker can read."""

    path: str


class FileTransfer(WeightTransferEngine):  # type: ignore[misc]
    """See vLLM's base class."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = WeightsFile

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """A file needs no connection."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own waits for an accelerator afterwards, which a CPU does not have
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: WeightsFile) -> None:
        model: Any = self.model
        with safe_open(update_info.path, "pt") as weights:
            names = list(weights.keys())
            model.load_weights((name, weights.get_tensor(name)) for name in names)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        repack(self.model)

    def shutdown(self) -> None:
        """Nothing is held between two updates."""


class FileTransferExtension(SeedExtension):
    """The extension of vLLM's worker, which has to import this module."""


WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
