"""How `devcomm.torch` defines operators, and the names by which these find communicators."""

import itertools

import torch
from torch._library.autograd import Info, make_autograd_impl

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
        self._window = self._tensor = None

    @property
    def collectives(self):
        return self._one(devcomm.Collectives)

    @property
    def grouped(self):
        return self._one(devcomm.GroupedGemm)

    def _one(self, kind):
        # functools.cached_property has one lock for all objects before Python 3.12: a rank that is
        # a thread would hold it while it waits here for the others.
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
        """The object of a class for products of up to m rows and so many columns (AllGatherGemm: of
        the gathered a)."""
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


class Experts(Group):
    """An object for experts, with its communicator."""

    def __init__(self, parallel):
        super().__init__(parallel.communicator)
        self.parallel = parallel
        self.count = None

    def step(self, input, ids, weights, numbers=(), f8=False):
        """Dispatches tokens; returns the rows, with 0 where no token is, and these numbers. With f8
        rows of 8-bit floats, their scales and the numbers."""
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

    name: None: one that no other has, "devcomm0" the first in a process. torch.compile keeps the
    name in what it compiles. Ranks that are threads of one process have names of their own.
    """
    name = f"devcomm{next(_numbers)}" if name is None else name
    for known, group in list(groups.items()):
        if not group.communicator.is_open:
            groups.pop(known, None)
    if name in groups:
        raise devcomm.InvalidInput(f"{name!r} is the name of another communicator: unregister it")
    if isinstance(communicator, devcomm.ExpertParallel):
        groups[name] = Experts(communicator)
    else:
        group = Group(communicator)
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
            f"no communicator has the name {name!r}: devcomm.torch.register gives it one"
        ) from None


def experts_of(name):
    experts = group_of(name)
    if not isinstance(experts, Experts):
        raise devcomm.InvalidInput(f"{name!r} is the name of a communicator: no ExpertParallel")
    return experts


_library = torch.library.Library("devcomm", "FRAGMENT")


def operator(name, schema, function, fake, backward=None, keep=None):
    """Defines an operator. It has a derivative by `backward`, given what `keep` keeps, unless it
    writes into tensors of the caller's.

    torch.library.custom_op would check at each call whether results are arguments, which takes
    longer than the call.
    """
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    full, overload = f"devcomm::{name}", getattr(torch.ops.devcomm, name).default
    infos = [argument.alias_info for argument in overload._schema.arguments]
    written = [i for i, info in enumerate(infos) if info is not None and info.is_write]

    def no_derivative(ctx, *grads):
        raise NotImplementedError(f"{full} has no derivative")

    def changed(keys, *args):
        # Torch sees that what it has saved for a derivative has changed.
        try:
            with torch._C._AutoDispatchBelowADInplaceOrView():
                keys = keys & torch._C._after_ADInplaceOrView_keyset
                return overload.redispatch(keys, *args)
        finally:
            for i in written:
                torch.autograd.graph.increment_version(args[i])

    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(full, fake, lib=_library)
    if not written:
        backward = backward or no_derivative
        torch.library.register_autograd(full, backward, setup_context=keep, lib=_library)
        return
    _library.impl(name, changed, "ADInplaceOrView", with_keyset=True)
    if overload._schema.returns:
        autograd = make_autograd_impl(overload, Info(no_derivative, None))
        _library.impl(name, autograd, "Autograd", with_keyset=True)


def define(name, inputs, shape, run, backward, option=("op", "", ["sum"]), new="new_empty"):
    """Defines an operator and that which writes into a tensor of the caller's.

    inputs: the schema of what is before its name. shape: of the result, by the number of ranks and
    the inputs. run: writes the result, given the group, the inputs and it. backward: the gradients
    of the inputs, given the context and the result's. option: the argument after the name, its
    schema, and the values with a derivative. new: how the result is made.
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
        if tuple(out.shape) != tuple(shape(group.n_ranks, *given)) or not out.is_contiguous():
            wanted = list(shape(group.n_ranks, *given))
            raise devcomm.InvalidInput(
                f"out has the shape {list(out.shape)} and strides {out.stride()}: expected "
                f"{wanted}, contiguous"
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
        ctx.save_for_backward(*tensors[: count if len(tensors) > 1 else 0])

    def gradients(ctx, grad):
        return *backward(ctx, grad.contiguous()), *(None,) * ctx.others

    schema = f"({inputs}, str name{option[1]}) -> Tensor"
    operator(name, schema, call, allocate, gradients, keep)
    schema = f"({inputs}, Tensor(a!) out, str name{option[1]}) -> ()"
    operator(f"{name}_out", schema, write, lambda *args: None)
