//! The reduce-copy functions: sums and copies of arrays between local memory, the ranks' parts of a
//! window, and multicast addresses.
//!
//! A coop's threads handle elements round-robin. Sources are added in team order, in NCCL's
//! accumulator type: `f32` for half precision, `f16` for 8-bit floats; integers wrap. Each element
//! access is checked like one of the kernel's own.
//!
//! # Safety
//!
//! As in the parent module; memory is checked before an access, unless
//! [`watch`](crate::Simulation::watch) is off.

use std::ffi::c_void;

use cuda_std::arch::{Access, MulticastParts};
use devcomm_types::nccl::{CoopAny, Team};
use devcomm_types::{Element, F8E4M3, F8E5M2};
use half::{bf16, f16};
use nccl_device::raw::host::CoopCall;

use super::coop::{Coop, coop_rank};
use super::{caller, divergence, view};
use crate::base::error::Site;
use crate::gpu::thread::Thread;

/// An element type and NCCL's accumulator type for it.
pub(super) trait Sum: Element {
    type Acc: Copy;
    fn to_acc(self) -> Self::Acc;
    fn add(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn from_acc(acc: Self::Acc) -> Self;
    /// Whether NCCL's bitcode can sum this type in the NVSwitch.
    const IN_SWITCH: bool = true;
}

macro_rules! sums {
    ($($type:ty as $acc:ty, $to:expr, $add:expr, $from:expr $(, $in_switch:literal)?;)*) => { $(
        impl Sum for $type {
            type Acc = $acc;
            $(const IN_SWITCH: bool = $in_switch;)?

            fn to_acc(self) -> $acc {
                $to(self)
            }

            fn add(a: $acc, b: $acc) -> $acc {
                $add(a, b)
            }

            fn from_acc(acc: $acc) -> Self {
                $from(acc)
            }
        }
    )* };
}

/// Returns a sum in half precision, computed in `f32` so that it is rounded once.
fn add_f16(a: f16, b: f16) -> f16 {
    f16::from_f32(a.to_f32() + b.to_f32())
}

sums! {
    i8 as i8, |v| v, i8::wrapping_add, |v| v;
    u8 as u8, |v| v, u8::wrapping_add, |v| v;
    i32 as i32, |v| v, i32::wrapping_add, |v| v;
    u32 as u32, |v| v, u32::wrapping_add, |v| v;
    i64 as i64, |v| v, i64::wrapping_add, |v| v;
    u64 as u64, |v| v, u64::wrapping_add, |v| v;
    f32 as f32, |v| v, |a, b| a + b, |v| v;
    f64 as f64, |v| v, |a, b| a + b, |v| v;
    f16 as f32, f16::to_f32, |a, b| a + b, f16::from_f32;
    bf16 as f32, bf16::to_f32, |a, b| a + b, bf16::from_f32;
    F8E4M3 as f16, |v: F8E4M3| f16::from_f32(v.to_f32()), add_f16,
        |v: f16| F8E4M3::from_f32(v.to_f32()), false;
    F8E5M2 as f16, |v: F8E5M2| f16::from_f32(v.to_f32()), add_f16,
        |v: f16| F8E5M2::from_f32(v.to_f32()), false;
}

/// Returns the sum of elements; a single element is returned unchanged, bit for bit.
fn sum<T: Sum>(mut elements: impl Iterator<Item = T>) -> Option<T> {
    let first = elements.next()?;
    let Some(second) = elements.next() else { return Some(first) };
    let acc = T::add(first.to_acc(), second.to_acc());
    Some(T::from_acc(elements.fold(acc, |acc, element| T::add(acc, element.to_acc()))))
}

/// One thread's share of a call.
struct Work<'a> {
    thread: &'a Thread,
    at: Site,
    rank: usize,
    size: usize,
}

