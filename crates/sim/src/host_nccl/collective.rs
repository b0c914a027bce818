//! Collectives. Data moves once the streams of all ranks have reached the operation.

use std::ffi::c_int;
use std::rc::Rc;

use devcomm_sys::driver::CUresult;
use devcomm_types::DataType;

use super::batch::PendingOp;
use super::call::{CallContext, NcclError, NcclResult};
use super::comm::{Comm, RankComm};
use super::operator::Operator;
use super::reduce::{self, Input};
use crate::driver;
use crate::machine::core::Core;

/// Which collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Gather,
    Scatter,
}

/// One rank's arguments.
#[derive(Clone, Copy, Debug)]
pub(super) struct Collective {
    pub(super) kind: Kind,
    pub(super) send: usize,
    pub(super) recv: usize,
    /// In NCCL's unit for the collective.
    pub(super) count: usize,
    pub(super) data_type: DataType,
    pub(super) operator: Operator,
    pub(super) root: usize,
}

impl Collective {
    fn part(&self) -> usize {
        self.count * self.data_type.size()
    }

    /// Bytes that it reads and writes on `rank` of `n`.
    pub(super) fn bytes(&self, rank: usize, n: usize) -> (usize, usize) {
        let (part, all, is_root) = (self.part(), self.part() * n, rank == self.root);
        let of_root = |bytes: usize| if is_root { bytes } else { 0 };
        match self.kind {
            Kind::AllReduce => (part, part),
            Kind::Broadcast => (of_root(part), part),
            Kind::Reduce => (part, of_root(part)),
            Kind::AllGather => (part, all),
            Kind::ReduceScatter => (all, part),
            Kind::AllToAll => (all, all),
            Kind::Gather => (part, of_root(all)),
            Kind::Scatter => (of_root(all), part),
        }
    }

    /// Whether all arguments that must be equal on all ranks are.
    fn matches(&self, other: &Self) -> bool {
        (self.kind, self.count, self.data_type, self.root)
            == (other.kind, other.count, other.data_type, other.root)
            && self.operator.same_kind(other.operator)
    }
}

/// For reports.
impl std::fmt::Display for Collective {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { kind, count, data_type, operator, root, .. } = self;
        write!(f, "{kind:?} of {count} {data_type:?}")?;
        match kind {
            Kind::AllReduce | Kind::ReduceScatter => write!(f, " by {operator:?}"),
            Kind::Reduce => write!(f, " by {operator:?} to root {root}"),
            Kind::Broadcast | Kind::Gather | Kind::Scatter => write!(f, " with root {root}"),
            Kind::AllGather | Kind::AllToAll => Ok(()),
        }
    }
}

/// A collective that some ranks have reached.
pub(super) struct Round {
    /// Arguments and state of each rank that has arrived.
    arrived: Vec<Option<(Collective, Rc<PendingOp>)>>,
}

impl Comm {
    /// A rank's stream has reached its collective number `number`.
    pub(super) fn arrive(
        &self,
        core: &Core,
        number: u64,
        rank: usize,
        own: Collective,
        pending: Rc<PendingOp>,
    ) {
        let mut rounds = self.rounds.borrow_mut();
        let n = self.n_ranks();
        let round = rounds.entry(number).or_insert_with(|| Round { arrived: vec![None; n] });
        let mut others = round.arrived.iter().enumerate();
        let first =
            others.find_map(|(rank, place)| place.as_ref().map(|(first, _)| (rank, *first)));
        if let Some((other, first)) = first.filter(|(_, first)| !first.matches(&own)) {
            drop(rounds);
            let text = format!("rank {other} calls {first}, but rank {rank} calls {own}");
            return self.fail(&NcclError::usage(text));
        }
        round.arrived[rank] = Some((own, pending));
        if self.missing(round).is_empty() {
            let Some(round) = rounds.remove(&number) else { return };
            drop(rounds);
            let parts: Vec<_> = round.arrived.into_iter().flatten().collect();
            match self.run(core, &parts) {
                Ok(()) => parts.iter().for_each(|(_, pending)| pending.is_done.set(true)),
                Err(error) => core.fail_with(error),
            }
        }
    }

    /// The ranks that have not arrived, or have cancelled since.
    fn missing(&self, round: &Round) -> Vec<usize> {
        let is_there = |place: &Option<(Collective, Rc<PendingOp>)>| {
            place.as_ref().is_some_and(|(_, pending)| !pending.is_cancelled())
        };
        let places = round.arrived.iter().enumerate();
        places.filter(|(_, place)| !is_there(place)).map(|(rank, _)| rank).collect()
    }

    /// What a pending collective waits for.
    pub(super) fn describe(&self, number: u64, own: Collective) -> String {
        let missing = self.rounds.borrow().get(&number).map(|round| self.missing(round));
        match missing {
            Some(missing) => format!("{own} for ranks {missing:?}"),
            None => own.to_string(),
        }
    }

