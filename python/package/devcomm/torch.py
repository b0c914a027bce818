"""devcomm's operations as torch's, `torch.ops.devcomm.*`: for autograd and torch.compile.

    name = devcomm.torch.register(communicator)
    y = torch.ops.devcomm.all_reduce(x, name)

An operator finds its communicator by the name. Every rank calls the same operators in the same
order, and the same backward functions: for that, the same inputs need gradients on all ranks.
torch.compile keeps operators whose results are not used. The order of operators that do not depend
on each other is its choice, the same for the same function: where compiled functions differ between
the ranks, each operator in them depends on the one before.
Tensors are on the communicator's GPU; on the CPU in simulated worlds.

Rows are the first dimension; `ranks` is the number of ranks, and `op` is "sum", "avg", "prod",
"max" or "min":

| operator | its result |
|---|---|
| `all_reduce(input, name, op="sum")` | the reduction of all ranks' input, of its shape |
| `all_gather(input, name)` | all ranks' rows, in rank order: ranks times as many |
| `reduce_scatter(input, name, op="sum")` | this rank's part of the rows of the reduction |
| `all_to_all(input, name)` | part r of the rows comes from rank r, whose part for this rank it is |
| `all_to_all_v(input, send_counts, recv_counts, name)` | likewise, with so many rows in each part |
| `gemm_all_reduce(a, b, name)` | the sum of all ranks' `a @ b.T`: (m, k), (n, k) -> (m, n) |
| `gemm_reduce_scatter(a, b, name)` | this rank's rows of it: (m, k), (n, k) -> (m / ranks, n) |
| `all_gather_gemm(a, b, name)` | all ranks' rows of a, `@ b.T`: (m / ranks, k), (n, k) -> (m, n) |
| `grouped_gemm(a, b, offsets, sizes, name, activation=None)` | as GroupedGemm, in bfloat16 or \
float16: (m, k), (groups, n, k) -> (m, n), with 0 in rows of no group |

Each has a form that writes into a tensor of the caller's, which it takes before the name:
`all_gather_out(input, out, name)`; `all_reduce_(input, name, op="sum")` is in place. These have no
derivative: to differentiate what they have written is an error. In a compiled function it is none,
and the gradient is wrong: there they write only what needs no gradient. A compiled function has no
derivative if an operator in it that returns something has none, and one of its tensors needs a
gradient.

All-reduces with RMSNorm, as `Collectives.all_reduce_rmsnorm`, of (.., hidden):

| operator | its result |
|---|---|
| `all_reduce_rmsnorm(input, residual, weight, name, eps=1e-6)` | the normalised sum, and the sum \
of all ranks' input and the residual |
| `all_reduce_rmsnorm_(input, residual, weight, name, eps=1e-6)` | none: input gets the first, \
residual the second. No derivative |
| `all_reduce_rmsnorm_quantised(input, residual, weight, scale, name, eps=1e-6)` | the normalised \
sum, divided by the scale, in float8_e4m3fn; residual gets the sum, input is overwritten. No \
derivative |

Operators of experts take the name that `register` gives an `ExpertParallel`. A step is an
`expert_dispatch` and an `expert_combine` with the same ids and weights; between the two the object
has no other step. An expert is not twice among those of a token.

| operator | its result |
|---|---|
| `expert_dispatch(input, ids, weights, name)` | rows (most_rows, hidden) in the order of the \
experts here, with 0 in rows of no token; offsets (local_experts + 1) and sizes (local_experts) |
| `expert_dispatch_f8(input, ids, weights, name)` | the rows in float8_e4m3fn; their scales \
(hidden / 128, most_rows) in float32; offsets and sizes; of an object with f8=True. No derivative |
| `expert_combine(rows, ids, weights, name, residual=None)` | for each token the sum of its \
experts' rows times their weights, plus its row of residual: (tokens, hidden) |
| `expert_layer(input, ids, weights, up, down, name, residual=None, activation="silu")` | all of a \
step, as `ExpertParallel.layer`. No derivative: the parts with `grouped_gemm` have one |

The derivative is that of the sum of all ranks' losses. So the gradient of an all-reduce is the
all-reduce of the gradients; those of an all-gather are reduced and scattered, those of a
reduce-scatter gathered, and those of an all-to-all go back. Only "sum" and "avg" have one, and
grouped products without an activation, whose gradient of b reads the sizes on the host. The
gradient of a dispatch is a step with weights of 1; that of a combine sends the gradients to the
experts, and the products of rows and gradients, the weights' gradients, back.

Products of bfloat16 are devcomm's fused ones, whose workspace is made by the first call and again
by a larger one, so not in a captured graph. Their k is not 0, and in `gemm_all_reduce` a multiple
of 8; n is not 0 in `all_gather_gemm`. Products of other types are torch's product and the
collective.
"""

