//! Collectives. They run once the streams of all ranks have reached them.

use std::ffi::c_int;
use std::rc::Rc;

use devcomm_sys::driver::CUresult;
use devcomm_types::DataType;

use super::batch::PendingOp;
use super::call::{CallContext, NcclError, NcclResult};
use super::comm::{Comm, RankComm};
use super::operator::Operator;
use super::reduce::{self, Input};
use crate::base::arguments::Arguments;
use crate::machine::core::Core;
use crate::machine::driver;
use crate::race::{Clock, OpAccess};

/// The kind of a collective.
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

impl Kind {
    /// Returns the name of the NCCL function that performs it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "ncclAllReduce",
            Self::Broadcast => "ncclBroadcast",
            Self::Reduce => "ncclReduce",
            Self::AllGather => "ncclAllGather",
            Self::ReduceScatter => "ncclReduceScatter",
            Self::AllToAll => "ncclAlltoAll",
            Self::Gather => "ncclGather",
            Self::Scatter => "ncclScatter",
        }
    }
}

/// One rank's arguments of a collective.
#[derive(Clone, Copy, Debug)]
pub(super) struct Collective {
    pub(super) kind: Kind,
    pub(super) send: usize,
    pub(super) recv: usize,
    /// The count that the NCCL function takes.
    pub(super) count: usize,
    pub(super) data_type: DataType,
    pub(super) operator: Operator,
    pub(super) root: usize,
}

impl Collective {
    /// Returns the bytes of one block: the `count` elements of the NCCL function.
    fn block_bytes(&self) -> usize {
        self.count * self.data_type.size()
    }

    /// Returns the numbers of bytes that `rank` of `n` reads and writes.
    pub(super) fn bytes(&self, rank: usize, n: usize) -> (usize, usize) {
        let (block, is_root) = (self.block_bytes(), rank == self.root);
        let all = block * n;
        let if_root = |bytes: usize| if is_root { bytes } else { 0 };
        match self.kind {
            Kind::AllReduce => (block, block),
            Kind::Broadcast => (if_root(block), block),
            Kind::Reduce => (block, if_root(block)),
            Kind::AllGather => (block, all),
            Kind::ReduceScatter => (all, block),
            Kind::AllToAll => (all, all),
            Kind::Gather => (block, if_root(all)),
            Kind::Scatter => (if_root(all), block),
        }
    }

    /// Returns whether NCCL 2.32.3 lacks the symmetric kernel that it takes for windows: it has
    /// none that averages floats in an all-reduce.
    pub(super) fn needs_missing_kernel(&self) -> bool {
        let is_float = matches!(
            self.data_type,
            DataType::Float32
                | DataType::Float16
                | DataType::Bfloat16
                | DataType::Float8e4m3
                | DataType::Float8e5m2
        );
        self.kind == Kind::AllReduce && self.operator == Operator::Avg && is_float
    }

    /// Returns whether the arguments that must be equal on all ranks are equal.
    fn matches(&self, other: &Self) -> bool {
        (self.kind, self.count, self.data_type, self.root)
            == (other.kind, other.count, other.data_type, other.root)
            && self.operator.same_kind(other.operator)
    }
}

/// Text for error messages.
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
pub(super) struct PendingCollective {
    /// Arguments and state of each rank that has arrived.
    arrived: Vec<Option<(Collective, Rc<PendingOp>)>>,
}

impl Comm {
    /// Records that a rank's stream has reached collective `number`, and runs it if all have.
    pub(super) fn arrive(
        &self,
        core: &Core,
        number: u64,
        rank: usize,
        own: Collective,
        pending: Rc<PendingOp>,
    ) {
        let mut all = self.pending_collectives.borrow_mut();
        let n = self.n_ranks();
        let collective =
            all.entry(number).or_insert_with(|| PendingCollective { arrived: vec![None; n] });
        let mut others = collective.arrived.iter().enumerate();
        let first = others.find_map(|(rank, call)| call.as_ref().map(|(first, _)| (rank, *first)));
        if let Some((other, first)) = first.filter(|(_, first)| !first.matches(&own)) {
            drop(all);
            let text = format!("rank {other} calls {first}, but rank {rank} calls {own}");
            return self.fail(&NcclError::usage(text));
        }
        collective.arrived[rank] = Some((own, pending));
        if self.missing(collective).is_empty() {
            let Some(collective) = all.remove(&number) else { return };
            drop(all);
            let calls: Vec<_> = collective.arrived.into_iter().flatten().collect();
            match self.run(core, &calls) {
                Ok(()) => calls.iter().for_each(|(_, pending)| pending.is_done.set(true)),
                Err(error) => core.fail_operation(own, error),
            }
        }
    }

    /// Returns the ranks that have not reached the collective, or have cancelled it.
    fn missing(&self, collective: &PendingCollective) -> Vec<usize> {
        let has_arrived = |call: &Option<(Collective, Rc<PendingOp>)>| {
            call.as_ref().is_some_and(|(_, pending)| !pending.is_cancelled())
        };
        let calls = collective.arrived.iter().enumerate();
        calls.filter(|(_, call)| !has_arrived(call)).map(|(rank, _)| rank).collect()
    }

