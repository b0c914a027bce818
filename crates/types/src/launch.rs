//! A launch: a kernel with its arguments and the shape of its grid.

use core::fmt;
use core::marker::PhantomData;
use core::ops::Range;

use crate::args::{ArgInfo, KernelArgs, LaunchArgs};
use crate::kernel::Kernel;

/// Three extents. A single number converts to `x`, with `y` and `z` 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "CUDA's names")]
pub struct Dim3 {
    pub x: u32,
    pub y: u32,
    pub z: u32,
}

impl Dim3 {
    /// Returns the product of the extents.
    #[must_use]
    pub const fn count(self) -> u64 {
        // Extents within the driver's limits do not overflow; other extents saturate, so that
        // their count does not wrap to a small one.
        (self.x as u64).saturating_mul(self.y as u64).saturating_mul(self.z as u64)
    }

    /// Returns the array `[x, y, z]`.
    #[must_use]
    pub const fn to_array(self) -> [u32; 3] {
        [self.x, self.y, self.z]
    }
}

impl From<u32> for Dim3 {
    fn from(x: u32) -> Self {
        Self { x, y: 1, z: 1 }
    }
}

impl From<(u32, u32)> for Dim3 {
    fn from((x, y): (u32, u32)) -> Self {
        Self { x, y, z: 1 }
    }
}

impl From<(u32, u32, u32)> for Dim3 {
    fn from((x, y, z): (u32, u32, u32)) -> Self {
        Self { x, y, z }
    }
}

impl fmt::Display for Dim3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.y, self.z) {
            (1, 1) => write!(f, "{}", self.x),
            _ => write!(f, "{}x{}x{}", self.x, self.y, self.z),
        }
    }
}

/// The shape of a launch: the number of blocks, threads per block, bytes of dynamic shared memory
/// per block, and launch attributes.
///
/// ```
/// use devcomm_types::LaunchConfig;
/// let config = LaunchConfig::new(64, 512).with_dynamic_shared(16 << 10).with_cluster(2);
/// assert_eq!((config.grid.x, config.block.count(), config.cluster), (64, 512, Some(2)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaunchConfig {
    /// Blocks.
    pub grid: Dim3,
    /// Threads per block.
    pub block: Dim3,
    /// Dynamic shared memory per block, in bytes.
    pub dynamic_shared: u32,
    /// Blocks per cluster; by default what the kernel fixes with `#[kernel(cluster = 2)]`, or 1.
    pub cluster: Option<u32>,
    /// Whether the kernel may begin before the previous one of its stream has ended.
    pub dependent: bool,
    /// Whether a kernel that takes a `DevComm` is launched cooperatively; by default it is.
    pub cooperative: bool,
}

impl LaunchConfig {
    /// The initial value of a launch. It has no blocks and no threads, which [`Launch::grid`] and
    /// [`Launch::block`] set.
    const UNSET: Self = Self {
        grid: Dim3 { x: 0, y: 1, z: 1 },
        block: Dim3 { x: 0, y: 1, z: 1 },
        dynamic_shared: 0,
        cluster: None,
        dependent: false,
        cooperative: true,
    };

    /// Returns a launch without dynamic shared memory and launch attributes.
    #[must_use]
    pub fn new(grid: impl Into<Dim3>, block: impl Into<Dim3>) -> Self {
        Self { grid: grid.into(), block: block.into(), ..Self::UNSET }
    }

    /// Sets the dynamic shared memory per block, in bytes.
    #[must_use]
    pub const fn with_dynamic_shared(mut self, bytes: u32) -> Self {
        self.dynamic_shared = bytes;
        self
    }

    /// Sets the blocks per cluster, as [`Launch::cluster`] does.
    #[must_use]
    pub const fn with_cluster(mut self, blocks: u32) -> Self {
        self.cluster = Some(blocks);
        self
    }

    /// Makes it a dependent launch, as [`Launch::dependent`] does.
    #[must_use]
    pub const fn with_dependent(mut self) -> Self {
        self.dependent = true;
        self
    }

    /// Makes the launch of a kernel that takes a `DevComm` one without
    /// `CU_LAUNCH_ATTRIBUTE_COOPERATIVE`.
    ///
    /// This is for a kernel whose blocks need not run at the same time: each block waits only for
    /// what a peer's block of its index, or of a lower one, does before that block waits. A grid
    /// that cannot be co-resident is refused all the same.
    #[must_use]
    pub const fn without_cooperation(mut self) -> Self {
        self.cooperative = false;
        self
    }
}

/// Whether a launch needs `unsafe`: [`Safe`] or [`Unsafe`].
pub trait Safety: sealed::Sealed + 'static {
    /// Whether a launch is safe.
    const SAFE: bool;
}

/// The launch of a kernel that is a safe function: with any arguments, the kernel writes only
/// memory that the arguments refer to.
#[derive(Clone, Copy, Debug)]
pub enum Safe {}

/// The launch of a kernel that is an `unsafe fn`, whose documentation states the contract of a
/// launch, or that takes a slice, whose elements nothing may write meanwhile.
#[derive(Clone, Copy, Debug)]
pub enum Unsafe {}

