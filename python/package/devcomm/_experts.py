"""The operators of `devcomm.torch` for experts."""

import torch

import devcomm
from devcomm._operators import define, experts_of, operator

_ops = torch.ops.devcomm


def _in_groups(ranks, a, b, offsets, sizes):
    if a.dim() != 2 or b.dim() != 3 or a.shape[1] != b.shape[2] or a.dtype != b.dtype:
        found = f"a of shape {list(a.shape)} and b of {list(b.shape)}, {a.dtype} and {b.dtype}"
        raise devcomm.InvalidInput(f"{found}: expected (m, k) and (groups, n, k) of one type")
    return a.shape[0], b.shape[1]


def _grouped_gemm_backward(ctx, grad):
    a, b, *groups = ctx.saved_tensors
    needs_a, needs_b = ctx.needs_input_grad[:2]
    return (
        _ops.grouped_gemm(grad, b.transpose(1, 2), *groups, ctx.name) if needs_a else None,
        _ops._grouped_gemm_of_b(grad, a, *groups) if needs_b else None,
        None,
        None,
    )


define(
    "grouped_gemm",
    "Tensor a, Tensor b, Tensor offsets, Tensor sizes",
    _in_groups,
    lambda group, a, b, offsets, sizes, out, activation=None: group.grouped(
        a, b, out, offsets, sizes, activation=activation
    ),
    _grouped_gemm_backward,
    ("activation", ", str? activation=None", [None]),
    "new_zeros",
    communicates=False,
)


def _grouped_gemm_of_b(grad, a, offsets, sizes):
    out = a.new_zeros(len(sizes), grad.shape[1], a.shape[1])
    for group, (first, size) in enumerate(zip(offsets.tolist(), sizes.tolist(), strict=False)):
        rows = slice(first, first + size)
        torch.mm(grad[rows].t(), a[rows], out=out[group])
    return out


operator(
    "_grouped_gemm_of_b",
    "(Tensor grad, Tensor a, Tensor offsets, Tensor sizes) -> Tensor",
    _grouped_gemm_of_b,
    lambda grad, a, offsets, sizes: a.new_empty(sizes.shape[0], grad.shape[1], a.shape[1]),
    communicates=False,
)


def _expert_dispatch(input, ids, weights, name):
    experts = experts_of(name)
    experts.check(input=input, ids=ids, weights=weights)
    return experts.step(input, ids, weights, ("offsets", "sizes"))


def _fake_dispatch(input, ids, weights, name):
    experts = experts_of(name).parallel
    numbers = [ids.new_empty(experts.local_experts + i) for i in (1, 0)]
    return input.new_empty(experts.most_rows, experts.hidden), *numbers


def _expert_dispatch_keep(ctx, inputs, output):
    ctx.name = inputs[3]
    ctx.save_for_backward(inputs[1])


operator(
    "expert_dispatch",
    "(Tensor input, Tensor ids, Tensor weights, str name) -> (Tensor, Tensor, Tensor)",
    _expert_dispatch,
    _fake_dispatch,
    lambda ctx, grad, *_: (
        _ops._expert_dispatch_backward(grad, *ctx.saved_tensors, ctx.name),
        None,
        None,
        None,
    ),
    _expert_dispatch_keep,
)


def _expert_dispatch_backward(grad, ids, name):
    """The sum of the gradients of each token's rows: the result of a step with weights of 1."""
    experts, out = experts_of(name), _tokens_like(grad, ids)
    experts.step(out, ids, torch.ones_like(ids, dtype=torch.float32))
    experts.parallel.combine(grad.contiguous(), out)
    # A combine must not follow this step: it would use these weights of 1.
    experts.count = None
    return out


def _expert_dispatch_f8(input, ids, weights, name):
    experts = experts_of(name)
    experts.check(input=input, ids=ids, weights=weights)
    return experts.step(input, ids, weights, ("offsets", "sizes"), f8=True)


