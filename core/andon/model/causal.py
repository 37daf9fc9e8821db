"""Next-token loss: a forward pass over packs of rows, and the summed cross entropy of the trained tokens.

A pack is rows concatenated into one sequence of a batch. No row may attend to another: positions restart with each row,
and the mask is pairwise. transformers detects packs itself only without a mask and a cache, and does not warn if it
misses one. So `check_packing_isolation` compares a model's packed rows with each row alone.

The loss is a SUM in fp32 of weight * cross entropy. The caller divides it by the trained tokens of the global batch. A
token's weight applies to its prediction, which is made at the token before it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from andon.console.messages import InputError
from andon.model.build import backbone_of, computing, evaluating, half_of, try_pass, vocabulary_head, without_adapter
from andon.model.masks import NOISE, WINDOWS, masking_of, packed_inputs, padded_length
from andon.step.micro_batch import Batch, LeafLoss
from andon_contracts.digest import row_digests

Row = tuple[Tensor, Tensor]
"""Tokens, int64 [n], and their loss weights, fp32 [n]; 0 for a token that is not trained."""

_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 28}
"""Logits in memory at a time by kind of device: 128 MiB and 1 GiB of fp32. On a GPU, small chunks are memory-bound."""
_TRIED_LENGTHS = (9, 2, 5)
_FEW_LENGTHS = 32
"""Padding to multiples of this many tokens or more serves to repeat shapes, smaller multiples only alignment."""


def collate_packs(packs: Sequence[Sequence[Row]], pad_id: int, multiple: int, limit: int | None) -> Batch:
    """Pad `packs` (packs and rows not empty) on the right to one length: int64 tensors, first dimension the packs.

    length: the longest pack's, rounded up to `multiple` but not beyond `limit`. [packs, length]: input_ids, positions
    (from 0 in each row), rows (1 for a pack's first row, 2, ...; 0 for padding), weights (the bits of fp32; 0 for a
    row's first token). [packs, n]: trained, the flat indices (pack * length + column) of all tokens with a weight, in
    order and split evenly. Its filler is index 0, which is never trained. If `multiple` makes few lengths, n is one of
    them, so that shapes repeat. Raises `ValueError` if a row's tokens and weights differ in length.
    """
    counts = [[tokens.numel() for tokens, _ in members] for members in packs]
    length = padded_length(max(map(sum, counts)), multiple, limit)
    size = (len(packs), length)
    ids = torch.full(size, pad_id, dtype=torch.int64)
    positions, numbers = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    weights = torch.zeros(size, dtype=torch.float32)
    for pack, members in enumerate(packs):
        first = 0
        for number, (tokens, token_weights) in enumerate(members):
            if tokens.shape != token_weights.shape:
                raise ValueError(f"a row has {tokens.numel()} tokens and {token_weights.numel()} weights")
            span = slice(first, first + tokens.numel())
            ids[pack, span] = tokens
            positions[pack, span] = torch.arange(tokens.numel())
            numbers[pack, span] = number + 1
            weights[pack, first + 1 : span.stop] = token_weights[1:]
            first = span.stop
    trained = weights.flatten().nonzero().flatten()
    per_pack = -(-trained.numel() // len(packs))
    if multiple >= _FEW_LENGTHS:
        per_pack = padded_length(per_pack, multiple, length)
    indices = torch.zeros(len(packs) * per_pack, dtype=torch.int64)
    indices[: trained.numel()] = trained
    return {
        "input_ids": ids,
        "positions": positions,
        "rows": numbers,
        "weights": weights.view(torch.int32).long(),
        "trained": indices.view(len(packs), -1),
    }


def content(batch: Batch) -> Tensor:
    """int64 [packs]: the digest of each pack's tokens, positions, rows and weights, without padding."""
    parts = [batch[name] for name in ("input_ids", "positions", "rows", "weights")]
    return row_digests(torch.stack(parts, dim=2).flatten(1), len(parts) * (batch["rows"] > 0).sum(dim=1))


def hidden_of(model: nn.Module, batch: Batch) -> Tensor:
    """[packs, length, hidden]: one backbone pass with causal attention within each row. Packs of one row take the same
    path, so that the bits of a batch are a function of the batch alone."""
    with packed_inputs(model, masking_of(model, batch["rows"].device), batch) as inputs:
        output: Any = backbone_of(model)(**inputs)
    hidden: Tensor = output.last_hidden_state
    return hidden


def loss_sum(model: nn.Module, batch: Batch) -> LeafLoss:
    """The fp32 sum of weight * cross entropy over the trained tokens, with its graph, and the numbers of correct and of
    trained tokens. A token is correct if it has the largest logit."""
    return loss_of_hidden(model, hidden_of(model, batch), batch)


def loss_of_hidden(model: nn.Module, hidden: Tensor, batch: Batch, kind: str | None = None) -> LeafLoss:
    """`loss_sum` of the result of `hidden_of`, in the chunks of a device of `kind` (None: the device of `hidden`).

    Logits are computed for the trained tokens only, in chunks in the batch's order, and each chunk's gradient with
    them: the backward pass needs no tensor of the vocabulary's size.
    """
    head, parts, hidden, targets, weights = _predictions(model, hidden, batch, kind)
    trainable = [parameter for parameter in head.parameters() if parameter.requires_grad]
    with computing(model, hidden.device):
        if torch.is_grad_enabled():
            inputs = (head, parts, hidden, targets, weights, *trainable)
            total, correct = _LossInChunks.apply(*inputs)  # type: ignore[no-untyped-call]
        else:
            losses, right = _token_losses(head, parts, hidden, targets, weights)
            total, correct = losses.double().sum().float(), right.sum()
    return LeafLoss(total, correct, (weights != 0).sum())


def row_outputs(model: nn.Module, batch: Batch) -> Tensor:
    """fp64 [packs, 3], in evaluation mode: each pack's loss sum, correct tokens, and trained tokens."""
    with evaluating(model, batch["input_ids"].device):
        head, parts, hidden, targets, weights = _predictions(model, hidden_of(model, batch), batch)
        losses, right = _token_losses(head, parts, hidden, targets, weights)
    values = torch.stack([losses.double(), right.double(), (weights != 0).double()], dim=1)
    packs, length = batch["input_ids"].shape
    # Scatter, then sum: adding by index would sum in the device's order. Index 0, the filler, gets only zeros.
    table = torch.zeros((packs * length, 3), dtype=torch.float64, device=values.device)
    table[batch["trained"].flatten()] = values
    return table.view(packs, length, 3).sum(dim=1)


def row_log_probs(model: nn.Module, hidden: Tensor, batch: Batch, count: int) -> Tensor:
    """fp64 [packs, count]: of each pack's first `count` rows, the sum of log p of the trained tokens; 0 for no row.

    hidden: of `hidden_of`. With gradients enabled the result has its graph. Logits are computed in chunks.
    """
    packs, length = batch["rows"].shape
    head, parts, hidden, targets, weights = _predictions(model, hidden, batch)
    with computing(model, hidden.device):
        if torch.is_grad_enabled():
            learning = [parameter for parameter in head.parameters() if parameter.requires_grad]
            losses = _TokenLosses.apply(model, parts, hidden, targets, weights, *learning)  # type: ignore[no-untyped-call]
        else:
            losses, _ = _token_losses(head, parts, hidden, targets, weights)
    # Index 0, the filler's, gets only zeros. Summed over a mask, since adding by index has the device's order.
    table = torch.zeros(packs * length, dtype=torch.float64, device=losses.device)
    table = table.index_put((batch["trained"].flatten(),), -losses.double()).view(packs, 1, length)
    numbers = torch.arange(1, count + 1, device=losses.device)[:, None]
    return torch.where(batch["rows"][:, None] == numbers, table, 0.0).sum(dim=2)


def _predictions(
    model: nn.Module, hidden: Tensor, batch: Batch, kind: str | None = None
) -> tuple[nn.Module, list[slice], Tensor, Tensor, Tensor]:
    """The head, and for the trained tokens: chunks, which depend on sizes and kind of device only, the hidden states
    that predict them [n, hidden], their ids, and their weights (0 for fillers)."""
    head: Any = vocabulary_head(model)
    indices = batch["trained"].flatten()
    predicting = hidden.flatten(0, 1).index_select(0, (indices - 1).clamp(min=0))
    weights = batch["weights"].flatten()[indices].to(torch.int32).view(torch.float32)
    vocabulary = next(head.parameters()).shape[0]  # a head with new tokens would assemble `weight` here
    step = max(1, _LOGITS.get(kind or hidden.device.type, _LOGITS["cpu"]) // vocabulary)
    parts = [slice(first, min(first + step, len(indices))) for first in range(0, len(indices), step)]
    return head, parts, predicting, batch["input_ids"].flatten()[indices], weights


def _token_losses(
    head: nn.Module, parts: Sequence[slice], hidden: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    losses = torch.empty(targets.shape, device=hidden.device)
    right = torch.empty(targets.shape, dtype=torch.bool, device=hidden.device)
    for part in parts:
        losses[part], right[part] = _chunk_losses(head, hidden[part], targets[part], weights[part])
    return losses, right


def _chunk_losses(head: nn.Module, hidden: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [n] weight * cross entropy, and bool [n] whether the target has the largest logit and a weight."""
    logits = head(hidden).float()
    losses = nn.functional.cross_entropy(logits, targets, reduction="none") * weights
    return losses, (logits.detach().argmax(dim=1) == targets) & (weights != 0)


def _with_gradients(
    head: nn.Module,
    parts: Sequence[slice],
    hidden: Tensor,
    targets: Tensor,
    weights: Tensor,
    learning: Sequence[Tensor],
    gradients: list[Tensor],
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield each chunk with its losses and correct tokens. Adds the gradient of their sum to `gradients`: of `hidden`,
    and of each of `learning`, the head's trained weights."""
    for part in parts:
        with torch.enable_grad():
            inputs = hidden[part].detach().requires_grad_()
            losses, right = _chunk_losses(head, inputs, targets[part], weights[part])
            of_chunk = torch.autograd.grad(losses.sum(), (inputs, *learning))
        gradients[0][part] = of_chunk[0]
        if learning:
            torch._foreach_add_(gradients[1:], of_chunk[1:])
        del of_chunk  # as large as the head: freed before the next chunk's
        yield part, losses.detach(), right


class _LossInChunks(torch.autograd.Function):
    """The loss sum and the number of correct tokens. The forward pass computes the gradient, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, head: nn.Module, parts: Any, hidden: Tensor, targets: Tensor, weights: Tensor, *learning: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        gradients = [torch.zeros_like(hidden), *(torch.zeros_like(each) for each in learning)]
        for _, losses, right in _with_gradients(head, parts, hidden, targets, weights, learning, gradients):
            # Summed in fp64 and rounded once at the end: an fp32 sum of thousands of terms loses precision.
            total += losses.double().sum()
            correct += right.sum()
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(correct)
        return total.float(), correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # In place, since a head's gradient is large; autograd refuses a second backward pass.
        of_hidden, *of_head = (saved.mul_(gradient) for saved in ctx.saved_tensors)
        return None, None, of_hidden, None, None, *of_head


class _TokenLosses(torch.autograd.Function):
    """fp32 [n]: weight * cross entropy of each token, whose gradients the caller weighs differently.

    The forward pass computes the gradient of the hidden states of each token's own loss, which is then only scaled. The
    gradient of a trained head is a sum over tokens, so the backward pass computes the logits again.
    """

    @staticmethod
    def forward(
        ctx: Any, model: nn.Module, parts: Any, hidden: Tensor, targets: Tensor, weights: Tensor, *learning: Tensor
    ) -> Tensor:
        head: Any = vocabulary_head(model)
        ctx.model, ctx.parts, ctx.learning = model, parts, learning
        if learning:
            ctx.save_for_backward(hidden, targets, weights)
            return _token_losses(head, parts, hidden, targets, weights)[0]
        losses, own = torch.empty(targets.shape, device=hidden.device), torch.zeros_like(hidden)
        for part, of_part, _ in _with_gradients(head, parts, hidden, targets, weights, (), [own]):
            losses[part] = of_part
        ctx.save_for_backward(own)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.learning:
            (own,) = ctx.saved_tensors
            return None, None, own.mul_(gradient[:, None]), None, None
        hidden, targets, weights = ctx.saved_tensors
        gradients = [torch.zeros_like(hidden), *(torch.zeros_like(each) for each in ctx.learning)]
        head: Any = vocabulary_head(ctx.model)
        with computing(ctx.model, hidden.device):
            for _ in _with_gradients(head, ctx.parts, hidden, targets, weights * gradient, ctx.learning, gradients):
                pass
        return None, None, gradients[0], None, None, *gradients[1:]


def check_packing_isolation(model: nn.Module, device: torch.device, longest: int | None = None) -> None:
    """Raise `InputError` unless `model` on `device` computes the same logits for packed rows as for each row alone.

    Also for a model that changes its logits after its head, and for an attention window below `longest`, the number of
    tokens of the longest row (None: unknown).
    """
    base: Any = without_adapter(model)

    def refuse(what: str) -> NoReturn:
        name = base.config._name_or_path or type(base).__name__
        raise InputError.at("model.base", f"{name!r} {what}; give another model")

    kinds = set(getattr(base.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        refuse(f"has layers of {', '.join(sorted(kinds))}, which cannot be told rows apart")
    limits = {name: getattr(base.config, name, None) for name in WINDOWS}
    narrow = [f"{name} {limit}" for name, limit in limits.items() if limit and (longest is None or limit < longest)]
    if narrow:
        refuse(f"limits how far a token sees ({', '.join(narrow)}), and rows may be longer")
    positions = getattr(base.config, "max_position_embeddings", None)
    room = min(limit for limit in (*_TRIED_LENGTHS[:1], longest, positions) if limit)
    counts = [max(1, min(length, room)) for length in _TRIED_LENGTHS]
    rows = (torch.arange(1, sum(counts) + 1) % base.get_input_embeddings().weight.shape[0]).split(counts)
    weights = [torch.ones(row.numel()) for row in rows]
    packs = [list(zip(rows, weights, strict=True)), [(rows[0], weights[0])]]
    batch = {name: value.to(device) for name, value in collate_packs(packs, 0, 4, None).items()}

    def logits_of() -> tuple[Tensor, list[Tensor], Tensor]:
        head: Any = vocabulary_head(model)
        packed = head(hidden_of(model, batch)).float()
        alone = [base(input_ids=row[None].to(device), use_cache=False).logits[0] for row in rows]
        output: Any = backbone_of(model)(input_ids=rows[0][None].to(device), use_cache=False)
        return packed, alone, head(output.last_hidden_state)[0]

    with evaluating(model, device):
        result = try_pass(logits_of)
    if isinstance(result, Exception):
        refuse(f"cannot be given packs of rows: {' '.join(str(result).split())[:200]}")
    packed, alone, by_head = result
    if not torch.equal(by_head, alone[0]):
        refuse("changes its logits behind its head (scales or caps them), which this training does not")
    together = [*torch.split(packed[0, : sum(counts)], counts), packed[1, : counts[0]]]
    pairs = zip(together, [*alone, alone[0]], strict=True)
    worst = max(float((one - other).norm() / other.float().norm()) for one, other in pairs)
    if not worst <= NOISE[half_of(model)]:
        refuse(f"gives packed rows other logits than each row alone (relative L2 {worst:.2g})")


def generate(
    model: nn.Module, prompts: Sequence[Sequence[int]], stop_ids: Collection[int], most: Sequence[int]
) -> list[list[int]]:
    """The ids that `model` generates for each of `prompts`: greedy decoding by transformers on the model's device.

    An answer ends with its first stop id, which it includes, after `most` tokens (one number per prompt), or at the
    model's last position. The base's generation settings are ignored. Raises `ValueError` for an empty prompt.
    """
    from transformers import GenerationConfig

    if not all(prompts):
        raise ValueError("a prompt has no tokens")
    base: Any = without_adapter(model)
    device = next(base.parameters()).device
    positions = getattr(base.config, "max_position_embeddings", None) or sys.maxsize
    rooms = [min(each, positions - len(ids)) for each, ids in zip(most, prompts, strict=True)]
    answers: list[list[int]] = [[] for _ in prompts]
    own_settings, base.generation_config = base.generation_config, GenerationConfig()
    try:
        with evaluating(model, device):
            # The fp32 key-value cache may take half of a GPU's free memory, or 2 GiB on a CPU.
            memory = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 1 << 31
            tokens = int(memory // (8 * base.config.num_hidden_layers * base.config.hidden_size))
            for batch in _prompt_batches([*map(len, prompts)], rooms, positions, tokens):
                longest, room = len(prompts[batch[0]]), max(rooms[place] for place in batch)
                padding = [longest - len(prompts[place]) for place in batch]
                rows = [[0] * empty + [*prompts[place]] for place, empty in zip(batch, padding, strict=True)]
                mask = torch.tensor([[0] * empty + [1] * (longest - empty) for empty in padding], device=device)
                how = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": [*stop_ids] or None}
                settings = GenerationConfig(max_new_tokens=room, **how)
                ids = torch.tensor(rows, device=device)
                written = base.generate(ids, attention_mask=mask, generation_config=settings)
                for place, answer in zip(batch, written[:, longest:].tolist(), strict=True):
                    ends = [end for end, token in enumerate(answer, start=1) if token in stop_ids]
                    answers[place] = answer[: min([rooms[place], *ends[:1]])]
    finally:
        base.generation_config = own_settings
    return answers


def _prompt_batches(lengths: Sequence[int], rooms: Sequence[int], positions: int, tokens: int) -> Iterator[list[int]]:
    """Indices of prompts, longest first, in batches of at most `tokens` tokens with their answers, or of one prompt.

    A batch's longest prompt and longest answer together fit into `positions`. Prompts without room are left out.
    """
    batch: list[int] = []
    room = 0
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if rooms[place] < 1:
            continue
        most, longest = max(room, rooms[place]), lengths[batch[0] if batch else place]
        if batch and (longest + most > positions or (len(batch) + 1) * (longest + most) > tokens):
            yield batch
            batch, most = [], rooms[place]
        batch.append(place)
        room = most
    if batch:
        yield batch