impl Safety for Safe {
    const SAFE: bool = true;
}

impl Safety for Unsafe {
    const SAFE: bool = false;
}

/// [`Safe`] if a condition of types holds, else [`Unsafe`].
#[doc(hidden)]
pub trait SafeIf<const CONDITION: bool> {
    /// [`Safe`] or [`Unsafe`].
    type Safety: Safety;
}

impl SafeIf<true> for () {
    type Safety = Safe;
}

impl SafeIf<false> for () {
    type Safety = Unsafe;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Safe {}
    impl Sealed for super::Unsafe {}
    impl Sealed for super::Set {}
}

/// A part of a launch's shape that is set.
#[derive(Clone, Copy, Debug)]
pub enum Set {}

/// A part of a launch's shape that is not set yet.
#[derive(Clone, Copy, Debug)]
pub enum Unset {}

/// [`Set`], for the grid of a launch.
#[diagnostic::on_unimplemented(
    message = "the launch has no grid",
    label = "call `.grid(blocks)` before this"
)]
pub trait HasGrid: sealed::Sealed {}

/// [`Set`], for the blocks of a launch.
#[diagnostic::on_unimplemented(
    message = "the launch has no block size",
    label = "call `.block(threads)` before this"
)]
pub trait HasBlock: sealed::Sealed {}

impl HasGrid for Set {}
impl HasBlock for Set {}

/// Arguments with the functions that convert them. [`Launch::new`] selects these functions, so that
/// the compiler reports an argument of a wrong type there, and not again at `launch`.
struct Converted<K: Kernel, A> {
    args: A,
    into_abi: fn(A) -> <K::Args as KernelArgs>::Abi,
    info: fn(&A) -> ArgInfo<'_>,
    windows: fn(&A, &mut dyn FnMut(Range<u64>)),
}

// SAFETY: the conversion is that of `A`, whose implementation keeps this contract.
unsafe impl<K: Kernel, A> LaunchArgs<K::Args> for Converted<K, A> {
    fn into_abi(self) -> <K::Args as KernelArgs>::Abi {
        (self.into_abi)(self.args)
    }

    fn info(&self) -> ArgInfo<'_> {
        (self.info)(&self.args)
    }

    fn windows(&self, see: &mut dyn FnMut(Range<u64>)) {
        (self.windows)(&self.args, see);
    }
}

impl<K: Kernel, A: Clone> Clone for Converted<K, A> {
    fn clone(&self) -> Self {
        Self { args: self.args.clone(), ..*self }
    }
}

impl<K: Kernel, A: Copy> Copy for Converted<K, A> {}

/// Kernel `K` with the arguments `A`, before it is launched: what `my_kernel::args(..)` returns.
///
/// `my_kernel::args(&dev, &window, 7).grid(64).block(128).launch(&stream)`. `G` and `B` say whether
/// grid and block are [`Set`], as they must be.
#[must_use = "nothing runs before `launch`"]
pub struct Launch<K: Kernel, A, S = Unsafe, G = Set, B = Set> {
    args: Converted<K, A>,
    config: LaunchConfig,
    state: PhantomData<(S, G, B)>,
}

impl<K: Kernel, A: Clone, S, G, B> Clone for Launch<K, A, S, G, B> {
    fn clone(&self) -> Self {
        Self { args: self.args.clone(), ..*self }
    }
}

impl<K: Kernel, A: Copy, S, G, B> Copy for Launch<K, A, S, G, B> {}

impl<K: Kernel, A, S, G, B> fmt::Debug for Launch<K, A, S, G, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LaunchConfig { grid, block, dynamic_shared, cluster, dependent, .. } = self.config;
        write!(f, "Launch({}, {grid} x {block}, {dynamic_shared} B", K::NAME)?;
        if let Some(cluster) = cluster {
            write!(f, ", clusters of {cluster}")?;
        }
        f.write_str(if dependent { ", dependent)" } else { ")" })
    }
}

impl<K: Kernel, A: LaunchArgs<K::Args>, S> Launch<K, A, S, Unset, Unset> {
    /// Wraps the arguments; called by a kernel's `args` and by [`Kernel::with_args`].
    #[doc(hidden)]
    pub const fn new(args: A) -> Self {
        let args = Converted { args, into_abi: A::into_abi, info: A::info, windows: A::windows };
        Self { args, config: LaunchConfig::UNSET, state: PhantomData }
    }
}

impl<K: Kernel, A, S, G, B> Launch<K, A, S, G, B> {
    /// Returns the launch with another configuration, and with other types for its state.
    fn with<S2, G2, B2>(self, config: LaunchConfig) -> Launch<K, A, S2, G2, B2> {
        Launch { args: self.args, config, state: PhantomData }
    }

    /// Returns the same launch as an `unsafe` one, for code that launches safe and unsafe kernels.
    pub fn into_unsafe(self) -> Launch<K, A, Unsafe, G, B> {
        let config = self.config;
        self.with(config)
    }

