//! What `#[kernel]` generates, and what a launch needs of it.
//!
//! A kernel's Rust parameters are device types: `nccl_device::DevComm`, `nccl_device::Window<f32>`, `usize`. A launch passes
//! host values: a `&DevCommResource`, a `&Window<f32>` of the host crate, a number. The meeting point is the parameter's
//! [`KernelParam::Abi`], a plain type of this crate: the device type names it, the host value converts into it by
//! [`IntoArg`]. So the compiler checks a launch although the host crate and the device crate never see each other.

use core::ffi::c_void;

use crate::nccl::{DevComm, Window};

/// A launchable kernel: the zero-sized item that `#[kernel]` leaves on the host under the function's name.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a kernel that was instantiated",
    note = "a generic kernel exists for the types listed in `#[kernel(T = [..])]` only"
)]
pub trait Kernel: Copy + 'static {
    /// Name of the entry point in PTX.
    const NAME: &'static str;
    /// Stem of the source file, which names the PTX module.
    const FILE: &'static str;
    /// The kernel's parameters, as the device sees them.
    type Args: KernelArgs;
}

/// A kernel whose body can run on the host. Only the simulator uses it; a launch never names it, so that a program that
/// launches on GPUs needs no simulator.
pub trait HostKernel: Kernel {
    /// Runs one thread of the kernel.
    ///
    /// # Safety
    ///
    /// The kernel's own contract, and a simulated thread is current.
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

    /// Whether the parameter is a device communicator, which makes the launch check residency and barriers.
    const IS_DEV_COMM: bool = false;

    /// Fails to compile when the two layouts differ, or when the type has no bytes (PTX would drop the parameter and shift
    /// those behind it).
    const LAYOUT: () = {
        assert!(
            size_of::<Self>() == size_of::<Self::Abi>(),
            "a parameter and its Abi have one size"
        );
        assert!(
            align_of::<Self>() == align_of::<Self::Abi>(),
            "a parameter and its Abi have one alignment"
        );
        assert!(size_of::<Self>() != 0, "a kernel parameter has at least one byte");
    };
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

/// A host value that can stand for a kernel parameter whose plain type is `Abi`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be passed where the kernel takes `{Abi}`",
    label = "not what the kernel's parameter takes"
)]
pub trait IntoArg<Abi> {
    /// The bytes that the kernel gets.
    fn into_arg(self) -> Abi;

    /// The device communicator among the arguments, if this is one.
    fn dev_comm(&self) -> Option<&DevComm> {
        None
    }

    /// What stands behind this value and is gone, if so: a launch is then refused.
    fn closed(&self) -> Option<&'static str> {
        None
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
}

/// A tuple of kernel parameters.
pub trait KernelArgs: Copy {
    /// The plain types, as a tuple.
    type Abi: Copy;
    /// Whether one of the parameters is a device communicator.
    const TAKES_DEV_COMM: bool;
    /// How many parameters there are.
    const LEN: usize;

    /// The device's view of the host's bytes.
    fn from_abi(abi: Self::Abi) -> Self;

    /// Calls `f` with the address of each parameter, in order, as `cuLaunchKernel` wants them. The addresses are valid
    /// during the call.
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
    /// The device communicator among the arguments.
    fn dev_comm(&self) -> Option<&DevComm>;
    /// What stands behind one of the arguments and is gone.
    fn closed(&self) -> Option<&'static str>;
}

macro_rules! tuples {
    ($($host:ident $param:ident $index:tt),*) => {
        impl<$($param: KernelParam),*> KernelArgs for ($($param,)*) {
            type Abi = ($($param::Abi,)*);
            const TAKES_DEV_COMM: bool = false $(|| $param::IS_DEV_COMM)*;
            const LEN: usize = 0 $(+ { let _ = $index; 1 })*;

            #[inline]
            #[allow(unused_variables, clippy::unused_unit)]
            fn from_abi(abi: Self::Abi) -> Self {
                $( let () = <$param as KernelParam>::LAYOUT; )*
                // SAFETY: KernelParam promises that the bytes of an Abi are a valid parameter, and LAYOUT checked the size.
                ($( unsafe { core::mem::transmute_copy::<$param::Abi, $param>(&abi.$index) }, )*)
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
            fn dev_comm(&self) -> Option<&DevComm> {
                None $( .or(self.$index.dev_comm()) )*
            }

            #[inline]
            fn closed(&self) -> Option<&'static str> {
                None $( .or(self.$index.closed()) )*
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
tuples!(H0 P0 0, H1 P1 1, H2 P2 2, H3 P3 3, H4 P4 4, H5 P5 5, H6 P6 6, H7 P7 7, H8 P8 8, H9 P9 9, H10 P10 10);
tuples!(H0 P0 0, H1 P1 1, H2 P2 2, H3 P3 3, H4 P4 4, H5 P5 5, H6 P6 6, H7 P7 7, H8 P8 8, H9 P9 9, H10 P10 10,
    H11 P11 11);
