//! All-to-all with a length for each pair of ranks.

use devcomm_host::{Buffer, DeviceSlice, Result, Stream, Window, group};
use devcomm_kernels as kernels;
use devcomm_kernels::collectives::{exchange, lamport_exchange_v, room};
use devcomm_types::Element;

use super::plan::threads;
use super::{Algorithm, CollectivePlan, Collectives, Operation, PLAIN, Request, Way, Workspace};
use crate::check::refuse;

/// The part of a buffer that belongs to each rank, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts<'a> {
    /// How many elements, for each rank; any number, also 0.
    pub counts: &'a [usize],
    /// Where the first one is, for each rank.
    pub offsets: &'a [usize],
}

/// A buffer with its parts.
struct Side<'a, T> {
    slice: DeviceSlice<T>,
    parts: Parts<'a>,
}

impl Collectives {
    /// Every rank's part of `send` for rank `r` goes to `r`'s part of `recv` for that rank. Both
    /// have the same count, which a checked world compares: elsewhere what arrives is cut, or
    /// missing, or a kernel traps. The parts of `recv` do not overlap, with each other and with
    /// `send`. Not in place.
    ///
    /// Short messages are sent in one step; long ones are stored to the peers if `recv` is in a
    /// window, in every rank in the same one or in none, and otherwise sent by NCCL.
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
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for parts that are not one for
    /// each rank, not within the buffer or overlap, for buffers of other contexts, and in a checked
    /// world for counts or windows that do not match; those of the launch; as
    /// [`Communicator::send`](devcomm_host::Communicator::send).
    pub fn all_to_all_v<S, R>(
        &self,
        send: &S,
        sent: Parts<'_>,
        recv: &R,
        received: Parts<'_>,
        stream: &Stream,
    ) -> Result<()>
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        let (ranks, me) = (self.communicator.n_ranks(), self.communicator.rank());
        let send = Side { slice: send.device_slice(), parts: sent };
        let recv = Side { slice: recv.device_slice(), parts: received };
        send.check("the buffer to send", ranks)?;
        recv.check("the buffer to receive in", ranks)?;
        if sent.counts[me] != received.counts[me] {
            let (sent, received) = (sent.counts[me], received.counts[me]);
            return refuse(format!(
                "rank {me} sends itself {sent} elements and receives {received}"
            ));
        }
        recv.require_apart(&send)?;
        self.require_own(Some(&send.slice), &recv.slice, stream)?;
        let Some(workspace) = &self.workspace else {
            if let Way::None = self.way(Request::by_nccl(Operation::Other, self.unreached())) {
                return Ok(());
            }
            self.compare_counts::<S::Element>([sent, received], None, usize::MAX)?;
            return self.send_by_nccl(&send, &recv, stream, |_, _| true);
        };
        // Whether a message is short is known to its two ranks alone.
        let longest = lamport_exchange_v::longest(workspace.options.slots(ranks));
        let is_long = |count: usize| count * size_of::<S::Element>() > longest;
        let counts = || sent.counts.iter().chain(received.counts).copied();
        let short = counts().filter(|count| !is_long(*count)).max().unwrap_or(0);
        let used = lamport_exchange_v::slots(short * size_of::<S::Element>()) as u32;
        let threads = threads(used).min(workspace.options.threads(room::LAMPORT_EXCHANGE_V));
        let blocks = used.div_ceil(threads).min(self.multiprocessors());
        let plan = CollectivePlan { algorithm: Algorithm::Lamport, blocks, threads };
        let window = Window::<u8>::containing(&recv.slice);
        let request = match (&window, counts().any(is_long)) {
            (_, false) => Request::fixed(plan),
            (None, _) => Request::by_nccl(Operation::Other, PLAIN),
            _ => Request {
                push: Some(workspace.grid(room::PUSH_EXCHANGE_V)),
                ..Request::by_nccl(Operation::Other, "")
            },
        };
        if let Way::None = self.way(request) {
            return Ok(());
        }
        let number = window.as_ref().map(|(window, _)| window.number());
        self.compare_counts::<S::Element>([sent, received], number, longest)?;
        let _turn = self.begin(stream)?;
        let Workspace { dev_comm, options, slots, slots_state, offers, arrived, .. } = workspace;
        let capacity = options.capacity(ranks) as u32;
        let [input, output] = [&send, &recv].map(|side| side.slice.device_address());
        let [sent_bytes, received_bytes] = [&send, &recv].map(Side::bytes);
        let offer = |(window, at): &(Window<u8>, usize)| {
            exchange::Target::offer(window.number() as usize, *at)
        };
        let (first, target) = (window.as_ref().map_or(0, offer), self.compiled.on(stream));
        let launch = kernels::lamport_exchange_v::args(
            dev_comm,
            slots,
            slots_state,
            capacity,
            used,
            longest,
            input,
            output,
            sent_bytes,
            received_bytes,
            first,
            offers,
        );
        // The grid differs from the peers', whose blocks are therefore to run at the same time.
        let config = options.config(CollectivePlan { algorithm: Algorithm::Push, ..plan });
        // SAFETY: the parts are within the buffers; dropping one waits for the stream. The
        // workspace is as the kernel needs it, and the launches that use it are ordered.
        unsafe { launch.config(config).launch(&target) }?;
        if is_long(sent.counts[me]) {
            stream.copy(&send.part(me)?, &recv.part(me)?)?;
        }
        let others = |(i, count): (usize, usize)| i % ranks != me && is_long(count);
        match window {
            _ if !counts().enumerate().any(others) => Ok(()),
            None => self.send_by_nccl(&send, &recv, stream, |peer, n| peer != me && is_long(n)),
            Some((output, _)) => {
                let bytes = std::array::from_fn(|rank| output.len_of(rank).unwrap_or(0));
                let room = exchange::Target { number: output.number() as usize, bytes };
                let launch = kernels::push_exchange_v::args(
                    dev_comm,
                    input,
                    &output,
                    room,
                    longest,
                    sent_bytes,
                    received_bytes,
                    offers,
                    arrived,
                );
                let threads = options.threads(room::PUSH_EXCHANGE_V);
                let config = options.config(CollectivePlan {
                    algorithm: Algorithm::Push,
                    blocks: options.blocks(),
                    threads,
                });
                // SAFETY: as above.
                unsafe { launch.config(config).launch(&target) }
            }
        }
    }

    /// In a checked world, fails on all ranks unless the counts match, and messages of more than
    /// `longest` bytes are received in one window or in none.
    fn compare_counts<T: Element>(
        &self,
        [sent, received]: [Parts<'_>; 2],
        window: Option<u64>,
        longest: usize,
    ) -> Result<()> {
        let all = self.communicator.compare_numbers(|| {
            let counts = sent.counts.iter().chain(received.counts).map(|count| *count as u64);
            let numbers = counts.chain([window.unwrap_or(0)]).collect();
            (format!("all_to_all_v of {}", T::NAME), numbers)
        })?;
        let Some(all) = all else { return Ok(()) };
        let ranks = all.len();
        for (from, to) in (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to))) {
            let (sent, received) = (all[from][to], all[to][ranks + from]);
            if sent != received {
                return refuse(format!(
                    "all_to_all_v: rank {from} sends rank {to} {sent} elements, and rank {to} \
                     receives {received} from it"
                ));
            }
            let is_long = sent as usize * size_of::<T>() > longest && from != to;
            if is_long && all[from][2 * ranks] != all[to][2 * ranks] {
                return refuse(format!(
                    "all_to_all_v: ranks {from} and {to} receive in different windows: receive in \
                     the same window on all ranks, or in none"
                ));
            }
        }
        Ok(())
    }

    /// Sends and receives by NCCL the messages that are wanted, by rank and count.
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
                let [sent, received] = [send, recv].map(|side| side.parts.counts[peer]);
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
        if counts.len() != ranks || offsets.len() != ranks {
            let (counts, offsets) = (counts.len(), offsets.len());
            return refuse(format!(
                "{what} has {counts} counts and {offsets} offsets for {ranks} ranks"
            ));
        }
        let is_outside = |(count, offset): (&usize, &usize)| {
            offset.checked_add(*count).is_none_or(|end| end > len)
        };
        match counts.iter().zip(offsets).position(is_outside) {
            None => Ok(()),
            Some(rank) => refuse(format!(
                "{what} has {len} elements, and not {} from {} on for rank {rank}",
                counts[rank], offsets[rank]
            )),
        }
    }

    /// Fails if the parts to receive in overlap each other, or those to send.
    fn require_apart(&self, send: &Self) -> Result<()> {
        let parts = |side: &Self| -> Vec<(u64, u64, usize)> {
            let Parts { counts, offsets } = side.parts;
            let (first, size) = (side.slice.device_address(), size_of::<T>());
            let part = |(rank, (&count, &offset)): (usize, (&usize, &usize))| {
                let from = first + (offset * size) as u64;
                (from, from + (count * size) as u64, rank)
            };
            let parts = counts.iter().zip(offsets).enumerate().map(part);
            let mut parts: Vec<_> = parts.filter(|(from, to, _)| from < to).collect();
            parts.sort_unstable();
            parts
        };
        let received = parts(self);
        if let Some([(.., one), (.., other)]) =
            received.array_windows().find(|[(_, to, _), (from, ..)]| from < to)
        {
            return refuse(format!("the parts to receive from ranks {one} and {other} in overlap"));
        }
        if !self.slice.overlaps(&send.slice) {
            return Ok(());
        }
        let sent = parts(send);
        let meets = |(from, to, _): &&(u64, u64, usize)| {
            sent.iter().find(|(first, end, _)| first < to && from < end)
        };
        match received.iter().find_map(|part| Some((part.2, meets(&part)?.2))) {
            None => Ok(()),
            Some((from, to)) => refuse(format!(
                "the part to receive from rank {from} in overlaps that to send to rank {to}"
            )),
        }
    }

    fn part(&self, rank: usize) -> Result<DeviceSlice<T>> {
        let Parts { counts, offsets } = self.parts;
        self.slice.slice(offsets[rank]..offsets[rank] + counts[rank])
    }

    /// The parts for kernels.
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
