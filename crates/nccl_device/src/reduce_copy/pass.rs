//! A pass of a coop's threads over elements, and how a range is divided into passes.

use core::mem::size_of;

use cuda_std::hint;
use cuda_std::vector::{Accumulate, Vec16};

use super::pack::{Elements, Pack, Vectors};
use super::sink::Sink;
use super::source::Source;
use super::threads::Threads;

/// The threads that share the work, and the elements that they move by vectors.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    threads: Threads,
    count: usize,
    /// Elements `head..tail` are whole vectors, aligned in every place.
    head: usize,
    tail: usize,
}

impl Plan {
    /// Divides `count` elements of `source` and `sink` for `threads`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub(super) fn new<T: Accumulate>(
        threads: Threads,
        source: &impl Source<T>,
        sink: &impl Sink<T>,
        count: usize,
    ) -> Self {
        let lanes = Vec16::<T>::LANES;
        let (head, tail) = match (source.phase(), sink.phase()) {
            (Some(from), Some(to)) if from == to => {
                let head = (16 - from) % 16 / size_of::<T>();
                let head = if head < count { head } else { count };
                (head, head + (count - head) / lanes * lanes)
            }
            _ => (count, count),
        };
        Self { threads, count, head, tail }
    }

    /// Moves the vectors, with `U` of each place in flight in a thread.
    ///
    /// # Safety
    ///
    /// The plan is of source and sink, or of others that lie alike; loads and stores of its
    /// elements are allowed.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub(super) unsafe fn vectors<T: Accumulate, const U: usize>(
        self,
        source: impl Source<T>,
        sink: impl Sink<T>,
    ) {
        // SAFETY: the plan's vectors are aligned, the rest is the caller's.
        unsafe { self.pass::<T, Vectors, U>(source, sink, self.head, self.tail) }
    }

    /// Moves the other elements: fewer than a vector at each end, or all.
    ///
    /// # Safety
    ///
    /// As [`Self::vectors`]'s.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub(super) unsafe fn elements<T: Accumulate>(self, source: impl Source<T>, sink: impl Sink<T>) {
        let mut end = false;
        loop {
            let (begin, until) = if end { (self.tail, self.count) } else { (0, self.head) };
            if begin < until {
                // SAFETY: elements are aligned, the rest is the caller's.
                unsafe { self.pass::<T, Elements, 2>(source, sink, begin, until) };
            }
            if end {
                break;
            }
            end = true;
        }
    }

    /// Both.
    ///
    /// # Safety
    ///
    /// As [`Self::vectors`]'s.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub(super) unsafe fn all<T: Accumulate, const U: usize>(
        self,
        source: impl Source<T>,
        sink: impl Sink<T>,
    ) {
        // SAFETY: the caller's.
        unsafe {
            self.vectors::<T, U>(source, sink);
            self.elements(source, sink);
        }
    }

    /// Moves elements `begin..end`, a whole number of packs.
    ///
    /// # Safety
    ///
    /// As [`Self::vectors`]'s, and the packs are aligned.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    unsafe fn pass<T: Accumulate, P: Pack<T>, const U: usize>(
        self,
        source: impl Source<T>,
        sink: impl Sink<T>,
        begin: usize,
        end: usize,
    ) {
        // A row is one pack for each thread; a thread has U rows in flight.
        let row = self.threads.count * P::LEN;
        let mut at = begin + self.threads.rank * P::LEN;
        // SAFETY: below `end`; the rest is the caller's.
        unsafe {
            while at + (U - 1) * row < end {
                // One number that all addresses are worked out from: else LLVM counts up each
                // address by itself, in two registers each.
                let here = hint::opaque_usize(at);
                let loaded = source.rows::<P, U>(here, row, |_| true);
                for (u, loaded) in loaded.iter().enumerate() {
                    sink.store::<P>(here + u * row, source.finish::<P>(*loaded));
                }
                at += U * row;
            }
            // The last rows, still all in flight at once.
            let loaded = source.rows::<P, U>(at, row, |u| at + u * row < end);
            for (u, loaded) in loaded.iter().enumerate() {
                if at + u * row < end {
                    sink.store::<P>(at + u * row, source.finish::<P>(*loaded));
                }
            }
        }
    }
}
