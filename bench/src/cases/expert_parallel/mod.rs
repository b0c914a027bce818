//! Expert parallelism: `devcomm::ExpertParallel` against an all-gather of all tokens and a
//! reduce-scatter of the results, by NCCL and by `devcomm::Collectives`, and `ncclAlltoAll`.

mod all_to_all;
mod gathered;
mod layer;
mod sums;

use std::rc::Rc;

use anyhow::anyhow;
use devcomm::{DevCommRequirements, ExpertParallelOptions, Kernels, LaunchConfig, Window};
use devcomm_bench_kernels::p2p_copy;
use devcomm_testing::experts::{Batch, Routing};

use self::all_to_all::AllToAll;
use self::gathered::Gathered;
use self::layer::{Layer, Operation};
use super::benchmark::{Options, SIMULATED_BLOCKS};
use crate::cases::prelude::*;
use crate::cases::workloads::Message;
use crate::contenders::{PeerOptions, PeerWork};

/// The flags of `ep`. In the table of results the column of the reduction has the operation:
/// `dispatch`, which ends when rows and counts are received; `group`, which puts the rows in the
/// order of the experts; `combine`; or `layer`, all three. The size is the number of bytes that the
/// rank with the most rows receives from its peers, each row once, and returns to them in
/// `combine` (both in `layer`), or in `group` the bytes that it writes. The count is the number of
/// elements of a rank's tokens.
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
    #[arg(long, default_value = "random", value_parser = ["random", "skewed", "one"])]
    routing: String,

    /// Only these operations, comma-separated
    #[arg(long, value_enum, value_delimiter = ',', value_name = "OPERATION")]
    #[arg(default_values_t = Operation::ALL)]
    operations: Vec<Operation>,

    #[command(flatten)]
    grid: GridOptions,

    #[command(flatten)]
    peers: PeerOptions,
}

const TOKENS: [usize; 6] = [1, 8, 32, 128, 512, 4096];
const SIMULATED_TOKENS: [usize; 2] = [1, 5];

/// Threads and blocks of plain stores.
const STORE_THREADS: u32 = 512;
const STORE_BLOCKS: u32 = 128;

impl Benchmark for Experts {
    const NAME: &'static str = "ep";

    fn validate(&self) -> Result<()> {
        ensure!(!self.tokens.contains(&0), "a rank has at least one token");
        self.grid.validate()
    }

    fn peers(&self) -> Option<&PeerOptions> {
        Some(&self.peers)
    }

    fn work(&self, options: &Options, _: usize) -> Result<PeerWork> {
        let (tokens, [hidden, experts, top_k]) = self.sizes(options.simulate.is_some());
        let (tokens, routing) = (tokens.to_vec(), self.routing.clone());
        let operations = self.operations.iter().map(|operation| operation.name()).collect();
        Ok(PeerWork::Experts { tokens, hidden, experts, top_k, routing, operations })
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        let ranks = harness.rank.n_ranks();
        let collectives = harness.collectives().build(harness.comm)?;
        let nccl = job.nccl()?;
        let several_teams = harness.comm.properties()?.n_lsa_teams > 1;
        if ranks != 2 || several_teams {
            job.selection.omit(Variant::Write, anyhow!("it is for two ranks of one LSA team"))?;
        }
        if several_teams {
            let why = anyhow!("the form for high throughput is for one LSA team");
            job.selection.omit(Variant::RustThroughput, why)?;
        }
        let kernels = Kernels::load(harness.rank.context(), &crate::base::KERNELS)?;
        job.begin()?;
        for &tokens in self.sizes(harness.rank.is_simulated()).0 {
            let batch = Rc::new(self.batch(harness, tokens));
            let options = self.options(harness, &batch, tokens);
            let layer = Layer::new(harness, Variant::Rust, options, &batch)?;
            let mut layers = vec![Rc::clone(&layer)];
            if job.selection.has(Variant::RustThroughput) {
                let options = options.throughput(usize::MAX);
                layers.push(Layer::new(harness, Variant::RustThroughput, options, &batch)?);
            }
            // The gathered form is measured with NCCL's first configuration only, the all-to-all
            // also with the one that uses copy engines.
            let gathered = Gathered::new(&layer, &collectives, &nccl[0], &kernels)?;
            let differ = nccl.iter().filter(|nccl| nccl.matters(Variant::NcclSym, false));
            let exchanged = differ
                .map(|nccl| AllToAll::new(&layer, nccl, &kernels))
                .collect::<Result<Vec<_>>>()?;
            for &operation in &self.operations {
                self.compare(job, operation, &layers, (&gathered, &exchanged), &kernels)?;
            }
        }
        Ok(())
    }
}

impl Experts {
    /// Returns the numbers of tokens, and a token's elements, all experts and a token's experts.
    fn sizes(&self, is_simulated: bool) -> (&[usize], [usize; 3]) {
        let (tokens, default) = match is_simulated {
            true => (&SIMULATED_TOKENS[..], [264, 16, 3]),
            false => (&TOKENS[..], [7168, 256, 8]),
        };
        let given = [self.hidden, self.experts, self.top_k];
        let tokens = if self.tokens.is_empty() { tokens } else { &self.tokens };
        (tokens, [0, 1, 2].map(|i| given[i].unwrap_or(default[i])))
    }

    fn batch(&self, harness: &Harness<'_>, tokens: usize) -> Batch {
        let [hidden, experts, top_k] = self.sizes(harness.rank.is_simulated()).1;
        let routing = match &*self.routing {
            "skewed" => Routing::Skewed,
            "one" => Routing::One,
            _ => Routing::Random,
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
        (gathered, exchanged): (&Rc<Gathered<'a>>, &[Rc<AllToAll<'a>>]),
        kernels: &'a Kernels,
    ) -> Result<()> {
        let (harness, batch) = (layers[0].harness, &layers[0].batch);
        let me = harness.rank.rank();
        // The size is that of the rank with the most rows; an element has two bytes.
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
                let by_all = || Ok(gathered.contender(operation, variant));
                contenders.extend(job.selection.make(variant, by_all)?);
            }
            if job.selection.has(Variant::NcclAllToAll) {
                contenders.extend(exchanged.iter().map(|all| all.contender(operation)));
            }
            if job.selection.has(Variant::Write) && operation != Operation::Layer && size > 0 {
                contenders.push(by_stores(harness, kernels, size, &self.grid)?);
            }
        }
        let Batch { hidden, experts, top_k, .. } = **batch;
        let tokens = batch.tokens[me];
        let sizes = format!("{tokens}x{hidden}:{top_k}/{experts}");
        // The column of the algorithm has the sizes.
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

/// Returns a contender that stores this number of bytes between two ranks, in both directions and
/// in one round.
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
        let (reads, rounds) = (false, 1);
        let launch = p2p_copy::args(&dev_comm, &windows[0], &windows[1], bytes, reads, rounds);
        // SAFETY: the windows have the bytes on every rank; all ranks are in one LSA team, without
        // which `run` omits this variant.
        unsafe { launch.config(config).launch(&compiled.on(&harness.stream)) }
    };
    let info = compiled.info::<p2p_copy>()?;
    Ok(Contender::new(Variant::Write, work, message).by_kernel(config, info))
}
