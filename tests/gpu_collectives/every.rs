//! Runs a collective on elements of a type chosen at run time, and computes the expected result.

use std::ops::Range;

use devcomm::{
    Buffer, CollectiveConfig, Communicator, DeviceSlice, Dynamic, Error, Rank, ReduceOp, Stream,
    SymmetricBuffer, group,
};

use crate::types::{Domain, ElementType, LARGEST, combine};

/// Returns the element counts: one, a few, a multiple of 8, and a large odd number, on real GPUs
/// above 64 Ki.
pub fn counts(rank: &Rank) -> [usize; 4] {
    [1, 3, 1000, if rank.is_simulated() { 4097 } else { 65_537 }]
}

/// The number of bytes after each result that must not change, and their value.
const GUARD: usize = 64;
const UNTOUCHED: u8 = 0xa5;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Collective {
    AllReduce,
    Reduce,
    ReduceScatter,
    Broadcast,
    AllGather,
    AllToAll,
    Gather,
    Scatter,
    /// Sends to the next rank, receives from the previous one.
    SendRecv,
}

impl Collective {
    /// The collectives that take a configuration.
    pub const CONFIGURABLE: [Self; 8] = [
        Self::AllReduce,
        Self::Reduce,
        Self::ReduceScatter,
        Self::Broadcast,
        Self::AllGather,
        Self::AllToAll,
        Self::Gather,
        Self::Scatter,
    ];

    pub fn works_in_place(self) -> bool {
        !matches!(self, Self::AllToAll | Self::SendRecv)
    }
}

/// One call of a collective on every rank. `count` is the length of one rank's chunk.
pub struct Case<'a> {
    pub collective: Collective,
    pub element: &'a ElementType,
    pub op: ReduceOp,
    pub count: usize,
    pub root: usize,
    /// Every rank's values.
    pub values: &'a [Vec<i32>],
}

/// Runs cases on one rank, with one communicator, stream and pair of buffers.
pub struct Runner<'a> {
    rank: &'a Rank,
    comm: &'a Communicator,
    stream: Stream,
    send: SymmetricBuffer<u8>,
    recv: SymmetricBuffer<u8>,
    config: Option<CollectiveConfig>,
}

impl<'a> Runner<'a> {
    pub fn new(rank: &'a Rank) -> Result<Self, Error> {
        let comm = rank.communicator()?;
        let bytes = rank.n_ranks() * counts(rank)[3] * LARGEST + GUARD;
        let (send, recv) = (comm.mem_alloc(bytes)?, comm.mem_alloc(bytes)?);
        Ok(Self { rank, comm, stream: rank.stream()?, send, recv, config: None })
    }

    /// Makes every call with a configuration.
    pub fn configured(self, config: CollectiveConfig) -> Self {
        Self { config: Some(config), ..self }
    }

    /// Returns every rank's values, enough for the largest case.
    pub fn values(&self, domain: Domain) -> Vec<Vec<i32>> {
        let n = self.rank.n_ranks();
        let len = n * counts(self.rank)[3];
        let values = |rank| (0..len).map(|i| domain.value(n, rank, i)).collect();
        (0..n).map(values).collect()
    }

    /// Runs a case, and checks every byte of the result, of the guard after it, and of the input.
    pub fn check(&self, case: &Case, in_place: bool) -> Result<(), Error> {
        let (me, n) = (self.rank.rank(), self.rank.n_ranks());
        let (input, output) = case.ranges(me, n, in_place);
        let element = case.element;
        let target = if in_place { &self.send } else { &self.recv };
        let bytes = |range: &Range<usize>| range.start * element.size()..range.end * element.size();

        let end = if in_place { output.end.max(input.end) } else { output.end } * element.size();
        target.slice(..end + GUARD)?.fill_bytes(UNTOUCHED)?;
        let given = element.encode(&case.values[me][..input.len()]);
        self.send.slice(bytes(&input))?.copy_from_host(&given)?;

        let send = self.dynamic(&self.send, &input, element);
        let recv = self.dynamic(target, &output, element);
        self.enqueue(case, &send, &recv)?;
        self.stream.synchronize()?;

        let what = || {
            let Case { collective, count, op, root, .. } = *case;
            let (data_type, place) = (element.data_type, if in_place { "in" } else { "out of" });
            format!(
                "{collective:?} ({op:?}, root {root}) of {count} {data_type:?} {place} place, \
                 rank {me} of {n}"
            )
        };
        let mut got = vec![0; end + GUARD];
        target.slice(..end + GUARD)?.copy_to_host(&mut got)?;
        let untouched = |range: &[u8]| range.iter().all(|&byte| byte == UNTOUCHED);
        let result = &got[bytes(&output)];
        match case.expected(me, n) {
            Some(expected) => {
                let expected = element.encode(&expected);
                if let Some(at) = result.iter().zip(&expected).position(|(a, b)| a != b) {
                    panic!("{}: element {} is wrong", what(), at / element.size());
                }
            }
            None => assert!(in_place || untouched(result), "{}: only the root receives", what()),
        }
        assert!(untouched(&got[end..]), "{}: overrun", what());
        if !in_place {
            let mut input_after = vec![0; given.len()];
            self.send.slice(bytes(&input))?.copy_to_host(&mut input_after)?;
            assert!(input_after == given, "{}: the input has changed", what());
        }
        Ok(())
    }

