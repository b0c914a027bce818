//! The memory that an access sees or changes instead of its own: that of an access which a mutation
//! removes, and that of an atomic load which sees an old value.

use std::cell::RefCell;

use cuda_std::arch::Access;

use crate::base::error::Site;
use crate::gpu::thread::Thread;

thread_local! {
    /// Zeros for the removed access that is made now, if it is one of more than 16 bytes.
    static LARGE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Returns the address of as many zeros, which are valid until the next call.
fn zeros(bytes: usize) -> usize {
    // A type's alignment divides its size.
    let align = 1 << bytes.trailing_zeros();
    LARGE.with_borrow_mut(|large| {
        large.clear();
        large.resize(bytes + align, 0);
        large.as_mut_ptr().expose_provenance().next_multiple_of(align)
    })
}

impl Thread {
    /// Returns the address for an access that a mutation removes.
    #[cold]
    pub(super) fn removed(&self, bytes: usize, access: Access, at: Site) -> usize {
        let address = self.scratch.as_ptr().expose_provenance();
        // A thread that polls by atomic loads has yielded in `spin`.
        if !matches!(access, Access::AtomicRead(..) | Access::BarrierTest) {
            self.end_slice((address, bytes), access, at);
        }
        // No other thread runs between this and the access.
        if bytes > size_of_val(&self.scratch) {
            return zeros(bytes);
        }
        // An `mbarrier`'s word has the arrivals of a phase in bits 0 to 19 and the pending ones in
        // bits 20 to 39 (`arch_host::bulk`): both are the maximum here, so that no arrival ends a
        // phase.
        let changed = matches!(access, Access::BarrierChange);
        self.scratch.set(if changed { (1 << 40) - 1 } else { 0 });
        address
    }

    /// Returns the address of a copy of the memory with old values for some words.
    #[cold]
    pub(super) fn stale(&self, (address, bytes): (usize, usize), old: [Option<u32>; 4]) -> usize {
        let mut copy = [0_u8; 16];
        // SAFETY: the access was checked; an atomic load has at most 16 bytes.
        unsafe {
            std::ptr::with_exposed_provenance::<u8>(address)
                .copy_to_nonoverlapping(copy.as_mut_ptr(), bytes);
        }
        // An access of less than a word lies within one.
        let skipped = address % 4;
        for (i, value) in old.into_iter().enumerate() {
            let Some(value) = value else { continue };
            let value = &value.to_le_bytes()[skipped..];
            let n = value.len().min(bytes - 4 * i);
            copy[4 * i..][..n].copy_from_slice(&value[..n]);
        }
        self.scratch.set(u128::from_le_bytes(copy));
        // A later load will see another value.
        self.gpus().reset_idle();
        self.scratch.as_ptr().expose_provenance()
    }
}
