//! The form for several LSA teams. A rank's *rail* has the ranks with its number in the other
//! teams; only they exchange over the network.

use devcomm_host::{GinConnectionType, Signals};
use devcomm_kernels::expert_parallel::ep_layout::RETURN_WORDS;
use devcomm_kernels::expert_parallel::rail::{BATCH, GROUP, MailArgs, RelayedArgs};
use devcomm_kernels::expert_parallel::shape::ReceivedArgs;
use devcomm_kernels::expert_parallel::{
    Mail, Received, Shape, ep_combine_hybrid, ep_dispatch_hybrid,
};
use devcomm_types::SignalRange;
use nccl_device::Epoch;

use super::form::{Form, Launch, Results, RowsInOrder, Tokens};
use super::{ExpertParallel, ExpertParallelOptions, shape_args};
use crate::prelude::*;

/// The most blocks that send and receive by default: each sends messages of its own.
const BLOCKS: usize = 32;

const THREADS: u32 = 512;

/// How a rank's tokens are divided among blocks and messages, the same in every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Division {
    pub(super) teams: usize,
    pub(super) blocks: u32,
    /// The tokens of a message.
    pub(super) batch: u32,
}

impl Division {
    /// Divides tokens that the kernels support, for `teams` LSA teams, at least two.
    pub(super) fn new(
        options: ExpertParallelOptions,
        teams: usize,
        ranks: usize,
        multiprocessors: u32,
    ) -> Result<Self> {
        let team = ranks / teams;
        refuse_if!(
            teams > GROUP || team > GROUP,
            "expert parallelism among {teams} LSA teams of {team} ranks: up to {GROUP} of each"
        );
        let most = options.blocks.map_or(BLOCKS, |blocks| blocks as usize);
        let most = most.min(multiprocessors as usize);
        let batch = options.tokens.div_ceil(most).min(BATCH as usize);
        let blocks = options.tokens.div_ceil(batch).min(most);
        Ok(Self { teams, blocks: blocks as u32, batch: batch as u32 })
    }

    /// Returns the words of the messages of a dispatch, which has the shape `sent`, and a combine.
    pub(super) const fn words(self, sent: Shape, has_scales: bool, shape: Shape) -> [usize; 2] {
        let Self { teams, batch, .. } = self;
        let of_dispatch = ep_dispatch_hybrid::message_vectors(sent, batch, has_scales);
        let of_combine = ep_combine_hybrid::message_vectors(shape, batch);
        [Mail::words(sent, teams, batch, of_dispatch), Mail::words(shape, teams, batch, of_combine)]
    }
}

/// The memory of messages between teams.
struct Messages {
    window: Window<u32>,
    signals: SignalRange,
    /// The words of an [`Epoch`].
    epoch: SymmetricBuffer<u32>,
}

pub(super) struct Hybrid {
    dev_comm: DevCommResource,
    division: Division,
    dispatch: Messages,
    combine: Messages,
    /// The sums that the ranks of this team store here, for the tokens that this rank relays.
    partials: Window<bf16>,
    /// What the kernels' `Received` has, one part after the other.
    received: Window<u32>,
    /// The fields of the kernels' `Relayed`.
    ranks: SymmetricBuffer<u32>,
    teams: SymmetricBuffer<u32>,
    returns: SymmetricBuffer<u32>,
    /// Where in `received`, in words, rows, scales, experts, weights and counts begin, and the end.
    offsets: [usize; 6],
}

impl Hybrid {
    pub(super) const FILES: [&str; 3] = [
        kernels::ep_combine_hybrid::FILE,
        kernels::ep_dispatch_hybrid::<bf16>::FILE,
        kernels::ep_layout::FILE,
    ];
    /// Allocates the memory for results of `shape`. *Collective*.
    pub(super) fn new(
        comm: &Communicator,
        options: ExpertParallelOptions,
        shape: Shape,
        division: Division,
    ) -> Result<Self> {
        let (sent, has_scales) = (options.sent(shape), options.f8);
        let (ranks, tokens) = (comm.n_ranks(), shape.tokens as usize);
        let mut requirements = DevCommRequirements::new()
            .lsa_barriers(division.blocks)
            // Over the network only the ranks of a rail exchange. A message is one put with a
            // signal of its own, and waits for no other message: weak signals are enough.
            .gin_connection(GinConnectionType::Rail)
            .gin_strong_signals(false);
        let count = Mail::signals(shape, division.teams, division.batch) as u32;
        let [of_dispatch, of_combine] = [(); 2].map(|()| requirements.add(Signals { count }));
        let dev_comm = comm.create_dev_comm(requirements)?;
        let messages = |key, words| {
            Ok::<_, Error>(Messages {
                window: comm.window(words)?,
                signals: dev_comm.resource(key)?,
                epoch: comm.mem_alloc(Epoch::WORDS)?,
            })
        };
        let [first, second] = division.words(sent, has_scales, shape);
        let offsets @ [.., words] = Received::offsets(sent, ranks, has_scales);
        Ok(Self {
            division,
            dispatch: messages(of_dispatch, first)?,
            combine: messages(of_combine, second)?,
            partials: comm.window(ep_combine_hybrid::partials(shape, ranks))?,
            received: comm.window(words)?,
            ranks: comm.mem_alloc(division.teams * tokens)?,
            teams: comm.mem_alloc(tokens)?,
            returns: comm.mem_alloc(ranks * tokens * RETURN_WORDS)?,
            offsets,
            dev_comm,
        })
    }

