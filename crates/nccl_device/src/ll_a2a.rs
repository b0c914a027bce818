//! Low-latency all-to-all within the LSA team: messages that carry their own flags.
//!
//! NCCL implements this in C++ only; this is its protocol in Rust. A *line* is 16 bytes: 8 of
//! payload, and the epoch (its flag) twice, written by one store. A receiver polls its own memory
//! until a line has the expected epoch: no barrier or fence is needed, and a message takes one-way
//! latency. Odd and even epochs alternate between two *banks* of lines.
//!
//! # What a session requires
//!
//! In every epoch each rank must send at least one element to every peer and receive at least one
//! from every peer: then a peer's message of this epoch implies that the peer has received all
//! messages of the previous epoch, whose lines the next epoch overwrites.
//!
//! # Example
//!
//! ```
//! use cuda_std::prelude::*;
//! use nccl_device::{Coop, DevComm, LlA2aBuffer, LlA2aHandle, Window};
//!
//! /// Rank `i`'s element `j` becomes rank `j`'s element `i`, one per thread; blocks have one
//! /// thread per rank.
//! ///
//! /// # Safety
//! ///
//! /// The host created `exchange` for one block and one 4-byte element per rank; both windows have
//! /// one element per rank.
//! #[kernel]
//! pub unsafe fn transpose(
//!     comm: DevComm,
//!     exchange: LlA2aHandle,
//!     from: Window<f32>,
//!     to: Window<f32>,
//! ) {
//!     let (team, peer) = (comm.lsa_team(), thread::thread_idx_x());
//!     // SAFETY: the kernel's contract.
//!     let buffer = unsafe { LlA2aBuffer::new(&comm, team, exchange, 1) };
//!     buffer.with(Coop::cta(), 0, team.n_ranks as u32, |session| {
//!         if (peer as i32) < team.n_ranks {
//!             // SAFETY: the kernel's contract.
//!             unsafe {
//!                 session.send(peer as i32, team.rank as u32, from.local().load(peer as usize));
//!                 to.local().store(peer as usize, session.receive(peer));
//!             }
//!         }
//!         session.end_epoch();
//!     });
//! }
//! ```

#[cfg(not(target_arch = "nvptx64"))]
mod simulated;

use crate::prelude::*;
use core::marker::PhantomData;

use bytemuck::Pod;
use cuda_std::multimem;
use devcomm_types::nccl::{LlA2aHandle, MultimemHandle};

/// Bytes of payload in a line.
const PAYLOAD: usize = 8;

/// A line in memory: payload, epoch, payload, epoch.
type Line = Vec16<u32>;

/// The memory of LL all-to-all sessions, which the host requested for a number of blocks, and of
/// slots in each of a block's two banks. A slot holds one line.
///
/// NCCL: `ncclLLA2AHandle` with its team.
#[doc(alias = "ncclLLA2AHandle")]
#[derive(Clone, Copy)]
pub struct LlA2aBuffer<'a> {
    comm: &'a DevComm,
    team: Team,
    handle: LlA2aHandle,
    /// The number of blocks that the memory was requested for.
    blocks: u32,
    multimem: Option<MultimemHandle>,
}

#[track_callers]
impl<'a> LlA2aBuffer<'a> {
    /// Returns the memory of a handle, for the ranks of `team`.
    ///
    /// # Safety
    ///
    /// The host got the handle for this device communicator and at least `blocks` blocks. The
    /// team's ranks can load and store each other's memory, and all pass the same team.
    pub unsafe fn new(comm: &'a DevComm, team: Team, handle: LlA2aHandle, blocks: u32) -> Self {
        Self { comm, team, handle, blocks, multimem: None }
    }

    /// Returns the same memory; broadcasts use one multicast store instead of one store per rank.
    ///
    /// # Safety
    ///
    /// `multimem` is the multicast mapping of the team.
    pub unsafe fn over_multimem(self, multimem: MultimemHandle) -> Self {
        Self { multimem: Some(multimem), ..self }
    }

