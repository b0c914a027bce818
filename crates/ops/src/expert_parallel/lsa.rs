//! The form for one LSA team and low latency.

use devcomm_kernels::expert_parallel::ep_layout::RETURN_WORDS;
use devcomm_kernels::expert_parallel::numbered::{self, MessagesArgs};
use devcomm_kernels::expert_parallel::shape::ReceivedArgs;
use devcomm_kernels::expert_parallel::{Shape, ep_combine, ep_dispatch, numbered_words};

use super::form::{Form, Launch, Results, RowsInOrder, Tokens};
use super::{ExpertParallel, ExpertParallelOptions as Options, MANY_THREADS, THREADS, shape_args};
use crate::prelude::*;

/// The memory of rows on their way, and of the numbered messages that say which rows these are.
struct Messages {
    memory: LamportMemory,
    numbered: Window<u32>,
}

impl Messages {
    fn args(&self) -> impl IntoArg<Abi<numbered::Messages>> {
        MessagesArgs { memory: &self.memory, numbered: &self.numbered }
    }
}

/// What a rank keeps of all tokens, as the kernels' `Received` says.
struct Received {
    rows: SymmetricBuffer<u32>,
    scales: Option<SymmetricBuffer<f32>>,
    experts: SymmetricBuffer<u32>,
    weights: SymmetricBuffer<f32>,
    counts: SymmetricBuffer<u32>,
    targets: SymmetricBuffer<u64>,
    absent: SymmetricBuffer<u64>,
}

pub(super) struct Lsa {
    dev_comm: DevCommResource,
    dispatch: Messages,
    combine: Messages,
    received: Received,
    returns: SymmetricBuffer<u32>,
}

impl Lsa {
    pub(super) const FILES: [&str; 3] =
        [kernels::ep_combine::FILE, kernels::ep_dispatch::<bf16>::FILE, kernels::ep_layout::FILE];
    /// Allocates the memory for results of `shape`, and tokens. *Collective*. No rank may send
    /// before all have done this.
    pub(super) fn new(comm: &Communicator, options: Options, shape: Shape) -> Result<Self> {
        let (ranks, sent) = (comm.n_ranks(), options.sent(shape));
        let (tokens, top_k) = (ranks * options.tokens, options.top_k);
        let messages = |slots: u32, numbered: u32| {
            Ok::<_, Error>(Messages {
                memory: LamportMemory::allocate(comm, slots)?,
                // New windows are zeroed, as this must be.
                numbered: comm.window(numbered_words(ranks, numbered as usize))?,
            })
        };
        // A vector of 16 bytes has 4 words.
        let scales = || comm.mem_alloc(tokens * 4 * sent.scale_vectors() as usize);
        Ok(Self {
            dispatch: messages(options.sent_slots(sent), ep_dispatch::numbered_slots(shape))?,
            combine: messages(shape.slots(), ep_combine::NUMBERED_SLOTS)?,
            received: Received {
                rows: comm.mem_alloc(tokens * 4 * sent.vectors as usize)?,
                scales: options.f8.then(scales).transpose()?,
                experts: comm.mem_alloc(tokens * top_k)?,
                weights: comm.mem_alloc(tokens * top_k)?,
                counts: comm.mem_alloc(ranks)?,
                targets: comm.mem_alloc(options.tokens)?,
                absent: comm.mem_alloc(1)?,
            },
            returns: comm.mem_alloc(tokens * RETURN_WORDS)?,
            dev_comm: comm.create_dev_comm(DevCommRequirements::new())?,
        })
    }

    fn received_args(&self) -> ReceivedArgs<u64, u64, u64, u64, u64, u64, u64> {
        let Received { rows, scales, experts, weights, counts, targets, absent } = &self.received;
        ReceivedArgs {
            rows: rows.device_address(),
            scales: scales.as_ref().map_or(0, SymmetricBuffer::device_address),
            experts: experts.device_address(),
            weights: weights.device_address(),
            counts: counts.device_address(),
            targets: targets.device_address(),
            absent: absent.device_address(),
        }
    }
}

impl Form for Lsa {
    fn dispatch(&self, launch: Launch<'_>, tokens: Tokens) -> Result<()> {
        let (Launch { experts, steps, .. }, target) = (launch, launch.target());
        let (comm, sizes, count) = (&self.dev_comm, shape_args(experts.sent), tokens.count);
        let (messages, to) = (self.dispatch.args(), self.received_args());
        let args = (comm, messages, sizes, tokens, to, &experts.faults, steps);
        let part = ep_dispatch::part_vectors(experts.communicator.n_ranks(), experts.options.f8);
        let config = experts.config(count * experts.sent.vectors.div_ceil(part), THREADS);
        // SAFETY: `ExpertParallel` has checked the buffers and orders the launches; dropping a
        // buffer waits for the stream. `new` allocates the memory that the kernel needs.
        with_type!(experts.options.f8, Row => unsafe {
            kernels::ep_dispatch::<Row>::launch(args, config, &target)
        }; { true => F8E4M3, false => bf16 })
    }

    fn group(&self, experts: &ExpertParallel, rows: RowsInOrder, stream: &Stream) -> Result<()> {
        experts.lay_out(self.received_args(), &self.returns, rows, stream)
    }

    fn combine(&self, launch: Launch<'_>, results: Results) -> Result<()> {
        let Launch { experts, steps, .. } = launch;
        let (sizes, messages) = (shape_args(experts.shape), self.combine.args());
        let (at, received) = (&self.returns, self.received_args());
        let args = (&self.dev_comm, messages, sizes, results, at, received, steps);
        let part = ep_combine::part_vectors(experts.communicator.n_ranks());
        let parts = results.tokens * experts.shape.vectors.div_ceil(part);
        // More warps if parts are more than a block for each multiprocessor has warps.
        let is_long = parts > experts.multiprocessors() * (THREADS / 32);
        let config = experts.config(parts, if is_long { MANY_THREADS } else { THREADS });
        // SAFETY: `ExpertParallel` has checked that the rows are there, and orders the launches.
        unsafe { kernels::ep_combine::launch(args, config, &launch.target()) }
    }

    fn absent(&self) -> Result<&SymmetricBuffer<u64>> {
        Ok(&self.received.absent)
    }
}
