//! The form for one LSA team and high throughput: its memory, and its launches.

use devcomm_kernels::expert_parallel::counted::CountedArgs;
use devcomm_kernels::expert_parallel::{Counted, Shape};

use super::form::{Form, Launch, Results, RowsInOrder, Tokens};
use super::{ExpertParallel, ExpertParallelOptions as Options, MANY_THREADS, shape_args};
use crate::prelude::*;

/// The memory of the form for high throughput; from `flags` on, that of the kernels' [`Counted`].
pub(super) struct Throughput {
    dev_comm: DevCommResource,
    rows: Window<u8>,
    scales: Window<f32>,
    results: Window<bf16>,
    flags: Window<u32>,
    counts: Window<u32>,
    tokens: Window<u32>,
    targets: SymmetricBuffer<u64>,
    firsts: SymmetricBuffer<u32>,
    state: SymmetricBuffer<u32>,
    absent: SymmetricBuffer<u64>,
    capacity: usize,
}

impl Throughput {
    pub(super) const FILES: [&str; 3] = [
        kernels::ep_combine_counted::FILE,
        kernels::ep_dispatch_counted::<bf16>::FILE,
        kernels::ep_expand::FILE,
    ];
    /// Allocates memory for results of `shape`, and for tokens. *Collective*.
    pub(super) fn new(comm: &Communicator, options: Options, shape: Shape) -> Result<Self> {
        let sent = options.sent(shape);
        let (ranks, capacity) = (comm.n_ranks(), options.most_rows(comm.n_ranks()));
        // A window is not empty, also without scales.
        let scales = if options.f8 { capacity * sent.scale_vectors() as usize } else { 1 };
        let results = options.tokens * Counted::results(shape, ranks);
        // New windows and buffers are zeroed, as some of these must be.
        Ok(Self {
            rows: comm.window(capacity * options.hidden * options.row_type().size())?,
            scales: comm.window(4 * scales)?,
            results: comm.window(results * options.hidden)?,
            flags: comm.window(Counted::flag_words(ranks))?,
            counts: comm.window(Counted::count_words(shape, ranks))?,
            tokens: comm.window(Counted::token_words(capacity))?,
            targets: comm.mem_alloc(options.tokens)?,
            firsts: comm.mem_alloc(ranks + 1)?,
            state: comm.mem_alloc(Counted::STATE)?,
            absent: comm.mem_alloc(1)?,
            capacity,
            dev_comm: comm.create_dev_comm(DevCommRequirements::new())?,
        })
    }

    fn memory(&self) -> impl IntoArg<Abi<Counted>> {
        let Self { flags, counts, tokens, targets, firsts, state, absent, .. } = self;
        let capacity = self.capacity as u32;
        CountedArgs { flags, counts, tokens, targets, firsts, state, absent, capacity }
    }
}

impl Form for Throughput {
    fn dispatch(&self, launch: Launch<'_>, tokens: Tokens) -> Result<()> {
        let Launch { experts, steps, .. } = launch;
        let (comm, sizes, faults) = (&self.dev_comm, shape_args(experts.sent), &experts.faults);
        let (scales, count) = (&self.scales, tokens.count);
        // The dispatch writes only offsets and sizes of these, and rows to `self.rows`.
        let groups = experts.grouped_args(RowsInOrder::default(), 0);
        let config = experts.config(count, MANY_THREADS);
        let (rows, memory) = (self.rows.device_slice(), self.memory());
        with_type!(experts.options.f8, Row => {
            let (rows, _) = window::<Row, _>("the memory of rows", &rows, &experts.communicator)?;
            let args = (comm, memory, &rows, scales, sizes, tokens, groups, faults, steps);
            // SAFETY: `ExpertParallel` has checked the buffers and orders the launches; dropping a
            // buffer waits for the stream. `new` allocates what the kernel needs.
            unsafe {
                kernels::ep_dispatch_counted::<Row>::launch(args, config, &launch.target())
            }
        }; { true => F8E4M3, false => bf16 })
    }

    fn group(&self, experts: &ExpertParallel, rows: RowsInOrder, stream: &Stream) -> Result<()> {
        let scales = if experts.options.f8 { self.scales.device_address() } else { 0 };
        let (sizes, ranks) = (shape_args(experts.sent), experts.communicator.n_ranks() as u32);
        let groups = experts.grouped_args(rows, 0);
        let args = (self.memory(), sizes, ranks, self.rows.device_address(), scales, groups);
        let config = experts.config(experts.expected_tokens(rows.tokens), MANY_THREADS);
        // SAFETY: `ExpertParallel` has checked that the rows are there, and orders the launches.
        unsafe { kernels::ep_expand::launch(args, config, &experts.compiled.on(stream)) }
    }

    fn combine(&self, launch: Launch<'_>, results: Results) -> Result<()> {
        let Launch { experts, steps, .. } = launch;
        let sizes = shape_args(experts.shape);
        let args = (&self.dev_comm, self.memory(), &self.results, sizes, results, steps);
        let config = experts.config(experts.expected_tokens(results.tokens), MANY_THREADS);
        // SAFETY: `ExpertParallel` has checked that the rows are there, and orders the launches.
        unsafe { kernels::ep_combine_counted::launch(args, config, &launch.target()) }
    }

    fn absent(&self) -> Result<&SymmetricBuffer<u64>> {
        Ok(&self.absent)
    }

    fn arrivals(&self) -> Result<&Window<u8>> {
        Ok(&self.rows)
    }

    fn describe(&self) -> String {
        format!(", room for {} rows", self.capacity)
    }
}
