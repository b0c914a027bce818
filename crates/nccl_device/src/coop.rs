//! Who makes a cooperative call.

use core::mem::MaybeUninit;

use crate::raw;

/// A set of threads of one block that makes cooperative calls together.
///
/// NCCL ranks threads by `threadIdx.x` alone, so blocks are one-dimensional; a launch of a kernel that takes a
/// [`DevComm`](crate::DevComm) is refused otherwise.
///
/// NCCL: `ncclCoopAny`.
#[doc(alias = "ncclCoopAny")]
#[derive(Clone, Copy)]
pub struct Coop(pub(crate) raw::CoopAny);

macro_rules! init {
    ($function:ident($($arg:expr),*)) => {{
        let mut coop = MaybeUninit::<raw::CoopAny>::uninit();
        // SAFETY: the function fills the vtable and what its kind of coop uses of the storage.
        unsafe {
            raw::$function(coop.as_mut_ptr() $(, $arg)*);
            Coop(coop.assume_init())
        }
    }};
}

impl Coop {
    /// The calling thread alone. NCCL: `ncclCoopAnyInitThread`.
    #[doc(alias = "ncclCoopAnyInitThread")]
    #[inline(always)]
    #[track_caller]
    pub fn thread() -> Self {
        init!(ncclCoopAnyInitThread())
    }

    /// The calling thread's warp, all 32 lanes. NCCL: `ncclCoopAnyInitWarp`.
    #[doc(alias = "ncclCoopAnyInitWarp")]
    #[inline(always)]
    #[track_caller]
    pub fn warp() -> Self {
        init!(ncclCoopAnyInitWarp())
    }

    /// The lanes of the calling thread's warp whose bits are set in `lane_mask`. NCCL: `ncclCoopAnyInitLanes`.
    #[doc(alias = "ncclCoopAnyInitLanes")]
    #[inline(always)]
    #[track_caller]
    pub fn lanes(lane_mask: u32) -> Self {
        init!(ncclCoopAnyInitLanes(lane_mask))
    }

    /// Warps `first_warp..first_warp + n_warps` of the block. `id`, 0 to 14, names the hardware barrier: spans in use at one
    /// time have different ones. NCCL: `ncclCoopAnyInitWarpSpan`.
    #[doc(alias = "ncclCoopAnyInitWarpSpan")]
    #[inline(always)]
    #[track_caller]
    pub fn warp_span(first_warp: u32, n_warps: u32, id: u32) -> Self {
        debug_assert!(id < 15, "a warp span's id is 0 to 14");
        init!(ncclCoopAnyInitWarpSpan(first_warp as i32, n_warps as i32, id as i32))
    }

    /// All threads of the block. NCCL: `ncclCoopAnyInitCta`.
    #[doc(alias = "ncclCoopAnyInitCta")]
    #[inline(always)]
    #[track_caller]
    pub fn cta() -> Self {
        init!(ncclCoopAnyInitCta())
    }

    /// The calling thread's place in the coop. NCCL: `ncclCoopThreadRank`.
    #[doc(alias = "ncclCoopThreadRank")]
    #[inline(always)]
    #[track_caller]
    pub fn thread_rank(&self) -> u32 {
        // SAFETY: the coop was made by one of NCCL's init functions.
        unsafe { raw::ncclCoopThreadRank(&self.0) as u32 }
    }

    /// Threads of the coop. NCCL: `ncclCoopSize`.
    #[doc(alias = "ncclCoopSize")]
    #[inline(always)]
    #[track_caller]
    pub fn size(&self) -> u32 {
        // SAFETY: the coop was made by one of NCCL's init functions.
        unsafe { raw::ncclCoopSize(&self.0) as u32 }
    }

    /// Waits for every thread of the coop; memory that one wrote before, the others see after. NCCL: `ncclCoopSync`.
    #[doc(alias = "ncclCoopSync")]
    #[inline(always)]
    #[track_caller]
    pub fn sync(&self) {
        // SAFETY: the coop was made by one of NCCL's init functions.
        unsafe { raw::ncclCoopSync(&self.0) }
    }
}
