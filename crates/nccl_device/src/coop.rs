//! Coops: the sets of threads that make cooperative calls.

use crate::prelude::*;
use core::mem::MaybeUninit;

use cuda_std::strided::{Index, Strided};

/// A set of threads of one block that makes cooperative calls together.
///
/// NCCL ranks threads by `threadIdx.x` only, so blocks have one dimension, and so do grids: the
/// launch of a kernel that takes a [`DevComm`](crate::DevComm) is refused otherwise.
///
/// NCCL: `ncclCoopAny`.
#[doc(alias = "ncclCoopAny")]
#[derive(Clone, Copy)]
pub struct Coop {
    any: raw::CoopAny,
    kind: Kind,
}

/// The kind of a coop, which NCCL's struct expresses only as a vtable. By the kind this crate
/// selects instructions without an indirect call.
#[derive(Clone, Copy)]
enum Kind {
    Thread,
    Lanes(u32),
    Span { id: u32, first_warp: u32, n_warps: u32 },
    Cta,
}

macro_rules! init {
    ($kind:expr, $function:ident($($arg:expr),*)) => {{
        let mut coop = MaybeUninit::<raw::CoopAny>::uninit();
        // SAFETY: the function initializes the vtable and the storage that its kind of coop uses.
        unsafe {
            raw::$function(coop.as_mut_ptr() $(, $arg)*);
            Coop { any: coop.assume_init(), kind: $kind }
        }
    }};
}

#[track_callers]
impl Coop {
    /// Returns a coop of the calling thread alone. NCCL: `ncclCoopAnyInitThread`.
    #[doc(alias = "ncclCoopAnyInitThread")]
    pub fn thread() -> Self {
        init!(Kind::Thread, ncclCoopAnyInitThread())
    }

    /// Returns the calling thread's warp, all 32 lanes. NCCL: `ncclCoopAnyInitWarp`.
    #[doc(alias = "ncclCoopAnyInitWarp")]
    pub fn warp() -> Self {
        init!(Kind::Lanes(u32::MAX), ncclCoopAnyInitWarp())
    }

    /// Returns the lanes of the calling thread's warp whose bits are set in `lane_mask`, one of
    /// which is the thread's own. NCCL: `ncclCoopAnyInitLanes`.
    #[doc(alias = "ncclCoopAnyInitLanes")]
    pub fn lanes(lane_mask: u32) -> Self {
        debug_assert!(lane_mask >> warp::lane_id() & 1 == 1, "the thread is not in the coop");
        init!(Kind::Lanes(lane_mask), ncclCoopAnyInitLanes(lane_mask))
    }

    /// Returns warps `first_warp..first_warp + n_warps` of the block. `id`, 0 to 14, selects named
    /// barrier `id + 1`: spans in use at the same time need different ids. NCCL:
    /// `ncclCoopAnyInitWarpSpan`.
    #[doc(alias = "ncclCoopAnyInitWarpSpan")]
    pub fn warp_span(first_warp: u32, n_warps: u32, id: u32) -> Self {
        debug_assert!(id < 15, "a warp span's id is 0 to 14");
        let kind = Kind::Span { id, first_warp, n_warps };
        init!(kind, ncclCoopAnyInitWarpSpan(first_warp as i32, n_warps as i32, id as i32))
    }

    /// Returns all threads of the block. NCCL: `ncclCoopAnyInitCta`.
    #[doc(alias = "ncclCoopAnyInitCta")]
    pub fn cta() -> Self {
        init!(Kind::Cta, ncclCoopAnyInitCta())
    }

    /// Returns the calling thread's rank in the coop. NCCL: `ncclCoopThreadRank`.
    #[doc(alias = "ncclCoopThreadRank")]
    pub fn thread_rank(&self) -> u32 {
        match self.kind {
            Kind::Thread => 0,
            Kind::Lanes(u32::MAX) => warp::lane_id(),
            Kind::Lanes(mask) => (mask & ((1 << warp::lane_id()) - 1)).count_ones(),
            Kind::Span { first_warp, n_warps, .. } => {
                let rank = thread::thread_idx_x().wrapping_sub(first_warp * warp::WARP_SIZE);
                debug_assert!(rank < n_warps * warp::WARP_SIZE, "the thread is not in the coop");
                rank
            }
            Kind::Cta => thread::thread_idx_x(),
        }
    }

