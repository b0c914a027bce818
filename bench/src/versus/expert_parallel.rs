//! Expert parallelism: `devcomm::ExpertParallel` against an all-gather of all tokens and a
//! reduce-scatter of the results, by NCCL and by `devcomm::Collectives`, and `ncclAlltoAll`.

mod all_to_all;

use std::rc::Rc;

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use devcomm::{
    Buffer, Collectives, DevCommRequirements, DeviceSlice, ExpertParallel, ExpertParallelOptions,
    Kernels, LaunchConfig, ReduceOp, SymmetricBuffer, Tokens, Window, group,
};
use devcomm_bench_kernels::p2p_copy;
use devcomm_testing::experts::{Batch, Layout, Routing};
use half::bf16;

use self::all_to_all::AllToAll;
use super::job::Job;
use super::row::Case;
use super::selection::VariantInfo;
use super::{Benchmark, SIMULATED_BLOCKS};
use crate::contender::{Contender, Outcome, Variant};
use crate::harness::Harness;
use crate::options::GridOptions;
use crate::workloads::Message;

/// The flags of `ep`. A row's operation is in the column of reductions: `dispatch` until rows and
/// counts are received, `group` puts the rows in the order of the experts, `combine`, and `layer`,
/// all three. A size is what the busiest rank receives from its peers without duplicates, in
/// `group` what it writes; a count is the elements of a rank's tokens.
#[derive(Args, Clone, Debug)]
pub struct Experts {
    /// Tokens of each rank, comma-separated [default: 1,8,32,128,512,4096; 1,5 when simulated]
    #[arg(long, value_delimiter = ',', value_name = "N")]
    tokens: Vec<usize>,

    /// Elements of a token [default: 7168; 264 when simulated]
    #[arg(long, value_name = "N")]
    hidden: Option<usize>,

    /// Experts of all ranks [default: 256; 16 when simulated]
    #[arg(long, value_name = "N")]
    experts: Option<usize>,

    /// Experts of a token [default: 8; 3 when simulated]
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,

    /// How tokens choose their experts
    #[arg(long, value_enum, default_value = "random")]
    routing: RoutingOption,

    /// Only these operations, comma-separated [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "OPERATION")]
    operations: Vec<Operation>,

    #[command(flatten)]
    grid: GridOptions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RoutingOption {
    Random,
    Skewed,
    One,
}

/// A part of a layer's communication.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Operation {
    Dispatch,
    Group,
    Combine,
    Layer,
}

impl Operation {
    const ALL: [Self; 4] = [Self::Dispatch, Self::Group, Self::Combine, Self::Layer];

    fn name(self) -> &'static str {
        match self {
            Self::Dispatch => "dispatch",
            Self::Group => "group",
            Self::Combine => "combine",
            Self::Layer => "layer",
        }
    }

    fn dispatches(self) -> bool {
        matches!(self, Self::Dispatch | Self::Layer)
    }

    fn groups(self) -> bool {
        matches!(self, Self::Group | Self::Layer)
    }

    fn combines(self) -> bool {
        matches!(self, Self::Combine | Self::Layer)
    }
}

const TOKENS: [usize; 6] = [1, 8, 32, 128, 512, 4096];
const SIMULATED_TOKENS: [usize; 2] = [1, 5];

/// Threads and blocks of plain stores.
const STORE_THREADS: u32 = 512;
const STORE_BLOCKS: u32 = 128;

