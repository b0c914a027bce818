//! Mirrors of NCCL's public structs, NCCL 2.32.3. Sources: `nccl_device/core.h` and
//! `nccl_device/impl/*__types.h`.
//!
//! The layouts are the same on the host (x86-64, aarch64) and on nvptx64; the host crate's tests
//! compare every field with NCCL's own headers.

use core::ffi::c_void;
use core::marker::PhantomData;
use core::mem::{MaybeUninit, offset_of, size_of};

pub use crate::team::Team;

/// Offset of a buffer in the device communicator's resource window, in units of 128 bytes.
///
/// NCCL: `ncclDevResourceHandle_t`.
#[doc(alias = "ncclDevResourceHandle_t")]
pub type ResourceHandle = u32;

/// The place of the state of a set of LSA barriers.
///
/// NCCL: `ncclLsaBarrierHandle` (8 bytes).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[doc(alias = "ncclLsaBarrierHandle")]
pub struct LsaBarrierHandle {
    /// State of the barriers.
    pub buffer: ResourceHandle,
    /// The number of barriers in the set.
    pub n_barriers: i32,
}

/// The first of the signals that a set of GIN barriers uses.
///
/// NCCL: `ncclGinBarrierHandle` (8 bytes).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[doc(alias = "ncclGinBarrierHandle")]
pub struct GinBarrierHandle {
    /// First signal id.
    pub signal0: u32,
    /// A field that NCCL does not use.
    pub unused: u32,
}

/// The place of the state of a set of CFT barriers.
///
/// NCCL: `ncclCftBarrierHandle` (8 bytes).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[doc(alias = "ncclCftBarrierHandle")]
pub struct CftBarrierHandle {
    /// State of the barriers.
    pub buffer: ResourceHandle,
    /// The number of barriers in the set.
    pub n_barriers: i32,
}

/// The place of the state of a set of low-latency all-to-all sessions.
///
/// NCCL: `ncclLLA2AHandle` (8 bytes).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[doc(alias = "ncclLLA2AHandle")]
pub struct LlA2aHandle {
    /// State of the sessions.
    pub buffer: ResourceHandle,
    /// Slots of 16 bytes in each of a session's two banks.
    pub n_slots: u32,
}

/// Base of a multicast mapping; NULL without one.
///
/// NCCL: `ncclMultimemHandle` (8 bytes).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "ncclMultimemHandle")]
pub struct MultimemHandle {
    /// Multicast address.
    pub base: *mut c_void,
}

impl MultimemHandle {
    /// No multicast.
    pub const NULL: Self = Self { base: core::ptr::null_mut() };
}

/// The fields of its resource window that the device communicator has inline.
///
/// NCCL: `ncclResourceWindow_vidmem_t` (16 bytes).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[doc(alias = "ncclResourceWindow_vidmem_t")]
pub struct ResourceWindow {
    /// Address of LSA rank 0's memory; that of rank `i` is `i * stride_4g * 4 GiB` further.
    pub lsa_flat_base: *mut c_void,
    /// Distance between the ranks' memory in units of 4 GiB.
    pub stride_4g: u32,
    /// Offset in the multicast mapping in units of 4 KiB.
    pub mc_offset_4k: u32,
}

