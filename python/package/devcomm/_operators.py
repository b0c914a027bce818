"""How `devcomm.torch` defines operators, and the names by which these find communicators."""

import itertools

import torch
from torch.fx.node import has_side_effect

import devcomm

# Without a GPU, torch's first fake tensor sets a guard that ends with its thread, which torch goes
# on to use: ranks that are threads would crash it. This thread, which imports, outlasts them.
if hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
    torch._C._ensureCUDADeviceGuardSet()


class Group:
    """A communicator, and what its operators have made of it."""

    def __init__(self, communicator):
        self.communicator = communicator
        self.n_ranks = communicator.n_ranks
        self._made, self._products = {}, {}
        # The window of `windowed`, and it as a tensor: on simulated GPUs a copy of it. The event is
        # after the last copy of it.
        self._window = self._tensor = self._copied = None

    @property
    def collectives(self):
        return self._one(devcomm.Collectives)

    @property
    def grouped(self):
        return self._one(devcomm.GroupedGemm)

    def _one(self, kind):
        # Not functools.cached_property, which before Python 3.12 has one lock for all objects: a
        # rank that is a thread would hold it while it waits here for the other ranks.
        if kind not in self._made:
            self._made[kind] = kind(self.communicator)
        return self._made[kind]

    def check(self, **tensors):
        """Refuses tensors that are not where the communicator's GPU is."""
        here = torch.device("cpu")
        if not self.communicator.is_simulated:
            here = torch.device("cuda", self.communicator.device)
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and tensor.device != here:
                raise devcomm.CheckError(
                    f"tensor_device: {name} is on {tensor.device}, expected {here}"
                )

    def product(self, kind, m, columns):
        """An object of a class of products, for up to so many rows and columns: those of the
        result, for AllGatherGemm those of the gathered a."""
        most, made = self._products.get(kind, ((0, 0), None))
        if m > most[0] or columns > most[1]:
            most = max(m, most[0]), max(columns, most[1])
            made = kind(self.communicator, *most)
            self._products[kind] = most, made
        return made

    def windowed(self, write, out):
        """Calls write with a window of bfloat16, and copies to out what write has put there.

        Peers write here only in a product, which needs a part of every rank: not before this rank
        has begun it, and so not before the copy of the last one, on whichever stream that was.
        """
        if self._window is None or len(self._window) < out.numel():
            self._window = self.communicator.window(out.numel(), torch.bfloat16)
            if self.communicator.is_simulated:
                self._tensor = torch.empty(out.numel(), dtype=torch.bfloat16)
            else:
                self._tensor = torch.from_dlpack(self._window)
        stream = None
        # A captured stream waits for no event of before, and its events are points of the graph:
        # the program orders calls and replays.
        if not (self.communicator.is_simulated or torch.cuda.is_current_stream_capturing()):
            stream = torch.cuda.current_stream(out.device)
        if stream is not None and self._copied is not None:
            self._copied.wait(stream)
        write(self._window)
        if self.communicator.is_simulated:
            self._window.copy_to(self._tensor)
        out.copy_(self._tensor[: out.numel()].view_as(out))
        if stream is not None:
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record(stream)

    @property
    def sizes(self):
        """The numbers that determine shapes of results, beside the shapes of tensors."""
        return (self.n_ranks,)