    /// Opens the session of `block` for the threads of `coop`, runs `body` and closes the session.
    /// In an epoch a rank receives at most `max_elements` elements `T`, numbered from 0. A `T` has
    /// at most 64 bytes.
    ///
    /// `body` is a closure because a session that is not closed loses its epoch: then old lines
    /// would match the epochs of the next one. Every thread of the coop must call this, with the
    /// same arguments in every rank of the team. Only one coop at a time may use `block`. Traps if
    /// the elements do not fit the slots.
    ///
    /// NCCL: `ncclLLA2ASession`'s constructor and destructor.
    #[doc(alias = "ncclLLA2ASession")]
    pub fn with<T: Pod, R>(
        self,
        coop: Coop,
        block: u32,
        max_elements: u32,
        body: impl FnOnce(&mut LlA2a<'a, T>) -> R,
    ) -> R {
        let mut session = self.open(coop, block, max_elements);
        let result = body(&mut session);
        session.close();
        result
    }

    /// Does the same as [`LlA2a::all_reduce`], in a session of its own: an all-reduce of a few
    /// numbers inside a kernel, without a barrier of the ranks. `coop` and `block` are as for
    /// [`with`](Self::with).
    ///
    /// ```
    /// use cuda_std::prelude::*;
    /// use cuda_std::reduce::SoftmaxSum;
    /// use nccl_device::{Coop, DevComm, LlA2aBuffer, LlA2aHandle};
    ///
    /// /// The softmax of a vector that is spread over the ranks, an element per thread.
    /// ///
    /// /// # Safety
    /// ///
    /// /// The host created `exchange` for one block and an 8-byte element per rank. `x` has an
    /// /// element for each thread. One block, of whole warps.
    /// #[kernel]
    /// pub unsafe fn softmax(comm: DevComm, exchange: LlA2aHandle, x: *mut f32) {
    ///     let x = x.wrapping_add(thread::thread_idx_x() as usize);
    ///     // SAFETY: the kernel's contract. All threads call the reductions.
    ///     unsafe {
    ///         let (value, op) = (mem::load(x), SoftmaxSum::combine);
    ///         let mine = block_reduce(SoftmaxSum::of(value), SoftmaxSum::EMPTY, op);
    ///         let buffer = LlA2aBuffer::new(&comm, comm.lsa_team(), exchange, 1);
    ///         let all = buffer.all_reduce(Coop::cta(), 0, mine, op);
    ///         mem::store(x, all.weight(value));
    ///     }
    /// }
    /// # fn main() {}
    /// ```
    pub fn all_reduce<T: Pod>(self, coop: Coop, block: u32, mine: T, op: impl Fn(T, T) -> T) -> T {
        let mut session = self.open(coop, block, self.team.n_ranks as u32);
        let all = session.all_reduce(mine, op);
        session.close();
        all
    }

    fn open<T: Pod>(self, coop: Coop, block: u32, max_elements: u32) -> LlA2a<'a, T> {
        assert!(block < self.blocks, "the host reserved no lines for this block");
        let slots = u64::from(max_elements) * LlA2a::<T>::LINES as u64;
        assert!(
            slots <= u64::from(self.handle.n_slots),
            "the elements do not fit the session's slots"
        );
        let mut session = LlA2a {
            buffer: self,
            coop,
            block,
            pitch: max_elements,
            epoch: 0,
            first: 0,
            element: PhantomData,
            #[cfg(not(target_arch = "nvptx64"))]
            from_ranks: false,
        };
        // SAFETY: the word is the block's header, which only this coop reads and writes.
        session.epoch = unsafe { mem::load(session.header()) }.wrapping_add(FIRST_EPOCH);
        session.first = session.epoch;
        #[cfg(not(target_arch = "nvptx64"))]
        session.take_block();
        session
    }
}

/// The first epoch, and the one after `u32::MAX`. It is not 0, since zeroed lines must not match an
/// epoch, and even, since `u32::MAX` is odd and the banks take turns.
const FIRST_EPOCH: u32 = 2;

