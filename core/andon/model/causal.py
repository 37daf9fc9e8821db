"""Next tokens as a loss: a forward pass of packs of rows, and the sum of the trained tokens' cross entropies.

A pack is rows end to end in one line of a batch. No row may see another: positions start again with each row, and the
mask names pairs of tokens. transformers detects packs by itself only without a mask and a cache, and says nothing if
it does not; so `check_packing_isolation` compares a model's packed rows with each row alone.

The loss is a SUM in fp32 of weight * cross entropy. It is divided later, by the trained tokens of the whole global
batch. A token's weight belongs to its prediction, made one token before in its row.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from andon.console.problems import InputError, Problem
from andon.model.batches import padded_length
from andon.model.build import backbone_of, computing, evaluating, half_of, try_pass, vocabulary_head, without_adapter
from andon.model.masks import NOISE, WINDOWS, masking_of, packed_inputs
from andon.step.task import Batch, LeafLoss
from andon_contracts.digest import row_digests

Row = tuple[Tensor, Tensor]
"""Tokens, int64 [n], and their weights, fp32 [n]; 0 for a token that is not trained."""

_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 28}
"""Logits held at a time by kind of device: 128 MiB and 1 GiB of fp32. A GPU's products of few rows wait for memory."""
_TRIED_LENGTHS = (9, 2, 5)
_FEW_LENGTHS = 32
"""Padding to a multiple of this many tokens or more serves few shapes, not alignment."""