    fn mail(&self, messages: &Messages) -> impl IntoArg<Abi<Mail>> {
        let Messages { window, signals, epoch } = messages;
        MailArgs { window, signals: *signals, epoch, batch: self.division.batch }
    }

    fn relayed(&self) -> RelayedArgs<&SymmetricBuffer<u32>, &SymmetricBuffer<u32>> {
        RelayedArgs { ranks: &self.ranks, teams: &self.teams }
    }

    fn received_args(&self) -> impl IntoArg<Abi<Received>> {
        let base = self.received.device_slice().device_address();
        let [rows, scales, experts, weights, counts, _] =
            self.offsets.map(|at| base + (at * size_of::<u32>()) as u64);
        // The kernels know whether there are scales by this address. Without them nothing lies
        // between the two.
        let scales = if scales == experts { 0 } else { scales };
        // `relayed` says which results this rank's tokens get. No rank is absent.
        ReceivedArgs { rows, scales, experts, weights, counts, targets: 0, absent: 0 }
    }

    /// Returns the shape of a launch. All its blocks are resident: a multiprocessor has room for
    /// one, and `Division` has no more blocks than multiprocessors.
    fn config(&self, options: ExpertParallelOptions) -> LaunchConfig {
        let threads = options.threads.unwrap_or(THREADS);
        let config = LaunchConfig::new(self.division.blocks, threads);
        config.with_dependent().without_cooperation()
    }
}

impl Form for Hybrid {
    fn dispatch(&self, launch: Launch<'_>, tokens: Tokens) -> Result<()> {
        let (Launch { experts, steps, .. }, target) = (launch, launch.target());
        let sizes = shape_args(experts.sent);
        let (mail, to, relayed) = (self.mail(&self.dispatch), &self.received, self.relayed());
        let args = (&self.dev_comm, mail, to, sizes, tokens, relayed, &experts.faults, steps);
        let config = self.config(experts.options);
        // SAFETY: `ExpertParallel` has checked the buffers and orders the launches; dropping a
        // buffer waits for the stream. `new` allocates the memory that the kernel needs.
        with_type!(experts.options.f8, Row => unsafe {
            kernels::ep_dispatch_hybrid::<Row>::launch(args, config, &target)
        }; { true => F8E4M3, false => bf16 })
    }

    fn group(&self, experts: &ExpertParallel, rows: RowsInOrder, stream: &Stream) -> Result<()> {
        experts.lay_out(self.received_args(), &self.returns, rows, stream)
    }

    fn combine(&self, launch: Launch<'_>, results: Results) -> Result<()> {
        let (Launch { experts, steps, .. }, config) = (launch, self.config(launch.experts.options));
        let (comm, mail, partials) = (&self.dev_comm, self.mail(&self.combine), &self.partials);
        let sizes = shape_args(experts.shape);
        let (at, from, relayed) = (&self.returns, self.received_args(), self.relayed());
        let args = (comm, mail, partials, sizes, results, at, from, relayed, steps);
        // SAFETY: `ExpertParallel` has checked that the rows are there, and orders the launches.
        unsafe { kernels::ep_combine_hybrid::launch(args, config, &launch.target()) }
    }

    fn absent(&self) -> Result<&SymmetricBuffer<u64>> {
        let teams = self.division.teams;
        refuse(format!("absent ranks among {teams} LSA teams: ranks may be absent in one team"))
    }

    fn describe(&self) -> String {
        let Division { teams, blocks, batch } = self.division;
        format!(" in {teams} LSA teams, {blocks} blocks, messages of {batch} tokens")
    }
}