    /// Returns the number of threads in the coop. NCCL: `ncclCoopSize`.
    #[doc(alias = "ncclCoopSize")]
    pub fn size(&self) -> u32 {
        match self.kind {
            Kind::Thread => 1,
            Kind::Lanes(mask) => mask.count_ones(),
            Kind::Span { n_warps, .. } => n_warps * warp::WARP_SIZE,
            Kind::Cta => thread::block_dim_x(),
        }
    }

    /// Returns the calling thread's share of `0..n`: from its rank on in steps of
    /// [`size`](Self::size). Together the threads of the coop get each number once.
    ///
    /// ```
    /// # use nccl_device::{Coop, DevComm, Window};
    /// /// Sets this rank's element in every rank, with one thread per rank.
    /// # unsafe fn f(comm: &DevComm, table: Window<u32>) {
    /// let team = comm.lsa_team();
    /// for peer in Coop::cta().strided(team.n_ranks as u32) {
    ///     // SAFETY: the table has one element per rank; only this rank writes this element.
    ///     unsafe { table.lsa(peer as i32).store(team.rank as usize, 1) };
    /// }
    /// # }
    /// ```
    pub fn strided<N: Index>(&self, n: N) -> Strided<N> {
        Strided::new(N::from_u32(self.thread_rank()), n, N::from_u32(self.size()))
    }

    /// Executes a barrier of the coop's threads: a thread's earlier writes are visible to the
    /// others after it. NCCL: `ncclCoopSync`.
    #[doc(alias = "ncclCoopSync")]
    pub fn sync(&self) {
        self.sync_in(CoopCall::new("coop.sync"));
    }

    /// Does the same as [`sync`](Self::sync), as part of `call`, for the simulator's reports.
    pub(crate) fn sync_in(&self, call: CoopCall) {
        let _call = call.begin(&self.any);
        match self.kind {
            Kind::Thread => {}
            // SAFETY: every lane of the coop calls this.
            Kind::Lanes(mask) => unsafe { warp::sync_warp(mask) },
            Kind::Span { id, n_warps, .. } => {
                thread::named_barrier_sync(1 + id, n_warps * warp::WARP_SIZE);
            }
            Kind::Cta => thread::sync_threads(),
        }
    }

    /// Does the same as [`sync`](Self::sync), and returns, in every thread, whether `mine` is true
    /// in any thread of the coop.
    pub fn any(&self, mine: bool) -> bool {
        self.any_in(CoopCall::new("coop.any"), mine)
    }

    /// Does the same as [`any`](Self::any), as part of `call`, for the simulator's reports.
    pub(crate) fn any_in(&self, call: CoopCall, mine: bool) -> bool {
        let _call = call.begin(&self.any);
        match self.kind {
            Kind::Thread => mine,
            Kind::Lanes(mask) => {
                // The vote instruction does not order memory, as the barrier does.
                self.sync_in(call);
                // SAFETY: every lane of the coop calls this.
                unsafe { warp::warp_vote_any(mask, mine) }
            }
            Kind::Span { id, n_warps, .. } => {
                thread::named_barrier_sync_or(1 + id, n_warps * warp::WARP_SIZE, mine.into()) != 0
            }
            Kind::Cta => thread::sync_threads_or(mine.into()) != 0,
        }
    }

    /// Returns NCCL's struct, for [`raw`](crate::raw). Pass the address of a copy that is local to
    /// the call: NCCL calls through the struct's vtable, and LLVM devirtualises those calls only
    /// for such a copy.
    pub fn as_raw(&self) -> raw::CoopAny {
        self.any
    }
}