    fn dynamic(
        &self,
        memory: &SymmetricBuffer<u8>,
        range: &Range<usize>,
        element: &ElementType,
    ) -> DeviceSlice<Dynamic> {
        let address = memory.device_address() + (range.start * element.size()) as u64;
        // SAFETY: the memory has room for every rank's chunk of the largest case, at aligned
        // addresses, and lives until the stream was synchronized.
        unsafe {
            DeviceSlice::from_raw_parts_dynamic(
                self.rank.context(),
                address,
                range.len(),
                element.data_type,
            )
        }
    }

    fn enqueue(
        &self,
        case: &Case,
        send: &DeviceSlice<Dynamic>,
        recv: &DeviceSlice<Dynamic>,
    ) -> Result<(), Error> {
        let Case { collective, op, root, .. } = *case;
        let (me, n, stream) = (self.rank.rank(), self.rank.n_ranks(), &self.stream);
        let at_root = |slice: &DeviceSlice<Dynamic>| (me == root).then(|| slice.clone());
        macro_rules! call {
            ($on:expr) => {
                match collective {
                    Collective::AllReduce => $on.all_reduce(send, recv, op, stream),
                    Collective::Reduce => $on.reduce(send, at_root(recv), op, root, stream),
                    Collective::ReduceScatter => $on.reduce_scatter(send, recv, op, stream),
                    Collective::Broadcast => $on.broadcast(at_root(send), recv, root, stream),
                    Collective::AllGather => $on.all_gather(send, recv, stream),
                    Collective::AllToAll => $on.all_to_all(send, recv, stream),
                    Collective::Gather => $on.gather(send, at_root(recv), root, stream),
                    Collective::Scatter => $on.scatter(at_root(send), recv, root, stream),
                    Collective::SendRecv => group(|_| {
                        self.comm.send(send, (me + 1) % n, stream)?;
                        self.comm.recv(recv, (me + n - 1) % n, stream)
                    }),
                }
            };
        }
        match &self.config {
            Some(config) => call!(self.comm.configured(config)?),
            None => call!(self.comm),
        }
    }
}

impl Case<'_> {
    /// Returns the ranges of a rank's input and output, in elements. In place, the smaller one is
    /// the rank's chunk of the larger.
    fn ranges(&self, me: usize, n: usize, in_place: bool) -> (Range<usize>, Range<usize>) {
        let (one, all) = (self.count, n * self.count);
        let chunk = if in_place { me * one..(me + 1) * one } else { 0..one };
        match self.collective {
            Collective::AllReduce
            | Collective::Reduce
            | Collective::Broadcast
            | Collective::SendRecv => (0..one, 0..one),
            Collective::AllGather | Collective::Gather => (chunk, 0..all),
            Collective::ReduceScatter | Collective::Scatter => (0..all, chunk),
            Collective::AllToAll => (0..all, 0..all),
        }
    }

    /// Returns the expected result of this rank, if it gets one.
    fn expected(&self, me: usize, n: usize) -> Option<Vec<i32>> {
        let count = self.count;
        let chunk = |rank: usize| rank * count..(rank + 1) * count;
        let combined = |range: Range<usize>| -> Vec<i32> {
            let mut column = vec![0; n];
            range
                .map(|i| {
                    column.iter_mut().zip(self.values).for_each(|(x, values)| *x = values[i]);
                    combine(self.op, &column)
                })
                .collect()
        };
        let joined = |range: Range<usize>| -> Vec<i32> {
            self.values.iter().flat_map(|values| &values[range.clone()]).copied().collect()
        };
        let at_root = |values: Vec<i32>| (me == self.root).then_some(values);
        match self.collective {
            Collective::AllReduce => Some(combined(0..count)),
            Collective::Reduce => at_root(combined(0..count)),
            Collective::ReduceScatter => Some(combined(chunk(me))),
            Collective::Broadcast => Some(self.values[self.root][..count].to_vec()),
            Collective::AllGather => Some(joined(0..count)),
            Collective::Gather => at_root(joined(0..count)),
            Collective::AllToAll => Some(joined(chunk(me))),
            Collective::Scatter => Some(self.values[self.root][chunk(me)].to_vec()),
            Collective::SendRecv => Some(self.values[(me + n - 1) % n][..count].to_vec()),
        }
    }
}