impl Work<'_> {
    /// Returns the calling thread's share of a call, by its rank in `coop`.
    ///
    /// # Safety
    ///
    /// `coop` is a coop.
    unsafe fn of<'a>(coop: *const CoopAny, call: CoopCall) -> Work<'a> {
        let (thread, at) = caller();
        // SAFETY: the kernel passes a coop that it initialised.
        let coop = Coop::of(unsafe { &*coop }, thread, at);
        divergence::call(thread, coop, call, at);
        let rank = coop_rank(coop, thread, at) as usize;
        Work { thread, at, rank, size: coop.size(thread) as usize }
    }

    /// Returns the indices of the thread's elements.
    fn own_elements(&self, count: usize) -> impl Iterator<Item = usize> + use<> {
        (self.rank..count).step_by(self.size.max(1))
    }

    fn check<T>(&self, address: *const T, access: Access) -> *mut T {
        self.check_alignment(address);
        if !self.thread.gpus().settings.watch {
            return address.cast_mut();
        }
        let actual = self.thread.access(address.addr(), size_of::<T>(), access, self.at);
        if actual == address.addr() {
            address.cast_mut()
        } else {
            std::ptr::with_exposed_provenance_mut(actual)
        }
    }

    fn check_alignment<T>(&self, address: *const T) {
        if !address.is_aligned() {
            let align = align_of::<T>();
            let what =
                format!("{:#x} is not a multiple of {align}, the elements' size", address.addr());
            self.thread.misuse(self.at, what);
        }
    }

    fn load<T: Sum>(&self, address: *const T) -> T {
        let address = self.check(address, Access::Read);
        // SAFETY: the module's contract; every bit pattern is an element.
        unsafe { address.read_volatile() }
    }

    fn store<T: Sum>(&self, address: *mut T, value: T) {
        let address = self.check(address, Access::Write);
        // SAFETY: the simulator has checked that the memory has the element.
        unsafe { address.write_volatile(value) };
    }

    /// Returns each rank's copy of the element at a multicast address, all of them accessed at
    /// once.
    fn parts<T>(&self, address: *const T, access: Access) -> impl Iterator<Item = *mut T> + use<T> {
        self.check_alignment(address);
        let (address, bytes) = (address.addr(), size_of::<T>());
        let MulticastParts { first, stride, n } =
            self.thread.multimem(address, bytes, access, self.at);
        (0..n).map(move |i| first.wrapping_add(i * stride).cast::<T>())
    }

    fn load_sum<T: Sum>(&self, address: *const T) -> Option<T> {
        // SAFETY: `parts` resolves the address to aligned elements of a window.
        sum(self.parts(address, Access::Read).map(|part| unsafe { part.read_volatile() }))
    }

    fn store_all<T: Sum>(&self, address: *mut T, value: T) {
        let parts = self.parts(address, Access::Write);
        // SAFETY: the simulator has checked that the memory has the element.
        parts.for_each(|part| unsafe { part.write_volatile(value) });
    }

    /// Checks `count` elements at a multicast address: elements of 16 bits are accessed in pairs.
    fn check_pairs<T: Sum>(&self, multicast: *const T, count: usize) {
        if size_of::<T>() != 2 {
            return;
        }
        let address = multicast.addr();
        let what = match (count % 2, address % 4) {
            (0, 0) => return,
            (0, _) => format!("the multicast address {address:#x} is not a multiple of 4"),
            _ => format!("{count} elements, which is odd"),
        };
        let what = format!("a multimem operation of {}: {what}: NCCL traps here", T::NAME);
        self.thread.misuse(self.at, what);
    }

    /// Computes `dst(j)[i] = sum over k of src(k)[i]`, for the thread's elements.
    fn reduce_copy<T: Sum>(
        &self,
        (n_src, src): (usize, impl Fn(usize) -> *mut T),
        (n_dst, dst): (usize, impl Fn(usize) -> *mut T),
        count: usize,
    ) {
        for i in self.own_elements(count) {
            let Some(total) = sum((0..n_src).map(|k| self.load(src(k).wrapping_add(i)))) else {
                self.thread.misuse(self.at, "a sum of no sources")
            };
            (0..n_dst).for_each(|j| self.store(dst(j).wrapping_add(i), total));
        }
    }

    /// Sums each of the thread's elements at multicast address `src`; calls `store` with its index
    /// and sum.
    fn sum_in_switch<T: Sum>(&self, src: *const T, count: usize, store: impl Fn(usize, T)) {
        if !T::IN_SWITCH {
            let what = format!(
                "a multimem sum of {}: NCCL's device library traps here, on every GPU",
                T::NAME
            );
            self.thread.misuse(self.at, what);
        }
        self.check_pairs(src, count);
        for i in self.own_elements(count) {
            if let Some(total) = self.load_sum(src.wrapping_add(i)) {
                store(i, total);
            }
        }
    }
}

/// Returns the size of a team within the LSA team, and the address of each rank's part at `offset`.
///
/// # Safety
///
/// `window` is NULL or a window, `team` a team.
unsafe fn parts_of<T>(
    window: *mut c_void,
    offset: usize,
    team: *const Team,
) -> (usize, impl Fn(usize) -> *mut T) {
    // SAFETY: the kernel passes a window that the host registered, and a team.
    let (view, team) = unsafe { (view(window), *team) };
    let part = move |i| view.lsa_address(offset, team.to_lsa(view.lsa_rank, i as i32)).cast();
    (team.n_ranks.max(0) as usize, part)
}

pub(super) unsafe extern "C-unwind" fn lsa_reduce_sum<T: Sum>(
    coop: *const CoopAny,
    src_window: *mut c_void,
    src_offset: usize,
    dst: *mut T,
    count: usize,
    team: *const Team,
) {
    let call = CoopCall::new("ncclLsaReduceSum")
        .arg("source's byte", src_offset as u64)
        .arg("destination", dst.addr() as u64)
        .arg("count", count as u64);
    // SAFETY: the kernel passes a coop, a window and a team.
    let (work, src) = unsafe { (Work::of(coop, call), parts_of(src_window, src_offset, team)) };
    work.reduce_copy(src, (1, |_| dst), count);
}

