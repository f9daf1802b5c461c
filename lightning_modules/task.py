"""The LightningModule: language-model training, validation and test.

Every predicted token has the same weight, in the loss, in the gradient and in the metrics: rows with fewer live labels
weigh less, and so do micro-batches in gradient accumulation and ranks. The model is built in `configure_model` and
sharded by the strategy; sums over ranks are the strategy's `reduce`, which on one device returns what it is given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerFast

from dsv41 import BackendConfig, DeepseekV41Config, DeepseekV41ForCausalLM, DeepseekV41TextConfig
from dsv41.config import IGNORE_INDEX
from dsv41.cost import watched_part
from dsv41.indexer import LearnedIndexer, learns_selection
from dsv41.model import TrainingReport
from dsv41.moe import imbalance, move_biases_
from dsv41.ops.cross_entropy import next_tokens
from dsv41.schedule import layer_plans
from lightning_modules import preflight
from lightning_modules.checkpoint import rule as checkpoint_rule
from lightning_modules.checkpoint.schema import TRAINING_KEYS, require_training, require_weights
from lightning_modules.checkpoint.sharded import plain_file
from lightning_modules.checkpoint.single_file import AtomicCheckpointIO
from lightning_modules.data import TextDataModule
from lightning_modules.data.tokenization import token_byte_lengths
from lightning_modules.optim.groups import OptimizerConfig, build_optimizer, group_settings
from lightning_modules.optim.schedule import ScheduleConfig, build_schedule
from lightning_modules.optim.state import parameters_by_name
from lightning_modules.training.checks import (
    require_finite_gradients,
    require_finite_loss,
    require_whole_accumulation,
    require_wide_parameters,
)
from lightning_modules.training.gradients import clip_by_norm_, clip_values_, gradient_norms, local_gradients, scale_
from lightning_modules.training.metrics import LanguageModelMetric
from lightning_modules.training.step import StepTotals
from lightning_modules.transfer.pretrained import load_pretrained

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class IndexerConfig:
    """How a learned indexer is trained; without effect where ``config.indexer`` is "frozen".

    Args:
        warmup_steps: First optimizer steps, in which attention sees all compressed positions and only the indexers are
            trained (DeepSeek-V3.2's dense warm-up): for weights whose attention has been trained already.
    """

    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"indexer.warmup_steps: must be at least 0, got {self.warmup_steps}")


class DeepseekV41Task(L.LightningModule):
    """Trains `DeepseekV41ForCausalLM` on rows of tokens.

    Args:
        config: Architecture, which is copied. Sizes left null (`vocab_size`, `engram_compressed_vocab_size`,
            `engram_num_embeddings`) follow from the tokenizer.
        backend: Implementation choices that do not change the function.
        optimizer: AdamW.
        schedule: Learning rate over steps.
        tokenizer: Tokenizer of the data; the command line takes it from the data module, so it is never typed twice,
            and gives it with `use_tokenizer` when all else has been checked.
        pretrained: Folder whose weights a run without a checkpoint starts from: the released layout or that of
            transformers, with its config.json, which also gives `config` where the command line sets this.
        indexer: Training of learned indexers.

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
        indexer: IndexerConfig = IndexerConfig(),
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
        if isinstance(indexer, dict):
            indexer = IndexerConfig(**indexer)
        if indexer.warmup_steps and not learns_selection(config):
            raise ValueError(
                f"indexer.warmup_steps: must be 0, got {indexer.warmup_steps}: there is no indexer to warm up, which "
                "takes config.indexer 'learned' and a layer in index_source_layer_ids"
            )
        self.text_config = copy.deepcopy(config)
        self.backend = backend
        self.optimizer_config = optimizer
        self.schedule_config = schedule
        self.indexer_config = indexer
        # Plain values, so that a checkpoint opens with weights_only=True.
        self.save_hyperparameters(
            {
                "config": self.text_config.fields(),
                "backend": asdict(backend),
                "optimizer": asdict(optimizer),
                "schedule": asdict(schedule),
                "pretrained": pretrained,
                "indexer": asdict(indexer),
            }
        )
        self.tokenizer: PreTrainedTokenizerFast | None = None
        self.pretrained = pretrained
        self._has_weights = pretrained is None
        self._validated_at: int | None = None
        self.model: DeepseekV41ForCausalLM | None = None
        self.metrics = LanguageModelMetric()
        self.tokens_seen = 0
        if tokenizer is not None:
            self.use_tokenizer(tokenizer)
        self._step: StepTotals | None = None
        self._load: Tensor | None = None

    # ------------------------------------------------------------------ construction

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Take the tokenizer of the data, before the model is built.

        Raises:
            RuntimeError: The model exists already.
        """
        if self.model is not None:
            raise RuntimeError("the model exists already, with sizes that follow from another tokenizer")
        self.tokenizer = tokenizer
        self.register_buffer("token_bytes", token_byte_lengths(tokenizer), persistent=False)

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
        if isinstance(self.trainer.strategy.checkpoint_io, AtomicCheckpointIO):
            self.trainer.strategy.checkpoint_io.of_trainer = True
        self.require_ready(self.trainer, getattr(self.trainer, "datamodule", None), stage)

    def require_ready(self, trainer: L.Trainer, data: L.LightningDataModule | None, stage: str) -> None:
        """Refuse what cannot work, without reading data; the command line asks before it does.

        Args:
            trainer: As it will run.
            data: Its options are looked at, where it has `sequence_length`, `batch_size` and `vocab_size`.
            stage: "fit", "validate", "test" or "predict".

        Raises:
            ValueError: Begins with the option.
            OSError: A folder cannot be written; likewise.
        """
        preflight.require_trainer(trainer)
        preflight.require_rows_fit(getattr(data, "sequence_length", None), self.text_config)
        preflight.require_batch_divides(getattr(data, "batch_size", None), trainer)
        preflight.require_writable(trainer)
        if stage == "fit":
            preflight.require_table_rule(self.backend, self.optimizer_config)
            preflight.require_schedule_length(self.schedule_config, trainer)
        if self.model is None:
            optimizer = self.optimizer_config if stage == "fit" else None
            preflight.require_buildable(self.text_config, trainer, getattr(data, "vocab_size", None), optimizer)

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
        """Check what has to be fp32, log every step of a run shorter than the logging interval, and let the command
        line's schedule rule.
        """
        require_wide_parameters(self.built)
        self._step = None  # a run that failed inside an accumulation may have left one
        require_whole_accumulation(self.trainer.accumulate_grad_batches, self.trainer.num_training_batches)
        schedules = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        checkpoint_rule.apply_schedules([schedule for schedule in schedules if isinstance(schedule, LambdaLR)])
        trainer: Any = self.trainer  # the attribute is real, but Trainer's annotations do not show it
        if trainer.estimated_stepping_batches < trainer.log_every_n_steps:
            trainer.log_every_n_steps = 1

    def configure_optimizers(self) -> Any:
        """The optimizer and its schedule, stepped once per optimizer step."""
        optimizer = build_optimizer(self, self.optimizer_config)
        schedule = build_schedule(optimizer, self.schedule_config, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "train/lr"}}

    # ------------------------------------------------------------------ training

    @property
    def warming_up(self) -> bool:
        """Whether the step under way trains the indexers alone."""
        return self.trainer.global_step < self.indexer_config.warmup_steps

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Tell learned indexers whether they are warming up."""
        if self.indexer_config.warmup_steps:
            self._warm_up(self.warming_up)

    def on_train_end(self) -> None:
        """Leave the model as others expect it."""
        self._warm_up(False)

    def _warm_up(self, on: bool) -> None:
        for module in self.built.modules():
            if isinstance(module, LearnedIndexer):
                module.warming_up = on

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor, TrainingReport]:
        """Summed cross-entropy in nats and the number of predicted tokens, both scalars; and the model's report."""
        report = self.built(batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).report
        assert report is not None
        assert report.nats is not None  # labels were given
        assert report.tokens is not None
        return report.nats, report.tokens, report

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss whose gradients, added up over the micro-batches of a step, `configure_gradient_clipping` can turn into
        the gradient of the mean over all predicted tokens of the step.

        The number of tokens in later micro-batches is not known yet, so each summed loss is divided by that of the
        first one; and multiplied by the number of micro-batches, because Lightning divides by it. Gradients are
        averaged over ranks, so it is divided by the tokens per rank.
        """
        nats, tokens, report = self._forward(batch)
        loss = self._trained_loss(nats, report)
        require_finite_loss(loss, self.built, self.trainer.global_step + 1)
        step = self._step
        if step is None:
            reference = self._over_ranks(tokens.to(nats.dtype)) / self.trainer.world_size
            reference = torch.where(reference > 0, reference, 1.0)
        else:
            reference = step.reference
        totals = StepTotals.of(nats, tokens, batch["attention_mask"].sum(), report, reference)
        self._step = totals if step is None else step + totals
        return loss / reference * self.trainer.accumulate_grad_batches

    def _trained_loss(self, nats: Tensor, report: TrainingReport) -> Tensor:
        """Everything that has a gradient, summed over tokens: the language model's loss and those of the report."""
        if self.warming_up:
            assert report.indexer_loss is not None  # checked when the task was made
            return report.indexer_loss
        loss = nats
        if report.indexer_loss is not None:
            loss = loss + report.indexer_loss
        if report.balance_loss is not None:
            loss = loss + self.text_config.router_balance_loss_weight * report.balance_loss
        return loss

    def on_after_backward(self) -> None:
        """While indexers warm up, leave no gradient elsewhere."""
        if self.warming_up:
            for name, parameter in self.built.named_parameters():
                if watched_part(name) != "indexer":
                    # FSDP2 passes on zeros where there is no gradient, and zeros still decay and count as steps.
                    parameter.grad = None

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Step, then move the routers' selection biases against the load of the step."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        load, self._load = self._load, None
        rate = self.text_config.router_bias_update_rate
        if load is not None and rate > 0:
            for block, (text, image) in zip(self.built.model.layers, load, strict=True):
                move_biases_(block.ffn.gate.bias, text, rate)
                move_biases_(block.ffn.gate.bias_vl, image, rate)

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
        step = step.over_ranks(self._over_ranks)
        live = step.tokens.clamp_min(1)
        parameters = parameters_by_name(self, optimizer)
        gradients = local_gradients({name.removeprefix("model."): p for name, p in parameters.items()})
        if self.trainer.accumulate_grad_batches > 1:
            scale_(gradients, step.reference * self.trainer.world_size / live)
        norms = gradient_norms(gradients, step.nats.device, self._over_ranks)
        norm = norms.norm()
        require_finite_gradients(norm, gradients, self.trainer.global_step + 1)
        self._log_step(step)
        self.log("train/grad_norm", norm.float())
        for part in norms.squares:
            self.log(f"within/grad_norm/{part}", norms.norm((part,)).float())
        # Not `self.clip_gradients`: with bf16-mixed, Lightning refuses any fused optimizer, though it unscales nothing.
        if gradient_clip_val:
            if gradient_clip_algorithm == "value":
                clip_values_(gradients, gradient_clip_val)
            else:
                clip_by_norm_(gradients, norms, gradient_clip_val)

    def _log_step(self, step: StepTotals) -> None:
        """Count the tokens of a step of all ranks, keep its load for the biases, and log the parts of its loss."""
        self.tokens_seen += int(step.tokens)
        self._load = None if self.warming_up else step.load
        self.log("train/loss", (step.nats / step.tokens.clamp_min(1)).float(), prog_bar=True)
        self.log("train/tokens", float(self.tokens_seen))
        config = self.built.config.text_config
        live = step.live.clamp_min(1)
        if learns_selection(config):
            sources = sum(plan.selects for plan in layer_plans(config))
            self.log("train/indexer_loss", (step.indexer / live / sources).float())
        if config.router_balance_loss_weight > 0:
            self.log("train/balance_loss", (step.balance / live / config.num_hidden_layers).float())
        busiest = imbalance(step.load.sum(1))
        self.log("within/experts/imbalance", busiest.mean().float())
        self.log("within/experts/imbalance_worst", busiest.max().float())

    # ------------------------------------------------------------------ evaluation

    def _evaluate(self, batch: Batch) -> None:
        nats, tokens, _ = self._forward(batch)
        targets = next_tokens(batch["labels"])
        byte_count = self.token_bytes[targets.clamp_min(0)].masked_fill(targets == IGNORE_INDEX, 0).sum()
        self.metrics.update(nats, tokens, byte_count)

    def _log_metrics(self, stage: str) -> None:
        values = self.metrics.compute()
        data = getattr(self.trainer, "datamodule", None)
        if isinstance(data, TextDataModule):  # A tokenizer may lose text: what is reported is per byte of the text.
            values["bits_per_byte"] = values["bits_per_byte"] / data.text_bytes_per_token_byte(stage)
        for name, value in values.items():
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

    def _require_restorable(self, checkpoint: dict[str, Any]) -> None:
        """Raise ValueError if a checkpoint is of another function, or lacks what the trainer is about to restore; leave
        out what it is not.
        """
        trainer = self._trainer
        if trainer is None or trainer.ckpt_path is None:  # Lightning's load_from_checkpoint
            checkpoint_rule.require_same_function(checkpoint, self._architecture())
            return
        path = Path(trainer.ckpt_path)
        file, sharded = plain_file(path), "state_dict" not in checkpoint and path.is_dir()
        require_weights(file, checkpoint, checkpoint_rule.KEY, with_tensors=not sharded)
        checkpoint_rule.require_same_function(checkpoint, self._architecture())
        if trainer.state.fn != TrainerFn.FITTING:
            for key in TRAINING_KEYS:
                checkpoint.pop(key, None)
            return
        groups = None
        if getattr(self.configure_optimizers, "__func__", None) is DeepseekV41Task.configure_optimizers:
            optimizer = trainer.optimizers[0] if trainer.optimizers else build_optimizer(self, self.optimizer_config)
            groups = optimizer.param_groups
        data: Any = getattr(trainer, "datamodule", None)
        name = None if data is None else type(data).__qualname__
        require_training(file, checkpoint, trainer.fit_loop.state_dict(), groups, name, complete=not sharded)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse an incomplete checkpoint and one of another function; let the command line win elsewhere (see
        `checkpoint/schema.py` and `checkpoint/rule.py`).
        """
        self.configure_model()
        self._require_restorable(checkpoint)
        self.tokens_seen = checkpoint[checkpoint_rule.KEY]["tokens_seen"]
        stored = checkpoint.get("hyper_parameters", {})
        for line in checkpoint_rule.differences(stored, dict(self.hparams)):
            rank_zero_info(f"differs from the checkpoint, the command line counts: model.{line}")
        checkpoint_rule.follow_command_line(checkpoint, group_settings(self.optimizer_config))
