//! What `#[kernel]` generates, and what a launch needs of it.
//!
//! A kernel's Rust parameters are device types: `nccl_device::DevComm`, `nccl_device::Window<f32>`,
//! `usize`. A launch passes host values: a `&DevCommResource`, a `&Window<f32>` of the host crate,
//! a number. The meeting point is the parameter's [`KernelParam::Abi`], a plain type of this crate:
//! the device type names it, the host value converts into it by [`IntoArg`]. So the compiler checks
//! a launch although the host crate and the device crate never see each other.

use core::ffi::c_void;
use core::fmt;
use core::marker::PhantomData;

use crate::gin::{CounterRange, SignalRange};
use crate::host_body::HostBody;
use crate::launch::{Launch, Safety};
use crate::nccl::{
    CftBarrierHandle, DevComm, GinBarrierHandle, LlA2aHandle, LsaBarrierHandle, MultimemHandle,
    Window,
};
use crate::team::Team;

/// A launchable kernel: the type that `#[kernel]` makes under the function's name. It has no
/// values.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a kernel, or not an instance of one",
    note = "a kernel is a type of its function's name, such as `my_kernel` or `my_kernel<f32>`",
    note = "a generic kernel exists for the types listed in `#[kernel(T = [..])]` only"
)]
pub trait Kernel: Sized + 'static {
    /// Name of the entry point in PTX; of a kernel for GIN, what the names of its entries begin
    /// with.
    const NAME: &'static str;
    /// Whether it is compiled once for each back end of GIN: the entry for one is `NAME`, an
    /// underscore and [`GinType::suffix`](crate::GinType::suffix).
    const GIN: bool = false;
    /// The package that the kernel is part of.
    const PACKAGE: &'static str;
    /// Stem of the source file, which names the PTX module.
    const FILE: &'static str;
    /// The kernel's parameters, as the device sees them.
    type Args: KernelArgs;
    /// Whether a launch needs `unsafe`: [`Safe`](crate::Safe) or [`Unsafe`](crate::Unsafe), as the
    /// function that it was written as.
    type Safety: Safety;
    /// What a simulated GPU runs; `None` for a kernel that exists as machine code alone. Only a
    /// launch on a simulated machine looks at it.
    const BODY: Option<HostBody> = None;

    /// The kernel with a tuple of arguments, for code that is generic over kernels. A kernel's own
    /// `args` names the parameters, and knows whether the launch is safe.
    fn with_args<A: LaunchArgs<Self::Args>>(args: A) -> Launch<Self, A> {
        Launch::new(args)
    }

    /// What the kernel requires of its arguments: the conditions of `#[kernel(requires(..))]`.
    ///
    /// # Errors
    ///
    /// The first that does not hold.
    fn check(args: &<Self::Args as KernelArgs>::Abi) -> Result<(), Unmet> {
        let _ = args;
        Ok(())
    }
}

/// A condition on a kernel's arguments that does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unmet {
    /// The condition, as in the source.
    pub condition: &'static str,
    /// The two sides of a comparison.
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
    /// The kernel's own contract, and a simulated thread is current.
    unsafe fn call(args: Self::Args);
}

/// An instance of a generic kernel, which the kernel's function calls.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "the kernel is not instantiated for these types",
    note = "a generic kernel exists for the types listed in `#[kernel(T = [..])]` only"
)]
pub trait Body {
    /// The parameters.
    type Args;
    /// Runs it.
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
/// `Self` and `Abi` have one layout, and the bytes of an `Abi` are a valid `Self`.
#[diagnostic::on_unimplemented(message = "`{Self}` cannot be a kernel parameter")]
pub unsafe trait KernelParam: Copy {
    /// The plain type that the host fills.
    type Abi: Copy + 'static;

    /// Whether the parameter is a device communicator, which makes the launch check residency and
    /// barriers.
    const IS_DEV_COMM: bool = false;

    /// How an entry takes it: [`BY_VALUE`], or as a reference to where the launch put it: a struct
    /// that does not fit two registers would be copied to the stack as soon as its address is
    /// needed.
    #[doc(hidden)]
    const ENTRY: u8 = if size_of::<Self>() > 16 { COPIED } else { BY_VALUE };

