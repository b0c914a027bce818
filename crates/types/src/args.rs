//! The traits of launch arguments: host values for a kernel's parameters, one or all of them.

use core::ffi::c_void;
use core::ops::Range;

use crate::kernel::{KernelParam, MemoryRef, Slice, param};
use crate::nccl::{DevComm, Window};

/// A host value that a launch can pass for a kernel parameter whose [`KernelParam::Abi`] is `Abi`.
///
/// # Safety
///
/// A window or device communicator that the bytes refer to is open and as long as they say, unless
/// `info` says that it is closed or unchecked. It stays so until the kernel has ended, even if the
/// value is dropped after the launch. `windows` passes the memory of every window.
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

    /// Calls `see` with the addresses of this rank's part of each window in the argument.
    fn windows(&self, see: &mut dyn FnMut(Range<u64>)) {
        _ = see;
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

/// The properties of one argument or of all arguments that a launch checks.
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
    /// Whether several device communicators are among them.
    pub several_dev_comms: bool,
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
        let several = match (self.dev_comm, other.dev_comm) {
            (Some(a), Some(b)) => !core::ptr::eq(a, b),
            _ => false,
        };
        Self {
            several_dev_comms: several || self.several_dev_comms || other.several_dev_comms,
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
    /// The object that the bytes refer to exists: the memory of a slice, the window of a handle.
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
/// The contract is that of [`IntoArg`], for each of the values.
#[diagnostic::on_unimplemented(
    message = "these arguments do not fit the kernel's parameters `{P}`",
    label = "not a tuple with one argument for each parameter"
)]
pub unsafe trait LaunchArgs<P: KernelArgs> {
    /// Returns the bytes that the kernel gets.
    fn into_abi(self) -> P::Abi;
    /// Returns what a launch checks of the arguments.
    fn info(&self) -> ArgInfo<'_>;
    /// Calls `see` with the addresses of this rank's part of each window in the arguments.
    fn windows(&self, see: &mut dyn FnMut(Range<u64>));
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

        // SAFETY: each value is converted for its own parameter by `IntoArg`, whose contract the
        // implementations uphold.
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

            #[inline]
            #[allow(unused_variables)]
            fn windows(&self, see: &mut dyn FnMut(Range<u64>)) {
                $( self.$index.windows(see); )*
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
    use crate::nccl::{LsaBarrierHandle, MultimemHandle};
    use crate::{SignalRange, Team};

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
