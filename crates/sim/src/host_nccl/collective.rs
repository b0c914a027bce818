//! Collectives. Their data moves when the streams of all ranks have come to them.

use std::ffi::{c_int, c_void};
use std::fmt::Write;
use std::rc::Rc;

use devcomm_sys::driver::CUresult;
use devcomm_sys::nccl::{API_MAGIC, CollConfig, RawComm, RawStream, UNDEF_INT};
use devcomm_types::DataType;

use super::batch::{Operation, Ticket};
use super::call::{Ask, Refusal, Refused, call};
use super::comm::{Comm, Member};
use super::operator::Operator;
use super::reduce::{self, Input};
use crate::driver;
use crate::machine::core::Core;

/// Which one.
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
    kind: Kind,
    send: usize,
    recv: usize,
    /// As NCCL counts for the operation.
    count: usize,
    data_type: DataType,
    operator: Operator,
    root: usize,
}

impl Collective {
    fn part(&self) -> usize {
        self.count * self.data_type.size()
    }

    /// Bytes that it reads and writes on `rank`.
    fn bytes(&self, rank: usize, n: usize) -> (usize, usize) {
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

    /// Whether all arguments that must be the same on two ranks are.
    fn goes_with(&self, other: &Self) -> bool {
        (self.kind, self.count, self.data_type, self.root)
            == (other.kind, other.count, other.data_type, other.root)
            && self.operator.is_like(other.operator)
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

/// A collective that some ranks have come to.
pub(super) struct Round {
    /// For each rank that has.
    arrived: Vec<Option<(Collective, Rc<Ticket>)>>,
}

impl Comm {
    /// A rank's stream has come to its collective of that number.
    pub(super) fn arrive(
        &self,
        core: &Core,
        number: u64,
        rank: usize,
        own: Collective,
        ticket: Rc<Ticket>,
    ) {
        let mut rounds = self.rounds.borrow_mut();
        let n = self.n_ranks();
        let round = rounds.entry(number).or_insert_with(|| Round { arrived: vec![None; n] });
        let mut others = round.arrived.iter().enumerate();
        let first =
            others.find_map(|(rank, place)| place.as_ref().map(|(first, _)| (rank, *first)));
        if let Some((other, first)) = first.filter(|(_, first)| !first.goes_with(&own)) {
            drop(rounds);
            let text = format!("rank {other} calls {first}, but rank {rank} calls {own}");
            return self.fail(&Refusal::usage(text));
        }
        round.arrived[rank] = Some((own, ticket));
        if self.missing(round).is_empty() {
            let Some(round) = rounds.remove(&number) else { return };
            drop(rounds);
            let parts: Vec<_> = round.arrived.into_iter().flatten().collect();
            match self.run(core, &parts) {
                Ok(()) => parts.iter().for_each(|(_, ticket)| ticket.is_done.set(true)),
                Err(refusal) => core.fail_with(refusal),
            }
        }
    }

    /// The ranks that have not come, or have ended it since.
    fn missing(&self, round: &Round) -> Vec<usize> {
        let is_there = |place: &Option<(Collective, Rc<Ticket>)>| {
            place.as_ref().is_some_and(|(_, ticket)| !ticket.is_cut())
        };
        let places = round.arrived.iter().enumerate();
        places.filter(|(_, place)| !is_there(place)).map(|(rank, _)| rank).collect()
    }

    /// What a collective that is waiting waits for.
    pub(super) fn describe(&self, number: u64, own: Collective) -> String {
        let missing = self.rounds.borrow().get(&number).map(|round| self.missing(round));
        match missing {
            Some(missing) => format!("{own} for ranks {missing:?}"),
            None => own.to_string(),
        }
    }

    /// Moves the data.
    fn run(&self, core: &Core, parts: &[(Collective, Rc<Ticket>)]) -> Result<(), driver::Refusal> {
        let Some((first, _)) = parts.first() else { return Ok(()) };
        let (n, part, root) = (parts.len(), first.part(), first.root);
        for (rank, (own, _)) in parts.iter().enumerate() {
            let (reads, writes) = own.bytes(rank, n);
            check(core, self.gpu(rank), own.send, reads)?;
            check(core, self.gpu(rank), own.recv, writes)?;
        }
        // Addresses of parts; those that are not used may be any.
        let sent = |rank: usize, index: usize| at(parts[rank].0.send).wrapping_add(index * part);
        let place = |rank: usize, index: usize| at(parts[rank].0.recv).wrapping_add(index * part);
        let mut combined = Vec::new();
        if matches!(first.kind, Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter) {
            let input = |(rank, (own, _)): (usize, &(Collective, _))| {
                let scalar = own.operator.scalar(core, self.gpu(rank), own.data_type)?;
                Ok::<_, driver::Refusal>(Input { elements: sent(rank, 0), scalar })
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
            // SAFETY: both sides were checked above for all their parts, and no kernel runs
            // meanwhile. In place they are the same, and nothing else is read from there.
            unsafe { to.copy_from(from, part) };
        }
        Ok(())
    }
}

/// An address as a program has it.
pub(super) fn at(address: usize) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address)
}

/// Whether a GPU still reaches memory, as an operation comes to use it.
pub(super) fn check(
    core: &Core,
    gpu: usize,
    address: usize,
    bytes: usize,
) -> Result<(), driver::Refusal> {
    if bytes == 0 || core.memory.contains(gpu as u32, address, bytes) {
        return Ok(());
    }
    let place = core.memory.describe(address);
    let text = format!("an operation of NCCL uses {bytes} bytes at {address:#x}: {place}");
    Err(driver::Refusal::new(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, text))
}

/// The type of NCCL's number.
pub(super) fn data_type(number: c_int) -> Refused<DataType> {
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
    known.ok_or_else(|| Refusal::argument(format!("no data type has number {number}")))
}

impl Ask<'_> {
    /// Refuses memory that the communicator's GPU does not reach.
    pub(super) fn reached(&self, member: &Member, address: usize, bytes: usize) -> Refused<()> {
        if bytes == 0 || self.core.memory.contains(member.gpu as u32, address, bytes) {
            return Ok(());
        }
        let (gpu, place) = (member.gpu, self.core.memory.describe(address));
        let text =
            format!("{bytes} bytes at {address:#x}, which GPU {gpu} does not reach: {place}");
        Err(Refusal::argument(text))
    }
}

/// A call as it comes, with what not all collectives have.
struct Raw {
    name: &'static str,
    kind: Kind,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    data_type: c_int,
    op: Option<c_int>,
    root: Option<c_int>,
    comm: RawComm,
    stream: RawStream,
    config: *const CollConfig,
}

impl Raw {
    /// Launches it.
    ///
    /// # Safety
    ///
    /// The configuration is NULL, or one whose list and texts end.
    unsafe fn launch(self) -> c_int {
        let Self { name, kind, send, recv, count, data_type: on, op, root, comm, stream, .. } =
            self;
        call(name, comm, |ask| {
            // SAFETY: the caller's.
            let config = unsafe { self.config.as_ref() };
            ask.note(|| self.describe(config));
            let initialized = |config: &CollConfig| {
                config.size == size_of::<CollConfig>() && config.magic == API_MAGIC
            };
            if !config.is_none_or(initialized) {
                return Err(Refusal::argument("a configuration that was not initialized"));
            }
            let member = ask.live(comm)?;
            let (group, rank) = member.place()?;
            let data_type = data_type(on)?;
            let own = Collective {
                kind,
                send: send.expose_provenance(),
                recv: recv.expose_provenance(),
                count,
                data_type,
                operator: Operator::of(&member, op.unwrap_or(0), data_type)?,
                root: group.rank(root.unwrap_or(0), "root")?,
            };
            let whole = count.checked_mul(data_type.size() * group.n_ranks());
            if whole.is_none() {
                return Err(Refusal::argument(format!("{count} elements")));
            }
            let (reads, writes) = own.bytes(rank, group.n_ranks());
            ask.reached(&member, own.send, reads)?;
            ask.reached(&member, own.recv, writes)?;
            if kind == Kind::AllToAll && own.send.abs_diff(own.recv) < reads {
                return Err(Refusal::argument("an all-to-all in place"));
            }
            let event = config.map(|config| config.launch_completion_event.cast());
            let event = event.filter(|event: &devcomm_sys::driver::CUevent| !event.is_null());
            let event = event.map(|event| ask.core.event(event)).transpose()?;
            let stream = ask.stream(&member, stream)?;
            let operation = Operation::Collective(own);
            ask.launch(&member, |launches| launches.add(&member, stream, operation, event))
        })
    }