/// A device communicator as a kernel gets it: by value, 248 bytes.
///
/// NCCL: `ncclDevComm`. The layout is the one that `ncclDevCommCreate` writes for requirements of
/// version 2.32.3.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[doc(alias = "ncclDevComm")]
#[expect(missing_docs, reason = "the fields are NCCL's, under NCCL's names in snake case")]
pub struct DevComm {
    pub magic: u32,
    pub version: u32,
    pub rank: i32,
    pub n_ranks: i32,
    pub n_ranks_rcp32: u32,
    pub lsa_rank: i32,
    pub lsa_size: i32,
    pub lsa_size_rcp32: u32,
    pub window_table: *mut c_void,
    pub resource_window: *mut c_void,
    pub resource_window_inlined: ResourceWindow,
    pub hybrid_dense_gin_barrier: GinBarrierHandle,
    pub lsa_multimem: MultimemHandle,
    pub lsa_barrier: LsaBarrierHandle,
    pub rail_gin_barrier: GinBarrierHandle,
    pub gin_connection_count: u8,
    pub backend_index: u8,
    pub gin_net_device_types: [u8; 4],
    /// Padding of NCCL's, in which the host says how many signals it requested by `gin_signals`:
    /// higher ids belong to barriers and resources. NCCL counts all in `gin_signal_count`.
    pub requested_signals: u16,
    pub gin_handles: [*mut c_void; 4],
    pub gin_signal_count: u32,
    pub gin_counter_count: u32,
    pub gin_signal_shadows: *mut u64,
    pub gin_context_count: u32,
    pub gin_connection_stride: u32,
    pub gin_context_stride: u32,
    pub gin_strong_legacy_signals: bool,
    pub _padding: u8,
    /// Padding of NCCL's, in which the host says how many counters it requested by `gin_counters`.
    pub requested_counters: u16,
    pub abort_flag: *mut u32,
    pub hybrid_lsa_barrier: LsaBarrierHandle,
    pub hybrid_rail_gin_barrier: GinBarrierHandle,
    pub world_gin_barrier: GinBarrierHandle,
    pub gin_connection_stride_rcp32: u32,
    pub cft_rank: i32,
    pub cft_size: i32,
    pub cft_multimem_rank: i32,
    pub cft_multimem_size: i32,
    pub cft_multimem_size_rcp32: u32,
    pub uc_le_id: u32,
    pub mc_le_id: u32,
    pub cft_barrier: CftBarrierHandle,
    pub cft_multimem_barrier: CftBarrierHandle,
}

impl DevComm {
    /// Returns a device communicator without ranks: every field zero.
    pub const fn zeroed() -> Self {
        // SAFETY: every field is an integer, a raw pointer or a bool, and all of them admit the
        // all-zero pattern.
        unsafe { core::mem::zeroed() }
    }

    /// Returns all ranks of the communicator. NCCL: `ncclTeamWorld`.
    #[doc(alias = "ncclTeamWorld")]
    pub const fn world_team(&self) -> Team {
        Team { n_ranks: self.n_ranks, rank: self.rank, stride: 1 }
    }

    /// Returns the ranks whose memory this rank reaches by load and store. NCCL: `ncclTeamLsa`.
    #[doc(alias = "ncclTeamLsa")]
    pub const fn lsa_team(&self) -> Team {
        Team { n_ranks: self.lsa_size, rank: self.lsa_rank, stride: 1 }
    }

    /// Returns one rank per LSA team, each with this rank's LSA rank. NCCL: `ncclTeamRail`.
    #[doc(alias = "ncclTeamRail")]
    pub const fn rail_team(&self) -> Team {
        // A zeroed communicator has no LSA team, whose size would be a divisor of 0.
        if self.lsa_size <= 0 {
            return Team { n_ranks: self.n_ranks, rank: self.rank, stride: 1 };
        }
        Team {
            n_ranks: self.n_ranks / self.lsa_size,
            rank: self.rank / self.lsa_size,
            stride: self.lsa_size,
        }
    }
}

/// A registered symmetric window of elements `T`, as a kernel parameter: NCCL's handle and the
/// length (16 bytes).
///
/// NCCL: `ncclWindow_t`, which is the handle alone.
#[repr(C)]
#[doc(alias = "ncclWindow_t")]
pub struct Window<T> {
    /// NCCL's handle, a device address. Never dereferenced on the host.
    pub handle: *mut c_void,
    /// Elements that the window has on every rank: the smallest length among the ranks.
    pub len: usize,
    element: PhantomData<*mut T>,
}

impl<T> Window<T> {
    /// Returns the window with NCCL's handle `handle`, with at least `len` elements on every rank.
    pub const fn new(handle: *mut c_void, len: usize) -> Self {
        Self { handle, len, element: PhantomData }
    }
}

