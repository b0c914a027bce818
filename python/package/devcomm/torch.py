"""devcomm's operations as torch's, `torch.ops.devcomm.*`: for autograd and torch.compile.

    name = devcomm.torch.register(communicator)
    y = torch.ops.devcomm.all_reduce(x, name)

An operator finds its communicator by the name. Every rank calls the same operators in the same
order, and so their backward functions: the same inputs need gradients. Tensors are on the
communicator's GPU; on the CPU in simulated worlds.

Rows are the first dimension; `ranks` is the number of ranks, and `op` is "sum", "avg", "prod",
"max" or "min":

| operator | its result |
|---|---|
| `all_reduce(input, name, op="sum")` | the reduction of all ranks' input, of its shape |
| `all_gather(input, name)` | all ranks' rows, in rank order: ranks times as many |
| `reduce_scatter(input, name, op="sum")` | this rank's part of the rows of the reduction |
| `all_to_all(input, name)` | part r of the rows comes from rank r, whose part for this rank it is |
| `gemm_all_reduce(a, b, name)` | the sum of all ranks' `a @ b.T`: (m, k), (n, k) -> (m, n) |
| `gemm_reduce_scatter(a, b, name)` | this rank's rows of it: (m, k), (n, k) -> (m / ranks, n) |
| `all_gather_gemm(a, b, name)` | all ranks' rows of a, `@ b.T`: (m / ranks, k), (n, k) -> (m, n) |

Each has one that writes into a tensor of the caller's, before the name: `all_gather_out(input, out,
name)`; `all_reduce_(input, name, op="sum")` is in place. These have no derivative.

The derivative is that of the sum of all ranks' losses. So the gradient of an all-reduce is the
all-reduce of the gradients; those of an all-gather are reduced and scattered, those of a
reduce-scatter gathered, and those of an all-to-all go back. Only "sum" and "avg" have one.

Products of bfloat16 are devcomm's fused ones, whose workspace is made by the first call and again
by a larger one, so not in a captured graph. Of other types they are torch's product and the
collective.
"""

import itertools

import torch

import devcomm

# Without a GPU, torch's first fake tensor sets a guard that ends with its thread, which torch goes
# on to use: ranks that are threads would crash it. This thread, which imports, outlasts them.
if hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
    torch._C._ensureCUDADeviceGuardSet()


class _Group:
    """A communicator, and what its operators have made of it."""

    def __init__(self, communicator):
        self.communicator = communicator
        self.n_ranks = communicator.n_ranks
        self.collectives = devcomm.Collectives(communicator)
        self._products = {}
        self._window = self._tensor = None

    def product(self, kind, m, columns):
        """The object for products of up to m rows and so many columns that the ranks exchange."""
        most, made = self._products.get(kind, ((0, 0), None))
        if m > most[0] or columns > most[1]:
            most = max(m, most[0]), max(columns, most[1])
            made = kind(self.communicator, *most)
            self._products[kind] = most, made
        return made

    def windowed(self, write, out):
        """Calls write with a window of bfloat16, and copies what is there then to out."""
        if self._window is None or len(self._window) < out.numel():
            self._window = self.communicator.window(out.numel(), out.dtype)
            if self.communicator.is_simulated:
                self._tensor = torch.empty(out.numel(), dtype=out.dtype)
            else:
                self._tensor = torch.from_dlpack(self._window)
        write(self._window)
        if self.communicator.is_simulated:
            self._window.copy_to(self._tensor)
        out.copy_(self._tensor[: out.numel()].view_as(out))


_groups = {}
_numbers = itertools.count()


def register(communicator: devcomm.Communicator, name: str | None = None) -> str:
    """Lets operators use a communicator by a name, which this returns. Collective.

    name: None: one that no other has, "devcomm0" the first in a process. torch.compile keeps the
    name in what it compiles. Ranks that are threads of one process have names of their own.
    """
    name = f"devcomm{next(_numbers)}" if name is None else name
    for known, group in list(_groups.items()):
        if not group.communicator.is_open:
            _groups.pop(known, None)
    if name in _groups:
        raise devcomm.InvalidInput(f"{name!r} is the name of another communicator: unregister it")
    _groups[name] = _Group(communicator)
    return name


def unregister(name: str) -> None:
    """Forgets a name, and drops what its operators have made. No compiled function uses it."""
    if _groups.pop(name, None) is None:
        raise devcomm.InvalidInput(f"no communicator has the name {name!r}")


def _group(name):
    try:
        return _groups[name]
    except KeyError:
        raise devcomm.InvalidInput(
            f"no communicator has the name {name!r}: devcomm.torch.register gives it one"
        ) from None


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
    product = group.product(devcomm.GemmAllReduce, *out.shape)
    group.windowed(lambda window: product(a, b, window), out)


def _gemm_reduce_scatter(group, a, b, out):
    if a.dtype != torch.bfloat16:
        return group.collectives.reduce_scatter(a @ b.t(), out)
    group.product(devcomm.GemmReduceScatter, a.shape[0], b.shape[0])(a, b, out)