import math

import torch

import devcomm
from devcomm import _experts  # noqa: F401 -- defines the operators of experts
from devcomm._operators import define, group_of, operator, register, unregister

__all__ = ["register", "unregister"]


def _rows(input):
    if input.dim() == 0:
        raise devcomm.InvalidInput("a tensor of 0 dimensions, expected one with rows")
    return input.shape[0]


def _part(rows, ranks):
    if rows % ranks != 0:
        raise devcomm.InvalidInput(f"{rows} rows for {ranks} ranks: expected a multiple of these")
    return rows // ranks


def _of_product(a, b, rows):
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or a.dtype != b.dtype:
        found = f"a of shape {list(a.shape)} and b of {list(b.shape)}, {a.dtype} and {b.dtype}"
        raise devcomm.InvalidInput(f"{found}: expected (rows, k) and (n, k) of one type")
    return rows, b.shape[0]


def _gemm_all_reduce(group, a, b, out):
    if a.dtype != torch.bfloat16:
        torch.mm(a, b.t(), out=out)
        return group.collectives.all_reduce(out)
    if out.numel() == 0:
        return
    product = group.product(devcomm.GemmAllReduce, *out.shape)
    group.windowed(lambda window: product(a, b, window), out)


def _gemm_reduce_scatter(group, a, b, out):
    if a.dtype != torch.bfloat16:
        return group.collectives.reduce_scatter(a @ b.t(), out)
    if out.numel() == 0:
        return
    group.product(devcomm.GemmReduceScatter, a.shape[0], b.shape[0])(a, b, out)


def _all_gather_gemm(group, a, b, out):
    if a.dtype != torch.bfloat16:
        rows = a.new_empty(a.shape[0] * group.n_ranks, a.shape[1])
        group.collectives.all_gather(a, rows)
        return torch.mm(rows, b.t(), out=out)
    # The ranks may differ in n, the columns of out.
    if out.shape[0] == 0:
        return
    group.product(devcomm.AllGatherGemm, out.shape[0], a.shape[1])(a, b, out)


_ops = torch.ops.devcomm
_OP = "op", ', str op="sum"', ["sum", "avg"]

define(
    "all_reduce",
    "Tensor input",
    lambda ranks, input: input.shape,
    lambda group, input, out, op="sum": group.collectives.all_reduce(input, out, op),
    lambda ctx, grad: (_ops.all_reduce(grad, ctx.name, ctx.option),),
    _OP,
)
define(
    "all_gather",
    "Tensor input",
    lambda ranks, input: (_rows(input) * ranks, *input.shape[1:]),
    lambda group, input, out: group.collectives.all_gather(input, out),
    lambda ctx, grad: (_ops.reduce_scatter(grad, ctx.name),),
)


def _reduce_scatter_backward(ctx, grad):
    grad = _ops.all_gather(grad, ctx.name)
    return (grad if ctx.option == "sum" else grad / group_of(ctx.name).n_ranks,)


define(
    "reduce_scatter",
    "Tensor input",
    lambda ranks, input: (_part(_rows(input), ranks), *input.shape[1:]),
    lambda group, input, out, op="sum": group.collectives.reduce_scatter(input, out, op),
    _reduce_scatter_backward,
    _OP,
)
define(
    "all_to_all",
    "Tensor input",
    lambda ranks, input: (_part(_rows(input), ranks) * ranks, *input.shape[1:]),
    lambda group, input, out: group.collectives.all_to_all(input, out),
    lambda ctx, grad: (_ops.all_to_all(grad, ctx.name),),
)


def _parts(ranks, input, sent, received):
    if len(sent) != ranks or len(received) != ranks:
        found = f"{len(sent)} send_counts and {len(received)} recv_counts"
        raise devcomm.InvalidInput(f"{found}: expected one for each of {ranks} ranks")
    return (sum(received), *input.shape[1:])


def _all_to_all_v(group, input, sent, received, out):
    if sum(sent) != _rows(input):
        rows = f"send_counts are of {sum(sent)} rows: input has {len(input)}"
        raise devcomm.InvalidInput(rows)
    row = math.prod(input.shape[1:])
    sent, received = ([row * count for count in counts] for counts in (sent, received))
    group.collectives.all_to_all_v(input, sent, out, received)


define(
    "all_to_all_v",
    "Tensor input, SymInt[] send_counts, SymInt[] recv_counts",
    _parts,
    _all_to_all_v,
    lambda ctx, grad: (_ops.all_to_all_v(grad, *ctx.numbers[::-1], ctx.name), None, None),
)


def _gemm_all_reduce_backward(ctx, grad):
    a, b = ctx.saved_tensors
    grad = _ops.all_reduce(grad, ctx.name)
    needs_a, needs_b = ctx.needs_input_grad[:2]
    return grad @ b if needs_a else None, grad.t() @ a if needs_b else None


