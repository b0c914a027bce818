//! The traits of kernels (`#[kernel]` implements them) and of their parameters.
//!
//! A kernel's Rust parameters are device types: `nccl_device::DevComm`, `nccl_device::Window<f32>`,
//! `usize`. A launch passes host values: a `&DevCommResource`, a `&Window<f32>` of the host crate,
//! a number. Both refer to the parameter's [`KernelParam::Abi`], a plain type of this crate: the
//! device type names it, and [`IntoArg`](crate::IntoArg) converts the host value into it. So the
//! compiler checks a launch although neither the host crate nor the device crate depends on the
//! other.

use core::fmt;
use core::marker::PhantomData;

use crate::args::{KernelArgs, LaunchArgs};
use crate::gin::{CounterRange, SignalRange};
use crate::host_body::HostBody;
use crate::launch::{Dim3, Launch, Safety, Unsafe, Unset};
use crate::nccl::{
    CftBarrierHandle, GinBarrierHandle, LlA2aHandle, LsaBarrierHandle, MultimemHandle,
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
    /// Whether a safe launch may pass the same memory in several windows.
    const IN_PLACE: bool = false;
    /// The package that the kernel is part of.
    const PACKAGE: &'static str;
    /// Stem of the source file, which names the PTX module.
    const FILE: &'static str;
    /// The kernel's parameters, as the device sees them.
    type Args: KernelArgs;
    /// Whether a launch needs `unsafe`: [`Safe`](crate::Safe), or [`Unsafe`] for a kernel that is
    /// an `unsafe fn` or takes a slice.
    type Safety: Safety;
    /// The function that a simulated GPU runs; `None` for a kernel that exists only as machine
    /// code. Only a launch on a simulated GPU reads it.
    const BODY: Option<HostBody> = None;

    /// Returns the kernel with a tuple of arguments, for code that is generic over kernels. The
    /// `args` that `#[kernel]` generates names the parameters, and its launch is safe if the kernel
    /// is.
    fn with_args<A: LaunchArgs<Self::Args>>(args: A) -> Launch<Self, A, Unsafe, Unset, Unset> {
        Launch::new(args)
    }

    /// Checks what the kernel requires of a launch: the conditions of `#[kernel(requires(..))]` on
    /// the grid, a block and the arguments.
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
    /// The values of the two sides, if the condition compares integers.
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

    /// Whether the parameter stays in the launch's parameter memory: [`GridConstant`].
    #[doc(hidden)]
    const STAYS: bool = false;

    /// The memory that the parameter refers to, for the simulator's reports.
    #[doc(hidden)]
    const MEMORY: &'static [MemoryRef] = &[];

    /// How the entry point takes the parameter: [`BY_VALUE`], or by reference to the launch's
    /// parameter memory. By value, a struct of more than two 8-byte registers would be copied to
    /// the stack as soon as its address is needed.
    #[doc(hidden)]
    const ENTRY: u8 = if size_of::<Self>() > 16 { COPIED } else { BY_VALUE };

    /// Fails to compile when the layouts of the type and of `Abi` differ, or when the type has no
    /// bytes (PTX would drop the parameter and shift those after it).
    const LAYOUT: () = {
        // A `KEPT` parameter is a reference to its Abi.
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
    /// The offset in the parameter, in bytes.
    pub offset: usize,
    /// The size of the memory's elements in bytes.
    pub element: usize,
}

impl MemoryRef {
    /// Returns the reference with which a parameter starts, to memory of elements of type `T`.
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
/// The object that the bytes refer to exists: the memory of a slice, the window of a handle.
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

/// The way in which a kernel's entry point takes a parameter of type `T`. It has no values, and
/// exists for its implementations of [`TakeParam`].
#[doc(hidden)]
pub enum Taken<T, const ENTRY: u8> {
    /// Uses the type parameter; cannot be made.
    #[doc(hidden)]
    __(core::convert::Infallible, core::marker::PhantomData<T>),
}

/// The conversion of [`Taken`], from what the entry point takes into the kernel's parameter.
#[doc(hidden)]
pub trait TakeParam {
    /// The parameter.
    type Param;
    /// The type in the entry point's signature. A reference is to the launch's parameter memory,
    /// which exists as long as the kernel runs.
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
/// The contract is that of [`param`], unless `HOLDS_SLICE`.
#[doc(hidden)]
#[inline]
pub const unsafe fn seen<P: SeenAs<HOLDS_SLICE>, const HOLDS_SLICE: bool>(abi: P::Abi) -> P::Value {
    // SAFETY: the value is the Abi itself or, without a slice, a parameter, for which the bytes are
    // valid by KernelParam's promise.
    unsafe { core::mem::transmute_copy::<P::Abi, P::Value>(&abi) }
}

/// A type whose values the conditions of `#[kernel(requires(..))]` compare.
#[doc(hidden)]
pub trait Compared {
    /// The least and the greatest value of an integer of at most 64 bits, or `i128`.
    const RANGE: Option<(i128, i128)> = None;
}

macro_rules! compared {
    ($($integer:ident)*; $($other:ident)*) => {
        $( impl Compared for $integer {
            const RANGE: Option<(i128, i128)> =
                Some(($integer::MIN as i128, $integer::MAX as i128));
        } )*
        $( impl Compared for $other {} )*
    };
}
compared!(i8 i16 i32 i64 i128 isize u8 u16 u32 u64 usize; bool char f32 f64 u128);

/// Returns the [`Compared::RANGE`] of a value's type.
#[doc(hidden)]
pub const fn range_of<T: Compared>(_: &T) -> Option<(i128, i128)> {
    T::RANGE
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
    const STAYS: bool = true;
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

// SAFETY: rustc represents `&[T]` as address and length, as a test in `args` checks. The contract
// of the launch is that the elements exist, and that nothing writes them while the kernel runs.
unsafe impl<T: Copy + 'static> KernelParam for &[T] {
    type Abi = Slice<T>;
    const HOLDS_SLICE: bool = true;
    const MEMORY: &'static [MemoryRef] = &[MemoryRef::to::<T>()];
}