    /// Fails to compile when the two layouts differ, or when the type has no bytes (PTX would drop
    /// the parameter and shift those behind it).
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

/// The parameter that a launch's bytes are.
///
/// # Safety
///
/// What the bytes stand for is there.
#[doc(hidden)]
#[inline]
pub unsafe fn param<P: KernelParam>(abi: P::Abi) -> P {
    let () = P::LAYOUT;
    // SAFETY: KernelParam promises that the bytes of an Abi are a valid parameter, and LAYOUT
    // checked the size.
    unsafe { core::mem::transmute_copy::<P::Abi, P>(&abi) }
}

/// An entry takes the parameter as it is.
#[doc(hidden)]
pub const BY_VALUE: u8 = 0;
/// An entry takes a reference, of which the kernel gets the value.
#[doc(hidden)]
pub const COPIED: u8 = 1;
/// An entry takes a reference, which is all that the kernel gets: [`GridConstant`].
#[doc(hidden)]
pub const KEPT: u8 = 2;

/// How the entry of a kernel takes a parameter.
#[doc(hidden)]
pub enum Taken<T, const ENTRY: u8> {
    #[doc(hidden)]
    __(core::convert::Infallible, core::marker::PhantomData<T>),
}

/// [`Taken`], resolved.
#[doc(hidden)]
pub trait TakeParam {
    /// The parameter.
    type Param;
    /// What the entry has in its signature.
    type Entry;
    /// The parameter of what the entry got.
    fn take(entry: Self::Entry) -> Self::Param;
}

impl<T> TakeParam for Taken<T, BY_VALUE> {
    type Param = T;
    type Entry = T;
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn take(entry: T) -> T {
        entry
    }
}

impl<T: Copy + 'static> TakeParam for Taken<T, COPIED> {
    type Param = T;
    type Entry = &'static T;
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn take(entry: &'static T) -> T {
        *entry
    }
}

/// A parameter that stays where the launch put it, in constant memory: for what an instruction
/// wants the address of there, such as a [`TensorMap`](crate::TensorMap). The host passes a `T`.
/// CUDA: `__grid_constant__`.
#[doc(alias = "__grid_constant__")]
#[derive(Clone, Copy)]
pub struct GridConstant<T: 'static>(Kept<T>);

#[cfg(target_arch = "nvptx64")]
type Kept<T> = &'static T;
#[cfg(not(target_arch = "nvptx64"))]
type Kept<T> = T;

// SAFETY: on the host, where a launch's bytes become a parameter, the two are one; a GPU's entry
// gets a reference to the bytes.
unsafe impl<T: KernelParam<Abi = T> + 'static> KernelParam for GridConstant<T> {
    type Abi = T;
    const ENTRY: u8 = if cfg!(target_arch = "nvptx64") { KEPT } else { BY_VALUE };
}

#[cfg(target_arch = "nvptx64")]
impl<T: 'static> TakeParam for Taken<GridConstant<T>, KEPT> {
    type Param = GridConstant<T>;
    type Entry = &'static T;
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn take(entry: &'static T) -> GridConstant<T> {
        GridConstant(entry)
    }
}

impl<T: 'static> core::ops::Deref for GridConstant<T> {
    type Target = T;

    #[cfg(target_arch = "nvptx64")]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
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
        // SAFETY: one type, one layout.
        unsafe impl KernelParam for $type {
            type Abi = $type;
        }
    )* };
}
plain_params!(u8, i8, u16, i16, u32, i32, u64, i64, usize, isize, f32, f64, half::f16, half::bf16);
// What the host has reserved for a kernel.
plain_params!(LsaBarrierHandle, GinBarrierHandle, CftBarrierHandle, LlA2aHandle, MultimemHandle);
plain_params!(SignalRange, CounterRange, Team);

// SAFETY: a bool made by the host is 0 or 1.
unsafe impl KernelParam for bool {
    type Abi = bool;
}

// SAFETY: a device address is 8 bytes on both sides.
unsafe impl<T: 'static> KernelParam for *const T {
    type Abi = u64;
}

// SAFETY: as above.
unsafe impl<T: 'static> KernelParam for *mut T {
    type Abi = u64;
}

/// A slice of device memory, as a launch passes it: the plain type of a kernel's `&[T]`.
#[repr(C)]
pub struct Slice<T> {
    /// Device address of the first element.
    pub address: u64,
    /// Elements.
    pub len: usize,
    element: PhantomData<*const T>,
}

impl<T> Slice<T> {
    /// `len` elements from the device address `address` on, which is aligned to them. It is not 0,
    /// also for no elements.
    #[must_use]
    pub const fn new(address: u64, len: usize) -> Self {
        Self { address, len, element: PhantomData }
    }
}

impl<T> Slice<T> {
    /// The number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
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

// SAFETY: rustc lays a reference to a slice out as address and length, as a test here checks. That
// the elements exist, and that nobody writes them while the kernel runs, is the contract of the
// launch.
unsafe impl<T: Copy + 'static> KernelParam for &[T] {
    type Abi = Slice<T>;
}

/// A host value that can stand for a kernel parameter whose plain type is `Abi`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be passed where the kernel takes `{Abi}`",
    label = "not what the kernel's parameter takes"
)]
pub trait IntoArg<Abi> {
    /// The bytes that the kernel gets.
    fn into_arg(self) -> Abi;

    /// What a launch checks of it.
    fn info(&self) -> ArgInfo<'_> {
        ArgInfo::default()
    }
}

/// A host value for a kernel's parameter `P`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be passed where the kernel takes `{P}`",
    label = "not what the kernel's parameter takes"
)]
pub trait Arg<P: KernelParam>: IntoArg<P::Abi> {}