def _all_gather_gemm(group, a, b, out):
    if a.dtype != torch.bfloat16:
        rows = a.new_empty(a.shape[0] * group.n_ranks, a.shape[1])
        group.collectives.all_gather(a, rows)
        return torch.mm(rows, b.t(), out=out)
    group.product(devcomm.AllGatherGemm, out.shape[0], a.shape[1])(a, b, out)


def _define(operator, inputs, shape, run, backward, op=""):
    """Defines an operator and that which writes into a tensor of the caller's.

    inputs: the names of its tensors. shape: of the result, by the number of ranks and the tensors.
    run: writes the result, given the group, the tensors and it. backward: the tensors' gradients,
    given the context and the result's. op: the argument after the name.
    """
    count = len(inputs)
    tensors = ", ".join(f"Tensor {name}" for name in inputs)

    def allocate(*args):
        return args[0].new_empty(shape(_group(args[count]).n_ranks, *args[:count]))

    def call(*args):
        out = allocate(*args)
        write(*args[:count], out, *args[count:])
        return out

    def write(*args):
        given, out, (name, *rest) = args[:count], args[count], args[count + 1 :]
        group = _group(name)
        if tuple(out.shape) != tuple(shape(group.n_ranks, *given)) or not out.is_contiguous():
            wanted = list(shape(group.n_ranks, *given))
            raise devcomm.InvalidInput(
                f"out has the shape {list(out.shape)} and strides {out.stride()}: expected "
                f"{wanted}, contiguous"
            )
        run(group, *(tensor.contiguous() for tensor in given), out, *rest)

    def keep(ctx, inputs, output):
        ctx.name, *rest = inputs[count:]
        ctx.op, ctx.others = (rest or ["sum"])[0], len(inputs) - count
        if ctx.op not in ("sum", "avg"):
            raise NotImplementedError(f"{operator} has no derivative for op={ctx.op!r}")
        # Of one tensor the result is linear.
        ctx.save_for_backward(*inputs[: count if count > 1 else 0])

    def gradients(ctx, grad):
        return *backward(ctx, grad.contiguous()), *(None,) * ctx.others

    define = torch.library.custom_op
    schema = f"({tensors}, str name{op}) -> Tensor"
    defined = define(f"devcomm::{operator}", call, mutates_args=(), schema=schema)
    defined.register_fake(allocate)
    defined.register_autograd(gradients, setup_context=keep)
    schema = f"({tensors}, Tensor(a!) out, str name{op}) -> ()"
    written = define(f"devcomm::{operator}_out", write, mutates_args={"out"}, schema=schema)
    written.register_fake(lambda *args: None)


_ops = torch.ops.devcomm
_OP = ', str op="sum"'

_define(
    "all_reduce",
    ["input"],
    lambda ranks, input: input.shape,
    lambda group, input, out, op="sum": group.collectives.all_reduce(input, out, op),
    lambda ctx, grad: (_ops.all_reduce(grad, ctx.name, ctx.op),),
    op=_OP,
)
_define(
    "all_gather",
    ["input"],
    lambda ranks, input: (_rows(input) * ranks, *input.shape[1:]),
    lambda group, input, out: group.collectives.all_gather(input, out),
    lambda ctx, grad: (_ops.reduce_scatter(grad, ctx.name),),
)


def _reduce_scatter_backward(ctx, grad):
    grad = _ops.all_gather(grad, ctx.name)
    return (grad if ctx.op == "sum" else grad / _group(ctx.name).n_ranks,)


_define(
    "reduce_scatter",
    ["input"],
    lambda ranks, input: (_part(_rows(input), ranks), *input.shape[1:]),
    lambda group, input, out, op="sum": group.collectives.reduce_scatter(input, out, op),
    _reduce_scatter_backward,
    op=_OP,
)
_define(
    "all_to_all",
    ["input"],
    lambda ranks, input: (_part(_rows(input), ranks) * ranks, *input.shape[1:]),
    lambda group, input, out: group.collectives.all_to_all(input, out),
    lambda ctx, grad: (_ops.all_to_all(grad, ctx.name),),
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


_define(
    "gemm_all_reduce",
    ["a", "b"],
    lambda ranks, a, b: _of_product(a, b, _rows(a)),
    _gemm_all_reduce,
    _gemm_all_reduce_backward,
)
_define(
    "gemm_reduce_scatter",
    ["a", "b"],
    lambda ranks, a, b: _of_product(a, b, _part(_rows(a), ranks)),
    _gemm_reduce_scatter,
    _gemm_reduce_scatter_backward,
)
_define(
    "all_gather_gemm",
    ["a", "b"],
    lambda ranks, a, b: _of_product(a, b, _rows(a) * ranks),
    _all_gather_gemm,
    _all_gather_gemm_backward,
)


def _all_reduce_in_place(input, name, op="sum"):
    _group(name).collectives.all_reduce(input, op=op)


torch.library.custom_op(
    "devcomm::all_reduce_",
    _all_reduce_in_place,
    mutates_args={"input"},
    schema=f"(Tensor(a!) input, str name{_OP}) -> ()",
).register_fake(lambda *args: None)