/// An open session of LL all-to-all. [`LlA2aBuffer::with`] opens and closes it.
///
/// NCCL: `ncclLLA2ASession`.
#[doc(alias = "ncclLLA2ASession")]
pub struct LlA2a<'a, T> {
    buffer: LlA2aBuffer<'a>,
    coop: Coop,
    block: u32,
    /// The number of elements, and so of slots from one line of an element to its next.
    pitch: u32,
    epoch: u32,
    /// The epoch with which the session began.
    first: u32,
    element: PhantomData<T>,
    /// Whether a rank's element has the rank's number, for the simulator's reports.
    #[cfg(not(target_arch = "nvptx64"))]
    from_ranks: bool,
}

#[track_callers]
impl<T: Pod> LlA2a<'_, T> {
    /// The number of lines per element.
    const LINES: usize = {
        let lines = size_of::<T>().div_ceil(PAYLOAD);
        assert!(lines <= MAX_LINES, "an element has at most 64 bytes");
        lines
    };

    /// Sends `value` to team rank `peer` as its element `element` of this epoch. Any thread may
    /// call this. Traps if there is no such rank or element.
    ///
    /// NCCL: `ncclLLA2ASession::send`.
    #[doc(alias = "ncclLLA2ASession::send")]
    pub fn send(&self, peer: i32, element: u32, value: T) {
        let LlA2aBuffer { comm, team, handle, .. } = self.buffer;
        assert!((peer as u32) < team.n_ranks as u32, "the peer is not in the session's team");
        self.check_element(element);
        let lines =
            comm.resource_buffer(handle.buffer).peer::<u32>(team, peer).as_ptr().cast::<Line>();
        // SAFETY: the peer has these lines, as checked; receivers load whole lines.
        unsafe { self.store_lines::<false>(lines, element, value) };
    }

    /// Sends `value` to every rank of the team including this one. Any thread may call this. Traps
    /// if there is no such element.
    ///
    /// NCCL: `ncclLLA2ASession::bcast`.
    #[doc(alias = "ncclLLA2ASession::bcast")]
    pub fn broadcast(&self, element: u32, value: T) {
        let LlA2aBuffer { comm, team, handle, multimem, .. } = self.buffer;
        if let Some(multimem) = multimem {
            self.check_element(element);
            let lines =
                comm.resource_buffer(handle.buffer).multimem_of::<u32>(multimem).cast::<Line>();
            // SAFETY: every rank has these lines, as checked.
            unsafe { self.store_lines::<true>(lines, element, value) };
            return;
        }
        // Every rank starts with itself, so that at any time each writes to a different peer.
        let mut i = 0;
        while i < team.n_ranks {
            let peer = team.rank + i;
            let peer = if peer < team.n_ranks { peer } else { peer - team.n_ranks };
            self.send(peer, element, value);
            i += 1;
        }
    }

    /// Waits for element `element` of this epoch, in the calling thread.
    ///
    /// NCCL: `ncclLLA2ASession::recv`.
    #[doc(alias = "ncclLLA2ASession::recv")]
    pub fn receive(&self, element: u32) -> T {
        let [value] = self.receive_each([element]);
        value
    }

    /// Does the same as [`receive`](Self::receive), with a timeout.
    ///
    /// # Errors
    ///
    /// [`TimedOut`].
    pub fn receive_timeout(&self, element: u32, timeout: Timeout) -> Result<T, TimedOut> {
        let mut lines = [[Line::from_bits([0; 4]); MAX_LINES]];
        let outcome = self.load_lines(&[element], &mut lines, Deadline::after(timeout));
        finish_timed(Coop::thread(), outcome, CoopCall::new("receive_timeout"))?;
        Ok(Self::value(&lines[0]))
    }

    /// Waits for several elements of this epoch, polling them together, in the calling thread.
    ///
    /// NCCL: `ncclLLA2ASession::recvUnrolled`.
    #[doc(alias = "ncclLLA2ASession::recvUnrolled")]
    pub fn receive_each<const N: usize>(&self, elements: [u32; N]) -> [T; N] {
        let mut lines = [[Line::from_bits([0; 4]); MAX_LINES]; N];
        let outcome = self.load_lines(&elements, &mut lines, Deadline::NEVER);
        finish(Coop::thread(), outcome, CoopCall::new("receive_each"));
        lines.map(|lines| Self::value(&lines))
    }

    /// Receives the `count` elements `first`, `first + stride`, .. and reduces them, polling `N` at
    /// a time, in the calling thread. `count` is at least 1.
    ///
    /// NCCL: `ncclLLA2ASession::recvReduce`.
    #[doc(alias = "ncclLLA2ASession::recvReduce")]
    pub fn receive_reduce<A: Copy, const N: usize>(
        &self,
        first: u32,
        count: u32,
        stride: u32,
        to_acc: impl Fn(T) -> A,
        reduce: impl Fn(A, A) -> A,
    ) -> A {
        const { assert!(N > 0, "at least one element is polled") };
        let mut acc = to_acc(self.receive(first));
        let mut i = 1;
        while i + N as u32 <= count {
            let values: [T; N] =
                self.receive_each(core::array::from_fn(|u| first + (i + u as u32) * stride));
            for value in values {
                acc = reduce(acc, to_acc(value));
            }
            i += N as u32;
        }
        while i < count {
            acc = reduce(acc, to_acc(self.receive(first + i * stride)));
            i += 1;
        }
        acc
    }

    /// Returns the values of all ranks, combined by `op` in the order of the ranks: the same bits
    /// in every thread of the coop and in every rank. Ends the epoch, in which there are no other
    /// messages.
    ///
    /// Every thread of the coop calls this with the same `mine`, such as what
    /// [`block_reduce`](cuda_std::collective::block_reduce) returns. Traps if the session has fewer
    /// elements than ranks.
    pub fn all_reduce(&mut self, mine: T, op: impl Fn(T, T) -> T) -> T {
        let LlA2aBuffer { team, multimem, .. } = self.buffer;
        #[cfg(not(target_arch = "nvptx64"))]
        self.begin_all_reduce(&mine);
        if multimem.is_none() {
            // Every rank starts with itself, so that at any time each writes to a different peer.
            for distance in self.coop.strided(team.n_ranks as u32) {
                self.send(team.rotated(distance as i32), team.rank as u32, mine);
            }
        } else if self.coop.thread_rank() == 0 {
            self.broadcast(team.rank as u32, mine);
        }
        let all = self.receive_reduce::<T, 1>(0, team.n_ranks as u32, 1, |value| value, op);
        #[cfg(not(target_arch = "nvptx64"))]
        {
            self.from_ranks = false;
        }
        self.end_epoch();
        all
    }

    /// Stores the epoch, if one has ended, for the next session.
    fn close(self) {
        #[cfg(not(target_arch = "nvptx64"))]
        self.leave_block();
        // All threads have loaded the word before an epoch ended, at the barrier of `end_epoch`.
        if self.coop.thread_rank() == 0 && self.epoch != self.first {
            // SAFETY: the word is the block's header, which only this coop reads and writes.
            unsafe { mem::store(self.header(), self.epoch.wrapping_sub(FIRST_EPOCH)) };
        }
        self.coop.sync();
    }

    /// Ends the epoch: later messages belong to the next one. Every thread of the coop calls this.
    ///
    /// NCCL: `ncclLLA2ASession::endEpoch`.
    #[doc(alias = "ncclLLA2ASession::endEpoch")]
    pub fn end_epoch(&mut self) {
        if self.epoch >= u32::MAX - 1 {
            // Clear the bank's lines, which might match the epochs after the wrap-around.
            self.coop.sync();
            let lines = self.own_lines();
            let mut i = self.coop.thread_rank();
            while i < self.buffer.handle.n_slots {
                // SAFETY: all messages in this block's bank of the epoch have been received.
                unsafe {
                    mem::store_vec_relaxed(
                        lines.wrapping_add((self.slots() + i) as usize).cast::<u32>(),
                        Line::from_bits([0; 4]),
                        Scope::Sys,
                    )
                };
                i += self.coop.size();
            }
        }
        self.coop.sync();
        self.epoch = if self.epoch == u32::MAX { FIRST_EPOCH } else { self.epoch + 1 };
    }

    /// Returns the index in lines of this epoch's first slot. A block has a header line and two
    /// banks of slots.
    fn slots(&self) -> u32 {
        let slots = self.buffer.handle.n_slots;
        self.block * (1 + 2 * slots) + 1 + (self.epoch & 1) * slots
    }

    fn own_lines(&self) -> *mut Line {
        let LlA2aBuffer { comm, handle, .. } = self.buffer;
        comm.resource_buffer(handle.buffer).local::<u32>().as_ptr().cast()
    }

    /// Returns the word that stores the epoch between sessions.
    fn header(&self) -> *mut u32 {
        let line = self.block * (1 + 2 * self.buffer.handle.n_slots);
        self.own_lines().wrapping_add(line as usize).cast()
    }

    /// Stores the lines of a value in the memory of one rank or, with `MULTICAST`, of all.
    ///
    /// # Safety
    ///
    /// `lines` is the array of a rank, or its multicast address, and the element exists.
    unsafe fn store_lines<const MULTICAST: bool>(&self, lines: *mut Line, element: u32, value: T) {
        let mut words = [[0; 2]; MAX_LINES];
        // SAFETY: the value fits, by `LINES`.
        unsafe { words.as_mut_ptr().cast::<T>().write_unaligned(value) };
        let first = lines.wrapping_add((self.slots() + element) as usize);
        let mut i = 0;
        while i < Self::LINES {
            let [low, high] = words[i];
            let line = Line::from_bits([low, self.epoch, high, self.epoch]);
            let to = first.wrapping_add(i * self.pitch as usize).cast::<u32>();
            // SAFETY: the caller passes a line of the session that only this thread writes.
            unsafe {
                if MULTICAST {
                    multimem::store_ordered(to.cast(), line, Order::Relaxed, Scope::Sys);
                } else {
                    mem::store_vec_relaxed(to, line, Scope::Sys);
                }
            }
            i += 1;
        }
    }

    fn check_element(&self, element: u32) {
        assert!(element < self.pitch, "the session has no such element");
    }

    /// Polls until all lines of the elements have this epoch.
    fn load_lines<const N: usize>(
        &self,
        elements: &[u32; N],
        lines: &mut [[Line; MAX_LINES]; N],
        deadline: Deadline,
    ) -> Outcome {
        let mut e = 0;
        while e < N {
            self.check_element(elements[e]);
            e += 1;
        }
        let own = self.own_lines().wrapping_add(self.slots() as usize);
        let done = || {
            let mut all = true;
            let mut e = 0;
            while e < N {
                let mut i = 0;
                while i < Self::LINES {
                    let from = own.wrapping_add(elements[e] as usize + i * self.pitch as usize);
                    // SAFETY: the line is one of this block; peers store whole lines.
                    let line = unsafe { mem::load_vec_relaxed(from.cast::<u32>(), Scope::Sys) };
                    let [_, a, _, b] = line.to_bits();
                    all &= a == self.epoch && b == self.epoch;
                    // The simulator's reports show the line that was loaded last.
                    if cfg!(not(target_arch = "nvptx64")) && !all {
                        return false;
                    }
                    lines[e][i] = line;
                    i += 1;
                }
                e += 1;
            }
            all
        };
        let (index, wanted) = (elements[0], self.epoch.into());
        let what = || {
            let what = WaitFor { index, wanted, ..WaitFor::of(WaitKind::LlA2a) };
            #[cfg(not(target_arch = "nvptx64"))]
            let what = self.first_missing(elements, what);
            what
        };
        poll(self.buffer.comm, deadline, done, what)
    }

    /// Returns the value of an element whose lines have arrived.
    fn value(lines: &[Line; MAX_LINES]) -> T {
        let mut words = [[0; 2]; MAX_LINES];
        let mut i = 0;
        while i < Self::LINES {
            let [low, _, high, _] = lines[i].to_bits();
            words[i] = [low, high];
            i += 1;
        }
        // SAFETY: a `T` fits, by `LINES`, and every bit pattern is valid.
        unsafe { words.as_ptr().cast::<T>().read_unaligned() }
    }
}

/// The number of lines of the largest element, 64 bytes.
const MAX_LINES: usize = 8;