impl Benchmark for Experts {
    const NAME: &'static str = "ep";
    const VARIANTS: &'static [VariantInfo] = &[
        (Variant::Rust, "devcomm::ExpertParallel"),
        (
            Variant::RustThroughput,
            "the same in its form for high throughput; `group` copies rows to the other experts of \
             their tokens, in place",
        ),
        (
            Variant::RustAllGather,
            "devcomm::Collectives on the windows: all_gather of rows and routing, reduce_scatter \
             of results",
        ),
        (Variant::Write, "plain stores of as many bytes to the other of two ranks, both at once"),
        (
            Variant::Nccl,
            "ncclAllGather of rows and routing in a group, ncclReduceScatter of results, on memory \
             of ncclMemAlloc that is not registered",
        ),
        (Variant::NcclSym, "the same on the windows"),
        (
            Variant::NcclAllToAll,
            "ncclAlltoAll on windows, of rows and routing in a group, and of results: without what \
             puts rows in the order of the ranks and adds results up, and with chunks as long as \
             the longest",
        ),
    ];

    fn validate(&self) -> Result<()> {
        ensure!(!self.tokens.contains(&0), "a rank has at least one token");
        self.grid.validate()
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        let ranks = harness.rank.n_ranks();
        let collectives = harness.collectives().build(harness.comm)?;
        if ranks != 2 {
            job.selection.omit(Variant::Write, anyhow::anyhow!("it is for two ranks"))?;
        }
        let stores = Kernels::load(harness.rank.context(), &crate::KERNELS)?;
        job.begin()?;
        let default = harness.choose(&TOKENS[..], &SIMULATED_TOKENS);
        for &tokens in if self.tokens.is_empty() { default } else { &self.tokens } {
            let batch = Rc::new(self.batch(harness, tokens));
            let options = self.options(harness, &batch, tokens);
            let layer = Layer::new(harness, Variant::Rust, options, &batch)?;
            let mut layers = vec![Rc::clone(&layer)];
            if job.selection.has(Variant::RustThroughput) {
                let options = options.throughput(usize::MAX);
                layers.push(Layer::new(harness, Variant::RustThroughput, options, &batch)?);
            }
            let gathered = Gathered::new(&layer, &collectives)?;
            let exchanged = AllToAll::new(&layer)?;
            for operation in Operation::ALL {
                if self.operations.is_empty() || self.operations.contains(&operation) {
                    self.compare(job, operation, &layers, (&gathered, &exchanged), &stores)?;
                }
            }
        }
        Ok(())
    }
}

impl Experts {
    fn batch(&self, harness: &Harness<'_>, tokens: usize) -> Batch {
        let hidden = self.hidden.unwrap_or(harness.choose(7168, 264));
        let experts = self.experts.unwrap_or(harness.choose(256, 16));
        let top_k = self.top_k.unwrap_or(harness.choose(8, 3));
        let routing = match self.routing {
            RoutingOption::Random => Routing::Random,
            RoutingOption::Skewed => Routing::Skewed,
            RoutingOption::One => Routing::One,
        };
        let (seed, tokens) = (harness.run.seed, vec![tokens; harness.rank.n_ranks()]);
        Batch::new(hidden, experts, top_k, &tokens, seed).routed(routing, seed)
    }

    fn options(
        &self,
        harness: &Harness<'_>,
        batch: &Batch,
        tokens: usize,
    ) -> ExpertParallelOptions {
        let Batch { hidden, experts, top_k, .. } = *batch;
        let mut options = ExpertParallelOptions::new(hidden, tokens, experts, top_k);
        let simulated = harness.choose(None, Some(SIMULATED_BLOCKS));
        if let Some(blocks) = self.grid.blocks.or(simulated) {
            options = options.blocks(blocks);
        }
        if let Some(threads) = self.grid.threads {
            options = options.threads(threads);
        }
        options
    }

    fn compare<'a>(
        &self,
        job: &mut Job<'_>,
        operation: Operation,
        layers: &[Rc<Layer<'a>>],
        (gathered, exchanged): (&Rc<Gathered<'a>>, &Rc<AllToAll<'a>>),
        stores: &'a Kernels,
    ) -> Result<()> {
        let (harness, batch) = (layers[0].harness, &layers[0].batch);
        let me = harness.rank.rank();
        // Of the rank that has the most.
        let rows = |rank| match operation {
            Operation::Group => batch.layout(rank).rows.len(),
            Operation::Layer => 2 * batch.received(rank),
            _ => batch.received(rank),
        };
        let size = 2 * batch.hidden * (0..batch.tokens.len()).map(rows).max().unwrap_or(0);
        let mut contenders = Vec::new();
        for layer in layers {
            if job.selection.has(layer.variant) {
                contenders.push(layer.contender(operation));
            }
        }
        if operation != Operation::Group {
            for variant in [Variant::RustAllGather, Variant::Nccl, Variant::NcclSym] {
                if job.selection.has(variant) {
                    contenders.push(gathered.contender(operation, variant));
                }
            }
            if job.selection.has(Variant::NcclAllToAll) {
                contenders.push(exchanged.contender(operation));
            }
            if job.selection.has(Variant::Write) && operation != Operation::Layer && size > 0 {
                contenders.push(by_stores(harness, stores, size, &self.grid)?);
            }
        }
        let Batch { hidden, experts, top_k, .. } = **batch;
        let tokens = batch.tokens[me];
        let sizes = format!("{tokens}x{hidden}:{top_k}/{experts}");
        let contenders: Vec<_> =
            contenders.into_iter().map(|c| c.by_algorithm(sizes.clone())).collect();
        let case = Case {
            size,
            count: tokens * hidden,
            dtype: "bf16",
            redop: operation.name(),
            tokens: Some(tokens),
            hidden: Some(hidden),
            ..Case::NONE
        };
        job.compare(case, &contenders)
    }
}

