"""A traced graph with the parts replaced that torch's compiler makes slow kernels of; it computes the same function.

Which masks are drawn and how values round is another matter for a compiled pass than for an eager one, as it was
before; see `CompiledPasses` for why that never depends on who computes it. Each rewriting was measured on an H200 with
the reference job of docs/gpu.md.
"""

from __future__ import annotations

from torch.fx import GraphModule

from andon.model.attention import replace_causal_attention
from andon.model.hashed import drop_by_hash
from andon.model.pooled import leave_out
from andon.model.products import add_in_place
from andon.model.rotary import exchange_halves, keep_waves


def rewrite(module: GraphModule) -> None:
    """Rewrite, in place, `module` and the graphs that it calls, which are layers whose activations are computed again.

    Dropout stays what it is in the latter: what they draw is drawn again in the backward pass by their own means.
    """
    leave_out(module.graph)
    drop_by_hash(module.graph)
    for each in module.modules():
        if isinstance(each, GraphModule):
            add_in_place(each.graph)
            exchange_halves(each.graph)
            keep_waves(each.graph)
            replace_causal_attention(each.graph)
            each.recompile()
