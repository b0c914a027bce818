//! The traits of kernels (`#[kernel]` implements them), of parameters and of launch arguments.
//!
//! A kernel's Rust parameters are device types: `nccl_device::DevComm`, `nccl_device::Window<f32>`,
//! `usize`. A launch passes host values: a `&DevCommResource`, a `&Window<f32>` of the host crate,
//! a number. Both refer to the parameter's [`KernelParam::Abi`], a plain type of this crate: the
//! device type names it, and [`IntoArg`] converts the host value into it. So the compiler checks
//! a launch although neither the host crate nor the device crate depends on the other.

use core::ffi::c_void;
use core::fmt;
use core::marker::PhantomData;

use crate::gin::{CounterRange, SignalRange};
use crate::host_body::HostBody;
use crate::launch::{Dim3, Launch, Safety, Unsafe, Unset};
use crate::nccl::{
    CftBarrierHandle, DevComm, GinBarrierHandle, LlA2aHandle, LsaBarrierHandle, MultimemHandle,
    Window,
};
use crate::team::Team;

/// A launchable kernel: the type that `#[kernel]` declares with the function's name. It has no
/// values.
///
/// # Safety
///
/// The compiled kernel that the names identify, and `BODY`, take parameters of the types `Args`. If
/// `Safety` is [`Safe`](crate::Safe), no parameter [holds a slice](KernelArgs::HOLD_SLICE), and for
/// any values they access only memory that the parameters refer to.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a kernel, or not an instance of one",
    note = "a kernel is a type of its function's name, such as `my_kernel` or `my_kernel<f32>`",
    note = "a generic kernel exists for the types listed in `#[kernel(T = [..])]` only"
)]
pub unsafe trait Kernel: Sized + 'static {
    /// Name of the entry point in PTX; for a GIN kernel, the prefix of its entry points' names.
    const NAME: &'static str;
    /// Whether the kernel is compiled once per GIN back end. Each entry point's name is `NAME`, an
    /// underscore and [`GinType::suffix`](crate::GinType::suffix).
    const GIN: bool = false;
    /// The package that the kernel is part of.
    const PACKAGE: &'static str;
    /// Stem of the source file, which names the PTX module.
    const FILE: &'static str;
    /// The kernel's parameters, as the device sees them.
    type Args: KernelArgs;
    /// Whether a launch needs `unsafe`: [`Safe`](crate::Safe), or [`Unsafe`](crate::Unsafe) for a
    /// kernel that is an `unsafe fn` or takes a slice.
    type Safety: Safety;
    /// What a simulated GPU runs; `None` for a kernel that exists only as machine code. Only a
    /// launch on a simulated GPU reads it.
    const BODY: Option<HostBody> = None;

    /// Returns the kernel with a tuple of arguments, for code that is generic over kernels. The
    /// `args` that `#[kernel]` generates names the parameters, and its launch is safe if the kernel
    /// is.
    fn with_args<A: LaunchArgs<Self::Args>>(args: A) -> Launch<Self, A, Unsafe, Unset, Unset> {
        Launch::new(args)
    }

    /// What the kernel requires of a launch: the conditions of `#[kernel(requires(..))]` on the
    /// grid, a block and the arguments.
    ///
    /// # Errors
    ///
    /// The first condition that does not hold.
    fn check(grid: Dim3, block: Dim3, args: &<Self::Args as KernelArgs>::Abi) -> Result<(), Unmet> {
        let _ = (grid, block, args);
        Ok(())
    }
}

/// A condition on a launch that does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unmet {
    /// The condition, as in the source.
    pub condition: &'static str,
    /// The values of the two sides, if the condition is a comparison.
    pub sides: Option<(i128, i128)>,
}

impl fmt::Display for Unmet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.condition)?;
        match self.sides {
            Some((left, right)) => write!(f, ", but these are {left} and {right}"),
            None => Ok(()),
        }
    }
}

/// A kernel whose body can run on the host.
pub trait HostKernel: Kernel {
    /// Runs one thread of the kernel.
    ///
    /// # Safety
    ///
    /// The kernel's own contract holds. The caller is a simulated thread.
    unsafe fn call(args: Self::Args);
}