impl<T> Clone for Window<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Window<T> {}

impl<T> core::fmt::Debug for Window<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Window({:p}, {} elements)", self.handle, self.len)
    }
}

/// The threads of a cooperative call. NCCL: `ncclCoopAny` (24 bytes).
///
/// The vtable is an address inside the linked module, so a value comes only from NCCL's
/// `ncclCoopAnyInit*` functions.
#[repr(C)]
#[derive(Clone, Copy)]
#[doc(alias = "ncclCoopAny")]
pub struct CoopAny {
    /// Data of the operations in `vtable`.
    pub storage: [MaybeUninit<u64>; 2],
    /// The operations of this kind of thread group.
    pub vtable: *const c_void,
}

/// An LSA barrier session, opaque here. NCCL: `ncclLsaBarrierSession_C` (80 bytes).
#[repr(C, align(8))]
#[doc(alias = "ncclLsaBarrierSession_C")]
pub struct LsaBarrierSession(pub [u64; 10]);

/// A GIN context as a thread uses it, opaque here. NCCL: `ncclGin_C` (48 bytes).
#[repr(C, align(8))]
#[doc(alias = "ncclGin_C")]
pub struct Gin(pub [u64; 6]);

/// A GIN barrier session, opaque here. NCCL: `ncclGinBarrierSession_C` (96 bytes).
#[repr(C, align(8))]
#[doc(alias = "ncclGinBarrierSession_C")]
pub struct GinBarrierSession(pub [u64; 12]);

/// A session of a barrier over LSA and GIN, opaque here. NCCL: `ncclBarrierSession_C` (368 bytes).
#[repr(C, align(8))]
#[doc(alias = "ncclBarrierSession_C")]
pub struct BarrierSession(pub [u64; 46]);

/// A pending flush, opaque here. NCCL: `ncclGinRequest_t` (16 bytes).
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
#[doc(alias = "ncclGinRequest_t")]
pub struct GinRequest(pub [u64; 2]);

/// Shared memory in which a GIN call builds its descriptor. NCCL: `ncclGinDescriptorSmem`
/// (128 bytes).
#[repr(C, align(64))]
#[derive(Clone, Copy)]
#[doc(alias = "ncclGinDescriptorSmem")]
pub struct GinDescriptorSmem(pub [MaybeUninit<u64>; 16]);

const _: () = {
    assert!(size_of::<Gin>() == 48);
    assert!(size_of::<GinBarrierSession>() == 96);
    assert!(size_of::<BarrierSession>() == 368);
    assert!(size_of::<GinRequest>() == 16);
    assert!(size_of::<GinDescriptorSmem>() == 128);
    assert!(size_of::<LsaBarrierHandle>() == 8);
    assert!(size_of::<GinBarrierHandle>() == 8);
    assert!(size_of::<CftBarrierHandle>() == 8);
    assert!(size_of::<LlA2aHandle>() == 8);
    assert!(size_of::<MultimemHandle>() == 8);
    assert!(size_of::<ResourceWindow>() == 16);
    assert!(size_of::<CoopAny>() == 24);
    assert!(size_of::<LsaBarrierSession>() == 80);
    assert!(size_of::<Window<f32>>() == 16);
    assert!(offset_of!(Window<f32>, len) == 8);
    assert!(size_of::<DevComm>() == 248);
    assert!(offset_of!(DevComm, lsa_rank) == 20);
    assert!(offset_of!(DevComm, resource_window_inlined) == 48);
    assert!(offset_of!(DevComm, lsa_barrier) == 80);
    assert!(offset_of!(DevComm, gin_net_device_types) == 98);
    assert!(offset_of!(DevComm, gin_handles) == 104);
    assert!(offset_of!(DevComm, gin_context_stride) == 160);
    assert!(offset_of!(DevComm, abort_flag) == 168);
    assert!(offset_of!(DevComm, world_gin_barrier) == 192);
    assert!(offset_of!(DevComm, cft_multimem_barrier) == 240);
};