/// Plain stores of this many bytes between two ranks, in both directions.
fn by_stores<'a>(
    harness: &'a Harness<'a>,
    compiled: &'a Kernels,
    bytes: usize,
    grid: &GridOptions,
) -> Result<Contender<'a>> {
    let windows: [Window<u8>; 2] = [harness.comm.window(bytes)?, harness.comm.window(bytes)?];
    let dev_comm = harness.comm.create_dev_comm(DevCommRequirements::new())?;
    let max_blocks = harness.choose(STORE_BLOCKS, SIMULATED_BLOCKS);
    let (blocks, threads) = grid.grid(bytes, STORE_THREADS, max_blocks);
    let config = LaunchConfig::new(blocks, threads).without_cooperation();
    let message = Message::new(harness, &windows[0], &windows[1])?;
    let work = move || {
        let launch = p2p_copy::args(&dev_comm, &windows[0], &windows[1], bytes, false, 1);
        // SAFETY: the windows have the bytes on every rank; all ranks are in one LSA team.
        unsafe { launch.config(config).launch(&compiled.on(&harness.stream)) }
    };
    let info = compiled.info::<p2p_copy>()?;
    Ok(Contender::new(Variant::Write, work, message).by_kernel(config, info))
}

/// A batch with its memory, for [`ExpertParallel`].
struct Layer<'a> {
    harness: &'a Harness<'a>,
    variant: Variant,
    experts: Rc<ExpertParallel>,
    batch: Rc<Batch>,
    layout: Layout,
    expected: Vec<bf16>,
    input: SymmetricBuffer<bf16>,
    ids: SymmetricBuffer<i32>,
    weights: SymmetricBuffer<f32>,
    rows: DeviceSlice<bf16>,
    output: SymmetricBuffer<bf16>,
}

impl<'a> Layer<'a> {
    fn new(
        harness: &'a Harness<'a>,
        variant: Variant,
        options: ExpertParallelOptions,
        batch: &Rc<Batch>,
    ) -> Result<Rc<Self>> {
        let (comm, me) = (harness.comm, harness.rank.rank());
        let experts = options.build(comm)?;
        let layer = Self {
            harness,
            variant,
            layout: batch.layout(me),
            expected: batch.combined(me, None, |_| 1.0),
            input: comm.mem_alloc(batch.inputs[me].len())?,
            ids: comm.mem_alloc(batch.ids[me].len())?,
            weights: comm.mem_alloc(batch.weights[me].len())?,
            rows: match variant {
                Variant::RustThroughput => experts.rows()?,
                _ => comm.mem_alloc(experts.most_rows() * batch.hidden)?.device_slice(),
            },
            output: comm.mem_alloc(batch.inputs[me].len())?,
            batch: Rc::clone(batch),
            experts: Rc::new(experts),
        };
        layer.input.copy_from_host(&layer.batch.inputs[me])?;
        layer.ids.copy_from_host(&layer.batch.ids[me])?;
        layer.weights.copy_from_host(&layer.batch.weights[me])?;
        // So that any operation can be the first.
        layer.launch(Operation::Dispatch)?;
        layer.launch(Operation::Group)?;
        Ok(Rc::new(layer))
    }

    fn dispatch(&self, count: usize) -> devcomm::Result<()> {
        let Self { input, ids, weights, .. } = self;
        self.experts.dispatch(Tokens { count, input, ids, weights }, &self.harness.stream)
    }

    fn tokens(&self) -> usize {
        self.batch.tokens[self.harness.rank.rank()]
    }

    fn launch(&self, operation: Operation) -> devcomm::Result<()> {
        let Self { experts, rows, output, harness: Harness { stream, .. }, .. } = self;
        if operation.dispatches() {
            self.dispatch(self.tokens())?;
        }
        if operation.groups() {
            experts.group(rows, stream)?;
        }
        if operation.combines() {
            experts.combine(rows, output, None, stream)?;
        }
        Ok(())
    }

