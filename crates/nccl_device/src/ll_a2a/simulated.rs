//! Checks and reports of simulated runs. A GPU has none of this.

use std::hash::{DefaultHasher, Hasher};

use bytemuck::{Pod, bytes_of};

use super::{Line, LlA2a};
use crate::prelude::*;

#[track_callers]
impl<T: Pod> LlA2a<'_, T> {
    /// Returns the second half of the block's header, which the protocol leaves 0: the simulator
    /// keeps there which coop has a session, plus 1.
    fn user(&self) -> *mut u64 {
        self.header().cast::<u64>().wrapping_add(1)
    }

    /// Checks that no other coop has a session on the block, and records this one.
    pub(super) fn take_block(&self) {
        if self.coop.thread_rank() > 0 {
            return;
        }
        let (block, thread) = (thread::block_idx_x(), thread::thread_idx_x());
        let me = (u64::from(block) << 32 | u64::from(thread)) + 1;
        // SAFETY: the header was loaded before; nothing else accesses this half.
        let other = unsafe { self.user().read_volatile() };
        if other != 0 && other != me {
            let (by, thread) = ((other - 1) >> 32, (other - 1) as u32);
            panic!("LL session {} is in use by block {by} thread {thread}", self.block);
        }
        // SAFETY: the same half, which was read before.
        unsafe { self.user().write_volatile(me) };
    }

    /// Records that the session is closed.
    pub(super) fn leave_block(&self) {
        if self.coop.thread_rank() == 0 {
            // SAFETY: the header was loaded before; nothing else accesses this half.
            unsafe { self.user().write_volatile(0) };
        }
    }

    /// Begins a reduction, in which a rank's element has the rank's number. The bits of `mine`, or
    /// a hash of many, are compared with those of the coop's other threads.
    pub(super) fn begin_all_reduce(&mut self, mine: &T) {
        self.from_ranks = true;
        let (bytes, mut word) = (bytes_of(mine), [0; 8]);
        let call = CoopCall::new("session.all_reduce");
        let call = if bytes.len() <= word.len() {
            word[..bytes.len()].copy_from_slice(bytes);
            call.arg("bits of mine", u64::from_le_bytes(word))
        } else {
            let mut hash = DefaultHasher::new();
            hash.write(bytes);
            call.arg("hash of mine", hash.finish())
        };
        (raw::host::checks().call_without_wait)(&self.coop.as_raw(), call);
    }

    /// Adds the first element that is missing, and the epoch of its line, to the description of a
    /// wait.
    pub(super) fn first_missing(&self, elements: &[u32], what: WaitFor) -> WaitFor {
        let own = self.own_lines().wrapping_add(self.slots() as usize);
        for &index in elements {
            for i in 0..Self::LINES {
                let line = own.wrapping_add(index as usize + i * self.pitch as usize);
                // SAFETY: the thread has loaded the first of these lines; the others exist, too.
                let [_, a, _, b] = unsafe { line.cast::<Line>().read_volatile() }.to_bits();
                let seen = if a == self.epoch { b } else { a };
                if seen != self.epoch {
                    let LlA2a { buffer, from_ranks, .. } = self;
                    let rank = |rank| buffer.team.to_world(buffer.comm.rank(), rank);
                    let peer = if *from_ranks { rank(index as i32) } else { -1 };
                    return WaitFor { index, peer, seen: seen.into(), ..what };
                }
            }
        }
        what
    }
}