    /// Describes a pending collective and the ranks that it waits for.
    pub(super) fn describe(&self, number: u64, own: Collective) -> String {
        let missing = self.pending_collectives.borrow().get(&number).map(|c| self.missing(c));
        match missing {
            Some(missing) => format!("{own} for ranks {missing:?}"),
            None => own.to_string(),
        }
    }

    /// Reduces and copies the data. `calls` has each rank's arguments.
    fn run(
        &self,
        core: &Core,
        calls: &[(Collective, Rc<PendingOp>)],
    ) -> Result<(), driver::CudaError> {
        let Some((first, _)) = calls.first() else { return Ok(()) };
        let (n, block, root) = (calls.len(), first.block_bytes(), first.root);
        for (rank, (own, _)) in calls.iter().enumerate() {
            let (reads, writes) = own.bytes(rank, n);
            check(core, self.gpu(rank), own.send, reads)?;
            check(core, self.gpu(rank), own.recv, writes)?;
        }
        // What a rank receives from another tells it that the other one has begun.
        let mut known = Clock::default();
        for (rank, (own, pending)) in calls.iter().enumerate() {
            let (reads, writes) = own.bytes(rank, n);
            core.access_by(&pending.race, own.send, reads, OpAccess::Read)?;
            core.access_by(&pending.race, own.recv, writes, OpAccess::Write)?;
            core.memory.races.join(&mut known, &pending.race.1);
        }
        for (rank, (_, pending)) in calls.iter().enumerate() {
            let learned = match first.kind {
                Kind::Broadcast | Kind::Scatter if rank == root => continue,
                Kind::Broadcast | Kind::Scatter => &calls[root].1.race.1,
                Kind::Reduce | Kind::Gather if rank != root => continue,
                _ => &known,
            };
            pending.learned.replace(learned.clone());
        }
        // Addresses of blocks; unused ones may be invalid.
        let send = |rank: usize, index: usize| at(calls[rank].0.send).wrapping_add(index * block);
        let recv = |rank: usize, index: usize| at(calls[rank].0.recv).wrapping_add(index * block);
        let mut combined = Vec::new();
        if matches!(first.kind, Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter) {
            let input = |(rank, (own, _)): (usize, &(Collective, _))| {
                let scalar = own.operator.scalar(core, self.gpu(rank), own.data_type)?;
                Ok::<_, driver::CudaError>(Input { elements: send(rank, 0), scalar })
            };
            let inputs = calls.iter().enumerate().map(input).collect::<Result<Vec<_>, _>>()?;
            let count = first.bytes(root, n).0 / first.data_type.size();
            // SAFETY: the inputs' memory was checked, and no kernel runs now.
            combined = unsafe { reduce::combine(first.data_type, first.operator, &inputs, count) };
        }
        let result = |index: usize| combined.as_ptr().wrapping_add(index * block).cast_mut();
        let pairs = || (0..n).flat_map(|to| (0..n).map(move |from| (from, to)));
        let copies: Vec<(*mut u8, *mut u8)> = match first.kind {
            Kind::AllReduce => (0..n).map(|to| (result(0), recv(to, 0))).collect(),
            Kind::Reduce => vec![(result(0), recv(root, 0))],
            Kind::ReduceScatter => (0..n).map(|to| (result(to), recv(to, 0))).collect(),
            Kind::Broadcast => (0..n).map(|to| (send(root, 0), recv(to, 0))).collect(),
            Kind::Scatter => (0..n).map(|to| (send(root, to), recv(to, 0))).collect(),
            Kind::Gather => (0..n).map(|from| (send(from, 0), recv(root, from))).collect(),
            Kind::AllGather => pairs().map(|(from, to)| (send(from, 0), recv(to, from))).collect(),
            Kind::AllToAll => pairs().map(|(from, to)| (send(from, to), recv(to, from))).collect(),
        };
        for (from, to) in copies {
            // SAFETY: all blocks were checked above, and no kernel runs now. In place, a block
            // that copies read is written only by a copy to itself.
            unsafe { to.copy_from(from, block) };
        }
        Ok(())
    }
}

/// Returns a pointer to an address, whose provenance was exposed.
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
    Err(inaccessible(core, address, bytes))
}

/// Returns the error of an operation on memory that it cannot access.
pub(super) fn inaccessible(core: &Core, address: usize, bytes: usize) -> driver::CudaError {
    let location = core.memory.describe(address, &Arguments::default());
    let text = format!("an NCCL operation uses {bytes} bytes at {address:#x}: {location}");
    driver::CudaError::new(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, text)
}

/// Returns the data type of an `ncclDataType_t`.
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
    pub(super) fn check_access(
        &self,
        rank_comm: &RankComm,
        address: usize,
        bytes: usize,
    ) -> NcclResult<()> {
        if bytes == 0 || self.core.memory.contains(rank_comm.gpu as u32, address, bytes) {
            return Ok(());
        }
        let (gpu, location) =
            (rank_comm.gpu, self.core.memory.describe(address, &Arguments::default()));
        let text =
            format!("{bytes} bytes at {address:#x}, which GPU {gpu} cannot access: {location}");
        Err(NcclError::argument(text))
    }
}