    fn contender(self: &Rc<Self>, operation: Operation) -> Contender<'a> {
        let (layer, outcome) = (Rc::clone(self), ByExperts(Rc::clone(self), operation));
        Contender::new(self.variant, move || layer.launch(operation), outcome)
    }

    fn count_wrong_rows(&self) -> Result<usize> {
        let used = self.layout.offsets.last().map_or(0, |rows| *rows as usize);
        let mut got = vec![bf16::NAN; used * self.batch.hidden];
        self.rows.copy_to_host(&mut got)?;
        let mut offsets = vec![0; self.layout.offsets.len()];
        self.experts.offsets().copy_to_host(&mut offsets)?;
        let wrong = offsets.iter().zip(&self.layout.offsets).filter(|(got, want)| got != want);
        Ok(wrong.count() + self.batch.count_wrong_rows(&self.layout, &got))
    }
}

/// The result of an operation of `ExpertParallel`.
struct ByExperts<'a>(Rc<Layer<'a>>, Operation);

impl Outcome for ByExperts<'_> {
    /// Does what comes before the operation, and spoils its result.
    fn poison(&self) -> Result<()> {
        let Self(layer, operation) = self;
        // What was received before is gone.
        layer.dispatch(0)?;
        layer.rows.fill_bytes(0xff)?;
        if !operation.dispatches() {
            layer.dispatch(layer.tokens())?;
        }
        if *operation == Operation::Combine {
            layer.experts.group(&layer.rows, &layer.harness.stream)?;
        }
        Ok(layer.output.fill_bytes(0xff)?)
    }

    fn count_wrong(&self) -> Result<usize> {
        let Self(layer, operation) = self;
        if *operation == Operation::Dispatch {
            layer.experts.group(&layer.rows, &layer.harness.stream)?;
        }
        let mut wrong = layer.count_wrong_rows()?;
        if operation.combines() {
            let mut got = vec![bf16::NAN; layer.expected.len()];
            layer.output.copy_to_host(&mut got)?;
            wrong += got.iter().zip(&layer.expected).filter(|(got, want)| got != want).count();
        }
        layer.experts.check()?;
        Ok(wrong)
    }
}

/// The buffers of the same by collectives: rows and routing, those of all ranks, the contributions
/// to all tokens and the results.
struct Buffers {
    rows: DeviceSlice<bf16>,
    routing: DeviceSlice<u32>,
    all_rows: DeviceSlice<bf16>,
    all_routing: DeviceSlice<u32>,
    partials: DeviceSlice<bf16>,
    results: DeviceSlice<bf16>,
}

/// All tokens to all ranks, and contributions to all tokens back.
struct Gathered<'a> {
    layer: Rc<Layer<'a>>,
    collectives: &'a Collectives,
    plain: Buffers,
    in_windows: Buffers,
}

impl<'a> Gathered<'a> {
    fn new(layer: &Rc<Layer<'a>>, collectives: &'a Collectives) -> Result<Rc<Self>> {
        let (harness, batch) = (layer.harness, &layer.batch);
        let (comm, ranks, me) = (harness.comm, harness.rank.n_ranks(), harness.rank.rank());
        let (len, routing) = (batch.inputs[me].len(), 2 * batch.ids[me].len());
        let plain = Buffers {
            rows: comm.mem_alloc(len)?.device_slice(),
            routing: comm.mem_alloc(routing)?.device_slice(),
            all_rows: comm.mem_alloc(ranks * len)?.device_slice(),
            all_routing: comm.mem_alloc(ranks * routing)?.device_slice(),
            partials: comm.mem_alloc(ranks * len)?.device_slice(),
            results: comm.mem_alloc(len)?.device_slice(),
        };
        let in_windows = Buffers {
            rows: comm.window(len)?.device_slice(),
            routing: comm.window(routing)?.device_slice(),
            all_rows: comm.window(ranks * len)?.device_slice(),
            all_routing: comm.window(ranks * routing)?.device_slice(),
            partials: comm.window(ranks * len)?.device_slice(),
            results: comm.window(len)?.device_slice(),
        };
        let gathered = Self { layer: Rc::clone(layer), collectives, plain, in_windows };
        let partials = gathered.partials();
        for buffers in [&gathered.plain, &gathered.in_windows] {
            buffers.rows.copy_from_host(&batch.inputs[me])?;
            buffers.routing.copy_from_host(&routing_words(batch, me))?;
            buffers.partials.copy_from_host(&partials)?;
        }
        Ok(Rc::new(gathered))
    }