def _fake_dispatch_f8(input, ids, weights, name):
    rows, *numbers = _fake_dispatch(input, ids, weights, name)
    scales = weights.new_empty(rows.shape[1] // 128, rows.shape[0])
    return rows.to(torch.float8_e4m3fn), scales, *numbers


operator(
    "expert_dispatch_f8",
    "(Tensor input, Tensor ids, Tensor weights, str name) -> (Tensor, Tensor, Tensor, Tensor)",
    _expert_dispatch_f8,
    _fake_dispatch_f8,
)


def _tokens_like(rows, ids, *_):
    return rows.new_zeros(ids.shape[0], rows.shape[1])


operator(
    "_expert_dispatch_backward",
    "(Tensor grad, Tensor ids, str name) -> Tensor",
    _expert_dispatch_backward,
    _tokens_like,
)


def _expert_combine(rows, ids, weights, name, residual=None):
    experts = experts_of(name)
    experts.check(rows=rows, ids=ids, weights=weights, residual=residual)
    if ids.shape[0] != experts.count:
        last = f"is of {experts.count}" if experts.count is not None else "has ended, or is none"
        raise devcomm.InvalidInput(f"ids of {ids.shape[0]} tokens, and the last step {last}")
    out = _tokens_like(rows, ids)
    residual = None if residual is None else residual.contiguous()
    experts.parallel.combine(rows.contiguous(), out, residual)
    return out


def _expert_combine_keep(ctx, inputs, output):
    ctx.name, ctx.has_residual = inputs[3], inputs[4] is not None
    ctx.save_for_backward(*inputs[:3])


def _expert_combine_grads(ctx, grad):
    backward = _ops._expert_combine_backward
    rows, weights = backward(grad.contiguous(), *ctx.saved_tensors, ctx.name)
    return rows, None, weights, None, grad if ctx.has_residual else None


operator(
    "expert_combine",
    "(Tensor rows, Tensor ids, Tensor weights, str name, Tensor? residual=None) -> Tensor",
    _expert_combine,
    _tokens_like,
    _expert_combine_grads,
    _expert_combine_keep,
)


def _expert_combine_backward(grad, rows, ids, weights, name):
    """The gradient of a row is its token's gradient times its weight; that of the weight is the
    scalar product of the token's gradient and the row.

    A step brings the tokens' gradients to the rows, and `origins` says of which token each row is.
    The weights are on the tokens' ranks: all ranks' ids and weights are gathered here, and the
    gradients of the weights return by a reduce-scatter.
    """
    experts, (count, top_k) = experts_of(name), ids.shape
    parallel, ranks = experts.parallel, experts.n_ranks
    numbers = ("offsets", "sizes", "origins")
    of_rows, offsets, sizes, origins = experts.step(grad, ids, weights, numbers)
    # All ranks' ids and the bits of their weights, in one message. Tokens from count on have no
    # expert.
    own = ids.new_full((parallel.tokens, top_k, 2), -1)
    own[:count, :, 0], own[:count, :, 1] = ids, weights.contiguous().view(torch.int32)
    routing = own.new_empty(ranks * parallel.tokens, top_k, 2)
    experts.collectives.all_gather(own, routing)
    # The expert of each row, its token, and which of the token's experts it is. Of experts that
    # begin at the same row the last one has it: the others have none.
    row = torch.arange(len(of_rows), dtype=torch.int32, device=ids.device)
    expert = torch.searchsorted(offsets[:-1], row, right=True) - 1
    has_token = row - offsets[expert] < sizes[expert]
    token = torch.where(has_token, origins, 0).long()
    here = expert + experts.communicator.rank * parallel.local_experts
    slot = (routing[token, :, 0] == here[:, None]).int().argmax(1)
    weight = routing[token, slot, 1].view(torch.float32)
    products = (of_rows.float() * rows.float()).sum(1).where(has_token, 0)
    # Garbage in rows without a token may be no number.
    of_rows = (of_rows.float() * weight[:, None]).where(has_token[:, None], 0).to(grad.dtype)
    all_weights = weights.new_zeros(ranks * parallel.tokens * top_k)
    all_weights.index_add_(0, token * top_k + slot, products)
    of_weights = weights.new_empty(parallel.tokens, top_k)
    experts.collectives.reduce_scatter(all_weights, of_weights)
    return of_rows, of_weights[:count].clone()


operator(
    "_expert_combine_backward",
    "(Tensor grad, Tensor rows, Tensor ids, Tensor weights, str name) -> (Tensor, Tensor)",
    _expert_combine_backward,
    lambda grad, rows, ids, weights, name: (
        rows.new_empty(rows.shape),
        weights.new_empty(weights.shape),
    ),
)


def _expert_layer(input, ids, weights, up, down, name, residual=None, activation="silu"):
    experts = experts_of(name)
    named = {"input": input, "ids": ids, "weights": weights, "up": up, "down": down}
    experts.check(**named, residual=residual)
    given = [tensor.contiguous() for tensor in named.values()]
    out = torch.empty_like(given[0])
    residual = None if residual is None else residual.contiguous()
    experts.parallel.layer(*given, out, residual, activation=activation)
    return out


operator(
    "expert_layer",
    "(Tensor input, Tensor ids, Tensor weights, Tensor up, Tensor down, str name, "
    'Tensor? residual=None, str? activation="silu") -> Tensor',
    _expert_layer,
    lambda input, *args: input.new_empty(input.shape),
)