    /// Moves the data.
    fn run(
        &self,
        core: &Core,
        parts: &[(Collective, Rc<PendingOp>)],
    ) -> Result<(), driver::CudaError> {
        let Some((first, _)) = parts.first() else { return Ok(()) };
        let (n, part, root) = (parts.len(), first.part(), first.root);
        for (rank, (own, _)) in parts.iter().enumerate() {
            let (reads, writes) = own.bytes(rank, n);
            check(core, self.gpu(rank), own.send, reads)?;
            check(core, self.gpu(rank), own.recv, writes)?;
        }
        // Addresses of blocks; unused ones may be invalid.
        let sent = |rank: usize, index: usize| at(parts[rank].0.send).wrapping_add(index * part);
        let place = |rank: usize, index: usize| at(parts[rank].0.recv).wrapping_add(index * part);
        let mut combined = Vec::new();
        if matches!(first.kind, Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter) {
            let input = |(rank, (own, _)): (usize, &(Collective, _))| {
                let scalar = own.operator.scalar(core, self.gpu(rank), own.data_type)?;
                Ok::<_, driver::CudaError>(Input { elements: sent(rank, 0), scalar })
            };
            let inputs = parts.iter().enumerate().map(input).collect::<Result<Vec<_>, _>>()?;
            let count = first.bytes(root, n).0 / first.data_type.size();
            // SAFETY: the inputs' memory was checked, and no kernel runs meanwhile.
            combined = unsafe { reduce::combine(first.data_type, first.operator, &inputs, count) };
        }
        let result = |index: usize| combined.as_ptr().wrapping_add(index * part).cast_mut();
        let pairs = || (0..n).flat_map(|to| (0..n).map(move |from| (from, to)));
        let copies: Vec<(*mut u8, *mut u8)> = match first.kind {
            Kind::AllReduce => (0..n).map(|to| (result(0), place(to, 0))).collect(),
            Kind::Reduce => vec![(result(0), place(root, 0))],
            Kind::ReduceScatter => (0..n).map(|to| (result(to), place(to, 0))).collect(),
            Kind::Broadcast => (0..n).map(|to| (sent(root, 0), place(to, 0))).collect(),
            Kind::Scatter => (0..n).map(|to| (sent(root, to), place(to, 0))).collect(),
            Kind::Gather => (0..n).map(|from| (sent(from, 0), place(root, from))).collect(),
            Kind::AllGather => pairs().map(|(from, to)| (sent(from, 0), place(to, from))).collect(),
            Kind::AllToAll => pairs().map(|(from, to)| (sent(from, to), place(to, from))).collect(),
        };
        for (from, to) in copies {
            // SAFETY: both sides were checked above for all blocks, and no kernel runs meanwhile.
            // In place both are the same address, which no other block reads.
            unsafe { to.copy_from(from, part) };
        }
        Ok(())
    }
}

/// The pointer of an address that was exposed.
pub(super) fn at(address: usize) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address)
}

/// Checks that a GPU can still access memory when an operation runs.
pub(super) fn check(
    core: &Core,
    gpu: usize,
    address: usize,
    bytes: usize,
) -> Result<(), driver::CudaError> {
    if bytes == 0 || core.memory.contains(gpu as u32, address, bytes) {
        return Ok(());
    }
    let place = core.memory.describe(address);
    let text = format!("an operation of NCCL uses {bytes} bytes at {address:#x}: {place}");
    Err(driver::CudaError::new(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, text))
}

/// The data type of an `ncclDataType_t`.
pub(super) fn data_type(number: c_int) -> NcclResult<DataType> {
    use DataType as T;
    const ALL: [DataType; 12] = [
        T::Int8,
        T::Uint8,
        T::Int32,
        T::Uint32,
        T::Int64,
        T::Uint64,
        T::Float16,
        T::Float32,
        T::Float64,
        T::Bfloat16,
        T::Float8e4m3,
        T::Float8e5m2,
    ];
    let known = ALL.into_iter().find(|known| *known as c_int == number);
    known.ok_or_else(|| NcclError::argument(format!("no data type has number {number}")))
}

impl CallContext<'_> {
    /// Checks that the communicator's GPU can access memory.
    pub(super) fn reached(
        &self,
        rank_comm: &RankComm,
        address: usize,
        bytes: usize,
    ) -> NcclResult<()> {
        if bytes == 0 || self.core.memory.contains(rank_comm.gpu as u32, address, bytes) {
            return Ok(());
        }
        let (gpu, place) = (rank_comm.gpu, self.core.memory.describe(address));
        let text =
            format!("{bytes} bytes at {address:#x}, which GPU {gpu} does not reach: {place}");
        Err(NcclError::argument(text))
    }
}