/// An instance of a generic kernel; the kernel's function calls it.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "the kernel is not instantiated for these types",
    note = "a generic kernel exists for the types listed in `#[kernel(T = [..])]` only"
)]
pub trait Body {
    /// The parameters.
    type Args;
    /// Runs the instance.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    unsafe fn call(args: Self::Args);
}

/// A type that a kernel can take as a parameter.
///
/// # Safety
///
/// `Self` and `Abi` have the same layout, and the bytes of an `Abi` that safe code can make are a
/// valid `Self`, unless `HOLDS_SLICE` says that the caller of a launch promises it.
#[diagnostic::on_unimplemented(message = "`{Self}` cannot be a kernel parameter")]
pub unsafe trait KernelParam: Copy {
    /// The plain type that the host fills.
    type Abi: Copy + 'static;

    /// Whether the parameter is a device communicator, which makes the launch check residency and
    /// barriers.
    const IS_DEV_COMM: bool = false;

    /// Whether the parameter is a slice, or has one in a field. It makes the launch unsafe: the
    /// caller promises that the elements exist, and that nothing writes them meanwhile.
    const HOLDS_SLICE: bool = false;

    /// The memory that the parameter refers to, for the simulator's reports.
    #[doc(hidden)]
    const MEMORY: &'static [MemoryRef] = &[];

    /// How the entry point takes the parameter: [`BY_VALUE`], or by reference to the launch's
    /// parameter memory. By value, a struct of more than two registers would be copied to the
    /// stack as soon as its address is needed.
    #[doc(hidden)]
    const ENTRY: u8 = if size_of::<Self>() > 16 { COPIED } else { BY_VALUE };

    /// Fails to compile when the layouts of the type and of `Abi` differ, or when the type has no
    /// bytes (PTX would drop the parameter and shift those after it).
    const LAYOUT: () = {
        assert!(
            Self::ENTRY == KEPT || size_of::<Self>() == size_of::<Self::Abi>(),
            "a parameter and its Abi have one size"
        );
        assert!(
            Self::ENTRY == KEPT || align_of::<Self>() == align_of::<Self::Abi>(),
            "a parameter and its Abi have one alignment"
        );
        assert!(size_of::<Self>() != 0, "a kernel parameter has at least one byte");
    };
}

/// A reference to memory in a kernel's parameter: an address, or the handle of a window.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRef {
    /// The field of the parameter; empty for the parameter itself.
    pub field: &'static str,
    /// Where in the parameter, in bytes.
    pub offset: usize,
    /// The size of the memory's elements in bytes.
    pub element: usize,
}

impl MemoryRef {
    /// Returns a parameter that starts with a reference to memory with elements of type `T`.
    #[must_use]
    pub const fn to<T>() -> Self {
        Self { field: "", offset: 0, element: size_of::<T>() }
    }

    /// Returns the reference that a field at `offset` starts with, if its type's
    /// [`KernelParam::MEMORY`] has one; else one of size 0.
    #[must_use]
    pub const fn of_field(field: &'static str, offset: usize, memory: &[Self]) -> Self {
        match memory {
            [whole] if whole.field.is_empty() => Self { field, offset, element: whole.element },
            _ => Self { field, offset, element: 0 },
        }
    }
}

/// Converts a launch's bytes into the parameter.
///
/// # Safety
///
/// What the bytes refer to exists: the memory of a slice, the window of a handle.
#[doc(hidden)]
#[inline]
pub unsafe fn param<P: KernelParam>(abi: P::Abi) -> P {
    let () = P::LAYOUT;
    // SAFETY: KernelParam promises that the bytes of an Abi are a valid parameter, and LAYOUT
    // checked the size.
    unsafe { core::mem::transmute_copy::<P::Abi, P>(&abi) }
}

/// The entry point takes the parameter by value.
#[doc(hidden)]
pub const BY_VALUE: u8 = 0;
/// The entry point takes a reference; the kernel gets a copy of the value.
#[doc(hidden)]
pub const COPIED: u8 = 1;
/// The entry point takes a reference and passes it to the kernel: [`GridConstant`].
#[doc(hidden)]
pub const KEPT: u8 = 2;

