"""The LightningModule: language-model training, validation and test.

Every predicted token has the same weight, in the loss, in the gradient and in the metrics: rows with fewer live labels
weigh less, and so do micro-batches in gradient accumulation and ranks. The model is built in `configure_model` and
sharded by the strategy; sums over ranks are the strategy's `reduce`, which on one device returns what it is given.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from dsv41 import BackendConfig, DeepseekV41Config, DeepseekV41ForCausalLM, DeepseekV41TextConfig
from dsv41.config import IGNORE_INDEX
from lightning_modules import checkpoint_rule
from lightning_modules.data.token_bytes import token_byte_lengths
from lightning_modules.finite import require_finite_gradients, require_finite_loss
from lightning_modules.metrics import LanguageModelMetric
from lightning_modules.optim import (
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    build_schedule,
    gradient_norm,
    group_settings,
    scale_gradients_,
)
from lightning_modules.pretrained import load_pretrained
from lightning_modules.strategy import EngramFSDPStrategy

Batch = dict[str, Tensor]

PRECISIONS = ("32-true", "64-true", "bf16-mixed")


@dataclass(frozen=True)
class StepTotals:
    """Sums over the micro-batches of an optimizer step so far: scalars.

    Attributes:
        nats: Summed cross-entropy of this rank.
        tokens: Predicted tokens of this rank.
        reference: Predicted tokens per rank in the first micro-batch (1 if there are none): what the loss of every
            micro-batch is divided by. The same on all ranks.
    """

    nats: Tensor
    tokens: Tensor
    reference: Tensor


class DeepseekV41Task(L.LightningModule):
    """Trains `DeepseekV41ForCausalLM` on rows of tokens.

    Args:
        config: Architecture. Sizes left null (`vocab_size`, `engram_compressed_vocab_size`, `engram_num_embeddings`)
            follow from the tokenizer.
        backend: Implementation choices that do not change the function.
        optimizer: AdamW.
        schedule: Learning rate over steps.
        tokenizer: Tokenizer of the data; the command line links it from the data module, so it is never typed twice.
        pretrained: Folder whose weights a run without a checkpoint starts from: the released layout or that of
            transformers, with its config.json, which also gives `config` where the command line sets this.

    Attributes:
        model: The model; None until `configure_model`.
    """

    # ThroughputMonitor reads this; None means that FLOPs are not estimated.
    flops_per_batch: int | None = None

    token_bytes: Tensor

    def __init__(
        self,
        config: DeepseekV41TextConfig,
        backend: BackendConfig = BackendConfig(),  # noqa: B008 - frozen
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008 - frozen
        schedule: ScheduleConfig = ScheduleConfig(),  # noqa: B008 - frozen
        tokenizer: PreTrainedTokenizerFast | None = None,
        pretrained: str | None = None,
    ) -> None:
        super().__init__()
        # load_from_checkpoint gives back the plain values that are saved below.
        if isinstance(config, dict):
            config = DeepseekV41TextConfig(**config)
        if isinstance(backend, dict):
            backend = BackendConfig(**backend)
        if isinstance(optimizer, dict):
            optimizer = OptimizerConfig(**optimizer)
        if isinstance(schedule, dict):
            schedule = ScheduleConfig(**schedule)
        self.text_config = config
        self.backend = backend
        self.optimizer_config = optimizer
        self.schedule_config = schedule
        # Plain values, so that a checkpoint opens with weights_only=True.
        self.save_hyperparameters(
            {
                "config": config.fields(),
                "backend": asdict(backend),
                "optimizer": asdict(optimizer),
                "schedule": asdict(schedule),
                "pretrained": pretrained,
            }
        )
        self.tokenizer = tokenizer
        self.pretrained = pretrained
        self._has_weights = pretrained is None
        self._validated_at: int | None = None
        self.model: DeepseekV41ForCausalLM | None = None
        self.metrics = LanguageModelMetric()
        self.tokens_seen = 0
        if tokenizer is not None:
            self.register_buffer("token_bytes", token_byte_lengths(tokenizer), persistent=False)
        self._step: StepTotals | None = None

    # ------------------------------------------------------------------ construction

    def configure_model(self) -> None:
        """Build the model; Lightning calls this before each of fit, validate, test and predict."""
        if self.model is None:
            self.model = DeepseekV41ForCausalLM(
                DeepseekV41Config(text_config=self.text_config), backend=self.backend, tokenizer=self.tokenizer
            )

    @property
    def built(self) -> DeepseekV41ForCausalLM:
        """The model; RuntimeError before `configure_model`."""
        if self.model is None:
            raise RuntimeError("the model does not exist yet: call configure_model() or let a Trainer do it")
        return self.model

    def setup(self, stage: str) -> None:
        """Refuse what cannot work: precision, devices, rows longer than the model takes. Nothing is built yet."""
        if self.trainer.precision not in PRECISIONS:
            raise ValueError(
                f"trainer.precision: must be one of {PRECISIONS}, got {self.trainer.precision!r}; the others would "
                "also cast what has to stay fp32 (mixing coefficients, router biases), or need a loss scaler"
            )
        if self.trainer.world_size > 1 and not isinstance(self.trainer.strategy, EngramFSDPStrategy):
            raise ValueError(
                f"trainer.strategy: {self.trainer.world_size} devices need engram_fsdp (see configs/strategy), got "
                f"{type(self.trainer.strategy).__name__}"
            )
        if stage == "fit" and self.backend.sparse_table_gradient:
            raise ValueError(
                "model.backend.sparse_table_gradient: must be false, since AdamW takes dense gradients only"
            )
        if self.trainer.strategy.root_device.type == "mps":
            raise ValueError("trainer.accelerator: mps has neither float8 nor float64; use cpu")
        length = getattr(getattr(self.trainer, "datamodule", None), "sequence_length", None)
        if length is not None and length > self.text_config.max_position_embeddings:
            raise ValueError(
                f"data.sequence_length: {length} exceeds model.config.max_position_embeddings="
                f"{self.text_config.max_position_embeddings}"
            )

    def _start_from_pretrained(self) -> None:
        """Read `pretrained`, once, unless a checkpoint holds newer weights. The model exists, whole or sharded."""
        if not self._has_weights and self.trainer.ckpt_path is None:
            assert self.pretrained is not None
            load_pretrained(self.built, self.pretrained, self.tokenizer)
        self._has_weights = True

    def on_fit_start(self) -> None:
        """Start from `pretrained` weights."""
        self._start_from_pretrained()

    def on_validation_start(self) -> None:
        """Like `on_fit_start`, where validation alone is asked for."""
        self._start_from_pretrained()

    def on_test_start(self) -> None:
        """Like `on_fit_start`."""
        self._start_from_pretrained()

    def on_predict_start(self) -> None:
        """Like `on_fit_start`."""
        self._start_from_pretrained()

    def on_train_start(self) -> None:
        """Log every step of a run that is shorter than the logging interval; let the command line's schedule rule."""
        self._step = None  # a run that failed inside an accumulation may have left one
        checkpoint_rule.apply_schedules([config.scheduler for config in self.trainer.lr_scheduler_configs])  # type: ignore[misc]
        trainer: Any = self.trainer  # the attribute is real, but Trainer's annotations do not show it
        if trainer.estimated_stepping_batches < trainer.log_every_n_steps:
            trainer.log_every_n_steps = 1

    def configure_optimizers(self) -> Any:
        """AdamW and the schedule, stepped once per optimizer step."""
        optimizer = build_optimizer(self, self.optimizer_config)
        schedule = build_schedule(optimizer, self.schedule_config, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # ------------------------------------------------------------------ training

    def _summed_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy in nats and the number of predicted tokens, both scalars."""
        out = self.built(batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
        tokens = (batch["labels"][:, 1:] != IGNORE_INDEX).sum()
        return out.loss * tokens, tokens

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss whose gradients, added up over the micro-batches of a step, `configure_gradient_clipping` can turn into
        the gradient of the mean over all predicted tokens of the step.

        The number of tokens in later micro-batches is not known yet, so each summed loss is divided by that of the
        first one; and multiplied by the number of micro-batches, because Lightning divides by it. Gradients are
        averaged over ranks, so it is divided by the tokens per rank.
        """
        nats, tokens = self._summed_loss(batch)
        require_finite_loss(nats, self.built, self.trainer.global_step + 1)
        step = self._step
        if step is None:
            reference = self._over_ranks(tokens.to(nats.dtype)) / self.trainer.world_size
            step = StepTotals(nats.detach(), tokens, torch.where(reference > 0, reference, 1.0))
        else:
            step = StepTotals(step.nats + nats.detach(), step.tokens + tokens, step.reference)
        self._step = step
        return nats / step.reference * self.trainer.accumulate_grad_batches

    def _over_ranks(self, values: Tensor) -> Tensor:
        """Sum over ranks; `values` may be overwritten."""
        total = self.trainer.strategy.reduce(values, reduce_op="sum")
        assert isinstance(total, Tensor)
        return total

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Finish the gradient of the step, check it, log it, clip it."""
        step, self._step = self._step, None
        assert step is not None  # training_step has run
        nats, tokens = self._over_ranks(torch.stack((step.nats.double(), step.tokens.double()))).unbind()
        live = tokens.clamp_min(1)
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.trainer.accumulate_grad_batches > 1:
            factor = step.reference * self.trainer.world_size / live
            scale_gradients_(gradients, factor.to(step.reference.dtype))
        norm = gradient_norm(gradients)
        require_finite_gradients(norm, self.built, self.trainer.global_step + 1)
        self.tokens_seen += int(tokens)
        self.log("train/loss", (nats / live).float(), prog_bar=True)
        self.log("train/grad_norm", norm)
        self.log("train/tokens", float(self.tokens_seen))
        # Not `self.clip_gradients`: with bf16-mixed, Lightning refuses any fused optimizer, though it unscales nothing.
        if gradient_clip_val:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            if gradient_clip_algorithm == "value":
                torch.nn.utils.clip_grad_value_(parameters, gradient_clip_val)
            else:
                torch.nn.utils.clip_grads_with_norm_(parameters, gradient_clip_val, norm)

    # ------------------------------------------------------------------ evaluation

    def _evaluate(self, batch: Batch) -> None:
        nats, tokens = self._summed_loss(batch)
        targets = batch["labels"][:, 1:]
        byte_count = self.token_bytes[targets.clamp_min(0)].masked_fill(targets == IGNORE_INDEX, 0).sum()
        self.metrics.update(nats, tokens, byte_count)

    def _log_metrics(self, stage: str) -> None:
        for name, value in self.metrics.compute().items():
            # The metric has added up over ranks, so all have the same number; the maximum keeps it as it is.
            self.log(f"{stage}/{name}", value, prog_bar=name == "loss", sync_dist=True, reduce_fx="max")
        self.metrics.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to the validation metrics."""
        self._evaluate(batch)

    def on_validation_epoch_end(self) -> None:
        """Log `val/loss` (nats per token), `val/perplexity`, `val/bits_per_byte`."""
        self._log_metrics("val")
        self._validated_at = self.trainer.global_step

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to the test metrics."""
        self._evaluate(batch)

    def on_test_epoch_end(self) -> None:
        """Log `test/loss`, `test/perplexity`, `test/bits_per_byte`."""
        self._log_metrics("test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Batch:
        """The most likely next token at every position.

        Returns:
            `row_id` [B], `next_token` int64 [B, S] and its `log_probability` [B, S].
        """
        logits = self.built(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        best = logits.log_softmax(-1).max(-1)
        return {"row_id": batch["row_id"], "next_token": best.indices, "log_probability": best.values}

    # ------------------------------------------------------------------ checkpoints

    def _architecture(self) -> dict[str, Any]:
        return checkpoint_rule.architecture(self.built.config.text_config, self.built.map_fingerprint)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record the architecture, the tokens seen, and what the last validation found."""
        metrics = {
            name: float(value) for name, value in self.trainer.callback_metrics.items() if name.startswith("val/")
        }
        checkpoint[checkpoint_rule.KEY] = self._architecture() | {
            "tokens_seen": self.tokens_seen,
            "metrics": metrics,
            "validated_at": self._validated_at,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another function; let the command line win elsewhere (see `checkpoint_rule`)."""
        self.configure_model()
        checkpoint_rule.require_same_function(checkpoint, self._architecture())
        self.tokens_seen = checkpoint[checkpoint_rule.KEY]["tokens_seen"]
        stored = checkpoint.get("hyper_parameters", {})
        for line in checkpoint_rule.differences(stored, dict(self.hparams)):
            rank_zero_info(f"differs from the checkpoint, the command line counts: model.{line}")
        checkpoint_rule.follow_command_line(checkpoint, group_settings(self.optimizer_config))