    /// What this rank's experts contribute to the tokens of all ranks.
    fn partials(&self) -> Vec<bf16> {
        let (batch, me) = (&self.layer.batch, self.layer.harness.rank.rank());
        let tokens = |rank: usize| (0..batch.tokens[rank]).map(move |token| (rank, token));
        let all = (0..batch.tokens.len()).flat_map(tokens);
        all.flat_map(|token| {
            let partial = batch.partial(me, token, |_| 1.0);
            partial.unwrap_or_else(|| vec![bf16::ZERO; batch.hidden])
        })
        .collect()
    }

    fn buffers(&self, variant: Variant) -> &Buffers {
        if variant == Variant::Nccl { &self.plain } else { &self.in_windows }
    }

    fn launch(&self, operation: Operation, variant: Variant) -> devcomm::Result<()> {
        let Buffers { rows, routing, all_rows, all_routing, partials, results } =
            self.buffers(variant);
        let Harness { comm, stream, .. } = self.layer.harness;
        let collectives = self.collectives;
        let by_rust = variant == Variant::RustAllGather;
        if operation.dispatches() && by_rust {
            collectives.all_gather(rows, all_rows, stream)?;
            collectives.all_gather(routing, all_routing, stream)?;
        } else if operation.dispatches() {
            group(|_| {
                comm.all_gather(rows, all_rows, stream)?;
                comm.all_gather(routing, all_routing, stream)
            })?;
        }
        match (operation.combines(), by_rust) {
            (false, _) => Ok(()),
            (_, true) => collectives.reduce_scatter(partials, results, ReduceOp::Sum, stream),
            _ => comm.reduce_scatter(partials, results, ReduceOp::Sum, stream),
        }
    }

    fn contender(self: &Rc<Self>, operation: Operation, variant: Variant) -> Contender<'a> {
        let (gathered, outcome) =
            (Rc::clone(self), ByCollectives(Rc::clone(self), operation, variant));
        Contender::new(variant, move || gathered.launch(operation, variant), outcome)
    }
}

/// A rank's experts and weights, as words.
fn routing_words(batch: &Batch, rank: usize) -> Vec<u32> {
    let ids = batch.ids[rank].iter().map(|id| *id as u32);
    ids.chain(batch.weights[rank].iter().map(|weight| weight.to_bits())).collect()
}

/// The result of collectives.
struct ByCollectives<'a>(Rc<Gathered<'a>>, Operation, Variant);

impl Outcome for ByCollectives<'_> {
    fn poison(&self) -> Result<()> {
        let Self(gathered, _, variant) = self;
        let Buffers { all_rows, all_routing, results, .. } = gathered.buffers(*variant);
        all_rows.fill_bytes(0xff)?;
        all_routing.fill_bytes(0xff)?;
        Ok(results.fill_bytes(0xff)?)
    }

    /// A sum is wrong if its error exceeds one rounding for each rank.
    fn count_wrong(&self) -> Result<usize> {
        let Self(gathered, operation, variant) = self;
        let buffers = gathered.buffers(*variant);
        let layer = &gathered.layer;
        // A rank whose own work has ended may still receive.
        layer.harness.rank.barrier()?;
        let (batch, mut wrong) = (&layer.batch, 0);
        if operation.dispatches() {
            let mut rows = vec![bf16::NAN; buffers.all_rows.len()];
            buffers.all_rows.copy_to_host(&mut rows)?;
            let all = batch.inputs.iter().flatten();
            wrong += rows.iter().zip(all).filter(|(got, want)| got != want).count();
            let mut words = vec![0; buffers.all_routing.len()];
            buffers.all_routing.copy_to_host(&mut words)?;
            let all = (0..batch.tokens.len()).flat_map(|rank| routing_words(batch, rank));
            wrong += words.iter().zip(all).filter(|(got, want)| **got != *want).count();
        }
        if operation.combines() {
            let mut got = vec![bf16::NAN; buffers.results.len()];
            buffers.results.copy_to_host(&mut got)?;
            let ranks = batch.tokens.len() as f32;
            // Weights are at most 1, and elements at most 2.
            let most = 2.0 * batch.top_k as f32 * ranks / 256.0;
            let differs = |got: &bf16, want: &bf16| {
                let off = (got.to_f32() - want.to_f32()).abs();
                off.is_nan() || off > most
            };
            let pairs = got.iter().zip(&layer.expected);
            wrong += pairs.filter(|(got, want)| differs(got, want)).count();
        }
        Ok(wrong)
    }
}