/// How a kernel's entry point takes a parameter of type `T`.
#[doc(hidden)]
pub enum Taken<T, const ENTRY: u8> {
    #[doc(hidden)]
    __(core::convert::Infallible, core::marker::PhantomData<T>),
}

/// The conversion of [`Taken`], from what the entry point takes into the kernel's parameter.
#[doc(hidden)]
pub trait TakeParam {
    /// The parameter.
    type Param;
    /// The type in the entry point's signature.
    type Entry;
    /// Returns the kernel's parameter.
    fn take(entry: Self::Entry) -> Self::Param;
}

impl<T> TakeParam for Taken<T, BY_VALUE> {
    type Param = T;
    type Entry = T;
    fn take(entry: T) -> T {
        entry
    }
}

impl<T: Copy + 'static> TakeParam for Taken<T, COPIED> {
    type Param = T;
    type Entry = &'static T;
    fn take(entry: &'static T) -> T {
        *entry
    }
}

/// What the conditions of `#[kernel(requires(..))]` see of a parameter: the parameter or, if it
/// holds a slice, whose elements the host cannot read, its [`KernelParam::Abi`].
#[doc(hidden)]
pub trait SeenAs<const HOLDS_SLICE: bool>: KernelParam {
    /// The type.
    type Value: Copy;
}

impl<T: KernelParam> SeenAs<false> for T {
    type Value = T;
}

impl<T: KernelParam> SeenAs<true> for T {
    type Value = T::Abi;
}

/// Converts a launch's bytes into what the conditions see.
///
/// # Safety
///
/// As [`param`], unless `HOLDS_SLICE`.
#[doc(hidden)]
#[inline]
pub const unsafe fn seen<P: SeenAs<HOLDS_SLICE>, const HOLDS_SLICE: bool>(abi: P::Abi) -> P::Value {
    // SAFETY: the bytes are those of an Abi, or as in `param` a valid parameter.
    unsafe { core::mem::transmute_copy::<P::Abi, P::Value>(&abi) }
}

/// A parameter that stays in the launch's parameter memory, for an instruction that needs the
/// address there, such as that of a [`TensorMap`](crate::TensorMap). The host passes a `T`.
/// CUDA: `__grid_constant__`.
#[doc(alias = "__grid_constant__")]
#[derive(Clone, Copy)]
pub struct GridConstant<T: 'static>(Kept<T>);

#[cfg(target_arch = "nvptx64")]
type Kept<T> = &'static T;
#[cfg(not(target_arch = "nvptx64"))]
type Kept<T> = T;

// SAFETY: on the host, which converts a launch's bytes to the parameter, the layout is `T`'s; on a
// GPU the entry point takes a reference to the bytes.
unsafe impl<T: KernelParam<Abi = T> + 'static> KernelParam for GridConstant<T> {
    type Abi = T;
    const HOLDS_SLICE: bool = T::HOLDS_SLICE;
    const ENTRY: u8 = if cfg!(target_arch = "nvptx64") { KEPT } else { BY_VALUE };
}

#[cfg(target_arch = "nvptx64")]
impl<T: 'static> TakeParam for Taken<GridConstant<T>, KEPT> {
    type Param = GridConstant<T>;
    type Entry = &'static T;
    fn take(entry: &'static T) -> GridConstant<T> {
        GridConstant(entry)
    }
}

impl<T: 'static> core::ops::Deref for GridConstant<T> {
    type Target = T;

    #[cfg(target_arch = "nvptx64")]
    fn deref(&self) -> &T {
        self.0
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn deref(&self) -> &T {
        &self.0
    }
}

macro_rules! plain_params {
    ($($type:ty),* $(,)?) => { $(
        // SAFETY: `Abi` is the type itself.
        unsafe impl KernelParam for $type {
            type Abi = $type;
        }
    )* };
}
plain_params!(u8, i8, u16, i16, u32, i32, u64, i64, usize, isize, f32, f64, half::f16, half::bf16);
// Handles and ids of what the host has reserved for a kernel.
plain_params!(LsaBarrierHandle, GinBarrierHandle, CftBarrierHandle, LlA2aHandle, MultimemHandle);
plain_params!(SignalRange, CounterRange, Team);

// SAFETY: a bool made by the host is 0 or 1.
unsafe impl KernelParam for bool {
    type Abi = bool;
}

