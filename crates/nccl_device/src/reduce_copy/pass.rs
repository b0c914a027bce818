//! Passes of several threads over a range of elements, and the division of a range into vectors and
//! single elements.

use super::pack::{Elements, Pack, Vectors};
use super::sink::Sink;
use super::source::Source;
use super::threads::Threads;
use crate::prelude::*;

/// The threads that share the work, and the elements that they move in vectors.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    threads: Threads,
    count: usize,
    /// Elements `head..tail` are 16-byte vectors, aligned in every buffer.
    head: usize,
    tail: usize,
}

#[track_callers]
impl Plan {
    /// Plans to move `count` elements from `source` to `sink` by `threads`.
    pub(super) fn new<T: Accumulate>(
        threads: Threads,
        source: &impl Source<T>,
        sink: &impl Sink<T>,
        count: usize,
    ) -> Self {
        let lanes = Vec16::<T>::LANES;
        let (head, tail) = match (source.misalignment(), sink.misalignment()) {
            (Some(from), Some(to)) if from == to => {
                let head = (16 - from) % 16 / size_of::<T>();
                let head = if head < count { head } else { count };
                (head, head + (count - head) / lanes * lanes)
            }
            _ => (count, count),
        };
        Self { threads, count, head, tail }
    }

    /// Moves the vectors, with `U` vectors per buffer in flight in a thread.
    ///
    /// # Safety
    ///
    /// The plan was made for this source and sink, or for ones with the same addresses modulo 16;
    /// loads from the source's and stores to the sink's elements are allowed.
    pub(super) unsafe fn vectors<T: Accumulate, const U: usize>(
        self,
        source: impl Source<T>,
        sink: impl Sink<T>,
    ) {
        // SAFETY: the plan's vectors are aligned; the rest is the caller's contract.
        unsafe { self.pass::<T, Vectors, U>(source, sink, self.head, self.tail) }
    }

    /// Moves the elements outside the vectors, one by one: those at both ends, or all.
    ///
    /// # Safety
    ///
    /// The contract is that of [`Self::vectors`].
    pub(super) unsafe fn elements<T: Accumulate>(self, source: impl Source<T>, sink: impl Sink<T>) {
        // A loop has one copy of the code of a pass, which is inlined.
        let mut end = false;
        loop {
            let (begin, until) = if end { (self.tail, self.count) } else { (0, self.head) };
            if begin < until {
                // SAFETY: elements are aligned; the rest is the caller's contract.
                unsafe { self.pass::<T, Elements, 2>(source, sink, begin, until) };
            }
            if end {
                break;
            }
            end = true;
        }
    }

    /// Moves all elements.
    ///
    /// # Safety
    ///
    /// The contract is that of [`Self::vectors`].
    pub(super) unsafe fn all<T: Accumulate, const U: usize>(
        self,
        source: impl Source<T>,
        sink: impl Sink<T>,
    ) {
        // SAFETY: the caller's buffers have the plan's elements, of which each thread has its own.
        unsafe {
            self.vectors::<T, U>(source, sink);
            self.elements(source, sink);
        }
    }

    /// Moves elements `begin..end`, which are a whole number of packs `P`.
    ///
    /// # Safety
    ///
    /// The contract is that of [`Self::vectors`], and the packs are aligned.
    unsafe fn pass<T: Accumulate, P: Pack<T>, const U: usize>(
        self,
        source: impl Source<T>,
        sink: impl Sink<T>,
        begin: usize,
        end: usize,
    ) {
        // A row is one pack for each thread; a thread has its packs of U rows in flight.
        let row = self.threads.count * P::LEN;
        let mut at = begin + self.threads.rank * P::LEN;
        // SAFETY: the elements are below `end`; the rest is the caller's contract.
        unsafe {
            while at + (U - 1) * row < end {
                // All addresses are computed from this index. Otherwise LLVM increments each
                // address separately, in two registers each.
                let here = hint::opaque_usize(at);
                let loaded = source.rows::<P, U>(here, row, |_| true);
                for (u, loaded) in loaded.iter().enumerate() {
                    sink.store::<P>(here + u * row, source.finish::<P>(*loaded));
                }
                at += U * row;
            }
            // The remaining rows are also in flight at once.
            let loaded = source.rows::<P, U>(at, row, |u| at + u * row < end);
            for (u, loaded) in loaded.iter().enumerate() {
                if at + u * row < end {
                    sink.store::<P>(at + u * row, source.finish::<P>(*loaded));
                }
            }
        }
    }
}