#[diagnostic::do_not_recommend]
impl<P: KernelParam, A: IntoArg<P::Abi>> Arg<P> for A {}

/// What a launch checks of an argument, or of all of them.
#[derive(Clone, Copy, Debug, Default)]
pub struct ArgInfo<'a> {
    /// The device communicator.
    pub dev_comm: Option<&'a DevComm>,
    /// What is closed, or not made yet.
    pub closed: Option<&'static str>,
    /// The communicator that a window or device communicator belongs to, as a number of the host's.
    pub communicator: Option<u64>,
    /// Windows and device communicators of more than one communicator.
    pub mixed: bool,
    /// A window whose length the host cannot check: a bare handle, or one whose ranks could not
    /// exchange their lengths. A safe kernel is not launched with it.
    pub unchecked: bool,
}

impl<'a> ArgInfo<'a> {
    /// Of both.
    #[must_use]
    pub fn and(self, other: ArgInfo<'a>) -> Self {
        let mixed = match (self.communicator, other.communicator) {
            (Some(one), Some(other)) => one != other,
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

impl<T: KernelParam<Abi = T>> IntoArg<T> for T {
    #[inline]
    fn into_arg(self) -> T {
        self
    }
}

impl<T: 'static> IntoArg<Window<T>> for Window<T> {
    #[inline]
    fn into_arg(self) -> Window<T> {
        self
    }

    fn info(&self) -> ArgInfo<'_> {
        ArgInfo { unchecked: true, ..ArgInfo::default() }
    }
}

impl<T: 'static> IntoArg<Slice<T>> for Slice<T> {
    #[inline]
    fn into_arg(self) -> Slice<T> {
        self
    }
}

/// A tuple of kernel parameters.
pub trait KernelArgs: Copy {
    /// The plain types, as a tuple.
    type Abi: Copy;
    /// Whether one of the parameters is a device communicator.
    const TAKES_DEV_COMM: bool;
    /// The size of each parameter in bytes, in order.
    const SIZES: &'static [usize];

    /// The device's view of the host's bytes.
    ///
    /// # Safety
    ///
    /// What the bytes stand for is there: the memory behind a slice, the window behind a handle.
    unsafe fn from_abi(abi: Self::Abi) -> Self;

    /// The parameters at these addresses, one each in order.
    ///
    /// # Safety
    ///
    /// There is an address for each parameter, where a value of its plain type is.
    unsafe fn read(addresses: &[*const c_void]) -> Self::Abi;

    /// Calls `f` with the address of each parameter, in order, as `cuLaunchKernel` wants them. The
    /// addresses are valid during the call.
    fn with_pointers<R>(abi: &Self::Abi, f: impl FnOnce(&mut [*mut c_void]) -> R) -> R;
}

/// A tuple of host values that fits the parameters `P`.
#[diagnostic::on_unimplemented(
    message = "these arguments do not fit the kernel's parameters `{P}`",
    label = "not a tuple with one argument for each parameter"
)]
pub trait LaunchArgs<P: KernelArgs> {
    /// The bytes that the kernel gets.
    fn into_abi(self) -> P::Abi;
    /// What a launch checks of them.
    fn info(&self) -> ArgInfo<'_>;
}

macro_rules! tuples {
    ($($host:ident $param:ident $index:tt),*) => {
        impl<$($param: KernelParam),*> KernelArgs for ($($param,)*) {
            type Abi = ($($param::Abi,)*);
            const TAKES_DEV_COMM: bool = false $(|| $param::IS_DEV_COMM)*;
            const SIZES: &'static [usize] = &[$( size_of::<$param::Abi>() ),*];

            #[inline]
            #[allow(unused_variables, clippy::unused_unit)]
            unsafe fn from_abi(abi: Self::Abi) -> Self {
                // SAFETY: the caller's.
                ($( unsafe { param::<$param>(abi.$index) }, )*)
            }

            #[allow(unused_variables, clippy::unused_unit)]
            unsafe fn read(addresses: &[*const c_void]) -> Self::Abi {
                // SAFETY: the caller's.
                ($( unsafe { addresses[$index].cast::<$param::Abi>().read() }, )*)
            }

            #[inline]
            #[allow(unused_variables)]
            fn with_pointers<R>(abi: &Self::Abi, f: impl FnOnce(&mut [*mut c_void]) -> R) -> R {
                f(&mut [$( (&raw const abi.$index).cast_mut().cast::<c_void>() ),*])
            }
        }

        impl<$($host,)* $($param),*> LaunchArgs<($($param,)*)> for ($($host,)*)
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
        // SAFETY: the elements are there.
        let (slice, count) = unsafe { <(&[f32], u32)>::from_abi((Slice::new(address, 3), 7)) };
        assert_eq!((slice.as_ptr(), slice, count), (elements.as_ptr(), &elements[..], 7));
    }
}