def _gemm_reduce_scatter_backward(ctx, grad):
    a, b = ctx.saved_tensors
    needs_a, needs_b = ctx.needs_input_grad[:2]
    if not needs_b:
        return _ops.all_gather_gemm(grad, b.t(), ctx.name), None
    # The gradient of b needs all rows, so they are gathered once, for both.
    grad = _ops.all_gather(grad, ctx.name)
    return grad @ b if needs_a else None, grad.t() @ a


def _all_gather_gemm_backward(ctx, grad):
    a, b = ctx.saved_tensors
    needs_a, needs_b = ctx.needs_input_grad[:2]
    return (
        _ops.gemm_reduce_scatter(grad, b.t(), ctx.name) if needs_a else None,
        grad.t() @ _ops.all_gather(a, ctx.name) if needs_b else None,
    )


define(
    "gemm_all_reduce",
    "Tensor a, Tensor b",
    lambda ranks, a, b: _of_product(a, b, _rows(a)),
    _gemm_all_reduce,
    _gemm_all_reduce_backward,
)
define(
    "gemm_reduce_scatter",
    "Tensor a, Tensor b",
    lambda ranks, a, b: _of_product(a, b, _part(_rows(a), ranks)),
    _gemm_reduce_scatter,
    _gemm_reduce_scatter_backward,
)
define(
    "all_gather_gemm",
    "Tensor a, Tensor b",
    lambda ranks, a, b: _of_product(a, b, _rows(a) * ranks),
    _all_gather_gemm,
    _all_gather_gemm_backward,
)


def _all_reduce_in_place(input, name, op="sum"):
    group = group_of(name)
    group.check(input=input)
    group.collectives.all_reduce(input, op=op)


operator(
    "all_reduce_",
    f"(Tensor(a!) input, str name{_OP[1]}) -> ()",
    _all_reduce_in_place,
    lambda *args: None,
)


def _rmsnorm(input, residual, weight, name, eps, out=None, scale=None):
    group = group_of(name)
    group.check(input=input, residual=residual, weight=weight, scale=scale)
    if input.shape != residual.shape or input.shape[-1:] != weight.shape:
        shapes = [list(tensor.shape) for tensor in (input, residual, weight)]
        raise devcomm.InvalidInput(
            "input of shape {}, residual of {} and weight of {}: expected (.., hidden), the same, "
            "and (hidden,)".format(*shapes)
        )
    group.collectives.all_reduce_rmsnorm(input, residual, weight, out, eps=eps, scale=scale)
    return out


def _all_reduce_rmsnorm(input, residual, weight, name, eps=1e-6):
    input, weight = input.contiguous(), weight.contiguous()
    sums = residual.clone(memory_format=torch.contiguous_format)
    return _rmsnorm(input, sums, weight, name, eps, torch.empty_like(input)), sums


def _rmsnorm_keep(ctx, inputs, output):
    ctx.name, ctx.eps = inputs[3:]
    ctx.save_for_backward(output[1], inputs[2])


def _rmsnorm_backward(ctx, grad, grad_of_sums):
    sums, weight = ctx.saved_tensors
    x, grad = sums.float(), grad.float()
    factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
    x = x * factor
    of_weight = (grad * x).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    grad = grad * weight.float()
    grad = factor * (grad - x * (grad * x).mean(-1, keepdim=True)) + grad_of_sums.float()
    grad = grad.to(sums.dtype)
    return _ops.all_reduce(grad, ctx.name), grad, of_weight, None, None


operator(
    "all_reduce_rmsnorm",
    "(Tensor input, Tensor residual, Tensor weight, str name, float eps=1e-6) -> (Tensor, Tensor)",
    _all_reduce_rmsnorm,
    lambda input, residual, *_: (
        input.new_empty(input.shape),
        residual.new_empty(residual.shape),
    ),
    _rmsnorm_backward,
    _rmsnorm_keep,
)
operator(
    "all_reduce_rmsnorm_",
    "(Tensor(a!) input, Tensor(b!) residual, Tensor weight, str name, float eps=1e-6) -> ()",
    lambda input, residual, weight, name, eps=1e-6: _rmsnorm(input, residual, weight, name, eps),
    lambda *args: None,
)
operator(
    "all_reduce_rmsnorm_quantised",
    "(Tensor(a!) input, Tensor(b!) residual, Tensor weight, Tensor scale, str name, "
    "float eps=1e-6) -> Tensor",
    lambda input, residual, weight, scale, name, eps=1e-6: _rmsnorm(
        input, residual, weight, name, eps, _quantised(input), scale
    ),
    lambda input, *args: _quantised(input),
)


def _quantised(input):
    return input.new_empty(input.shape, dtype=torch.float8_e4m3fn)
