//! All-to-all with a length for each pair of ranks. A first kernel sends the *short* messages,
//! those that fit into the slots of Lamport messages. A second kernel or NCCL then sends the long
//! ones.

use devcomm_host::group;
use devcomm_kernels::collectives::{exchange, lamport_exchange_v, room};

use super::{Algorithm, CollectivePlan, Collectives, NOT_IN_WINDOW, Request, Workspace};
use crate::CollectiveKind::AllToAll;
use crate::prelude::*;

/// The part of a buffer that belongs to each rank, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts<'a> {
    /// The number of elements for each rank, which may be 0.
    pub counts: &'a [usize],
    /// The index of the first element for each rank.
    pub offsets: &'a [usize],
}

/// The buffer to send, or the buffer to receive in, with its parts.
pub(super) struct Side<'a, T> {
    slice: DeviceSlice<T>,
    parts: Parts<'a>,
}

impl Collectives {
    /// Sends from each rank `p` to each rank `r` a message: the part of `send` that `p` has for `r`
    /// becomes the part of `recv` that `r` has for `p`. The two parts must have the same count. If
    /// they differ, a checked world
    /// ([`WorldBuilder::checked`](devcomm_host::WorldBuilder::checked)) returns an error on all
    /// ranks; in other worlds elements are wrong, in this call or a later one, or a kernel traps or
    /// never ends. The parts of `recv` overlap neither each other nor parts of `send`, so that the
    /// operation is not in place.
    ///
    /// Short messages are sent in one step. Long ones are stored to the peers if `recv` is in a
    /// window, and otherwise sent by NCCL: `recv` is in the same window on all ranks, or on none of
    /// them in a window.
    ///
    /// ```no_run
    /// # use devcomm::{Collectives, Parts, Result, Stream, Window};
    /// # fn f(
    /// #     collectives: &Collectives, send: &Window<f32>, recv: &Window<f32>, stream: &Stream,
    /// # ) -> Result<()> {
    /// // The first of two ranks keeps 3 elements and sends 100; it receives 7.
    /// let sent = Parts { counts: &[3, 100], offsets: &[0, 3] };
    /// let received = Parts { counts: &[3, 7], offsets: &[0, 3] };
    /// collectives.all_to_all_v(send, sent, recv, received, stream)
    /// # }
    /// ```
    ///
    /// NCCL: `ncclSend` and `ncclRecv` in a group.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for parts that are not one for each rank, not within the buffer or
    /// overlap, for buffers of other contexts, and in a checked world for counts or windows that do
    /// not match; those of the launch; as [`Communicator::send`](devcomm_host::Communicator::send).
    pub fn all_to_all_v<T: Element>(
        &self,
        send: &impl Buffer<Element = T>,
        sent: Parts<'_>,
        recv: &impl Buffer<Element = T>,
        received: Parts<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let me = self.communicator.rank();
        let sides = self.sides((send.device_slice(), sent), (recv.device_slice(), received))?;
        let [send, recv] = &sides;
        self.require_own(Some(&send.slice), &recv.slice, stream)?;
        let Some(workspace) = &self.workspace else {
            self.compare_counts::<T>([sent, received], None, usize::MAX)?;
            return self.send_by_nccl(send, recv, stream, |_, _| true);
        };
        let (longest, request) = self.short_messages(workspace, &sides);
        let (used, plan) = (request.slots.unwrap_or(0), request.model().plan);
        let is_long = |bytes: usize| bytes > longest;
        let window = Window::<u8>::containing(&recv.slice, &self.communicator);
        let number = window.as_ref().map(|(window, _)| window.number());
        self.compare_counts::<T>([sent, received], number, longest)?;
        let _turn = self.order.begin(stream)?;
        let Workspace { dev_comm: comm, options, memory, offers, arrived, .. } = workspace;
        let [input, output] = [send, recv].map(|side| side.slice.device_address());
        let [from, to] = [send, recv].map(Side::bytes);
        // In front of its message to a peer, which may be empty, the first kernel tells the peer
        // where in this rank's `recv` the peer's message goes. The kernel does so after earlier
        // work of the stream, so the peer may then store there without a barrier. If `recv` is in
        // no window, NCCL sends the long messages, and the offer is 0.
        let offer = |(window, at): &(Window<u8>, usize)| {
            exchange::Target::offer(window.number() as usize, *at)
        };
        let (first, target) = (window.as_ref().map_or(0, offer), self.compiled.on(stream));
        let args = (comm, memory, used, longest, input, output, from, to, first, offers);
        // Ranks may have different grids, so that a block may wait for any block of a peer: all
        // blocks of a launch must run at the same time. With `concurrent == 1`, `config` makes the
        // launch cooperative, as for every `Push`. Otherwise there is room for all blocks, since
        // `short_messages` limits their threads and their number.
        let config = options.config(CollectivePlan { algorithm: Algorithm::Push, ..plan });
        // SAFETY: `sides` has checked that the parts are within the buffers; dropping a buffer
        // waits for the stream. `_turn` orders the launches that use the workspace.
        unsafe { kernels::lamport_exchange_v::launch(args, config, &target) }?;
        // The kernel has copied a short message of this rank to itself.
        if is_long(send.size(me)) {
            stream.copy(&send.part(me)?, &recv.part(me)?)?;
        }
        match window {
            _ if !self.has_long(&sides, longest) => Ok(()),
            None => {
                self.send_by_nccl(send, recv, stream, |peer, bytes| peer != me && is_long(bytes))
            }
            Some((output, _)) => {
                // The length of the window in each rank, and 0 for indices that are no rank. Each
                // rank knows all lengths: ranks with a workspace can exchange data on the host, and
                // exchanged the lengths when they made the window.
                let bytes = std::array::from_fn(|rank| output.len_of(rank).unwrap_or(0));
                let destination = exchange::Target { number: output.number() as usize, bytes };
                let args = (comm, input, &output, destination, longest, from, to, offers, arrived);
                let plan = workspace.plan(Algorithm::Push, room::PUSH_EXCHANGE_V);
                let config = options.config(plan);
                // SAFETY: `sides` has checked the parts, and `_turn` orders the launches, as above.
                unsafe { kernels::push_exchange_v::launch(args, config, &target) }
            }
        }
    }