class Experts(Group):
    """An object for experts, with its communicator."""

    def __init__(self, parallel):
        super().__init__(parallel.communicator)
        self.parallel = parallel
        self.count = None

    @property
    def sizes(self):
        experts = self.parallel
        return self.n_ranks, experts.most_rows, experts.local_experts, experts.hidden

    def step(self, input, ids, weights, numbers=(), f8=False):
        """Dispatches tokens; returns the rows, with 0 where no token is, with f8 their scales, and
        those of the results of `group` that numbers names."""
        experts = self.parallel
        if experts.f8 != f8:
            own = "expert_dispatch_f8, without a derivative" if experts.f8 else "expert_dispatch"
            raise devcomm.InvalidInput(f"f8={experts.f8}: the operator of this object is {own}")
        experts.dispatch(input.contiguous(), ids.contiguous(), weights.contiguous())
        self.count = ids.shape[0]
        kind = torch.float8_e4m3fn if f8 else input.dtype
        rows = input.new_zeros(experts.most_rows, experts.hidden, dtype=kind)
        most = {"offsets": experts.local_experts + 1, "sizes": experts.local_experts}
        most["origins"] = experts.most_rows
        made = {name: ids.new_zeros(most[name]) for name in numbers}
        if f8:
            scales = weights.new_zeros(experts.hidden // 128, experts.most_rows)
            made = {"scales": scales, **made}
        experts.group(rows, **made)
        return rows, *made.values()


groups = {}
_numbers = itertools.count()


def register(
    communicator: devcomm.Communicator | devcomm.ExpertParallel, name: str | None = None
) -> str:
    """Lets operators use a communicator by a name, which this returns. Collective. An
    ExpertParallel's name is also one of its communicator.

    name: the beginning of the name; None: one that no other has, "devcomm0" the first in a process.
    The number of ranks follows, as in "devcomm0/2", and for an ExpertParallel its sizes:
    torch.compile keeps the name and the shapes in what it compiles, also in files for later
    processes, so that one name is never for other shapes. Ranks that are threads of one process
    have names of their own.
    """
    if isinstance(communicator, devcomm.ExpertParallel):
        group = Experts(communicator)
    else:
        group = Group(communicator)
    name = f"devcomm{next(_numbers)}" if name is None else name
    name = "/".join(map(str, (name, *group.sizes)))
    for known, other in list(groups.items()):
        if not other.communicator.is_open:
            groups.pop(known, None)
    if name in groups:
        raise devcomm.InvalidInput(f"{name!r} is the name of another communicator: unregister it")
    if not isinstance(group, Experts):
        group.collectives  # made here, by all ranks
    groups[name] = group
    return name


def unregister(name: str) -> None:
    """Forgets a name, and drops what its operators have made. No compiled function uses it."""
    if groups.pop(name, None) is None:
        raise devcomm.InvalidInput(f"no communicator has the name {name!r}")


def group_of(name):
    try:
        return groups[name]
    except KeyError:
        raise devcomm.InvalidInput(
            f"no communicator has the name {name!r}: use that which devcomm.torch.register returns"
        ) from None


def experts_of(name):
    experts = group_of(name)
    if not isinstance(experts, Experts):
        raise devcomm.InvalidInput(f"{name!r} is the name of a communicator: no ExpertParallel")
    return experts


_library = torch.library.Library("devcomm", "FRAGMENT")


def _uncompiled(function):
    """Returns a function of an operator, which torch.compile is to leave as it is, with all that it
    calls. Where torch.compile runs a function of the program's as it is written, it would compile
    those of the operators in it, one by one."""
    dynamo = torch._C._dynamo.eval_frame
    if not hasattr(dynamo, "set_code_exec_strategy"):
        return torch._disable_dynamo(function)
    # Unlike a wrapper this takes no time in a call.
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))
    return function


def _no_derivative(ctx, *grads):
    """The backward function of an operator without one: an operator too, since torch.compile also
    traces the backward functions that nobody calls."""
    given = next(grad for grad in grads if grad is not None)
    torch.ops.devcomm._no_derivative(given, ctx.operator)
    return (None,) * len(ctx.needs_input_grad)


class _Written(torch.autograd.Function):
    """A tensor that an operator without a derivative has written."""

    @staticmethod
    def forward(ctx, operator, tensor, *inputs):
        ctx.operator = operator
        ctx.mark_dirty(tensor)
        return tensor

    backward = staticmethod(_no_derivative)