def collate_packs(packs: Sequence[Sequence[Row]], pad_id: int, multiple: int, limit: int | None) -> Batch:
    """`packs` (none empty, nor a row) padded on the right to one length: int64 tensors, first dimension the packs.

    length: the longest pack's, rounded up to `multiple` but not beyond `limit`. [packs, length] each: input_ids,
    positions (from 0 in each row), rows (1 for a pack's first row, 2, ...; 0 is padding), weights (the bits of fp32; 0
    for a row's first token). trained: [packs, n], the places (pack * length + column) of all tokens with a weight, in
    order and dealt out evenly, filled with place 0, which is never trained. If `multiple` makes few lengths, n is one
    of them, so that passes repeat their shapes. Raises `ValueError` for a row whose weights are of another length.
    """
    counts = [[tokens.numel() for tokens, _ in rows] for rows in packs]
    length = padded_length(max(map(sum, counts)), multiple, limit)
    shape = (len(packs), length)
    ids = torch.full(shape, pad_id, dtype=torch.int64)
    positions, numbers = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    weights = torch.zeros(shape, dtype=torch.float32)
    for place, rows in enumerate(packs):
        first = 0
        for number, (tokens, given) in enumerate(rows):
            if tokens.shape != given.shape:
                msg = f"a row has {tokens.numel()} tokens and {given.numel()} weights"
                raise ValueError(msg)
            here = slice(first, first + tokens.numel())
            ids[place, here] = tokens
            positions[place, here] = torch.arange(tokens.numel())
            numbers[place, here] = number + 1
            weights[place, first + 1 : here.stop] = given[1:]
            first = here.stop
    trained = weights.flatten().nonzero().flatten()
    each = -(-trained.numel() // len(packs))
    if multiple >= _FEW_LENGTHS:
        each = padded_length(each, multiple, length)
    dealt = torch.zeros(len(packs) * each, dtype=torch.int64)
    dealt[: trained.numel()] = trained
    return {
        "input_ids": ids,
        "positions": positions,
        "rows": numbers,
        "weights": weights.view(torch.int32).long(),
        "trained": dealt.view(len(packs), -1),
    }


def content(batch: Batch) -> Tensor:
    """int64 [packs]: the digest of each pack's tokens, positions, rows and weights, padding aside."""
    parts = [batch[name] for name in ("input_ids", "positions", "rows", "weights")]
    return row_digests(torch.stack(parts, dim=2).flatten(1), len(parts) * (batch["rows"] > 0).sum(dim=1))


def hidden_of(model: nn.Module, batch: Batch) -> Tensor:
    """[packs, length, hidden]: one pass of the backbone, in which a token sees its own row up to itself. Packed or not
    there is one path, so that the bits of a batch are a function of the batch alone."""
    with packed_inputs(model, masking_of(model, batch["rows"].device), batch) as given:
        output: Any = backbone_of(model)(**given)
    hidden: Tensor = output.last_hidden_state
    return hidden


def loss_sum(model: nn.Module, batch: Batch) -> LeafLoss:
    """The fp32 sum of weight * cross entropy over the trained tokens, with its graph; the trained tokens, and those of
    them with the largest logit."""
    return loss_of_hidden(model, hidden_of(model, batch), batch)


def loss_of_hidden(model: nn.Module, hidden: Tensor, batch: Batch, kind: str | None = None) -> LeafLoss:
    """`loss_sum` of the result of `hidden_of`, computed as on a device of `kind`; None: that of `hidden`.

    Logits are computed at trained tokens alone, in chunks, and their gradient with them: nothing of the size of the
    vocabulary is kept for the backward pass. The order is the batch's.
    """
    head, parts, hidden, targets, weights = _predictions(model, hidden, batch, kind)
    learning = [parameter for parameter in head.parameters() if parameter.requires_grad]
    with computing(model, hidden.device):
        if torch.is_grad_enabled():
            given = (head, parts, hidden, targets, weights, *learning)
            total, correct = _LossInChunks.apply(*given)  # type: ignore[no-untyped-call]
        else:
            losses, right = _token_losses(head, parts, hidden, targets, weights)
            total, correct = losses.double().sum().float(), right.sum()
    return LeafLoss(total, correct, (weights != 0).sum())


def row_outputs(model: nn.Module, batch: Batch) -> Tensor:
    """fp64 [packs, 3], in evaluation mode: each pack's loss sum, trained tokens predicted right, and trained tokens."""
    with evaluating(model, batch["input_ids"].device):
        head, parts, hidden, targets, weights = _predictions(model, hidden_of(model, batch), batch)
        losses, right = _token_losses(head, parts, hidden, targets, weights)
    values = torch.stack([losses.double(), right.double(), (weights != 0).double()], dim=1)
    packs, length = batch["input_ids"].shape
    # Each at its own place: a sum by index would have the device's order. Place 0 gets zeros alone.
    table = torch.zeros((packs * length, 3), dtype=torch.float64, device=values.device)
    table[batch["trained"].flatten()] = values
    return table.view(packs, length, 3).sum(dim=1)


def _predictions(
    model: nn.Module, hidden: Tensor, batch: Batch, kind: str | None = None
) -> tuple[nn.Module, list[slice], Tensor, Tensor, Tensor]:
    """The head, and for the trained tokens: chunks, a function of sizes and kind of device alone, the hidden states
    that predict them [n, hidden], their ids, and their weights (0 for a filler)."""
    head: Any = vocabulary_head(model)
    places = batch["trained"].flatten()
    before = hidden.flatten(0, 1).index_select(0, (places - 1).clamp(min=0))
    weights = batch["weights"].flatten()[places].to(torch.int32).view(torch.float32)
    vocabulary = next(head.parameters()).shape[0]  # `head.weight` of a head with new tokens would be assembled for this
    step = max(1, _LOGITS.get(kind or hidden.device.type, _LOGITS["cpu"]) // vocabulary)
    parts = [slice(first, min(first + step, len(places))) for first in range(0, len(places), step)]
    return head, parts, before, batch["input_ids"].flatten()[places], weights


def _token_losses(
    head: nn.Module, parts: Sequence[slice], hidden: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """`_chunk_losses` of any number of tokens, without a graph."""
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


class _LossInChunks(torch.autograd.Function):
    """The loss sum and its correct tokens; the gradient is computed with each chunk's logits."""

    @staticmethod
    def forward(
        ctx: Any, head: nn.Module, parts: Any, hidden: Tensor, targets: Tensor, weights: Tensor, *learning: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        gradients = [torch.zeros_like(hidden), *(torch.zeros_like(each) for each in learning)]
        for part in parts:
            with torch.enable_grad():
                inputs = hidden[part].detach().requires_grad_()
                losses, right = _chunk_losses(head, inputs, targets[part], weights[part])
                found = torch.autograd.grad(losses.sum(), (inputs, *learning))
            gradients[0][part] = found[0]
            if learning:
                torch._foreach_add_(gradients[1:], found[1:])
            del found  # as large as the head: freed before the next chunk's
            # In fp64, rounded once at the end: an fp32 sum of thousands of terms loses its last digits.
            total += losses.detach().double().sum()
            correct += right.sum()
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(correct)
        return total.float(), correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a head's gradient is large, and autograd refuses a second call.
        of_hidden, *of_head = (kept.mul_(gradient) for kept in ctx.saved_tensors)
        return None, None, of_hidden, None, None, *of_head


def check_packing_isolation(model: nn.Module, device: torch.device, longest: int | None = None) -> None:
    """Raise `InputError` unless `model` on `device` gives packed rows the logits that it gives each of them alone.

    Refused too: a model that changes its logits after its head, and a limit to how far a token sees below `longest`,
    the tokens of the longest row (None: not known).
    """
    base: Any = without_adapter(model)

    def refuse(what: str) -> NoReturn:
        name = base.config._name_or_path or type(base).__name__
        raise InputError([Problem("model.base", f"{name!r} {what}; give another model")])

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
    size = base.get_input_embeddings().weight.shape[0]
    rows = (torch.arange(1, sum(counts) + 1) % size).split(counts)
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
        found = try_pass(logits_of)
    if isinstance(found, Exception):
        refuse(f"cannot be given packs of rows: {' '.join(str(found).split())[:200]}")
    packed, alone, by_head = found
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
    """The ids that `model` writes after each of `prompts`: greedily, by `generate` of transformers, on its own device.

    An answer ends with the first of `stop_ids`, which it includes, after its number `most` of tokens, or at the model's
    last position. The model's own generation settings are not used. Raises `ValueError` for a prompt without ids.
    """
    from transformers import GenerationConfig

    if not all(prompts):
        raise ValueError("a prompt has no tokens")
    base: Any = without_adapter(model)
    device = next(base.parameters()).device
    positions = getattr(base.config, "max_position_embeddings", None) or sys.maxsize
    rooms = [min(each, positions - len(ids)) for each, ids in zip(most, prompts, strict=True)]
    found: list[list[int]] = [[] for _ in prompts]
    own, base.generation_config = base.generation_config, GenerationConfig()
    try:
        with evaluating(model, device):
            # Keys and values, in fp32, take half of a GPU's free memory, or 2 GiB of a CPU's.
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
                    found[place] = answer[: min([rooms[place], *ends[:1]])]
    finally:
        base.generation_config = own
    return found


def _prompt_batches(lengths: Sequence[int], rooms: Sequence[int], positions: int, tokens: int) -> Iterator[list[int]]:
    """The places of prompts, longest first, in batches of at most `tokens` tokens with their answers, or of one prompt.

    The longest prompt and answer of a batch together fit into the model's positions. A prompt without room is left out.
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
