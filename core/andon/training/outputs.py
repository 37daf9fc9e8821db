"""The files of a run folder that are not appended to: what it started from, and what it came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from andon.config.identity import config_digest
from andon.config.load import to_yaml
from andon.config.schema import Config
from andon.metrics.scores import Scores
from andon.model.adapter import export_adapter, save_base
from andon.problems import InputError, Problem
from andon.run.atomic import whole_folder, write_json, write_whole
from andon.run.folder import RunFolder
from andon.run.provenance import fingerprint, write_provenance
from andon.run.summary import Head, Summary, write_summary
from andon.training.material import Material
from andon_contracts.fields import Real
from andon_contracts.policy import evaluations


@dataclass(frozen=True)
class Result:
    """What a run came to, beyond its scores."""

    reason: str
    steps: int
    best_step: int
    last_loss: float
    world_size: int
    backend: str
    weights_digest: str
    initial_weights_digest: str
    ledger_head: tuple[int, str]
    wall_s: float
    violations: int = 0
    memory: Mapping[str, int] = field(default_factory=dict)


def write_start(
    folder: RunFolder, config: Config, environment: Mapping[str, object], material: Material, digests: Mapping[str, str]
) -> None:
    """The resolved configuration, the environment, where everything comes from. Raises `InputError` for a bad disk."""
    write_whole(folder.config, to_yaml(resolved(config, folder)).encode())
    write_json(folder.environment, environment)
    write_provenance(
        folder.provenance,
        identity=config_digest(config),
        digests={**digests, "data": material.rows.digest, "tokenizer": material.tokenizer.digest},
        environment=environment,
    )


def resolved(config: Config, folder: RunFolder) -> Config:
    """`config` as it can be used again from anywhere: its run folder named, files and folders by absolute paths."""
    data, base = config.data, config.model.base
    files = {name: str(Path(path).resolve()) for name, path in (("train", data.train), ("eval", data.eval)) if path}
    model = {"base": str(Path(base).resolve())} if base is not None and Path(base).is_dir() else {}
    return config.model_copy(
        update={
            "data": data.model_copy(update=files),
            "model": config.model.model_copy(update=model),
            "run": config.run.model_copy(update={"dir": str(folder.path.resolve())}),
        }
    )


def write_adapter(folder: RunFolder, model: nn.Module, material: Material) -> None:
    """The trained adapter as a PEFT folder with its tokenizer, whole or not at all; the embedded model also its base.

    Stock peft resolves the base by the absolute path (or hub id) in the adapter's configuration.
    """
    base = material.model.base
    reference = str(Path(base).resolve()) if base is not None and Path(base).is_dir() else base
    if reference is None and material.adapter.kind != "none":
        beside = folder.path / "base"
        with whole_folder(beside) as path:
            save_base(model, path, material.labels)
        reference = str(beside.resolve())
    with whole_folder(folder.adapter) as path:
        export_adapter(model, path, reference or "", material.labels)
        _save_tokenizer(material, path)


def _save_tokenizer(material: Material, path: Path) -> None:
    try:
        material.tokenizer.save(path)
    except OSError:
        raise
    except Exception as error:  # the tokenizers library raises a bare Exception for a disk that refuses
        if type(error) is not Exception:
            raise
        raise InputError([Problem(str(path.parent), f"the tokenizer cannot be written: {error}")]) from error


def write_results(folder: RunFolder, environment: Mapping[str, object], result: Result, scores: Scores | None) -> None:
    """The summary, last of all: a folder that holds a finished one is a finished run."""
    count, digest = result.ledger_head
    write_summary(
        folder.summary,
        Summary(
            run=folder.path.name,
            finished=result.reason in ("finished", "early-stopping"),
            reason=result.reason,
            steps=result.steps,
            world_size=result.world_size,
            backend=result.backend,
            weights_digest=result.weights_digest,
            initial_weights_digest=result.initial_weights_digest,
            contracts=evaluations(),
            violations=result.violations,
            wall_s=round(result.wall_s, 3),
            ledger=Head(count=count, digest=digest),
            fingerprint=fingerprint(environment),
            final_loss=Real.of(result.last_loss),
            eval=scores.as_dict() if scores is not None else {},
            best_step=result.best_step or None,
            memory=result.memory,
        ),
    )