    /// For the record of calls.
    fn describe(&self, config: Option<&CollConfig>) -> String {
        let mut text = format!("{} type {}", self.count, self.data_type);
        let optional = [(" op", self.op), (" root", self.root)];
        for (name, value) in optional.into_iter().filter_map(|(name, v)| Some((name, v?))) {
            let _ = write!(text, "{name} {value}");
        }
        let Some(config) = config else { return text };
        text += " config";
        for (name, value) in [("min_ctas", config.min_ctas), ("max_ctas", config.max_ctas)] {
            if value != UNDEF_INT {
                let _ = write!(text, " {name} {value}");
            }
        }
        if config.user_profiler_tag != 0 {
            let _ = write!(text, " tag {}", config.user_profiler_tag);
        }
        if !config.launch_completion_event.is_null() {
            text += " event";
        }
        text
    }
}

macro_rules! raw {
    ($symbol:literal, $kind:ident, ($($op:ident)?) ($($root:ident)?), $($field:ident),*) => {
        Raw {
            name: $symbol,
            kind: Kind::$kind,
            op: [$($op)?].first().copied(),
            root: [$($root)?].first().copied(),
            $($field),*
        }
    };
}

/// Declares a collective's two functions.
macro_rules! collectives {
    ($( $name:ident $with_config:ident $kind:ident ($symbol:literal, $config_symbol:literal)
        ($($op:ident)?) ($($root:ident)?); )*) => { $(
        pub(super) unsafe extern "C" fn $name(
            send: *const c_void,
            recv: *mut c_void,
            count: usize,
            data_type: c_int,
            $($op: c_int,)?
            $($root: c_int,)?
            comm: RawComm,
            stream: RawStream,
        ) -> c_int {
            let config = std::ptr::null();
            let raw = raw!($symbol, $kind, ($($op)?) ($($root)?), send, recv, count, data_type, comm,
                stream, config);
            // SAFETY: there is no configuration.
            unsafe { raw.launch() }
        }

        pub(super) unsafe extern "C" fn $with_config(
            send: *const c_void,
            recv: *mut c_void,
            count: usize,
            data_type: c_int,
            $($op: c_int,)?
            $($root: c_int,)?
            comm: RawComm,
            stream: RawStream,
            config: *const CollConfig,
        ) -> c_int {
            let raw = raw!($config_symbol, $kind, ($($op)?) ($($root)?), send, recv, count, data_type,
                comm, stream, config);
            // SAFETY: the module's.
            unsafe { raw.launch() }
        }
    )* };
}

collectives! {
    all_reduce all_reduce_config AllReduce ("ncclAllReduce", "ncclAllReduceConfig") (op) ();
    broadcast broadcast_config Broadcast ("ncclBroadcast", "ncclBroadcastConfig") () (root);
    reduce reduce_config Reduce ("ncclReduce", "ncclReduceConfig") (op) (root);
    all_gather all_gather_config AllGather ("ncclAllGather", "ncclAllGatherConfig") () ();
    reduce_scatter reduce_scatter_config ReduceScatter
        ("ncclReduceScatter", "ncclReduceScatterConfig") (op) ();
    all_to_all all_to_all_config AllToAll ("ncclAlltoAll", "ncclAlltoAllConfig") () ();
    gather gather_config Gather ("ncclGather", "ncclGatherConfig") () (root);
    scatter scatter_config Scatter ("ncclScatter", "ncclScatterConfig") () (root);
}

/// A broadcast in place.
pub(super) unsafe extern "C" fn bcast(
    buffer: *mut c_void,
    count: usize,
    data_type: c_int,
    root: c_int,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    let (send, recv, config) = (buffer.cast_const(), buffer, std::ptr::null());
    let raw =
        raw!("ncclBcast", Broadcast, ()(root), send, recv, count, data_type, comm, stream, config);
    // SAFETY: there is no configuration.
    unsafe { raw.launch() }
}
