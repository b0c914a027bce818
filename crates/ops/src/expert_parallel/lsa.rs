//! The form for one LSA team: its memory.

use devcomm_host::{Communicator, Error, Result, SymmetricBuffer, Window};
use devcomm_kernels::expert_parallel::shape::ReceivedArgs;
use devcomm_kernels::expert_parallel::{Shape, ep_combine, ep_dispatch, numbered_words};
use nccl_device::{Lamport, lamport_words};

use super::ExpertParallelOptions;
use crate::slots::empty_slots;

/// The memory of a session of messages.
pub(super) struct Messages {
    pub(super) slots: Window<u32>,
    pub(super) numbered: Window<u32>,
    pub(super) state: SymmetricBuffer<u32>,
}

/// What a rank keeps of all tokens.
struct Received {
    rows: SymmetricBuffer<u32>,
    /// Of 8-bit floats.
    scales: Option<SymmetricBuffer<f32>>,
    experts: SymmetricBuffer<u32>,
    weights: SymmetricBuffer<f32>,
    counts: SymmetricBuffer<u32>,
    targets: SymmetricBuffer<u64>,
    absent: SymmetricBuffer<u64>,
}

/// The memory of the form for one LSA team.
pub(super) struct Lsa {
    pub(super) dispatch: Messages,
    pub(super) combine: Messages,
    received: Received,
}

impl Lsa {
    /// Allocates it, for tokens of the size `sent` on their way, and results of `shape`.
    /// *Collective*. No rank may send before all have done this.
    pub(super) fn new(
        comm: &Communicator,
        options: ExpertParallelOptions,
        sent: Shape,
        shape: Shape,
    ) -> Result<Self> {
        let ranks = comm.n_ranks();
        let (tokens, top_k) = (ranks * options.tokens, options.top_k);
        let messages = |slots: u32, numbered: u32| {
            let state = comm.mem_alloc::<u32>(Lamport::<1>::STATE)?;
            Ok::<_, Error>(Messages {
                slots: empty_slots(comm, lamport_words(ranks, slots as usize))?,
                // New windows and buffers are zeroed, as these must be.
                numbered: comm.window(numbered_words(ranks, numbered as usize))?,
                state,
            })
        };
        Ok(Self {
            dispatch: messages(options.sent_slots(sent), ep_dispatch::numbered_slots(shape))?,
            combine: messages(shape.slots(), ep_combine::NUMBERED_SLOTS)?,
            received: Received {
                rows: comm.mem_alloc(tokens * 4 * sent.vectors as usize)?,
                scales: match options.f8 {
                    true => Some(comm.mem_alloc(tokens * 4 * sent.scale_vectors() as usize)?),
                    false => None,
                },
                experts: comm.mem_alloc(tokens * top_k)?,
                weights: comm.mem_alloc(tokens * top_k)?,
                counts: comm.mem_alloc(ranks)?,
                targets: comm.mem_alloc(options.tokens)?,
                absent: comm.mem_alloc(1)?,
            },
        })
    }

    /// A bit for each rank that is absent.
    pub(super) fn absent(&self) -> &SymmetricBuffer<u64> {
        &self.received.absent
    }

    pub(super) fn received_args(&self) -> ReceivedArgs<u64, u64, u64, u64, u64, u64, u64> {
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