// SAFETY: a device address is 8 bytes on both sides.
unsafe impl<T: 'static> KernelParam for *const T {
    type Abi = u64;
    const MEMORY: &'static [MemoryRef] = &[MemoryRef::to::<T>()];
}

// SAFETY: a device address is 8 bytes on both sides.
unsafe impl<T: 'static> KernelParam for *mut T {
    type Abi = u64;
    const MEMORY: &'static [MemoryRef] = &[MemoryRef::to::<T>()];
}

/// A slice of device memory, as a launch passes it: the `Abi` of a kernel's `&[T]`.
#[repr(C)]
pub struct Slice<T> {
    /// Device address of the first element.
    pub address: u64,
    /// The number of elements.
    pub len: usize,
    element: PhantomData<*const T>,
}

impl<T> Slice<T> {
    /// Returns `len` elements at the device address `address`, which is aligned for them and, even
    /// for an empty slice, not 0.
    #[must_use]
    pub const fn new(address: u64, len: usize) -> Self {
        Self { address, len, element: PhantomData }
    }
}

impl<T> Slice<T> {
    /// Returns the number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the slice is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl<T> Clone for Slice<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Slice<T> {}

impl<T> fmt::Debug for Slice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slice({:#x}, {} elements)", self.address, self.len)
    }
}

// SAFETY: rustc represents `&[T]` as address and length, as a test here checks. That the elements
// exist, and that nothing writes them while the kernel runs, is the contract of the launch.
unsafe impl<T: Copy + 'static> KernelParam for &[T] {
    type Abi = Slice<T>;
    const HOLDS_SLICE: bool = true;
    const MEMORY: &'static [MemoryRef] = &[MemoryRef::to::<T>()];
}

/// A host value that a launch can pass for a kernel parameter whose [`KernelParam::Abi`] is `Abi`.
///
/// # Safety
///
/// A window or device communicator that the bytes refer to is open and as long as they say, unless
/// `info` says that it is closed or unchecked. It stays so until the kernel has ended, even if the
/// value is dropped after the launch.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be passed where the kernel takes `{Abi}`",
    label = "not what the kernel's parameter takes"
)]
pub unsafe trait IntoArg<Abi> {
    /// Returns the bytes that the kernel gets.
    fn into_arg(self) -> Abi;

    /// Returns what a launch checks of the argument.
    fn info(&self) -> ArgInfo<'_> {
        ArgInfo::default()
    }
}

/// A host value for a kernel's parameter `P`.
#[diagnostic::on_unimplemented(
    message = "the kernel's parameter is `{P}`, for which the host cannot pass `{Self}`",
    label = "not what the kernel's parameter takes",
    note = "the host passes its windows, buffers and device communicators by reference: \
            `&window` for the kernel's `Window`, `&dev_comm` for `DevComm`, `&buffer` for a pointer"
)]
pub trait Arg<P: KernelParam>: IntoArg<P::Abi> {}

#[diagnostic::do_not_recommend]
impl<P: KernelParam, A: IntoArg<P::Abi>> Arg<P> for A {}

/// What a launch checks of one argument or of all its arguments.
#[derive(Clone, Copy, Debug, Default)]
pub struct ArgInfo<'a> {
    /// The device communicator.
    pub dev_comm: Option<&'a DevComm>,
    /// The kind of an argument that is closed or not created yet.
    pub closed: Option<&'static str>,
    /// The communicator that a window or device communicator belongs to, as the host numbers it.
    pub communicator: Option<u64>,
    /// Whether windows and device communicators belong to more than one communicator.
    pub mixed: bool,
    /// Whether there is a window of unknown length: a bare handle, or one whose ranks could not
    /// exchange their lengths. A safe kernel is not launched with it.
    pub unchecked: bool,
}

impl<'a> ArgInfo<'a> {
    /// Combines what is known of two arguments.
    #[must_use]
    pub fn and(self, other: ArgInfo<'a>) -> Self {
        let mixed = match (self.communicator, other.communicator) {
            (Some(a), Some(b)) => a != b,
            _ => false,
        };
        Self {
            dev_comm: self.dev_comm.or(other.dev_comm),
            closed: self.closed.or(other.closed),
            communicator: self.communicator.or(other.communicator),
            mixed: mixed || self.mixed || other.mixed,
            unchecked: self.unchecked || other.unchecked,
        }
    }
}