    /// Returns both buffers with their parts, checked.
    pub(super) fn sides<'a, T: Element>(
        &self,
        send: (DeviceSlice<T>, Parts<'a>),
        recv: (DeviceSlice<T>, Parts<'a>),
    ) -> Result<[Side<'a, T>; 2]> {
        let (ranks, me) = (self.communicator.n_ranks(), self.communicator.rank());
        let [send, recv] = [send, recv].map(|(slice, parts)| Side { slice, parts });
        send.check("the buffer to send", ranks)?;
        recv.check("the buffer to receive in", ranks)?;
        let (sent, received) = (send.parts.counts[me], recv.parts.counts[me]);
        refuse_if!(
            sent != received,
            "rank {me} sends itself {sent} elements and receives {received}"
        );
        recv.require_apart(&send)?;
        Ok([send, recv])
    }

    /// Returns how the long messages are sent, and why; how the short ones are sent, if this rank
    /// neither sends nor receives a long one.
    pub(super) fn explain_exchange_v<T: Element>(&self, sides: &[Side<'_, T>; 2]) -> Explanation {
        let Some(workspace) = &self.workspace else {
            return Request::by_nccl(AllToAll, self.unreached()).model();
        };
        let (longest, short) = self.short_messages(workspace, sides);
        if !self.has_long(sides, longest) {
            return short.model();
        }
        let has_window = Window::<u8>::containing(&sides[1].slice, &self.communicator).is_some();
        let push = has_window.then(|| workspace.plan(Algorithm::Push, room::PUSH_EXCHANGE_V));
        Request { push, ..Request::by_nccl(AllToAll, NOT_IN_WINDOW) }.model()
    }

    /// Returns whether this rank sends a long message to another rank, or receives one from it.
    fn has_long<T: Element>(&self, sides: &[Side<'_, T>; 2], longest: usize) -> bool {
        let me = self.communicator.rank();
        let is_long = |(rank, bytes)| rank != me && bytes > longest;
        sides.iter().any(|side| side.sizes().enumerate().any(is_long))
    }

    /// Returns the most bytes of a short message, and the request for the kernel that sends the
    /// short messages: it has the slots that the longest short message of this rank needs. A rank
    /// knows only the lengths of messages that it sends or receives, so the number of slots and the
    /// grid may differ between ranks.
    fn short_messages<T: Element>(
        &self,
        workspace: &Workspace,
        sides: &[Side<'_, T>; 2],
    ) -> (usize, Request) {
        let longest =
            lamport_exchange_v::longest(workspace.options.slots(self.communicator.n_ranks()));
        let sizes = sides.iter().flat_map(Side::sizes).filter(|bytes| *bytes <= longest);
        let request = Request {
            slots: Some(lamport_exchange_v::slots(sizes.max().unwrap_or(0)) as u32),
            // At most one block for each multiprocessor, which has room for a block of these
            // threads: so all blocks run at the same time.
            most_blocks: self.smallest.multiprocessors,
            most_threads: workspace.threads(room::LAMPORT_EXCHANGE_V),
            ..Request::by_nccl(AllToAll, NOT_IN_WINDOW)
        };
        (longest, request)
    }

    /// Fails on all ranks of a checked world if the counts of a sender and a receiver differ, or if
    /// the two ranks of a message of more than `longest` bytes receive in different windows.
    /// `window` is the number of the window in which this rank receives; numbers begin at 1.
    fn compare_counts<T: Element>(
        &self,
        [sent, received]: [Parts<'_>; 2],
        window: Option<u64>,
        longest: usize,
    ) -> Result<()> {
        let all = self.communicator.compare_numbers(&self.order, || {
            let counts = sent.counts.iter().chain(received.counts).map(|count| *count as u64);
            let numbers = counts.chain([window.unwrap_or(0)]).collect();
            (format!("all_to_all_v of {}", T::NAME), numbers)
        })?;
        let Some(all) = all else { return Ok(()) };
        let ranks = all.len();
        for (from, to) in (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to))) {
            let (sent, received) = (all[from][to], all[to][ranks + from]);
            refuse_if!(
                sent != received,
                "all_to_all_v: rank {from} sends rank {to} {sent} elements, and rank {to} \
                 receives {received} from it"
            );
            let is_long = sent as usize * size_of::<T>() > longest && from != to;
            refuse_if!(
                is_long && all[from][2 * ranks] != all[to][2 * ranks],
                "all_to_all_v: ranks {from} and {to} receive in different windows: receive in \
                 the same window on all ranks, or in none"
            );
        }
        Ok(())
    }

    /// Sends and receives by NCCL those messages for whose peer and length in bytes `wanted`
    /// returns true.
    fn send_by_nccl<T: Element>(
        &self,
        send: &Side<'_, T>,
        recv: &Side<'_, T>,
        stream: &Stream,
        wanted: impl Fn(usize, usize) -> bool,
    ) -> Result<()> {
        let communicator = &self.communicator;
        group(|_| {
            for peer in 0..communicator.n_ranks() {
                let [sent, received] = [send, recv].map(|side| side.size(peer));
                if sent > 0 && wanted(peer, sent) {
                    communicator.send(&send.part(peer)?, peer, stream)?;
                }
                if received > 0 && wanted(peer, received) {
                    communicator.recv(&recv.part(peer)?, peer, stream)?;
                }
            }
            Ok(())
        })
    }
}

impl<T: Element> Side<'_, T> {
    fn check(&self, what: &str, ranks: usize) -> Result<()> {
        let (Parts { counts, offsets }, len) = (self.parts, self.slice.len());
        refuse_if!(
            counts.len() != ranks || offsets.len() != ranks,
            "{what} has {} counts and {} offsets for {ranks} ranks",
            counts.len(),
            offsets.len()
        );
        for (rank, (count, offset)) in counts.iter().zip(offsets).enumerate() {
            refuse_if!(
                offset.checked_add(*count).is_none_or(|end| end > len),
                "{what} has {len} elements, and not {count} from {offset} on for rank {rank}"
            );
        }
        Ok(())
    }

    /// Fails if the parts to receive in overlap each other, or a part to send.
    fn require_apart(&self, send: &Self) -> Result<()> {
        let received = self.ranges();
        for [(_, end, one), (begin, _, other)] in received.array_windows() {
            refuse_if!(begin < end, "the parts to receive from ranks {one} and {other} in overlap");
        }
        let sent = if self.slice.overlaps(&send.slice) { send.ranges() } else { Vec::new() };
        for (begin, end, from) in &received {
            for (first, last, to) in &sent {
                refuse_if!(
                    first < end && begin < last,
                    "the part to receive from rank {from} in overlaps that to send to rank {to}"
                );
            }
        }
        Ok(())
    }

    /// Returns the addresses at which the parts that are not empty begin and end, and the ranks of
    /// the parts, sorted by address.
    fn ranges(&self) -> Vec<(u64, u64, usize)> {
        let at = |index: usize| self.slice.device_address() + (index * size_of::<T>()) as u64;
        let Parts { counts, offsets } = self.parts;
        let parts = counts.iter().zip(offsets).enumerate().filter(|(_, (count, _))| **count > 0);
        let mut ranges: Vec<_> =
            parts.map(|(rank, (count, offset))| (at(*offset), at(offset + count), rank)).collect();
        ranges.sort_unstable();
        ranges
    }

    fn sizes(&self) -> impl Iterator<Item = usize> {
        self.parts.counts.iter().map(|count| count * size_of::<T>())
    }

    fn size(&self, rank: usize) -> usize {
        self.parts.counts[rank] * size_of::<T>()
    }

    fn part(&self, rank: usize) -> Result<DeviceSlice<T>> {
        let Parts { counts, offsets } = self.parts;
        self.slice.slice(offsets[rank]..offsets[rank] + counts[rank])
    }

    /// Returns the parts in bytes, for kernels. These need a workspace, which at most 8 ranks have,
    /// so that the arrays are long enough.
    fn bytes(&self) -> exchange::Parts {
        let mut parts = exchange::Parts::default();
        let Parts { counts, offsets } = self.parts;
        for (rank, (&count, &offset)) in counts.iter().zip(offsets).enumerate() {
            parts.at[rank] = offset * size_of::<T>();
            parts.bytes[rank] = count * size_of::<T>();
        }
        parts
    }
}

#[cfg(test)]
mod tests;