    /// Sets the number of blocks: a number, or up to three extents.
    pub fn grid(self, blocks: impl Into<Dim3>) -> Launch<K, A, S, Set, B> {
        let config = LaunchConfig { grid: blocks.into(), ..self.config };
        self.with(config)
    }

    /// Sets the threads per block: a number, or up to three extents.
    pub fn block(self, threads: impl Into<Dim3>) -> Launch<K, A, S, G, Set> {
        let config = LaunchConfig { block: threads.into(), ..self.config };
        self.with(config)
    }

    /// Sets the dynamic shared memory per block, in bytes; 0 by default.
    pub const fn dynamic_shared(mut self, bytes: u32) -> Self {
        self.config.dynamic_shared = bytes;
        self
    }

    /// Sets the number of blocks per cluster, 1 to 8, for a kernel that does not fix it.
    ///
    /// Consecutive blocks in x form a cluster: they run at the same time, on neighbouring
    /// multiprocessors (`cuda_std::cluster`). The grid is a multiple of it in x. Needs sm_90. CUDA:
    /// `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`.
    pub const fn cluster(mut self, blocks: u32) -> Self {
        self.config = self.config.with_cluster(blocks);
        self
    }

    /// Makes it a dependent launch: the kernel may begin before the previous one of its stream has
    /// ended.
    ///
    /// It begins once every block of the previous kernel has called `cuda_std::grid::launch_next`
    /// or ended. So it calls `cuda_std::grid::wait_for_previous` before it accesses memory that the
    /// previous kernel writes, and before it uses barriers of a device communicator that both use:
    /// without the call nothing orders the two kernels. It works in stream capture too, and needs
    /// sm_90. CUDA: `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
    pub const fn dependent(mut self) -> Self {
        self.config = self.config.with_dependent();
        self
    }

    /// Sets the whole shape.
    pub fn config(self, config: LaunchConfig) -> Launch<K, A, S> {
        self.with(config)
    }
}

impl<K: Kernel, A, G, B> Launch<K, A, Unsafe, G, B> {
    /// Launches the kernel on a stream.
    ///
    /// A kernel that takes a `DevComm` is launched cooperatively, unless its configuration says
    /// otherwise: the launch is refused unless all blocks can be resident at once. A GIN kernel has
    /// an entry point for each back end; the one for the device communicator's back end is
    /// launched. What the arguments refer to may be dropped right after the launch: dropping waits
    /// for this rank's streams.
    ///
    /// # Errors
    ///
    /// A refused launch, a lost rank, a driver error. The stream reports errors of the kernel.
    ///
    /// # Safety
    ///
    /// - The kernel's own contract holds for these arguments, and every address among them is valid
    ///   on this GPU until the kernel has ended; for a captured launch, until the graph is closed.
    /// - For a kernel that communicates: every rank launches it with the same grid and block and
    ///   the same device communicator and windows, no other kernel uses the same device
    ///   communicator at the same time, and no rank drops a window or device communicator before
    ///   all ranks' kernels have ended with it (a barrier at the end of the kernel ensures that).
    pub unsafe fn launch<T: LaunchTarget>(self, target: &T) -> Result<(), T::Error>
    where
        G: HasGrid,
        B: HasBlock,
    {
        // SAFETY: the caller keeps the kernel's contract, and the target's.
        unsafe { target.launch_kernel::<K, _>(self.config, self.args, false) }
    }
}

impl<K: Kernel<Safety = Safe>, A, G, B> Launch<K, A, Safe, G, B> {
    /// Launches the kernel on a stream, as [`Launch::launch`] does.
    ///
    /// This is safe, since the kernel is. It also refuses windows of a communicator other than the
    /// device communicator's, windows whose length on the other ranks is not known and, unless the
    /// kernel is [`IN_PLACE`](Kernel::IN_PLACE), the same memory in two windows. If the ranks'
    /// launches differ, or two kernels use one device communicator at the same time, the kernel may
    /// wait until the host aborts it, and its results are undefined.
    ///
    /// # Errors
    ///
    /// The same as for an unsafe kernel.
    pub fn launch<T: LaunchTarget>(self, target: &T) -> Result<(), T::Error>
    where
        G: HasGrid,
        B: HasBlock,
    {
        // SAFETY: the kernel is a safe function, so it has no contract. The target checks what it
        // trusts of the arguments, and keeps it until the kernel has ended.
        unsafe { target.launch_kernel::<K, _>(self.config, self.args, true) }
    }
}

/// A target of launches: a stream of the host crate, alone or with a chosen set of modules.
pub trait LaunchTarget {
    /// The error of a failed launch.
    type Error;

    /// Launches `K`, as [`Launch::launch`] does. With `safe` it refuses windows of another
    /// communicator, of unknown length, or that overlap.
    ///
    /// # Errors
    ///
    /// The errors are those of [`Launch::launch`].
    ///
    /// # Safety
    ///
    /// The contract is that of [`Launch::launch`].
    unsafe fn launch_kernel<K: Kernel, A: LaunchArgs<K::Args>>(
        &self,
        config: LaunchConfig,
        args: A,
        safe: bool,
    ) -> Result<(), Self::Error>;
}