// SAFETY: a plain value refers to no window.
unsafe impl<T: KernelParam<Abi = T>> IntoArg<T> for T {
    #[inline]
    fn into_arg(self) -> T {
        self
    }
}

// SAFETY: `info` says that it is unchecked.
unsafe impl<T: 'static> IntoArg<Window<T>> for Window<T> {
    #[inline]
    fn into_arg(self) -> Window<T> {
        self
    }

    fn info(&self) -> ArgInfo<'_> {
        ArgInfo { unchecked: true, ..ArgInfo::default() }
    }
}

// SAFETY: a slice refers to no window.
unsafe impl<T: 'static> IntoArg<Slice<T>> for Slice<T> {
    #[inline]
    fn into_arg(self) -> Slice<T> {
        self
    }
}

/// A tuple of kernel parameters.
///
/// # Safety
///
/// The items describe the same parameters.
pub unsafe trait KernelArgs: Copy {
    /// The parameters' `Abi` types, as a tuple.
    type Abi: Copy;
    /// Whether one of the parameters is a device communicator.
    const TAKES_DEV_COMM: bool;
    /// Whether one of the parameters is a slice or has one in a field.
    const HOLD_SLICE: bool;
    /// The size of each parameter in bytes, in order.
    const SIZES: &'static [usize];
    /// The memory that each parameter refers to, in order.
    #[doc(hidden)]
    const MEMORY: &'static [&'static [MemoryRef]];

    /// Converts a launch's bytes into the parameters.
    ///
    /// # Safety
    ///
    /// What the bytes refer to exists: the memory of a slice, the window of a handle.
    unsafe fn from_abi(abi: Self::Abi) -> Self;

    /// Reads the parameters from their addresses, in order.
    ///
    /// # Safety
    ///
    /// There is one address per parameter, and a value of the parameter's `Abi` at it.
    unsafe fn read(addresses: &[*const c_void]) -> Self::Abi;

    /// Calls `f` with the address of each parameter, in order, as `cuLaunchKernel` wants them. The
    /// addresses are valid during the call.
    fn with_pointers<R>(abi: &Self::Abi, f: impl FnOnce(&mut [*mut c_void]) -> R) -> R;
}

/// A tuple of host values that fits the parameters `P`.
///
/// # Safety
///
/// That of [`IntoArg`], for all of them.
#[diagnostic::on_unimplemented(
    message = "these arguments do not fit the kernel's parameters `{P}`",
    label = "not a tuple with one argument for each parameter"
)]
pub unsafe trait LaunchArgs<P: KernelArgs> {
    /// Returns the bytes that the kernel gets.
    fn into_abi(self) -> P::Abi;
    /// Returns what a launch checks of the arguments.
    fn info(&self) -> ArgInfo<'_>;
}

macro_rules! tuples {
    ($($host:ident $param:ident $index:tt),*) => {
        // SAFETY: all items are made of the parameters, in order.
        unsafe impl<$($param: KernelParam),*> KernelArgs for ($($param,)*) {
            type Abi = ($($param::Abi,)*);
            const TAKES_DEV_COMM: bool = false $(|| $param::IS_DEV_COMM)*;
            const HOLD_SLICE: bool = false $(|| $param::HOLDS_SLICE)*;
            const SIZES: &'static [usize] = &[$( size_of::<$param::Abi>() ),*];
            const MEMORY: &'static [&'static [MemoryRef]] = &[$( $param::MEMORY ),*];

            #[inline]
            #[allow(unused_variables, clippy::unused_unit)]
            unsafe fn from_abi(abi: Self::Abi) -> Self {
                // SAFETY: the caller passes values that are valid for the kernel's parameters.
                ($( unsafe { param::<$param>(abi.$index) }, )*)
            }

            #[allow(unused_variables, clippy::unused_unit)]
            unsafe fn read(addresses: &[*const c_void]) -> Self::Abi {
                // SAFETY: the caller passes the address of a value for each parameter.
                ($( unsafe { addresses[$index].cast::<$param::Abi>().read() }, )*)
            }

            #[inline]
            #[allow(unused_variables)]
            fn with_pointers<R>(abi: &Self::Abi, f: impl FnOnce(&mut [*mut c_void]) -> R) -> R {
                f(&mut [$( (&raw const abi.$index).cast_mut().cast::<c_void>() ),*])
            }
        }

        // SAFETY: each value becomes its parameter's, by the contract of `IntoArg`.
        unsafe impl<$($host,)* $($param),*> LaunchArgs<($($param,)*)> for ($($host,)*)
        where
            $( $param: KernelParam, $host: IntoArg<$param::Abi>, )*
        {
            #[inline]
            #[allow(clippy::unused_unit)]
            fn into_abi(self) -> ($($param::Abi,)*) {
                ($( self.$index.into_arg(), )*)
            }

            #[inline]
            fn info(&self) -> ArgInfo<'_> {
                ArgInfo::default() $( .and(self.$index.info()) )*
            }
        }
    };
}

