//! A pass of a coop's threads over elements, and how a range is divided into passes.

use core::mem::size_of;

use cuda_std::vector::{Accumulate, Vec16};

use super::pack::{Elements, Pack, Vectors};
use super::sink::Sink;
use super::source::Source;
use crate::Coop;

/// The threads that share the work, and the elements that they move by vectors.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    thread: usize,
    threads: usize,
    count: usize,
    /// Elements `head..tail` are whole vectors, aligned in every place.
    head: usize,
    tail: usize,
}

impl Plan {
    /// Divides `count` elements of `source` and `sink` for the threads of `coop`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub(super) fn new<T: Accumulate>(
        coop: &Coop,
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
        Self {
            thread: coop.thread_rank() as usize,
            threads: coop.size() as usize,
            count,
            head,
            tail,
        }
    }

    /// Moves the vectors, with `U` of each place in flight in a thread.
    ///
    /// # Safety
    ///
    /// The plan is of source and sink, or of others that lie alike; loads and stores of its elements are allowed.
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
            // SAFETY: elements are aligned, the rest is the caller's.
            unsafe { self.pass::<T, Elements, 2>(source, sink, begin, until) };
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
        let row = self.threads * P::LEN;
        let mut at = begin + self.thread * P::LEN;
        // SAFETY: below `end`; the rest is the caller's.
        unsafe {
            while at + (U - 1) * row < end {
                let loaded = source.rows::<P, U>(at, row, |_| true);
                for (u, loaded) in loaded.iter().enumerate() {
                    sink.store::<P>(at + u * row, source.finish::<P>(*loaded));
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