def operator(name, schema, function, fake, backward=None, keep=None, communicates=True):
    """Defines an operator, which function computes, and of which fake makes the results alone, for
    their shapes. keep saves in the context what backward takes from there, for the derivative; an
    operator that writes into tensors of the caller's has none. communicates: whether all ranks call
    it, also those that do not use its result.

    torch.library.custom_op would check at each call whether results are arguments, which takes
    longer than the call.
    """
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    full, overload = f"devcomm::{name}", getattr(torch.ops.devcomm, name).default
    infos = [argument.alias_info for argument in overload._schema.arguments]
    # The indices of the arguments that the schema marks as written, `Tensor(a!)`.
    written = [i for i, info in enumerate(infos) if info is not None and info.is_write]
    if communicates:
        # torch.compile keeps it then. (torch.library's effects, by which it would also keep the
        # order, do not work with activation checkpointing, as of torch 2.11.)
        has_side_effect(overload)

    def keep_name(ctx, inputs, output):
        ctx.operator = full

    def count_versions(keys, *args):
        # By a tensor's version torch sees that one which it has saved for a derivative has changed.
        try:
            with torch._C._AutoDispatchBelowADInplaceOrView():
                keys = keys & torch._C._after_ADInplaceOrView_keyset
                return overload.redispatch(keys, *args)
        finally:
            for i in written:
                torch.autograd.graph.increment_version(args[i])

    def autograd(keys, *args):
        result = count_versions(keys, *args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            if result is not None:
                _Written.apply(full, result, *args)
            # torch.compile would run the backward functions of all tensors in the graph, whichever
            # of them the program differentiates.
            if torch._guards.TracingContext.try_get() is None:
                for i in written:
                    _Written.apply(full, args[i], *args)
        return result

    _library.impl(name, _uncompiled(function), "CompositeExplicitAutograd")
    torch.library.register_fake(full, fake, lib=_library)
    if written:
        for kernel, key in ((count_versions, "ADInplaceOrView"), (autograd, "Autograd")):
            _library.impl(name, _uncompiled(kernel), key, with_keyset=True)
        return
    if backward is None:
        backward, keep = _no_derivative, keep_name
    backward, keep = _uncompiled(backward), _uncompiled(keep)
    torch.library.register_autograd(full, backward, setup_context=keep, lib=_library)


def _raise_no_derivative(grad, operator):
    raise NotImplementedError(f"{operator} has no derivative")


operator(
    "_no_derivative",
    "(Tensor grad, str operator) -> Tensor",
    _raise_no_derivative,
    lambda grad, operator: grad.new_empty(0),
)


def define(
    name,
    inputs,
    shape,
    run,
    backward,
    option=("op", "", ["sum"]),
    new="new_empty",
    communicates=True,
):
    """Defines an operator, and another one, `name_out`, that writes into a tensor of the caller's.

    inputs: the schema of the arguments before the communicator's name. shape: the shape of the
    result, given the number of ranks and the inputs. run: writes the result, given the group, the
    inputs and the result. backward: returns the gradients of the inputs, given the context and that
    of the result. option: the name of the argument after the communicator's name, its schema, and
    the values with a derivative, the default first. new: the method of the first input that makes
    the result. communicates: as for `operator`.
    """
    names = [part.split()[1] for part in inputs.split(", ")]
    count = len(names)

    def allocate(*args):
        return getattr(args[0], new)(shape(group_of(args[count]).n_ranks, *args[:count]))

    def call(*args):
        out = allocate(*args)
        write(*args[:count], out, *args[count:])
        return out

    def write(*args):
        given, out, (at, *rest) = args[:count], args[count], args[count + 1 :]
        group = group_of(at)
        group.check(**dict(zip(names, given, strict=True)), out=out)
        wanted, kind = tuple(shape(group.n_ranks, *given)), given[0].dtype
        if tuple(out.shape) != wanted or not out.is_contiguous() or out.dtype != kind:
            raise devcomm.InvalidInput(
                f"out has the shape {list(out.shape)}, strides {out.stride()} and {out.dtype}: "
                f"expected {list(wanted)}, contiguous, and {kind}"
            )
        given = [x.contiguous() if isinstance(x, torch.Tensor) else x for x in given]
        run(group, *given, out, *rest)

    def keep(ctx, inputs, output):
        ctx.name, *rest = inputs[count:]
        # The option or its default, and the number of arguments that have no gradient.
        ctx.option, ctx.others = (rest or option[2])[0], len(inputs) - count
        if ctx.option not in option[2]:
            what = f"{name} has no derivative for {option[0]}={ctx.option!r}"
            raise NotImplementedError(what)
        tensors = [x for x in inputs[:count] if isinstance(x, torch.Tensor)]
        ctx.numbers = [x for x in inputs[:count] if not isinstance(x, torch.Tensor)]
        # An operator of one tensor is linear: its gradient does not need the tensor.
        ctx.save_for_backward(*(tensors if len(tensors) > 1 else ()))

    def gradients(ctx, grad):
        return *backward(ctx, grad.contiguous()), *(None,) * ctx.others

    schema = f"({inputs}, str name{option[1]}) -> Tensor"
    operator(name, schema, call, allocate, gradients, keep, communicates)
    schema = f"({inputs}, Tensor(a!) out, str name{option[1]}) -> ()"
    operator(f"{name}_out", schema, write, lambda *args: None, communicates=communicates)
