//! Signal shadows: a rank's expected signal values, in its own memory. Also resets signals.
//!
//! # Safety
//!
//! Shadows lie in the resources of the device communicator, and only one thread runs at a time.

use devcomm_types::WaitKind;
use devcomm_types::nccl::{CoopAny, Gin};

use super::Call;
use crate::gpu::waits::{self, Until};

impl Call<'_> {
    /// Waits on this thread until signal `id` has reached `least`; returns the signal's address.
    fn wait_here(&self, id: u32, least: u64, bits: u32, order: i32) -> *const u64 {
        let word: *const u64 = self.own_rank().signals[self.signal(id)].as_ptr();
        let what = self.wait_for(WaitKind::Signal, id, least);
        let (until, order) = (Until::Reached { word, least, bits }, self.order(order));
        waits::until(self.thread, until, order, what, None, self.at);
        word
    }
}

pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn pointer(
    net: *mut Gin,
    signal: u32,
) -> *mut u64 {
    // SAFETY: the kernel passes a handle.
    unsafe { Call::on(net) }.shadow(signal)
}

pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn increase(
    net: *mut Gin,
    signal: u32,
    delta: u64,
) {
    // SAFETY: the kernel passes a handle; the shadow is the device communicator's.
    unsafe {
        let call = Call::on(net);
        let shadow = call.shadow(signal);
        shadow.write_volatile(shadow.read_volatile().wrapping_add(delta));
        call.gpus.progress();
    }
}

pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn wait_meet(
    net: *mut Gin,
    coop: *const CoopAny,
    signal: u32,
    bits: i32,
    ord: i32,
) {
    // SAFETY: the kernel passes a handle and a coop; the shadow is the device communicator's.
    unsafe {
        let call = Call::on(net);
        let (shadow, bits) = (call.shadow(signal), call.bits(bits));
        call.once(coop, "a wait for a signal", || {
            call.wait_here(signal, shadow.read_volatile(), bits, ord);
        });
    }
}

#[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn wait_follow(
    net: *mut Gin,
    coop: *const CoopAny,
    signal: u32,
    least_delta: u64,
    before: *mut u64,
    delta: *mut u64,
    bits: i32,
    ord: i32,
) {
    const NAME: &str = "a wait for a signal";
    // SAFETY: the kernel passes a handle, a coop and pointers for two results; the shadow is the
    // device communicator's.
    unsafe {
        let call = Call::on(net);
        let (shadow, bits) = (call.shadow(signal), call.bits(bits));
        let (coop, rank) = call.coop(coop);
        call.sync(coop, NAME);
        let old = shadow.read_volatile();
        // All threads read the old value before thread 0 writes the new one. NCCL has no barrier
        // here, and relies on its threads' timing.
        call.sync(coop, NAME);
        if rank == 0 {
            let word = call.wait_here(signal, old.wrapping_add(least_delta), bits, ord);
            shadow.write_volatile(word.read_volatile());
            call.gpus.progress();
        }
        call.sync(coop, NAME);
        let mask = u64::MAX >> (64 - bits);
        before.write(old & mask);
        delta.write(shadow.read_volatile().wrapping_sub(old) & mask);
    }
}

pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn reset_signal(net: *mut Gin, signal: u32) {
    // SAFETY: the kernel passes a handle; the shadow is the device communicator's.
    unsafe {
        let call = Call::on(net);
        let index = call.signal(signal);
        let cell = &call.own_rank().signals[index];
        if call.gpus.network.will_change(cell.as_ptr()) {
            call.misuse(format!(
                "signal {signal} is reset while an operation that signals it is under way"
            ));
        }
        cell.set(0);
        call.own_rank().ops[index].set(None);
        call.shadow(signal).write_volatile(0);
        call.gpus.progress();
    }
}
