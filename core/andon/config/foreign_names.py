"""Names of settings in the HF Trainer, TRL and Axolotl, and what to set here instead."""

from __future__ import annotations

from collections.abc import Mapping

_BATCH = "training.batch_size is the rows of one update over all workers"
_BY_ANSWER = {
    "optimizer.lr": "learning_rate",
    "optimizer.name": "optim optimizer",
    "optimizer.clip_norm": "max_grad_norm gradient_clipping",
    "optimizer.betas": "adam_beta1 adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "schedule.type": "lr_scheduler lr_scheduler_type",
    "schedule.warmup_fraction": "warmup_ratio",
    "training.epochs": "num_train_epochs num_epochs",
    "training.evaluate_every": "eval_steps",
    "training.checkpoint_every": "save_steps",
    "training.keep_checkpoints": "save_total_limit",
    "training.packing": "sample_packing",
    "training.activation_checkpointing": "gradient_checkpointing",
    "training.compile": "torch_compile",
    "training.eval_rows": "max_eval_samples",
    "run.log_every": "logging_steps",
    "run.dir": "output_dir",
    "run.resume": "resume_from_checkpoint",
    "run.report_to": "use_wandb wandb_project",
    "model.base": "model_name_or_path model_name base_model",
    "model.revision": "model_revision",
    "model.max_length": "max_seq_length max_seq_len sequence_len cutoff_len",
    "model.dtype": "torch_dtype",
    "adapter.kind": "use_peft",
    "adapter.r": "lora_r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.targets": "target_modules lora_target lora_target_modules lora_target_linear",
    "data.train": "train_file datasets dataset dataset_name",
    "data.eval": "validation_file eval_dataset test_datasets",
    "data.text_column": "dataset_text_field",
    "data.validation_fraction": "val_set_size",
    "data.limit": "max_samples max_train_samples",
    "data.train_on": "train_on_inputs assistant_only_loss completion_only_loss",
    "data.cache": "dataset_prepared_path",
    f"{_BATCH}; training.micro_batches splits it": "per_device_train_batch_size train_batch_size micro_batch_size",
    f"{_BATCH}, summed over training.micro_batches": "gradient_accumulation_steps",
    "evaluation batches follow from training.micro_batches": "per_device_eval_batch_size eval_batch_size",
    "quantized weights are not supported; model.dtype=bfloat16 halves frozen ones": "load_in_4bit load_in_8bit",
    "model.dtype=bfloat16 is for the frozen weights; weights that train are float32": "bf16 fp16",
    "not supported: every worker holds the whole model": "deepspeed fsdp fsdp_config",
    "set training.evaluate_every; every epoch ends with an evaluation too": "eval_strategy evaluation_strategy",
    "set training.checkpoint_every; every epoch ends with a checkpoint too": "save_strategy saves_per_epoch",
    "set training.keep; best is the lowest validation loss": "load_best_model_at_end metric_for_best_model",
    "attention needs no setting: torch chooses the kernel": "flash_attention flash_attn attn_implementation",
    "nothing is uploaded; `andon export` writes a folder that you can upload": "push_to_hub hub_model_id",
    "the tokenizer's own chat template is used; to change it, edit the model's folder": "chat_template",
    "not supported": "neftune_noise_alpha use_dora use_rslora lora_use_rslora modules_to_save lora_modules_to_save",
}

FOREIGN_NAMES: Mapping[str, str] = {name: said for said, names in _BY_ANSWER.items() for name in names.split()}
"""By name: a key of the configuration, or a sentence if no key means the same."""