tuples!();
tuples!(H0 P0 0);
tuples!(H0 P0 0, H1 P1 1);
tuples!(H0 P0 0, H1 P1 1, H2 P2 2);
tuples!(H0 P0 0, H1 P1 1, H2 P2 2, H3 P3 3);
tuples!(H0 P0 0, H1 P1 1, H2 P2 2, H3 P3 3, H4 P4 4);
tuples!(H0 P0 0, H1 P1 1, H2 P2 2, H3 P3 3, H4 P4 4, H5 P5 5);
tuples!(H0 P0 0, H1 P1 1, H2 P2 2, H3 P3 3, H4 P4 4, H5 P5 5, H6 P6 6);
tuples!(H0 P0 0, H1 P1 1, H2 P2 2, H3 P3 3, H4 P4 4, H5 P5 5, H6 P6 6, H7 P7 7);
tuples!(H0 P0 0, H1 P1 1, H2 P2 2, H3 P3 3, H4 P4 4, H5 P5 5, H6 P6 6, H7 P7 7, H8 P8 8);
tuples!(H0 P0 0, H1 P1 1, H2 P2 2, H3 P3 3, H4 P4 4, H5 P5 5, H6 P6 6, H7 P7 7, H8 P8 8, H9 P9 9);
tuples!(H0 P0 0, H1 P1 1, H2 P2 2, H3 P3 3, H4 P4 4, H5 P5 5, H6 P6 6, H7 P7 7, H8 P8 8, H9 P9 9,
    H10 P10 10);
tuples!(H0 P0 0, H1 P1 1, H2 P2 2, H3 P3 3, H4 P4 4, H5 P5 5, H6 P6 6, H7 P7 7, H8 P8 8, H9 P9 9,
    H10 P10 10, H11 P11 11);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tuple_knows_the_size_of_each_parameter() {
        assert_eq!(<() as KernelArgs>::SIZES, [0; 0]);
        type Args =
            (*const f32, u16, usize, LsaBarrierHandle, MultimemHandle, Team, SignalRange, bool);
        assert_eq!(<Args as KernelArgs>::SIZES, [8, 2, 8, 8, 8, 12, 8, 1]);
    }

    #[test]
    fn what_the_host_reserves_is_passed_as_it_is() {
        fn passes<P: KernelArgs, A: LaunchArgs<P>>(args: A) -> P::Abi {
            args.into_abi()
        }
        let (barriers, signals) = (LsaBarrierHandle::default(), SignalRange { first: 3, count: 4 });
        let team = Team { n_ranks: 4, rank: 1, stride: 1 };
        type Params = (LsaBarrierHandle, SignalRange, MultimemHandle, Team);
        let args = (barriers, signals, MultimemHandle::NULL, team);
        assert_eq!(passes::<Params, _>(args), args);
    }

    #[test]
    fn a_slice_is_its_address_and_its_length() {
        let elements = [1.5_f32, 2.5, 3.5];
        let address = elements.as_ptr().expose_provenance() as u64;
        // SAFETY: the slice is `elements`.
        let (slice, count) = unsafe { <(&[f32], u32)>::from_abi((Slice::new(address, 3), 7)) };
        assert_eq!((slice.as_ptr(), slice, count), (elements.as_ptr(), &elements[..], 7));
    }
}
