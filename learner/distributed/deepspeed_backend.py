"""DeepSpeed ZeRO 0 to 3 over one or several ranks, with gloo on a CPU and nccl on GPUs.

DeepSpeed averages the ranks' gradients, so each loss is multiplied by the number of ranks.
Rajbhandari et al. 2020, arXiv 1910.02054.
"""

import contextlib
import datetime
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.config.tree import Config
from asyncrl.contract.errors import DamagedDataError
from asyncrl.models.policy import PolicyModel, list_published, recompute_modules
from asyncrl.models.trainer import build_optimizer
from learner.distributed.ranks import DistributedBackend


class DeepSpeedBackend(DistributedBackend):
    """The backend of DeepSpeed's engine; see `TorchBackend`."""

    def __init__(self, config: Config, model: PolicyModel) -> None:
        os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
        super().__init__(config, model)
        import deepspeed

        learner = config.learner
        self.sharded = learner.zero_stage == 3
        if self.sharded:
            # modules fetch their parameters by hooks, and reduce a gradient once a pass
            model.fast = None
            model.one_pass = True
        settings: dict[str, Any] = {
            "train_batch_size": self.ranks,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": learner.clip_norm,
            "zero_optimization": {
                "stage": learner.zero_stage,
                "stage3_param_persistence_threshold": 0,
                "overlap_comm": False,
                "contiguous_gradients": False,
            }
            | (
                {"offload_optimizer": {"device": "cpu", "pin_memory": self.device.type == "cuda"}}
                if learner.offload
                else {}
            ),
            # adapters are float32 beside any base
            "bf16": {
                "enabled": config.model.dtype == "bfloat16" and model.adapter is None,
                "check_grad_overflow": True,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "wall_clock_breakdown": False,
            "steps_per_print": 10**9,
        }
        self.parameters = [p for p in model.hf.parameters() if p.requires_grad]
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            # with adapters it gets only these: type and device of the base stay as they are, and
            # its weights stay out of checkpoints
            model=model.hf if model.adapter is None else torch.nn.ParameterList(self.parameters),
            optimizer=build_optimizer(learner, self.parameters),
            config=settings,
        )
        self.gathered = deepspeed.zero.GatheredParameters
        self.engine.eval()  # turns dropout off, before gradient checkpointing of the modules
        if learner.gradient_checkpointing and model.one_pass:
            recompute_modules(model.hf)

    def connect(self, transport: str, timeout: datetime.timedelta) -> None:
        import deepspeed
        from deepspeed.utils import logger

        logger.setLevel("WARNING")
        # an inference-only operator, whose compiler takes a lock file: a killed process leaves the
        # file behind, and all later processes would wait for it forever
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(
            dist_backend=transport, timeout=timeout, auto_mpi_discovery=False, verbose=False
        )

    # ---- one optimizer step ----------------------------------------------------------------------

    def accumulate(self, loss: torch.Tensor, *, is_last: bool = True) -> None:
        if self.config.learner.zero_stage:
            # done by engine.forward too: without it stage 3 overwrites instead of accumulating
            self.engine.optimizer.clear_backward_seen_flag()
        self.engine.set_gradient_accumulation_boundary(is_last)
        with self.guard():
            self.engine.backward(loss * self.ranks)

    def apply(self, rate: float, loss: torch.Tensor | None = None) -> float:
        is_finite = loss is None or math.isfinite(float(loss))
        flag = self.sum_over_ranks(torch.tensor([0.0 if is_finite else 1.0]))
        for group in self.optimizer.param_groups:
            group["lr"] = rate if not flag.item() else 0.0
        norm = None
        # at stage 0 gradients are whole and summed on every rank, and no norm is reported
        if self.config.learner.zero_stage == 0:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
        if flag.item() or not math.isfinite(norm or 0.0):
            self.drop_gradient()
            return math.nan
        with self.guard():
            self.engine.step()
        if norm is None:
            norm = self.engine.get_global_grad_norm()
        return math.nan if norm is None else float(norm)

    def drop_gradient(self) -> None:
        super().drop_gradient()
        for name in ("averaged_gradients", "_DeepSpeedZeroOptimizer_Stage3__param_reduce_events"):
            cache = getattr(self.optimizer, name, None)
            if isinstance(cache, dict):
                cache.clear()
        # the next pass starts over in CPU memory instead of adding
        if self.config.learner.offload and self.config.learner.zero_stage < 3:
            inner: Any = self.optimizer
            inner.micro_step_id = -1
            inner._offload_accumulated_param_ids = set()
            inner.reset_cpu_buffers()

    # ---- weights and state -----------------------------------------------------------------------

    def release_gathered(self) -> None:
        # after the passes of a step, ZeRO-3 keeps for its backward pass what a forward has gathered
        if self.sharded:
            self.optimizer.empty_partition_cache()

    @contextmanager
    def gather_full_parameters(self) -> Iterator[None]:
        with (
            self.guard(),
            self.gathered(list(self.model.hf.parameters()), modifier_rank=0, enabled=self.sharded),
        ):
            # using the weights takes time that must not count against the deadline
            guarded_since = self.guarded_since
            self.guarded_since = 0.0
            yield
            self.guarded_since = time.monotonic() if guarded_since else 0.0

    def list_parts(self) -> list[torch.Tensor]:
        parts: list[Any] = self.parameters
        return [p.ds_tensor.detach() if self.sharded else p.detach() for p in parts]

    @property
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield one parameter at a time: no second full copy, also under ZeRO-3."""
        self.release_gathered()
        # partitioned parameters are gathered by identity, not by content
        for name, parameter in list_published(self.model):
            with self.guard(), self.gathered([parameter], modifier_rank=None, enabled=self.sharded):
                yield name, parameter.detach()

    def probe(self) -> bytes:
        with self.guard():  # under ZeRO-3 a forward pass of every rank
            return super().probe() if self.rank == 0 or self.sharded else b""

    def save(self, directory: Path) -> dict[str, Any]:
        with self.guard():
            self.engine.save_checkpoint(
                str(directory / "deepspeed"),
                tag="state",
                save_latest=False,
                client_state={"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}},
            )
            # every rank's part is on disk before rank 0 writes the manifest
            dist.barrier()
        return {"deepspeed": self.ranks, "zero_stage": self.config.learner.zero_stage}

    def load(self, state: dict[str, Any], directory: Path) -> None:
        stage = self.config.learner.zero_stage
        if state["zero_stage"] != stage:
            raise DamagedDataError(
                f"checkpoint {directory} is of {state['deepspeed']} ranks at ZeRO stage "
                f"{state['zero_stage']}, this learner's is {stage}: "
                "resume with the same learner.zero_stage (the number of ranks may change)"
            )
        saved = directory / "deepspeed"
        # at stage 0 every rank holds the whole state
        if state["deepspeed"] == self.ranks or stage == 0:
            with self.guard():
                self.engine.load_checkpoint(str(saved), tag="state", load_module_strict=True)
            return
        if self.config.learner.optimizer != "adamw":
            raise DamagedDataError(
                f"checkpoint {directory} is of {state['deepspeed']} ranks, this learner has "
                f"{self.ranks}: only the state of learner.optimizer = "
                "adamw can be redistributed; resume with the same learner.ranks"
            )
        universal_dir = directory.with_name(
            f".{directory.name}.universal"
        )  # the same on every rank
        try:
            if self.rank == 0:  # each parameter's state is whole, for any number of ranks
                from deepspeed.checkpoint import ds_to_universal

                shutil.rmtree(universal_dir, ignore_errors=True)
                with contextlib.redirect_stdout(sys.stderr):
                    ds_to_universal.main(
                        SimpleNamespace(
                            input_folder=str(saved / "state"),
                            output_folder=str(universal_dir / "state"),
                            num_extract_workers=1,
                            num_merge_workers=1,
                            keep_temp_folder=False,
                            strict=True,
                            inject_missing_state=False,
                        )
                    )
            with self.guard():
                dist.barrier()
                self.engine._config.load_universal_checkpoint = True
                self.engine.load_checkpoint(
                    str(universal_dir), tag="state", load_module_strict=True
                )
                dist.barrier()
        finally:
            self.engine._config.load_universal_checkpoint = False
            if self.rank == 0:
                shutil.rmtree(universal_dir, ignore_errors=True)