pub(super) unsafe extern "C-unwind" fn lsa_copy<T: Sum>(
    coop: *const CoopAny,
    src: *mut T,
    dst_window: *mut c_void,
    dst_offset: usize,
    count: usize,
    team: *const Team,
) {
    let call = CoopCall::new("ncclLsaCopy")
        .arg("source", src.addr() as u64)
        .arg("destination's byte", dst_offset as u64)
        .arg("count", count as u64);
    // SAFETY: the kernel passes a coop, a window and a team.
    let (work, dst) = unsafe { (Work::of(coop, call), parts_of(dst_window, dst_offset, team)) };
    work.reduce_copy((1, |_| src), dst, count);
}

pub(super) unsafe extern "C-unwind" fn lsa_reduce_sum_copy<T: Sum>(
    coop: *const CoopAny,
    src_window: *mut c_void,
    src_offset: usize,
    dst_window: *mut c_void,
    dst_offset: usize,
    count: usize,
    team: *const Team,
) {
    let call = CoopCall::new("ncclLsaReduceSumCopy")
        .arg("source's byte", src_offset as u64)
        .arg("destination's byte", dst_offset as u64)
        .arg("count", count as u64);
    // SAFETY: the kernel passes a coop, windows and a team.
    let (work, src, dst) = unsafe {
        (
            Work::of(coop, call),
            parts_of::<T>(src_window, src_offset, team),
            parts_of(dst_window, dst_offset, team),
        )
    };
    work.reduce_copy(src, dst, count);
}

pub(super) unsafe extern "C-unwind" fn multimem_reduce_sum<T: Sum>(
    coop: *const CoopAny,
    mc_src: *mut T,
    dst: *mut T,
    count: usize,
) {
    let call = CoopCall::new("ncclMultimemReduceSum")
        .arg("source", mc_src.addr() as u64)
        .arg("destination", dst.addr() as u64)
        .arg("count", count as u64);
    // SAFETY: the kernel passes a coop.
    let work = unsafe { Work::of(coop, call) };
    work.sum_in_switch(mc_src, count, |i, total| work.store(dst.wrapping_add(i), total));
}

pub(super) unsafe extern "C-unwind" fn multimem_copy<T: Sum>(
    coop: *const CoopAny,
    src: *mut T,
    mc_dst: *mut T,
    count: usize,
) {
    let call = CoopCall::new("ncclMultimemCopy")
        .arg("source", src.addr() as u64)
        .arg("destination", mc_dst.addr() as u64)
        .arg("count", count as u64);
    // SAFETY: the kernel passes a coop.
    let work = unsafe { Work::of(coop, call) };
    work.check_pairs(mc_dst, count);
    for i in work.own_elements(count) {
        let element = work.load(src.wrapping_add(i));
        work.store_all(mc_dst.wrapping_add(i), element);
    }
}

pub(super) unsafe extern "C-unwind" fn multimem_reduce_sum_copy<T: Sum>(
    coop: *const CoopAny,
    mc_src: *mut T,
    mc_dst: *mut T,
    count: usize,
) {
    let call = CoopCall::new("ncclMultimemReduceSumCopy")
        .arg("source", mc_src.addr() as u64)
        .arg("destination", mc_dst.addr() as u64)
        .arg("count", count as u64);
    // SAFETY: the kernel passes a coop.
    let work = unsafe { Work::of(coop, call) };
    work.check_pairs(mc_dst, count);
    work.sum_in_switch(mc_src, count, |i, total| work.store_all(mc_dst.wrapping_add(i), total));
}

#[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
pub(super) unsafe extern "C-unwind" fn local_reduce_sum_copy<T: Sum>(
    coop: *const CoopAny,
    n_src: i32,
    src_base: *mut T,
    src_displ: usize,
    n_dst: i32,
    dst_base: *mut T,
    dst_displ: usize,
    count: usize,
) {
    let call = CoopCall::new("ncclLocalReduceSumCopy")
        .arg("source", src_base.addr() as u64)
        .arg("destination", dst_base.addr() as u64)
        .arg("count", count as u64);
    // SAFETY: the kernel passes a coop.
    let work = unsafe { Work::of(coop, call) };
    let src = |k: usize| src_base.wrapping_byte_add(k.wrapping_mul(src_displ));
    let dst = |j: usize| dst_base.wrapping_byte_add(j.wrapping_mul(dst_displ));
    work.reduce_copy((n_src.max(0) as usize, src), (n_dst.max(0) as usize, dst), count);
}
