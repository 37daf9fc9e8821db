"""What a watch looks at once something is broken: the first element that differs, and the tensors of a bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from andon_contracts.act import Scene
from andon_contracts.observe import plain
from andon_contracts.violation import Violation
from andon_contracts.watch.exchange import Exchange
from andon_contracts.watch.model_probe import ModelProbe
from andon_contracts.watch.optimizer_probe import OptimizerProbe


def tensors_of(subject: ModelProbe, probes: Sequence[OptimizerProbe], named: str) -> Iterator[tuple[str, Tensor]]:
    """`named`'s weights, gradient, optimizer state or buffer on this rank, then those of all that is trained.

    Names say what a tensor is: `weights NAME`, `gradient NAME`, `optimizer NAME KEY`, `buffer NAME`.
    """
    trained = [name for probe in probes for name in probe.names]
    for names in ([named], trained):
        for kind in (_weights, _gradients, _states):
            for probe in probes:
                yield from kind(probe, [name for name in names if name in probe.parameters])
    if named in subject.frozen:
        yield f"weights {named}", plain(subject.frozen[named])
    yield from ((f"buffer {name}", plain(buffer)) for name, buffer in subject.buffers_by_name().items())


def _weights(probe: OptimizerProbe, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    return ((f"weights {name}", plain(probe.parameters[name])) for name in names)


def _gradients(probe: OptimizerProbe, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        gradient = probe.parameters[name].grad
        if gradient is not None:
            yield f"gradient {name}", plain(gradient)


def _states(probe: OptimizerProbe, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        for key, value in states_of(probe, name).items():
            yield f"optimizer {name} {key}", value


def states_of(probe: OptimizerProbe, name: str) -> dict[str, Tensor]:
    """The tensors that the optimizer keeps for the parameter, by their keys."""
    state = probe.optimizer.state.get(probe.parameters[name], {})
    return {str(key): plain(value) for key, value in state.items() if isinstance(value, Tensor)}


def closer_look(
    exchange: Exchange,
    step: int,
    scene: Scene,
    tensors: Mapping[str, Mapping[str, Tensor]],
    probe: OptimizerProbe | None = None,
) -> Callable[[Violation], Scene]:
    """What adds to `scene` the first element that differs in the tensor of a finding. Collective when it is called.

    tensors: those that each clause compares, by name. probe: whose optimizer states were compared, if they were.
    """

    def look(found: Violation) -> Scene:
        named, name, key = tensors.get(found.clause, {}), found.tensor, ""
        if found.clause == "optimizers-agree" and probe is not None and name in probe.parameters:
            named = states_of(probe, name)
            spread = exchange.look(step, "state", named)
            name = key = next((one for one, digests in spread.items() if len(set(digests)) > 1), "")
        if name not in named:
            return scene
        element = exchange.first_difference(step, named[name])
        return replace(scene, element=" ".join(filter(None, [key, "" if element is None else str(element)])))

    return look
